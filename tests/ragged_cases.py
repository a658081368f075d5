"""Tensors and placements that the tests of ragged DTensors share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor import RaggedShard, distribute_tensor
from rank_pool import DEVICE

__all__ = ["assert_same", "fewer", "numbers", "ragged", "whole", "world_units", "worlds"]


def worlds(*sizes: int) -> tuple[int, ...]:
    """World sizes of a test: as given on CPU; on CUDA 2 and 4, so that few NCCL pools are started."""
    if DEVICE == "cpu":
        return sizes
    return tuple(dict.fromkeys(2 if size <= 2 else 4 for size in sizes))


def fewer(items: Sequence[Any]) -> list[Any]:
    """All items on CPU; on CUDA, where every call takes longer, the first and the last."""
    return list(items) if DEVICE == "cpu" or len(items) < 3 else [items[0], items[-1]]


def numbers(seed: int, *shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, the same on every rank and device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32).to(device=device, dtype=dtype)


def world_units(total: int, ranks: int, seed: int = 0) -> tuple[int, ...]:
    """Units that sum to ``total``, uneven, with an empty rank where there are three or more."""
    weights = [(seed + 3 * rank + 1) % (ranks + 1) for rank in range(ranks)]
    if ranks > 2:
        weights[1] = 0
    if not sum(weights):
        weights[0] = 1
    units = [total * w // sum(weights) for w in weights]
    units[max(range(ranks), key=lambda r: weights[r])] += total - sum(units)
    return tuple(units)


def ragged(tensor: torch.Tensor, mesh: Any, *, prefix: int = 1, seed: int = 0) -> DTensor:
    """``tensor`` under uneven ragged placements on a 1-D mesh, cutting through ``prefix`` dims."""
    units = world_units(math.prod(tensor.shape[:prefix]), mesh.size(), seed)
    return distribute_tensor(tensor, mesh, [RaggedShard(tuple(range(prefix)), units)])


def whole(value: Any) -> Any:
    """The full plain tensor of a DTensor; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_same(actual: Any, expected: Any, note: str = "", exact: bool = False) -> None:
    """Equal values (bit for bit if ``exact``), whichever of the two is distributed."""
    actual, expected = whole(actual), whole(expected)
    if isinstance(expected, Sequence):
        assert len(actual) == len(expected), note
        for a, e in zip(actual, expected):
            assert_same(a, e, note, exact)
        return
    tolerance = {"rtol": 0, "atol": 0} if exact else {}
    torch.testing.assert_close(
        actual.cpu(), expected.cpu(), msg=(lambda m: f"{note}: {m}") if note else None, **tolerance
    )
