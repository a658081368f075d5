"""Accelerate's training loop on ragged parameters, with optimizer states in 8 bits.

    torchrun --nproc-per-node 8 examples/accelerate_ragged.py --steps 20

Accelerate calls torch's fully_shard inside prepare(); ragged_fully_shard replaces it there. Accelerate offers
FSDP on accelerators only, so this needs GPUs.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from ragged_fsdp.integrations.substitute import ragged_fully_shard
from ragged_fsdp.optim import AdamW8bit, block_policy

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def train(steps: int) -> list[float]:
    """Prepare, train, return the losses of this rank."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    torch.manual_seed(0)  # the same weights on every rank
    model = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=128, vocab_size=256, use_cache=False))
    optimizer = AdamW8bit(model.parameters(), lr=3e-3)
    data = torch.arange(64)[:, None] + torch.arange(
        32
    )  # rows that count: each token is the one before plus one
    loader = DataLoader(data, batch_size=2, shuffle=True)
    with ragged_fully_shard(block_policy()):  # blocks of 8-bit states are not cut
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    while len(losses) < steps:
        for ids in loader:
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            accelerator.print(f"step {len(losses)}: loss {losses[-1]:.4f}")
            if len(losses) == steps:
                break
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    if not torch.accelerator.is_available():
        parser.error("Accelerate has FSDP on accelerators only; on CPUs it would train with DDP, unsharded")
    train(given.steps)
