"""Muon as an ordinary optimizer, in one process: groups, rules, schedulers, state, parity with torch."""

from __future__ import annotations

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn

from ragged_fsdp.optim import Muon
from ragged_fsdp.optim.exchange.matrices import Flattened, Fused
from ragged_fsdp.optim.muon.rules import is_hidden_matrix, scale_function


def parameters(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(params, seed=7):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def muon_group(params, **options):
    return {"params": params, "algorithm": "muon", **options}


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_torch(adjust, nesterov) -> None:
    """torch's Muon in bf16, up to the rounding of the iteration."""
    shapes = [(24, 40), (40, 24), (16, 16)]
    mine, theirs = parameters(*shapes), parameters(*shapes)
    options = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust}
    ours = Muon([muon_group(mine)], **options)
    stock = torch.optim.Muon(theirs, **options)
    start = [p.detach().clone() for p in mine]
    for seed in range(3):
        set_gradients(mine, seed)
        set_gradients(theirs, seed)
        ours.step()
        stock.step()
        for a, b in zip(mine, theirs):
            torch.testing.assert_close(ours.state[a]["momentum_buffer"], stock.state[b]["momentum_buffer"])
    for a, b, before in zip(mine, theirs, start):
        assert (a - b).norm() < 0.03 * (b - before).norm()


def test_everything_else_is_adamw() -> None:
    """The inner AdamW is torch's, bit by bit, with its own learning rate and decay."""
    names = ["embed.weight", "norm.weight", "layers.0.mlp.bias", "lm_head.weight"]
    mine, theirs = parameters((9, 4), (4,), (4,), (9, 4)), parameters((9, 4), (4,), (4,), (9, 4))
    ours = Muon(zip(names, mine), lr=9.0, adamw_lr=0.01, adamw_betas=(0.8, 0.9), adamw_weight_decay=0.05)
    stock = torch.optim.AdamW(theirs, lr=0.01, betas=(0.8, 0.9), weight_decay=0.05)
    assert [g["algorithm"] for g in ours.param_groups] == ["adamw"]
    for seed in range(3):
        set_gradients(mine, seed)
        set_gradients(theirs, seed)
        ours.step()
        stock.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs))


@pytest.mark.parametrize(
    ("name", "shape", "hidden"),
    [
        ("layers.0.attention.wq.weight", (8, 8), True),
        ("layers.0.attention.output.weight", (8, 8), True),
        ("model.layers.11.mlp.experts.gate_up_proj", (4, 8, 16), True),
        ("model.layers.11.mlp.experts.gate_up_proj_bias", (4, 16), False),
        ("model.layers.11.mlp.router.weight", (4, 8), True),
        ("model.layers.0.self_attn.q_norm.weight", (8,), False),
        ("model.embed_tokens.weight", (50, 8), False),
        ("tok_embeddings.weight", (50, 8), False),
        ("transformer.wte.weight", (50, 8), False),
        ("lm_head.weight", (50, 8), False),
        ("output.weight", (50, 8), False),
        ("shared.weight", (50, 8), False),
        ("layers.0.mlp.shared_expert.up.weight", (50, 8), True),
        ("model.output.weight", (50, 8), False),
        ("layers.0.conv.weight", (8, 4, 3, 3), False),
        ("layers.0.gate.weight", (1, 8), False),
        (None, (8, 8), True),
        (None, (8,), False),
    ],
)
def test_default_rule(name, shape, hidden) -> None:
    assert is_hidden_matrix(name, torch.empty(shape)) is hidden


