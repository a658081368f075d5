"""RaggedShard and StridedRaggedShard: placements that cut a tensor into uneven, block-aligned pieces.

A ragged placement splits the row-major flattened tensor into one contiguous interval per rank of
its mesh dim. It is applied last, to the local tensor that the other placements of the DTensor
leave (the *inner* tensor), so an interval never mixes with their cuts::

    shape (6, 4), RaggedShard(dims=(0,), local_units=(1, 0, 3, 2)) on 4 ranks; one unit is one row

        row 0   | a a a a |  rank 0: 1 row
        row 1   | c c c c |  rank 2: 3 rows      rank 1 holds an empty (0, 4) tensor
        row 2   | c c c c |
        row 3   | c c c c |
        row 4   | d d d d |  rank 3: 2 rows
        row 5   | d d d d |

With ``tile`` the flattened order is that of the tensor's tiles (:class:`~ragged_fsdp.policy.Tiles`), and a
move to or from another order also permutes.

Transitions along one mesh dim, the other placements fixed (N elements in the inner tensor, m ranks,
n and n' what a rank holds before and after):

    ===================  ===================  ==================================  ====================
    from                 to                   operation                           elements received
    ===================  ===================  ==================================  ====================
    ragged               the same intervals   none (a view)                       0
    ragged               other tiles          all-to-all, uneven splits           n' - what it held
    ragged               other ragged         all-to-all, uneven splits           n' - what it held
    ragged, even         Replicate            all-gather                          N - n
    ragged, uneven       Replicate            all-to-all, uneven splits           N - n
    the same, large      Replicate            all-to-all to N / m, all-gather     less than N + N / m
    ragged on one rank   Replicate            broadcast                           N
    ragged               Shard(d)             all-to-all, uneven splits           n' - what it held
    Shard(d)             ragged               all-to-all, uneven splits           n' - what it held
    Replicate            ragged               none (own slice, copied)            0
    Partial sum/avg/...  ragged, even         reduce-scatter                      N - n'
    Partial sum/avg/...  ragged, uneven       reduce-scatter of padded pieces     m * max(n') - max(n')
    Partial sum/avg/...  ragged, very uneven  all-reduce, own slice               2 * N * (m - 1) / m
    special Partial      ragged               its own reduction, own slice        that of the reduction
    anything             a new Partial        raises                              -
    anything             anything, other mesh raises                              -
    ===================  ===================  ==================================  ====================

"Very uneven" means that padding would more than double the traffic: m * max(n) > 2 * N. "Large" means
m * max(n) of more than 2^20 elements: an owner that sent its piece to every rank would send, and hold, m
times as much. Pending sums of other mesh dims that are reduced in the same call are reduced on the ragged
pieces.

Where placements of several mesh dims change at once, each mesh dim has its own step, in this order
("cut" is ragged or Shard); an element goes only to ranks that need it or pass it on::

    =====================  ====================  =================================  ======================
    along a mesh dim from  to                    step                               elements received
    =====================  ====================  =================================  ======================
    Partial sum/avg/...    cut                   all-to-all, sum of what arrives    (m - 1) * n after it
    cut                    cut                   all-to-all, uneven splits          those new along it
    Partial sum/avg/...    Replicate             all-reduce                         2 * n * (m - 1) / m
    cut                    Replicate             gather, as in the table above      those new along it
    Replicate              cut                   none                               0
    Shard(d)               the same cut          none                               0
    =====================  ====================  =================================  ======================

An element travels once along each mesh dim on which its place changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp.layout import GroupLayout, TensorSpec, as_integer
from ragged_fsdp.policy import Elements, Granularity, Rows, Tiles, Whole

__all__ = [
    "RaggedShard",
    "StridedRaggedShard",
    "block_numel",
    "checked_shape",
    "legal_granularity",
    "placement_from_layout",
    "ragged_dims",
]

Units = tuple[int, ...]
BlockShape = Sequence[int]

_ELEMENTS = Elements(1)
_MOST_LISTED = 16  # ranks whose units a placement shows one by one


class RaggedShard(Placement):
    """One contiguous interval of the flattened inner tensor per rank of the mesh dim.

    Args:
        dims: the leading dims ``(0, ..., k-1)`` that the split may cut through. The local tensor has
            shape ``(-1, *shape[k:])``: rows stay rows for ``dims=(0,)``, and it is flat when
            ``dims`` covers all dims.
        local_units: how many units each rank of the mesh dim holds, in rank order, 0 allowed. One
            unit is ``numel / sum(local_units)`` elements of the inner tensor. Units are relative, so
            they are divided by their gcd: equal layouts compare equal.
        tile: rows and columns of the tiles in whose order the elements lie; ``dims`` then covers all dims and
            the local tensor is flat. None is row-major.

    ``RaggedShard`` may not stand before a ``Shard(d)`` with ``d < len(dims)``, or before another ragged
    placement: there the order of application would matter; use :class:`StridedRaggedShard`.
    """

    dims: tuple[int, ...]
    local_units: tuple[Any, ...]
    tile: tuple[int, int] | None

    def __init__(
        self, dims: int | Iterable[int], local_units: Iterable[Any], tile: tuple[int, int] | None = None
    ) -> None:
        super().__init__()  # the pybind base is unusable without it
        self.dims = _checked_dims(type(self).__name__, dims)
        self.local_units = self._checked_units(local_units)
        self.tile = None if tile is None else _checked_tile(type(self).__name__, tile)
        self._key = (type(self).__name__, self.dims, self.local_units, self.tile)
        self._hash = hash(self._key)

    def _checked_units(self, local_units: Iterable[Any]) -> tuple[Any, ...]:
        units = _checked_tuple(type(self).__name__, local_units)
        if not sum(units):
            raise ValueError(f"{type(self).__name__}: local_units must not all be 0, got {units}.")
        return _reduced(units)

    def units_of(self, outer_index: int) -> Units:
        """The units within the ``outer_index``-th shard that the other placements leave."""
        return self.local_units

    @classmethod
    def even(
        cls, shape: Sequence[int], ranks: int, granularity: Granularity | BlockShape = _ELEMENTS
    ) -> RaggedShard:
        """Blocks of ``granularity`` spread over ``ranks`` as evenly as whole blocks allow.

        Args:
            shape: of the inner tensor: what other placements leave of it.
            ranks: the size of the mesh dim.
            granularity: ``Elements``, ``Rows``, ``Whole``, ``Tiles`` or a block shape; all but tiles must
                divide the tensor.
        """
        return cls.by_weights(shape, (1,) * _checked_ranks(cls.__name__, ranks), granularity)

    @classmethod
    def by_weights(
        cls,
        shape: Sequence[int],
        weights: Sequence[float],
        granularity: Granularity | BlockShape = _ELEMENTS,
    ) -> RaggedShard:
        """Whole blocks of ``granularity`` in proportion to ``weights``, one per rank; see :meth:`even`."""
        shape, block = checked_shape(shape), block_numel(shape, granularity)
        numel = math.prod(shape)
        if not isinstance(granularity, Tiles):
            return cls(ragged_dims(shape, block), _apportion(numel // block, weights))
        ends = [min(numel, end * block) for end in accumulate(_apportion(-(-numel // block), weights))]
        counts = [end - begin for begin, end in pairwise([0, *ends])]
        tile = (granularity.rows, granularity.columns)
        return cls(range(len(shape)), counts if numel else (1,) * len(counts), tile)

    @classmethod
    def on_one_rank(cls, shape: Sequence[int], ranks: int, root: int) -> RaggedShard:
        """The whole tensor on rank ``root`` of the mesh dim, in its own shape; nothing elsewhere."""
        shape, ranks = checked_shape(shape), _checked_ranks(cls.__name__, ranks)
        if not 0 <= as_integer(f"{cls.__name__}: root", root) < ranks:
            raise ValueError(f"{cls.__name__}: root must be in [0, {ranks}), got {root}.")
        return cls(ragged_dims(shape, math.prod(shape)), [int(r == root) for r in range(ranks)])

    def is_shard(self, dim: int | None = None) -> bool:
        """True: it splits the tensor. False of any one ``dim``, along which it makes no even chunks.

        Code that asks reads ``dim`` next, and is told there that it has none; with False it would take a
        piece for the whole tensor.
        """
        return dim is None

    @property
    def dim(self) -> int:
        """None to give: the pieces are runs of the flattened tensor, not chunks of one dim."""
        raise AttributeError(
            f"{type(self).__name__} has no dim: its pieces are runs of the flattened tensor, not even chunks "
            "of one dim. ragged_fsdp.dtensor.ragged_layout(tensor) says where they lie; full_tensor() is the "
            "whole; fully_shard(shard_placement_fn=lambda p: Shard(0)) makes even chunks."
        )

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self) or self._hash != other._hash or self._key != other._key:
            return False
        self._key = other._key  # next time the same objects compare in no time, however many ranks there are
        return True

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # pybind objects have no pickle, and no copy, of their own
        return type(self), (self.dims, self.local_units, self.tile)

    def __repr__(self) -> str:
        # no address: it enters compile cache keys; and Python, which generated code runs
        tile = "" if self.tile is None else f", tile={self.tile}"
        return f"{type(self).__name__}(dims={self.dims}, local_units={_written(self.local_units)}{tile})"

    __str__ = __repr__

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """How generated graph code rebuilds the placement."""
        return repr(self), {type(self).__name__: type(self)}


class StridedRaggedShard(RaggedShard):
    """A ragged placement applied after the ``Shard`` placements to its right (TP or EP first).

    A ``RaggedShard`` of whole rows, ``dims=(0,)``, may stand to its right too, and counts as one of them:
    experts of which ranks hold any number.

    ``local_units`` is one tuple for all outer shards, or one tuple per outer shard, in mesh order,
    where an uneven ``Shard`` makes them differ: 5 rows over ``Shard(0)`` on 2 ranks leave 3 and 2
    rows, and ``((1, 2), (2, 0))`` splits the first 1 + 2 and the second 2 + 0. A tuple of zeros
    belongs to an empty outer shard.
    """

    def _checked_units(self, local_units: Iterable[Any]) -> tuple[Any, ...]:
        rows = tuple(local_units) if isinstance(local_units, Iterable) else ()
        if not rows or not all(isinstance(row, (tuple, list)) for row in rows):
            return super()._checked_units(local_units)
        per_outer = tuple(_reduced(_checked_tuple("StridedRaggedShard", row)) for row in rows)
        if len({len(row) for row in per_outer}) != 1:
            raise ValueError(f"StridedRaggedShard: one tuple per outer shard, all as long, got {per_outer}.")
        if not any(sum(row) for row in per_outer):
            raise ValueError(f"StridedRaggedShard: local_units must not all be 0, got {per_outer}.")
        return per_outer[0] if len(set(per_outer)) == 1 else per_outer

    def units_of(self, outer_index: int) -> Units:
        """The units within the ``outer_index``-th shard that the other placements leave."""
        if not isinstance(self.local_units[0], tuple):
            return self.local_units
        if outer_index >= len(self.local_units):
            raise ValueError(
                f"{self}: units for {len(self.local_units)} outer shards, asked for {outer_index}."
            )
        return self.local_units[outer_index]


def block_numel(shape: Sequence[int], granularity: Granularity | BlockShape) -> int:
    """Elements in one block of a tensor of ``shape``; raises unless whole blocks make up the tensor.

    A block shape is completed to whole rows, so that the block is contiguous: ``(32, 32)`` in a
    matrix of 128 columns means 32 rows, 4096 elements. Its leading 1s keep it inside one index. Tiles may
    leave a last block that is shorter.
    """
    shape = checked_shape(shape)
    if isinstance(granularity, Tiles):
        return granularity.block_numel(shape)
    if isinstance(granularity, (Elements, Rows, Whole)):
        block = granularity.block_numel(shape)
    else:
        what = "granularity must be Elements, Rows, Whole, Tiles or a block shape, whose sizes"
        block = _block_shape_numel(shape, _integers(what, granularity))
    numel = math.prod(shape)
    if numel % block:
        raise ValueError(
            f"granularity {granularity} of {block} elements does not divide the {numel} elements of shape "
            f"{shape}; use a divisor or pad the tensor."
        )
    return block


def legal_granularity(
    shape: Sequence[int], granularity: Granularity | BlockShape, placements: Iterable[Placement]
) -> int:
    """Elements of the smallest legal block not finer than ``granularity`` beside other placements.

    A ``Shard(d)`` to the right of a ``RaggedShard`` must not be cut into: the block is raised to the LCM
    with the stride that one index before ``d`` has, so whole dim-``d`` fibres stay together.

    Args:
        shape: of the inner tensor: what ``placements`` leave of it.
        granularity: ``Elements``, ``Rows``, ``Whole`` or a block shape; it must divide the tensor.
        placements: those beside the ragged one.
    """
    if isinstance(granularity, Tiles):
        raise TypeError(f"legal_granularity: {granularity} need no larger block; use StridedRaggedShard.")
    shape, block = checked_shape(shape), block_numel(shape, granularity)
    for placement in placements:
        if not isinstance(placement, Placement):
            raise TypeError(f"placements must be placements, got {placement!r}.")
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"{placement} does not fit shape {shape}.")
        block = math.lcm(block, max(1, math.prod(shape[dim % len(shape) :])))
    return block


def ragged_dims(shape: Sequence[int], block: int) -> tuple[int, ...]:
    """The shortest prefix of dims that pieces of ``block`` elements may cut: keeps rows as rows."""
    for k in range(1, len(shape) + 1):
        rest = math.prod(shape[k:])
        if rest == 0 or block % rest == 0:
            return tuple(range(k))
    return ()


def placement_from_layout(
    layout: GroupLayout, index: int, shape: Sequence[int], *, strided: bool = False
) -> RaggedShard:
    """The placement of tensor ``index`` of a planned group, in the widest blocks that its cuts respect.

    Rows stay rows where no cut falls inside one, whatever blocks the tensor was planned with. Buffers and
    parameters both ask here, so they agree.

    Args:
        layout: the plan of the group, in elements of the tensor.
        index: of the tensor in the group.
        shape: of the inner tensor.
        strided: for a tensor that a ``Shard`` placement to the right of the ragged one cuts first.
    """
    if not 0 <= as_integer("index", index) < len(layout.specs):
        raise ValueError(f"index must be in [0, {len(layout.specs)}), the tensors of the group, got {index}.")
    spec, shape = layout.specs[index], checked_shape(shape)
    if math.prod(shape) != spec.numel:
        raise ValueError(
            f"{spec.name}: shape {shape} has {math.prod(shape)} elements, layout has {spec.numel}."
        )
    unnamed = TensorSpec("", spec.numel, spec.block_numel, spec.tile)
    alone = GroupLayout((unnamed,), layout.ranks, 1, layout.shard_numel, (layout.offsets[index],), 0)
    return _placement_of(alone, shape, StridedRaggedShard if strided else RaggedShard)


@lru_cache(maxsize=512)  # one takes half a megabyte where there are 65,536 ranks
def _placement_of(alone: GroupLayout, shape: tuple[int, ...], kind: type[RaggedShard]) -> RaggedShard:
    """The placement of the tensor that ``alone`` lays out, cached: equal layers of a model share it."""
    (spec,) = alone.specs
    # an empty tensor lies nowhere: any units describe it
    numels = alone.local_numels(0) if spec.numel else (1,) * alone.ranks
    dims = ragged_dims(shape, math.gcd(*numels)) if spec.tile is None else range(len(shape))
    return kind(dims, numels, spec.tile)


def _written(units: tuple[Any, ...]) -> str:
    """The tuple as Python; of many ranks in runs of equal units, since errors and logs show placements."""
    if len(units) <= _MOST_LISTED:
        return repr(units)
    runs: list[str] = []
    listed: list[Any] = []
    for unit, same in groupby(units):
        count = len(list(same))
        if count <= 2:
            listed += [unit] * count
            continue
        runs += [repr(tuple(listed))] if listed else []
        runs.append(f"({unit!r},) * {count}")
        listed = []
    return " + ".join(runs + ([repr(tuple(listed))] if listed else []))


def _block_shape_numel(shape: tuple[int, ...], block: tuple[int, ...]) -> int:
    if len(block) != len(shape) or any(b < 1 for b in block):
        raise ValueError(f"block shape {block} must have one positive size per dim of shape {shape}.")
    first = next((d for d, b in enumerate(block) if b > 1), max(len(block) - 1, 0))
    if block and shape[first] % block[first]:
        raise ValueError(f"block shape {block}: {block[first]} does not divide dim {first} of shape {shape}.")
    return block[first] * math.prod(shape[first + 1 :]) if block else 1


def _apportion(blocks: int, weights: Sequence[float]) -> Units:
    """Whole blocks per rank in proportion to the weights; remainders to the largest fractions."""
    try:
        weights = [float(w) for w in weights]
    except (TypeError, ValueError):
        raise TypeError(f"weights must be numbers, one per rank, got {weights!r}.") from None
    total = math.fsum(weights)
    if not weights or any(w < 0 for w in weights) or not math.isfinite(total) or total <= 0:
        raise ValueError(f"weights must be non-negative and not all 0, got {tuple(weights)}.")
    if not blocks:
        return tuple(int(w > 0) for w in weights)
    exact = [blocks * (w / total) for w in weights]
    units = [math.floor(e) for e in exact]
    by_remainder = sorted(range(len(units)), key=lambda r: units[r] - exact[r])
    for rank in by_remainder[: blocks - sum(units)]:
        units[rank] += 1
    return tuple(units)


def _checked_dims(kind: str, dims: int | Iterable[int]) -> tuple[int, ...]:
    given = _integers(f"{kind}: dims", (dims,) if isinstance(dims, int) else dims)
    if given != tuple(range(len(given))):
        raise ValueError(f"{kind}: dims must be a prefix (0, 1, ...) of the tensor's dims, got {given}.")
    return given


def _checked_tuple(kind: str, units: Iterable[Any]) -> Units:
    given = _integers(f"{kind}: local_units, one per rank,", units)
    if not given:
        raise ValueError(f"{kind}: local_units needs one integer per rank of the mesh dim, got none.")
    if any(u < 0 for u in given):
        raise ValueError(f"{kind}: local_units must not be negative, got {given}.")
    return given


def _checked_tile(kind: str, tile: Any) -> tuple[int, int]:
    given = _integers(f"{kind}: tile", tile)
    if len(given) != 2 or any(size < 1 for size in given):
        raise ValueError(f"{kind}: tile must be (rows, columns), both at least 1, got {given}.")
    return given[0], given[1]


def _reduced(units: Units) -> Units:
    divisor = math.gcd(*units) or 1
    return tuple(u // divisor for u in units)


def _checked_ranks(kind: str, ranks: Any) -> int:
    count = as_integer(f"{kind}: ranks", ranks)
    if count < 1:
        raise ValueError(f"{kind}: ranks must be at least 1, got {count}.")
    return count


def checked_shape(shape: Any) -> tuple[int, ...]:
    """``shape`` as plain integers; raises for anything that is no shape."""
    sizes = _integers("shape", shape)
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape must not be negative, got {sizes}.")
    return sizes


def _integers(what: str, given: Any) -> tuple[int, ...]:
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise TypeError(f"{what} must be integers, got {given!r}.")
    values = tuple(given)
    try:
        return tuple(as_integer(what, value) for value in values)
    except TypeError:
        raise TypeError(f"{what} must be integers, got {values!r}.") from None
