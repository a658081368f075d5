"""Modules that not every rank runs: nobody hangs, and gradients are those of a run with zero weight."""

from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from collective_calls import count
from fsdp_cases import DIM, FeedForward, assert_same, average_gradients, build, is_sharded, rows
from ragged_fsdp import fully_shard
from ragged_fsdp.experts.again import cut_again
from rank_pool import spmd

CHECKPOINTS = {
    "no": lambda module, x: module(x),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "other": partial(checkpoint, use_reentrant=False),
}


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.scale * x


class _Model(nn.Module):
    """Two layers, and two towers between them for the ranks that have something for them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForward() for _ in range(3))
        self.images, self.sounds = _Tower(), _Tower()

    def forward(self, x, towers="", how="no", dummy=False):
        """``towers`` are run in this order; with ``dummy`` the others are run with weight 0."""
        x = self.layers[0](x)
        added = torch.zeros_like(x)
        for kind in towers:
            tower = {"i": self.images, "s": self.sounds}[kind]
            added = added + CHECKPOINTS[how](tower, torch.sin(x))
        if dummy:
            for kind, tower in (("i", self.images), ("s", self.sounds)):
                if kind not in towers:
                    added = added + 0 * tower(torch.sin(x))
        for layer in self.layers[1:]:
            x = x + layer(x + added)
        return x.square().mean()


def _shard(model, nested, **options):
    for layer in model.layers:
        fully_shard(layer, **options)
    for tower in (model.images, model.sounds):
        if nested:
            for block in tower.blocks:
                fully_shard(block, **options)
        fully_shard(tower, conditional=True, **options)
    return fully_shard(model, **options)


WHO = [  # what each rank runs in a step; ranks beyond the list take from its start
    ["", ""],
    ["i", ""],
    ["", "is"],
    ["is", "si"],
    ["ii", "i"],
    ["", ""],
    ["s", "i"],
]


def _mine(step, rank):
    return WHO[step][rank.rank % len(WHO[step])]


def _assert_gradients(model, reference, step, tolerance=1e-6):
    """None where nobody ran; else the mean over ranks, zeros counted."""
    ran = "".join(WHO[step])
    for kind, name in (("i", "images"), ("s", "sounds")):
        for parameter in getattr(model, name).parameters():
            assert (parameter.grad is not None) == (kind in ran), (step, name)
        if kind not in ran:
            for parameter in getattr(reference, name).parameters():
                parameter.grad = None
    assert_same(model, reference, tolerance=tolerance, grads=True)


@pytest.mark.parametrize("nested", [False, True])
@spmd(1, 3)
def test_gradients_are_those_of_a_run_with_weight_zero(rank, nested):
    for how in CHECKPOINTS if rank.world_size > 1 else ["no"]:
        _train_with_towers(rank, nested, how)


def _train_with_towers(rank, nested, how):
    model, reference = build(_Model, rank.device)
    _shard(model, nested)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(len(WHO)):
        x, mine = rows(rank, step), _mine(step, rank)
        with torch.no_grad():  # an evaluation in which other ranks see images
            other = "i" if rank.rank == step % 3 else ""
            torch.testing.assert_close(model(x, other), reference(x, other))
        loss, expected = model(x, mine, how=how), reference(x, mine, dummy=True)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        average_gradients(reference)
        if rank.world_size > 1:
            _assert_gradients(model, reference, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@spmd(4)
def test_over_replicas_exchanged_offloaded_and_in_bf16(rank):
    for options, tolerance in (
        ({"mesh": rank.mesh(2, 2, names=("replicate", "shard"))}, 1e-6),
        ({"reduction": "all_to_all"}, 1e-6),
        ({"offload_policy": CPUOffloadPolicy()}, 1e-6),
        ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, 5e-2),
    ):
        model, reference = build(_Model, rank.device)
        _shard(model, True, **options)
        for step in range(len(WHO)):
            x, mine = rows(rank, step), _mine(step, rank)
            model(x, mine).backward()
            reference(x, mine, dummy=True).backward()
            average_gradients(reference)
            _assert_gradients(model, reference, step, tolerance)
            model.zero_grad()
            reference.zero_grad()


@spmd(2)
def test_gradients_of_one_rank_wait_for_a_backward_that_synchronises(rank):
    model, reference = build(_Model, rank.device)
    _shard(model, True)
    for step, kinds in enumerate([["i", ""], ["", "s"], ["", ""]]):
        x, mine = rows(rank, step), kinds[rank.rank]
        model.set_requires_gradient_sync(step == 2)
        model(x, mine).backward()
        reference(x, mine, dummy=True).backward()
    average_gradients(reference)
    assert_same(model, reference, tolerance=1e-6, grads=True)


@spmd(2)
def test_several_forwards_before_a_backward(rank):
    """What one forward has gathered for its backward is there after others, with another rank's images."""
    model, reference = build(_Model, rank.device)
    _shard(model, False)
    for m in (model, reference):
        losses = [
            m(rows(rank, step), kinds[rank.rank], dummy=m is reference)
            for step, kinds in enumerate([("i", ""), ("", "i")])
        ]
        if m is model:
            m.set_is_last_backward(False)
        losses[0].backward()
        if m is model:
            m.set_is_last_backward(True)
        losses[1].backward()
    average_gradients(reference)
    for parameter in reference.sounds.parameters():
        parameter.grad = None
    assert_same(model, reference, tolerance=1e-6, grads=True)


