"""``redistribute_local_tensor`` for specs with a ragged side, each move with the cheapest collectives.

The plan is a function of the two specs alone, hence the same on every rank of the mesh; the table is in
:mod:`ragged_fsdp.placement`. Where only the intervals change, their lengths are the plan; a pending sum that
becomes ragged is reduce-scattered. For everything else the two specs become :class:`Division` s: what every
rank holds, as boxes of the global tensor, and a route of all-to-alls and gathers leads from one to the other.

A result may be an ``AsyncCollectiveTensor`` where no work is left after the last collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ragged_fsdp.dtensor.geometry import (
    check_placements,
    is_ragged,
    outer_mesh_dims,
    ragged_layout,
    ragged_mesh_dim,
    regions_of,
    unragged,
    with_placements,
)
from ragged_fsdp.placement import RaggedShard
from ragged_fsdp.routes import BoxPart, HopKind, RankRoute, Region, chunk_of_chunks, overlap, plan_route
from ragged_fsdp.tiling import tiled, untiled
from ragged_fsdp.torch_internals import (
    STOCK,
    WIRE_DTYPES,
    AsyncCollectiveTensor,
    DTensorSpec,
    StridedShard,
    all_gather,
    cut_order_of,
    functional,
    reduce_scatter,
    reduce_value,
)

__all__ = ["Division", "is_cut", "redistribute_cost", "redistribute_local_tensor", "route_between"]

Shape = tuple[int, ...]
MeshDim = tuple[Any, int]
"""A mesh and the mesh dim to communicate over."""

# A reduce-scatter of pieces that are padded to the longest is one fast collective, but not if padding
# multiplies the traffic.
_MAX_PADDED_RATIO = 2

# Up to so many elements every owner sends its piece to all ranks. More would keep its link busy, and its
# memory with a copy for each of them, many times as long as all links together need.
_SENT_TO_ALL = 1 << 20

# How the addends of a pending reduction, one per row, combine.
_COMBINE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda rows: rows.sum(0, dtype=rows.dtype),
    "avg": lambda rows: rows.mean(0),
    "product": lambda rows: rows.prod(0, dtype=rows.dtype),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
}


def redistribute_local_tensor(
    local_tensor: torch.Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    *,
    async_op: bool = False,
    **stock_options: Any,
) -> torch.Tensor:
    """What this rank holds under ``target_spec``, given what it holds under ``current_spec``."""
    if not (is_ragged(current_spec) or is_ragged(target_spec)):
        return STOCK["redistribute_local_tensor"](
            local_tensor, current_spec, target_spec, async_op=async_op, **stock_options
        )
    if current_spec.mesh != target_spec.mesh:
        raise NotImplementedError(
            f"a ragged tensor cannot move between meshes: {current_spec.mesh} to {target_spec.mesh}; "
            "use full_tensor() and distribute_tensor."
        )
    if current_spec.mesh.get_coordinate() is None:
        return local_tensor
    for spec in (current_spec, target_spec):  # a bad spec raises before any collective
        if is_ragged(spec):
            ragged_layout(spec)
        else:
            check_placements(tuple(spec.shape), tuple(spec.mesh.shape), spec.placements)
    for before, after in zip(current_spec.placements, target_spec.placements):
        if after.is_partial() and before != after:
            raise RuntimeError(
                f"a move of a ragged tensor makes no pending reduction: {before} cannot become {after}."
            )
    moved = _move(local_tensor, current_spec, target_spec, async_op)
    return moved if async_op else _wait(moved)


def redistribute_cost(current_spec: DTensorSpec, target_spec: DTensorSpec) -> float:
    """What a move costs, in stock's measure: 0 where ranks only cut what they have, else that of a gather."""
    if not (is_ragged(current_spec) or is_ragged(target_spec)):
        return STOCK["redistribute_cost"](current_spec, target_spec)
    if current_spec.placements == target_spec.placements:
        return 0.0
    sharded = with_placements(current_spec, unragged(current_spec.placements, Shard(0)))
    gathered = with_placements(target_spec, unragged(target_spec.placements))
    return STOCK["redistribute_cost"](sharded, gathered)


def _move(local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, async_op: bool) -> torch.Tensor:
    """One row of the transition table, or several."""
    ragged_dim = ragged_mesh_dim(current.placements)
    if ragged_dim is not None and _only_intervals(current, target, ragged_dim):
        return _from_intervals(local, current, target, ragged_dim, async_op)
    if _is_scattered_sum(current, target):
        local, current = _scattered(local, current, target)
    return _exchange(local, current, target, async_op)


