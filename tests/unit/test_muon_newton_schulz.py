"""Newton-Schulz: the batched version against the formula, and what the iteration is for."""

from __future__ import annotations

import pytest
import torch

from ragged_fsdp.optim.muon.newton_schulz import (
    choose_backend,
    orthogonalize,
    orthogonalize_plain,
    orthogonalize_reference,
    per_iteration,
)

USUAL = (3.4445, -4.7750, 2.0315)
SHAPES = [(3, 8, 8), (2, 5, 17), (4, 17, 5), (1, 1, 6), (2, 31, 33)]


def batch_of(shape, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_batches_equal_the_formula(shape, scale) -> None:
    coefficients = per_iteration(USUAL, 5)
    x = batch_of(shape, torch.float64, scale)
    expected = torch.stack([orthogonalize_reference(m, coefficients, 1e-7) for m in x])
    for backend in ("plain", "reference"):
        torch.testing.assert_close(orthogonalize(x.clone(), coefficients, 1e-7, backend=backend), expected)
    torch.testing.assert_close(orthogonalize_plain(x, coefficients, 1e-7), expected)
    rounded = orthogonalize(x.bfloat16(), coefficients, 1e-7).double()
    assert (rounded - expected).norm() < 0.1 * expected.norm()  # small matrices: bf16 has eight bits


@pytest.mark.parametrize("shape", [(12, 30), (30, 12)])
def test_singular_values_go_to_one(shape) -> None:
    """The classical coefficients converge to U V^T; the usual ones end between 0.65 and 1.25."""
    x = batch_of((1, *shape), torch.float64)
    u, _, vh = torch.linalg.svd(x[0], full_matrices=False)
    converged = orthogonalize(x, per_iteration((1.875, -1.25, 0.375), 30), 1e-7)[0]
    torch.testing.assert_close(converged, u @ vh)
    values = torch.linalg.svdvals(orthogonalize(x, per_iteration(USUAL, 5), 1e-7)[0])
    assert values.min() > 0.65 and values.max() < 1.25


def test_a_matrix_does_not_depend_on_its_batch() -> None:
    """On the CPU, bit by bit: this is what makes the result the same at any world size."""
    coefficients = per_iteration(USUAL, 5)
    x = batch_of((6, 40, 24))
    together = orthogonalize(x.clone(), coefficients, 1e-7)
    for index in range(6):
        assert torch.equal(
            orthogonalize(x[index : index + 1].clone(), coefficients, 1e-7)[0], together[index]
        )


def test_zeros_and_nothing() -> None:
    coefficients = per_iteration(USUAL, 5)
    assert not orthogonalize(torch.zeros(2, 4, 6), coefficients, 1e-7).any()
    assert orthogonalize(torch.empty(0, 4, 6), coefficients, 1e-7).shape == (0, 4, 6)


def test_coefficients_per_iteration() -> None:
    schedule = ((4.0, -6.0, 3.0), (2.0, -1.0, 0.5))
    assert per_iteration(schedule, 4) == (schedule[0], schedule[1], schedule[1], schedule[1])
    assert per_iteration(USUAL, 2) == (USUAL, USUAL)
    with pytest.raises(ValueError, match="three numbers"):
        per_iteration((1.0, 2.0), 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ns_steps"):
        per_iteration(USUAL, 0)


def test_choice_of_backend() -> None:
    cpu = torch.device("cpu")
    assert choose_backend("auto", cpu, torch.bfloat16) == "plain"
    with pytest.raises(ValueError, match="needs Triton, CUDA and bfloat16"):
        choose_backend("triton", cpu, torch.bfloat16)
    with pytest.raises(ValueError, match="one of"):
        choose_backend("cublas", cpu, torch.bfloat16)
