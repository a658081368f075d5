"""Moves between ragged and other placements: values, collectives, bytes, gradients."""

import itertools

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from ragged_cases import assert_same, fewer, numbers, world_units, worlds
from ragged_fsdp.dtensor import (
    RaggedShard,
    StridedRaggedShard,
    distribute_tensor,
    ragged_layout,
    redistribute,
)
from ragged_fsdp.dtensor.geometry import with_placements
from ragged_fsdp.dtensor.redistribute import redistribute_local_tensor
from rank_pool import spmd


@spmd(*worlds(1, 2, 3, 4))
def test_every_pair_keeps_the_values(rank):
    mesh, world = rank.mesh(), rank.world_size
    for shape in fewer([(7, 5), (8, 6), (3, 4, 5)]):
        full = numbers(1, *shape, device=rank.device)
        rows, numel = shape[0], full.numel()
        places = [
            RaggedShard((0,), world_units(rows, world)),
            RaggedShard(range(full.ndim), world_units(numel, world, seed=1)),
            RaggedShard.on_one_rank(shape, world, world - 1),
            RaggedShard.even(shape, world)
            if numel % world == 0
            else RaggedShard((0,), [rows] + [0] * (world - 1)),
            Replicate(),
            *(Shard(d) for d in range(full.ndim)),
        ]
        for before, after in itertools.product([*places, Partial()], places):
            for async_op in (False, True):
                if isinstance(before, Partial):
                    start = DTensor.from_local(full / world, mesh, [before], run_check=False)
                else:
                    start = distribute_tensor(full, mesh, [before])
                end = start.redistribute(placements=[after], async_op=async_op)
                note = f"{shape} {before} -> {after} async={async_op}"
                assert end.placements == (after,), note
                expected = distribute_tensor(full, mesh, [after]).to_local()
                assert_same(end.to_local() + 0, expected, note, exact=not isinstance(before, Partial))


@spmd(4)
def test_each_transition_uses_its_collective(rank):
    """The collectives of the transition table, and none where nothing moves."""
    mesh = rank.mesh()
    full = numbers(1, 8, 8, device=rank.device)
    even, rows = RaggedShard((0,), (1, 1, 1, 1)), RaggedShard((0,), (1, 0, 4, 3))
    one, skewed = RaggedShard((0,), (0, 0, 1, 0)), RaggedShard((0,), (7, 0, 0, 1))
    table = [
        (rows, RaggedShard((0, 1), (1, 0, 4, 3)), None),
        (even, Shard(0), None),
        (Shard(0), even, None),
        (Replicate(), rows, None),
        (rows, even, "all_to_all_single"),
        (rows, one, "all_to_all_single"),
        (one, rows, "all_to_all_single"),
        (rows, Shard(0), "all_to_all_single"),
        (rows, Shard(1), "all_to_all_single"),
        (Shard(1), rows, "all_to_all_single"),
        (Shard(0), rows, "all_to_all_single"),
        (even, Replicate(), "all_gather_into_tensor"),
        (rows, Replicate(), "all_to_all_single"),
        (skewed, Replicate(), "all_to_all_single"),
        (one, Replicate(), "broadcast"),
        (Partial(), even, "reduce_scatter_tensor"),
        (Partial(), rows, "reduce_scatter_tensor"),
        (Partial(), one, "all_reduce"),
    ]
    for before, after, collective in table:
        if isinstance(before, Partial):
            start = DTensor.from_local(full / 4, mesh, [before], run_check=False)
        else:
            start = distribute_tensor(full, mesh, [before])
        with CommDebugMode() as comm:
            end = start.redistribute(placements=[after])
        seen = {op.__name__.split(".")[-1]: n for op, n in comm.get_comm_counts().items() if n}
        assert seen == ({collective: 1} if collective else {}), (before, after, seen)
        assert_same(end, full)