def _only_intervals(current: DTensorSpec, target: DTensorSpec, mesh_dim: int) -> bool:
    """Whether only the intervals along ``mesh_dim`` change: to others of their order, or to the whole."""
    if any(isinstance(p, RaggedShard) for d, p in enumerate(current.placements) if d != mesh_dim):
        return False  # without the one at mesh_dim the other would be what is_ragged means
    before: Any = current.placements[mesh_dim]
    after = target.placements[mesh_dim]
    in_order = isinstance(after, RaggedShard) and before.tile == after.tile
    if not (in_order or after.is_replicate()):
        return False
    return target.placements == _replaced(current, mesh_dim, after).placements


def _from_intervals(
    local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, mesh_dim: int, async_op: bool
) -> torch.Tensor:
    """From intervals of the inner tensor to others, or to the whole.

    Their lengths say all: a route, which intersects the boxes of all ranks, would take a tenth of a second to
    plan for a thousand of them, for each layout of a model.
    """
    source, group = ragged_layout(current), (current.mesh, mesh_dim)
    if not is_ragged(target):
        flat = _gathered(local.reshape(-1), source.counts, group, async_op and source.tile is None)
        return untiled(flat, source.inner_shape, source.tile)
    goal = ragged_layout(target)
    if source.counts == goal.counts:
        return local.reshape(goal.local_shape)
    return _cut_anew(local.reshape(-1), source.counts, goal.counts, group).view(goal.local_shape)


def _cut_anew(
    flat: torch.Tensor, before: Sequence[int], after: Sequence[int], group: MeshDim
) -> torch.Tensor:
    """Intervals of the lengths ``after``, one per rank, from those of the lengths ``before``."""
    mesh, mesh_dim = group
    here = mesh.get_local_rank(mesh_dim)
    had, gets = (list(zip(accumulate(counts, initial=0), counts)) for counts in (before, after))
    (start, numel), (new_start, new_numel) = had[here], gets[here]
    send = [overlap(start, numel, *there) for there in gets]
    receive = [overlap(new_start, new_numel, *there) for there in had]
    return _exchanged(flat, receive, send, group)


