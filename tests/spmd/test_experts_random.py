"""Dispatchers under random layers, splits and tokens, against a plain computation of all experts."""

import random
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from ragged_fsdp.experts import (
    AllGather,
    AllToAll,
    ExpertSplit,
    SharedTokens,
    SlicedTokens,
    SplitExperts,
    TwoLevel,
    grouped_linear,
    held_part,
    load_of,
    permute,
    spread,
)
from ragged_fsdp.topology import Levels
from rank_pool import DEVICE, spmd

SEEDS = 5


class Bent(nn.Module):
    """Experts with a bias, and a parameter that all of them share."""

    def __init__(self, experts, channels, hidden, generator, dtype):
        super().__init__()
        self.num_experts = experts

        def random_(*shape):
            return nn.Parameter((torch.randn(shape, generator=generator) / 2).to(DEVICE, dtype))

        self.up, self.bias = random_(experts, channels, hidden), random_(experts, hidden)
        self.down = random_(experts, channels, hidden)
        self.scale = random_()

    def forward(self, tokens, chosen, weights):
        raise AssertionError("replaced")

    def apply_to_groups(self, rows, counts):
        hidden = grouped_linear(rows, held_part(self.up), counts, held_part(self.bias)).tanh()
        return grouped_linear(hidden, held_part(self.down), counts, transposed=True) * self.scale


def by_all(module, tokens, chosen, weights, kept):
    """What one process computes: every expert of every token, of which the chosen ones count."""
    hidden = (torch.einsum("nd,edh->neh", tokens, module.up) + module.bias).tanh()
    outputs = torch.einsum("neh,edh->ned", hidden, module.down) * module.scale
    picked = outputs[torch.arange(len(tokens), device=DEVICE).unsqueeze(1), chosen]
    return (picked * (weights * kept).unsqueeze(-1)).sum(1)


