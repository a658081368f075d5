"""Muon's Triton kernels against the plain versions.

They run on a GPU, or on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch

from interpreted import DEVICE, INTERPRETED
from ragged_fsdp.optim.exchange.matrices import Spot
from ragged_fsdp.optim.muon import Muon
from ragged_fsdp.optim.muon.newton_schulz import orthogonalize, orthogonalize_reference, per_iteration
from ragged_fsdp.optim.muon.passes import Strided, apply_updates, update_momentum

if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)

from ragged_fsdp.optim.muon import newton_schulz_kernel as kernels
from ragged_fsdp.optim.muon import passes_kernel

COEFFICIENTS = per_iteration((3.4445, -4.7750, 2.0315), 5)
SHAPES = [(1, 256, 256), (3, 128, 640), (2, 1000, 264), (2, 72, 8), (1, 1536, 1536), (4, 520, 776)]
if INTERPRETED:
    SHAPES = SHAPES[:4]
needs_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a GPU")


@contextmanager
def passes_by_kernels():
    """The element-wise passes by their kernels: on the CPU those of the interpreter."""
    if not INTERPRETED:
        yield
        return
    with (
        mock.patch("ragged_fsdp.optim.muon.passes._kernels_take", lambda tensors: True),
        mock.patch.object(passes_kernel, "_table", lambda rows, device: torch.from_numpy(rows)),
    ):
        yield


def gradient_like(shape, decay: float) -> torch.Tensor:
    """Matrices with singular values that fall off; ``decay`` 0 is noise alone."""
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    x = torch.randn(shape, device=DEVICE, generator=generator, dtype=torch.float64)
    if decay:
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        s = torch.arange(1, s.shape[-1] + 1, device=DEVICE, dtype=torch.float64) ** -decay
        x = (u * s) @ vh
    return x * 1e-3


@pytest.mark.parametrize("decay", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_symmetric_iteration(shape, decay) -> None:
    """As close to the exact iteration as torch's products in bf16 are, repeatable, and without NaN."""
    x = gradient_like(shape, decay)
    exact = torch.stack([orthogonalize_reference(m, COEFFICIENTS, 1e-7) for m in x.bfloat16().double()])
    found = kernels.orthogonalize_symmetric(x.bfloat16().contiguous(), COEFFICIENTS, 1e-7)
    again = kernels.orthogonalize_symmetric(x.bfloat16().contiguous(), COEFFICIENTS, 1e-7)
    plain = orthogonalize(x.bfloat16(), COEFFICIENTS, 1e-7)
    assert torch.equal(found, again)
    error, usual = ((y.double() - exact).norm() / exact.norm() for y in (found, plain))
    assert error < 1.5 * usual + 0.01, (error, usual)