def test_parts_are_matrices_of_their_own() -> None:
    """A fused weight moves as its parts would, an expert tensor as its experts, a kernel as its matrix."""
    q, k, gate, up = parameters((8, 6), (4, 6), (6, 5), (6, 5))
    kernel = parameters((8, 3, 2, 2))[0]
    experts = parameters((3, 6, 5))[0]
    fused = {
        "rows": nn.Parameter(torch.cat([q, k]).detach()),
        "columns": nn.Parameter(torch.cat([gate.detach(), up.detach()[:, :2]], dim=1)),
        "alternating": nn.Parameter(torch.stack([gate, up], dim=2).reshape(6, 10).detach()),
        "kernel": nn.Parameter(kernel.detach().clone()),
        "experts": nn.Parameter(experts.detach().clone()),
    }
    rules = {
        "rows": Fused(-2, (8, 4)),
        "columns": Fused(-1, (5, 2)),
        "alternating": Fused(-1, (5, 5), interleaved=True),
        "kernel": Flattened(),
    }
    set_gradients(fused.values())
    gradients = {n: p.grad for n, p in fused.items()}
    parts = {
        "rows": list(gradients["rows"].split([8, 4])),
        "columns": list(gradients["columns"].split([5, 2], dim=1)),
        "alternating": [gradients["alternating"][:, ::2], gradients["alternating"][:, 1::2]],
        "kernel": [gradients["kernel"].reshape(8, 12)],
        "experts": list(gradients["experts"]),
    }
    options = {"lr": 0.1, "adjust_lr_fn": "match_rms_adamw", "ns_dtype": torch.float32, "weight_decay": 0.0}
    before = {n: p.detach().clone() for n, p in fused.items()}
    Muon([muon_group(list(fused.items()))], split=lambda name, p: rules.get(name), **options).step()
    for name, gradient_parts in parts.items():
        single = [nn.Parameter(torch.zeros_like(g)) for g in gradient_parts]
        for p, g in zip(single, gradient_parts):
            p.grad = g.clone()
        Muon([muon_group(single)], **options).step()
        joined = {
            "rows": lambda s: torch.cat(s),
            "columns": lambda s: torch.cat(s, dim=1),
            "alternating": lambda s: torch.stack(s, dim=2).reshape(6, 10),
            "kernel": lambda s: s[0].view(8, 3, 2, 2),
            "experts": lambda s: torch.stack(s),
        }[name]([p.detach() for p in single])
        torch.testing.assert_close(fused[name].detach() - before[name], joined, rtol=1e-4, atol=1e-6)


def test_groups_schedulers_closures_and_copies() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(10, 8), "layers": nn.ModuleList([nn.Linear(8, 8)])})
    optimizer = Muon(model.named_parameters(), lr=0.1, adamw_lr=0.01)
    assert [(g["algorithm"], g["lr"]) for g in optimizer.param_groups] == [("muon", 0.1), ("adamw", 0.01)]
    extra = nn.Parameter(torch.randn(4, 4))
    optimizer.add_param_group({"params": [("layers.1.extra", extra)], "lr": 0.5})
    assert optimizer.param_groups[2]["lr"] == 0.5 and optimizer.param_groups[2]["momentum"] == 0.95
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure():
        optimizer.zero_grad()
        hidden = model["layers"][0](model["embed"](torch.arange(4)))
        loss = hidden.square().mean() + extra.square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.005, 0.25]
    assert optimizer.step(closure) < first
    twin_model = copy.deepcopy(model)
    twin_extra = nn.Parameter(extra.detach().clone())
    twin = Muon(twin_model.named_parameters(), lr=1.0)
    twin.add_param_group({"params": [("layers.1.extra", twin_extra)]})
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    duplicate = copy.deepcopy(optimizer)
    pairs = [*zip(model.parameters(), twin_model.parameters()), (extra, twin_extra)]
    closure()
    for a, b in pairs:
        b.grad = a.grad.clone()
    copies = [p for g in duplicate.param_groups for p in g["params"]]
    originals = [p for g in optimizer.param_groups for p in g["params"]]
    for a, b in zip(originals, copies):
        b.grad = a.grad.clone()
    for other in (optimizer, twin, duplicate):
        other.step()
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(torch.equal(a, b) for a, b in zip(originals, copies))


def test_describe_and_log(caplog) -> None:
    params = parameters((8, 6), (3, 4, 5), (4,))
    names = ["layers.0.qkv.weight", "layers.0.experts", "norm.weight"]
    optimizer = Muon(zip(names, params), split=lambda n, p: Fused(-2, (4, 2, 2)) if "qkv" in n else None)
    lines = optimizer.describe().splitlines()
    assert lines[0] == "layers.0.qkv.weight  (8, 6)  muon  1 of 4x6, 2 of 2x6"
    assert lines[1] == "layers.0.experts  (3, 4, 5)  muon  3 of 4x5"
    assert lines[2] == "norm.weight  (4,)  adamw"
    assert not caplog.records
    Muon(params)
    assert "without names" in caplog.text


def test_scales() -> None:
    assert scale_function(None, False)(8, 2) == 2.0 and scale_function(None, False)(2, 8) == 1.0
    assert scale_function("spectral", False)(2, 8) == 0.5 and scale_function("spectral", True)(2, 8) == 2.0
    assert scale_function("match_rms_adamw", False)(4, 25) == pytest.approx(1.0)
    assert scale_function("none", False)(4, 25) == 1.0