@spmd(2)
def test_a_loss_that_does_not_depend_on_it_and_a_frozen_one(rank):
    """No backward reaches a tower: there are no gradients, and nothing stays gathered."""
    model, _ = build(_Model, rank.device)
    model.images.requires_grad_(False)
    _shard(model, True)
    for step in range(2):
        if rank.rank == 0 and step == 0:
            model.sounds.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
        x = rows(rank, step)
        loss = model(x, "is" if rank.rank == 0 else "")
        loss.backward()
        assert is_sharded(model.images.parameters()) and is_sharded(model.sounds.parameters())
        for tower in (model.images, model.sounds):
            assert all(p.grad is None for p in tower.parameters())
        model.zero_grad()


class _Again(FeedForward):
    """Computed again in backward, with its hooks."""

    def __call__(self, x):
        return checkpoint(super().__call__, x, use_reentrant=False)


class _Frozen(_Model):
    """The first layers are frozen, or all of them."""

    def __init__(self, count: int, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))
        for each in self.layers[:count]:
            each.requires_grad_(False)


@pytest.mark.parametrize("layer", [FeedForward, _Again])
@spmd(2)
def test_frozen_layers_behind_a_tower(rank, layer):
    """On ranks without a run nothing in front of them trains: their backward comes past them all the same.

    Else it could not start, or reduce what trains behind them in another order than the other ranks.
    """
    for frozen in (3, 2, 1):
        model, reference = build(partial(_Frozen, frozen, layer), rank.device)
        _shard(model, True)
        for step in (1, 2, 6, 0):  # at last with no tower
            x, mine = rows(rank, step), _mine(step, rank)
            loss = model(x, mine)
            torch.testing.assert_close(loss, reference(x, mine))
            loss.backward()
            reference(x, mine, dummy=True).backward()
            average_gradients(reference)
            _assert_gradients(model, reference, step)
            model.zero_grad()
            reference.zero_grad()


