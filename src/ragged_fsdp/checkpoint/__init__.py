"""Checkpoints: sharded through ``torch.distributed.checkpoint``, complete or not there at all."""
