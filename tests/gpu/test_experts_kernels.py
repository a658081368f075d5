"""The kernels that order rows and sum them: what the plain functions give, with missing rows and padding.

They run on a GPU, or on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

import os
import random

import pytest
import torch

from interpreted import DEVICE, INTERPRETED
from ragged_fsdp.experts.permute import (
    back_reference,
    count_reference,
    pick_reference,
    place,
    rows_reference,
    take_reference,
    weighted_reference,
)

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU or Triton's interpreter"
)
SHAPES = [(5, 1, 7, 3), (33, 4, 100, 8), (17, 8, 2880, 32), (1, 2, 4096, 4), (0, 2, 16, 4)]
_draw = random.Random(0)
SHAPES += [
    (_draw.randint(1, 40), _draw.randint(1, 9), _draw.randint(1, 700), _draw.randint(1, 40)) for _ in range(6)
]
DTYPES = [
    (torch.float32, torch.float32, 1e-6),
    (torch.bfloat16, torch.float32, 8e-3),
    (torch.bfloat16, torch.bfloat16, 2e-2),
]


def _case(tokens, per_token, channels, experts, dtype, weight_dtype):
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(experts, (tokens, per_token), generator=generator)
    sorted_ = rows_reference(chosen, experts).argsort()
    half = len(sorted_) // 2
    slot_of = torch.cat((sorted_[:half], torch.full((3,), -1), sorted_[half + 1 :]))  # one missing, three pad
    row_of = place(torch.arange(len(slot_of)), slot_of, chosen.numel(), -1)
    x = torch.randn(tokens, channels, generator=generator).to(dtype)
    y = torch.randn(len(slot_of), channels, generator=generator).to(dtype)
    y[slot_of < 0] = float("nan")
    w = torch.rand(tokens, per_token, generator=generator).to(weight_dtype)
    grad = torch.randn(tokens, channels, generator=generator).to(torch.promote_types(dtype, weight_dtype))
    return [t.to(DEVICE) for t in (slot_of, row_of, x, y, w, grad)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "weight_dtype", "bound"), DTYPES)
def test_kernels_are_the_plain_functions(shape, dtype, weight_dtype, bound):
    """All rows, or two parts of them between which lie some that nobody asks for; no other is written."""
    from ragged_fsdp.experts import permute_triton

    tokens, per_token, channels, _ = shape
    slot_of, row_of, x, y, w, grad = _case(*shape, dtype, weight_dtype)
    rows, there = len(slot_of), slot_of >= 0
    x, y, grad = (t.t().contiguous().t() for t in (x, y, grad))  # strided
    inverted = torch.full_like(slot_of, -1)
    permute_triton.invert(row_of, inverted)
    assert torch.equal(inverted, slot_of)
    chosen, labels = torch.randint(5, (tokens, per_token), device=DEVICE), torch.empty_like(slot_of)
    label_of = torch.randperm(6, device=DEVICE)
    permute_triton.label(slot_of, chosen, label_of, labels)
    assert torch.equal(labels, torch.cat((label_of[chosen.flatten()], label_of[-1:]))[slot_of])
    got, want = (torch.full((rows, channels), 7.0, dtype=dtype, device=DEVICE) for _ in range(2))
    permute_triton.take(x, row_of, got)
    take_reference(x, row_of, want)
    assert torch.equal(got, want)
    for parts in ([slice(None)], [slice(0, rows // 3), slice(rows // 2, rows)]):
        got, want = (torch.full((rows, channels), 7.0, dtype=dtype, device=DEVICE) for _ in range(2))
        found = [
            [t.double() for t in (want, torch.full_like(w, 7.0))],
            [want.clone(), torch.full_like(w, 7.0)],
        ]
        for own in parts:
            permute_triton.pick(x, slot_of[own], got[own], per_token)
            pick_reference(x, slot_of[own], want[own], per_token)
            exact = grad.double(), y[own].double(), w.double()
            back_reference(*exact, slot_of[own], (found[0][0][own], found[0][1]))
            permute_triton.combine_backward(grad, y[own], w, slot_of[own], (found[1][0][own], found[1][1]))
        assert torch.equal(got, want)
        (want_rows, want_weights), (got_rows, got_weights) = found
        assert torch.allclose(got_rows.double(), want_rows, atol=bound, rtol=bound)
        assert torch.allclose(got_weights.double(), want_weights, atol=bound * channels**0.5, rtol=bound)
        assert (got_rows[~there] == 7).all()
    for weights in (None, w):
        got = torch.empty_like(grad, memory_format=torch.contiguous_format)
        permute_triton.weighted_sum(y, weights, row_of, got)
        want = weighted_reference(y.double(), None if weights is None else weights.double(), row_of, tokens)
        assert torch.allclose(got.double(), want, atol=bound * max(1, per_token), rtol=bound)


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_where_rows_that_come_part_by_part_are_grouped(ranks, parts):
    """With many rows of a kind, one, and none."""
    from ragged_fsdp.experts import permute_triton
    from ragged_fsdp.experts.all_to_all import _Order
    from ragged_fsdp.experts.permute import find_arrival
    from ragged_fsdp.experts.split import ExpertSplit

    ways = _Order.of(ExpertSplit((5, *(3,) * (ranks - 1))), parts, torch.device("cpu"))
    counts = torch.randint(4, (ranks, ways.places + 1), generator=torch.Generator().manual_seed(ranks))
    counts[0, 0] = 1100
    given, rows = counts.flatten(), int(counts[:, :-1].sum())
    want = find_arrival(given, ways.by_row, ways.to_group, rows)
    got = torch.empty(rows, dtype=torch.int64, device=DEVICE)
    permute_triton.find_arrival(given.to(DEVICE), ways.by_row.to(DEVICE), ways.to_group.to(DEVICE), got)
    assert torch.equal(got.cpu(), want) and torch.equal(want.sort()[0], torch.arange(rows))


@pytest.mark.parametrize("slots", [0, 1, 130, 1000])
@pytest.mark.parametrize("groups", [1, 6, 128, 1000])
def test_the_order_of_rows_is_that_of_a_stable_sort(slots, groups):
    """Also where slots are numbered anew, some are of no group or do not fit; and in parts."""
    from ragged_fsdp.experts import permute_triton

    generator = torch.Generator().manual_seed(slots + groups)
    chosen = torch.randint(groups + 1, (slots, 1), generator=generator)
    for number_of in (None, torch.randperm(groups + 1, generator=generator)):
        given = chosen.to(DEVICE), groups, None if number_of is None else number_of.to(DEVICE)
        counts = count_reference(chosen, groups, number_of)
        into = torch.zeros(groups, dtype=torch.int64, device=DEVICE)
        find = permute_triton.count(*given, into)
        assert torch.equal(into.cpu(), counts)
        assert torch.equal(find().cpu(), rows_reference(chosen, groups, number_of))
        for edges in ((0, 0), (0, 1), (0, 3), (0, 1, 3), (0, 2, 3, 7), (0, 1, 1, 2)):
            cuts = torch.tensor(edges)
            want = rows_reference(chosen, groups, number_of, cuts)
            assert torch.equal(find(cuts.to(DEVICE)).cpu(), want)


@pytest.mark.parametrize(
    ("rows", "channels", "groups"), [(1, 5, 1), (40, 2880, 3), (300, 48, 17), (7, 16, 0)]
)
def test_rows_behind_those_that_are_filled_are_zeros(rows, channels, groups):
    """Rows grouped on arrival, of which some are padding, and back: those that are there, and no other."""
    from ragged_fsdp.experts import permute_triton

    generator = torch.Generator().manual_seed(rows)
    place_of = torch.randint(groups + 1, (rows,), generator=generator)
    arrival, counts = rows_reference(place_of, groups), count_reference(place_of, groups)
    came = torch.randn(rows, channels, generator=generator).to(DEVICE, torch.bfloat16)
    came[(place_of == groups).to(DEVICE)] = float("nan")
    there, filled = (arrival >= 0).to(DEVICE), counts if groups else torch.zeros(1, dtype=torch.int64)
    arrival = arrival.to(DEVICE)
    grouped, want = torch.full_like(came, 7.0), torch.zeros_like(came)
    permute_triton.fill_rest(grouped, filled.to(DEVICE))
    permute_triton.take(came, arrival, grouped)
    take_reference(came, arrival, want)
    assert torch.equal(grouped, want) and not grouped[int(counts.sum()) :].any()
    back = torch.full_like(came, 7.0)
    permute_triton.weighted_sum(grouped, None, arrival, back, every=False)
    assert torch.equal(back[there], came[there]) and torch.equal(back[~there] == 7, came[~there].isnan())


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_a_layer_with_a_capacity_is_captured_in_a_cuda_graph_and_waits_for_nothing():
    """One rank of NCCL: forward and backward of a layer replay with other tokens as they run eagerly."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from ragged_fsdp.experts import AllToAll, expert_parallel, split_experts_of
    from ragged_fsdp.models.config import MoEConfig
    from ragged_fsdp.models.moe import Experts

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("cpu:gloo,cuda:nccl")
    try:
        mesh = init_device_mesh("cuda", (1,))
        experts = Experts(MoEConfig(hidden=64, expert_hidden=64, experts=8)).cuda().bfloat16()
        for p in experts.parameters():
            torch.nn.init.normal_(p, std=0.1)
        layer = torch.nn.ModuleDict({"experts": experts})
        expert_parallel(layer, mesh, dispatcher=lambda m, s: AllToAll(m, s, capacity=1.0))
        x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        chosen = torch.randint(8, (256, 2), device="cuda")
        weights = torch.rand(256, 2, device="cuda", dtype=torch.bfloat16, requires_grad=True)

        def run():
            x.grad = weights.grad = None
            out = experts(x, chosen, weights)
            out.float().square().sum().backward()
            return out

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.synchronize()
        experts.eval()
        experts.train()
        (state,) = split_experts_of(layer).values()
        torch.cuda.set_sync_debug_mode("error")  # any wait for the device raises
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        state.load.zero_()
        for seed in range(3):
            torch.manual_seed(seed)
            with torch.no_grad():
                x.copy_(torch.randn_like(x))
                chosen.copy_(torch.randint(8, (256, 2), device="cuda"))
            graph.replay()
            torch.cuda.synchronize()
            got, got_grad = captured.detach().clone(), x.grad.clone()
            again = torch.autograd.grad(experts(x, chosen, weights).float().square().sum(), x)[0]
            assert torch.allclose(got, experts(x, chosen, weights), atol=1e-2, rtol=1e-2)
            assert torch.allclose(got_grad, again, atol=1e-1, rtol=5e-2)
        assert int(state.load.sum()) == 3 * 3 * 512  # each replay, and the two calls beside it
    finally:
        dist.destroy_process_group()
