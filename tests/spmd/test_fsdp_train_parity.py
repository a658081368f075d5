"""Ten steps of sharded training give the losses and parameters of unsharded training.

The reference trains the whole model on the batches of all ranks and adds their gradients: what DDP computes.
Every row of the table is one combination; together they pair every world size, FSDP and HSDP, the dense and
the MoE transformer, both optimizers, accumulation, clipping, bf16 compute with fp32 reduction, activation
checkpointing and what happens to the gathered weights after forward. Sums of two values do not depend on
their order, so up to two ranks every bit is equal (unless norms are taken, which add up many values).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._composable import checkpoint as recompute_activations
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdp_cases import (
    OPTIMIZERS,
    SEQ,
    VOCAB,
    Transformer,
    assert_same,
    average_gradients,
    build,
    fsdp,
    shard_blocks,
    tokens,
)
from rank_pool import spmd

STEPS = 10


@dataclass(frozen=True)
class Case:
    """One combination; ``replicas`` > 0 makes it HSDP."""

    ranks: int
    moe: bool
    optimizer: str
    replicas: int = 0
    accumulate: int = 1
    clip: float | None = None
    bf16: bool = False
    recompute: bool = False
    reshard: Any = None

    def __str__(self) -> str:
        parts = [
            f"{self.ranks} ranks" + (f" in {self.replicas} replicas" if self.replicas else ""),
            "moe" if self.moe else "dense",
            self.optimizer,
            f"{self.accumulate} microbatches" if self.accumulate > 1 else "",
            "clip" if self.clip else "",
            "bf16" if self.bf16 else "",
            "recompute" if self.recompute else "",
            "" if self.reshard is None else f"reshard={self.reshard}",
        ]
        return ", ".join(part for part in parts if part)

    @property
    def tolerance(self) -> float:
        """Relative, of a loss and of a parameter; rounding to bf16 turns a last bit into one of 2**-9."""
        if self.ranks <= 2 and self.clip is None:
            return 0.0
        return 2e-3 if self.bf16 else 1e-6


MATRIX = [
    Case(1, False, "adamw"),
    Case(1, True, "sgd", accumulate=2, clip=0.1, bf16=True, recompute=True),
    Case(2, False, "sgd", accumulate=3, reshard=False),
    Case(2, True, "adamw", bf16=True, recompute=True),
    Case(2, True, "adamw", clip=0.1, replicas=2, reshard=True),
    Case(2, False, "adamw", bf16=True, accumulate=2, reshard=True),
    Case(3, False, "adamw", accumulate=2, clip=0.5, recompute=True),
    Case(3, True, "sgd", bf16=True, reshard=False),
    Case(3, True, "adamw", reshard=True),
    Case(4, False, "sgd", reshard=2, clip=0.1),
    Case(4, True, "adamw", recompute=True),
    Case(4, False, "adamw", replicas=2, accumulate=2, clip=0.5),
    Case(4, True, "sgd", replicas=2, bf16=True, recompute=True, reshard=True),
    Case(4, True, "adamw", replicas=4, accumulate=3),
    Case(4, False, "sgd", replicas=1, bf16=True, clip=0.1),
]


def _batch(step: int, ranks: int, device: str) -> list[torch.Tensor]:
    """Twelve rows cut into the batches of the ranks: the same data for any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    return list(torch.randint(0, VOCAB, (12, SEQ + 1), generator=generator).to(device).chunk(ranks))


