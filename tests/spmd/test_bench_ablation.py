"""The ablation's variants compute the same, and each leaves out what its name says."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from collective_calls import noted
from fsdp_cases import ragged_only
from ragged_fsdp.models import MoEConfig
from rank_pool import Rank, spmd

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.ablation.worker import VARIANTS, training

pytestmark = ragged_only
TINY = MoEConfig(hidden=64, layers=3, heads=2, kv_heads=1, experts=4, expert_hidden=48)
STEP = argparse.Namespace(batch=2, seq_len=8)


@spmd(2)
@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_variants_train_alike_to_the_bit(rank: Rank, variant: str) -> None:
    found = []
    for one in (VARIANTS[0], variant):
        model, step = training(one, TINY, STEP, torch.device(rank.device))
        losses = [step() for _ in range(4)]
        found.append((losses, [p.full_tensor() for p in model.parameters()]))
    (losses, weights), (expected, expected_weights) = found
    assert losses == expected
    assert all(torch.equal(*pair) for pair in zip(weights, expected_weights))
    assert losses[-1] < losses[0]


class _Copies(TorchDispatchMode):
    """Counts the elements that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if func.__name__.split(".")[0] in ("copy_", "_foreach_copy_"):
            self.numel += sum(t.numel() for t in tree_leaves(args[0]))
        return func(*args, **(kwargs or {}))


@spmd(3)
def test_without_the_buffer_weights_are_copied_once_more_and_nothing_else(rank: Rank) -> None:
    copied, losses, calls = {}, {}, {}
    for variant in VARIANTS[:2]:
        _, step = training(variant, TINY, STEP, torch.device(rank.device))
        step()
        with noted() as notes, _Copies() as copies:
            losses[variant] = step()
        calls[variant] = [(call.kind, call.written.shape, call.read.shape) for call in notes.calls]
        copied[variant] = copies.numel
        gathered = sum(call.written.numel() for call in notes.of("gather"))
    assert losses["all on"] == losses["without DBuffer"]
    assert calls["all on"] == calls["without DBuffer"]
    assert copied["without DBuffer"] - copied["all on"] == gathered > 0
