"""Gradient buffers: how many there are, when they are allocated, and what reductions wait for."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fsdp_inside
from collective_calls import Call, noted
from fsdp_cases import (
    FeedForward,
    Stack,
    Transformer,
    build,
    ragged_only,
    rows,
    shard_blocks,
    tokens,
    train_both,
)
from ragged_fsdp import BlockCodes, DBuffer, Rows, Whole, fully_shard, share_comm_ctx
from rank_pool import Rank, spmd

pytestmark = ragged_only


class Mixed(nn.Module):
    """Nine blocks of 80 elements and one of 3584 for each rank: together they would pad by most of a rank."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 45), nn.Linear(56, 64 * ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.pad(self.first(x).tanh(), (0, 11)))


def policy(name: str, param: nn.Parameter) -> Rows | None:
    return {"first.weight": Rows(5), "second.weight": Rows(64)}.get(name)


def _buffers(module: nn.Module) -> list[DBuffer]:
    return list({id(found[0]): found[0] for p in module.parameters() if (found := DBuffer.of(p))}.values())


def _padding(module: nn.Module) -> int:
    return sum(buffer.layout.padding_numel for buffer in _buffers(module))


@spmd(1, 3, 4)
def test_split_groups_pad_less_and_train_alike(rank: Rank) -> None:
    ranks = rank.world_size

    def make() -> nn.Sequential:
        return nn.Sequential(Mixed(ranks), nn.Linear(64 * ranks, 16), Mixed(ranks))

    net, reference = build(make, rank.device)
    single, _ = build(make, rank.device)
    fully_shard(single[0], mesh=rank.mesh(), orig_param_policy=policy)
    for index in (0, 2):
        fully_shard(net[index], mesh=rank.mesh(), orig_param_policy=policy, max_buffers=3)
    fully_shard(net, mesh=rank.mesh())
    split = len(_buffers(net[0]))
    assert len(_buffers(single[0])) == 1
    if ranks > 2:
        assert split > 1 and _padding(net[0]) < _padding(single[0])
    else:
        assert split == 1
    for name, block in (("first", 5 * 16), ("second", 64 * 56)):
        assert getattr(net[0], name).weight.to_local().numel() % block == 0

    def batches(rank: Rank, step: int) -> torch.Tensor:
        return rows(rank, step, dim=16)

    train_both(net, reference, rank, steps=3, tolerance=1e-5, batches=batches)
    with torch.autograd.profiler.profile() as profile, torch.no_grad():
        net(batches(rank, 0))
    names = {event.name for event in profile.function_events if event.name.startswith("FSDP::all_gather")}
    parts = {f"FSDP::all_gather ({i} ({part} of {split}))" for i in (0, 2) for part in range(1, split + 1)}
    if ranks > 1:
        assert parts < names and len(names) == len(parts) + 1, names  # and the root's
    net[0].set_custom_reduce_scatter(None)  # all groups have one mesh
    with pytest.raises(ValueError, match="max_buffers must be an int >= 1, got 0"):
        fully_shard(nn.Linear(2, 2), max_buffers=0)


def codes(name: str, param: nn.Parameter) -> BlockCodes | None:
    return BlockCodes("int8", tuple(param.shape)) if param.ndim == 2 else None


@spmd(3)
@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_to_all"])
def test_a_small_group_does_not_wait_for_the_reduction_of_its_module(rank: Rank, reduction: str) -> None:
    """Norms and biases are the first group of a layer and small; its matrices, in codes, are the second."""
    model, _ = build(lambda: Transformer(layers=3), rank.device)
    shard_blocks(model, gather_policy=codes, reduction=reduction)
    left = []

    def look(call: Call) -> None:
        if call.kind == reduction:
            left.append(fsdp_inside.pending_reductions(model))

    for step in range(2):
        left.clear()
        loss = model(tokens(rank, step))
        with noted(look):
            loss.backward()
        # a large one waits for the large one before it; a small one goes on beside the large one of its layer
        large = [[name for name in names if name.endswith("(2 of 2)")] for names in left[:6]]
        assert large == [[], ["layers.2 (2 of 2)"], [], ["layers.1 (2 of 2)"], [], ["layers.0 (2 of 2)"]]
        assert not fsdp_inside.pending_reductions(model)


@spmd(1, 2)
@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_to_all"])
def test_gradient_memory_is_allocated_before_the_step_and_only_if_it_will_be_used(
    rank: Rank, reduction: str
) -> None:
    model, _ = build(lambda: Stack(layers=3), rank.device)
    shard_blocks(model, reduction=reduction)
    kept = []
    model.layers[0].register_forward_pre_hook(
        lambda *_: kept.append(fsdp_inside.gradient_memory_kept(model) > 0)
    )
    x = rows(rank, 0)
    for _ in range(2):
        with torch.no_grad():
            model(x)
        model(x).sum().backward()
    assert kept == [False, True, False, True]
    assert fsdp_inside.gradient_memory_kept(model) and not fsdp_inside.gradient_memory_lent(model)

    accumulating, _ = build(lambda: Stack(layers=3), rank.device)
    shard_blocks(accumulating)
    accumulating.set_requires_gradient_sync(False)
    accumulating(x).sum().backward()  # every group has a buffer of its own until it is reduced
    assert not fsdp_inside.gradient_memory_kept(accumulating)

    alone, _ = build(lambda: nn.Sequential(FeedForward(hidden=20)), rank.device)
    fully_shard(alone[0], gather_policy=lambda name, p: codes(name, p), reduction=reduction)
    fully_shard(alone, reduction=reduction)
    alone(x).sum().backward()  # nobody would take it: a small group does not, the large one is alone
    assert not fsdp_inside.gradient_memory_kept(alone)


