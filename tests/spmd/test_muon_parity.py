"""Muon on sharded parameters equals Muon in one process, whatever the placement and the world size."""

from __future__ import annotations

import pytest
import torch

import muon_cases as cases
from rank_pool import spmd

OPTIONS = {
    "lr": 0.02,
    "weight_decay": 0.1,
    "adamw_lr": 0.01,
    "adjust_lr_fn": "spectral",
    "split": cases.split,
    "ns_dtype": torch.float32,
    "bucket_numel": 700,
}


def train(place, steps: int = 3, **options):
    """Parameters after some steps from the same values and gradients, and the optimizer."""
    from ragged_fsdp.optim.muon import Muon

    named = {n: torch.nn.Parameter(place(v)) for n, v in cases.full_tensors(0).items()}
    optimizer = Muon(named.items(), **{**OPTIONS, **options})
    for step in range(steps):
        for name, gradient in cases.full_tensors(100 + step).items():
            named[name].grad = place(gradient)
        optimizer.step()
    return named, optimizer


def assert_equal(named, expected, **tolerance) -> None:
    for name, parameter in named.items():
        found, wanted = cases.whole(parameter.detach()), expected[name].detach()
        if tolerance:
            torch.testing.assert_close(found, wanted, **tolerance)
        else:
            assert torch.equal(found, wanted), f"{name}: {(found - wanted).abs().max()}"


@pytest.mark.parametrize("kind", ["ragged", "ragged_rows", "shard0", "shard_last", "replicate"])
@spmd(1, 2, 3, 4)
def test_one_mesh_dim(rank, kind):
    """fp32 on the CPU: bit by bit; with empty shards, uneven shards and replicas."""
    mesh = rank.mesh()
    named, _ = train(lambda t: cases.place(t, mesh, kind))
    expected, _ = train(lambda t: t.to(rank.device))
    assert_equal(named, expected, **({} if rank.device == "cpu" else {"rtol": 1e-4, "atol": 1e-5}))
