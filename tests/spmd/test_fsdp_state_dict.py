"""``state_dict``, ``load_state_dict`` and torch's distributed state-dict functions."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

from fsdp_cases import (
    Transformer,
    assert_same,
    average_gradients,
    build,
    fsdp,
    full,
    fully_shard,
    is_sharded,
    ragged_only,
    shard_blocks,
    tokens,
)
from rank_pool import spmd


def _storage(tensor):
    return tensor.to_local().untyped_storage().data_ptr()


@spmd(2)
def test_state_dict_shares_memory_and_keeps_names(rank):
    model, reference = build(lambda: Transformer(moe=True), rank.device)
    shard_blocks(model)
    model(tokens(rank, 0))  # leaves the root unsharded: state_dict reshards first
    states = model.state_dict()
    assert list(states) == list(reference.state_dict())
    assert is_sharded(model.parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(states[name], DTensor)
        assert states[name].shape == parameter.shape
        assert _storage(states[name]) == _storage(parameter)


@pytest.mark.parametrize("assign", [False, True])
@spmd(1, 3)
def test_load_state_dict_of_another_sharded_model(rank, assign):
    source, reference = build(Transformer, rank.device, seed=1)
    target, _ = build(Transformer, rank.device, seed=2)
    shard_blocks(source)
    shard_blocks(target)
    before = {name: _storage(p) for name, p in target.named_parameters()}
    states = {name: value.clone() for name, value in source.state_dict().items()}
    target.load_state_dict(states, assign=assign)
    assert_same(target, reference)
    if not assign:
        assert before == {name: _storage(p) for name, p in target.named_parameters()}
    for module in (target, reference):  # the values loaded are the ones that train
        module(tokens(rank, 0)).backward()
    average_gradients(reference)
    assert_same(target, reference, tolerance=1e-6, grads=True)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(1.0)
        for parameter in reference.parameters():
            parameter.add_(1.0)
    torch.testing.assert_close(target(tokens(rank, 1)), reference(tokens(rank, 1)), rtol=1e-6, atol=0)


@spmd(2)
def test_load_reports_missing_and_unexpected_keys(rank):
    model, _ = build(Transformer, rank.device)
    shard_blocks(model)
    states = model.state_dict()
    states["extra"] = states.pop("norm.weight")
    with pytest.raises(RuntimeError, match=r"norm\.weight(.|\n)*extra"):
        model.load_state_dict(states)
    result = model.load_state_dict(states, strict=False)
    assert result.missing_keys == ["norm.weight"]
    assert result.unexpected_keys == ["extra"]


@pytest.mark.parametrize("offload", [False, True])
@spmd(3)
def test_full_state_dict_for_rank_zero(rank, offload):
    model, reference = build(lambda: Transformer(moe=True), rank.device)
    shard_blocks(model)
    states = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))
    if offload and rank.rank != 0:
        assert states == {}
        return
    for name, value in reference.state_dict().items():
        assert not isinstance(states[name], DTensor)
        assert torch.equal(states[name].cpu(), value.cpu()), name


@spmd(1, 2)
def test_a_full_state_dict_of_several_dtypes_is_saved_by_torch(rank):
    """On one rank, and of what is empty, nothing is gathered: what comes must be no view of a buffer."""
    model = nn.Module()
    model.wide = nn.Parameter(torch.ones(3, device=rank.device))
    model.empty = nn.Parameter(torch.ones(0, device=rank.device, dtype=torch.float64))
    model.none = nn.Parameter(torch.ones(0, device=rank.device))
    model.short = nn.Parameter(torch.ones(5, device=rank.device, dtype=torch.bfloat16))
    fully_shard(model)
    states = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    file = rank.shared_dir / f"states-{rank.rank}"
    torch.save(states, file)
    for name, value in torch.load(file).items():
        assert torch.equal(value, full(getattr(model, name))), name


@pytest.mark.parametrize("broadcast", [False, True])
@spmd(3)
def test_setting_a_full_state_dict(rank, broadcast):
    """A plain state dict goes in, from each rank or from rank 0 alone."""
    _, reference = build(lambda: Transformer(moe=True), rank.device, seed=5)
    model, _ = build(lambda: Transformer(moe=True), rank.device, seed=6)
    shard_blocks(model)
    states = reference.state_dict() if rank.rank == 0 or not broadcast else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(model, states, options=options)
    assert_same(model, reference)
    name, weight = next((name, p) for name, p in reference.named_parameters() if p.ndim == 2)
    swapped = {**reference.state_dict(), name: weight.detach().t().contiguous()}
    wrong = swapped if rank.rank == 0 or not broadcast else {}
    with pytest.raises((ValueError, RuntimeError), match=rf"{name}|size of tensor"):
        set_model_state_dict(model, wrong, options=options)  # also where a rank owns nothing of it


@ragged_only
@spmd(4)
def test_full_state_dicts_that_differ_between_ranks_are_refused_by_all(rank):
    """torch would broadcast one tensor into the memory of another: the process ends, or reads garbage."""
    mesh = rank.mesh(2, 2, names=("replicate", "shard"))
    model, reference = build(lambda: nn.Linear(6, 10), rank.device)
    fully_shard(model, mesh=mesh)
    good = {name: value.clone() for name, value in reference.state_dict().items()}
    weight, bias = good.values()
    cases = {
        "shape": {"weight": weight[:3].clone(), "bias": bias},
        "dtype": {"weight": weight.double(), "bias": bias},
        "missing": {"bias": bias},
        "order": {"bias": bias, "weight": weight},
    }
    for case, other in cases.items():
        for culprit in range(rank.world_size):  # also one that only some of the ranks meet along a mesh dim
            options = StateDictOptions(full_state_dict=True, strict=case != "missing")
            states = dict(other if rank.rank == culprit else good)
            with pytest.raises(ValueError, match=r"rank \d has 'weight \(10, 6\)|rank \d has 'bias"):
                set_model_state_dict(model, states, options=options)
    everywhere = {"weight": weight[:3].clone(), "bias": bias}
    with pytest.raises(ValueError, match=r"weight: the state dict has shape \(3, 6\), expected \(10, 6\)"):
        set_model_state_dict(model, everywhere, options=StateDictOptions(full_state_dict=True))
    assert_same(model, reference)


@spmd(2)
def test_optimizer_state_round_trip(rank):
    """The state of a plain optimizer goes into a sharded one and comes back unchanged."""
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for module, optimizer in ((model, ours), (reference, theirs)):
        module(tokens(rank, 0)).backward()
        if module is reference:
            average_gradients(reference)
        optimizer.step()
        optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True)
    states = get_optimizer_state_dict(model, ours, options=options)
    by_name = {name: theirs.state[p] for name, p in reference.named_parameters()}
    assert set(states["state"]) == set(by_name)
    for name, expected in by_name.items():
        for key, value in expected.items():
            torch.testing.assert_close(
                states["state"][name][key].to(value.device), value, rtol=1e-6, atol=1e-9
            )
    fresh, _ = build(Transformer, rank.device)
    shard_blocks(fresh)
    restored = torch.optim.AdamW(fresh.parameters(), lr=1e-3)
    set_optimizer_state_dict(fresh, restored, states, options=options)
    for (name, p), q in zip(fresh.named_parameters(), model.parameters()):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(full(restored.state[p][key]), full(ours.state[q][key])), f"{name}.{key}"


def _shard_dim(parameter):
    """Explicit placements beside ragged ones: the vocabulary is odd, the width even."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else None


