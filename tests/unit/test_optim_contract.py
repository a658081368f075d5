"""What any optimizer of torch can do: closures, schedulers, groups, copies, files, and errors that name."""

import copy
import io
import logging

import pytest
import torch
from torch import nn

from ragged_fsdp.optim import AdamW8bit, FusedAdamW, FusedSGD, Muon, Shampoo, offload_state

OPTIMIZERS = {
    "8bit": lambda p, **o: AdamW8bit(p, **{"lr": 1e-2, **o}),
    "fused": lambda p, **o: FusedAdamW(p, **{"lr": 1e-2, **o}),
    "sgd": lambda p, **o: FusedSGD(p, **{"lr": 1e-2, "momentum": 0.9, **o}),
    "shampoo": lambda p, **o: Shampoo(p, **{"lr": 1e-2, "block_shape": (32, 32), "start_step": 1, **o}),
}


EVERY = {**OPTIMIZERS, "muon": lambda p, **o: Muon(p, **{"lr": 1e-2, "ns_dtype": torch.float32, **o})}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


def _are_equal(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters()))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        return loss

    return optimizer.step(closure)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_copies_and_files_continue_alike(kind):
    model = _model()
    optimizer = OPTIMIZERS[kind](model.named_parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    losses = []
    for step in range(4):
        losses.append(_step(model, optimizer, step))
        schedule.step()
    assert losses[-1].requires_grad and losses[-1] < losses[0]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 4)

    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = _model()
    loaded.load_state_dict(model.state_dict())
    from_file = OPTIMIZERS[kind](loaded.named_parameters())
    from_file.load_state_dict(torch.load(file, weights_only=True))
    runs = [(model, optimizer), (loaded, from_file), copy.deepcopy((model, optimizer))]
    for step in (4, 5):
        for run in runs:
            _step(*run, step)
    for other, copied in runs[1:]:
        assert _are_equal(model, other)
        late = nn.Parameter(torch.ones(64, 64))
        copied.add_param_group({"params": [("late", late)]})  # a copy is an optimizer like any other
        late.grad = torch.ones_like(late)
        copied.step()
        assert bool((late < 1).all())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_that_is_cleared_or_exchanged_is_what_counts(kind):
    """Steps are prepared from where the state lies: what users do to it between steps must be seen."""
    model = _model()
    optimizer = OPTIMIZERS[kind](model.named_parameters())
    for step in range(2):
        _step(model, optimizer, step)
    for exchange in (lambda value: value.clone(), torch.zeros_like):
        for entries in optimizer.state.values():
            for key in entries:
                entries[key] = exchange(entries[key])
        expected = copy.deepcopy((model, optimizer))
        for run in (expected, (model, optimizer)):
            _step(*run, 2)
        assert _are_equal(model, expected[0])
        for ours, theirs in zip(optimizer.state.values(), expected[1].state.values()):
            assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    first = optimizer.state[model[0].weight]
    key = next(key for key in first if key != "step")
    first[key] = first[key][:1]
    with pytest.raises(RuntimeError, match=rf"0.weight: state {key} must be"):
        _step(model, optimizer, 3)
    optimizer.state.clear()
    anew = copy.deepcopy(model)
    _step(model, optimizer, 3)
    _step(anew, OPTIMIZERS[kind](anew.named_parameters()), 3)
    assert _are_equal(model, anew) and len(optimizer.state) == 4


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_that_gets_other_memory_is_what_counts(kind, offloaded):
    """The tensors are the same objects: who moves ``value.data`` away and back exchanges none of them."""
    model = _model()
    optimizer = OPTIMIZERS[kind](model.named_parameters())
    optimizer = offload_state(optimizer) if offloaded else optimizer
    for step in range(2):
        _step(model, optimizer, step)
    unmoved = copy.deepcopy((model, optimizer))
    for entries in optimizer.state.values():
        for value in entries.values():
            value.data = value.data.clone()
    for run in (unmoved, (model, optimizer)):
        for step in (2, 3):
            _step(*run, step)
    assert _are_equal(model, unmoved[0])
    for ours, theirs in zip(optimizer.state.values(), unmoved[1].state.values()):
        assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    for entries in optimizer.state.values():
        for value in entries.values():
            value.data = value.data.zero_().clone()
    for run in ((model, optimizer), (unmoved[0], OPTIMIZERS[kind](unmoved[0].named_parameters()))):
        _step(*run, 4)
    assert _are_equal(model, unmoved[0])


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_comes_twice_is_refused(kind):
    """It would be updated twice in a step, with a momentum each of which one is saved."""
    one, two = nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(64, 64))
    with pytest.raises(ValueError, match="b: the same parameter as a; an optimizer takes each of them once"):
        EVERY[kind]([("a", one), ("b", one)])
    optimizer = EVERY[kind]([("a", one)])
    with pytest.raises(ValueError, match="c: the same parameter as b;"):
        optimizer.add_param_group({"params": [("b", two), ("c", two)]})
    assert len(optimizer.param_groups) == 1
    one.grad = torch.ones_like(one)
    optimizer.step()


