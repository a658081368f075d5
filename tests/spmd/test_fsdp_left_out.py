"""What sharding leaves out is named: parameters attached late, optimizers made early, two kinds of FSDP."""

import logging

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from fsdp_cases import DIM, Transformer, assert_same, average_gradients, build, shard_blocks, tokens
from fsdp_inside import forget_warnings
from ragged_fsdp import MixedPrecisionPolicy, adopt_parameters, fully_shard
from ragged_fsdp.optim import AdamW8bit, FusedAdamW
from rank_pool import spmd


class _Adapter(nn.Module):
    """A low-rank change of a linear layer, put in its place."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(seed)
        device = base.weight.device
        self.down = nn.Parameter(torch.randn(DIM, 3, generator=generator).to(device))
        self.up = nn.Parameter(torch.randn(3, DIM, generator=generator).to(device))

    def forward(self, x):
        return self.base(x) + x @ self.down @ self.up


def _attach(model, seed=0):
    model.requires_grad_(False)
    for layer in model.layers:
        layer.attention.out = _Adapter(layer.attention.out, seed)
    return model


def _step(model, reference, rank, step):
    loss, expected = model(tokens(rank, step)), reference(tokens(rank, step))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # sums of three ranks may have any order
    loss.backward()
    expected.backward()
    average_gradients(reference)
    assert_same(model, reference, tolerance=1e-6, grads=True)


@pytest.mark.parametrize("after_forward", [False, True])
@spmd(1, 2, 3)
def test_adapters_attached_after_sharding_are_refused_or_adopted(rank, after_forward):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    if after_forward:
        _step(model, reference, rank, 0)
        model.zero_grad()
        reference.zero_grad()
    _attach(model)
    _attach(reference)
    if not after_forward:  # afterwards nobody looks, which would cost each step
        with pytest.raises(ValueError, match=r"'layers.0.attention.out.down', .*adopt_parameters\(model\)"):
            model(tokens(rank, 0))
    names = [f"layers.{i}.attention.out.{name}" for i in range(2) for name in ("down", "up")]
    assert sorted(adopt_parameters(model)) == names
    assert adopt_parameters(model) == []
    model.reset_iter_state()  # before a forward has seen them
    model.layers[0].unshard()
    assert torch.equal(model.get_parameter(names[0]), reference.get_parameter(names[0]))
    model.layers[0].reshard()
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, reference)
    ]
    for step in range(1, 4):
        _step(model, reference, rank, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert model.get_parameter(names[0]).device_mesh.size() == rank.world_size


@spmd(2)
def test_what_was_set_before_an_adoption_holds_for_what_is_adopted(rank):
    """Else its gradients would be divided by another number, and reduced in each microbatch."""
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    model.requires_grad_(False)
    for layer in model.layers:
        layer.set_gradient_divide_factor(1.0)
    model.set_requires_gradient_sync(False)
    _attach(model)
    _attach(reference)
    adopt_parameters(model)
    for microbatch in range(2):
        if microbatch == 1:
            assert all(p.grad is None for p in model.parameters())
            model.set_requires_gradient_sync(True)
        model(tokens(rank, microbatch)).backward()
        reference(tokens(rank, microbatch)).backward()
    average_gradients(reference)
    for parameter in reference.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(rank.world_size)
    assert_same(model, reference, tolerance=1e-6, grads=True)


@spmd(2)
def test_frozen_and_ignored_parameters_may_stay_outside(rank):
    model, reference = build(Transformer, rank.device)
    ignored = model.layers[0].mlp.up.weight
    for layer in model.layers:
        fully_shard(layer, ignored_params={ignored})
    fully_shard(model, ignored_params={ignored})
    model.norm.scale = nn.Parameter(torch.ones(3), requires_grad=False)
    loss, expected = model(tokens(rank, 0)), reference(tokens(rank, 0))
    assert torch.equal(loss, expected)


@spmd(2)
def test_ranks_that_attach_different_adapters_are_named(rank):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    if rank.rank == 0:
        model.norm.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="the ranks disagree"):
        adopt_parameters(model)
    if rank.rank == 0:
        del model.norm.scale
    _step(model, reference, rank, 0)


@spmd(1, 2)
def test_adoption_after_a_backward_that_raised(rank):
    """It never ended, but it does not run any more either; the next forward forgets it."""
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    raises = model.layers[0].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens(rank, 0)).backward()
    raises.remove()
    for manual in (True, False):  # which cannot change while a backward runs
        model.set_manual_backward_finalization(manual)
    _attach(model)
    _attach(reference)
    assert len(adopt_parameters(model)) == 4
    for parameter in model.parameters():
        parameter.grad = None
    _step(model, reference, rank, 1)


@spmd(1)
def test_adoption_refuses_what_it_cannot_do(rank):
    model, _ = build(Transformer, rank.device)
    with pytest.raises(TypeError, match=r"must be an nn.Module, got 3"):
        adopt_parameters(3)
    with pytest.raises(ValueError, match="no module below Transformer is sharded"):
        adopt_parameters(model)
    shard_blocks(model)
    model.layers[0].register_forward_hook(lambda *_: adopt_parameters(model))
    with pytest.raises(RuntimeError, match="between steps"):
        model(tokens(rank, 0))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdamW, AdamW8bit])
@spmd(2)
def test_an_optimizer_made_before_sharding_is_named(rank, kind):
    model, reference = build(Transformer, rank.device)
    early = kind(model.parameters(), lr=1e-3)
    early.step()  # it was right then
    shard_blocks(model)
    model(tokens(rank, 0)).backward()
    with pytest.raises(RuntimeError, match=rf"{kind.__name__} holds .*'norm1.weight'.*after fully_shard"):
        early.step()
    with pytest.raises(RuntimeError, match=rf"{kind.__name__} holds .*'norm1.weight'"):
        torch.compile(early.step, backend="eager")()
    kind(model.parameters(), lr=1e-3).step()
    kind(reference.parameters(), lr=1e-3).step()


@spmd(2)
def test_a_parameter_that_comes_back_is_current_again(rank):
    """Averaged weights are registered for an evaluation, then those that train."""
    model, _ = build(Transformer, rank.device)
    shard_blocks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tokens(rank, 0)).backward()
    trained = model.head.weight
    averaged = nn.Parameter(trained.detach() * 0.5)
    for registered in (averaged, trained):
        model.load_state_dict({"head.weight": registered}, strict=False, assign=True)
        model.head.weight = registered
        with torch.no_grad():
            model(tokens(rank, 0))
        model.reshard()
        if registered is averaged:
            with pytest.raises(RuntimeError, match=r"SGD holds .*'head.weight'"):
                optimizer.step()
    optimizer.step()


@spmd(2)
def test_two_kinds_of_fsdp_in_one_model_are_refused(rank):
    model, _ = build(Transformer, rank.device)
    torch_fsdp.fully_shard(model.layers[0])
    with pytest.raises(ValueError, match=r"a FSDPBlock in the model was sharded by torch.distributed.fsdp"):
        fully_shard(model)


@spmd(1)
def test_main_weights_of_16_bits_get_one_warning(rank):
    forget_warnings()
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("ragged_fsdp").addHandler(handler)
    try:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for dtype, trains in ((torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True)):
            assert not records
            for _ in range(2):
                model, _ = build(Transformer, rank.device)
                shard_blocks(model.to(dtype).requires_grad_(trains), mp_policy=policy)
    finally:
        logging.getLogger("ragged_fsdp").removeHandler(handler)
    (record,) = records
    assert "'norm1.weight', 'norm1.bias'" in record.getMessage() and "16 bits" in record.getMessage()


@spmd(1, 2)
def test_an_optimizer_made_while_the_root_is_gathered_is_refused(rank):
    model, _ = build(Transformer, rank.device)
    shard_blocks(model)
    with torch.no_grad():
        model(tokens(rank, 0))
    made_too_late = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tokens(rank, 0)).backward()
    with pytest.raises(
        RuntimeError, match=r"SGD holds the gathered form of 'embed.weight'.*model.reshard\(\)"
    ):
        made_too_late.step()
    with torch.no_grad():
        model(tokens(rank, 0))
    model.reshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tokens(rank, 0)).backward()
    optimizer.step()


@spmd(4)
def test_an_optimizer_made_of_larger_shards_is_refused(rank):
    """They are registered from a forward on, also an evaluation, until they are gathered again."""
    model, _ = build(Transformer, rank.device)
    shard_blocks(model, reshard_after_forward=2)
    with torch.no_grad():
        model(tokens(rank, 0))
    made_too_late = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"SGD holds the gathered form of 'layers\.0\.norm1\.weight'"):
        made_too_late.step()


@spmd(2)
def test_parameters_that_an_optimizer_gets_later_are_looked_at(rank):
    """Those that are unfrozen in the course of a run, added while the root is gathered."""
    model, _ = build(Transformer, rank.device)
    for parameter in (*model.embed.parameters(), *model.head.parameters()):
        parameter.requires_grad_(False)
    shard_blocks(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(tokens(rank, 0)).backward()
    optimizer.step()
    with torch.no_grad():
        model(tokens(rank, 0))
    model.head.requires_grad_(True)
    optimizer.add_param_group({"params": model.head.parameters()})
    with pytest.raises(RuntimeError, match=r"SGD holds the gathered form of 'head.weight'"):
        optimizer.step()
