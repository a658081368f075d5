"""Which ranks exchange the matrices of a parameter, and the exchanges of many parameters.

Which mesh dims take part. A mesh dim that shards the batch dims of an expert tensor beside another
sharded mesh dim (expert parallelism) leaves whole matrices on its ranks: it is *local*, and the ranks
of each of its coordinates plan and exchange among themselves. All other dims are *exchanged* over:
``RaggedShard`` and ``Shard`` cut matrices, ``Replicate`` makes replicas that share the work.

=====================================  ==========================================================
parameter                              exchange group
=====================================  ==========================================================
plain tensor                           none: this process does all of it
DTensor, 1-D mesh                      the mesh
(Replicate, Shard/Ragged): HSDP        both dims, flattened
(Strided ragged/Shard, Shard(0)): EP   the first dim, one group per expert-parallel coordinate
(Ragged/Shard, Shard(-1)): TP          both dims, flattened
Partial                                raises
=====================================  ==========================================================

There is one exchange per group (and device). Ranks compare all that they planned, and what one of
them could not, before the first use of any.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ragged_fsdp.agreement import Disagreement, compare
from ragged_fsdp.dbuffer.checks import device_of
from ragged_fsdp.dtensor.geometry import regions_of, shard_box
from ragged_fsdp.optim.checks import number
from ragged_fsdp.optim.exchange.matrices import Flattened, MatrixLayout, MatrixRule, matrix_shape
from ragged_fsdp.optim.exchange.plan import Cost, ExchangePlan, PlannedParameter, plan_exchange
from ragged_fsdp.optim.exchange.run import Exchange, Team
from ragged_fsdp.placement import RaggedShard
from ragged_fsdp.routes import Box, region_numel
from ragged_fsdp.topology import subgroup
from ragged_fsdp.torch_internals import StridedShard, local_of

__all__ = ["Exchanges", "Member", "Spread", "matrix_layout", "spread_of", "work_device"]


class Member(NamedTuple):
    """A parameter to exchange: its name, its matrices, and its family.

    Matrices of different families never share a batch; a family may be the index of a param group.
    """

    name: str | None
    parameter: Tensor
    rule: MatrixRule = None
    family: int = 0

    @property
    def label(self) -> str:
        """What an error calls the parameter."""
        return self.name or f"parameter of shape {tuple(self.parameter.shape)}"


@dataclass(frozen=True)
class Spread:
    """The exchange group of a parameter: the mesh dims exchanged over and its global ranks, rising.

    Without mesh dims the parameter is local, and ``ranks`` is (0,) in every process. ``coordinate`` is this
    rank's place in the mesh.
    """

    ranks: tuple[int, ...]
    mesh: DeviceMesh | None
    mesh_dims: tuple[int, ...]
    coordinate: tuple[int, ...] = ()

    @property
    def index(self) -> int:
        """This rank's place in the group."""
        return self.ranks.index(dist.get_rank()) if self.mesh_dims else 0

    @property
    def coordinates(self) -> list[tuple[int, ...]]:
        """The places in the mesh of the ranks of the group, in the order of the ranks."""
        assert self.mesh is not None
        here, dims, sizes = self.coordinate, self.mesh_dims, self.mesh.shape
        ranges = [range(size) if d in dims else (here[d],) for d, size in enumerate(sizes)]
        ranks = self.mesh.mesh[_group_index(here, dims)].flatten().tolist()
        return [coordinate for _, coordinate in sorted(zip(ranks, itertools.product(*ranges)))]


@dataclass(frozen=True)
class _Draft:
    """An exchange that this rank has planned, or why it could not; the ranks have yet to compare it."""

    spread: Spread
    team: Team
    parameters: list[Tensor]
    plan: ExchangePlan | None
    error: Exception | None

    @property
    def where(self) -> str:
        """The group in words that are the same on ranks whose groups are neighbours in one mesh."""
        assert self.spread.mesh is not None
        shape, kind = tuple(self.spread.mesh.shape), self.team.device.type
        return f"an exchange over dims {self.spread.mesh_dims} of a mesh of shape {shape} on {kind}"