def test_state_of_torchs_optimizers_and_back():
    options = {"lr": 1e-2, "amsgrad": True}
    for theirs in (False, True):
        makers = [lambda p: FusedAdamW(p, **options), lambda p: torch.optim.AdamW(p, fused=True, **options)]
        saved_by, loaded_by = makers[theirs], makers[not theirs]
        model = _model()
        optimizer = saved_by(model.named_parameters())
        for step in range(3):
            _step(model, optimizer, step)
        other = copy.deepcopy(model)
        resumed = loaded_by(other.named_parameters())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        resumed.param_groups[0]["fused"] = True  # torch takes this option from the file
        for run in ((model, optimizer), (other, resumed)):
            _step(*run, 3)
        assert _are_equal(model, other)


def test_a_compiled_step_runs_as_it_is():
    """Tracing would specialise on counts and addresses; a step is left out of a graph instead."""
    for make in (OPTIMIZERS["shampoo"], lambda p: Muon(p, ns_dtype=torch.float32)):
        runs = []
        for compiled in (False, True):
            model = _model()
            optimizer = make(model.named_parameters())
            take_step = torch.compile(lambda o: o.step(), backend="eager") if compiled else lambda o: o.step()
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            for _ in range(2):
                take_step(optimizer)
            runs.append(model)
        assert _are_equal(*runs)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_groups_added_later_and_options_refused(kind):
    model = _model()
    optimizer = OPTIMIZERS[kind](model.named_parameters())
    _step(model, optimizer, 0)
    late = nn.Parameter(torch.ones(64, 64))
    for option, value in {"betas": None, "block_shape": 32, "exclude": [1], "dampening": "a"}.items():
        if option in optimizer.defaults:
            with pytest.raises(ValueError, match=f"{option} must be "):
                OPTIMIZERS[kind](_model().named_parameters(), **{option: value})
    for bad in ({"lr": -1.0}, {"weight_decay": float("nan")}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must be non-negative"):
            optimizer.add_param_group({"params": [("late", late)], **bad})
    whole = nn.Parameter(torch.ones(4, dtype=torch.int32), requires_grad=False)
    with pytest.raises(TypeError, match=r"counts: expected a floating-point parameter, got torch.int32"):
        optimizer.add_param_group({"params": [("counts", whole)]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [("late", late)], "lr": torch.tensor(0.5)})
    late.grad = torch.ones_like(late)
    optimizer.step()
    assert bool((late < 1).all())
    if kind != "sgd":  # whose state has no counts
        assert [optimizer.state[p]["step"] for p in (model[0].weight, late)] == [2, 1]


def test_one_log_line_names_the_parameters_in_fp32(caplog):
    caplog.set_level(logging.INFO, logger="ragged_fsdp.optim")
    model = _model()
    optimizer = AdamW8bit(model.named_parameters(), exclude="2.*")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "8-bit state for 1 parameters (6144 elements)" in line and line.endswith(
        "0.bias, 2.weight, 2.bias"
    )
    _step(model, optimizer, 0)
    assert "exp_avg_codes" in optimizer.state[model[0].weight]
    assert optimizer.state[model[2].weight]["exp_avg"].dtype == torch.float32
    optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(8)))]})
    assert len(caplog.records) == 2 and caplog.records[-1].getMessage().endswith(": late")
    with pytest.raises(ValueError, match=r"exclude=.* matches names, but parameters came without"):
        AdamW8bit(model.parameters(), exclude=["2.*"])


