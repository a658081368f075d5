"""Plans of equal chunks: what ``Shard(dim)`` of torch gives each rank."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged_fsdp.fsdp.grad_layout import grad_layout
from ragged_fsdp.fsdp.row_plan import rank_major, row_plan

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@given(st.lists(shapes, min_size=1, max_size=4), st.integers(1, 5))
@settings(max_examples=200)
def test_rows_are_torch_s_chunks(members, ranks):
    names = [f"p{i}" for i in range(len(members))]
    plan = row_plan(names, members, [torch.float32] * len(members), [0] * len(members), ranks)
    for index, shape in enumerate(members):
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        chunks = list(whole.chunk(ranks))
        chunks += [whole[:0]] * (ranks - len(chunks))
        for rank, chunk in enumerate(chunks):
            assert torch.equal(plan.local_part(index, rank, whole), chunk.reshape(-1))
            assert plan.local_rows(index, rank)[1] == len(chunk)
            assert plan.local_range(index, rank).numel == chunk.numel()
            assert plan.chunk_rows(index) * plan.row_numel(index) >= chunk.numel()


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=60)
def test_the_rank_major_form_is_the_chunks_one_after_the_other(ranks, rows, other, dim):
    shape = [other, other + 1, other + 2]
    shape[dim] = ranks * rows
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    plan = row_plan(["p"], [shape], [torch.float32], [dim], ranks)
    major = rank_major(whole, dim, ranks)
    for rank in range(ranks):
        chunk = plan.local_part(0, rank, whole)
        assert torch.equal(major[rank].reshape(-1), chunk)
        part = plan.local_range(0, rank)
        assert torch.equal(major.reshape(-1)[part.tensor_start : part.tensor_start + part.numel], chunk)


def test_gradients_of_a_rank_lie_in_its_chunk_of_the_buffer():
    """7 rows of 2 on 3 ranks and 3 rows of 1: chunks of 3, 3, 1 and of 1, 1, 1 rows."""
    plan = row_plan(["a", "b"], [(7, 2), (3, 1)], [torch.float32] * 2, [0, 0], 3)
    layout = grad_layout(plan, [True, True])
    for rank, numels in enumerate(((6, 1), (6, 1), (2, 1))):
        for index, numel in enumerate(numels):
            piece = layout.local_piece(index, rank)
            assert piece is not None and piece[1].numel == numel


def test_ranks_compare_the_dims():
    plans = [row_plan(["p"], [(4, 4)], [torch.float32], [dim], 2) for dim in (0, 1)]
    assert plans[0].description != plans[1].description
    assert "p (4, 4)" in plans[0].description.splitlines()[0] and "Shard(1)" in plans[1].description
