"""The Triton kernel of 8-bit Adam: the bits of the CPU reference, and one launch for many parameters."""

import pytest
import torch

from optim_cases import SHAPES, gradients, plain_parameters, set_grads
from ragged_fsdp.optim import Adam8bit, AdamW8bit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stochastic_rounding": True, "seed": 3},
        {"block_shape": (128, 128), "maximize": True},
        {"block_shape": (16, 64), "run": 64, "min_8bit_numel": 1},
    ],
    ids=lambda o: "-".join(o) or "default",
)
@pytest.mark.parametrize("kind", [Adam8bit, AdamW8bit])
def test_bits_of_the_reference(dtype, options, kind):
    optimizers = []
    for device in ("cpu", "cuda"):
        params = plain_parameters(device)
        params = {n: torch.nn.Parameter(p.detach().to(dtype)) for n, p in params.items()}
        optimizer = kind(params.items(), lr=1e-2, weight_decay=0.1, **options)
        for step in range(4):
            set_grads(params, {n: g.to(dtype) for n, g in gradients(step, device).items()})
            optimizer.step()
        optimizers.append((optimizer, params))
    (reference, expected), (ours, params) = optimizers
    for name in SHAPES:
        assert torch.equal(expected[name].detach(), params[name].detach().cpu()), name
        for key, value in reference.state[expected[name]].items():
            assert torch.equal(value, ours.state[params[name]][key].cpu()), (name, key)


def test_not_a_number_poisons_its_block_only():
    param = torch.nn.Parameter(torch.ones(128, 128, device="cuda"))
    param.grad = torch.ones_like(param)
    param.grad[40, 70] = float("nan")
    optimizer = AdamW8bit([param])
    optimizer.step()
    optimizer.step()
    poisoned = param.detach().isnan()
    assert bool(poisoned[32:64, 64:96].all()) and int(poisoned.sum()) == 32 * 32


def test_bits_of_the_reference_beyond_the_finite():
    weights, states = [], []
    for device in ("cpu", "cuda"):
        param = torch.nn.Parameter(torch.linspace(-1, 1, 128 * 96, device=device).view(128, 96))
        optimizer = AdamW8bit([param])
        for value in (float("nan"), -torch.inf, torch.inf, -3e38, 1e-38, 0.0):
            param.grad = torch.linspace(-1, 1, param.numel(), device=device).view_as(param)
            param.grad[:, 32:64] *= 0
            param.grad[int(abs(value) > 1) * 40, 70] = value
            optimizer.step()
        weights.append(param.detach().cpu())
        states.append({k: v.cpu() for k, v in optimizer.state[param].items()})
    torch.testing.assert_close(*weights, rtol=0, atol=0, equal_nan=True)
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=0, atol=0, equal_nan=True, msg=key)


def test_gradients_may_move_and_parameters_may_be_strided():
    weight = torch.randn(64, 128, device="cuda")
    plain, strided = (torch.nn.Parameter(w) for w in (weight.clone(), weight.t().contiguous().t()))
    optimizer = AdamW8bit([plain, strided], min_8bit_numel=1)
    for step in range(3):
        grad = torch.randn(64, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        plain.grad, strided.grad = grad.clone(), grad.t().contiguous().t()
        optimizer.step()
    assert torch.equal(plain.detach(), strided.detach())
