"""Where tokens went, and experts that move to where there is room.

    load_of            rows sent to each expert of each layer since the last call, of all ranks
    balanced_splits    the splits whose busiest rank has the least load
    fit_capacity       room for what was sent, and a margin
    move_experts       from one split to another between two steps, optimizer state included, bit for bit

A rank that moves experts sends and receives what changes hands and gathers, one layer after the other, what
its data-parallel group holds of them: memory peaks at the experts of one layer, as in a forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ragged_fsdp.agreement import done_alike
from ragged_fsdp.dbuffer.checks import device_of
from ragged_fsdp.experts.again import check_cut, cut_again
from ragged_fsdp.experts.all_to_all import AllToAll
from ragged_fsdp.experts.layers import expert_parameters
from ragged_fsdp.experts.levels import TwoLevel
from ragged_fsdp.experts.parallel import SplitExperts, split_experts_of, split_placement
from ragged_fsdp.experts.split import ExpertSplit
from ragged_fsdp.fsdp.runtime.state import state_of
from ragged_fsdp.optim.base import ExactStateOptimizer

__all__ = ["ExpertLoad", "balanced_splits", "fit_capacity", "load_of", "move_experts"]


@dataclass(frozen=True)
class ExpertLoad:
    """Rows that each expert of each layer was sent, over all ranks; tensors stay on their device."""

    rows: dict[str, Tensor]
    """By name of the module, one number per expert."""
    dropped: Tensor
    """Rows that did not fit a capacity, of all layers."""
    splits: dict[str, ExpertSplit]
    """Who held which experts."""

    def summary(self) -> dict[str, float]:
        """The busiest rank and the busiest expert of any layer, as multiples of the mean; and drops.

        Asks the device for the numbers.
        """
        busiest_rank = busiest_expert = 1.0
        total = 0.0
        for name, counts in self.rows.items():
            load = [float(count) for count in counts.tolist()]
            total += sum(load)
            if any(load):
                busiest_rank = max(busiest_rank, self.splits[name].busiest(load))
                busiest_expert = max(busiest_expert, max(load) * len(load) / sum(load))
        dropped = float(self.dropped)
        return {
            "busiest_rank": busiest_rank,
            "busiest_expert": busiest_expert,
            "dropped": dropped,
            "dropped_share": dropped / total if total else 0.0,
        }


def load_of(model: nn.Module, group: dist.ProcessGroup | None = None) -> ExpertLoad:
    """Take what the layers have counted in training since the last call, summed over ``group`` (all ranks).

    Every rank of the group calls it; one small all-reduce, and nothing waits for the device. Where ranks
    share their tokens (``token_mesh``) each has counted its part.
    """
    found = split_experts_of(model)
    if not found:
        raise ValueError("load_of: no experts are spread over ranks; call expert_parallel first.")
    device = device_of(next(iter(found.values())).mesh)
    parts, dropped = [], torch.zeros(1, dtype=torch.int64, device=device)
    for experts in found.values():
        counts = experts.load
        parts.append(
            torch.zeros(experts.split.experts, dtype=torch.int64, device=device) if counts is None else counts
        )
        if experts.dropped is not None:
            dropped = dropped + experts.dropped
    flat = torch.cat([*parts, dropped])
    for counts in (counts for e in found.values() for counts in (e.load, e.dropped)):
        if counts is not None:
            counts.zero_()
    dist.all_reduce(flat, group=group)
    *rows, dropped = flat.split([*(len(part) for part in parts), 1])
    return ExpertLoad(dict(zip(found, rows)), dropped[0], {n: e.split for n, e in found.items()})


def balanced_splits(load: ExpertLoad) -> dict[str, ExpertSplit]:
    """For each layer the split whose busiest rank would have had the least of ``load``; asks the device."""
    return {
        name: ExpertSplit.by_load(rows.tolist(), load.splits[name].ranks) for name, rows in load.rows.items()
    }


def fit_capacity(
    model: nn.Module, margin: float = 1.1, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Let the capacity of each layer follow its load: the most that any rank sent another, times ``margin``.

    Every rank of ``group``, or all, calls it between steps; one all-reduce, and a wait for the device. Layers
    without a capacity, or that were sent nothing since, stay as they are; experts that move start again from
    the capacity that was given.

    Returns:
        The new capacities, by name of the module.
    """
    if not margin >= 1:
        raise ValueError(f"fit_capacity: margin must be at least 1, got {margin!r}.")
    found = {}
    for name, experts in split_experts_of(model).items():
        dispatcher = getattr(experts.dispatcher, "inner", experts.dispatcher)
        if isinstance(dispatcher, AllToAll | TwoLevel) and dispatcher.needed is not None:
            found[name] = dispatcher
    if not found:
        return {}
    needed = torch.stack([d.needed for d in found.values() if d.needed is not None]).double()
    dist.all_reduce(needed, op=dist.ReduceOp.MAX, group=group)
    fitted = {name: margin * most for name, most in zip(found, needed.tolist()) if most}
    for name, capacity in fitted.items():
        found[name].capacity = capacity
        found[name].forget_needed()
    return fitted