def _copied_by(kind, rank, states):
    """The state dict after one of the ways in which users keep one."""
    if kind == "deepcopy":
        return copy.deepcopy(states)
    if kind == "torch.save":
        path = rank.shared_dir / f"rank{rank.rank}.pt"
        torch.save(states, path)
        return torch.load(path, weights_only=True)
    saved = dcp.async_save({"model": states}, checkpoint_id=rank.shared_dir / "checkpoint")
    copies = {name: torch.zeros_like(value) for name, value in states.items()}
    with torch.no_grad():
        for value in states.values():
            value.zero_()  # the step goes on while the checkpoint is written
    saved.result()
    dcp.load({"model": copies}, checkpoint_id=rank.shared_dir / "checkpoint")
    return copies


@pytest.mark.parametrize("kind", ["deepcopy", "torch.save", "async_save"])
@pytest.mark.parametrize("placement", [None, _shard_dim], ids=["ragged", "shard"])
@spmd(2)
def test_copies_of_a_state_dict(rank, kind, placement):
    """Copies of several shards of one buffer are as many different tensors, apart from the model."""
    model, reference = build(Transformer, rank.device, seed=1)
    shard_blocks(model, shard_placement_fn=placement)
    copies = _copied_by(kind, rank, model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for name, value in reference.state_dict().items():
        assert torch.equal(full(copies[name]), value), name
    model.load_state_dict(copies)
    assert_same(model, reference)


def _cast_and_train(rank, *, trained_before):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    if trained_before:
        model(tokens(rank, 0)).backward()
        model.zero_grad()
    for module in (model, reference):
        module.double()
    for parameter in model.parameters():
        assert parameter.dtype == parameter.to_local().dtype == torch.float64
    for module in (model, reference):
        module(tokens(rank, 1)).backward()
    average_gradients(reference)
    assert_same(model, reference, tolerance=1e-12, grads=True)
    assert next(iter(model.parameters())).grad.dtype == torch.float64


@spmd(2)
def test_casting_the_module_before_training(rank):
    """``module.to(dtype)`` and friends change the sharded parameters, which then train."""
    _cast_and_train(rank, trained_before=False)


@ragged_only
@spmd(2)
def test_casting_the_module_between_steps(rank):
    """Stock FSDP2 keeps its gather buffers in the old dtype and raises in the next forward."""
    _cast_and_train(rank, trained_before=True)


@spmd(2)
def test_parameters_replaced_by_the_user_are_picked_up(rank):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    with torch.no_grad():
        old = model.norm.weight
        model.norm.weight = torch.nn.Parameter(
            DTensor.from_local(
                old.to_local() * 2,
                old.device_mesh,
                old.placements,
                run_check=False,
                shape=old.shape,
                stride=old.stride(),
            )
        )
        reference.norm.weight.mul_(2)
    assert torch.equal(model(tokens(rank, 0)), reference(tokens(rank, 0)))


@spmd(2)
def test_buffers_stay_plain(rank):
    class Buffered(Transformer):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor(2.0))
            self.register_buffer("scratch", torch.zeros(3), persistent=False)

        def forward(self, batch):
            return super().forward(batch) * self.scale

    model, reference = build(Buffered, rank.device)
    fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy())
    assert torch.equal(model(tokens(rank, 0)), reference(tokens(rank, 0)))
    states = model.state_dict()
    assert not isinstance(states["scale"], DTensor)
    assert "scratch" not in states
