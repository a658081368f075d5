"""Making, copying, saving, initialising ragged tensors; bad input."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.distributed.tensor as dtensor_module
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from ragged_cases import assert_same, numbers, ragged, whole, world_units, worlds
from ragged_fsdp.dtensor import (
    RaggedShard,
    StridedRaggedShard,
    distribute_tensor,
    is_ragged,
    ragged_layout,
    ragged_spec,
    wrap_local,
)
from rank_pool import spmd


@spmd(*worlds(1, 3))
def test_distribute_from_local_and_back(rank):
    mesh, world = rank.mesh(), rank.world_size
    for shape, prefix in (
        ((8, 6), 1),
        ((8, 6), 2),
        ((4, 3, 5), 2),
        ((7,), 1),
        ((2, 2), 1),
        ((0, 4), 1),
        ((1,), 1),
    ):
        full = numbers(0, *shape, device=rank.device)
        placement = RaggedShard(range(prefix), world_units(max(1, math.prod(shape[:prefix])), world))
        tensor = distribute_tensor(full, mesh, [placement])
        assert type(tensor) is DTensor and is_ragged(tensor) and tensor.shape == full.shape
        local = tensor.to_local()
        assert local.shape[1:] == full.shape[prefix:]
        assert local.numel() == ragged_layout(tensor).numel
        assert_same(tensor, full, exact=True)
        again = DTensor.from_local(local, mesh, [placement], shape=full.shape, stride=full.stride())
        assert again._spec == tensor._spec
        assert again.to_local().data_ptr() == local.data_ptr()
        spec = ragged_spec(mesh, [placement], shape, torch.float32)
        assert wrap_local(local, spec)._local_tensor is local
        stock = dtensor_module.distribute_tensor(full, mesh, [placement], src_data_rank=None)
        assert_same(stock.to_local(), local)
    scalar = distribute_tensor(
        torch.tensor(3.0, device=rank.device), mesh, [RaggedShard((), [1] + [0] * (world - 1))]
    )
    assert scalar.item() == 3.0
    assert_same(scalar + 1, torch.tensor(4.0))
    param = nn.Parameter(ragged(numbers(0, 8, 6, device=rank.device), mesh))
    assert isinstance(param, nn.Parameter) and param.requires_grad and "RaggedShard" in repr(param)
    for maker in ("zeros", "ones", "empty", "full"):
        args = ((8, 6), 2.0) if maker == "full" else (8, 6)
        made = getattr(dtensor_module, maker)(*args, device_mesh=mesh, placements=param.placements)
        assert made.placements == param.placements and made._local_tensor.shape == param._local_tensor.shape


@spmd(*worlds(1, 2))
def test_only_the_source_rank_decides(rank):
    mesh = rank.mesh()
    own = torch.full((4, 2), float(rank.rank), device=rank.device)
    placement = RaggedShard.on_one_rank((4, 2), rank.world_size, 0)
    assert_same(distribute_tensor(own, mesh, [placement]), torch.zeros(4, 2))
    kept = distribute_tensor(own, mesh, [placement], src_data_rank=None)
    assert_same(kept.to_local(), torch.full(kept.to_local().shape, float(rank.rank)))
    before = own.clone()
    kept.add_(1)
    assert_same(own, before)  # a sharded tensor never shares the memory of its source
    every = distribute_tensor(own, mesh, [Replicate()])
    every.redistribute(placements=[placement]).add_(1)
    assert_same(every.to_local(), torch.zeros(4, 2))


@spmd(*worlds(3))
def test_copy_pickle_and_save(rank):
    mesh = rank.mesh()
    full = numbers(1, 8, 6, device=rank.device)
    param = nn.Parameter(ragged(full, mesh))
    twin = copy.deepcopy(param)
    assert isinstance(twin, nn.Parameter) and twin.placements == param.placements
    with torch.no_grad():
        twin.add_(1)
    assert_same(param, full)
    module = nn.Linear(6, 8, bias=False)
    module.weight = param
    assert_same(copy.deepcopy(module).weight, full)
    assert_same(pickle.loads(pickle.dumps(param.detach())), full)
    buffer = io.BytesIO()
    torch.save({"param": param}, buffer)
    for weights_only in (False, True):
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=weights_only)["param"]
        assert loaded.placements == param.placements
        assert_same(loaded, full)
    with torch.no_grad():
        torch.utils.swap_tensors(twin, nn.Parameter(ragged(full * 2, mesh)))
    assert_same(twin, full * 2)


@spmd(*worlds(3))
def test_meta_device_and_moves_of_modules(rank):
    mesh = rank.mesh()
    placement = RaggedShard((0,), (1, *[0] * (rank.world_size - 2), 7))
    meta = distribute_tensor(torch.empty(8, 6, device="meta"), mesh, [placement])
    assert meta.is_meta and meta.to_local().is_meta
    module = nn.Linear(6, 8, bias=False, device="meta")
    module.weight = nn.Parameter(meta)
    nn.init.normal_(module.weight)  # draws nothing
    module.to_empty(device=rank.device)
    assert module.weight.placements == (placement,) and not module.weight.is_meta
    torch.manual_seed(0)
    module.reset_parameters()
    torch.manual_seed(0)
    reference = torch.empty(8, 6, device=rank.device)
    nn.init.kaiming_uniform_(reference, a=math.sqrt(5))
    assert_same(module.weight, reference, exact=True)
    module.to(torch.bfloat16)
    assert module.weight.dtype is torch.bfloat16 and module.weight.placements == (placement,)
    module.to("cpu").to(rank.device)
    module.double().half().float()
    assert module.weight.cpu().placements == (placement,)
    state = module.state_dict()
    fresh = nn.Linear(6, 8, bias=False)
    fresh.weight = nn.Parameter(distribute_tensor(torch.zeros(8, 6), mesh, [Shard(0)]))
    fresh.load_state_dict(state)
    assert_same(fresh.weight, state["weight"])
    fresh.load_state_dict(state, assign=True)
    assert fresh.weight.placements == (placement,)
    embedding = nn.Embedding(8, 6, padding_idx=2, device=rank.device)
    embedding.weight = nn.Parameter(distribute_tensor(embedding.weight.data, mesh, [placement]))
    torch.manual_seed(0)
    embedding.reset_parameters()
    torch.manual_seed(0)
    assert_same(embedding.weight, nn.Embedding(8, 6, padding_idx=2, device=rank.device).weight)


INITS = {
    "normal": lambda t: t.normal_(0, 2),
    "uniform": lambda t: t.uniform_(-1, 1),
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "xavier_normal": nn.init.xavier_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "trunc_normal": lambda t: nn.init.trunc_normal_(t, std=0.02),
    "bernoulli": lambda t: t.bernoulli_(0.3),
    "exponential": lambda t: t.exponential_(),
    "log_normal": lambda t: t.log_normal_(),
    "random": lambda t: t.random_(0, 10),
    "constant": lambda t: nn.init.constant_(t, 3),
    "ones": nn.init.ones_,
    "zeros": nn.init.zeros_,
}


@spmd(*worlds(1, 3))
def test_random_numbers_are_those_of_the_whole_tensor(rank):
    mesh, world, device = rank.mesh(), rank.world_size, rank.device
    for shape, prefix in (((8, 6), 1), ((5, 3), 2), ((3, 7), 1)):
        tensor = ragged(torch.zeros(shape, device=device), mesh, prefix=prefix)
        reference = torch.zeros(shape, device=device)
        for name, init in INITS.items():
            for target in (reference, tensor):
                torch.manual_seed(3)
                init(target)
                after = torch.rand(1, device=device)
                if target is reference:
                    expected_after = after
            assert_same(tensor, reference, name, exact=True)
            assert_same(after, expected_after, name, exact=True)
        for call in (
            torch.randn_like,
            torch.rand_like,
            lambda t: torch.randint_like(t, 10),
        ):
            torch.manual_seed(3)
            expected = call(reference)
            torch.manual_seed(3)
            assert_same(call(tensor), expected)
        mine, theirs = (torch.Generator(device).manual_seed(7) for _ in range(2))
        tensor.normal_(generator=mine)
        assert_same(tensor, reference.normal_(generator=theirs), exact=True)
        assert torch.equal(mine.get_state(), theirs.get_state())
    for made, expected in ((dtensor_module.rand, torch.rand), (dtensor_module.randn, torch.randn)):
        torch.manual_seed(4)
        tensor = made(8, 6, device_mesh=mesh, placements=[RaggedShard((0,), world_units(8, world))])
        torch.manual_seed(4)
        assert_same(tensor, expected(8, 6, device=device), exact=True)
    grid = rank.mesh(1, world)
    tensor = distribute_tensor(
        torch.zeros(6, 4, device=device), grid, [Shard(1), RaggedShard((0,), world_units(6, world))]
    )
    torch.manual_seed(5)
    reference = torch.zeros(6, 4, device=device).normal_()
    torch.manual_seed(5)
    assert_same(tensor.normal_(), reference, exact=True)


@spmd(2)
def test_chunked_draws_equal_one_large_draw(rank):
    """The scratch buffer is bounded; sizes around the chunk and the generator's block of 16."""
    from ragged_fsdp.dtensor import construct

    mesh, chunk = rank.mesh(), construct._CHUNK_NUMEL
    construct._CHUNK_NUMEL = 64
    try:
        for numel in (15, 16, 63, 64, 65, 79, 80, 81, 127, 128, 129, 143, 200):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                for draw in (lambda t: t.normal_(1, 2), lambda t: t.uniform_(-1, 3)):
                    tensor = ragged(torch.zeros(numel, device=rank.device, dtype=dtype), mesh)
                    reference = torch.zeros(numel, device=rank.device, dtype=dtype)
                    torch.manual_seed(1)
                    draw(reference)
                    after = torch.rand(4)
                    torch.manual_seed(1)
                    draw(tensor)
                    assert_same(tensor, reference, f"{numel} {dtype}", exact=True)
                    assert_same(after, torch.rand(4), exact=True)
    finally:
        construct._CHUNK_NUMEL = chunk


