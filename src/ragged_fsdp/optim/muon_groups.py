"""Binds parameters to exchanges: one per exchange group, agreed upon by its ranks before its first use."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ragged_fsdp.optim.matrices import MatrixRule
from ragged_fsdp.optim.muon_exchange import Exchange
from ragged_fsdp.optim.muon_plan import ExchangePlan, plan_exchange
from ragged_fsdp.optim.muon_shards import Spread, exchange_group, parameter_layout, spread_of

__all__ = ["Binder", "BoundExchange", "Member"]

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


class Binder:
    """Makes and remembers exchanges by the parameters they are for.

    A few sets are remembered (layers may be frozen and thawed); the oldest is forgotten, so that parameters
    taken out of the optimizer are freed. Ranks that ask for the same sets in the same order forget alike:
    sets that may differ between ranks belong in a binder of their own.
    """

    _MOST = 8

    def __init__(self, bucket_numel: int, in_flight: int, dtype: torch.dtype) -> None:
        self._bucket_numel = bucket_numel
        self._in_flight = in_flight
        self._dtype = dtype
        self._bound: dict[Hashable, tuple[BoundExchange, ...]] = {}

    def exchanges(self, key: Hashable, members: Callable[[], Sequence[Member]]) -> tuple[BoundExchange, ...]:
        """One exchange per group of ranks (and device), in the order in which the parameters name them."""
        if key not in self._bound:
            made = self._bind_all(members())
            if len(self._bound) == self._MOST:
                del self._bound[next(iter(self._bound))]
            self._bound[key] = made
        return self._bound[key]

    def _bind_all(self, members: Sequence[Member]) -> tuple[BoundExchange, ...]:
        by_group: dict[tuple[tuple[int, ...], torch.device], list[tuple[Member, Spread]]] = {}
        for member in members:
            name, parameter, rule, _ = member
            try:
                spread = spread_of(parameter, rule)
            except ValueError as error:
                raise ValueError(
                    f"{name or f'parameter of shape {tuple(parameter.shape)}'}: {error}"
                ) from None
            by_group.setdefault((spread.ranks, _device(parameter, spread)), []).append((member, spread))
        return tuple(self._bind(items, device) for (_, device), items in by_group.items())

    def _bind(self, items: list[tuple[Member, Spread]], device: torch.device) -> BoundExchange:
        spread = items[0][1]
        group = exchange_group(spread)
        names = [
            name if name is not None else f"parameter {i}" for i, ((name, _, _, _), _) in enumerate(items)
        ]
        plan, error = None, None
        try:
            layouts = [
                parameter_layout(label, parameter, rule, own_spread, family)
                for label, ((_, parameter, rule, family), own_spread) in zip(names, items)
            ]
            plan = plan_exchange(layouts, len(spread.ranks), self._bucket_numel)
        except ValueError as caught:
            error = caught
        _agree(plan, (self._dtype, self._in_flight), error, group, spread)
        assert plan is not None  # _agree raises on every rank otherwise
        exchange = Exchange(plan, spread.index, group, self._dtype, self._in_flight)
        parameters = tuple(parameter for (_, parameter, _, _), _ in items)
        ranks = spread.ranks if spread.mesh_dims else (dist.get_rank() if dist.is_initialized() else 0,)
        return BoundExchange(exchange, tuple(names), parameters, device, ranks)


def _device(parameter: Tensor, spread: Spread) -> torch.device:
    """Work is done on the device of the mesh; parameters may be offloaded to the host."""
    if spread.mesh is None:
        return parameter.device
    kind = spread.mesh.device_type
    return (
        torch.device(kind)
        if kind == "cpu"
        else torch.device(kind, torch.get_device_module(kind).current_device())
    )


def _agree(
    plan: ExchangePlan | None,
    transport: tuple[torch.dtype, int],
    error: ValueError | None,
    group: dist.ProcessGroup | None,
    spread: Spread,
) -> None:
    """Compare plans between the ranks of the group, once: a difference raises everywhere, none hangs."""
    if group is None:
        if error is not None:
            raise error
        return
    digest = f"{plan.digest} {transport}" if plan is not None else None
    mine = (digest, str(error) if error is not None else None)
    answers: list[tuple[str | None, str | None]] = [(None, None)] * len(spread.ranks)
    dist.all_gather_object(answers, mine, group=group)
    failed = {spread.ranks[i]: text for i, (_, text) in enumerate(answers) if text is not None}
    if failed:
        raise ValueError(f"Muon cannot plan its exchange; by rank: {failed}.") from error
    digests = {spread.ranks[i]: digest for i, (digest, _) in enumerate(answers)}
    if len(set(digests.values())) > 1:
        raise RuntimeError(
            "the ranks of an exchange group made different Muon plans; parameters, their order, shapes, "
            "placements and param groups, ns_dtype, bucket_numel and buckets_in_flight must be the same on "
            f"all of them. Digests by rank: {digests}."
        )
