"""DBuffer alone, without modules: placements, views, group operations, memory."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode

from ragged_fsdp import DBuffer, Elements, Rows, Whole
from ragged_fsdp.layout import TensorSpec
from ragged_fsdp.planner import plan_group
from rank_pool import Rank, spmd

SHAPES = {"a": (13, 8), "b": (40,), "c": (5, 3, 4), "empty": (0, 7), "one": (1,)}
BLOCKS = {"a": Rows(1), "b": Elements(10), "c": Whole()}


def tensors(device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn(shape, device=device) for name, shape in SHAPES.items()}


def full_buffer(rank: Rank, mesh: object, placements: tuple, scale: float) -> DBuffer:
    sharded = DBuffer.distribute(tensors(rank.device), mesh, granularity=BLOCKS)
    made = DBuffer(sharded.layout, sharded.shapes, mesh, placements, dtype=torch.float32)
    made.zero_()
    for view, value in zip(made.tensors, tensors(rank.device).values()):
        view.copy_(value * scale)
    return made


@spmd(1, 2, 3, 4)
def test_every_transition(rank: Rank) -> None:
    mesh, values = rank.mesh(), list(tensors(rank.device).values())
    sharded = DBuffer.distribute(tensors(rank.device), mesh, granularity=BLOCKS)
    assert sharded.flat.numel() == sharded.layout.shard_numel
    for index, value in enumerate(values):
        dtensor = sharded.dtensor(index)
        assert torch.equal(dtensor.full_tensor(), value)
        if dtensor.to_local().numel():
            assert DBuffer.of(dtensor) == (sharded, index)
    for async_op in (False, True):
        whole = sharded.redistribute([Replicate()], async_op=async_op).wait()
        assert all(torch.equal(view, value) for view, value in zip(whole.tensors, values))
        twice = sharded.redistribute([Replicate()], async_op=async_op).redistribute([Replicate()])
        assert torch.equal(twice.redistribute([Shard(0)]).flat, sharded.flat)  # waits for the first by itself
        back = whole.redistribute([Shard(0)])
        assert back.flat.untyped_storage().data_ptr() == whole.flat.untyped_storage().data_ptr()  # a view
        assert torch.equal(back.flat, sharded.flat)
        partial = full_buffer(rank, mesh, (Partial(),), rank.rank + 1.0)
        total = rank.world_size * (rank.world_size + 1) / 2
        reduced = partial.redistribute([Shard(0)], async_op=async_op).wait()
        torch.testing.assert_close(reduced.flat, sharded.flat * total)
        partial = full_buffer(rank, mesh, (Partial(),), rank.rank + 1.0)
        mean = partial.redistribute([Replicate()], average=True, async_op=async_op).wait()
        for view, value in zip(mean.tensors, values):
            torch.testing.assert_close(view, value * total / rank.world_size)


@spmd(2, 4)
def test_replicas_and_shards(rank: Rank) -> None:
    """(Partial, Partial) to (Replicate, Shard(0)): a reduce-scatter, then an all-reduce of the shard."""
    mesh = rank.mesh(2, rank.world_size // 2, names=("replicate", "shard"))
    partial = full_buffer(rank, mesh, (Partial(), Partial()), rank.rank + 1.0)
    sharded = DBuffer.distribute(tensors(rank.device), mesh, granularity=BLOCKS)
    total = rank.world_size * (rank.world_size + 1) / 2
    out = DBuffer(sharded.layout, sharded.shapes, mesh, dtype=torch.float64)
    partial.redistribute([Replicate(), Shard(0)], out=out)
    torch.testing.assert_close(out.flat, sharded.flat.double() * total)
    with pytest.raises(ValueError, match="no redistribution from"):
        sharded.redistribute([Partial(), Shard(0)])
    with pytest.raises(ValueError, match="mesh dim 0"):
        sharded.redistribute([Shard(0), Replicate()])


@spmd(2)
def test_what_is_known_of_earlier_calls_is_neither_stale_nor_piled_up(rank: Rank) -> None:
    """A list of placements may be changed between calls; results may be new buffers each time."""
    mesh, values = rank.mesh(), list(tensors(rank.device).values())
    sharded = DBuffer.distribute(tensors(rank.device), mesh, granularity=BLOCKS)
    wanted: list[Placement] = [Replicate()]
    whole = sharded.redistribute(wanted)
    wanted[0] = Shard(0)
    assert sharded.redistribute(wanted) is sharded
    assert torch.equal(whole.redistribute(wanted).flat, sharded.flat)
    for _ in range(20):
        gathered = sharded.redistribute((Replicate(),), out=whole.with_placements((Replicate(),)))
        assert all(torch.equal(view, value) for view, value in zip(gathered.tensors, values))
    assert len(sharded._moves) <= 8


class _Operators(TorchDispatchMode):
    """Notes the operators that run, other than views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("replicas", [None, 1])