@spmd(2)
def test_bad_input_is_refused_before_any_collective(rank):
    mesh = rank.mesh()
    full = numbers(0, 8, 6, device=rank.device)
    grid, columns = rank.mesh(2, 1), rank.mesh(1, 2)
    elsewhere = _mesh_of_rank_zero(rank)
    good = ragged(full, mesh)

    def place(*placements, on=mesh, tensor=full):
        return lambda: distribute_tensor(tensor, on, list(placements))

    bad = [
        (place(RaggedShard((0,), (3, 4))), ValueError, "sum 7 of the units does not divide the 48"),
        (place(RaggedShard((0,), (1, 2, 1))), ValueError, "3 units for mesh dim 0 of 2 ranks"),
        (place(RaggedShard((0,), (1, 47))), ValueError, "cut through the dims"),
        (place(RaggedShard((0, 1, 2), (1, 1))), ValueError, "prefix of the dims"),
        (place(RaggedShard((), (1, 1))), ValueError, "prefix of the dims"),
        (
            place(RaggedShard((0,), (1, 1)), RaggedShard((0,), (1,)), on=grid),
            ValueError,
            "would cut dim 0 twice; use StridedRaggedShard first",
        ),
        (
            place(StridedRaggedShard((0,), (1, 1)), RaggedShard((0, 1), (1,)), on=grid),
            ValueError,
            "must be a RaggedShard of whole rows",
        ),
        (place(RaggedShard((0,), (1, 1)), Shard(0), on=grid), ValueError, "use StridedRaggedShard"),
        (place(RaggedShard((0,), (1, 1)), on=grid), ValueError, "1 placements .* mesh of 2 dims"),
        (place(RaggedShard((0,), (1, 1)), Shard(2), on=grid), ValueError, "does not fit shape"),
        (place(RaggedShard((0,), (1, 1)), tensor=full.t()), ValueError, "contiguous"),
        (lambda: DTensor.from_local(full, mesh, [RaggedShard((0,), (1, 1))]), ValueError, "pass shape="),
        (
            lambda: DTensor.from_local(
                full, mesh, [RaggedShard((0,), (1, 1))], shape=full.shape, stride=full.stride()
            ),
            ValueError,
            r"has shape \(4, 6\) on this rank, got \(8, 6\)",
        ),
        (
            lambda: DTensor.from_local(
                full[:4], mesh, [RaggedShard((0,), (1, 1))], shape=full.shape, stride=(1, 8)
            ),
            ValueError,
            "contiguous",
        ),
        (lambda: good.redistribute(placements=[RaggedShard((0,), (3, 4))]), ValueError, "does not divide"),
        (lambda: good.redistribute(placements=[Shard(2)]), ValueError, "does not fit shape"),
        (lambda: ragged_layout(full), TypeError, "a ragged DTensor or its spec, got Tensor"),
        (place(RaggedShard((0,), (1, 1)), tensor=[1.0]), TypeError, "expected a tensor, got list"),
        (place(RaggedShard((0,), (1, 1)), on=2), TypeError, "expected a DeviceMesh, got 2"),
        (place(RaggedShard((0,), (1, 1)), "a", on=grid), TypeError, "placements must be a list"),
        (lambda: distribute_tensor(full, mesh, good.placements[0]), TypeError, "placements must be a list"),
        (
            lambda: distribute_tensor(full, mesh, good.placements, src_data_rank=2),
            ValueError,
            r"src_data_rank must be None .* in \[0, 2\), got 2",
        ),
        # what fits one outer shard only is refused on every rank
        (place(StridedRaggedShard(0, ((1,), (0,))), Shard(0), on=columns), ValueError, "the sum 0 .* 24"),
        (
            place(StridedRaggedShard(0, ((1,), (0,), (1,))), Shard(0), on=columns, tensor=full[:1]),
            ValueError,
            "3 tuples of units for 2 outer shards",
        ),
    ]
    if rank.rank == 1:
        bad.append((place(RaggedShard((0,), (1,)), on=elsewhere), ValueError, "not in the mesh"))
    for call, error, message in bad:
        with CommDebugMode() as comm, pytest.raises(error, match=message):
            call()
        assert comm.get_total_counts() == 0, message
    with pytest.raises(NotImplementedError, match="between meshes"):
        good.redistribute(grid, [Replicate(), Replicate()])