@pytest.mark.parametrize("config", [(128, 64, 4, 4), (128, 64, 3, 8), (64, 64, 3, 4)], ids=str)
@pytest.mark.parametrize("tall", [True, False])
def test_products(config, tall) -> None:
    """Each product equals torch's, is exactly symmetric, and its traces are the squared norms."""
    tiles = kernels.TileConfig(*config)
    x = gradient_like((3, 904, 328) if tall else (3, 328, 904), 0.0).bfloat16() * 30
    a = torch.empty(3, 328, 328, device=DEVICE, dtype=torch.bfloat16)
    traces = torch.empty(3, -(-328 // tiles.side), device=DEVICE)
    kernels.gram(x, a, traces, tall=tall, trace=True, config=tiles)
    expected = x.mT.float() @ x.float() if tall else x.float() @ x.mT.float()
    torch.testing.assert_close(a.float(), expected, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(traces.sum(1), x.float().square().sum((1, 2)), rtol=1e-3, atol=0.0)
    assert torch.equal(a, a.mT)
    out = torch.empty_like(a)
    terms = kernels.Terms(2.0, -3.0, 1.5, powers=(1, 3, 5))
    kernels.symmetric_product(a, a, out, traces, terms, 1e-7, config=tiles)
    s = (1.0 / traces.sum(1).sqrt())[:, None, None]
    exact = (
        2.0 * s * torch.eye(328, device=DEVICE)
        - 3.0 * s**3 * a.float()
        + 1.5 * s**5 * (a.float() @ a.float())
    )
    torch.testing.assert_close(out.float(), exact, rtol=1e-2, atol=1e-3 * float(exact.abs().max()))
    assert torch.equal(out, out.mT)


@needs_gpu
def test_small_and_odd_batches_keep_their_shape() -> None:
    """Sides that are no multiples of eight are padded; large enough batches go through the kernels."""
    for shape in [(40, 1021, 1021), (2, 7, 13)]:
        x = gradient_like(shape, 0.0).bfloat16()
        found = orthogonalize(x.clone(), COEFFICIENTS, 1e-7, backend="triton")
        plain = orthogonalize(x, COEFFICIENTS, 1e-7)
        assert found.shape == plain.shape
        assert (found.float() - plain.float()).norm() < 0.05 * plain.float().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0, 3, 16])
@pytest.mark.parametrize("nesterov", [True, False])
def test_elementwise_kernels(dtype, offset, nesterov) -> None:
    """One launch over many stretches equals torch's operations, aligned or not, with and without target."""
    sizes = [1, 17, 4096, 100_000]

    def parts(flat):
        starts = [offset + sum(-(-n // 16) * 16 for n in sizes[:i]) for i in range(len(sizes))]
        return [Strided(flat, Spot(start, 1, n, n)) for start, n in zip(starts, sizes)]

    total = offset + sum(-(-n // 16) * 16 for n in sizes)
    gradient, buffer, weight = (torch.randn(total, device=DEVICE).to(dtype) for _ in range(3))
    target = torch.zeros(total, device=DEVICE, dtype=torch.bfloat16)
    expected = [t.cpu().clone() for t in (gradient, buffer, weight, target)]
    for tensors, way in (
        ((gradient, buffer, weight, target), passes_by_kernels()),
        (expected, nullcontext()),
    ):
        g, b, w, t = tensors
        targets: list[Strided | None] = list(parts(t))
        targets[1] = None
        with way:
            update_momentum(parts(g), parts(b), targets, 0.95, nesterov)
            apply_updates(parts(w), parts(t), [0.1, 0.2, 0.3, 0.4], 0.9)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(buffer.cpu(), expected[1], **tolerance)
    torch.testing.assert_close(weight.cpu(), expected[2], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(target.cpu(), expected[3], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16, torch.float32)], ids=str)
def test_addresses_at_once_or_one_by_one(dtypes, monkeypatch) -> None:
    """The two ways to launch the element-wise passes give the same bits (mixed dtypes: only one way)."""
    shapes = [(40, 72), (72, 40), (3, 16, 24), (7, 13)] * 3
    results = []
    for at_once in (True, False):
        if not at_once:
            monkeypatch.setattr("ragged_fsdp.optim.muon.passes.addresses_of", lambda states: None)
        generator = torch.Generator(DEVICE).manual_seed(0)
        parameters = []
        for i, shape in enumerate(shapes):
            p = torch.nn.Parameter(
                torch.randn(shape, device=DEVICE, generator=generator).to(dtypes[i % len(dtypes)])
            )
            p.grad = torch.randn(shape, device=DEVICE, generator=generator).to(p.dtype)
            parameters.append(p)
        optimizer = Muon([{"params": parameters, "algorithm": "muon"}], lr=0.1, adjust_lr_fn="spectral")
        for _ in range(2):
            with passes_by_kernels():
                optimizer.step()
        results.append([t for p in parameters for t in (p.detach(), optimizer.state[p]["momentum_buffer"])])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@needs_gpu
@pytest.mark.parametrize(
    "options", [{"ns_backend": "triton"}, {"ns_backend": "plain", "compile": True}], ids=str
)
def test_step_equals_the_cpu(options) -> None:
    """A step on the GPU, with Triton or compiled, is that of the CPU up to bf16."""
    shapes = [(768, 2048), (4, 264, 512), (512, 512)]
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    results = []
    for device, extra in (("cuda", options), ("cpu", {"ns_dtype": torch.float32})):
        parameters = [torch.nn.Parameter(t.clone().to(device)) for t in start]
        for p, g in zip(parameters, gradients):
            p.grad = g.to(device)
        optimizer = Muon([{"params": parameters, "algorithm": "muon"}], lr=0.1, **extra)
        optimizer.step()
        results.append([p.detach().cpu() for p in parameters])
    for found, wanted, before in zip(*results, start):
        assert (found - wanted).norm() < 0.05 * (wanted - before).norm()