class Case:
    """A random layer and the tokens of every rank; the same on all of them."""

    def __init__(self, seed, world):
        pick = self.pick = random.Random(f"{seed} {world}")
        self.experts = pick.choice([1, 2, 3, 5, 7])
        self.per_token = min(self.experts, pick.choice([1, 2, 3, self.experts]))
        self.channels, self.hidden = pick.choice([1, 3, 8]), pick.choice([1, 4])
        cuts = sorted(pick.randrange(self.experts + 1) for _ in range(world - 1))
        uneven = tuple(b - a for a, b in zip((0, *cuts), (*cuts, self.experts)))
        self.split = ExpertSplit(uneven) if pick.random() < 0.7 else ExpertSplit.even(self.experts, world)
        self.alike = pick.random() < 0.4
        most = pick.choice([1, 4, 9])
        self.counts = [pick.randrange(most + 1) for _ in range(world)]
        if self.alike:
            self.counts = [self.counts[0]] * world
        self.route = pick.choice(["any", "any", "one", "twice", "few"])
        self.seed, self.parts = seed, pick.choice([2, 3, 8])

    def module(self, dtype=torch.float64):
        generator = torch.Generator().manual_seed(self.seed)
        return Bent(self.experts, self.channels, self.hidden, generator, dtype)

    def inputs(self, rank, dtype=torch.float64):
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        n, k = self.counts[rank], self.per_token
        x = torch.randn(n, self.channels, generator=generator).to(DEVICE, dtype).requires_grad_()
        w = torch.randn(n, k, generator=generator).to(DEVICE, dtype).requires_grad_()
        chosen = torch.rand(n, self.experts, generator=generator).argsort(1)[:, :k]
        if self.route == "one":
            chosen = torch.full_like(chosen, self.experts - 1)
        elif self.route == "twice":  # routers do not, but nothing forbids it
            chosen = torch.randint(self.experts, (n, k), generator=generator)
        elif self.route == "few":
            chosen = chosen % max(1, self.experts // 2)
        return x, chosen.to(DEVICE), w

    def dispatchers(self, mesh):
        """Each way that this layer can go, by name."""
        split, world = self.split, self.split.ranks
        yield "all_to_all", lambda: AllToAll(mesh, split)
        yield "in parts", lambda: AllToAll(mesh, split, parts=self.parts)
        yield "at once", lambda: AllToAll(mesh, split, parts=1)
        yield "all_gather", lambda: AllGather(mesh, split)
        if self.alike:
            capacity = self.pick.choice([0.1, 0.6, 1.0, float(world)])
            yield f"capacity {capacity}", lambda: AllToAll(mesh, split, capacity=capacity)
            parts = {"capacity": capacity, "parts": self.parts}
            yield f"capacity {capacity} in parts", lambda: AllToAll(mesh, split, **parts)
            yield "shared", lambda: SharedTokens(mesh, split)
            yield "sliced", lambda: SlicedTokens(AllToAll(mesh, split), mesh)
        for levels in (Levels(((0, 1), (2, 3)), 2), Levels(((0, 2), (1, 3)), 2)) if world == 4 else ():
            if all(sum(split.held[rank] for rank in node) for node in levels.nodes):
                yield "two_level", lambda levels=levels: TwoLevel(mesh, split, levels)
                if self.alike:
                    yield (
                        "two_level, capacity for all",
                        lambda levels=levels: TwoLevel(mesh, split, levels, capacity=8.0),
                    )


def kept_of(case, chosen, name, world):
    """Which slots fit: of those for a rank the first."""
    kept = torch.ones_like(chosen, dtype=torch.bool)
    if name.startswith("capacity"):
        slots = chosen.numel()
        room = min(slots, -int(-(float(name.split()[1]) * slots / world) // 1))
        owner = torch.tensor([r for r, held in enumerate(case.split.held) for _ in range(held)])
        for rank in range(world):
            mine = (owner.to(DEVICE)[chosen] == rank).flatten().nonzero().flatten()
            kept.view(-1)[mine[room:]] = False
    return kept


@spmd(1, 2, 3, 4)
def test_random_layers_are_those_of_one_process(rank):
    for seed in range(SEEDS):
        case = Case(seed, rank.world_size)
        for name, make in case.dispatchers(rank.mesh()):
            check(rank, case, name, make)


def _loose_sum(rows, weights, row_of, into, *, every=True):
    summed = permute.weighted_reference(rows, weights, row_of, len(into)).to(into.dtype)
    written = torch.ones(len(into), 1, dtype=torch.bool, device=into.device)
    if len(rows) and len(row_of) == len(into) and not every:
        written = (row_of >= 0).unsqueeze(-1)
    into.copy_(torch.where(written, summed, into))


def _invert(row_of, slot_of):
    slot_of.copy_(permute.place(torch.arange(len(row_of), device=DEVICE), row_of, len(slot_of), -1))


def _label(slot_of, chosen, label_of, labels):
    of_slots = torch.cat((label_of[chosen.flatten()], label_of[-1:]))
    labels.copy_(of_slots[slot_of])


def _find_arrival(counts, by_row, to_group, arrival):
    kinds = to_group.repeat_interleave(counts[by_row])
    arrival.copy_(permute.order(kinds, len(to_group))[0])


def _fill_rest(rows, filled):
    rows[int(filled.sum()) :] = 0


@spmd(1, 2, 3, 4)
def test_memory_that_nobody_wrote_reaches_no_result(rank, monkeypatch):
    """Kernels leave what they may leave unwritten: here that is NaN, in rows, sums and gradients."""
    loose = SimpleNamespace(
        take=permute.take_reference,
        pick=permute.pick_reference,
        invert=_invert,
        label=_label,
        find_arrival=_find_arrival,
        fill_rest=_fill_rest,
        weighted_sum=_loose_sum,
        combine_backward=permute.back_reference,
    )
    new_empty = torch.Tensor.new_empty

    def new_nan(*args, **options):
        made = new_empty(*args, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(permute, "_kernels", lambda tensor: loose)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)
    for seed in range(SEEDS, 2 * SEEDS):
        case = Case(seed, rank.world_size)
        for name, make in case.dispatchers(rank.mesh()):
            check(rank, case, name, make)


def check(rank, case, name, make):
    note, mesh, common = (case.seed, name, case.split), rank.mesh(), name in ("shared", "sliced")
    whole, module = case.module(), case.module()
    spread(SplitExperts("x", module, mesh, case.split, lambda *_: make()))
    layer = nn.ModuleDict({"x": module})
    mine, expected = case.inputs(0 if common else rank.rank), None
    for other in [0] if common else range(rank.world_size):
        inputs = case.inputs(other)
        kept = kept_of(case, inputs[1], name, rank.world_size)
        out = by_all(whole, *inputs, kept)
        out.square().sum().backward()
        if common or other == rank.rank:
            expected = (out.detach(), inputs[0].grad, inputs[2].grad, kept)
    out = module(*mine)
    out.square().sum().backward()
    wants = zip((out, mine[0].grad, mine[2].grad), expected)
    for got, want in wants:
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-10), note
    for own, parameter in module.named_parameters():
        want, got = whole.get_parameter(own).grad, parameter.grad
        assert got is not None, (note, own)
        if own == "scale":  # which all experts share: no call of fully_shard reduces it here
            dist.all_reduce(got)
        else:
            got = got.full_tensor()
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-10), (note, own)
    load = load_of(layer)
    routed = [case.inputs(r)[1].flatten() for r in ([0] if common else range(rank.world_size))]
    if name == "shared":
        routed *= rank.world_size  # each counts the common tokens
    assert load.rows["x"].tolist() == torch.cat(routed).bincount(minlength=case.experts).tolist(), note
    lost = (~expected[3]).sum()
    dist.all_reduce(lost)
    assert int(load.dropped) == int(lost), note
