"""Dispatchers alone: ranks without tokens, one expert for all, a capacity; and what is refused."""

import copy
import functools
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ragged_fsdp.experts.levels as levels_module
from ragged_fsdp.experts import (
    AllGather,
    AllToAll,
    ExpertSplit,
    Here,
    SharedTokens,
    SplitExperts,
    TwoLevel,
    expert_parallel,
    fit_capacity,
    grouped_linear,
    held_part,
    load_of,
    mix,
    split_experts_of,
    spread,
    two_level,
)
from ragged_fsdp.topology import Levels
from rank_pool import DEVICE, spmd

EXPERTS, CHANNELS, PER_TOKEN = 4, 6, 2


class Squares(nn.Module):
    """Experts of a user's own, with a parameter that is not one per expert."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.weight = nn.Parameter(torch.randn(EXPERTS, CHANNELS, CHANNELS, generator=_seeded(5)).double())
        self.scale = nn.Parameter(torch.full((CHANNELS,), 0.5).double())

    def forward(self, tokens, chosen, weights):
        return mix(self, Here(EXPERTS), tokens, chosen, weights)[0]

    def apply_to_groups(self, rows, counts):
        return grouped_linear(rows, held_part(self.weight), counts).square() * self.scale


def _seeded(seed):
    return torch.Generator().manual_seed(seed)


def _inputs(tokens, seed, chosen=None):
    x = torch.randn(tokens, CHANNELS, generator=_seeded(seed)).double()
    any_ = torch.rand(tokens, EXPERTS, generator=_seeded(seed)).argsort(1)[:, :PER_TOKEN]
    w = torch.rand(tokens, PER_TOKEN, generator=_seeded(seed + 99)).double()
    x, w = x.to(DEVICE).requires_grad_(), w.to(DEVICE).requires_grad_()
    return x, (any_ if chosen is None else torch.full_like(any_, chosen)).to(DEVICE), w


def _run(module, inputs):
    """Outputs and gradients of tokens and weights."""
    x, chosen, w = inputs
    out = module(x, chosen, w)
    (out * torch.arange(CHANNELS, device=out.device)).sum().backward()
    return out.detach(), x.grad, w.grad


@spmd(1, 3)
def test_any_number_of_tokens_on_each_rank(rank):
    """Rank r has 0, 3 or 5 tokens; every way gives what one process gives, where all go to one expert too."""
    tokens = (0, 3, 5)[(rank.rank + 1) % 3]
    held = {1: (4,), 3: (1, 0, 3)}[rank.world_size]
    for chosen in (None, 2):
        expected = _run(Squares().to(DEVICE), _inputs(tokens, rank.rank, chosen))
        for make in (AllToAll, AllGather):
            module = nn.ModuleDict({"experts": Squares().to(DEVICE)})
            expert_parallel(module, rank.mesh(), dispatcher=make, split=ExpertSplit(held))
            got = _run(module["experts"], _inputs(tokens, rank.rank, chosen))
            for ours, theirs in zip(got, expected):
                assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12), (make, chosen)
            load = load_of(module)
            assert int(load.rows["experts"].sum()) == PER_TOKEN * (8 if rank.world_size == 3 else 3)
    common = _run(Squares().to(DEVICE), _inputs(4, 0))
    module = nn.ModuleDict({"experts": Squares().to(DEVICE)})
    expert_parallel(module, rank.mesh(), dispatcher=SharedTokens, split=ExpertSplit(held))
    for ours, theirs in zip(_run(module["experts"], _inputs(4, 0)), common):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@spmd(4)
def test_slots_of_no_expert_add_nothing(rank):
    """Numbered one past the last, as transformers does it: on some ranks, in every way there is."""
    split, levels = ExpertSplit((1, 0, 2, 1)), Levels(((0, 1), (2, 3)), 2)
    x, chosen, w = _inputs(5, rank.rank)
    if rank.rank % 2:
        chosen[0, 0] = chosen[3] = EXPERTS
    keep = (chosen < EXPERTS).double()
    plain = (x, chosen.clamp(max=EXPERTS - 1), (w * keep).detach().requires_grad_())
    expected = [t.clone() for t in _run(Squares().to(DEVICE), plain)]
    for make in (
        AllToAll,
        functools.partial(AllToAll, parts=1),
        functools.partial(AllToAll, capacity=4.0),
        AllGather,
        functools.partial(TwoLevel, levels=levels),
        functools.partial(TwoLevel, levels=levels, capacity=4.0),
    ):
        layer = nn.ModuleDict({"experts": Squares().to(DEVICE)})
        expert_parallel(layer, rank.mesh(), dispatcher=make, split=split)
        x.grad = w.grad = None
        out, grad_x, grad_w = _run(layer["experts"], (x, chosen, w))
        assert torch.allclose(out, expected[0]) and torch.allclose(grad_x, expected[1]), make
        assert torch.allclose(grad_w, expected[2] * keep), make
        load = load_of(layer)
        assert int(load.rows["experts"].sum()) == 4 * 10 - 2 * 3 and not int(load.dropped), make


@spmd(2)
def test_experts_of_another_dtype_than_the_tokens(rank):
    """A rank without experts, or without rows, sends and expects what it would with some."""
    for make in (AllToAll, AllGather):
        for held, chosen in (((0, 4), None), ((2, 2), 3)):
            plain, layer = (nn.ModuleDict({"experts": Squares().to(DEVICE).float()}) for _ in range(2))
            expert_parallel(layer, rank.mesh(), dispatcher=make, split=ExpertSplit(held))
            results = [_run(m["experts"], _inputs(3, rank.rank, chosen)) for m in (layer, plain)]
            for got, want in zip(*results):
                assert got.dtype == want.dtype == torch.float64 and torch.allclose(got, want, atol=1e-4)


@spmd(4)
def test_a_token_leaves_its_node_once_for_each_other_node(rank):
    """Two nodes of two: results and gradients of all-to-all, also interleaved and uneven; rows counted."""
    mesh = rank.mesh()
    group = mesh.get_group()
    module = Squares().to(DEVICE)
    for split in (ExpertSplit((1, 1, 1, 1)), ExpertSplit((2, 1, 1, 0)), ExpertSplit((0, 2, 1, 1))):
        for levels in (Levels(((0, 1), (2, 3)), 2), Levels(((0, 3), (1, 2)), 2)):
            results = []
            for made in (AllToAll(mesh, split), TwoLevel(mesh, split, levels)):
                spread(experts := SplitExperts("x", copy.deepcopy(module), mesh, split, lambda *_, m=made: m))
                inputs = _inputs(3 * rank.rank, seed=rank.rank)  # rank 0 has no tokens
                out = _run(experts.module, inputs)
                results.append((*out, held_part(experts.module.weight.grad), experts.load))
            for got, expected in zip(results[1], results[0]):
                assert torch.allclose(got, expected, atol=1e-12), (split, levels)
    levels = Levels(((0, 1), (2, 3)), 2)
    made = TwoLevel(mesh, ExpertSplit((1, 1, 1, 1)), levels)
    crossed = []
    with pytest.MonkeyPatch.context() as patch:
        go = levels_module.Trip.go

        def counting(trip, tokens, sent, *more):
            if trip._group is made._rail:
                crossed.append(sent[0][1 - (rank.rank // 2)])
            return go(trip, tokens, sent, *more)

        patch.setattr(levels_module.Trip, "go", counting)
        x, _, _ = _inputs(8, seed=rank.rank)
        away = torch.tensor([2, 3] if rank.rank < 2 else [0, 1], device=DEVICE)
        made.dispatch(x, away.expand(8, 2))
    assert crossed == [8]  # both experts of each of eight tokens are on the other node
    assert isinstance(two_level(mesh, ExpertSplit((1, 1, 1, 1)), ranks_per_node=2), TwoLevel)
    assert isinstance(two_level(mesh, ExpertSplit((1, 1, 1, 1)), ranks_per_node=4), AllToAll)
    assert isinstance(two_level(mesh, ExpertSplit((2, 2, 0, 0)), ranks_per_node=2), AllToAll)
    assert group.size() == 4


@spmd(4)
def test_two_levels_with_a_capacity(rank):
    """Results of all-to-all where all fits; what does not is dropped on either level, and counted once."""
    mesh, split = rank.mesh(), ExpertSplit((1, 1, 1, 1))
    levels, tokens = Levels(((0, 1), (2, 3)), 2), 8
    made = TwoLevel(mesh, split, levels, capacity=4.0)
    for module in (True, False):
        results = []
        for dispatcher in (AllToAll(mesh, split), made if module else made.for_evaluation):
            spread(x := SplitExperts("x", Squares().to(DEVICE), mesh, split, lambda *_, m=dispatcher: m))
            results.append((*_run(x.module, _inputs(tokens, rank.rank)), held_part(x.module.weight.grad)))
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*results))
    # All go to both experts of node 0. Of 8 tokens 6 fit between nodes. Then each rank there gets 8 rows of
    # each sender: the six of its own node's, and two of the other's.
    layer = nn.ModuleDict({"experts": Squares().to(DEVICE)})
    expert_parallel(layer, mesh, dispatcher=lambda m, s: TwoLevel(m, s, levels, capacity=1.0))
    x, _, w = _inputs(tokens, rank.rank)
    chosen = torch.tensor([0, 1], device=DEVICE).expand(tokens, 2)
    keep = (torch.arange(tokens, device=DEVICE) < (6 if rank.rank < 2 else 2)).double().unsqueeze(-1)
    expected = _run(Squares().to(DEVICE), (x, chosen, (w * keep).detach().requires_grad_()))
    x.grad = None
    out, grad_x, grad_w = _run(layer["experts"], (x, chosen, w))
    assert torch.allclose(out, expected[0]) and torch.allclose(grad_x, expected[1])
    assert torch.allclose(grad_w, expected[2] * keep) and int(load_of(layer).dropped) == 32
    for wanted in (1.5, 2.0):  # what the second level would need is known once the first has room
        assert fit_capacity(layer, margin=1.0)["experts"] == pytest.approx(wanted)
        _run(layer["experts"], (x, chosen, w))
    assert int(load_of(layer).dropped) == 16  # of the first of the two runs
    for _ in range(3):  # of all nodes to one expert: there is a capacity for that too
        load_of(layer)
        _run(layer["experts"], _inputs(tokens, rank.rank, chosen=0))
        fit_capacity(layer, margin=1.0)
    assert int(load_of(layer).dropped) == 0
    with pytest.raises(ValueError, match="and with it as many tokens"):
        layer["experts"](*_inputs(5 + (rank.rank == 3), 0))
    split_experts_of(layer)["experts"].dispatcher.capacity = 1.0 + rank.rank
    with pytest.raises(ValueError, match=r"'6 tokens, capacity 1.0', rank 1 has '6 tokens, capacity 2.0'"):
        layer["experts"](*_inputs(6, 0))


class Reads(TorchDispatchMode):
    """Raises where the host would ask a device for a value, or send it one from its own memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "lift_fresh"), name
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_is_read():
    """On a GPU torch itself raises; on the CPU the ways to read or send a value do, which there are free."""
    with pytest.MonkeyPatch.context() as patch, Reads():
        for name in ("tolist", "cpu", "numpy"):
            patch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"a value is read: {name}"))
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("default")