@pytest.mark.parametrize("shape", [(64, 64), (32, 200), (200, 32), (3, 48, 16)], ids=str)
def test_rms_matched_updates_have_the_size_of_adamws(shape) -> None:
    """0.2 whatever the shape, up to singular values that end between 0.65 and 1.25."""
    (parameter,) = params = parameters(shape)
    before = parameter.detach().clone()
    set_gradients(params)
    options = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0, "ns_dtype": torch.float32}
    Muon([muon_group([parameter])], lr=1.0, **options).step()
    assert 0.65 * 0.2 < (parameter.detach() - before).square().mean().sqrt() < 1.25 * 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be non-negative"),
        ({"lr": math.nan}, "lr must be non-negative"),
        ({"lr": None}, "lr must be non-negative, got None"),
        ({"momentum": 1.0}, "momentum"),
        ({"momentum": None}, "momentum must be in"),
        ({"bucket_numel": None}, "bucket_numel must be positive"),
        ({"ns_steps": 0}, "ns_steps"),
        ({"ns_coefficients": None}, "ns_coefficients"),
        ({"adjust_lr_fn": "magic"}, "adjust_lr_fn"),
        ({"ns_dtype": torch.float16}, "ns_dtype"),
        ({"buckets_in_flight": 4}, "buckets_in_flight"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients"),
        ({"ns_backend": "cublas"}, "ns_backend must be one of"),
        ({"ns_backend": "triton", "compile": True}, "compile=True compiles the plain"),
        ({"split": lambda n, p: Fused(-1, (3, 4))}, "layers.0.w: the sizes"),
    ],
)
def test_bad_options_name_themselves(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        Muon([("layers.0.w", parameters((4, 6))[0])], **options)


def test_bad_parameters_name_themselves() -> None:
    cases = {
        "at least two dims": parameters((4,))[0],
        "floating point": nn.Parameter(torch.ones(2, 2, dtype=torch.int32), requires_grad=False),
        "contiguous": nn.Parameter(torch.randn(4, 6).t()),
    }
    for message, parameter in cases.items():
        with pytest.raises(ValueError, match=f"some.weight: Muon needs .*{message}"):
            Muon([muon_group([("some.weight", parameter)])])
    with pytest.raises(ValueError, match="algorithm"):
        Muon([{"params": parameters((4, 4)), "algorithm": "sgd"}])
    with pytest.raises(ValueError, match="empty parameter list"):
        Muon([])
    with pytest.raises(TypeError, match="pairs of a name and a parameter, got 'w' and int"):
        Muon([("w", 3)])
    with pytest.raises(TypeError, match="got a set"):
        Muon([{"params": set(parameters((4, 4), (4, 4)))}])


def test_a_group_is_added_whole_or_not_at_all() -> None:
    """The AdamW half of a group cannot be added: its Muon half is not either, and training goes on."""
    first, vector, second = parameters((4, 4), (4,), (4, 4))
    optimizer = Muon([("layers.0.w", first), ("layers.0.norm.weight", vector)])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [("layers.1.w", second), ("layers.0.norm.weight", vector)]})
    assert [g["params"] for g in optimizer.param_groups] == [[first], [vector]]
    set_gradients([first, vector, second])
    optimizer.step()
    optimizer.add_param_group({"params": [("layers.1.w", second)]})
    before = second.detach().clone()
    optimizer.step()
    assert not torch.equal(second, before)


def test_sets_of_gradients_are_forgotten() -> None:
    """Gradients that come and go make new plans; old ones are dropped, and so are parameters taken out."""
    params = parameters(*[(4, 4)] * 12)
    optimizer = Muon([muon_group(params)], ns_dtype=torch.float32)
    for absent in range(12):
        set_gradients(params)
        params[absent].grad = None
        before = [p.detach().clone() for p in params]
        optimizer.step()
        assert [torch.equal(p, b) for p, b in zip(params, before)] == [i == absent for i in range(12)]
    optimizer.state.pop(params[0])
    optimizer.param_groups[0]["params"] = params[1:]
    taken_out = weakref.ref(params.pop(0))
    for absent in range(8):
        set_gradients(params)
        params[absent].grad = None
        optimizer.step()
    gc.collect()
    assert taken_out() is None


def test_stages_are_marked_in_profiles() -> None:
    (parameter,) = params = parameters((8, 6))
    set_gradients(params)
    optimizer = Muon([muon_group([parameter])])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    names = [event.name for event in profile.events() if event.name.startswith("Muon ")]
    assert names == ["Muon start 0", "Muon iterate 0", "Muon finish 0"]


def test_no_gradient_no_change() -> None:
    used, unused = parameters((4, 6), (6, 4))
    optimizer = Muon([muon_group([used, unused])])
    before = unused.detach().clone()
    set_gradients([used])
    optimizer.step()
    assert torch.equal(unused, before) and unused not in optimizer.state