_LOCAL_RANKS = (0,)
# Per default group, so that groups of a destroyed world are not used in the next one.
_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


class Exchanges:
    """Makes the exchanges of an optimizer, and remembers them by the parameters they are for.

    Args:
        label: the optimizer's name, in errors and profiles.
        cost: of the work on a matrix, by which work is divided evenly.
        dtype: of what is sent and worked on.
        bucket_numel: elements of one bucket on one root.
        buckets_in_flight: how many buckets a rank may hold at once: 1, 2 or 3.
    """

    _MOST = 8

    def __init__(
        self,
        label: str,
        cost: Cost,
        dtype: torch.dtype,
        *,
        bucket_numel: int = 1 << 27,
        buckets_in_flight: int = 3,
    ) -> None:
        if not number(bucket_numel) >= 1 or buckets_in_flight not in (1, 2, 3):
            raise ValueError(
                f"bucket_numel must be positive and buckets_in_flight 1, 2 or 3, got {bucket_numel} and "
                f"{buckets_in_flight}."
            )
        self._label = label
        self._cost = cost
        self._dtype = dtype
        self._bucket_numel = bucket_numel
        self._in_flight = buckets_in_flight
        self._known: dict[Hashable, tuple[Exchange, ...]] = {}

    def remembered(
        self, key: Hashable, members: Callable[[], Sequence[Member]], failure: Exception | None = None
    ) -> tuple[Exchange, ...]:
        """What :meth:`bind` made when this key was first seen; a failure of this rank is raised.

        A few keys are remembered (layers may be frozen and thawed); the oldest is forgotten, so that
        parameters taken out of the optimizer are freed. Ranks that ask for the same keys in the same order
        forget alike: sets that may differ between ranks belong in an object of their own.
        """
        if key not in self._known:
            made = self.bind(members(), failure)
            if len(self._known) == self._MOST:
                del self._known[next(iter(self._known))]
            self._known[key] = made
        elif failure is not None:
            raise failure  # alone: telling the others would take a collective in every step
        return self._known[key]

    def bind(self, members: Sequence[Member], failure: Exception | None = None) -> tuple[Exchange, ...]:
        """One exchange per group of ranks (and device), in the order in which the parameters name them.

        Every rank must call this with the same parameters in the same order; if they differ, all raise.
        A rank that cannot go on passes why as ``failure``: it raises that, and all others raise, naming it.
        """
        by_group: dict[tuple[tuple[int, ...], torch.device], list[tuple[Member, Spread]]] = {}
        for member in members:
            try:
                spread = spread_of(member.parameter, member.rule)
            except ValueError as error:  # not in the mesh, whose ranks do not wait for this one
                failure = failure or ValueError(f"{member.label}: {error}")
                continue
            by_group.setdefault((spread.ranks, work_device(member.parameter)), []).append((member, spread))
        drafts = [self._draft(items, device) for (_, device), items in by_group.items()]
        self._agree(drafts, failure)
        exchanges = []
        for draft in drafts:
            assert draft.plan is not None  # _agree raises on every rank otherwise
            exchanges.append(
                Exchange(self._label, draft.plan, draft.parameters, draft.team, self._dtype, self._in_flight)
            )
        return tuple(exchanges)

    def _draft(self, items: list[tuple[Member, Spread]], device: torch.device) -> _Draft:
        spread = items[0][1]
        ranks = spread.ranks if spread.mesh_dims else (dist.get_rank() if dist.is_initialized() else 0,)
        team = Team(ranks, spread.index, _process_group(spread, device), device)
        plan, error = None, None
        try:
            planned = [
                PlannedParameter(member.label, _checked_layout(member, own_spread), member.family)
                for member, own_spread in items
            ]
            plan = plan_exchange(planned, len(spread.ranks), self._bucket_numel, self._cost)
        except Exception as caught:
            error = caught
        return _Draft(spread, team, [member.parameter for member, _ in items], plan, error)

    def _agree(self, drafts: Sequence[_Draft], failure: Exception | None) -> None:
        """Compare plans and failures between ranks, once: what one meets raises everywhere, none hangs."""
        error = next((draft.error for draft in drafts if draft.error is not None), None)
        told = str(error) if error is not None else None
        if failure is not None:
            told = f"{type(failure).__name__}: {failure}"
        found = self._compare([draft for draft in drafts if draft.team.group is not None], told)
        if failure is not None:
            raise failure
        if found is None and error is not None:
            raise error  # alone, or all ranks alike
        if found is None:
            return
        if found.failures:
            raise ValueError(
                f"{self._label} cannot plan its exchange; by rank: {dict(found.failures)}."
            ) from error
        raise RuntimeError(
            f"the ranks of an exchange group made different {self._label} plans; parameters, their order, "
            "shapes, placements and param groups, dtype, bucket_numel and buckets_in_flight must be the same "
            f"on all of them: {found.difference}."
        )

    def _compare(self, drafts: list[_Draft], told: str | None) -> Disagreement | None:
        """What the ranks of all exchange groups should raise, if anything."""
        if not drafts:
            return None
        first = drafts[0].team
        # A rank with other groups than its neighbours would wait for them in a comparison they do not make.
        found = compare("\n".join(draft.where for draft in drafts), [first.group], first.device)
        if found is not None:
            return found
        # Twice where there are several: what some ranks learn in the last group, those of the first must too.
        for draft in drafts * min(2, len(drafts)):
            text = "" if draft.plan is None else draft.plan.text
            text += f"\n{self._dtype}, buckets_in_flight {self._in_flight}"
            team = draft.team
            found = compare(text, [team.group], team.device, failure=told, known=found)
        return found


