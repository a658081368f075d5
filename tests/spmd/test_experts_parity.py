"""Experts spread over ranks compute what one process computes, however they lie and tokens travel."""

import contextlib
import importlib.util

import pytest
import torch
from torch.distributed.fsdp import fully_shard as stock_fully_shard

import experts_cases as cases
from ragged_fsdp import Rows, fully_shard
from ragged_fsdp.experts import (
    AllToAll,
    ExpertSplit,
    Here,
    divide_gradients,
    expert_parallel,
    grouped_linear,
    held_part,
    mix,
)
from ragged_fsdp.experts.layers import expert_parameters
from ragged_fsdp.optim import clip_grad_norm_
from ragged_fsdp.torch_internals import checkpoint_wrapper
from rank_pool import DEVICE, spmd

# On a GPU experts' products and sums over ranks add up in another order than in one process: 1.3e-6 was seen.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6 if DEVICE == "cpu" else 2e-6}
FLOORS = {torch.float64: 1e-3, torch.float32: 1e-1}  # below it a bound is absolute


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _train(model, ids, parts, index, steps, *, scale=1.0, pieces=1, sync=None):
    """Gradients after the first backward, the norm, and the parameters after ``steps`` of SGD."""
    mine, first, norm = ids.tensor_split(parts)[index], {}, None
    for step in range(steps):
        for number, piece in enumerate(mine.tensor_split(pieces)):
            if sync is not None:
                sync(number == pieces - 1)
            (cases.loss_of(model, piece, ids.numel()) * scale).backward()
        if step == 0:
            first = {n: _whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
            norm = clip_grad_norm_(model.parameters(), float("inf"))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.05)
                    parameter.grad = None
    return first, norm, {n: _whole(p.detach()).clone() for n, p in model.named_parameters()}


def _assert_same(got, expected, case):
    assert got.keys() == expected.keys(), (case, got.keys() ^ expected.keys())
    for name, tensor in expected.items():
        scale = tensor.abs().max().clamp(min=FLOORS[tensor.dtype])
        error = (got[name] - tensor).abs().max() / scale
        assert error <= BOUNDS[tensor.dtype], (case, name, float(error))


@pytest.mark.parametrize("family", cases.FAMILIES)
@spmd(1, 2, 3, 4)
def test_gradients_and_ten_steps_are_those_of_one_process(rank, family):
    """Five experts on every number of ranks, in fp64 and fp32; the norm over both meshes too."""
    for dtype, bound in BOUNDS.items():
        wide = dtype == torch.float64
        with cases.wide_arithmetic(family) if wide else contextlib.nullcontext():
            ids, steps = cases.batch(), 10 if wide else 1
            # A GPU's fp32 products add up in another order for another number of rows: one process that takes
            # the batch in four parts is up to 4e-6 from itself. So it takes as many parts as there are ranks.
            pieces = 1 if wide or DEVICE == "cpu" else rank.world_size
            expected = _train(cases.build(family, dtype), ids, 1, 0, steps, pieces=pieces)
            model = cases.build(family, dtype)
            mesh = rank.mesh(1, rank.world_size, names=("dp", "ep"))
            expert_parallel(model, mesh["ep"])
            cases.shard(model, mesh["dp"], rank.mesh(), rank.world_size, fully_shard)
            got = _train(model, ids, rank.world_size, rank.rank, steps, scale=rank.world_size)
            _assert_same(got[0], expected[0], "gradients")
            _assert_same(got[2], expected[2], "parameters")
            assert abs(got[1] - expected[1]) <= bound * expected[1]


def _capacity(mesh, split):
    return AllToAll(mesh, split, capacity=float(mesh.size()))


WAYS = {
    "all_gather": {"dispatcher": "all_gather"},
    "capacity for all": {"dispatcher": _capacity},
    "uneven": {"split": ExpertSplit((1, 4))},
    "a rank without experts": {"split": ExpertSplit((5, 0)), "dispatcher": "all_gather"},
    "all on the second": {"split": ExpertSplit((0, 5))},
    "plan of the library": {"plan": {"layers.*.mlp.experts": "ep_dispatch_experts"}},
    "whole experts": {"options": {"orig_param_policy": lambda name, p: Rows(8) if p.ndim == 3 else None}},
    "across": {"across": True},
    "across, uneven": {"across": True, "split": ExpertSplit((1, 4))},
    "across, hsdp": {"across": True, "hsdp": True},
    "across, fsdp2": {"across": True, "fully_shard": stock_fully_shard, "experts": 4},
    "hsdp, accumulated": {"hsdp": True, "pieces": 3},
    "recomputed": {"recompute": True},
    "compiled": {"compile": True},
    "no forward twice": {"options": {"reshard_after_forward": False}, "recompute": True, "pieces": 2},
    "fsdp2": {"fully_shard": stock_fully_shard, "experts": 4},
    "fsdp2, all_gather": {"fully_shard": stock_fully_shard, "experts": 4, "dispatcher": "all_gather"},
}


