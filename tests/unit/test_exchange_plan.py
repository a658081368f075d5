"""How gradients are cut for an exchange: every element goes to its owner, once, at its place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragged_fsdp.fsdp.exchange import plan_sends, rounds_of
from ragged_fsdp.fsdp.grad_layout import GradLayout, Segment
from ragged_fsdp.layout import TensorSpec
from ragged_fsdp.planner import plan_group


def _layout(numels, ranks, unit):
    specs = [TensorSpec(f"t{i}", numel) for i, numel in enumerate(numels)]
    layout = plan_group(specs, ranks, unit=unit)
    segments = tuple((Segment(i, 0, n),) if n else () for i, n in enumerate(numels))
    return GradLayout(layout, tuple((n,) for n in numels), segments, True)


@given(
    numels=st.lists(st.integers(0, 70), min_size=1, max_size=6).filter(any),
    ranks=st.integers(1, 7),
    unit=st.sampled_from([1, 4, 16]),
    rounds=st.integers(1, 4),
)
def test_every_element_arrives_once_at_its_place(numels, ranks, unit, rounds):
    layout = _layout(numels, ranks, unit)
    shard_numel = layout.layout.shard_numel
    expected = torch.zeros(ranks * shard_numel, dtype=torch.int64)
    grads, label = [], 1
    for index, numel in enumerate(numels):
        grads.append(torch.arange(label, label + numel))
        expected[layout.layout.offsets[index] : layout.layout.offsets[index] + numel] = grads[-1]
        label += numel
    plan = plan_sends(layout, ranks, rounds=rounds)
    pieces = [torch.split_with_sizes(g, sizes) if sizes else () for g, sizes in zip(grads, plan.cuts)]
    for rank in range(ranks):
        shard = torch.zeros(shard_numel, dtype=torch.int64)
        start, numel = plan.extents[rank]
        view, row = plan.views[rank], plan.row_of[rank]
        assert (view is None) or (row is None)
        if view is not None:
            sent = pieces[view[0]][view[1] : view[1] + rounds]
            assert [len(piece) for piece in sent] == rounds_of(numel, rounds)
            shard[start : start + numel] = torch.cat(sent)
        elif row is not None:
            for index, piece, at in plan.packed[row]:
                shard[at : at + len(pieces[index][piece])] = pieces[index][piece]
        assert torch.equal(shard, expected.view(ranks, shard_numel)[rank])
    assert all(len(content) > 1 for content in plan.packed)


@pytest.mark.parametrize("ranks", [8, 64])
def test_large_tensors_are_sent_without_a_copy(ranks):
    layout = _layout([2_000_000, 1_000_000, 64, 640, 64], ranks, 128)
    plan = plan_sends(layout, ranks)
    packed = sum(sum(plan.cuts[i][p] for i, p, _ in content) for content in plan.packed)
    assert packed <= 3 * layout.layout.shard_numel