def spread_of(parameter: Tensor, rule: MatrixRule) -> Spread:
    """Which ranks exchange the matrices of a parameter."""
    if not isinstance(parameter, DTensor):
        return Spread(_LOCAL_RANKS, None, ())
    mesh, placements = parameter.device_mesh, parameter.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is not in the mesh {mesh} of the parameter.")
    here, dims = tuple(coordinate), _exchange_dims(mesh, placements, parameter.ndim, rule)
    if not dims:
        return Spread(_LOCAL_RANKS, mesh, (), here)
    return Spread(tuple(sorted(mesh.mesh[_group_index(here, dims)].flatten().tolist())), mesh, dims, here)


def _group_index(coordinate: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int | slice, ...]:
    """What to index a mesh with for the ranks that differ from ``coordinate`` along ``dims`` only."""
    return tuple(slice(None) if d in dims else place for d, place in enumerate(coordinate))


def _exchange_dims(
    mesh: DeviceMesh, placements: Sequence[Placement], ndim: int, rule: MatrixRule
) -> tuple[int, ...]:
    dims = [d for d in range(mesh.ndim) if mesh.size(d) > 1]
    sharded = [p for p in placements if not isinstance(p, Replicate)]
    if len(sharded) < 2 or isinstance(rule, Flattened):
        return tuple(dims)

    def whole_matrices(placement: Placement) -> bool:
        plain = isinstance(placement, Shard) and not isinstance(placement, StridedShard)
        return plain and placement.dim % ndim < ndim - 2

    return tuple(d for d in dims if not whole_matrices(placements[d]))


def _process_group(spread: Spread, device: torch.device) -> dist.ProcessGroup | None:
    """The process group of a spread: the mesh's own where there is one, else made once and kept."""
    if spread.mesh is None or not spread.mesh_dims:
        return None
    if len(spread.mesh_dims) == 1:
        group = spread.mesh.get_group(spread.mesh_dims[0])
        if tuple(dist.get_process_group_ranks(group)) == spread.ranks:
            return group
    world = dist.group.WORLD
    assert world is not None  # there is a mesh
    if spread.ranks == tuple(range(world.size())):
        return world
    made = _GROUPS.setdefault(world, {})
    if spread.ranks not in made:
        made[spread.ranks] = subgroup(world, spread.ranks, device)  # only members come here
    return made[spread.ranks]


