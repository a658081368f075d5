"""The kernels that order rows and sum them: what the plain functions give, with missing rows and padding.

They run on a GPU, or on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

import os
import random

import pytest
import torch

from interpreted import DEVICE, INTERPRETED
from ragged_fsdp.experts.permute import order_reference, place, take_reference, weighted_reference

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
    sorted_ = order_reference(chosen, experts)[0].argsort()
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
    from ragged_fsdp.experts import permute_triton

    tokens, per_token, channels, _ = shape
    slot_of, row_of, x, y, w, grad = _case(*shape, dtype, weight_dtype)
    there = slot_of >= 0
    x, y, grad = (t.t().contiguous().t() for t in (x, y, grad))  # strided
    want_taken = take_reference(x, row_of, len(slot_of))
    assert torch.equal(permute_triton.take(x, row_of, len(slot_of), True), want_taken)
    assert torch.equal(permute_triton.take(x, row_of, len(slot_of), False)[there], want_taken[there])
    for weights in (None, w):
        got = permute_triton.weighted_sum(y, weights, row_of, tokens, grad.dtype)
        want = weighted_reference(y.double(), None if weights is None else weights.double(), row_of, tokens)
        assert got.dtype == grad.dtype
        assert torch.allclose(got.double(), want, atol=bound * max(1, per_token), rtol=bound)
    grad_rows, grad_weights = permute_triton.combine_backward(grad, y, w, row_of)
    of_slots = (grad.double().unsqueeze(1) * w.double().unsqueeze(-1)).view(-1, channels)
    want_rows = place(of_slots, row_of, len(slot_of), 0)
    assert torch.allclose(grad_rows.double()[there], want_rows[there], atol=bound, rtol=bound)
    slots = place(y.double()[there], slot_of[there], len(row_of), 0).view(tokens, per_token, channels)
    want_weights = (slots * grad.double().unsqueeze(1)).sum(-1)
    assert torch.allclose(grad_weights.double(), want_weights, atol=bound * channels**0.5, rtol=bound)


@pytest.mark.parametrize("slots", [0, 1, 130, 1000])
@pytest.mark.parametrize("groups", [1, 5, 128, 1000])
def test_the_order_of_rows_is_that_of_a_stable_sort(slots, groups):
    """Also where slots are numbered anew, and some are of no group."""
    from ragged_fsdp.experts import permute_triton

    generator = torch.Generator().manual_seed(slots + groups)
    chosen = torch.randint(groups + 1, (slots, 1), generator=generator)
    for number_of in (None, torch.randperm(groups + 1, generator=generator)):
        given = (chosen, groups, number_of)
        got = permute_triton.order(*(t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in given))
        for ours, plain in zip(got, order_reference(*given)):
            assert torch.equal(ours.cpu(), plain)


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