def _is_scattered_sum(current: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether a pending sum becomes ragged, and other mesh dims at most settle theirs."""
    mesh_dim = ragged_mesh_dim(target.placements)
    if mesh_dim is None or type(current.placements[mesh_dim]) is not Partial:
        return False
    return all(
        other == mesh_dim or before == after or (type(before) is Partial and after.is_replicate())
        for other, (before, after) in enumerate(zip(current.placements, target.placements))
    )


def _scattered(
    inner: torch.Tensor, current: DTensorSpec, target: DTensorSpec
) -> tuple[torch.Tensor, DTensorSpec]:
    """A pending sum reduced along the ragged mesh dim of ``target``, and what it is then.

    By a reduce-scatter, of padded pieces where they are uneven; where they are very uneven by an all-reduce,
    which leaves the whole.
    """
    mesh_dim, layout = ragged_mesh_dim(target.placements) or 0, ragged_layout(target)
    partial: Any = current.placements[mesh_dim]
    ragged = _replaced(current, mesh_dim, target.placements[mesh_dim])
    ranks, longest = len(layout.counts), max(layout.counts)
    if ranks == 1 or not longest:
        return tiled(inner, layout.tile).view(layout.local_shape), ragged
    if _very_uneven(layout.counts):
        reduced = reduce_value(partial, inner, current.mesh, mesh_dim)
        return _wait(reduced), _replaced(current, mesh_dim, Replicate())
    flat = tiled(inner, layout.tile)
    if not layout.even:
        padded = flat.new_zeros(ranks, longest)
        for rank, (start, count) in enumerate(zip(layout.starts, layout.counts)):
            padded[rank, :count] = flat[start : start + count]
        flat = padded.view(-1)
    out = reduce_scatter(flat.contiguous(), partial.reduce_op, 0, (current.mesh, mesh_dim))
    if not layout.even:
        out = _wait(out)[: layout.numel].clone()
    return out.view(layout.local_shape), ragged


def _exchange(local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, async_op: bool) -> torch.Tensor:
    """Reduce what the target has not pending, and send each element to who wants it."""
    mesh: Any = current.mesh
    source, destination = division_of(current), division_of(target)
    pending, cut = [], False
    for mesh_dim, (before, after) in enumerate(zip(current.placements, target.placements)):
        cut |= before.is_replicate() and is_cut(after)
        if before == after or not before.is_partial():
            continue
        if type(before) is Partial:
            pending.append((mesh_dim, before))
        else:  # its reduction needs the tensor as it is
            local = _wait(reduce_value(before, local, mesh, mesh_dim))
            current = _replaced(current, mesh_dim, Replicate())
            source = division_of(current)
    here = tuple(mesh.get_coordinate())
    route = route_between(here, source, destination)
    if cut and route.packing is None and not route.hops:
        local = local.clone()  # who writes into a piece never writes into what it was cut from
    shape = ragged_layout(target).local_shape if is_ragged(target) else destination.box_at(here)[1]
    return _follow(local, route, mesh, pending, async_op).view(shape)


def _replaced(spec: DTensorSpec, mesh_dim: int, placement: Placement) -> DTensorSpec:
    """``spec`` with another placement along ``mesh_dim``; neither is a Shard, whose order is kept."""
    placements = spec.placements
    return replace(spec, placements=(*placements[:mesh_dim], placement, *placements[mesh_dim + 1 :]))


@dataclass(frozen=True)
class Division:
    """How a tensor is divided over a mesh: a spec without mesh and dtype, hence the same on every rank.

    ``cut_order`` has, for each tensor dim that ``Shard`` placements cut, their mesh dims in the order in
    which they are applied.
    """

    shape: Shape
    mesh_shape: Shape
    placements: tuple[Placement, ...]
    cut_order: tuple[tuple[int, tuple[int, ...]], ...]

    def box_at(self, coordinate: Shape) -> tuple[Shape, Shape]:
        """Offsets and sizes of what the Shard placements leave on the rank at ``coordinate``."""
        cuts = ((dim, d) for dim, mesh_dims in self.cut_order for d in mesh_dims)
        return chunk_of_chunks(self.shape, ((dim, self.mesh_shape[d], coordinate[d]) for dim, d in cuts))

    def regions(self) -> Callable[[Shape], Region]:
        """A function from the coordinate of a rank to its region."""
        if ragged_mesh_dim(self.placements) is None:
            return lambda coordinate: (self.box_at(coordinate),)
        return regions_of(self.shape, self.mesh_shape, self.placements)


def division_of(spec: DTensorSpec) -> Division:
    """The division of a spec; raises where a strided shard gives a rank a part that is not one box."""
    meta: Any = spec.tensor_meta
    shape, mesh_shape = tuple(int(size) for size in meta.shape), spec.mesh.shape
    strided = any(isinstance(p, StridedShard) for p in spec.placements)
    order: Any = cut_order_of(spec.placements, spec.mesh) if strided else spec.shard_order
    cut_order = tuple((entry.tensor_dim, tuple(entry.mesh_dims)) for entry in order or ())
    uneven = (shape[dim] % math.prod(mesh_shape[d] for d in mesh_dims) for dim, mesh_dims in cut_order)
    if order is None or (strided and any(uneven)):
        raise NotImplementedError(
            f"a ragged tensor cannot move from or to {spec.placements} of shape {shape}: its parts are no "
            "boxes; use full_tensor() and distribute_tensor."
        )
    return Division(shape, mesh_shape, spec.placements, cut_order)


def is_cut(placement: Placement) -> bool:
    """Whether ranks along the mesh dim hold different elements."""
    return isinstance(placement, (RaggedShard, Shard, StridedShard))


@lru_cache(maxsize=8192)
def route_between(coordinate: Shape, current: Division, target: Division) -> RankRoute:
    """The route of the rank at ``coordinate``. Pending sums whose mesh dim the target does not cut stay."""
    kinds = []
    for mesh_dim, (before, after) in enumerate(zip(current.placements, target.placements)):
        if current.mesh_shape[mesh_dim] == 1 or not (is_cut(before) or is_cut(after)):
            continue
        if is_cut(before) and not _stays(mesh_dim, current, target):
            kinds.append((mesh_dim, HopKind.SCATTER if is_cut(after) else HopKind.GATHER))
        elif before.is_partial():
            kinds.append((mesh_dim, HopKind.REDUCE))
    return plan_route(coordinate, current.mesh_shape, kinds, current.regions(), target.regions())


def _stays(mesh_dim: int, current: Division, target: Division) -> bool:
    """Whether each rank's elements are all wanted at its own place along ``mesh_dim``."""
    before, after = current.placements[mesh_dim], target.placements[mesh_dim]
    if before != after or any(mesh_dim not in outer_mesh_dims(d.placements) for d in (current, target)):
        return False
    if isinstance(before, RaggedShard):
        return True  # nothing else cuts dim 0 before it
    earlier = [
        mesh_dims[: mesh_dims.index(mesh_dim)]
        for division in (current, target)
        for dim, mesh_dims in division.cut_order
        if dim == before.dim
    ]
    return earlier[0] == earlier[1] and all(_stays(other, current, target) for other in earlier[0])


def _follow(
    local: torch.Tensor, route: RankRoute, mesh: Any, pending: Sequence[tuple[int, Partial]], async_op: bool
) -> torch.Tensor:
    """Follow ``route``; the result is flat. ``pending`` are the sums that the target does not have.

    A sum over a mesh dim that the target cuts is taken where its addends meet; the others are reduced
    where the elements lie on the fewest ranks, before the gathers.
    """
    summed = {hop.mesh_dim for hop in route.hops if hop.kind is HopKind.REDUCE}
    partials, waiting = dict(pending), [item for item in pending if item[0] not in summed]
    buffer = local.reshape(-1)
    if route.packing is not None:
        buffer = _joined(buffer, [_part(buffer, part).reshape(-1) for part in route.packing])
    for hop in route.hops:
        group = (mesh, hop.mesh_dim)
        if hop.kind is HopKind.GATHER:
            buffer, waiting = _reduced(buffer, mesh, waiting), []
            buffer = _gathered(_wait(buffer), hop.receive, group, async_op)
            continue
        flat = _wait(buffer)
        if hop.picks is not None:
            flat = _joined(flat, [flat[start:stop] for start, stop in hop.picks])
        buffer = _exchanged(flat, hop.receive, hop.send, group)
        if hop.kind is HopKind.REDUCE:
            blocks = _wait(buffer).view(len(hop.receive), hop.receive[0])
            buffer = _COMBINE[partials[hop.mesh_dim].reduce_op](blocks)
    buffer = _reduced(buffer, mesh, waiting)
    if route.unpacking is None:
        return buffer
    arrived, flat, position = _wait(buffer), local.new_empty(route.target_numel), 0
    for part in route.unpacking:
        _part(flat, part).copy_(arrived[position : position + part.numel].view(part.sizes))
        position += part.numel
    return flat


def _gathered(flat: torch.Tensor, counts: Sequence[int], group: MeshDim, async_op: bool) -> torch.Tensor:
    """The pieces of all ranks of the mesh dim, one after the other; ``counts`` are their lengths."""
    if flat.dtype not in WIRE_DTYPES:
        sizes = [count * flat.itemsize for count in counts]
        return _gathered(flat.contiguous().view(torch.uint8), sizes, group, False).view(flat.dtype)
    ranks, owners = len(counts), [rank for rank, count in enumerate(counts) if count]
    if ranks == 1 or not owners:
        # A view of a buffer is copied as gathered pieces are: torch.save would write the whole buffer with
        # it, and refuses two views of one that differ in dtype.
        return flat if flat.untyped_storage().nbytes() == flat.nbytes else flat.clone()
    if len(owners) == 1:
        source = flat.contiguous() if flat.numel() else flat.new_empty(sum(counts))
        out = functional.broadcast(source, owners[0], group)
    elif len(set(counts)) == 1:
        out = all_gather(flat.contiguous(), 0, group)
    elif ranks * max(counts) <= _SENT_TO_ALL:
        out = _exchanged(flat.repeat(ranks), counts, [flat.numel()] * ranks, group)
    else:
        out = _spread_and_gathered(flat, counts, group)
    return out if async_op else _wait(out)


def _spread_and_gathered(flat: torch.Tensor, counts: Sequence[int], group: MeshDim) -> torch.Tensor:
    """Pieces that some ranks hold are cut anew for all ranks alike, which then send each an equal share."""
    ranks, numel = len(counts), sum(counts)
    each = -(-numel // ranks)
    share = _wait(_cut_anew(flat, counts, [max(0, min(each, numel - r * each)) for r in range(ranks)], group))
    if share.numel() < each:
        share = torch.nn.functional.pad(share, (0, each - share.numel()))
    whole = all_gather(share, 0, group)
    return whole if each * ranks == numel else _wait(whole)[:numel].clone()


def _exchanged(
    flat: torch.Tensor, receive: Sequence[int], send: Sequence[int], group: MeshDim
) -> torch.Tensor:
    """An all-to-all of any dtype: as bytes where backends may not know it."""
    if flat.dtype in WIRE_DTYPES:
        return functional.all_to_all_single(flat.contiguous(), list(receive), list(send), group)
    flat, dtype, size = flat.contiguous().view(torch.uint8), flat.dtype, flat.itemsize
    out = _exchanged(flat, [size * count for count in receive], [size * count for count in send], group)
    return _wait(out).view(dtype)


def _very_uneven(counts: Sequence[int]) -> bool:
    return len(counts) * max(counts) > _MAX_PADDED_RATIO * sum(counts)


def _reduced(buffer: torch.Tensor, mesh: Any, pending: Sequence[tuple[int, Partial]]) -> torch.Tensor:
    for mesh_dim, partial in pending:
        buffer = reduce_value(partial, _wait(buffer), mesh, mesh_dim)
    return buffer


def _joined(flat: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """A copy of the parts, one after the other."""
    return torch.cat(parts) if parts else flat.new_empty(0)


def _part(flat: torch.Tensor, part: BoxPart) -> torch.Tensor:
    """A part of a flat tensor, as a view in the shape of its box."""
    block = flat[part.block_start : part.block_start + math.prod(part.block_sizes)].view(part.block_sizes)
    for dim, (offset, size) in enumerate(zip(part.offsets, part.sizes)):
        block = block.narrow(dim, offset, size)
    return block


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    """The finished tensor."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