@torch.no_grad()
def move_experts(
    model: nn.Module, splits: Mapping[str, ExpertSplit], optimizer: torch.optim.Optimizer | None = None
) -> list[str]:
    """Let experts lie as ``splits`` says from the next step on; every rank calls it, between steps.

    Values, and the optimizer's state with an entry per element or per block, move bit for bit; the parameters
    stay the objects that the optimizer holds. Only modules under our ``fully_shard`` can move.

    Args:
        model: after ``expert_parallel`` and ``fully_shard``.
        splits: by name of the module of experts, as :func:`balanced_splits` returns it; those of other ranks
            must be the same.
        optimizer: the one that holds the model's parameters, if there is one.

    Returns:
        The names of the modules that moved: those whose split changed.
    """
    found = split_experts_of(model)
    if not found:
        raise ValueError("move_experts: no experts are spread over ranks; call expert_parallel first.")
    moving = done_alike(  # all that can be wrong, before the first moves
        "move experts",
        lambda: _checked(found, splits, optimizer),
        lambda moving: "\n".join(f"{name} {split.held}" for name, split in moving.items()),
        _groups(found.values()),
        device_of(next(iter(found.values())).mesh),
    )
    for name, split in moving.items():
        _move(found[name], split, optimizer)
    if moving and optimizer is not None:
        # as after a load: optimizers that plan where parameters and state lie do so anew
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
    return list(moving)


def _checked(
    found: Mapping[str, SplitExperts],
    splits: Mapping[str, ExpertSplit],
    optimizer: torch.optim.Optimizer | None,
) -> dict[str, ExpertSplit]:
    """The splits that are others than now, in the order of the model: ranks may give them in any."""
    for name, split in splits.items():
        if name not in found:
            raise ValueError(f"move_experts: {name!r} is not spread; there are {', '.join(found)}.")
        now = found[name].split
        if (split.ranks, split.experts) != (now.ranks, now.experts):
            raise ValueError(f"move_experts: {name} has {now}, which cannot become {split}.")
    moving = {
        name: splits[name] for name in found if splits.get(name, found[name].split) != found[name].split
    }
    for name in moving:
        _check_state(name, found[name].module, optimizer)
        check_cut(found[name].module, expert_parameters(found[name].module))
    return moving


def _groups(found: Collection[SplitExperts]) -> Iterable[dist.ProcessGroup | None]:
    """The groups that experts are spread over, then the groups that hold the same ones."""
    states = [state for experts in found if (state := state_of(experts.module)) is not None]
    data = [group for state in states for group in state.call[1].key()]
    return dict.fromkeys([*(experts.mesh.get_group() for experts in found), *data])


def _move(experts: SplitExperts, split: ExpertSplit, optimizer: torch.optim.Optimizer | None) -> None:
    module = experts.module
    parameters: dict[str, Any] = expert_parameters(module)
    cut_again(module, {name: [split_placement(split)] for name in parameters})
    experts.use(split)
    if optimizer is None:
        return
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for parameter in parameters.values():
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, DTensor):
                placements = _placements(optimizer, parameter, groups[parameter], key, value)
                state[key] = value.redistribute(placements=placements)


def _placements(
    optimizer: torch.optim.Optimizer, parameter: Any, group: dict[str, Any], key: str, value: DTensor
) -> Any:
    """Where a tensor of the state belongs now that its parameter has moved."""
    if value.shape == parameter.shape:
        return parameter.placements
    assert isinstance(optimizer, ExactStateOptimizer)  # checked before anything moved
    form = optimizer._expected_state(parameter, group)[key]
    assert form is not None and form.placements is not None
    return form.placements


def _check_state(name: str, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise on state that cannot follow its parameter, before anything has moved."""
    for own, parameter in expert_parameters(module).items():
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.ndim == 0:
                continue
            follows = isinstance(value, DTensor) and (
                value.shape == parameter.shape or isinstance(optimizer, ExactStateOptimizer)
            )
            if not follows:
                raise NotImplementedError(
                    f"move_experts: the state {key!r} of {name}.{own}, of shape {tuple(value.shape)}, is not "
                    f"laid out like the parameter, so it cannot move with it."
                )