def _mesh_of_rank_zero(rank):
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(rank.device, [0])


@spmd(4)
def test_offsets_where_the_piece_is_one_box(rank):
    """What other libraries ask torch for, to find a local tensor in the whole one."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as find

    mesh = rank.mesh()
    rows = [((1, 4), (0, 0)), ((0, 4), (6, 0)), ((3, 4), (1, 0)), ((2, 4), (4, 0))]
    assert find((6, 4), mesh, [RaggedShard((0,), (1, 0, 3, 2))]) == rows[rank.rank]
    flat = [RaggedShard((0, 1), (5, 7, 8, 4))]
    assert find((6, 4), mesh, flat, skip_offset=True)[0] == ((5,), (7,), (8,), (4,))[rank.rank]
    with pytest.raises(NotImplementedError, match=r"is not one box.*ragged_layout\(\.\.\.\)\.boxes\(\)"):
        find((6, 4), mesh, flat)


@spmd(4)
def test_three_dim_mesh(rank):
    mesh = rank.mesh(2, 2, 1, names=("replica", "shard", "tp"))
    full = numbers(0, 8, 6, device=rank.device)
    for placements in (
        (Replicate(), StridedRaggedShard((0,), (3, 1)), Shard(0)),
        (Replicate(), RaggedShard((0,), (3, 5)), Shard(1)),
        (Shard(1), RaggedShard((0,), (1, 0)), Replicate()),
    ):
        tensor = distribute_tensor(full, mesh, placements)
        assert_same(tensor, full)
        assert_same((tensor * 2).sum(), full.sum() * 2)
        assert_same(tensor.redistribute(placements=[Shard(0), Replicate(), Replicate()]), full)
        assert whole(tensor.norm()).item() == pytest.approx(full.norm().item(), rel=1e-5)


@spmd(4)
def test_whole_rows_over_one_mesh_dim_and_ragged_pieces_of_them_over_another(rank):
    """Five rows lie 4 and 1, or 0 and 5, and each part is cut again; moves and boxes keep every bit."""
    mesh = rank.mesh(2, 2, names=("dp", "ep"))
    full = numbers(0, 5, 4, 6, device=rank.device)
    layouts = [
        (StridedRaggedShard((0, 1), ((3, 13), (1, 3))), RaggedShard((0,), (4, 1))),
        (StridedRaggedShard((0,), ((0, 0), (2, 3))), RaggedShard((0,), (0, 5))),
        (StridedRaggedShard((0, 1, 2), ((1, 5), (29, 7))), RaggedShard((0,), (2, 3))),
    ]
    for placements in layouts:
        tensor = distribute_tensor(full, mesh, placements)
        assert_same(tensor, full, exact=True)
        boxes = ragged_layout(tensor).boxes()
        assert sum(math.prod(sizes) for _, sizes in boxes) == tensor.to_local().numel()
        cut = [full[tuple(slice(o, o + s) for o, s in zip(*box))].reshape(-1) for box in boxes]
        assert torch.equal(torch.cat([*cut, full.new_empty(0)]), tensor.to_local().reshape(-1))
        for other in (
            *layouts,
            (Replicate(), RaggedShard((0,), (3, 2))),
            (Shard(1), Replicate()),
            (Replicate(), Shard(0)),
        ):
            assert_same(tensor.redistribute(placements=other), full, exact=True)
            assert_same(
                tensor.redistribute(placements=other).redistribute(placements=placements), full, exact=True
            )
        assert_same(tensor * 2 + tensor, full * 3, exact=True)
        assert_same(tensor.sum((1, 2)), full.sum((1, 2)))
        assert_same(tensor.sum(0), full.sum(0))
        assert whole(tensor.norm()).item() == pytest.approx(full.norm().item(), rel=1e-5)
    with pytest.raises(NotImplementedError, match="view"):
        tensor.view(-1)