def test_state_of_torchs_muon_and_state_that_does_not_fit() -> None:
    """A file of torch's optimizer lacks our options: they stay as they were. A wrong shape is refused."""
    shapes = [(24, 40), (16, 16)]
    mine, theirs = parameters(*shapes), parameters(*shapes)
    stock = torch.optim.Muon(theirs, lr=0.5)
    set_gradients(theirs)
    stock.step()
    ours = Muon([muon_group(mine)], lr=0.02, transposed=True)
    ours.load_state_dict(copy.deepcopy(stock.state_dict()))
    (group,) = ours.param_groups
    assert group["lr"] == 0.5 and group["algorithm"] == "muon" and group["transposed"]
    assert torch.equal(ours.state[mine[1]]["momentum_buffer"], stock.state[theirs[1]]["momentum_buffer"])
    wrong = stock.state_dict()
    wrong["state"][1] = {"momentum_buffer": torch.zeros(4, 4)}
    with pytest.raises(RuntimeError, match=r"\(16, 16\): state momentum_buffer must be .*got .*\(4, 4\)"):
        ours.load_state_dict(wrong)
    set_gradients(mine, seed=8)
    set_gradients(theirs, seed=8)
    ours.step()
    stock.step()
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(ours.state[a]["momentum_buffer"], stock.state[b]["momentum_buffer"])


def test_steps_of_the_inner_adamw_that_are_numbers_or_missing() -> None:
    (bias,) = parameters((9,))
    optimizer = Muon([("layers.0.bias", bias)], lr=0.02)
    set_gradients([bias])
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = 1.0  # as torch wrote it before 1.12
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.state[bias]["step"] == torch.tensor(2.0)
    del saved["state"][0]["step"]
    with pytest.raises(RuntimeError, match=r"layers.0.bias: state \['step'\] is missing"):
        optimizer.load_state_dict(saved)


def test_frozen_parameters_do_not_change() -> None:
    """Not even with a gradient from before, whichever algorithm is theirs."""
    params = parameters((8, 8), (9,))
    optimizer = Muon(zip(["layers.0.weight", "layers.0.bias"], params), lr=0.02)
    set_gradients(params)
    before = [p.requires_grad_(False).detach().clone() for p in params]
    optimizer.step()
    assert all(map(torch.equal, params, before))


def test_gradients_are_checked_before_anything_changes() -> None:
    """Those of the inner AdamW too."""
    names, params = ["layers.0.weight", "embed.weight"], parameters((8, 8), (9, 4))
    optimizer = Muon(zip(names, params), lr=0.02)
    before = [p.detach().clone() for p in params]
    set_gradients(params)
    params[1].grad = params[1].grad.to_sparse()
    with pytest.raises(RuntimeError, match=r"embed.weight: expected a dense gradient, got a sparse one"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before))


def test_a_group_has_options_of_its_own_for_its_adamw_half() -> None:
    """Its other options are for both halves."""
    matrix, bias, other = parameters((8, 8), (9,), (9,))
    group = {"params": [("layers.0.w", matrix), ("layers.0.bias", bias)], "lr": 0.5, "weight_decay": 0.3}
    own = {"adamw_lr": 0.01, "adamw_betas": (0.8, 0.9), "adamw_weight_decay": None}
    optimizer = Muon([{**group, **own}], lr=9.0, adamw_eps=1e-3)
    first, second = optimizer.param_groups
    assert (first["lr"], first["weight_decay"]) == (0.5, 0.3)
    found = [second[key] for key in ("lr", "weight_decay", "betas", "eps")]
    assert found == [0.01, 0.3, (0.8, 0.9), 1e-3]
    assert not any(key.startswith("adamw_") for group in optimizer.param_groups for key in group)
    with pytest.raises(ValueError, match="betas must be two"):
        optimizer.add_param_group({"params": [("layers.1.bias", other)], "adamw_betas": 0.9})


def test_a_parameter_that_is_laid_out_anew_is_refused() -> None:
    """Its elements are found by their places in memory: the update would be that of others."""
    kernel = nn.Conv2d(8, 8, 3, bias=False)
    weight = kernel.weight
    optimizer = Muon([muon_group([("layers.0.w", weight)])], split=lambda name, p: Flattened())
    kernel.to(memory_format=torch.channels_last)
    weight.grad = torch.randn_like(weight)
    before = weight.detach().clone()
    with pytest.raises(ValueError, match=r"layers.0.w: Muon needs contiguous parameters, got strides"):
        optimizer.step()
    assert torch.equal(weight, before) and not optimizer.state