@spmd(2, 3)
def test_one_copy_and_one_collective_beside_a_dim_of_one_rank(rank: Rank, replicas: int | None) -> None:
    mesh = rank.mesh() if replicas is None else rank.mesh(1, rank.world_size, names=("replicate", "shard"))
    everywhere = (Replicate(),) * mesh.ndim
    sharded = DBuffer.distribute(tensors(rank.device), mesh, granularity=BLOCKS)
    out = DBuffer(sharded.layout, sharded.shapes, mesh, everywhere, dtype=torch.bfloat16)
    for _ in range(2):
        with _Operators() as noted:
            sharded.redistribute(everywhere, out=out)
    assert len(noted.names) == 2 and noted.names[0] == "copy_", noted.names  # and the gather
    for view, value in zip(out.tensors, tensors(rank.device).values()):
        assert torch.equal(view, value.bfloat16())


@spmd(3)
def test_group_operations_cast_and_memory(rank: Rank) -> None:
    mesh, values = rank.mesh(), list(tensors(rank.device).values())
    sharded = DBuffer.distribute(tensors(rank.device), mesh, granularity=BLOCKS)
    low = sharded.to(torch.bfloat16)
    assert torch.equal(low.flat, sharded.flat.bfloat16())
    doubled = sharded.to(torch.float32).mul_(3).add_(sharded, alpha=-1)
    torch.testing.assert_close(doubled.flat, sharded.flat * 2)
    whole = DBuffer(low.layout, low.shapes, mesh, [Replicate()], dtype=torch.bfloat16, allocate=False)
    views, version = whole.tensors, whole.tensors[0]._version
    for _ in range(2):  # gathered, released and gathered again: the same tensor objects, no version change
        assert not whole.is_materialized
        sharded.redistribute([Replicate()], out=whole)
        assert all(torch.equal(view, value.bfloat16()) for view, value in zip(views, values))
        whole.release()
    assert views[0]._version == version
    assert [tuple(v.shape) for v in views] == list(SHAPES.values())


R, S, P = Replicate(), Shard(0), Partial()


