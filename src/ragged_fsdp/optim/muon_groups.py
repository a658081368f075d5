"""Binds parameters to exchanges: one per exchange group, agreed upon by its ranks before its first use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ragged_fsdp.optim.matrices import MatrixRule
from ragged_fsdp.optim.muon_adamw import local_of
from ragged_fsdp.optim.muon_exchange import Exchange
from ragged_fsdp.optim.muon_plan import ExchangePlan, plan_exchange
from ragged_fsdp.optim.muon_shards import Spread, exchange_group, parameter_layout, spread_of

__all__ = ["BoundExchange", "Member", "bind_exchanges"]

Member = tuple[str | None, Tensor, MatrixRule, int]
"""Name, parameter, its matrices, and its family (the index of its param group)."""


@dataclass(frozen=True)
class BoundExchange:
    """An exchange, its parameters in the order of the plan, and the device its buffers live on."""

    exchange: Exchange
    names: tuple[str, ...]
    parameters: tuple[Tensor, ...]
    device: torch.device
    ranks: tuple[int, ...]

    def roots(self) -> list[list[int]]:
        """For each parameter, the global ranks that work on its matrices."""
        plan = self.exchange.plan
        found: list[set[int]] = [set() for _ in self.parameters]
        for task in plan.tasks:
            found[task.parameter].add(self.ranks[task.root])
        return [sorted(ranks) for ranks in found]


def bind_exchanges(
    members: Sequence[Member], bucket_numel: int, in_flight: int, dtype: torch.dtype
) -> tuple[BoundExchange, ...]:
    """One exchange per group of ranks (and device), in the order in which the parameters name them."""
    by_group: dict[tuple[tuple[int, ...], torch.device], list[tuple[Member, Spread]]] = {}
    for member in members:
        spread = spread_of(member[1], member[2])
        by_group.setdefault((spread.ranks, _device(member[1], spread)), []).append((member, spread))
    return tuple(
        _bind(items, device, bucket_numel, in_flight, dtype) for (_, device), items in by_group.items()
    )


def _device(parameter: Tensor, spread: Spread) -> torch.device:
    """Buffers live where the group communicates; parameters may be offloaded to the host."""
    if spread.mesh is None or not spread.mesh_dims:
        return local_of(parameter).device
    kind = spread.mesh.device_type
    return (
        torch.device(kind)
        if kind == "cpu"
        else torch.device(kind, torch.get_device_module(kind).current_device())
    )


def _bind(
    items: list[tuple[Member, Spread]],
    device: torch.device,
    bucket_numel: int,
    in_flight: int,
    dtype: torch.dtype,
) -> BoundExchange:
    spread = items[0][1]
    group = exchange_group(spread)
    names = [name if name is not None else f"parameter {i}" for i, ((name, _, _, _), _) in enumerate(items)]
    plan, error = None, None
    try:
        layouts = [
            parameter_layout(label, parameter, rule, own_spread, family)
            for label, ((_, parameter, rule, family), own_spread) in zip(names, items)
        ]
        plan = plan_exchange(layouts, len(spread.ranks), bucket_numel)
    except ValueError as caught:
        error = caught
    _agree(plan, error, group, spread)
    assert plan is not None  # _agree raises on every rank otherwise
    exchange = Exchange(plan, spread.index, group, dtype, in_flight)
    parameters = tuple(parameter for (_, parameter, _, _), _ in items)
    ranks = spread.ranks if spread.mesh_dims else (dist.get_rank() if dist.is_initialized() else 0,)
    return BoundExchange(exchange, tuple(names), parameters, device, ranks)


def _agree(
    plan: ExchangePlan | None, error: ValueError | None, group: dist.ProcessGroup | None, spread: Spread
) -> None:
    """Compare plans between the ranks of the group, once: a difference raises everywhere, none hangs."""
    if group is None:
        if error is not None:
            raise error
        return
    mine = (plan.digest if plan is not None else None, str(error) if error is not None else None)
    answers: list[tuple[str | None, str | None]] = [(None, None)] * len(spread.ranks)
    dist.all_gather_object(answers, mine, group=group)
    failed = {spread.ranks[i]: text for i, (_, text) in enumerate(answers) if text is not None}
    if failed:
        raise ValueError(f"Muon cannot plan its exchange; by rank: {failed}.") from error
    digests = {spread.ranks[i]: digest for i, (digest, _) in enumerate(answers)}
    if len(set(digests.values())) > 1:
        raise RuntimeError(
            "the ranks of an exchange group made different Muon plans; parameters, their order, shapes, "
            f"placements and param groups must be the same on all of them. Digests by rank: {digests}."
        )