@spmd(2, 3, 4)
def test_large_pieces_are_spread_before_they_are_gathered(rank):
    """No rank sends its piece to all the others: each has an equal share to send, whoever owned it."""
    mesh, world = rank.mesh(), rank.world_size
    for shape, units in {
        (12, 2): (1,) * (world - 1) + (12 - (world - 1),),  # 24 elements: equal shares
        (11, 3): (10,) + (0,) * (world - 2) + (1,),  # 33: the last share is padded, middle ranks own nothing
        (5,): (2, 3) + (0,) * (world - 2),  # shares of 2 on 4 ranks: the last rank has none
    }.items():
        full = numbers(1, *shape, device=rank.device)
        ragged = distribute_tensor(full, mesh, [RaggedShard((0,), units)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(redistribute, "_SENT_TO_ALL", 0)
            for async_op in (False, True):
                with CommDebugMode() as comm:
                    whole = ragged.redistribute(placements=[Replicate()], async_op=async_op).to_local()
                seen = {op.__name__.split(".")[-1]: n for op, n in comm.get_comm_counts().items() if n}
                assert seen == {"all_to_all_single": 1, "all_gather_into_tensor": 1}
                assert torch.equal(whole + 0, full)
                assert whole.untyped_storage().nbytes() == full.nbytes


@spmd(1, 3)
@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.float8_e4m3fn, torch.int16, torch.bool, torch.bfloat16], ids=str
)
def test_dtypes_that_no_backend_knows_move_as_bytes(rank, dtype):
    """Gloo refuses complex, float8 and 16-bit integers: they could not be saved as a full state dict."""
    mesh, world = rank.mesh(), rank.world_size
    full = (numbers(1, 6, 4, device=rank.device) * 3).to(dtype)
    bits = full.view(torch.uint8)
    uneven = RaggedShard((0,), (6,) if world == 1 else (4,) + (0,) * (world - 2) + (2,))
    others = [
        Replicate(),
        Shard(1),
        RaggedShard((0,), (1,) * world),
        RaggedShard.on_one_rank((6, 4), world, world - 1),
    ]
    ragged = distribute_tensor(full, mesh, [uneven], src_data_rank=None)
    with pytest.MonkeyPatch.context() as patch:
        for most in (0, redistribute._SENT_TO_ALL):
            patch.setattr(redistribute, "_SENT_TO_ALL", most)
            for other in others:
                moved = ragged.redistribute(placements=[other]).redistribute(placements=[uneven])
                whole = moved.redistribute(placements=[Replicate()], async_op=True).to_local()
                assert torch.equal(whole.contiguous().view(torch.uint8), bits)
                assert torch.equal(moved.full_tensor().view(torch.uint8), bits)


@spmd(2, 4)
def test_gradients_return_to_the_source_layout(rank):
    mesh, world = rank.mesh(), rank.world_size
    full = numbers(1, 8, 6, device=rank.device)
    factor = numbers(2, 8, 6, device=rank.device)
    source = RaggedShard((0,), world_units(8, world))
    for target in (Replicate(), Shard(1), RaggedShard.on_one_rank((8, 6), world, 0)):
        param = distribute_tensor(full, mesh, [source]).requires_grad_()
        weight = distribute_tensor(factor, mesh, [target])
        (param.redistribute(placements=[target]) * weight).sum().backward()
        assert param.grad.placements == (source,)
        assert param.grad.stride() == param.stride()
        assert_same(param.grad, factor)
    param = distribute_tensor(full, mesh, [source]).requires_grad_()
    (param.full_tensor(grad_placements=[Partial()]) * (rank.rank + 1)).sum().backward()
    assert param.grad.placements == (source,)
    assert_same(param.grad, torch.full_like(full, world * (world + 1) / 2))
    local = full.clone().requires_grad_()
    pending = DTensor.from_local(local, mesh, [Partial()], run_check=False)
    loss = (pending.redistribute(placements=[source]) * distribute_tensor(factor, mesh, [source])).sum()
    with CommDebugMode() as comm:
        loss.backward()
    assert "all_reduce" not in str({k for k, n in comm.get_comm_counts().items() if n}), (
        comm.get_comm_counts()
    )
    assert_same(local.grad, factor)


@spmd(4)
def test_two_dim_meshes(rank):
    mesh = rank.mesh(2, 2, names=("dp", "tp"))
    cases = [
        ((8, 6), (StridedRaggedShard((0,), (3, 1)), Shard(0))),
        ((5, 6), (StridedRaggedShard((0,), ((1, 2), (2, 0))), Shard(0))),
        ((5, 6), (StridedRaggedShard((0, 1), ((7, 11), (12, 0))), Shard(0))),
        ((1, 6), (StridedRaggedShard((0,), ((0, 1), (0, 0))), Shard(0))),
        ((8, 6), (RaggedShard((0,), (3, 5)), Shard(1))),
        ((8, 5), (RaggedShard((0,), (3, 5)), Shard(1))),
        ((8, 6), (StridedRaggedShard((0, 1), (23, 1)), Shard(1))),
        ((8, 6), (Replicate(), RaggedShard((0,), (3, 5)))),
        ((8, 6), (RaggedShard((0,), (3, 5)), Replicate())),
        ((8, 6), (Shard(0), RaggedShard((0,), (3, 1)))),
    ]
    others = [(Shard(0), Replicate()), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Replicate())]
    for shape, placements in cases:
        full = numbers(1, *shape, device=rank.device)
        tensor = distribute_tensor(full, mesh, placements)
        numel = full.numel()
        for other in [
            *others,
            (Replicate(), RaggedShard((0, 1), (numel - 1, 1))),
            (RaggedShard((0, 1), (1, numel - 1)), Replicate()),
        ]:
            moved = tensor.redistribute(placements=other)
            assert_same(moved, full, f"{placements} -> {other}", exact=True)
            back = moved.redistribute(placements=placements)
            assert_same(back.to_local(), tensor.to_local(), f"{other} -> {placements}", exact=True)
        assert_same((tensor * 2 + tensor), full * 3)