def test_state_that_does_not_fit_is_refused_by_name_and_changes_nothing():
    model = _model()
    optimizer = AdamW8bit(model.named_parameters())
    _step(model, optimizer, 0)
    saved = optimizer.state_dict()

    def changed(**entries):
        return {**saved, "state": {**saved["state"], 0: {**saved["state"][0], **entries}}}

    other_kind = copy.deepcopy(saved)
    other_kind["param_groups"][0]["exclude"] = ("*",)
    negative = copy.deepcopy(saved)
    negative["param_groups"][0]["lr"] = -1.0
    scales, codes = (saved["state"][0][f"exp_avg_{key}"] for key in ("scales", "codes"))
    refused = [
        (other_kind, RuntimeError, r"0.weight: state \['exp_avg', 'exp_avg_sq'\] is missing"),
        (negative, ValueError, "lr must be non-negative, got -1"),
        (
            changed(exp_avg_scales=scales[:1]),
            RuntimeError,
            r"0.weight: state exp_avg_scales .*\(3, 2\).*\(1, 2\)",
        ),
        (changed(exp_avg_codes=codes.float()), RuntimeError, r"exp_avg_codes must be .*uint8, got .*float32"),
    ]
    twin = copy.deepcopy((model, optimizer))
    for state, error, message in refused:
        with pytest.raises(error, match=message):
            optimizer.load_state_dict(state)
    for run in (twin, (model, optimizer)):
        _step(*run, 1)
    assert _are_equal(model, twin[0])
    for kind in ("fused", "shampoo", "sgd"):
        with pytest.raises(RuntimeError, match=r"0.weight: state .* is missing, found \['exp_avg_codes'"):
            OPTIMIZERS[kind](model.named_parameters()).load_state_dict(
                {
                    **saved,
                    "param_groups": OPTIMIZERS[kind](model.named_parameters()).state_dict()["param_groups"],
                }
            )


@pytest.mark.parametrize("kind", EVERY)
def test_hooks_on_loading_see_tensors(kind):
    """A hook may adapt what is loaded, as torch's for other orders of parameters do, or look at it after."""
    model = _model()
    optimizer = EVERY[kind](model.named_parameters())
    _step(model, optimizer, 0)
    key = next(key for key in optimizer.state[model[0].weight] if key != "step")
    wanted = torch.full_like(optimizer.state[model[0].weight][key], 3)
    seen = []

    def adapt(_, loaded):
        values = loaded["state"]
        assert all(isinstance(value, torch.Tensor) for value in values[0].values())
        return {**loaded, "state": {**values, 0: {**values[0], key: wanted}}}

    optimizer.register_load_state_dict_pre_hook(adapt)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[model[0].weight][key]))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(seen[0], wanted)


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("kind", EVERY)
def test_a_load_that_is_stopped_changes_nothing(kind, offloaded):
    """Ctrl-C raises anywhere; here while the state is made."""
    sides = [_model(), _model()]
    optimizers = [EVERY[kind](model.named_parameters()) for model in sides]
    if offloaded:
        offload_state(optimizers[0])
    for model, optimizer in zip(sides, optimizers):
        _step(model, optimizer, 0)
    other = copy.deepcopy(optimizers[0].state_dict())
    other["param_groups"][0]["lr"] = 0.5

    def stop(_):
        raise KeyboardInterrupt

    handle = optimizers[0].register_load_state_dict_post_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        optimizers[0].load_state_dict(other)
    handle.remove()
    for model, optimizer in zip(sides, optimizers):
        _step(model, optimizer, 1)
    assert _are_equal(*sides)


@pytest.mark.parametrize("kind", EVERY)
def test_a_gradient_that_is_refused_changes_nothing(kind):
    model = _model()
    optimizer = EVERY[kind](model.named_parameters())
    before = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model[2].weight.grad = torch.ones_like(model[2].weight).to_sparse()
    with pytest.raises(RuntimeError, match=r"2\.weight: expected a dense gradient, got a sparse one"):
        optimizer.step()
    assert _are_equal(model, before) and not optimizer.state


@pytest.mark.parametrize("kind", EVERY)
def test_weights_keep_their_digits(kind):
    """Those of fp64 are not rounded to fp32 on the way."""
    model = _model().double().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(1 + 1e-12).requires_grad_()
    optimizer = EVERY[kind](model.named_parameters(), weight_decay=0.0)
    before = copy.deepcopy(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert _are_equal(model, before)


@pytest.mark.parametrize("kind", EVERY)
def test_a_parameter_between_others_that_gets_other_memory(kind):
    flat = torch.randn(3 * 256)
    params = [nn.Parameter(part.view(16, 16)) for part in flat.split(256)]
    optimizer = EVERY[kind]([(f"layers.{i}.w", p) for i, p in enumerate(params)])
    for p in params:
        p.grad = torch.randn(16, 16)
    optimizer.step()
    params[1].data = params[1].data.clone()
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert not any(map(torch.equal, params, before))


def test_memory_that_is_refused_is_refused_until_it_is_right():
    """A step that raised must not take the new address for one it knows: it would update the old memory."""
    weight = nn.Parameter(torch.ones(16, 8))
    optimizer = FusedAdamW([("w", weight)])
    weight.grad = torch.ones(16, 8)
    optimizer.step()
    weight.data = torch.ones(8, 16).t()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"w: expected a contiguous parameter, got stride \(1, 16\)"):
            optimizer.step()
    weight.data = torch.ones(16, 8)
    optimizer.step()
    assert bool((weight < 1).all())


