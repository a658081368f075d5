"""The Triton kernel of 8-bit Adam: the bits of the CPU reference, and one launch for many parameters.

It runs on a GPU, or on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

import random
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from interpreted import DEVICE, INTERPRETED
from optim_cases import SHAPES, gradients, plain_parameters, set_grads
from ragged_fsdp.optim import Adam8bit, AdamW8bit
from ragged_fsdp.optim.adam8bit import optimizer as of_adam

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU or Triton's interpreter"
)


@contextmanager
def by(way):
    """Updates by the reference or by the kernels: on the CPU those of the interpreter."""
    if way == "kernels" and INTERPRETED:
        contiguous = property(lambda slot: slot.weight.is_contiguous())
        with mock.patch.object(of_adam._Slot, "has_kernel", contiguous):
            yield DEVICE
    else:
        yield DEVICE if way == "kernels" else "cpu"


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
    for way in ("reference", "kernels"):
        with by(way) as device:
            params = plain_parameters(device)
            params = {n: torch.nn.Parameter(p.detach().to(dtype)) for n, p in params.items()}
            optimizer = kind(params.items(), lr=1e-2, weight_decay=0.1, **options)
            for step in range(2 if INTERPRETED else 4):
                set_grads(params, {n: g.to(dtype) for n, g in gradients(step, device).items()})
                optimizer.step()
            optimizers.append((optimizer, params))
    (reference, expected), (ours, params) = optimizers
    for name in SHAPES:
        assert torch.equal(expected[name].detach(), params[name].detach().cpu()), name
        for key, value in reference.state[expected[name]].items():
            assert torch.equal(value, ours.state[params[name]][key].cpu()), (name, key)


@pytest.mark.parametrize("seed", range(4))
def test_bits_of_the_reference_for_drawn_shapes(seed):
    """Any number of rows, columns and elements, with blocks and runs of any size."""
    draw = random.Random(seed)
    shapes = {f"matrix {i}": (draw.randint(1, 150), draw.randint(1, 700)) for i in range(2)}
    shapes |= {"batch": (draw.randint(1, 3), draw.randint(1, 40), draw.randint(1, 200))}
    shapes |= {"vector": (draw.randint(1, 5000),), "one": (1,)}
    options = {
        "block_shape": draw.choice([None, (32, 32), (1 << draw.randint(0, 5), 1 << draw.randint(3, 8))]),
        "run": 1 << draw.randint(5, 11),
        "min_8bit_numel": draw.choice([1, 1000]),
        "stochastic_rounding": bool(seed % 2),
    }
    found = []
    for way in ("reference", "kernels"):
        with by(way) as device:
            params = plain_parameters(device, shapes)
            optimizer = AdamW8bit(params.items(), **options)
            for step in range(2):
                set_grads(params, gradients(step, device, shapes))
                optimizer.step()
            found.append(
                [t.detach().cpu() for p in params.values() for t in (p, *optimizer.state[p].values())]
            )
    assert all(torch.equal(one, other) for one, other in zip(*found)), (shapes, options)


def test_not_a_number_poisons_its_block_only():
    with by("kernels") as device:
        param = torch.nn.Parameter(torch.ones(128, 128, device=device))
        param.grad = torch.ones_like(param)
        param.grad[40, 70] = float("nan")
        optimizer = AdamW8bit([param])
        optimizer.step()
        optimizer.step()
    poisoned = param.detach().isnan()
    assert bool(poisoned[32:64, 64:96].all()) and int(poisoned.sum()) == 32 * 32


def test_bits_of_the_reference_beyond_the_finite():
    weights, states = [], []
    for way in ("reference", "kernels"):
        with by(way) as device:
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
    weight = torch.randn(64, 128, device=DEVICE)
    plain, strided = (torch.nn.Parameter(w) for w in (weight.clone(), weight.t().contiguous().t()))
    optimizer = AdamW8bit([plain, strided], min_8bit_numel=1)
    for step in range(3):
        grad = torch.randn(64, 128, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(step))
        plain.grad, strided.grad = grad.clone(), grad.t().contiguous().t()
        with by("kernels"):
            optimizer.step()
    assert torch.equal(plain.detach(), strided.detach())