@spmd(4)
def test_with_a_capacity_the_host_reads_nothing(rank):
    """Dispatch, combine, their backward and what is counted; but the first call, which compares tokens."""
    mesh, split = rank.mesh(), ExpertSplit((1, 1, 1, 1))
    levels = Levels(((0, 1), (2, 3)), 2)
    exact = (AllToAll(mesh, split), TwoLevel(mesh, split, levels), AllGather(mesh, split))
    fixed = (AllToAll(mesh, split, capacity=1.0), TwoLevel(mesh, split, levels, capacity=1.0))
    x, chosen, w = _inputs(8, seed=rank.rank)
    x, w = (t.detach().float().requires_grad_() for t in (x, w))

    def run(dispatcher):
        rows, _, route = dispatcher.dispatch(x, chosen)
        dispatcher.combine(rows * 2, w, route).sum().backward()
        return route

    for dispatcher in fixed:
        first = run(dispatcher)
        needed = dispatcher.needed.item()
        x.grad = w.grad = None
        with nothing_is_read():
            dispatcher.forget_needed()
            again = run(dispatcher)
        assert dispatcher.needed.item() == needed > 0 and torch.equal(first.dropped, again.dropped)
    for dispatcher in exact:  # on all ranks before they would wait for each other
        with nothing_is_read(), pytest.raises((pytest.fail.Exception, AssertionError, RuntimeError)):
            run(dispatcher)