class Levels:
    """A group of tensors that is cut over the last dims of a mesh, and what each rank should hold of it."""

    def __init__(self, rank: Rank, sizes: tuple[int, ...], replicas: int) -> None:
        self.mesh = rank.mesh(*sizes, names=("first", "second", "third")[: len(sizes)])
        self.replicas, self.cut_sizes = replicas, sizes[replicas:]
        self.index = 0  # of this rank's shard: its place among the dims that are cut, in row-major order
        for size, place in zip(self.cut_sizes, self.mesh.get_coordinate()[replicas:]):
            self.index = self.index * size + place
        self.values = list(tensors(rank.device).values())
        specs = DBuffer.distribute(tensors(rank.device), rank.mesh(), granularity=BLOCKS).layout.specs
        self.layout = plan_group(specs, math.prod(self.cut_sizes), unit=4, align=4)
        full = torch.zeros(self.layout.buffer_numel, device=rank.device)
        for offset, value in zip(self.layout.offsets, self.values):
            full[offset : offset + value.numel()] = value.flatten()
        self.shard = full.view(-1, self.layout.shard_numel)[self.index]

    def placed(self, inner: Sequence[Placement], outer: Placement = R) -> list[Placement]:
        """``inner`` over the dims that are cut, ``outer`` over the replicas."""
        return [outer] * self.replicas + list(inner)

    def everywhere(self, inner: Placement) -> list[Placement]:
        """``inner`` over each dim that is cut."""
        return self.placed([inner] * len(self.cut_sizes))

    def buffer(self, placements: list[Placement], dtype: torch.dtype = torch.float32) -> DBuffer:
        """A buffer of zeros."""
        shapes = [value.shape for value in self.values]
        return DBuffer(self.layout, shapes, self.mesh, placements, dtype=dtype).zero_()

    def paths(self, start: Placement, end: Placement) -> list[list[list[Placement]]]:
        """From ``start`` to ``end``: at once, and dim by dim from the last, which is inside a node."""
        dims = len(self.cut_sizes)
        by_dim = [[start] * (dims - done) + [end] * done for done in range(1, dims + 1)]
        return [[[end] * dims], by_dim]


MESHES = {  # sizes of the mesh dims, and how many of them, from the first, are replicas
    ("one level", 1): [((1,), 0), ((1, 1), 1)],
    ("one level", 2): [((2,), 0), ((2, 1), 1), ((1, 2), 1)],
    ("one level", 4): [((4,), 0), ((2, 2), 1), ((2, 1, 2), 2)],
    ("levels", 1): [((1, 1), 0)],
    ("levels", 2): [((1, 2), 0), ((2, 1), 0), ((2, 1, 1), 1)],
    ("levels", 4): [((2, 2), 0), ((1, 2, 2), 0), ((2, 1, 2), 0), ((2, 2, 1), 1), ((1, 2, 2), 1)],
}
KINDS = ["one level", "levels"]


@pytest.mark.parametrize("kind", KINDS)
@spmd(1, 2, 4)
def test_gathers_level_by_level(rank: Rank, kind: str) -> None:
    """The shards of a node first, then those of all nodes; or along the first dim first; or at once."""
    for sizes, replicas in MESHES[kind, rank.world_size]:
        levels = Levels(rank, sizes, replicas)
        paths = levels.paths(S, R) + ([[[R, S], [R, R]]] if len(levels.cut_sizes) == 2 else [])
        for path, async_op in itertools.product(paths, (False, True)):
            buffer = levels.buffer(levels.everywhere(S))
            buffer.flat.copy_(levels.shard)
            for inner in path:
                buffer = buffer.redistribute(levels.placed(inner), async_op=async_op).wait()
                gathered = math.prod(size for size, now in zip(levels.cut_sizes, inner) if now == R)
                assert buffer.flat.numel() == gathered * levels.layout.shard_numel
            for view, value in zip(buffer.tensors, levels.values):
                assert torch.equal(view, value), (sizes, replicas, path)
            assert torch.equal(buffer.redistribute(levels.everywhere(S)).flat, levels.shard)


@pytest.mark.parametrize("kind", KINDS)
@spmd(1, 2, 4)
def test_reduces_level_by_level(rank: Rank, kind: str) -> None:
    """Inside a node first, then between nodes; or at once. Replicas are reduced as well."""
    mean = (rank.world_size + 1) / 2
    for sizes, replicas in MESHES[kind, rank.world_size]:
        levels = Levels(rank, sizes, replicas)
        for path, average in itertools.product(levels.paths(P, S), (False, True)):
            expected = levels.shard * mean * (1 if average else rank.world_size)
            buffer = levels.buffer([P] * len(sizes))
            for view, value in zip(buffer.tensors, levels.values):
                view.copy_(value * (rank.rank + 1))
            for inner in path:
                buffer = buffer.redistribute(levels.placed(inner), average=average)
            torch.testing.assert_close(buffer.flat, expected, msg=f"{sizes}, {replicas}: {path}")
            out = levels.buffer(levels.everywhere(S), torch.float64)
            buffer.redistribute(out.placements, out=out)
            torch.testing.assert_close(out.flat.float(), expected)