@spmd(4)
def test_collectives_of_moves_over_several_mesh_dims(rank):
    """All-to-alls along the mesh dims that change, and a gather only where the target is replicated."""
    mesh = rank.mesh(2, 2, names=("dp", "tp"))
    full = numbers(1, 8, 6, device=rank.device)
    rows, other = RaggedShard((0,), (3, 5)), RaggedShard((0,), (5, 3))
    strided = StridedRaggedShard((0,), (3, 1))
    fsdp2 = (_StridedShard(0, split_factor=2), Shard(0))  # what FSDP2 makes of a column-wise parallel weight
    exchange, gather, reduce = "all_to_all_single", "all_gather_into_tensor", "all_reduce"
    table = [
        ((rows, Shard(1)), (Shard(0), Shard(0)), {exchange: 2}),
        ((rows, Shard(1)), (Shard(1), other), {exchange: 2}),
        ((rows, Shard(1)), (other, Shard(1)), {exchange: 1}),
        ((rows, Replicate()), (Shard(1), Shard(0)), {exchange: 1}),
        ((rows, Replicate()), (other, Shard(1)), {exchange: 1}),
        ((Replicate(), rows), (Shard(1), Shard(1)), {exchange: 1}),
        ((strided, Shard(0)), (Shard(0), Shard(1)), {exchange: 2}),
        ((strided, Shard(0)), fsdp2, {exchange: 1}),
        (fsdp2, (strided, Shard(0)), {exchange: 1}),
        (fsdp2, (Replicate(), other), {exchange: 2}),
        ((Shard(0), Shard(0)), (strided, Shard(0)), {exchange: 2}),
        ((strided, Shard(0)), (Replicate(), Shard(1)), {exchange: 2}),
        ((StridedRaggedShard((0,), (2, 2)), Shard(0)), (Replicate(), Replicate()), {gather: 2}),
        ((Replicate(), Replicate()), (strided, Shard(0)), {}),
        ((Replicate(), Shard(1)), (rows, Shard(1)), {}),
        ((Partial(), Shard(1)), (rows, Shard(1)), {"reduce_scatter_tensor": 1}),
        ((Partial(), rows), (Shard(1), other), {exchange: 2}),
        ((Partial(), rows), (Replicate(), Shard(1)), {exchange: 1, reduce: 1}),
        ((rows, Partial()), (Shard(1), Shard(0)), {exchange: 2}),
    ]
    for before, after, collectives in table:
        settled = [Replicate() if p.is_partial() else p for p in before]
        start = distribute_tensor(full, mesh, settled)
        if Partial() in before:
            local = start.to_local() / 2
            start = DTensor.from_local(local, mesh, before, shape=full.shape, stride=full.stride())
        with CommDebugMode() as comm:
            end = start.redistribute(placements=after)
        seen = {op.__name__.split(".")[-1]: n for op, n in comm.get_comm_counts().items() if n}
        assert seen == collectives, (before, after, seen)
        assert end.placements == after
        expected = distribute_tensor(full, mesh, after)
        assert_same(end.to_local(), expected.to_local(), f"{before} -> {after}")
    for before, after in (((rows, Shard(1)), (Shard(0), Shard(0))), (fsdp2, (strided, Shard(0)))):
        param = distribute_tensor(full, mesh, before).requires_grad_()
        factor = numbers(2, 8, 6, device=rank.device)
        moved = param.redistribute(placements=after, async_op=True)
        (moved * distribute_tensor(factor, mesh, after)).sum().backward()
        assert param.grad.placements == before
        assert_same(param.grad, factor)


