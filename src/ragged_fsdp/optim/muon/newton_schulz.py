"""Orthogonalization of batches of matrices by the Newton-Schulz iteration.

``X <- a X + b (X X^T) X + c (X X^T)^2 X``, from a matrix divided by its Frobenius norm, drives the
singular values towards 1 and leaves the singular vectors. Three implementations of one function:

``reference``   the formula as written, per matrix; the oracle of the tests.
``plain``       torch products, one batch per shape. ``P = a I + b A + c A A`` is formed first, so the
                third product reads X once. On the CPU it goes matrix by matrix: the result of a
                matrix then never depends on which others are in the batch.
``triton``      :mod:`ragged_fsdp.optim.muon.newton_schulz_kernel`, which computes the symmetric products
                once (bf16 on CUDA); batches too small to pay for the launches are left to ``plain``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import cast

import torch
from torch import Tensor

from ragged_fsdp.torch_internals import with_recompile_limit

__all__ = [
    "BACKENDS",
    "Coefficients",
    "check_backend",
    "choose_backend",
    "has_triton",
    "newton_schulz_flops",
    "orthogonalize",
    "orthogonalize_plain",
    "orthogonalize_reference",
    "per_iteration",
]

Triple = tuple[float, float, float]
Coefficients = Triple | tuple[Triple, ...]
BACKENDS = ("auto", "plain", "triton", "reference")
_COMPILED_SHAPES = 256
_WORTH_TRITON_FLOPS = 2e11
"""Operations per iteration of a batch below which launching the Triton kernels costs more than it saves."""


def per_iteration(coefficients: Coefficients, steps: int) -> tuple[Triple, ...]:
    """One triple (a, b, c) per iteration; a schedule shorter than ``steps`` repeats its last triple."""
    listed = isinstance(coefficients, (tuple, list)) and len(coefficients) > 0
    nested = listed and isinstance(coefficients[0], (tuple, list))
    schedule = cast("tuple[Triple, ...]", coefficients if nested else (coefficients,))
    if not listed or any(len(triple) != 3 for triple in schedule):
        raise ValueError(
            f"ns_coefficients: each iteration needs three numbers (a, b, c), got {coefficients}."
        )
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"ns_steps must be an integer of at least 1, got {steps!r}.")
    chosen = (schedule[min(i, len(schedule) - 1)] for i in range(steps))
    return tuple((float(a), float(b), float(c)) for a, b, c in chosen)


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Floating point operations of one iteration: X X^T, A A and P X, for the short side on the left."""
    short, long = sorted((rows, columns))
    return 4 * short * short * long + 2 * short**3


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def check_backend(requested: str, compiled: bool) -> None:
    """Raise for an implementation that does not exist, or that ``torch.compile`` is not for."""
    if requested not in BACKENDS:
        raise ValueError(f"ns_backend must be one of {BACKENDS}, got {requested!r}.")
    if compiled and requested not in ("auto", "plain"):
        raise ValueError(f"compile=True compiles the plain iteration, got ns_backend={requested!r}.")


def choose_backend(requested: str, device: torch.device, dtype: torch.dtype) -> str:
    """The implementation that will run; ``auto`` takes Triton for bf16 on a GPU with TMA and wgmma."""
    check_backend(requested, compiled=False)
    able = device.type == "cuda" and dtype == torch.bfloat16 and has_triton()
    if requested == "triton" and not able:
        raise ValueError(
            f"ns_backend='triton' needs Triton, CUDA and bfloat16, got {device.type} and {dtype}."
        )
    if requested != "auto":
        return requested
    return "triton" if able and torch.cuda.get_device_capability(device)[0] >= 9 else "plain"


def orthogonalize(
    batch: Tensor,
    coefficients: tuple[Triple, ...],
    min_norm: float,
    *,
    backend: str = "plain",
    compiled: bool = False,
) -> Tensor:
    """Orthogonalize a contiguous batch (matrices, rows, columns), which may be overwritten."""
    if batch.numel() == 0:
        return batch
    if backend == "triton":
        return _orthogonalize_triton(batch, coefficients, min_norm)
    if backend == "reference":
        return torch.stack([orthogonalize_reference(x, coefficients, min_norm) for x in batch])
    function = _compiled_plain() if compiled else orthogonalize_plain
    # One graph per shape of a batch; the usual limit is meant for accidental recompilation.
    with with_recompile_limit(_COMPILED_SHAPES) if compiled else nullcontext():
        if batch.device.type == "cpu":
            return torch.cat([function(x, coefficients, min_norm) for x in batch.split(1)])
        return function(batch, coefficients, min_norm)


def orthogonalize_reference(x: Tensor, coefficients: tuple[Triple, ...], min_norm: float) -> Tensor:
    """One matrix (rows, columns), by the formula and nothing else."""
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / x.norm().clamp(min=min_norm)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def orthogonalize_plain(batch: Tensor, coefficients: tuple[Triple, ...], min_norm: float) -> Tensor:
    """A batch (matrices, rows, columns) with torch's batched products; norms in fp32 at least."""
    tall = batch.shape[1] > batch.shape[2]
    precise = torch.promote_types(batch.dtype, torch.float32)
    norm = torch.linalg.vector_norm(batch, dim=(1, 2), keepdim=True, dtype=precise)
    x = batch / norm.clamp(min=min_norm).to(batch.dtype)
    for a, b, c in coefficients:
        gram = torch.bmm(x.mT, x) if tall else torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=1, dim2=2).add_(a)
        x = torch.bmm(x, polynomial) if tall else torch.bmm(polynomial, x)
    return x


@lru_cache(maxsize=1)
def _compiled_plain() -> Callable[..., Tensor]:
    return torch.compile(orthogonalize_plain, dynamic=False)


def _orthogonalize_triton(batch: Tensor, coefficients: tuple[Triple, ...], min_norm: float) -> Tensor:
    from ragged_fsdp.optim.muon.newton_schulz_kernel import ALIGNMENT, orthogonalize_symmetric

    matrices, rows, columns = batch.shape
    if matrices * newton_schulz_flops(rows, columns) < _WORTH_TRITON_FLOPS:
        return orthogonalize_plain(batch, coefficients, min_norm)
    extra_rows, extra_columns = -rows % ALIGNMENT, -columns % ALIGNMENT
    if not extra_rows and not extra_columns:
        return orthogonalize_symmetric(batch, coefficients, min_norm)
    # Rows and columns of zeros stay zero and change no other entry.
    padded = torch.nn.functional.pad(batch, (0, extra_columns, 0, extra_rows))
    return orthogonalize_symmetric(padded, coefficients, min_norm)[:, :rows, :columns].contiguous()