def _buffers_in_use(rank: Rank, *limits: tuple[str, int], early: bool) -> tuple[int, int]:
    """With these settings: the buffers that layers reduce from in turn, and the most reductions under way.

    ``early`` sets them before the first forward.
    """
    model, _ = build(lambda: Stack(layers=6), rank.device)
    shard_blocks(model, mesh=rank.mesh())

    def limit() -> None:
        for name, most in limits:
            model.get_submodule(name).set_reduce_scatter_max_input_buffers(most, recurse=False)

    if early:
        limit()
    model(rows(rank, 0)).sum().backward()
    if not early:
        limit()
    return _seen_in_backward(model, rank)


def _seen_in_backward(model: nn.Module, rank: Rank) -> tuple[int, int]:
    """The buffers that six layers reduce from in turn, and the most reductions under way."""
    under_way = []

    def look(call: Call) -> None:
        if call.kind == "reduce_scatter":
            under_way.append(len(fsdp_inside.pending_reductions(model)))

    with noted(look) as notes:
        model(rows(rank, 1)).sum().backward()
    layers = notes.of("reduce_scatter")[:6]
    return len({call.read.data_ptr() for call in layers}), max(under_way)


@spmd(2)
@pytest.mark.parametrize(
    ("last", "early"),
    [("root", True), ("layer", True), ("root", False), ("layer", False)],
)
def test_a_layer_does_not_lower_the_number_of_buffers_of_the_root(rank: Rank, last: str, early: bool) -> None:
    """Below one root the largest number counts, whoever says it last."""
    limits = [("layers.1", 1), ("", 3)] if last == "root" else [("", 3), ("layers.1", 1)]
    assert _buffers_in_use(rank, early=early) == (1, 0)
    assert _buffers_in_use(rank, ("", 3), early=early) == (3, 2)
    assert _buffers_in_use(rank, *limits, early=early) == (3, 2)


@spmd(2)
def test_memory_of_buffers_that_nobody_asks_for_any_more_is_freed(rank: Rank) -> None:
    model = shard_blocks(build(lambda: Stack(layers=6), rank.device)[0])
    kept = []
    for most in (3, 1, 2):
        model.set_reduce_scatter_max_input_buffers(most)
        model(rows(rank, 0)).sum().backward()
        kept.append(len([storage for storage in fsdp_inside.gradient_storages(model) if storage.nbytes()]))
    assert kept == [3, 1, 2]


@spmd(2)
@pytest.mark.parametrize("early", [True, False])
def test_roots_that_share_have_as_many_buffers_as_any_was_given(rank: Rank, early: bool) -> None:
    """Also where they begin to share after the first forward, when each has counted for itself."""
    asking, other = (shard_blocks(build(lambda: Stack(layers=6), rank.device)[0]) for _ in range(2))
    asking.set_reduce_scatter_max_input_buffers(3)
    if early:
        share_comm_ctx([other, asking])
    for model in (asking, other):
        model(rows(rank, 0)).sum().backward()
    if not early:
        assert _seen_in_backward(other, rank) == (1, 0)
        share_comm_ctx([other, asking])
    assert _seen_in_backward(other, rank) == (3, 2)


@spmd(2)
@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_to_all"])
def test_memory_that_was_kept_goes_when_another_root_s_is_shared(rank: Rank, reduction: str) -> None:
    """After its first step a root has memory of its own, which its groups remember and nobody would free."""
    models = [build(lambda: Stack(layers=3), rank.device)[0] for _ in range(2)]
    for model in models:
        shard_blocks(model, reduction=reduction)
        model(rows(rank, 0)).sum().backward()
    kept = fsdp_inside.gradient_storages(models[1])
    assert all(storage.nbytes() for storage in kept)
    share_comm_ctx(models)
    models[1](rows(rank, 0)).sum().backward()
    assert not any(storage.nbytes() for storage in kept)


class _LargeAndSmall(nn.Module):
    """A large tensor that lies on one rank, and a small one of another group: it is gathered as codes."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(12, 12, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(self.large(x)[:, :4])


@spmd(2)
def test_ranks_agree_on_what_a_reduction_waits_for(rank: Rank) -> None:
    """Also where only one of them receives anything of the large group."""
    with pytest.MonkeyPatch.context() as patch:
        fsdp_inside.exchange_in_rounds(patch, rounds=1)
        model, _ = build(_LargeAndSmall, rank.device)
        fully_shard(
            model,
            reduction="all_to_all",
            orig_param_policy=lambda name, p: Whole(),
            gather_policy=lambda name, p: BlockCodes("int8", (4, 4)) if "small" in name else None,
        )
        model(rows(rank, 0)).sum().backward()
    said: list[list[bool]] = [[], []]
    dist.all_gather_object(said, fsdp_inside.companions(model))
    assert sorted(said[0]) == [False, True] and said[0] == said[1]
