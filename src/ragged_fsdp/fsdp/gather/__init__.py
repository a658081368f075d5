"""Transports of weights: how the shards of all ranks become what a module computes with."""