class _Reference:
    """Unsharded training on the batches of all ranks."""

    def __init__(self, model: torch.nn.Module, case: Case) -> None:
        self.model, self.case = model, case
        self.optimizer = OPTIMIZERS[case.optimizer](model.parameters())
        self.sums: dict[int, dict[str, torch.Tensor]] = {}

    def add_gradients(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """The losses of the parts; the gradients of each part's microbatches are added in fp32."""
        losses = []
        for index, part in enumerate(parts):
            leaves = {n: p.detach() for n, p in self.model.named_parameters()}
            if self.case.bf16:
                leaves = {n: p.bfloat16() for n, p in leaves.items()}
            leaves = {n: p.requires_grad_() for n, p in leaves.items()}
            losses.append(torch.func.functional_call(self.model, leaves, (part,)))
            (losses[-1] / self.case.accumulate).backward()
            sums = self.sums.setdefault(index, {})
            for name, leaf in leaves.items():
                sums[name] = sums[name] + leaf.grad.float() if name in sums else leaf.grad.float()
        return losses

    def average(self) -> torch.Tensor | None:
        """The mean over the parts becomes the gradient; its norm if it is clipped."""
        for name, parameter in self.model.named_parameters():
            parameter.grad = sum(sums[name] for sums in self.sums.values()) / len(self.sums)
        self.sums.clear()
        return None if self.case.clip is None else _clip(self.model.parameters(), self.case.clip)

    def step(self) -> None:
        """One step of the optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def _sharded(model: torch.nn.Module, case: Case, rank: Any) -> torch.nn.Module:
    mesh = None
    if case.replicas:
        mesh = rank.mesh(case.replicas, case.ranks // case.replicas, names=("replicate", "shard"))
    precision = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.bf16 else None
    options = {} if precision is None else {"mp_policy": precision}
    if case.recompute:
        for layer in model.layers:
            recompute_activations(layer)
    return shard_blocks(model, mesh=mesh, reshard_after_forward=case.reshard, **options)


def _clip(parameters: Any, limit: float) -> torch.Tensor:
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _train(rank: Any, model: Any, optimizer: Any, reference: _Reference, case: Case, steps: range) -> None:
    """Train both; assert equal losses at each step."""
    for step in steps:
        for micro in range(case.accumulate):
            model.set_requires_gradient_sync(micro == case.accumulate - 1)
            parts = _batch(step * case.accumulate + micro, case.ranks, rank.device)
            loss = model(parts[rank.rank])
            (loss / case.accumulate).backward()
            expected = reference.add_gradients(parts)[rank.rank]
            torch.testing.assert_close(loss, expected, rtol=case.tolerance, atol=0)
        norm = reference.average()
        if norm is not None:
            clipped = _clip(model.parameters(), case.clip)
            torch.testing.assert_close(clipped, norm, rtol=case.tolerance, atol=0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        reference.step()


def _parity(rank: Any, case: Case) -> None:
    model, whole = build(lambda: Transformer(moe=case.moe), rank.device)
    _sharded(model, case, rank)
    reference = _Reference(whole, case)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    _train(rank, model, optimizer, reference, case, range(STEPS))
    assert_same(model, whole, tolerance=case.tolerance)


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_training_equals_unsharded_training(tmp_path, case):
    spmd(case.ranks)(_parity)(world_size=case.ranks, tmp_path=tmp_path, case=case)


def _first_half(rank: Any, case: Case) -> None:
    model, whole = build(lambda: Transformer(moe=case.moe), rank.device)
    _sharded(model, case, rank)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    _train(rank, model, optimizer, _Reference(whole, case), case, range(STEPS // 2))
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    dcp.save(states, checkpoint_id=rank.shared_dir / "checkpoint")


def _second_half(rank: Any, case: Case, before: Case) -> None:
    model, whole = build(lambda: Transformer(moe=case.moe), rank.device)
    _sharded(model, case, rank)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    dcp.load(states, checkpoint_id=rank.shared_dir / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])
    reference = _Reference(whole, case)
    for step in range(STEPS // 2):
        for micro in range(case.accumulate):
            reference.add_gradients(_batch(step * case.accumulate + micro, before.ranks, rank.device))
        reference.average()
        reference.step()
    _train(rank, model, optimizer, reference, case, range(STEPS // 2, STEPS))
    assert_same(model, whole, tolerance=case.tolerance)


@pytest.mark.parametrize(
    "before",
    [Case(2, True, "adamw", accumulate=2, clip=0.5), Case(4, True, "sgd", replicas=2, recompute=True)],
    ids=str,
)
def test_resumed_at_another_world_size(tmp_path, before):
    """Five steps, a checkpoint, five steps on three ranks: the losses of ten steps without interruption."""
    after = replace(before, ranks=3, replicas=0)
    spmd(before.ranks)(_first_half)(world_size=before.ranks, tmp_path=tmp_path, case=before)
    spmd(3)(_second_half)(world_size=3, tmp_path=tmp_path, case=after, before=before)


@spmd(2)
def test_gradients_equal_before_the_step(rank):
    model, reference = build(lambda: Transformer(moe=True), rank.device)
    shard_blocks(model)
    for step in range(2):  # gradients accumulate over the two backwards
        model(tokens(rank, step)).backward()
        reference(tokens(rank, step)).backward()
    average_gradients(reference)
    assert_same(model, reference, tolerance=1e-6, grads=True)