def test_momentum_that_begins_late_and_no_state_without_it():
    params = [nn.Parameter(torch.ones(9)) for _ in range(4)]
    ours = FusedSGD(params[:2], lr=0.1, dampening=0.5)
    theirs = torch.optim.SGD(params[2:], lr=0.1, dampening=0.5, foreach=False)
    for step in range(7):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["momentum"] = 0.9 if step in (2, 3, 6) else 0.0
            for index, p in enumerate(optimizer.param_groups[0]["params"]):
                p.grad = None if (index, step) == (1, 2) else torch.full((9,), 1.0 + step)
            optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert len(ours.state) == len(theirs.state)
        for left, right in zip(params[:2], params[2:]):
            torch.testing.assert_close(left, right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_two_bytes_on_the_host(dtype):
    """torch's fused kernel of SGD leaves all of them but the last few as they were."""
    for options in ({}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "dampening": 0.5}):
        params = [nn.Parameter(torch.linspace(-1, 1, 100).to(kind)) for kind in (dtype, torch.float32)]
        optimizers = [FusedSGD([p], lr=0.1, weight_decay=0.1, **options) for p in params]
        for step in range(3):
            for p, optimizer in zip(params, optimizers):
                p.grad = torch.full_like(p, 1.0 + step)
                optimizer.step()
        torch.testing.assert_close(params[0].float(), params[1], rtol=0.02, atol=0.02)
        for left, right in zip(optimizers[0].state.values(), optimizers[1].state.values()):
            momentum = [entries["momentum_buffer"].float() for entries in (left, right)]
            torch.testing.assert_close(*momentum, rtol=0.02, atol=0.02)


def test_frozen_neighbours_take_no_memory():
    params = [nn.Parameter(part) for part in torch.zeros(3000).split(1000)]
    for p in (params[0], params[2]):
        p.requires_grad_(False)
    optimizer = FusedAdamW(params)
    params[1].grad = torch.ones(1000)
    optimizer.step()
    assert optimizer.state[params[1]]["exp_avg"].untyped_storage().nbytes() == 4000


def test_step_counts_are_read_from_the_state():
    """A value that arrives by a broadcast, or through NumPy, raises no version counter."""
    for kind in ("8bit", "fused", "shampoo"):
        sides = [_model(), _model()]
        optimizers = [OPTIMIZERS[kind](model.named_parameters()) for model in sides]
        for step in range(3):
            _step(sides[0], optimizers[0], step)
        _step(sides[1], optimizers[1], 0)
        sides[1].load_state_dict(sides[0].state_dict())
        for ours, theirs in zip(optimizers[1].state.values(), optimizers[0].state.values()):
            for key, value in theirs.items():
                ours[key].detach().numpy()[...] = value.numpy()
        for side, optimizer in zip(sides, optimizers):
            _step(side, optimizer, 3)
        assert _are_equal(*sides), kind


def test_a_default_device_does_not_matter():
    """Counts of steps are on the host: each step reads them."""
    for kind in EVERY:
        models = [_model(), _model()]
        for model, device in zip(models, ("cpu", "meta")):
            with torch.device(device):
                optimizer = EVERY[kind](model.named_parameters())
                for _ in range(2):
                    for parameter in model.parameters():
                        parameter.grad = torch.ones_like(parameter)
                    optimizer.step()
            steps = [entries["step"] for entries in optimizer.state.values() if "step" in entries]
            assert all(step.device.type == "cpu" and step == 2 for step in steps), kind
        assert _are_equal(*models), kind


@pytest.mark.parametrize("kind", ["8bit", "shampoo"])
def test_a_group_may_exclude_by_one_pattern(kind):
    """As the constructor: its letters are no patterns, of which ``*`` would match every name."""
    model = _model()
    group = {"params": list(model.named_parameters()), "exclude": "2.*"}
    optimizer = OPTIMIZERS[kind]([group])
    _step(model, optimizer, 0)
    own = "exp_avg_codes" if kind == "8bit" else "left_root"
    assert [own in optimizer.state[model[i].weight] for i in (0, 2)] == [True, False]
    with pytest.raises(ValueError, match=r"exclude must be patterns of names, got \[1\]"):
        OPTIMIZERS[kind]([{**group, "exclude": [1]}])


@pytest.mark.parametrize("kind", EVERY)
def test_texts_are_no_numbers(kind):
    """YAML reads 1e-3 as one: it would fail in the first step, behind the gradients."""
    for option in ({"lr": "1e-3"}, {"weight_decay": "0.1"}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} must be non-negative, got '"):
            EVERY[kind](_model().named_parameters(), **option)