class _Parts(_Tower):
    """A tower that has more than anybody runs: a parameter, a block, and one that one rank runs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(DIM))
        self.never, self.sometimes = FeedForward(), FeedForward()
        self.runs_all = False

    def forward(self, x):
        x = super().forward(x)
        return x + self.sometimes(x) if self.runs_all else x


@spmd(3)
def test_what_no_rank_uses_of_it_has_no_gradient(rank):
    """Not zeros, with which an optimizer would decay it; what one rank uses has one on all."""

    class Model(_Model):
        def __init__(self):
            super().__init__()
            self.images = _Parts()

    for reduction in ("reduce_scatter", "all_to_all"):
        model, reference = build(Model, rank.device)
        for block in (model.images.never, model.images.sometimes):
            fully_shard(block, reduction=reduction)
        _shard(model, True, reduction=reduction)
        for step in range(4):
            for m in (model, reference):
                m.images.runs_all = rank.rank == step
                m(rows(rank, step), "i" * (rank.rank <= step), dummy=m is reference).backward()
            if step < 3:
                for block in (*reference.images.sometimes.parameters(),):  # of ranks without a run: zeros
                    block.grad = torch.zeros_like(block) if block.grad is None else block.grad
            average_gradients(reference)
            for parameter in reference.sounds.parameters():
                parameter.grad = None
            assert_same(model, reference, tolerance=1e-6, grads=True)
            assert model.images.spare.grad is None and model.images.never.up.weight.grad is None
            assert (model.images.sometimes.up.weight.grad is None) == (step == 3)
            model.zero_grad()
            reference.zero_grad()


@spmd(2)
def test_ranks_pay_one_vote_and_gather_nothing_that_nobody_runs(rank):
    model, _ = build(_Model, rank.device)
    _shard(model, False)
    model(rows(rank, 0), "is").backward()
    model(rows(rank, 0), "").backward()
    _, without = count(lambda: model(rows(rank, 0), ""))
    _, with_both = count(lambda: model(rows(rank, 0), "is" if rank.rank == 0 else ""))
    assert without == {"gather": without["gather"], "all_reduce": 1}
    assert with_both == {"gather": without["gather"] + 2, "all_reduce": 2}


@spmd(2)
def test_it_has_one_place_and_the_mesh_of_the_root(rank):
    class Wandering(_Model):
        late = False

        def forward(self, x):
            if not self.late:
                x = self.images(x)
            x = self.layers[0](x)
            if self.late:
                x = self.images(x)
            return x.sum()

    model, _ = build(Wandering, rank.device)
    _shard(model, True)
    model(rows(rank, 0)).backward()
    model.late = True
    with pytest.raises(RuntimeError, match=r"'images'.*after 2 starts.*place is after 1"):
        model(rows(rank, 1))
    model.late = False
    model(rows(rank, 2)).backward()

    with pytest.raises(TypeError, match="conditional must be a bool, got 1"):
        fully_shard(FeedForward(), conditional=1)
    with pytest.raises(ValueError, match="rank 0 has 'conditional=True', rank 1 has 'conditional=False'"):
        fully_shard(FeedForward(), conditional=rank.rank == 0)
    other, _ = build(_Model, rank.device)
    fully_shard(other.images, conditional=True, mesh=rank.mesh(1, 2, names=("replicate", "shard")))
    fully_shard(other)
    with pytest.raises(ValueError, match=r"images.*needs the mesh of the root"):
        other(rows(rank, 0))


@spmd(2)
def test_its_backward_does_not_gather_alone(rank):
    """A second backward finds the weights released: an error that says what to do, no gather of one rank."""
    model, reference = build(_Model, rank.device)
    _shard(model, False)
    loss = model(rows(rank, 0), "i")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"images.*set_is_last_backward\(False\)"):
        loss.backward()
    model.reset_iter_state()
    model.zero_grad()
    model(rows(rank, 1), "i" * rank.rank).backward()
    reference(rows(rank, 1), "i" * rank.rank, dummy=True).backward()
    average_gradients(reference)
    for parameter in reference.sounds.parameters():
        parameter.grad = None
    assert_same(model, reference, tolerance=1e-6, grads=True)


@spmd(2)
def test_a_forward_that_fails_and_one_that_starts_at_the_tower(rank):
    model, reference = build(_Model, rank.device)
    _shard(model, True)
    model.layers[1].register_forward_pre_hook(fails := _Once())
    with pytest.raises(KeyError):
        model(rows(rank, 0), "i" * rank.rank)
    assert fails.done
    x = rows(rank, 1)
    with torch.no_grad():  # all ranks call it, as any module that is the root of its forward
        assert torch.equal(model.images(x), reference.images(x))
    model.images(x).sum().backward()
    reference.images(x).sum().backward()
    average_gradients(reference)
    for name in ("layers", "sounds"):
        for parameter in getattr(reference, name).parameters():
            parameter.grad = None
    assert_same(model.images, reference.images, tolerance=1e-6, grads=True)


@spmd(2)
def test_one_rank_fails_behind_the_towers_and_all_leave_the_batch_out(rank):
    """Gradients of the steps after it are those of all ranks; what it ran has left nothing."""
    model, reference = build(_Model, rank.device)
    _shard(model, True)

    def fails(module, args, output):
        if rank.rank == 0:
            raise KeyError("on purpose")

    for step in range(3):
        x = rows(rank, step)
        hook = model.register_forward_hook(fails)
        with suppress(KeyError):
            model(x, "is"[rank.rank])
        hook.remove()
        mine = "" if step == 1 else "i" * rank.rank
        model(x, mine).backward()
        reference(x, mine, dummy=True).backward()
        average_gradients(reference)
        for tower in (reference.sounds, *([reference.images] if step == 1 else [])):
            for parameter in tower.parameters():
                parameter.grad = None
        assert_same(model, reference, tolerance=1e-6, grads=True)
        model.zero_grad()
        reference.zero_grad()


class _Once:
    done = False

    def __call__(self, *_):
        if not self.done:
            self.done = True
            raise KeyError("on purpose")


@spmd(1, 2)
def test_what_is_cut_again_is_still_voted_on(rank):
    """As experts are that move: their groups are new, and the old ones hold the values of before."""
    model, reference = build(_Model, rank.device)
    _shard(model, nested=False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        if step:
            cut_again(model.images, {})
        x, mine = rows(rank, step), "i" if rank.rank == 0 else ""
        loss, expected = model(x, mine), reference(x, mine, dummy=True)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        average_gradients(reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, reference, tolerance=1e-6)
