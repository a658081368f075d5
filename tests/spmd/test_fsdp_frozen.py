"""Frozen, tied and unused parameters."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fsdp_inside
from collective_calls import count, noted
from fsdp_cases import (
    DIM,
    FeedForward,
    Transformer,
    assert_same,
    average_gradients,
    build,
    fully_shard,
    ragged_only,
    rows,
    shard_blocks,
    tokens,
)
from ragged_fsdp import Rows
from rank_pool import DEVICE, spmd

_LAUNCHES = ["by each", "together"] if DEVICE == "cpu" else ["together"]


def _step(model, reference, rank, step=0, make=tokens):
    loss, expected = model(make(rank, step)), reference(make(rank, step))
    assert torch.equal(loss, expected)
    loss.sum().backward()
    expected.sum().backward()
    average_gradients(reference)


def _freeze(module, *names):
    for name in names:
        module.get_parameter(name).requires_grad_(False)


@spmd(1, 3)
def test_frozen_and_trainable_in_one_group(rank):
    model, reference = build(Transformer, rank.device)
    for module in (model, reference):
        _freeze(module, "embed.weight", "layers.0.attention.qkv.weight", "layers.1.mlp.up.bias")
    shard_blocks(model)
    _step(model, reference, rank)
    assert_same(model, reference, tolerance=1e-6, grads=True)
    assert not model.embed.weight.requires_grad


@spmd(2)
def test_a_group_that_is_all_frozen_reduces_nothing(rank):
    model, reference = build(Transformer, rank.device)
    for module in (model, reference):
        module.layers[0].requires_grad_(False)
        module.embed.requires_grad_(False)
    shard_blocks(model)
    loss = model(tokens(rank, 0))
    reference(tokens(rank, 0)).backward()
    average_gradients(reference)
    _, seen = count(loss.backward)
    assert seen["reduce_scatter"] == 2  # the second layer and the root
    assert_same(model, reference, grads=True)


@ragged_only
@spmd(2, 4)
def test_all_dtypes_are_gathered_at_once_and_frozen_gradients_have_no_place(rank):
    """The gather carries every dtype; only trainable elements travel in the reduction."""

    def make():
        net = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 8))
        net[:2].requires_grad_(False)
        net.codes = nn.Parameter(torch.arange(77, dtype=torch.int8), requires_grad=False)
        return net

    model, reference = build(make, rank.device)
    fully_shard(model, orig_param_policy=lambda name, p: Rows(4) if p.shape == (40, 40) else None)
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append(module.codes.clone()))
    with noted() as notes:
        model(rows(rank, 0, dim=40)).sum().backward()
    reference(rows(rank, 0, dim=40)).sum().backward()
    average_gradients(reference)
    assert torch.equal(seen[0], reference.codes)
    assert_same(model, reference, tolerance=1e-6, grads=True)
    assert notes.counts() == {"gather": 2, "reduce_scatter": 1}  # a buffer each for frozen and trainable
    most = torch.tensor(sum(p.to_local().numel() for p in model.parameters() if p.requires_grad))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)  # the shards are of one size
    (reduced,) = notes.of("reduce_scatter")
    assert most <= reduced.written.numel() < most + 128
    shard = model[0].weight.to_local()
    assert shard.shape[1:] == (40,) and shard.shape[0] % 4 == 0


class _Adapted(nn.Module):
    """Two frozen layers, each with a low-rank adapter; one adapter is small beside a rank's part."""

    def __init__(self, base: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = nn.ParameterList(nn.Parameter(torch.randn(96, 96).to(base) / 10) for _ in range(2))
        self.base.requires_grad_(False)
        self.down = nn.ParameterList(nn.Parameter(torch.randn(96, 8) / 10) for _ in range(2))
        self.up = nn.ParameterList(nn.Parameter(torch.randn(8, 96) / 10) for _ in range(2))

    def forward(self, x):
        for base, down, up in zip(self.base, self.down, self.up):
            x = torch.tanh(x @ base.float() + x @ down @ up)
        return x


def _adapted_rows(rank, step):
    return rows(rank, step, dim=96)


@contextmanager
def _launched(how: str) -> Iterator[list]:
    """The two buffers of a layer are gathered so; gives a list of the launches that were one for both."""
    with pytest.MonkeyPatch.context() as patch:
        yield fsdp_inside.join_gathers(patch) if how == "together" and DEVICE == "cpu" else []


def _trainable_here(model):
    return sum(p.to_local().numel() for p in model.parameters() if p.requires_grad)


@ragged_only
@pytest.mark.parametrize("how", _LAUNCHES)
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@spmd(2, 3, 4)
def test_trainable_parameters_beside_a_frozen_base_are_even(rank, base, how):
    """In one run of the buffer they would lie on one or two ranks, with gradients and optimizer state."""
    with _launched(how) as launches:
        model = nn.Sequential(_Adapted(base), _Adapted(base))
        model, reference = build(lambda: model, rank.device)
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        even = sum(p.numel() for p in model.parameters() if p.requires_grad) / rank.world_size
        assert abs(_trainable_here(model) - even) <= 0.05 * even
        for step in range(3):
            loss = model(_adapted_rows(rank, step)).square().sum()
            reference(_adapted_rows(rank, step)).square().sum().backward()
            average_gradients(reference)
            with noted() as notes:
                loss.backward()
            reduced = [call.written.numel() for call in notes.of("reduce_scatter")]
            assert len(reduced) == 2 and sum(reduced) <= 1.05 * even
            assert_same(model, reference, tolerance=1e-5, grads=True)
            model.zero_grad()
            reference.zero_grad()
        launches.clear()
        _, seen = count(lambda: model(_adapted_rows(rank, 3)))
    if DEVICE == "cpu":
        assert seen == {"gather": 4} and len(launches) == (2 if how == "together" else 0)
    else:
        assert seen == {"allgather_into_tensor_coalesced_": 2}  # one for each layer, of both its buffers


@ragged_only
@spmd(2)
def test_what_was_frozen_when_it_was_planned_can_train_later(rank):
    model, reference = build(lambda: nn.Sequential(_Adapted(), _Adapted()), rank.device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for step, trains in enumerate([False, True, False]):
        for module in (model, reference):
            module[0].base.requires_grad_(trains)
            module.zero_grad()
        _step(model, reference, rank, step, make=_adapted_rows)
        assert_same(model, reference, tolerance=1e-5, grads=True)


@ragged_only
@pytest.mark.parametrize("how", _LAUNCHES)
@spmd(2)
def test_two_buffers_with_what_users_set(rank, how):
    """A gather of the user's, manual gathers, a smaller mesh, a forward that fails: each buffer follows."""
    with _launched(how):
        _with_what_users_set(rank)


def _with_what_users_set(rank):
    def make():
        return nn.Sequential(_Adapted(), _Adapted(), _Adapted())

    class Gather:
        calls = 0

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            Gather.calls += 1
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    model, reference = build(make, rank.device)
    fully_shard(model[0])
    fully_shard(model[1], reshard_after_forward=1)
    fully_shard(model[2], reshard_after_forward=False)
    fully_shard(model)
    model[2].set_custom_all_gather(Gather())
    model[0].unshard()
    assert model[0].base[0].shape == model[0].base[0].data.shape and model[0].down[0].shape == (96, 8)
    model[0].reshard()
    model[0].unshard(async_op=True).wait()
    model[0].reshard()

    def fails(*_):
        raise KeyError("on purpose")

    handle = model[1].register_forward_pre_hook(fails)
    for step in range(4):
        if step == 2:
            handle = model[1].register_forward_pre_hook(fails)  # what was gathered ahead is dropped
        if step in (0, 2):
            with pytest.raises(KeyError):
                model(_adapted_rows(rank, step))
            handle.remove()
        with torch.no_grad():
            for module in (model, reference):
                for p in module.parameters():
                    p.add_(0.01)
        _step(model, reference, rank, step, make=_adapted_rows)
        assert_same(model, reference, tolerance=1e-5, grads=True)
        model.zero_grad()
        reference.zero_grad()
    assert Gather.calls >= 8


@ragged_only
@spmd(4)
def test_two_buffers_over_replicas_offloaded_and_exchanged(rank):
    for options in (
        {"mesh": rank.mesh(2, 2, names=("replicate", "shard"))},
        {"reduction": "all_to_all", "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
        {"offload_policy": CPUOffloadPolicy()},
    ):
        model, reference = build(lambda: nn.Sequential(_Adapted(), _Adapted()), rank.device)
        for layer in model:
            fully_shard(layer, **options)
            assert len(fully_shard.state(layer).groups) == 2
        fully_shard(model, **options)
        for step in range(2):
            _step(model, reference, rank, step, make=_adapted_rows)
            assert_same(model, reference, tolerance=1e-5, grads=True)
            model.zero_grad()
            reference.zero_grad()


@ragged_only
@pytest.mark.parametrize("how", _LAUNCHES)
@spmd(2)
def test_both_buffers_of_a_prefetch_that_nobody_used_are_dropped(rank, how):
    """Else the next forward would compute with weights from before the optimizer step."""
    with _launched(how):
        _drop_a_prefetch(rank)


def _drop_a_prefetch(rank):
    model, reference = build(lambda: nn.Sequential(_Adapted(), _Adapted()), rank.device)
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model)
    _step(model, reference, rank, 0, make=_adapted_rows)
    handle = model[0].register_forward_hook(lambda *_: 1 / 0)  # the next layer is being gathered by then
    with pytest.raises(ZeroDivisionError):
        model(_adapted_rows(rank, 1))
    handle.remove()
    with torch.no_grad():
        for module in (model, reference):
            for p in module.parameters():
                p.add_(0.01)
    _step(model, reference, rank, 2, make=_adapted_rows)


@spmd(2)
def test_requires_grad_changes_between_steps(rank):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    for step, frozen in enumerate([False, True, False]):
        for module in (model, reference):
            module.layers[1].mlp.requires_grad_(not frozen)
            module.zero_grad()
        _step(model, reference, rank, step)
        assert_same(model, reference, grads=True)


class _TwoDtypes(nn.Module):
    """A base and an adapter, of which one trains at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(DIM, DIM).to(torch.bfloat16))
        self.adapter = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x):
        return x @ self.base.float() + x @ self.adapter


@ragged_only
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_to_all"])
@spmd(1, 2)
def test_gradients_have_the_dtype_of_what_trains_now(rank, reduction, unused):
    """Frozen when it first ran, or beside parameters of another dtype that trained then."""
    _train_now_this_now_that(rank, reduction, unused)


@ragged_only
@spmd(4)
def test_gradients_over_two_levels_have_the_dtype_of_what_trains_now(rank):
    _train_now_this_now_that(rank, "two_level", unused=True)


def _train_now_this_now_that(rank, reduction, unused):
    model, reference = build(_TwoDtypes, rank.device)
    model.requires_grad_(False)
    fully_shard(model, reduction=reduction, ranks_per_node=2)
    model.set_reduce_scatter_unused_params(unused)
    model(rows(rank, 0))
    for step, name in enumerate(("base", "adapter", "base")):
        for module in (model, reference):
            for own, parameter in module.named_parameters():
                parameter.requires_grad_(own == name)
                parameter.grad = None
        x = rows(rank, step)
        model(x).square().sum().backward()
        reference(x).square().sum().backward()
        average_gradients(reference)
        assert model.get_parameter(name).grad.dtype == reference.get_parameter(name).dtype
        assert_same(model, reference, tolerance=1e-2 if name == "base" else 1e-6, grads=True)


@spmd(2)
def test_requires_grad_changes_between_forward_and_backward(rank):
    """As for any parameter: what is frozen when its gradient comes gets none."""
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    for step in range(2):
        for module in (model, reference):
            module.requires_grad_(True)
            loss = module(tokens(rank, step))
            module.layers[step].mlp.requires_grad_(False)
            loss.sum().backward()
        average_gradients(reference)
        assert_same(model, reference, grads=True)
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_to_all"])
@spmd(2)
def test_requires_grad_changes_within_an_accumulation(rank, reduction):
    """The gradients are laid out already: one without a place must not be lost without a word."""
    model, reference = build(Transformer, rank.device)
    shard_blocks(model, reduction=reduction)
    changed = model.layers[1].mlp.requires_grad_(False)
    model.set_requires_gradient_sync(False)
    model(tokens(rank, 0)).sum().backward()
    changed.requires_grad_(True)
    model.set_requires_gradient_sync(True)
    with pytest.raises(RuntimeError, match=r"layers.1.mlp.*requires_grad was changed"):
        model(tokens(rank, 1)).sum().backward()
    model.reset_iter_state()
    model.zero_grad()
    _step(model, reference, rank, 2)
    assert_same(model, reference, tolerance=1e-6, grads=True)


@pytest.mark.parametrize("reshard", [None, pytest.param(2, marks=ragged_only)])
@pytest.mark.parametrize("held", [False, True])
@spmd(4)
def test_requires_grad_changes_while_the_root_is_unsharded(rank, held, reshard):
    """An evaluation leaves the root gathered, and layers on larger shards if asked for: ``requires_grad_``
    then reaches one of their forms only."""
    model, reference = build(Transformer, rank.device)
    shard_blocks(model, reshard_after_forward=reshard)
    parameters = list(model.parameters())
    for trains in (False, True, False):
        with torch.no_grad():
            model(tokens(rank, 0))
        for parameter in parameters if held else model.parameters():
            parameter.requires_grad_(trains)
        reference.requires_grad_(trains)
        loss, expected = model(tokens(rank, 1)), reference(tokens(rank, 1))
        assert loss.requires_grad == trains
        if trains:
            loss.backward()
            expected.backward()
            average_gradients(reference)
        for module in (model, *model.layers):
            module.reshard()
        assert [p.requires_grad for p in model.parameters()] == [trains] * len(parameters)
        assert_same(model, reference, grads=True, tolerance=1e-6)


@pytest.mark.parametrize("blocks", [True, False])
@spmd(1, 2, 3)
def test_tied_embedding_and_head(rank, blocks):
    model, reference = build(lambda: Transformer(tied=True), rank.device)
    shard_blocks(model) if blocks else fully_shard(model)
    assert model.head.weight is model.embed.weight
    for step in range(2):
        _step(model, reference, rank, step)
        model.zero_grad() if step == 0 else None
        reference.zero_grad() if step == 0 else None
    assert model.head.weight is model.embed.weight
    assert_same(model, reference, tolerance=1e-6, grads=True)


@spmd(2)
def test_tying_across_groups_is_refused(rank):
    model, _ = build(lambda: Transformer(tied=True), rank.device)
    fully_shard(model.head)
    fully_shard(model)
    with pytest.raises(ValueError, match="already managed by another"):
        model(tokens(rank, 0))


@spmd(2)
def test_tying_after_sharding_is_refused(rank):
    """Each parameter is cut where its group's plan says: one tensor cannot be two of them."""
    model, reference = build(lambda: Transformer(tied=False), rank.device)
    shard_blocks(model)
    first, second = model.layers[0].attention, model.layers[1].attention
    for taker, giver in ((model.head, model.embed), (second.out, first.out)):
        own, taker.weight = taker.weight, giver.weight
        with pytest.raises(ValueError, match="tie parameters before fully_shard"):
            model(tokens(rank, 0))
        taker.weight = own
    _step(model, reference, rank, 0)
    assert_same(model, reference, grads=True)


class _Partly(nn.Module):
    """Uses only the module that is named in the call."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({"a": FeedForward(), "b": FeedForward()})
        self.spare = nn.Parameter(torch.ones(DIM))

    def forward(self, x, which="a"):
        return self.branches[which](x)


@pytest.mark.parametrize("nested", [True, False])
@spmd(2)
def test_unused_parameters_have_no_gradient(rank, nested):
    model, reference = build(_Partly, rank.device)
    if nested:
        for branch in model.branches.values():
            fully_shard(branch)
    fully_shard(model)
    _step(model, reference, rank, make=rows)
    assert_same(model, reference, grads=True)
    assert model.spare.grad is None
    model.zero_grad()
    reference.zero_grad()
    model(rows(rank, 1), "b").sum().backward()  # what was unused before is used now
    reference(rows(rank, 1), "b").sum().backward()
    average_gradients(reference)
    assert_same(model, reference, grads=True)


@spmd(2)
def test_zero_gradients_for_unused_parameters_on_request(rank):
    """Ranks that use different parameters reduce together once this is set."""
    model, reference = build(_Partly, rank.device)
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    which = "ab"[rank.rank % 2]
    model(rows(rank, 0), which).sum().backward()
    reference(rows(rank, 0), which).sum().backward()
    for parameter in reference.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    average_gradients(reference)
    assert_same(model, reference, grads=True)


@spmd(2)
def test_an_unused_output_does_not_hang(rank):
    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = FeedForward(), FeedForward()

        def forward(self, x):
            return self.left(x), self.right(x)

    model, reference = build(TwoOutputs, rank.device)
    fully_shard(model.left)
    fully_shard(model.right)
    fully_shard(model)
    model(rows(rank, 0))[0].sum().backward()
    reference(rows(rank, 0))[0].sum().backward()
    average_gradients(reference)
    assert_same(model, reference, grads=True)


@spmd(2)
def test_integer_parameters_are_gathered_untouched(rank):
    class WithCodes(FeedForward):
        def __init__(self) -> None:
            super().__init__()
            codes = torch.arange(7, dtype=torch.uint8)
            self.codes = nn.Parameter(codes, requires_grad=False)

        def forward(self, x):
            assert torch.equal(self.codes.cpu(), torch.arange(7, dtype=torch.uint8))
            return super().forward(x)

    model, reference = build(WithCodes, rank.device)
    fully_shard(model)
    _step(model, reference, rank, make=rows)
    assert_same(model, reference, grads=True)


class _Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes = FeedForward(), FeedForward()

    def forward(self, x, both=True):
        x = self.always(x)
        return self.sometimes(x) if both else x


@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_to_all"])
@spmd(2)
def test_zero_gradients_of_what_was_unfrozen(rank, reduction):
    """A module that does not run has not seen the change: its gradients must be zeros, not old memory."""
    model, _ = build(_Optional, rank.device)
    model.sometimes.up.bias.requires_grad_(False)
    for module in (model.always, model.sometimes, model):
        fully_shard(module, reduction=reduction)
    model.set_reduce_scatter_unused_params(True)
    model(rows(rank, 0)).sum().backward()
    frozen = model.sometimes.up.bias
    assert frozen.grad is None
    model.zero_grad()
    frozen.requires_grad_(True)
    for both in (False, True):
        model(rows(rank, 1), both).sum().backward()
        assert bool(frozen.grad.full_tensor().any()) is both
    model.zero_grad()
    frozen.requires_grad_(False)
    model.set_requires_gradient_sync(False)
    model(rows(rank, 2)).sum().backward()
    frozen.requires_grad_(True)
    model.set_requires_gradient_sync(True)
    with pytest.raises(RuntimeError, match=r"sometimes.up.bias: requires_grad was changed"):
        model(rows(rank, 3), False).sum().backward()


@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_to_all"])
@spmd(2)
def test_a_group_that_was_frozen_and_gathered_by_hand_trains_again(rank, reduction):
    """Where nothing trains there is no dtype of gradients; the one before must not be taken for it."""
    model, reference = build(lambda: FeedForward().double(), rank.device)
    fully_shard(model, reduction=reduction)
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        _step(model, reference, rank, step, make=lambda *args: rows(*args).double())
        assert_same(model, reference, tolerance=1e-12, grads=True)
        model.requires_grad_(False)
        for _ in range(2):  # the first sees the change, the second prepares with it
            model.unshard()
            model.reshard()
        model.requires_grad_(True)