@spmd(2)
def test_counts_stay_where_they_are(rank):
    """A CUDA graph goes on adding where the first step put them; a taken count begins at zero there."""
    layer = nn.ModuleDict({"experts": Squares().to(DEVICE)})
    expert_parallel(layer, rank.mesh(), dispatcher=lambda m, s: AllToAll(m, s, capacity=0.5))
    (state,) = split_experts_of(layer).values()
    inputs = _inputs(6, rank.rank, chosen=rank.rank)
    with torch.inference_mode():
        layer["experts"](*inputs)
    places = [t.data_ptr() for t in (state.load, state.dropped, state.dispatcher.needed)]
    for runs in (3, 1):
        for _ in range(runs - (runs == 3)):
            _run(layer["experts"], inputs)
        load = load_of(layer)
        assert int(load.rows["experts"].sum()) == 2 * 12 * runs and int(load.dropped) == 2 * 9 * runs
        assert fit_capacity(layer, margin=1.0) == {"experts": 2.0} and fit_capacity(layer) == {}
        state.dispatcher.capacity = 0.5
        assert places == [t.data_ptr() for t in (state.load, state.dropped, state.dispatcher.needed)]


class Layer(nn.Module):
    """Experts and a shared one, in the order in which models call them."""

    def __init__(self, shared_first):
        super().__init__()
        self.experts, self.shared_first = Squares(), shared_first
        self.shared_experts = nn.Linear(CHANNELS, CHANNELS, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.shared_experts.weight.copy_(torch.randn(CHANNELS, CHANNELS, generator=_seeded(8)))

    def forward(self, tokens, chosen, weights):
        if self.shared_first:
            return self.shared_experts(tokens) + self.experts(tokens, chosen, weights)
        flat = tokens.view(-1, CHANNELS)
        return self.experts(flat, chosen, weights) + self.shared_experts(tokens)


@spmd(2)
def test_a_shared_expert_is_computed_while_rows_travel(rank):
    """Between the start of an exchange and its end, forward and backward; once; with the same results."""
    import torch.distributed as dist

    said, real = [], dist.all_to_all_single

    class Work:
        def __init__(self, inner):
            self.inner = inner

        def wait(self):
            said.append("arrived")
            self.inner.wait()

    def sending(*args, async_op=False, **options):
        if not async_op:
            return real(*args, **options)
        said.append("left")
        return Work(real(*args, async_op=True, **options))

    class OfTheUser(AllToAll):
        """Knows nothing of what could be done meanwhile."""

        def dispatch(self, tokens, chosen):
            return super().dispatch(tokens, chosen)

    results = []
    ways = ((False, False), (True, False), (True, True), (OfTheUser, False), ("each expert's", False))
    for overlap, shared_first in ways:
        layer = Layer(shared_first).to(DEVICE)
        one_exchange = functools.partial(AllToAll, parts=1)
        own = {} if overlap == "each expert's" else {"dispatcher": one_exchange, "overlap": overlap}
        expert_parallel(layer, rank.mesh(), **({"dispatcher": OfTheUser} if overlap is OfTheUser else own))
        inner = layer.shared_experts
        inner.register_full_backward_hook(lambda *_: said.append("shared backward"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_to_all_single", sending)
            linear = torch.nn.functional.linear
            patch.setattr(torch.nn.functional, "linear", lambda *a, f=linear: said.append("shared") or f(*a))
            for step in range(2):
                said.clear()
                layer.zero_grad()
                inputs = _inputs(5 + rank.rank, seed=rank.rank + step)
                out = _run(layer, inputs)
                if overlap is True and not shared_first:
                    assert said[:3] == ["left", "shared", "arrived"] and said.count("shared") == 1
                    assert said[3] == "left" and said[-1] == "arrived", said
                elif overlap != "each expert's":
                    assert "left" not in said[1:] or step == 0, said
        results.append((*out, inner.weight.grad))
    for got in results[1:]:
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(got, results[0]))


class Cut(Layer):
    """One of the two sees no gradient to the tokens, is called without gradients, or after a write."""

    def __init__(self, where):
        super().__init__(False)
        self.where = where

    def forward(self, tokens, chosen, weights):
        tokens = tokens.clone()
        with torch.set_grad_enabled(self.where != "no gradients"):
            routed = self.experts(tokens.detach() if self.where == "routed" else tokens, chosen, weights)
        if self.where == "written":
            with torch.no_grad():
                tokens.mul_(2)
        return routed + self.shared_experts(tokens.detach() if self.where == "shared" else tokens)


@spmd(2)
def test_what_was_computed_ahead_is_taken_for_the_same_call_only(rank):
    for where in ("routed", "shared", "no gradients", "written"):
        results = []
        for spread_out in (False, True):
            layer = Cut(where).to(DEVICE)
            if spread_out:
                expert_parallel(layer, rank.mesh(), dispatcher=AllToAll)
            with torch.set_grad_enabled(where != "written"):
                x, chosen, w = _inputs(4, rank.rank)
                out = layer(x, chosen, w)
            if where != "written":
                out.square().sum().backward()
            results.append((out, x.grad, layer.shared_experts.weight.grad))
        for plain, ours in zip(*results):
            assert (plain is None) == (ours is None), where
            assert plain is None or torch.allclose(plain, ours), where


@spmd(2)
def test_what_does_not_fit_is_dropped_and_counted(rank):
    """The last tokens for a rank lose; the outputs are those with their weights at zero."""
    tokens = 6
    for capacity in (0.25, 0.5, 1.0, 2.0):
        module = nn.ModuleDict({"experts": Squares().to(DEVICE)})
        split = ExpertSplit((1, 3))
        expert_parallel(
            module, rank.mesh(), dispatcher=lambda m, s, c=capacity: AllToAll(m, s, capacity=c), split=split
        )
        x, chosen, w = _inputs(tokens, rank.rank)
        room = min(12, -(-int(capacity * 12) // 2))
        keep = torch.ones_like(w)
        for first, stop in ((0, 1), (1, 4)):
            mine = ((chosen >= first) & (chosen < stop)).flatten().nonzero().flatten()
            keep.view(-1)[mine[room:]] = 0
        expected = _run(Squares().to(DEVICE), (x, chosen, (w * keep).detach().requires_grad_()))
        x.grad = None
        out, grad_x, grad_w = _run(module["experts"], (x, chosen, w))
        assert torch.allclose(out, expected[0]) and torch.allclose(grad_x, expected[1])
        assert torch.allclose(grad_w, expected[2] * keep)
        load = load_of(module)
        dropped = torch.tensor(float((keep == 0).sum()), device=DEVICE)
        torch.distributed.all_reduce(dropped)
        assert int(load.dropped) == int(dropped) and (capacity < 2.0 or not dropped)
        assert int(load.rows["experts"].sum()) == 2 * tokens * PER_TOKEN
        fitted = fit_capacity(module, margin=1.0)["experts"]
        assert 0 < fitted <= 2.0 and fit_capacity(module) == {}
        if dropped:
            assert fitted > capacity
        exact = _run(Squares().to(DEVICE), _inputs(tokens, rank.rank))
        again = _run(module["experts"], _inputs(tokens, rank.rank))
        assert all(torch.allclose(a, b) for a, b in zip(again, exact)) and not int(load_of(module).dropped)
        module.eval()  # nothing is dropped, and ranks may have other numbers of tokens
        plain = _run(Squares().to(DEVICE), _inputs(tokens + rank.rank, rank.rank))
        got = _run(module["experts"], _inputs(tokens + rank.rank, rank.rank))
        assert torch.allclose(got[0], plain[0])
        module.train()
    module = nn.ModuleDict({"experts": Squares().to(DEVICE)})
    expert_parallel(module, rank.mesh(), dispatcher=lambda m, s: AllToAll(m, s, capacity=2.0))
    with pytest.raises(ValueError, match=r"rank 0 has '5 tokens, .*', rank 1 has '6 tokens, .*'"):
        module["experts"](*_inputs(5 + rank.rank, 0))


class FailsOnOneRank(AllToAll):
    """Cannot be made on rank 1."""

    def __init__(self, mesh, split):
        super().__init__(mesh, split)
        if mesh.get_rank() == 1:
            raise ValueError("on purpose")


class Broken(AllToAll):
    """Does not keep to the protocol, in what it dispatches or in what it combines."""

    def __init__(self, mesh, split, wrong):
        super().__init__(mesh, split)
        self.wrong = wrong

    def dispatch(self, tokens, chosen, meanwhile=None):
        rows, counts, route = super().dispatch(tokens, chosen, meanwhile)
        return (*(self.wrong(rows, counts) if self.wrong else (rows, counts)), route)

    def combine(self, outputs, weights, route):
        return super().combine(outputs, weights, route).sum(0, keepdim=True)


class Plain(AllToAll):
    """Has no moment for other work, which its caller must not ask of it."""

    def dispatch(self, tokens, chosen):
        return super().dispatch(tokens, chosen)


@spmd(2)
def test_dispatchers_of_a_user_and_tokens_that_ranks_share(rank):
    mesh = rank.mesh()
    expected = _run(Squares().to(DEVICE), _inputs(3, 0))
    module = nn.ModuleDict({"experts": Squares().to(DEVICE), "shared_expert": nn.Identity()})
    expert_parallel(module, mesh, dispatcher=Plain, token_mesh=mesh)
    for ours, theirs in zip(_run(module["experts"], _inputs(3, 0)), expected):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    module = nn.ModuleDict({"experts": Squares().to(DEVICE)})
    expert_parallel(module, mesh, dispatcher=lambda m, s: Broken(m, s, None), token_mesh=mesh)
    with pytest.raises(ValueError, match=r"Broken: result of combine must have shape \(2, 6\), got \(1, 6\)"):
        module["experts"](*_inputs(4, 0))


@spmd(2)
def test_what_cannot_be_spread_is_refused_and_left_as_it_was(rank):
    mesh = rank.mesh()
    grid = rank.mesh(2, 1, names=("a", "b"))

    def model():
        return nn.ModuleDict({"experts": Squares()}).to(rank.device)

    for arguments, error in (
        ((nn.Linear(2, 2), mesh), "Linear has no module of experts"),
        ((model(), grid), r"got \(2, 1\) named \('a', 'b'\)"),
        (
            (model(), mesh, {"layers.*.experts": "all_to_all"}),
            "names no module of experts; there are experts",
        ),
        ((model(), mesh, {"experts": "moe_tp_experts"}), "is 'moe_tp_experts'; expected one of"),
        ((model(), mesh, {"attention.norm": "replicated_with_grad_allreduce"}), "expected one of"),
    ):
        with pytest.raises(ValueError, match=error):
            expert_parallel(*arguments)
    for options, error in (
        ({"dispatcher": "deepep"}, "dispatcher must be one of all_to_all, all_gather"),
        ({"split": ExpertSplit((1, 1))}, "has 4 experts for 2 ranks, but its split is of 2 on 2"),
        ({"split": {"expert": ExpertSplit((2, 2))}}, "split names 'expert', which is not spread"),
        ({"dispatcher": lambda m, s: AllToAll(m, s, capacity=-1.0)}, "capacity must be None or positive"),
        (
            {"split": ExpertSplit((1 + rank.rank, 3 - rank.rank))},
            "do not spread experts the same: rank 0 has",
        ),
        # on one rank: the other must not wait for it
        ({"split": ExpertSplit((1, 1 + 2 * rank.rank))}, r"has 4 experts|rank 0 cannot spread experts"),
        (
            {"dispatcher": FailsOnOneRank},
            r"^on purpose|rank 1 cannot make dispatchers: ValueError: on purpose",
        ),
    ):
        module = model()
        with pytest.raises(ValueError, match=error):
            expert_parallel(module, mesh, **options)
        assert type(module["experts"].weight) is nn.Parameter
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAGGED_FSDP_RANKS_PER_NODE", str(1 + rank.rank))
        with pytest.raises(ValueError, match="'nodes of 1 ranks', rank 1 has 'nodes of 2 ranks'"):
            expert_parallel(model(), mesh, dispatcher="two_level")
    for wrong, error in (
        (lambda rows, counts: (rows[:, :1], counts), r"rows of dispatch must have shape \(\d+, 6\)"),
        (
            lambda rows, counts: (rows, counts[:1]),
            r"Broken: counts of dispatch must have shape \(2,\), got \(1,\)",
        ),
        (None, r"Broken: result of combine must have shape \(3, 6\), got \(1, 6\)"),
    ):
        expert_parallel(module := model(), mesh, dispatcher=lambda m, s, w=wrong: Broken(m, s, w))
        with pytest.raises(ValueError, match=error):
            module["experts"](*_inputs(3, rank.rank))
    tied = nn.ModuleDict({"first": Squares(), "second": Squares()})
    tied["second"].weight = tied["first"].weight
    with pytest.raises(ValueError, match=r"first.weight is tied to a parameter of second, .* one module"):
        expert_parallel(tied, mesh)
    spread = model()
    expert_parallel(spread, mesh)
    with pytest.raises(ValueError, match="is a DTensor already"):
        expert_parallel(spread, mesh)
    with pytest.raises(TypeError, match="must be a DeviceMesh"):
        expert_parallel(model(), None)
