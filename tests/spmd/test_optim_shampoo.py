"""Shampoo: against a dense reference, and the same on shards as on one process, without communication."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor.debug import CommDebugMode

from optim_cases import (
    SHAPES,
    assert_same_numbers,
    detached_copy,
    gradients,
    plain_parameters,
    ragged_parameters,
    set_grads,
)
from ragged_fsdp.optim import Shampoo
from ragged_fsdp.optim.shampoo import inverse_root
from rank_pool import spmd

OPTIONS = {"lr": 1e-2, "block_shape": (32, 32), "root_interval": 2, "start_step": 2, "weight_decay": 0.1}


def _close(left, right):
    return torch.allclose(left, right, rtol=1e-4, atol=1e-6)


@spmd(1, 2, 3)
def test_same_as_one_process_without_communication_and_resumes(rank):
    plain = plain_parameters(rank.device)
    sharded = ragged_parameters(rank.mesh(), plain)
    reference, ours = (Shampoo(params.items(), **OPTIONS) for params in (plain, sharded))
    for step in range(5):
        set_grads(plain, gradients(step, rank.device))
        reference.step()
        set_grads(sharded, gradients(step, rank.device))
        with CommDebugMode() as comm:
            ours.step()
        assert comm.get_total_counts() == 0
    assert_same_numbers(ours, reference, list(SHAPES), equal=_close)
    assert "left" not in reference.state[plain["vector"]]
    assert tuple(ours.state[sharded["wide"]]["left_root"].shape) == (4, 3, 32, 32)

    path = rank.shared_dir / "checkpoint"
    dcp.save({"model": dict(sharded), "optim": ours.state_dict()}, checkpoint_id=path)
    resumed = ragged_parameters(rank.mesh(), plain, roll=1)
    optimizer = Shampoo(resumed.items(), **OPTIONS)
    set_grads(resumed, gradients(9, rank.device))
    optimizer.step()
    state = {"model": dict(resumed), "optim": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    optimizer.load_state_dict(copy.deepcopy(state["optim"]))
    for both in ((reference, plain), (optimizer, resumed)):
        set_grads(both[1], gradients(6, rank.device))
        both[0].step()
    assert_same_numbers(optimizer, reference, list(SHAPES), equal=_close)


@spmd(1)
def test_dense_reference(rank):
    """One block, one renewal: the update is L^-1/4 M R^-1/4 with the length of Adam's."""
    shapes = {"w": (64, 64)}
    params = plain_parameters(rank.device, shapes)
    before = params["w"].detach().clone()
    optimizer = Shampoo(
        params.items(),
        lr=0.1,
        betas=(0.9, 0.99),
        block_shape=(64, 64),
        start_step=1,
        damping=1e-4,
        min_numel=1,
    )
    set_grads(params, gradients(0, rank.device, shapes))
    optimizer.step()
    grad = gradients(0, rank.device, shapes)["w"].double()

    def root(matrix):
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ torch.diag((values.clamp(min=0) + 1e-4 * values[-1]) ** -0.25) @ vectors.T

    direction = root(0.01 * grad @ grad.T) @ (0.1 * grad) @ root(0.01 * grad.T @ grad)
    adam = 0.1 * grad / ((0.01 * grad**2).sqrt() / 0.01**0.5 + 1e-8)
    expected = before.double() - 0.1 / 0.1 * direction * adam.norm() / direction.norm()
    torch.testing.assert_close(params["w"].detach().double(), expected, rtol=2e-3, atol=2e-3)


@spmd(1)
def test_converges_faster_than_adam_on_an_ill_conditioned_quadratic(rank):
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.diag(torch.logspace(-2, 0, 32)) for _ in range(2))
    turn = torch.linalg.qr(torch.randn(32, 32, generator=generator))[0]
    left, target = turn @ left @ turn.T, torch.randn(32, 32, generator=generator)
    losses = {}
    for name, make in (
        ("shampoo", lambda p: Shampoo([p], lr=0.05, block_shape=(32, 32), root_interval=1, min_numel=1)),
        ("adam", lambda p: torch.optim.Adam([p], lr=0.05, betas=(0.9, 0.99))),
    ):
        weight = torch.nn.Parameter(torch.zeros(32, 32))
        optimizer = make(weight)
        for _ in range(60):
            loss = (left @ (weight - target) @ right).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[name] = loss.item()
    assert losses["shampoo"] < 0.7 * losses["adam"], losses


@spmd(1)
def test_roots_of_gradients_with_few_rows(rank):
    """As of experts with few tokens: of such matrices, LAPACK's fp32 fails on every fifth."""
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(40, 128, 12, generator=generator)
    grads[torch.rand(40, 128, generator=generator) < 0.7] = 0
    matrices = (grads @ grads.mT).to(rank.device)
    roots = inverse_root(matrices, 4.0, 1e-3)
    expected = inverse_root(matrices.double(), 4.0, 1e-3)
    torch.testing.assert_close(roots.double(), expected, rtol=1e-3, atol=1e-4)


@spmd(1)
def test_roots_of_degenerate_blocks_and_bad_options(rank):
    matrices = torch.zeros(3, 8, 8)
    matrices[1] = torch.diag(torch.arange(8.0))
    matrices[2] = float("nan")
    roots = inverse_root(matrices, 2.0, 1e-3)
    assert torch.equal(roots[0], torch.eye(8)) and bool(roots[2].isnan().all())
    expected = torch.diag((torch.arange(8.0) + 7e-3) ** -0.5)
    torch.testing.assert_close(roots[1], expected, rtol=1e-3, atol=1e-3)
    params = detached_copy(plain_parameters(rank.device))
    for bad in ({"root_interval": 0}, {"damping": 0.0}, {"betas": (0.9, 1.0)}, {"exponent": -1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Shampoo(params.items(), **bad)
