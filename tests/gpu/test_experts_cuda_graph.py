"""Dispatch and combine with a capacity in a CUDA graph, between several ranks: replays equal eager calls."""

import pytest
import torch

from ragged_fsdp.experts import AllToAll, ExpertSplit, TwoLevel
from ragged_fsdp.topology import Levels
from rank_pool import DEVICE, spmd

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs RAGGED_FSDP_TEST_DEVICE=cuda")
TOKENS, CHANNELS, PER_TOKEN, EXPERTS = 64, 32, 2, 4


def _inputs(rank, seed):
    generator = torch.Generator().manual_seed(100 * seed + rank.rank)
    tokens = torch.randn(TOKENS, CHANNELS, generator=generator)
    chosen = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)[:, :PER_TOKEN]
    return [given.cuda() for given in (tokens, chosen, torch.rand(TOKENS, PER_TOKEN, generator=generator))]


@pytest.mark.parametrize("kind", ["all_to_all", "two_level"])
@spmd(4)
def test_a_captured_dispatch_sends_and_counts_as_an_eager_one(rank, kind):
    mesh, split = rank.mesh(), ExpertSplit((1,) * EXPERTS)
    levels = Levels(((0, 1), (2, 3)), 2)
    make = {
        "all_to_all": lambda: AllToAll(mesh, split, capacity=0.9),
        "two_level": lambda: TwoLevel(mesh, split, levels, capacity=0.9),
    }[kind]
    captured, eager = make(), make()
    tokens, chosen, weights = _inputs(rank, 0)
    tokens.requires_grad_(), weights.requires_grad_()

    def run(dispatcher):
        tokens.grad = weights.grad = None
        rows, _, route = dispatcher.dispatch(tokens, chosen)
        mixed = dispatcher.combine(rows.square(), weights, route)
        mixed.square().sum().backward()
        return mixed.detach(), tokens.grad, weights.grad, route.dropped

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # the first compares the numbers of tokens, and makes what is kept
            run(captured)
        run(eager)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        written = run(captured)
    captured.forget_needed()
    eager.forget_needed()
    dropped = 0
    for seed in range(1, 4):
        with torch.no_grad():
            for static, given in zip((tokens, chosen, weights), _inputs(rank, seed)):
                static.copy_(given)
        graph.replay()
        torch.cuda.synchronize()
        got = [value.clone() for value in written]
        for ours, expected in zip(got, run(eager)):
            assert torch.equal(ours, expected), seed
        assert torch.equal(captured.needed, eager.needed), seed  # the largest of all replays so far
        dropped += int(got[-1])
    lost = torch.tensor(dropped, device="cuda")
    torch.distributed.all_reduce(lost)
    assert int(lost) > 0  # so that rows without room were among them
