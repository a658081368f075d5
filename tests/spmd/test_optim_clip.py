"""clip_grad_norm_: the norm of the full gradients for any mix of placements, one all-reduce per mesh."""

import math

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from optim_cases import SHAPES, full, gradients, plain_parameters, ragged_parameters, set_grads
from ragged_fsdp.dtensor import RaggedShard, distribute_tensor
from ragged_fsdp.optim import clip_grad_norm_
from rank_pool import spmd


def _clipped(params, max_norm, norm_type):
    grads = [p.grad for p in params.values()]
    norm = torch.nn.utils.clip_grad_norm_(params.values(), max_norm, norm_type)
    return norm, grads


@spmd(1, 3)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
def test_equals_the_norm_of_full_gradients_with_one_all_reduce(rank, norm_type):
    plain = plain_parameters(rank.device)
    params = ragged_parameters(rank.mesh(), plain)
    for set_of in (plain, params):
        set_grads(set_of, gradients(0, rank.device))
    params["vector"] = plain["vector"]  # a mix: this one is not distributed
    plain["vector"].grad = gradients(0, rank.device)["vector"]
    reference = {n: torch.nn.Parameter(p.detach().clone()) for n, p in plain.items()}
    set_grads(reference, gradients(0, rank.device))
    expected, _ = _clipped(reference, 3.0, norm_type)
    with CommDebugMode() as comm:
        norm = clip_grad_norm_(params.values(), 3.0, norm_type)
    assert comm.get_total_counts() <= 1
    torch.testing.assert_close(norm, expected, rtol=2e-6, atol=0)
    assert not isinstance(norm, DTensor)
    for name, param in params.items():
        torch.testing.assert_close(full(param.grad), reference[name].grad, rtol=1e-5, atol=1e-9)


@spmd(4)
def test_two_meshes_replicas_experts_and_partial(rank):
    square = rank.mesh(2, 2, names=("dp", "tp"))
    line = square["dp"]
    shape, ragged = (8, 12), RaggedShard((0,), (3, 1))
    layouts = [
        (square, [Shard(0), Shard(1)]),
        (square, [Shard(0), Replicate()]),
        (square, [ragged, Replicate()]),
        (square, [Replicate(), Replicate()]),
        (line, [ragged]),
        (line, [Shard(0)]),
    ]
    whole, params = [], []
    for seed, (mesh, placements) in enumerate(layouts):
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(rank.device)
        param = torch.nn.Parameter(
            distribute_tensor(torch.zeros(shape, device=rank.device), mesh, placements)
        )
        param.grad = distribute_tensor(grad, mesh, placements)
        whole.append(grad.clone())
        params.append(param)
    with CommDebugMode() as comm:
        norm = clip_grad_norm_(params, 0.5)
    assert comm.get_total_counts() == 2  # one per mesh
    expected = torch.linalg.vector_norm(torch.stack(whole))
    torch.testing.assert_close(norm, expected)
    for param, grad in zip(params, whole):
        torch.testing.assert_close(full(param.grad), grad * 0.5 / (expected + 1e-6))

    partial = torch.nn.Parameter(distribute_tensor(torch.zeros(4, device=rank.device), line, [Replicate()]))
    partial.grad = DTensor.from_local(torch.ones(4, device=rank.device), line, [Partial()])
    torch.testing.assert_close(clip_grad_norm_(partial, 1.0), torch.tensor(4.0, device=rank.device))
    torch.testing.assert_close(full(partial.grad), torch.full((4,), 0.5, device=rank.device))


@spmd(2)
def test_non_finite_empty_and_bad_input(rank):
    params = ragged_parameters(rank.mesh(), plain_parameters(rank.device))
    assert clip_grad_norm_(params.values(), 1.0) == 0
    set_grads(params, gradients(0, rank.device))
    if rank.rank == 0:
        params["wide"].grad._local_tensor[0, 0] = float("nan")
    for norm_type in (2.0, math.inf, "inf"):
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(params.values(), 1.0, norm_type, error_if_nonfinite=True)
    assert clip_grad_norm_(params.values(), 1.0, math.inf).isnan()  # on every rank
    assert bool(full(params["bias"].grad).isnan().all())
    with pytest.raises(ValueError, match="norm_type"):
        clip_grad_norm_(params.values(), 1.0, 0.0)
    for bad in (None, "1.0"):
        with pytest.raises(ValueError, match=f"max_norm must be a number, got {bad!r}"):
            clip_grad_norm_(params.values(), bad)
    with pytest.raises(TypeError, match="parameters must be tensors, got 'wide' among them"):
        clip_grad_norm_(params, 1.0)
    assert set(params) == set(SHAPES)
