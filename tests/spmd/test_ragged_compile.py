"""``torch.compile`` of programs that use ragged tensors."""

import copy

import torch
import torch._dynamo
import torch._inductor.config
import torch.compiler.config
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, placement_types

from ragged_cases import assert_same, numbers, world_units
from ragged_fsdp.dtensor import RaggedShard, distribute_tensor
from rank_pool import spmd


@spmd(2)
def test_whole_graphs(rank):
    mesh = rank.mesh()
    source, target = RaggedShard((0,), (1, 3)), RaggedShard((0,), (8, 0))
    full = numbers(1, 8, 6, device=rank.device)
    tensor = distribute_tensor(full, mesh, [source])
    assert f"rank{rank.rank}of2" in torch.compiler.config.cache_key_tag

    def rebuilt(a):
        return DTensor.from_local(a.to_local() * 2, mesh, [source], shape=a.shape, stride=a.stride())

    for name, function, argument, expected in (
        ("pointwise", lambda a: a * 2 + a, tensor, full * 3),
        ("gather", lambda a: a.redistribute(placements=[Replicate()]) * 2, tensor, full * 2),
        ("exchange", lambda a: a.redistribute(placements=[target]) * 2, tensor, full * 2),
        ("full_tensor", lambda a: a.full_tensor() * 2, tensor, full * 2),
        ("local", rebuilt, tensor, full * 2),
        ("norm", lambda a: a.norm().full_tensor(), tensor, full.norm()),
        (
            "slice",
            lambda a: a.redistribute(placements=[source]) * 1,
            distribute_tensor(full, mesh, [Replicate()]),
            full,
        ),
        ("view", lambda a: a.view(-1) + 1, tensor, full.view(-1) + 1),
    ):
        torch._dynamo.reset()
        result = torch.compile(function, backend="aot_eager", fullgraph=True)(argument)
        assert_same(result, expected, name)


@spmd(4)
def test_moves_over_two_mesh_dims(rank):
    mesh = rank.mesh(2, 2)
    full = numbers(1, 8, 6, device=rank.device)
    source, target = (RaggedShard((0,), (3, 5)), Shard(1)), (Shard(0), Shard(0))
    torch._dynamo.reset()
    tensor = distribute_tensor(full, mesh, source).requires_grad_()
    move = torch.compile(lambda a: a.redistribute(placements=target) * 2, backend="aot_eager", fullgraph=True)
    moved = move(tensor)
    assert_same(moved, full * 2)
    moved.sum().backward()
    assert tensor.grad.placements == source
    assert_same(tensor.grad, torch.full_like(full, 2))


@spmd(2)
def test_training_step_and_optimizer(rank):
    mesh, placement = rank.mesh(), RaggedShard((0,), world_units(8, 2))
    full, data = numbers(1, 8, 6, device=rank.device), numbers(2, 3, 6, device=rank.device)
    torch._dynamo.reset()
    weight = nn.Parameter(distribute_tensor(full, mesh, [placement]))

    def loss(w, x):
        return (x @ w.full_tensor(grad_placements=[Partial()]).t()).sum()

    # torch 2.11 breaks the graph at a placement made inside it, and takes its "avg" for a sum, stock too
    whole_graph = hasattr(placement_types, "_register_placements_as_opaque")
    torch.compile(loss, backend="aot_eager", fullgraph=whole_graph)(weight, data).backward()
    assert weight.grad.placements == (placement,)
    assert_same(weight.grad, 2 * data.sum(0).expand(8, 6))
    optimizer = torch.optim.AdamW([weight], lr=0.1, foreach=True)
    optimizer.step()
    eager = nn.Parameter(weight.detach().clone())
    eager.grad = weight.grad.clone()
    reference = torch.optim.AdamW([eager], lr=0.1, foreach=True)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # loading shares the tensors
    with torch.no_grad():
        for parameter in (weight, eager):
            parameter.grad.add_(0.5)
    torch.compile(optimizer.step, backend="aot_eager")()
    reference.step()
    assert_same(weight, eager)


@spmd(2, timeout=170)
def test_inductor(rank):
    """Each rank compiles for its own piece; scalar code on one thread, to compile fast."""
    mesh = rank.mesh()
    torch._dynamo.reset()
    full = numbers(1, 8, 6, device=rank.device)
    tensor = distribute_tensor(full, mesh, [RaggedShard((0,), (1, 3))])
    target = RaggedShard((0,), (3, 1))

    def program(a):
        return (a * 2 + a).redistribute(placements=[target]) + 1

    with torch._inductor.config.patch({"cpp.simdlen": 1, "compile_threads": 1}):
        assert_same(torch.compile(program)(tensor), full * 3 + 1)