def _spread(rank, model, way, parts=None):
    """Two ranks to an ep group, two groups; returns the model ready to train."""
    hsdp = way.get("hsdp")
    # across: neighbours have the same experts, as on one node, and the dim of ep comes first
    dims = [("dp", 1 if hsdp else 2), ("ep", 2)]
    dims = [("rep", 2)] * bool(hsdp) + dims[:: -1 if way.get("across") else 1]
    mesh = rank.mesh(*(size for _, size in dims), names=tuple(name for name, _ in dims))
    everyone = rank.mesh(2, 2, names=("replicate", "shard")) if hsdp else rank.mesh()
    given = {k: way[k] for k in ("dispatcher", "split", "plan") if k in way}
    expert_parallel(model, mesh["ep"], **given)
    if way.get("recompute"):
        layers = cases.layers_of(model)
        for index in range(len(layers)):
            layers[index] = checkpoint_wrapper(layers[index])
    if way.get("compile"):
        for layer in cases.layers_of(model):
            layer.compile(backend="eager")
    dp = mesh["rep", "dp"] if hsdp else mesh["dp"]
    options = way.get("options", {})
    cases.shard(model, dp, everyone, parts or 4, way.get("fully_shard", fully_shard), **options)
    return model


@spmd(4)
def test_every_way_is_that_of_one_process(rank):
    """Ours and GPT-OSS (biases, interleaved gates) under what else there is: fp64, two steps."""
    for family in ("GptOssConfig", "ours"):
        with cases.wide_arithmetic(family):
            ids, expected = cases.batch(), {}
            for case, way in WAYS.items():
                if family == "ours" and case not in ("uneven", "recomputed", "compiled", "fsdp2"):
                    continue
                experts = way.get("experts", cases.EXPERTS)
                if experts not in expected:
                    expected[experts] = _train(cases.build(family, torch.float64, experts), ids, 1, 0, 2)
                model = _spread(rank, cases.build(family, torch.float64, experts), way)
                pieces = way.get("pieces", 1)
                sync = model.set_requires_gradient_sync if pieces > 1 else None
                got = _train(model, ids, 4, rank.rank, 2, scale=4, pieces=pieces, sync=sync)
                got = [
                    {n.replace("_checkpoint_wrapped_module.", ""): t for n, t in g.items()} for g in got[::2]
                ]
                _assert_same(got[0], expected[experts][0], case)
                _assert_same(got[1], expected[experts][2], case)


