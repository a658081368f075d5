"""Optimizer state that follows its parameter: wrapping, checks, gradients and step counts.

State of a DTensor parameter is a DTensor too, over the same mesh: of the parameter's layout if it has one
value per element, of its blocks' layout if it has one per block. Checkpoints then save, load and reshard
it like the parameter. All of it is local bookkeeping: nothing here communicates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp.dtensor import is_ragged, ragged_layout, ragged_spec, wrap_local
from ragged_fsdp.dtensor.geometry import shard_box
from ragged_fsdp.optim.quant_grid import (
    BlockGrid,
    LocalBlocks,
    blocks_placements,
    locate_blocks,
    whole_blocks,
)

__all__ = [
    "Gradients",
    "StateForm",
    "StepCounters",
    "form_like",
    "form_over_blocks",
    "local_of",
    "require_matching_grad",
    "require_optimisable",
    "require_state",
    "require_whole_blocks",
    "state_like",
    "state_over_blocks",
]


def local_of(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, the tensor itself otherwise. Called without autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def state_like(param: Tensor, local: Tensor) -> Tensor:
    """``local``, one value per element of the parameter's local part, laid out like the parameter."""
    return _wrap(param, local, tuple(param.shape), getattr(param, "placements", ()))


def state_over_blocks(param: Tensor, grid: BlockGrid, local: Tensor) -> Tensor:
    """``local``, (blocks on this rank, *rest) values, laid out like the blocks of the parameter."""
    rest = tuple(local.shape[1:])
    if not isinstance(param, DTensor):
        return local.view(*grid.grid_shape, *rest)
    placements = blocks_placements(grid, param.device_mesh.shape, param.placements)
    if placements is None:
        raise ValueError(
            f"blocks of a parameter of shape {grid.shape} under {param.placements} have no layout."
        )
    return _wrap(param, local, (*grid.grid_shape, *rest), placements)


def _wrap(param: Tensor, local: Tensor, shape: tuple[int, ...], placements: Sequence[Placement]) -> Tensor:
    if not isinstance(param, DTensor):
        return local
    spec = ragged_spec(param.device_mesh, tuple(placements), shape, local.dtype)
    if is_ragged(spec):
        local_shape = ragged_layout(spec).local_shape
    else:
        coordinate = tuple(param.device_mesh.get_coordinate() or ())
        local_shape = shard_box(shape, param.device_mesh.shape, coordinate, spec.placements)[1]
    return wrap_local(local.view(local_shape), spec)


@dataclass(frozen=True)
class StateForm:
    """What a tensor of a parameter's state must be; ``placements`` is None of plain tensors."""

    shape: tuple[int, ...]
    placements: tuple[Placement, ...] | None
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        where = "a plain tensor" if self.placements is None else f"a DTensor under {self.placements}"
        return f"{where} of shape {self.shape}" + (f" and {self.dtype}" if self.dtype else "")

    def accepts(self, value: Tensor) -> bool:
        """Whether a tensor has this form; any dtype will do if none is asked for."""
        return self == form_like(value, self.dtype and value.dtype)


def form_like(param: Tensor, dtype: torch.dtype | None = None) -> StateForm:
    """Of state with one value per element."""
    return StateForm(tuple(param.shape), getattr(param, "placements", None), dtype)


def form_over_blocks(
    param: Tensor, grid: BlockGrid, dtype: torch.dtype | None = None, rest: tuple[int, ...] = ()
) -> StateForm:
    """Of state with ``rest`` values per block."""
    placements = None
    if isinstance(param, DTensor):
        placements = blocks_placements(grid, param.device_mesh.shape, param.placements)
    return StateForm((*grid.grid_shape, *rest), placements, dtype)


def require_state(
    name: str, param: Tensor, state: Mapping[str, Any], expected: Mapping[str, StateForm | None]
) -> None:
    """Raise unless the state has all that is expected, in its form (None: any) and on the right device."""
    if missing := [key for key in expected if key not in state]:
        raise RuntimeError(
            f"{name}: state {missing} is missing, found {sorted(state)}: it was saved by another "
            "optimizer or under other options."
        )
    for key, form in expected.items():
        value = state[key]
        if form is None:
            continue
        if not isinstance(value, Tensor) or not form.accepts(value):
            found = form_like(value, value.dtype) if isinstance(value, Tensor) else type(value).__name__
            raise RuntimeError(f"{name}: state {key} must be {form}, got {found}.")
        here, found_on = local_of(param).device, local_of(value).device  # of DTensors kept on the host too
        if found_on != here:
            raise RuntimeError(f"{name}: state {key} must be on {here}, got {found_on}.")


