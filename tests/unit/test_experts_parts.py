"""Who holds which experts, the order of rows, and products in groups: no ranks needed."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragged_fsdp.experts import ExpertSplit, Here, expert_modules
from ragged_fsdp.experts.layers import _one_by_one, grouped_linear, in_one_kernel
from ragged_fsdp.experts.permute import combine, count, order, place, take
from ragged_fsdp.experts.trips import cut
from ragged_fsdp.models import MoEConfig, MoETransformer


def test_even_splits_differ_by_one_expert_at_most():
    assert ExpertSplit.even(5, 3).held == (2, 2, 1)
    held = ExpertSplit.even(160, 48).held
    assert sum(held) == 160 and set(held) == {3, 4}
    assert ExpertSplit.even(2, 3) == ExpertSplit((1, 1, 0))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 5))
def test_no_split_of_neighbours_has_a_less_busy_rank(load, ranks):
    split = ExpertSplit.by_load(load, ranks)
    assert split.experts == len(load) and split.ranks == ranks

    def least(experts, ranks):  # the busiest rank of the best split, by trying all
        if ranks == 1:
            return sum(experts)
        return min(max(sum(experts[:n]), least(experts[n:], ranks - 1)) for n in range(len(experts) + 1))

    best = least(load, ranks) * ranks / sum(load) if sum(load) else 1.0
    assert split.busiest(load) == pytest.approx(best)


def test_a_split_that_follows_a_drifting_load_stays_balanced_where_a_static_one_does_not():
    """A wave of load goes over 128 experts on 8 ranks; what was measured in a step serves the next."""
    experts, ranks, steps = torch.arange(128.0), 8, 200
    static = split = ExpertSplit.even(128, ranks)
    busiest, followed = [], []
    for step in range(steps):
        away = (experts - 128 * step / steps).abs()
        load = (0.5 + 2.0 * torch.exp(-((torch.minimum(away, 128 - away) / 16) ** 2))).tolist()
        busiest.append(static.busiest(load))
        followed.append(split.busiest(load))
        split = ExpertSplit.by_load(load, ranks)
    assert max(busiest) > 2 and max(followed[1:]) < 1.15


@pytest.mark.parametrize("held", [(), (0, 0), (2, -1), (1.5, 2), (True, 1)])
def test_impossible_splits_are_refused(held):
    with pytest.raises(ValueError, match="ExpertSplit"):
        ExpertSplit(held)


def test_rows_and_their_gradients_are_those_of_indexing():
    """With rows that are missing and rows that hold nothing, NaN among them."""
    torch.manual_seed(0)
    tokens, experts, per_token = 7, 4, 3
    chosen = torch.randint(experts, (tokens, per_token))
    placed, counts = order(chosen, experts)
    assert counts.tolist() == [int((chosen == e).sum()) for e in range(experts)]
    sorted_ = placed.argsort()
    assert (chosen.flatten()[sorted_].diff() >= 0).all()
    slot_of = torch.cat((sorted_[:5], torch.tensor([-1, -1]), sorted_[9:]))  # four missing, two of padding
    row_of = place(torch.arange(len(slot_of)), slot_of, chosen.numel(), -1)  # it is its own inverse
    # numbered otherwise, and without those of the last expert
    number_of = torch.tensor([2, 0, 1, 3])
    placed, counts = order(chosen, 3, number_of)
    numbers = number_of[chosen.flatten()]
    assert counts.tolist() == [int((numbers == n).sum()) for n in range(3)]
    assert ((placed < 0) == (numbers == 3)).all()
    counted, two = count(chosen, 3, number_of), torch.tensor([0, 2])  # each group has room for two
    for group in range(3):
        slots = (numbers == group).nonzero().flatten()
        assert (
            counted.rows(two)[slots].tolist() == [2 * group, 2 * group + 1, *(-1,) * len(slots)][: len(slots)]
        )
    assert ((counted.rows(two) < 0) >= (numbers == 3)).all()
    in_parts = count(torch.tensor([[1, 0, 1, 1, 0, 2]]), 2)  # three rows of each, cut after the second
    assert in_parts.rows(torch.tensor([0, 2, 3])).tolist() == [2, 0, 3, 5, 1, -1]
    kept = placed[placed >= 0].argsort()
    assert placed.max() + 1 == len(kept) and (numbers[placed >= 0][kept].diff() >= 0).all()
    x = torch.randn(tokens, 6, dtype=torch.float64, requires_grad=True)
    y = torch.randn(len(slot_of), 6, dtype=torch.float64)
    y[5:7] = float("nan")
    y.requires_grad_()
    w = torch.randn(tokens, per_token, dtype=torch.float64, requires_grad=True)
    rows = take(x, row_of, len(slot_of))
    assert torch.equal(rows[:5], x[slot_of[:5] // per_token]) and not rows[5:7].any()
    out = combine(y, w, row_of, tokens)
    expected = torch.zeros_like(x)
    for row, slot in enumerate(slot_of.tolist()):
        if slot >= 0:
            expected = expected.index_add(
                0, torch.tensor([slot // per_token]), y[row : row + 1] * w.flatten()[slot]
            )
    assert torch.allclose(out, expected)
    kept = torch.nn.functional.pad(torch.ones(5), (0, 2)).bool()
    clean = torch.cat((kept, torch.ones(len(slot_of) - 7, dtype=torch.bool)))
    for ours, plain, inputs in (
        (rows.sin().sum(), None, (x,)),
        (out.sin().sum(), expected.sin().sum(), (y, w)),
    ):
        grads = torch.autograd.grad(ours, inputs)
        wanted = (
            torch.autograd.grad(x[slot_of[clean] // per_token].sin().sum(), inputs)
            if plain is None
            else torch.autograd.grad(plain, inputs)
        )
        for got, want in zip(grads, wanted):
            assert torch.allclose(got, want.nan_to_num(0.0)) and not got.isnan().any()
    small = x.detach().clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda t: take(t, row_of, len(slot_of)), small)


def test_numbers_of_32_bits_and_tensors_that_are_not_contiguous():
    torch.manual_seed(0)
    chosen, x = torch.randint(4, (5, 2)), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    weights, factor = torch.rand(5, 2).double(), torch.randn(5, 6).double()
    results = []
    for turned in (False, True):
        given = chosen.int() if turned else chosen
        w, f = (t.t().contiguous().t() if turned else t for t in (weights, factor))
        row_of, counts = order(given, 4)
        assert torch.equal(counts, order(chosen, 4)[1]) and row_of.dtype == torch.int64
        out = combine(take(x, row_of, 10).sin(), w.requires_grad_(), row_of, 5)
        results.append((out, *torch.autograd.grad(out, (x, w), f)))
        one = torch.tensor([0, 1])
        assert torch.equal(count(given, 4).rows(one), count(chosen, 4).rows(one))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_parts_cover_everything_and_none_is_empty():
    for units in range(1, 40):
        for parts in range(1, 12):
            found = cut(units, parts)
            assert len(found) == min(parts, units) and found[0][0] == 0 and found[-1][1] == units
            assert all(a < b for a, b in found) and all(x[1] == y[0] for x, y in itertools.pairwise(found))
    assert cut(0, 4) == [(0, 0)] and cut(160, 4) == [(0, 10), (10, 50), (50, 130), (130, 160)]


def test_products_in_one_kernel_are_those_one_by_one():
    torch.manual_seed(0)
    counts = torch.tensor([3, 0, 5, 1])
    x, weight = torch.randn(9, 16), torch.randn(4, 16, 32)
    assert torch.allclose(in_one_kernel(x, weight, counts), _one_by_one(x, weight, counts), atol=1e-5)


def test_padding_reaches_no_expert_and_no_group_still_reaches_autograd():
    bias = torch.randn(2, 3, requires_grad=True)
    rows, weight = torch.randn(6, 4, requires_grad=True), torch.randn(2, 4, 3, requires_grad=True)
    counts = torch.tensor([1, 3])
    out = grouped_linear(rows, weight, counts, bias)
    assert torch.allclose(out[1:4], rows[1:4] @ weight[1] + bias[1]) and not out[4:].any()
    out.sum().backward()  # the gradient of padding is not zero here, and must not count
    assert torch.allclose(bias.grad, torch.tensor([[1.0] * 3, [3.0] * 3])) and not rows.grad[4:].any()
    for empty_rows, experts in ((0, 2), (0, 0)):
        r, w = torch.randn(empty_rows, 4, requires_grad=True), torch.randn(experts, 4, 3, requires_grad=True)
        grouped_linear(r, w, torch.zeros(experts, dtype=torch.long), None).sum().backward()
        assert r.grad is not None and w.grad is not None


def test_all_tokens_to_one_expert_and_no_tokens_at_all():
    model = MoETransformer(MoEConfig(hidden=8, layers=1, heads=2, kv_heads=2, experts=4, experts_per_token=2))
    (experts,) = expert_modules(model).values()
    for p in experts.parameters():
        torch.nn.init.normal_(p)
    for tokens in (0, 3):
        x = torch.randn(tokens, 8, requires_grad=True)
        out = experts(x, torch.full((tokens, 2), 3), torch.ones(tokens, 2))
        assert out.shape == x.shape
        out.sum().backward()
    assert Here(4).dispatch(torch.zeros(0, 8), torch.zeros(0, 2, dtype=torch.long))[1].tolist() == [0] * 4