@pytest.mark.skipif(
    not importlib.util.find_spec("transformers.models.muse_spark"),
    reason="needs transformers with Muse Spark",
)
@spmd(4)
def test_a_norm_that_all_experts_share(rank):
    """Muse Spark's experts by the library's plan: each rank's tokens give the norm a part of its gradient."""
    from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts

    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    sizes = {"moe_hidden_size": 8, "moe_intermediate_size": 6, "num_local_experts": cases.EXPERTS}
    config = MuseSparkTextConfig(hidden_size=8, **sizes, **heads)
    plan = {name.removeprefix("layers.*.mlp."): style for name, style in config.base_model_ep_plan.items()}

    def made():
        torch.manual_seed(3)
        layer = torch.nn.ModuleDict({"experts": MuseSparkExperts(config).to(DEVICE, torch.float64)})
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
        return layer

    def loss(layer, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(3 * index, 8, generator=generator)  # the first rank has no tokens
        chosen = torch.rand(len(x), cases.EXPERTS, generator=generator).argsort(1)[:, :2]
        weights = torch.rand(len(x), 2, generator=generator)
        given = x.to(DEVICE).double(), chosen.to(DEVICE), weights.to(DEVICE).double()
        return layer["experts"](*given).square().sum()

    config._experts_implementation = "eager"
    plain, mesh = made(), rank.mesh(2, 2, names=("dp", "ep"))
    (sum(loss(plain, index) for index in range(4)) / 4).backward()
    for split in (None, ExpertSplit((0, 5))):
        layer = expert_parallel(made(), mesh["ep"], plan, split=split)
        fully_shard(layer["experts"], mesh=mesh["dp"])
        divide_gradients([layer["experts"]], 4)
        loss(layer, rank.rank).backward()
        for name, parameter in plain.named_parameters():  # the norm itself computes in fp32
            got = _whole(layer.get_parameter(name).grad)
            assert torch.allclose(got, parameter.grad, rtol=1e-5, atol=1e-6), (split, name)
        assert "weight" not in vars(layer["experts"].post_expert_norm)
    experts = expert_parallel(made(), mesh["ep"], plan)["experts"]
    fully_shard([experts.post_expert_norm, experts], mesh=mesh["dp"])  # one call: gathered with the experts
    divide_gradients([experts], 4)
    loss({"experts": experts}, rank.rank).backward()
    got = _whole(experts.post_expert_norm.weight.grad)
    assert torch.allclose(got, plain["experts"].post_expert_norm.weight.grad, rtol=1e-5, atol=1e-6)
    for over, sees_all in ((mesh["dp"], False), (rank.mesh(), True)):
        experts = expert_parallel(made(), mesh["ep"], plan)["experts"]
        fully_shard(experts.post_expert_norm, mesh=over)  # a call of its own
        fully_shard(experts, mesh=mesh["dp"])
        divide_gradients([experts], 4)
        if not sees_all:
            with pytest.raises(ValueError, match=r"post_expert_norm.weight is shared by .* is over ranks \["):
                loss({"experts": experts}, rank.rank)
            continue
        loss({"experts": experts}, rank.rank).backward()
        got = _whole(experts.post_expert_norm.weight.grad)
        assert torch.allclose(got, plain["experts"].post_expert_norm.weight.grad, rtol=1e-5, atol=1e-6)
    above = _Above(expert_parallel(made(), mesh["ep"], plan)["experts"])
    fully_shard(above, mesh=rank.mesh(), ignored_params=set(expert_parameters(above.experts).values()))
    loss({"experts": above}, rank.rank).backward()  # reduced over all ranks: nothing is to be added up before
    got = _whole(above.experts.post_expert_norm.weight.grad)
    assert torch.allclose(got, plain["experts"].post_expert_norm.weight.grad, rtol=1e-5, atol=1e-6)


class _Above(torch.nn.Module):
    """A module that is sharded with what its experts share."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, *given):
        return self.experts(*given)


class _Scaled(torch.nn.Module):
    """Experts with what they share two levels below them."""

    def __init__(self):
        super().__init__()
        self.num_experts = cases.EXPERTS
        self.weight = torch.nn.Parameter(torch.randn(cases.EXPERTS, 6, 6).double())
        self.after = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(6, 6, bias=False).double()))

    def apply_to_groups(self, rows, counts):
        return self.after(grouped_linear(rows, held_part(self.weight), counts))

    def forward(self, tokens, chosen, weights):
        return mix(self, Here(cases.EXPERTS), tokens, chosen, weights)[0]


@spmd(2)
@pytest.mark.parametrize("shard", [fully_shard, stock_fully_shard])
def test_what_lies_in_a_part_that_is_sharded_by_itself(rank, shard):
    """Its own call gathers it, behind the experts' begin, and takes the mean over all ranks."""

    def loss(layer, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(4 + index, 6, generator=generator).double()
        chosen = torch.rand(len(x), cases.EXPERTS, generator=generator).argsort(1)[:, :2]
        given = x.to(DEVICE), chosen.to(DEVICE), torch.ones(len(x), 2, dtype=x.dtype, device=DEVICE)
        return layer["experts"](*given).square().sum()

    def made():
        torch.manual_seed(3)
        return torch.nn.ModuleDict({"experts": _Scaled()}).to(DEVICE)

    plain, layer = made(), made()
    (sum(loss(plain, index) for index in range(2)) / 2).backward()
    expert_parallel(layer, rank.mesh(), dispatcher=AllToAll, split=ExpertSplit((3, 2)))
    shard(layer["experts"].after, mesh=rank.mesh())
    loss(layer, rank.rank).backward()
    name = "experts.after.0.0.weight"
    got = _whole(layer.get_parameter(name).grad)
    assert torch.allclose(got, plain.get_parameter(name).grad, rtol=1e-10, atol=1e-12)


@spmd(2)
def test_attention_over_the_ranks_of_the_experts(rank):
    """Tensor parallelism of attention beside experts: every gradient of one step, for each plan there is."""
    from ragged_fsdp.models.hf_parallel import attention_split

    mesh = rank.mesh(1, 2, names=("dp", "ep"))
    for family in cases.FAMILIES:
        if family == "ours":
            continue
        with cases.wide_arithmetic(family):
            ids = cases.batch(4)
            expected = _train(cases.build(family, torch.float64), ids, 1, 0, 1)[0]
            model = cases.build(family, torch.float64)
            attention_split(model.config).apply(model, mesh["ep"])
            expert_parallel(model, mesh["ep"], token_mesh=mesh["ep"])
            if family == "GptOssConfig":  # its sinks must be gathered before the module sees them
                for layer in cases.layers_of(model):
                    fully_shard(layer.self_attn, mesh=mesh["dp"])
            got = {}
            cases.loss_of(model, ids, ids.numel()).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    got[name] = _whole(parameter.grad)
            _assert_same(got, expected, family)


@spmd(4)
def test_a_wrong_divisor_and_a_lost_token_are_seen(rank):
    """What the comparison above is for: it must fail where one of these is wrong."""
    ids = cases.batch()
    expected = _train(cases.build("ours", torch.float64), ids, 1, 0, 1)

    def check(lose, parts):
        model = _spread(rank, cases.build("ours", torch.float64), {"dispatcher": lose} if lose else {}, parts)
        got = _train(model, ids, 4, rank.rank, 1, scale=4)
        _assert_same(got[0], expected[0], "gradients")

    class Loses(AllToAll):
        def combine(self, outputs, weights, route):
            if rank.rank == 1:
                trip = route.extra["trip"]
                trip.row_of = torch.where(trip.row_of == 3, -1, trip.row_of)
            return super().combine(outputs, weights, route)

    check(None, 4)
    for lose, parts in ((None, 2), (Loses, 4)):
        with pytest.raises(AssertionError):
            check(lose, parts)