@spmd(4)
def test_a_strided_shard_that_is_no_order_of_cuts_is_refused(rank):
    mesh = rank.mesh(2, 2)
    for rows, split_factor, other in ((6, 2, Shard(0)), (8, 4, Replicate())):
        full = numbers(1, rows, 8, device=rank.device)
        tensor = distribute_tensor(full, mesh, (Replicate(), RaggedShard((0,), (1, rows - 1))))
        with CommDebugMode() as comm, pytest.raises(NotImplementedError, match="its parts are no boxes"):
            tensor.redistribute(placements=(_StridedShard(0, split_factor=split_factor), other))
        assert comm.get_total_counts() == 0


@spmd(4)
def test_pending_sums_of_other_dims_are_reduced_on_the_pieces(rank):
    """Hybrid sharding: reduce-scatter inside, then all-reduce of the small piece."""
    mesh = rank.mesh(2, 2, names=("replica", "shard"))
    full = numbers(1, 8, 6, device=rank.device)
    placement = RaggedShard((0,), (1, 3))
    pending = DTensor.from_local(full / 4, mesh, [Partial(), Partial()], run_check=False)
    with CommDebugMode() as comm:
        reduced = pending.redistribute(placements=[Replicate(), placement])
    assert comm.get_total_counts() == 2
    assert_same(reduced, full)
    local = reduced.to_local()
    half = DTensor.from_local(local / 2, mesh, [Partial(), placement], shape=full.shape, stride=full.stride())
    assert_same(half.redistribute(placements=[Replicate(), placement]).to_local(), local)
    assert_same(half.redistribute(placements=[Replicate(), Replicate()]), full)
    assert_same(half.redistribute(placements=[Replicate(), Shard(0)]), full)


@spmd(1, 3, 4)
def test_reductions_of_another_kind_settle_and_none_is_made(rank):
    mesh, world = rank.mesh(), rank.world_size
    full = numbers(3, 8, 6, device=rank.device)
    norms = torch.linalg.vector_norm(distribute_tensor(full, mesh, [Shard(0)]), dim=0)
    assert type(norms.placements[0]) is not Partial and norms.placements[0].is_partial()
    settled = norms.redistribute(placements=[RaggedShard((0,), world_units(6, world))])
    assert_same(settled, torch.linalg.vector_norm(full, dim=0))
    pending = with_placements(settled._spec, [Partial()])
    with pytest.raises(RuntimeError, match="makes no pending reduction: RaggedShard"):
        redistribute_local_tensor(settled.to_local(), settled._spec, pending)


@spmd(4)
def test_asynchronous_moves_overlap(rank):
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    mesh = rank.mesh()
    full = numbers(2, 8, 6, device=rank.device)
    tensor = distribute_tensor(full, mesh, [RaggedShard((0,), (1, 0, 5, 2))])
    for target in (Replicate(), RaggedShard((0,), (0, 0, 8, 0)), Shard(0), Shard(1)):
        moved = tensor.redistribute(placements=[target], async_op=True)
        assert isinstance(moved._local_tensor, AsyncCollectiveTensor), target
        assert_same(moved * 2, full * 2)


@spmd(2)
def test_bytes_of_the_moves(rank):
    """What travels is what changes owner: nothing else is sent."""
    mesh = rank.mesh()
    full = numbers(1, 8, 6, device=rank.device)
    sent = []

    from ragged_fsdp.torch_internals import functional

    original = functional.all_to_all_single
    functional.all_to_all_single = lambda t, r, s, g: (sent.append((r, s)), original(t, r, s, g))[1]
    try:
        tensor = distribute_tensor(full, mesh, [RaggedShard((0,), (5, 3))])
        moved = tensor.redistribute(placements=[RaggedShard((0,), (6, 2))])
    finally:
        functional.all_to_all_single = original
    assert sent == [[([30, 6], [30, 0])], [([0, 12], [6, 12])]][rank.rank]
    assert ragged_layout(moved).counts == (36, 12)


@spmd(2)
def test_implicit_moves_can_be_forbidden_and_traced(rank):
    from torch.distributed.tensor._utils import ExplicitRedistributionContext
    from torch.utils._debug_mode import DebugMode

    mesh = rank.mesh()
    full = numbers(1, 8, 6, device=rank.device)
    ragged = distribute_tensor(full, mesh, [RaggedShard((0,), (1, 3))])
    other = distribute_tensor(full, mesh, [Shard(0)])
    for strict in (True, False):
        with ExplicitRedistributionContext(strict=strict):
            assert_same(ragged + ragged, full * 2)
            ragged.redistribute(placements=[Replicate()])
            with pytest.raises(RuntimeError, match="Implicit redistribution"):
                ragged + other
    with DebugMode() as traced:
        assert_same(ragged + other, full * 2)
    assert "RaggedShard" in traced.debug_string() or "add" in traced.debug_string()
