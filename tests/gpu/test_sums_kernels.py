"""The kernel that adds the rows of an exchange: exact sums, every number of rows, any start and length.

It runs on a GPU, or on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

import pytest
import torch

from interpreted import DEVICE, INTERPRETED

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU or Triton's interpreter"
)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def in_order(rows, out, divisor):
    """One row after the other, in fp32: what is the same wherever it is computed."""
    total = torch.zeros(rows.shape[1], device=rows.device)
    for row in rows:
        total += row.float()
    return (total * torch.tensor(1 / divisor, dtype=torch.float32, device=rows.device)).to(out.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 9, 64])
def test_bits_of_a_sum_in_order(ranks, dtype):
    """Also for rows that begin at an odd element, or whose length fills no block; nothing else is written."""
    from ragged_fsdp.fsdp.reduce.sums_triton import sum_rows

    for numel in (1, 48, 2048, 5001):
        for out_dtype in DTYPES:
            for divisor in (1.0, float(ranks), 3.7):
                rows = torch.randn(ranks, numel, dtype=dtype, device=DEVICE)
                whole = torch.full((numel + 2,), 7.0, dtype=out_dtype, device=DEVICE)
                out = whole[1:-1]
                sum_rows(rows, out, divisor)
                assert torch.equal(out, in_order(rows, out, divisor)), (numel, out_dtype, divisor)
                assert whole[0] == whole[-1] == 7, (numel, out_dtype)


def test_the_sum_is_that_of_the_reference():
    """Within the rounding of another order; what the runtime calls takes the kernel where it can."""
    from ragged_fsdp.fsdp.reduce import sums

    for dtype in (*DTYPES, torch.float64):
        rows = torch.randn(37, 3000, dtype=dtype, device=DEVICE)
        for out_dtype in {dtype, torch.float64 if dtype is torch.float64 else torch.float32}:
            for divisor in (1.0, 37.0):
                got, want = (torch.empty(3000, dtype=out_dtype, device=DEVICE) for _ in range(2))
                sums.sum_rows(rows, got, divisor)
                sums.sum_rows_reference(rows, want, divisor)
                assert torch.allclose(got, want, rtol=1e-2 if out_dtype.itemsize < 4 else 1e-5, atol=1e-5)


@pytest.mark.skipif(INTERPRETED, reason="addresses that need 64 bits: 4.5 GB")
def test_rows_beyond_two_to_the_31_elements():
    from ragged_fsdp.fsdp.reduce.sums_triton import sum_rows

    rows = torch.zeros(9, (1 << 28) + 16, dtype=torch.bfloat16, device=DEVICE)
    rows[:, -1] = torch.arange(9, device=DEVICE)
    out = torch.empty(rows.shape[1], device=DEVICE)
    sum_rows(rows, out, 2.0)
    assert out[-1] == 18 and not out[:-1].any()