def require_whole_blocks(name: str, param: Tensor, grid: BlockGrid) -> LocalBlocks:
    """The blocks on this rank; raises alike on every rank if the sharding cuts one anywhere."""
    if not isinstance(param, DTensor):
        return whole_blocks(grid)
    mesh_shape = param.device_mesh.shape
    parts = locate_blocks(grid, mesh_shape, param.placements)
    block = f"{grid.block_rows} x {grid.block_cols} blocks" if grid.tiled else f"runs of {grid.cols} elements"
    if None in parts:
        raise ValueError(
            f"{name}: the sharding {param.placements} of shape {grid.shape} cuts {block}; let the "
            f"orig_param_policy of fully_shard answer {grid.granularity} for it (block_policy does), or "
            "exclude the parameter."
        )
    if blocks_placements(grid, mesh_shape, param.placements) is None:
        raise ValueError(
            f"{name}: the {block} of shape {grid.shape} under {param.placements} are whole, but "
            f"no placement describes them; shard it with a granularity of {grid.granularity}, or exclude it."
        )
    coordinate = param.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"{name}: this rank is not in the parameter's mesh {param.device_mesh}.")
    index = 0
    for size, place in zip(mesh_shape, coordinate):
        index = index * size + place
    part = parts[index]
    assert part is not None
    return part


def require_optimisable(name: str, param: Tensor) -> None:
    """Raise unless the parameter holds floats of which each rank may update its part alone."""
    if not param.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point parameter, got {param.dtype}.")
    for placement in getattr(param, "placements", ()):
        if placement.is_partial():
            raise ValueError(f"{name}: a parameter cannot be {placement}; redistribute it first.")


def require_matching_grad(name: str, param: Tensor) -> None:
    """Raise unless the gradient lies where the parameter does: then it can be used part by part."""
    grad = param.grad
    if grad is None or grad.layout is not torch.strided:
        raise RuntimeError(
            f"{name}: expected a dense gradient, got {'none' if grad is None else 'a sparse one'}."
        )
    if not isinstance(param, DTensor) and not isinstance(grad, DTensor):
        return
    ours, theirs = getattr(param, "placements", None), getattr(grad, "placements", None)
    if ours != theirs:
        raise RuntimeError(f"{name}: the gradient's placements {theirs} differ from the parameter's {ours}.")


class Gradients:
    """Reads the local gradients of a group's parameters: each step the same checks, as cheap as can be."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._expected = [(name, param, getattr(param, "_spec", None)) for name, param in named]

    def read(self) -> dict[int, Tensor]:
        """Contiguous local gradients of the parameters that have one, by their index in the group."""
        grads = {}
        for index, (name, param, spec) in enumerate(self._expected):
            grad = param.grad
            if grad is None:
                continue
            plain = type(grad) is Tensor and spec is None and grad.layout is torch.strided
            if not plain and (spec is None or getattr(grad, "_spec", None) is not spec):
                require_matching_grad(name, param)
            local = grad if plain else local_of(grad)
            grads[index] = local if local.is_contiguous() else local.contiguous()
        return grads


class StepCounters:
    """Step counts of the parameters of a group: one addition counts a step for all of them.

    A parameter's ``state["step"]`` is a scalar view of ``flat``, as optimizers of torch have it.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.flat = torch.zeros(len(params), dtype=torch.float32)
        self.views = list(self.flat)
        self.index_of = {param: index for index, param in enumerate(params)}
        self._counts, self._version = [0] * len(params), self.flat._version

    def counts(self) -> list[int]:
        """Steps of each parameter; read anew if written to, as by a checkpoint loaded into the views."""
        if self._version != self.flat._version:
            self._counts, self._version = [int(count) for count in self.flat.tolist()], self.flat._version
        return self._counts

    def adopt(self, param: Tensor, state: dict[str, Any], missing: float = 0.0) -> None:
        """Make ``state["step"]`` the parameter's view, keeping a value that was loaded."""
        index = self.index_of[param]
        view = self.views[index]
        if state.get("step") is not view:
            self.flat[index] = float(state.get("step", missing))
            state["step"] = view

    def advance(self, indices: Collection[int]) -> None:
        """Count one step for these parameters."""
        counts = self.counts()
        if len(indices) == len(counts):
            self.flat += 1
            counts = [count + 1 for count in counts]
        elif indices:
            self.flat[torch.tensor(list(indices))] += 1
            counts = list(counts)
            for index in indices:
                counts[index] += 1
        self._counts, self._version = counts, self.flat._version

    def by_count(self, indices: Iterable[int]) -> dict[int, list[int]]:
        """Those of ``indices`` that have taken the same number of steps."""
        counts, members = self.counts(), defaultdict(list)
        for index in indices:
            members[counts[index]].append(index)
        return members
