"""Stock optimizers, clipping and gradient scaling on ragged parameters, against plain ones."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ragged_cases import assert_same, fewer, numbers, whole, world_units, worlds
from ragged_fsdp.dtensor import RaggedOpError, RaggedShard, distribute_tensor
from rank_pool import spmd

SHAPES = [(8, 6), (12,), (3, 4), (4, 2, 3)]
OPTIMIZERS = {
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw-loop-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False, amsgrad=True),
    "adamw-fused-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True, amsgrad=True, maximize=True),
    "adamw-capturable": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True, capturable=p[0].is_cuda),
    "adam-capturable": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False, capturable=p[0].is_cuda),
    "nadam-capturable": lambda p: torch.optim.NAdam(p, lr=0.1, foreach=True, capturable=p[0].is_cuda),
    "radam-capturable": lambda p: torch.optim.RAdam(p, lr=0.1, foreach=True, capturable=p[0].is_cuda),
    "rmsprop-capturable": lambda p: torch.optim.RMSprop(p, lr=0.1, foreach=True, capturable=p[0].is_cuda),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1, device=p[0].device), fused=True),
    "adamw-tensor-lr-foreach": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(0.1, device=p[0].device), foreach=p[0].is_cuda, capturable=p[0].is_cuda
    ),
    "sgd-tensor-lr": lambda p: torch.optim.SGD(
        p, lr=torch.tensor(0.1, device=p[0].device), momentum=0.9, foreach=True
    ),
    "adam-tensor-lr-loop": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1, foreach=False),
    "adamax-foreach": lambda p: torch.optim.Adamax(p, lr=0.1, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=False),
    "adagrad-foreach": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=not p[0].is_cuda),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True, foreach=False),
    "rmsprop-foreach": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1, foreach=False),
    "nadam-foreach": lambda p: torch.optim.NAdam(p, lr=0.1, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1, foreach=False),
    "radam-foreach": lambda p: torch.optim.RAdam(p, lr=0.1, foreach=True),
    "sgd-plain": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd-loop": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
}


def placements(world: int) -> list[RaggedShard]:
    return [
        RaggedShard((0,), world_units(8, world)),
        RaggedShard.on_one_rank((12,), world, world - 1),
        RaggedShard((0, 1), world_units(12, world, seed=2)),
        RaggedShard((0,), world_units(4, world, seed=1)),
    ]


@spmd(*worlds(1, 3))
def test_optimizers_match_the_plain_tensors(rank):
    mesh, kinds = rank.mesh(), placements(rank.world_size)
    for name, make in OPTIMIZERS.items():
        plain = [nn.Parameter(numbers(i, *s, device=rank.device)) for i, s in enumerate(SHAPES)]
        params = [nn.Parameter(distribute_tensor(p.detach(), mesh, [kind])) for p, kind in zip(plain, kinds)]
        reference, optimizer = make(plain), make(params)
        for step in range(3):
            for i, (p, q) in enumerate(zip(plain, params)):
                p.grad = numbers(100 * step + i, *p.shape, device=rank.device)
                q.grad = distribute_tensor(p.grad, mesh, [kinds[i]])
            reference.step()
            optimizer.step()
        for p, q in zip(plain, params):
            assert_same(q, p, name)
            for key, value in optimizer.state[q].items():
                if isinstance(value, DTensor) and value.shape == q.shape:
                    assert value.placements == q.placements, (name, key)
        optimizer.zero_grad(set_to_none=False)
        assert_same(params[0].grad, torch.zeros(8, 6))


@spmd(*worlds(1, 3))
def test_clipping(rank):
    mesh, kinds = rank.mesh(), placements(rank.world_size)
    for order in (2.0, 1.0, 3.0, math.inf):
        for foreach in (True, False):
            plain = [nn.Parameter(numbers(i, *s, device=rank.device)) for i, s in enumerate(SHAPES)]
            params = [
                nn.Parameter(distribute_tensor(p.detach(), mesh, [kind])) for p, kind in zip(plain, kinds)
            ]
            for p, q, kind in zip(plain, params, kinds):
                p.grad = p.detach() * 3
                q.grad = distribute_tensor(p.grad, mesh, [kind])
            grads = [q.grad for q in params]
            total = nn.utils.get_total_norm(grads, norm_type=order, foreach=foreach)
            assert_same(total, nn.utils.get_total_norm([p.grad for p in plain], norm_type=order))
            expected = nn.utils.clip_grad_norm_(plain, 1.0, norm_type=order, foreach=foreach)
            actual = nn.utils.clip_grad_norm_(params, 1.0, norm_type=order, foreach=foreach)
            assert_same(actual, expected, f"order {order}")
            assert_same([q.grad for q in params], [p.grad for p in plain])
    nn.utils.clip_grad_value_(params, 0.01)
    assert float(whole(torch.linalg.vector_norm(params[0].grad, math.inf))) <= 0.01


@spmd(4)
def test_one_optimizer_and_one_clip_over_several_meshes(rank):
    """Ragged, sharded and replicated parameters, on a 1-D and on a 2-D mesh."""
    flat, grid = rank.mesh(), rank.mesh(2, 2, names=("dp", "tp"))
    kinds = [
        (flat, [RaggedShard((0,), (1, 0, 5, 2))]),
        (flat, [Shard(0)]),
        (grid, [Replicate(), RaggedShard((0,), (3, 5))]),
        (grid["tp"], [RaggedShard((0,), (0, 1))]),
        (grid, [Shard(0), Shard(1)]),
        (flat, [Replicate()]),
    ]
    for foreach in (True, False):
        for order in (2.0, math.inf):
            plain = [nn.Parameter(numbers(i, 8, 6, device=rank.device)) for i in range(len(kinds))]
            params = [
                nn.Parameter(distribute_tensor(p.detach().clone(), *kind)) for p, kind in zip(plain, kinds)
            ]
            options = {"foreach": True} if foreach else {"fused": True}
            reference, optimizer = (
                torch.optim.AdamW(plain, lr=0.1),
                torch.optim.AdamW(params, lr=0.1, **options),
            )
            for step in range(2):
                for i, (p, q) in enumerate(zip(plain, params)):
                    p.grad = numbers(10 * step + i, 8, 6, device=rank.device)
                    q.grad = distribute_tensor(p.grad.clone(), *kinds[i])
                expected = nn.utils.clip_grad_norm_(plain, 1.0, norm_type=order, foreach=foreach)
                actual = nn.utils.clip_grad_norm_(params, 1.0, norm_type=order, foreach=foreach)
                assert_same(actual, expected)
                reference.step()
                optimizer.step()
            assert_same(params, plain, f"foreach={foreach} order={order}")


@spmd(4)
def test_a_norm_over_several_meshes_is_a_number_everywhere(rank):
    """Also where it meets tensors that are not ours, of a mesh that it was not taken on."""
    flat, grid = rank.mesh(), rank.mesh(2, 2, names=("dp", "tp"))
    t = numbers(1, 8, 6, device=rank.device)
    ours = distribute_tensor(t, flat, [RaggedShard((0,), (1, 0, 5, 2))])
    theirs = distribute_tensor(t.bfloat16(), grid, [Shard(0), Shard(1)])
    params = [nn.Parameter(ours), nn.Parameter(theirs)]
    for param in params:
        param.grad = param.detach().clone()
    norms = torch.stack([p.grad.norm() for p in params])
    expected = torch.stack([t.norm(), t.bfloat16().norm()])
    assert_same(norms, expected)
    assert_same(norms / norms.sum(), expected / expected.sum())
    replicated = distribute_tensor(torch.arange(1.0, 3.0, device=rank.device), flat, [Replicate()])
    plain = replicated.full_tensor()
    assert_same([norms * replicated, replicated - norms], [expected * plain, plain - expected])
    total = nn.utils.clip_grad_norm_(params, 1.0)  # one list for each dtype
    assert total.item() == pytest.approx(expected.norm().item(), rel=1e-2)
    scale = 1 / (total.full_tensor() + 1e-6)
    assert_same(params[0].grad, t * scale)
    assert_same(params[1].grad, t.bfloat16() * scale.bfloat16())
    with pytest.raises(RuntimeError, match="mesh"):  # as stock has it
        theirs * distribute_tensor(t, flat, [Replicate()])
    with pytest.raises(RuntimeError, match="mesh"):
        theirs.sum() * distribute_tensor(t, flat, [Shard(0)]).sum()


@spmd(*worlds(3))
def test_gradient_scaler_sees_the_infinite_piece(rank):
    mesh = rank.mesh()
    ranks = rank.world_size
    kinds = [RaggedShard((0,), (1, *[0] * (ranks - 2), 7)), RaggedShard.on_one_rank((8, 6), ranks, 1)]
    for bad in (False, True):
        params = [
            nn.Parameter(distribute_tensor(numbers(i, 8, 6, device=rank.device), mesh, [k]))
            for i, k in enumerate(kinds)
        ]
        before = [whole(p).clone() for p in params]
        optimizer = torch.optim.SGD(params, lr=1.0)
        scaler = torch.amp.GradScaler(rank.device, init_scale=4.0)
        scaler.scale(torch.ones((), device=rank.device))
        for i, p in enumerate(params):
            grad = numbers(10 + i, 8, 6, device=rank.device)
            if bad and i == 0:
                grad[7, 5] = math.inf  # on the last rank only
            p.grad = distribute_tensor(grad * 4.0, mesh, [kinds[i]])
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0 if bad else 4.0)
        grads = [numbers(10 + i, 8, 6, device=rank.device) for i in range(2)]
        assert_same(params, before if bad else [b - g for b, g in zip(before, grads)])


@spmd(2)
def test_a_gradient_laid_out_otherwise_is_moved(rank):
    """A gradient that arrives replicated (of a sum, say) is sliced, not refused.

    One layout after the other, the parameter's own first: torch 2.11 would take each for the first.
    """
    mesh, kind = rank.mesh(), RaggedShard((0,), (1, 3))
    start, grad = (numbers(seed, 8, 6, device=rank.device) for seed in (1, 2))
    layouts = (kind, Replicate(), Shard(0), Shard(1), RaggedShard((0, 1), (5, 43)))
    for name, make in OPTIMIZERS.items():
        if name == "sgd-fused":
            continue  # makes its momentum like the gradient, and then writes it: refused
        plain = nn.Parameter(start.clone())
        plain.grad = grad.clone()
        make([plain]).step()
        for layout in fewer(layouts):
            param = nn.Parameter(distribute_tensor(start, mesh, [kind]))
            param.grad = distribute_tensor(grad, mesh, [layout])
            make([param]).step()
            assert param.placements == (kind,)
            assert_same(param, plain, f"{name} {layout}")
    param = nn.Parameter(distribute_tensor(start, mesh, [kind]))
    param.sum().backward()
    torch.optim.SGD([param], lr=1.0, fused=True).step()
    assert_same(param, start - 1)


@spmd(2)
def test_a_state_laid_out_otherwise_is_refused(rank):
    mesh = rank.mesh()
    param = nn.Parameter(
        distribute_tensor(numbers(1, 8, 6, device=rank.device), mesh, [RaggedShard((0,), (1, 3))])
    )
    param.grad = torch.ones_like(param.detach())
    optimizer = torch.optim.AdamW([param], fused=True)
    optimizer.step()
    state = optimizer.state[param]
    state["exp_avg"] = state["exp_avg"].redistribute(placements=[Shard(0)])
    with pytest.raises(RaggedOpError, match="exp_avgs would be written, but it is laid out as"):
        optimizer.step()
