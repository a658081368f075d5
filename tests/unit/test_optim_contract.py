"""What any optimizer of torch can do: closures, schedulers, groups, copies, files, and errors that name."""

import copy
import io
import logging

import pytest
import torch
from torch import nn

from ragged_fsdp.optim import AdamW8bit, FusedAdamW, FusedSGD, Shampoo

OPTIMIZERS = {
    "8bit": lambda p, **o: AdamW8bit(p, **{"lr": 1e-2, **o}),
    "fused": lambda p, **o: FusedAdamW(p, **{"lr": 1e-2, **o}),
    "sgd": lambda p, **o: FusedSGD(p, **{"lr": 1e-2, "momentum": 0.9, **o}),
    "shampoo": lambda p, **o: Shampoo(p, **{"lr": 1e-2, "block_shape": (32, 32), "start_step": 1, **o}),
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


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
    for other, _ in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_groups_added_later_and_options_refused(kind):
    model = _model()
    optimizer = OPTIMIZERS[kind](model.named_parameters())
    _step(model, optimizer, 0)
    late = nn.Parameter(torch.ones(64, 64))
    for bad in ({"lr": -1.0}, {"weight_decay": float("nan")}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must be non-negative"):
            optimizer.add_param_group({"params": [("late", late)], **bad})
    whole = nn.Parameter(torch.ones(4, dtype=torch.int32), requires_grad=False)
    with pytest.raises(TypeError, match=r"counts: expected a floating-point parameter, got torch.int32"):
        optimizer.add_param_group({"params": [("counts", whole)]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [("late", late)], "lr": torch.tensor(0.5)})
    late.grad = torch.ones_like(late)
    steps = optimizer.state[model[0].weight]["step"].clone()
    optimizer.step()
    assert bool((late < 1).all()) and optimizer.state[late]["step"] == 1
    assert optimizer.state[model[0].weight]["step"] == steps + 1


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


def test_state_of_another_kind_is_refused_by_name():
    model = _model()
    optimizer = AdamW8bit(model.named_parameters())
    _step(model, optimizer, 0)
    other = AdamW8bit(model.named_parameters(), exclude=("*",))
    state = optimizer.state_dict()
    state["param_groups"][0]["exclude"] = ("*",)
    other.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"0.weight: state \['exp_avg', 'exp_avg_sq'\] is missing"):
        _step(model, other, 1)
