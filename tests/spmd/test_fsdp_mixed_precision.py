"""Parameter, reduction, input and output dtypes."""

import dataclasses

import pytest
import torch
from torch import nn

from fsdp_cases import (
    DIM,
    FeedForward,
    Transformer,
    average_gradients,
    backward_through,
    build,
    fsdp,
    full,
    fully_shard,
    in_dtype,
    relative_error,
    rows,
    shard_blocks,
    tokens,
)
from rank_pool import spmd

BF16 = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
BF16_FP32 = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class _Recorder(nn.Module):
    """Notes the dtypes it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.seen = []

    def forward(self, x, *rest, **named):
        self.seen = [x.dtype, self.linear.weight.dtype]
        return self.linear(x.to(self.linear.weight.dtype))


@spmd(2)
def test_compute_runs_in_the_parameter_dtype_and_masters_stay(rank):
    model = _Recorder().to(rank.device)
    fully_shard(model, mp_policy=BF16)
    out = model(rows(rank, 0))
    assert model.seen == [torch.bfloat16, torch.bfloat16]
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("cast", [True, False])
@spmd(1)
def test_inputs_are_cast_only_if_asked(rank, cast):
    model = _Recorder().to(rank.device)
    fully_shard(model, mp_policy=dataclasses.replace(BF16, cast_forward_inputs=cast))
    model(rows(rank, 0))
    assert model.seen[0] == (torch.bfloat16 if cast else torch.float32)


@spmd(1)
def test_output_dtype_reaches_into_structures(rank):
    class Structured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x, *, named):
            y = self.linear(x)
            return {"a": [y, y.argmax(-1)], "b": (named["k"], "text")}

    model = Structured().to(rank.device)
    policy = dataclasses.replace(BF16, output_dtype=torch.float32)
    out = fully_shard(model, mp_policy=policy)(rows(rank, 0), named={"k": rows(rank, 1)})
    assert out["a"][0].dtype == out["b"][0].dtype == torch.float32
    assert out["a"][1].dtype == torch.int64
    assert out["b"][1] == "text"


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16, None])
@spmd(3)
def test_training_follows_a_bf16_reference(rank, reduce_dtype):
    """bf16 compute and the chosen reduction; the reference does both by hand with fp32 masters."""
    exact = reduce_dtype == torch.float32  # else sums are rounded, and a token may go to another expert
    model, reference = build(lambda: Transformer(moe=exact), rank.device)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    shard_blocks(model, mp_policy=policy)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, reference)]
    for step in range(4):
        loss = model(tokens(rank, step))
        loss.backward()
        expected = backward_through(reference, in_dtype(reference, torch.bfloat16), tokens(rank, step))
        assert abs(loss.item() - expected.item()) <= 2e-2 * abs(expected.item())
        average_gradients(reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    bound = 1e-4 if exact else 5e-2  # zero-initialised biases hold nothing but the rounded sums
    for (name, p), q in zip(model.named_parameters(), reference.parameters()):
        error = relative_error(full(p), q.detach())
        assert error < bound, f"{name}: {error}"


@spmd(2)
def test_fp32_reduction_of_bf16_gradients_is_exact(rank):
    model, reference = build(FeedForward, rank.device)
    fully_shard(model, mp_policy=BF16_FP32)
    model(rows(rank, 0)).float().square().sum().backward()
    weights = in_dtype(reference, torch.bfloat16)
    backward_through(reference, weights, rows(rank, 0).bfloat16(), lambda out: out.float().square().sum())
    average_gradients(reference)
    for (name, p), q in zip(model.named_parameters(), reference.parameters()):
        assert torch.equal(full(p.grad), q.grad), name


@spmd(2)
def test_policies_differ_by_module(rank):
    model = nn.Sequential(_Recorder(), _Recorder()).to(rank.device)
    fully_shard(model[0], mp_policy=BF16)
    fully_shard(model[1], mp_policy=fsdp.MixedPrecisionPolicy())
    fully_shard(model)
    model(rows(rank, 0)).sum().backward()
    assert model[0].seen[1] == torch.bfloat16
    assert model[1].seen[1] == torch.float32


@spmd(2)
def test_a_model_in_bf16_keeps_bf16_everywhere(rank):
    model = FeedForward().to(rank.device, torch.bfloat16)
    fully_shard(model)
    model(rows(rank, 0).bfloat16()).sum().backward()
    for parameter in model.parameters():
        assert parameter.dtype == parameter.grad.dtype == parameter.grad.to_local().dtype == torch.bfloat16


@spmd(2)
def test_parameters_of_several_dtypes_in_one_group(rank):
    """A frozen low-precision weight beside trainable fp32 ones, as in adapters."""
    model, reference = build(FeedForward, rank.device)
    for module in (model, reference):
        module.up.weight = nn.Parameter(module.up.weight.detach().bfloat16(), requires_grad=False)

    def forward(module, x):
        hidden = torch.nn.functional.linear(x, module.up.weight.float(), module.up.bias)
        return module.down(hidden)

    for cls in {type(model), type(reference)}:
        cls.mixed = forward
    fully_shard(model)
    fsdp.register_fsdp_forward_method(model, "mixed")
    out, expected = model.mixed(rows(rank, 0)), reference.mixed(rows(rank, 0))
    assert torch.equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    average_gradients(reference)
    assert model.up.weight.grad is None
    assert model.up.weight.dtype == torch.bfloat16
    for name in ("up.bias", "down.weight", "down.bias"):
        assert torch.equal(full(model.get_parameter(name).grad), reference.get_parameter(name).grad), name


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "inf"])
@spmd(2)
def test_gradient_scaler(rank, bad):
    """Unscaling, and skipping a step on all ranks when one of them overflowed."""
    model, reference = build(FeedForward, rank.device)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(rank.device, init_scale=4.0, growth_interval=1)
    loss = model(rows(rank, 0)).square().mean()
    scaler.scale(loss).backward()
    if bad:
        local = next(p.grad.to_local() for p in model.parameters() if p.grad.to_local().numel())
        if rank.rank == 0:
            local.view(-1)[0] = float("inf")
    else:
        reference(rows(rank, 0)).square().mean().backward()
        average_gradients(reference)
        expected.step()
    scaler.step(optimizer)
    scaler.update()
    for (name, p), q in zip(model.named_parameters(), reference.named_parameters()):
        assert relative_error(full(p), q[1].detach()) < 1e-6, name
    assert scaler.get_scale() == (2.0 if bad else 8.0)