@spmd(2, 3)
def test_dtypes_that_no_backend_knows_travel_as_bytes(rank: Rank) -> None:
    for dtype in (torch.complex64, torch.float8_e4m3fn, torch.bool):
        values = {"x": torch.arange(37, device=rank.device).remainder(2).to(dtype)}
        sharded = DBuffer.distribute(values, rank.mesh())
        for async_op in (False, True):
            whole = sharded.redistribute([Replicate()], async_op=async_op)
            assert torch.equal(whole.tensor(0).view(torch.uint8), values["x"].view(torch.uint8)), dtype


@spmd(2, 3)
def test_every_dtype_in_one_gather(rank: Rank) -> None:
    """Item sizes 1, 2 and 4 share a buffer of cells of one byte and are gathered byte-exactly."""
    mesh = rank.mesh()
    dtypes = (torch.int8, torch.bfloat16, torch.float32)
    shapes = ((33,), (6, 5), (11,))
    specs = tuple(
        TensorSpec(str(i), torch.Size(s).numel() * d.itemsize, d.itemsize)
        for i, (s, d) in enumerate(zip(shapes, dtypes))
    )
    layout = plan_group(specs, rank.world_size, unit=16, align=16)
    full = DBuffer(layout, shapes, mesh, [Replicate()], dtype=dtypes, cell_bytes=1)
    values = [torch.randint(-100, 100, s, device=rank.device).to(d) for s, d in zip(shapes, dtypes)]
    full.zero_()
    for view, value in zip(full.tensors, values):
        view.copy_(value)
    shard = DBuffer(layout, shapes, mesh, dtype=dtypes, cell_bytes=1).copy_(full.redistribute([Shard(0)]))
    gathered = shard.redistribute([Replicate()])
    assert all(torch.equal(view, value) for view, value in zip(gathered.tensors, values))
    with pytest.raises(TypeError, match="one dtype"):
        gathered.mul_(2)


@spmd(2)
def test_bad_input_is_named(rank: Rank) -> None:
    mesh = rank.mesh()
    with pytest.raises(ValueError, match="at least one tensor"):
        DBuffer.distribute({}, mesh)
    with pytest.raises(ValueError, match="one dtype"):
        DBuffer.distribute({"x": torch.ones(2), "y": torch.ones(2).half()}, mesh)
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        DBuffer.distribute({"x": [1.0]}, mesh)
    with pytest.raises(ValueError, match=r"granularity names \['z'\]; the tensors are \['x'\]"):
        DBuffer.distribute({"x": torch.ones(2)}, mesh, granularity={"z": Rows(1)})
    layout = plan_group((TensorSpec("x", 6),), 2, unit=1)
    with pytest.raises(ValueError, match=r"x: shape \(5,\)"):
        DBuffer(layout, [(5,)], mesh, dtype=torch.float32)
    with pytest.raises(ValueError, match="layout has 3 ranks"):
        DBuffer(plan_group((TensorSpec("x", 6),), 3, unit=1), [(6,)], mesh, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"takes Shard\(0\), Replicate\(\) or Partial\(\), got .*max"):
        DBuffer(layout, [(6,)], mesh, [Partial("max")], dtype=torch.float32)
    buffer = DBuffer(layout, [(6,)], mesh, dtype=torch.float32)
    other = DBuffer(plan_group((TensorSpec("y", 8),), 2, unit=1), [(8,)], mesh, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"other has another layout; .*got DBuffer\(1 tensors, 4 x 2"):
        buffer.add_(other)
    with pytest.raises(ValueError, match=r"distribute: x: granularity Rows.* does not divide"):
        DBuffer.distribute({"x": torch.ones(3, 4)}, mesh, granularity={"x": Rows(2)})
    made = {"layout": layout, "shapes": [(6,)], "mesh": mesh, "placements": None, "dtype": torch.float32}
    for name in made:
        with pytest.raises(TypeError, match=f"DBuffer: {name} must be .*, got 3"):
            DBuffer(**{**made, name: 3})
    calls = {
        "other": lambda: buffer.copy_(3),
        "factor": lambda: buffer.mul_("3"),
        "placements": lambda: buffer.redistribute(None),
        "out": lambda: buffer.redistribute([Replicate()], out=3),
        "tensors": lambda: DBuffer.distribute(3, mesh),
        "unit": lambda: DBuffer.distribute({"x": torch.ones(2)}, mesh, unit=2.5),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name} must be .*, got"):
            call()
    assert DBuffer.distribute({"x": torch.ones(10)}, mesh, unit=3).layout.shard_numel % 3 == 0
    elsewhere = DeviceMesh(rank.device, [0])
    if rank.rank == 1:
        with pytest.raises(ValueError, match="not in the mesh"):
            DBuffer.distribute({"x": torch.ones(2)}, elsewhere)


