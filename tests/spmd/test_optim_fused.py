"""Fused optimizers over flat buffers: torch's numbers, one tensor per run, per-parameter views."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp

from optim_cases import (
    SHAPES,
    assert_same_numbers,
    detached_copy,
    gradients,
    plain_parameters,
    ragged_parameters,
    set_grads,
)
from ragged_fsdp.dbuffer import DBuffer
from ragged_fsdp.optim import AdamW8bit, FusedAdam, FusedAdamW, FusedSGD
from rank_pool import spmd

CASES = {
    "adamw": (FusedAdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "amsgrad": (FusedAdam, torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    "sgd": (FusedSGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "plain sgd": (FusedSGD, torch.optim.SGD, {"lr": 0.1}),
}


def _buffers(mesh, plain, device):
    """Parameters and gradients as views of two buffers of one layout."""
    weights = DBuffer.distribute({n: p.detach() for n, p in plain.items()}, mesh)
    grads = DBuffer.distribute({n: torch.zeros_like(p) for n, p in plain.items()}, mesh)
    params = {n: torch.nn.Parameter(weights.dtensor(i)) for i, n in enumerate(plain)}

    def fill(step, skip=()):
        whole = gradients(step, device)
        for index, (name, param) in enumerate(params.items()):
            part = weights.layout.local_range(index, weights.rank)
            flat = whole[name].reshape(-1)[part.tensor_start : part.tensor_start + part.numel]
            grads.tensor(index).view(-1).copy_(flat)
            param.grad = None if name in skip else grads.dtensor(index)

    return params, fill


def _close(left, right):
    return torch.allclose(left, right, rtol=1e-6, atol=1e-7)


@spmd(1, 3)
@pytest.mark.parametrize("case", CASES)
def test_same_numbers_as_torch_with_unused_parameters(rank, case):
    ours_type, theirs_type, options = CASES[case]
    plain = plain_parameters(rank.device)
    params, fill = _buffers(rank.mesh(), plain, rank.device)
    ours = ours_type(params.items(), **options)
    # torch's fused SGD cannot take parameters that start later than others
    theirs = theirs_type(plain.items(), fused="sgd" not in case, **options)
    for step in range(4):
        skip = ("odd", "bias") if step in (0, 2) else ()
        fill(step, skip)
        set_grads(plain, gradients(step, rank.device))
        for name in skip:
            plain[name].grad = None
        ours.step()
        theirs.step()
    assert_same_numbers(ours, theirs, list(SHAPES), equal=_close)


@spmd(2)
def test_one_tensor_per_buffer_and_views_for_checkpoints(rank):
    plain = plain_parameters(rank.device)
    params, fill = _buffers(rank.mesh(), plain, rank.device)
    optimizer = FusedAdamW(params.items())
    lengths = []
    kernel = FusedAdamW._kernel
    try:
        FusedAdamW._kernel = staticmethod(lambda w, *a, **k: (lengths.append(len(w)), kernel(w, *a, **k)))
        fill(0)
        optimizer.step()
        fill(1, skip=("experts",))
        optimizer.step()
    finally:
        FusedAdamW._kernel = staticmethod(kernel)
    assert lengths[0] == 1  # the whole buffer
    assert all(length <= 2 for length in lengths[1:])
    held = [p for p in params.values() if p._local_tensor.numel()]
    storages = {optimizer.state[p]["exp_avg"]._local_tensor.untyped_storage().data_ptr() for p in held}
    assert len(storages) == 1
    for param in params.values():
        assert optimizer.state[param]["exp_avg"].placements == param.placements


@spmd(2)
@pytest.mark.parametrize("kind", [FusedAdamW, AdamW8bit])
def test_sharded_parameters_that_get_other_memory(rank, kind):
    """The local part is another tensor, or the same one with other memory, as after a move and back."""
    plain = plain_parameters(rank.device)
    params, reference = ragged_parameters(rank.mesh(), plain), ragged_parameters(rank.mesh(), plain)
    ours, expected = kind(params.items()), kind(reference.items())
    for step in range(3):
        for of_step in (params, reference):
            set_grads(of_step, gradients(step, rank.device))
        ours.step()
        expected.step()
        if step == 0:
            params["odd"]._local_tensor = params["odd"]._local_tensor.clone()
        elif step == 1:
            params["wide"]._local_tensor.data = params["wide"]._local_tensor.data.clone()
    assert_same_numbers(ours, expected, list(SHAPES))


@spmd(3)
def test_checkpoint_moves_to_other_layouts(rank):
    plain = plain_parameters(rank.device)
    params, fill = _buffers(rank.mesh(), plain, rank.device)
    ours, theirs = FusedAdamW(params.items()), torch.optim.AdamW(plain.items(), fused=True)
    fill(0)
    set_grads(plain, gradients(0, rank.device))
    ours.step()
    theirs.step()
    path = rank.shared_dir / "checkpoint"
    dcp.save({"model": dict(params), "optim": ours.state_dict()}, checkpoint_id=path)
    resumed = ragged_parameters(rank.mesh(), plain, roll=1)
    optimizer = FusedAdamW(resumed.items())
    set_grads(resumed, gradients(5, rank.device))
    optimizer.step()
    state = {"model": dict(resumed), "optim": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    optimizer.load_state_dict(copy.deepcopy(state["optim"]))
    for step in (1, 2):
        set_grads(resumed, gradients(step, rank.device))
        set_grads(plain, gradients(step, rank.device))
        optimizer.step()
        theirs.step()
    assert_same_numbers(optimizer, theirs, list(SHAPES), equal=_close)


@spmd(2)
@pytest.mark.parametrize("case", ["adamw", "sgd"])
def test_checkpoint_of_torchs_optimizer(rank, case):
    """It is asked for each entry of our state by name, so torch's optimizer must have the same ones."""
    ours_type, theirs_type, options = CASES[case]
    plain = plain_parameters(rank.device)
    params = [ragged_parameters(rank.mesh(), plain) for _ in range(2)]
    theirs = theirs_type(params[0].items(), foreach=False, **options)
    ours = ours_type(params[1].items(), **options)
    for step in range(2):
        for side, optimizer in zip(params, (theirs, ours)):
            set_grads(side, gradients(step, rank.device))
            optimizer.step()
    path = rank.shared_dir / "checkpoint"
    dcp.save({"model": dict(params[0]), "optim": theirs.state_dict()}, checkpoint_id=path)
    state = {"model": dict(params[1]), "optim": ours.state_dict()}
    dcp.load(state, checkpoint_id=path)
    ours.load_state_dict(state["optim"])
    for side, optimizer in zip(params, (theirs, ours)):
        set_grads(side, gradients(2, rank.device))
        optimizer.step()
    assert_same_numbers(ours, theirs, list(SHAPES), equal=_close)


@spmd(1)
def test_bad_options_and_gradients(rank):
    plain = detached_copy(plain_parameters(rank.device))
    for bad in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            FusedAdamW(plain.items(), **bad)
    with pytest.raises(ValueError, match="nesterov"):
        FusedSGD(plain.items(), nesterov=True)
    optimizer = FusedAdamW(plain.items())
    plain["wide"].grad = torch.zeros_like(plain["wide"]).to_sparse()
    with pytest.raises(RuntimeError, match="wide: expected a dense gradient"):
        optimizer.step()