def work_device(parameter: Tensor) -> torch.device:
    """Work is done on the device of the mesh; parameters may be offloaded to the host."""
    return device_of(parameter.device_mesh) if isinstance(parameter, DTensor) else parameter.device


def _checked_layout(member: Member, spread: Spread) -> MatrixLayout:
    """The layout of a parameter; raises, naming it, unless the local tensor is as large as it says."""
    parameter = member.parameter
    placements = tuple(parameter.placements) if isinstance(parameter, DTensor) else ()
    try:
        _require_whole_elements(placements, spread)
        layout = matrix_layout(tuple(parameter.shape), placements, member.rule, spread)
    except ValueError as error:
        raise ValueError(f"{member.label}: {error}") from None
    if isinstance(parameter, DTensor):
        mine, found = region_numel(layout.regions[spread.index]), local_of(parameter).numel()
        if mine != found:
            raise ValueError(
                f"{member.label}: placements {placements} imply {mine} local elements, the tensor has "
                f"{found}."
            )
    return layout


def _require_whole_elements(placements: Sequence[Placement], spread: Spread) -> None:
    for d in spread.mesh_dims:
        if not isinstance(placements[d], (Shard, StridedShard, RaggedShard, Replicate)):
            raise ValueError(
                f"placement {placements[d]!r} has no whole elements; reduce it before the optimizer."
            )


@lru_cache(maxsize=1024)
def matrix_layout(
    shape: tuple[int, ...], placements: tuple[Placement, ...], rule: MatrixRule, spread: Spread
) -> MatrixLayout:
    """What the ranks of a spread share of a parameter, and what each of them stores of that.

    Layers repeat, and there are as many regions as ranks: hence the cache.
    """
    if spread.mesh is None:
        size = matrix_shape(shape, rule)
        return MatrixLayout(shape, rule, ((((0, 0, 0), size),) if math.prod(size) else (),), (0,))
    mesh_shape, coordinates = spread.mesh.shape, spread.coordinates
    local = [Replicate() if d in spread.mesh_dims else p for d, p in enumerate(placements)]
    inner = shard_box(shape, mesh_shape, spread.coordinate, local)
    region_at = regions_of(shape, mesh_shape, placements)
    as_matrices = tuple(
        tuple(_matrix_box(box, inner, rule) for box in region_at(coordinate) if math.prod(box[1]))
        for coordinate in coordinates
    )
    copied = [d for d in spread.mesh_dims if isinstance(placements[d], Replicate)]
    replicas = []
    for coordinate in coordinates:
        replica = 0
        for d in copied:
            replica = replica * mesh_shape[d] + coordinate[d]
        replicas.append(replica)
    return MatrixLayout(inner[1], rule, as_matrices, tuple(replicas))


def _matrix_box(box: Box, inner: Box, rule: MatrixRule) -> Box:
    """A box of the parameter, within ``inner``, as a box of its (batches, rows, columns)."""
    shape = inner[1]
    dims = [(offset - base, size, full) for offset, base, size, full in zip(box[0], inner[0], box[1], shape)]
    if isinstance(rule, Flattened):
        merged = [_as_one_dim(group) for group in ([], dims[:1], dims[1:])]
    else:
        merged = [_as_one_dim(group) for group in (dims[:-2], dims[-2:-1], dims[-1:])]
    if None in merged:
        last = len(shape) if isinstance(rule, Flattened) else len(shape) - 2
        raise ValueError(
            f"a shard cuts one of the dims {tuple(range(1, last))} of shape {shape}; only the first dim and "
            "the rows and columns of the matrices may be cut."
        )
    offsets, sizes = zip(*(interval for interval in merged if interval is not None))
    return offsets, sizes


def _as_one_dim(dims: Sequence[tuple[int, int, int]]) -> tuple[int, int] | None:
    """Offset, size and full size of neighbouring dims as offset and size in one; None if there are gaps."""
    offset, size = 0, 1
    for start, length, full in dims:
        if size > 1 and length != full:
            return None
        offset, size = offset * full + start, size * length
    return offset, size