@spmd(2)
def test_results_and_memory_that_do_not_fit_are_refused_before_the_collective(rank: Rank) -> None:
    mesh = rank.mesh()
    sharded = DBuffer.distribute(tensors(rank.device), mesh, granularity=BLOCKS)
    partial = full_buffer(rank, mesh, (Partial(),), 1.0)
    other = DBuffer.distribute({"x": torch.ones(9, device=rank.device)}, mesh)
    with pytest.raises(ValueError, match="out has another layout"):
        partial.redistribute([Shard(0)], out=other)
    with pytest.raises(
        ValueError, match=r"out has placements \(Shard\(dim=0\),\), expected \(Replicate\(\),\)"
    ):
        partial.redistribute([Replicate()], out=sharded)
    out = DBuffer(sharded.layout, sharded.shapes, mesh, dtype=torch.float32)
    out.release()
    reading = (lambda: out.tensor(0), lambda: out.dtensor(0), lambda: sharded.copy_(out))
    for operation in (out.zero_, lambda: out.mul_(2), lambda: sharded.add_(out), *reading):
        with pytest.raises(RuntimeError, match="needs memory that was released"):
            operation()
    with pytest.raises(RuntimeError, match="redistribute needs memory that was released"):
        out.redistribute([Replicate()])
    assert partial.placements == (Partial(),)
    partial.redistribute([Shard(0)], out=out, average=True)  # the memory of a result is brought back
    torch.testing.assert_close(out.flat, sharded.flat)


@spmd(2)
def test_sums_are_not_mixed_with_their_parts_and_memory_in_use_is_not_freed(rank: Rank) -> None:
    mesh = rank.mesh()
    sharded = DBuffer.distribute(tensors(rank.device), mesh, granularity=BLOCKS)
    whole, partial = sharded.redistribute([Replicate()]), full_buffer(rank, mesh, (Partial(),), 1.0)
    for operation in (partial.add_, partial.copy_):
        with pytest.raises(ValueError, match=r"other has placements \(Replicate\(\),\), expected \(Partial"):
            operation(whole)
    gathered = sharded.redistribute([Replicate()], async_op=True)
    gathered.release()  # waits: the collective would write freed memory
    gathered = sharded.redistribute([Replicate()], out=gathered, async_op=True).mul_(2)
    torch.testing.assert_close(gathered.flat, whole.flat * 2)
    out = DBuffer(sharded.layout, sharded.shapes, mesh, dtype=torch.float32)
    partial.redistribute([Shard(0)], out=out, average=True, async_op=True)
    partial.release()
    torch.testing.assert_close(out.wait().flat, sharded.flat)
