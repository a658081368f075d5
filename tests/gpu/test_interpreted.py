"""The checks under which kernels run in the interpreter find what they are for; the wire's copies pass."""

import numpy as np
import pytest
import torch

from interpreted import INTERPRETED, _fused

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

import triton
import triton.language as tl
from benchmarks.step import spin


@triton.jit
def _copy(source, target, count, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.multiple_of(tl.program_id(0) * WIDTH, 8) + tl.arange(0, 16)
    tl.store(target + at, tl.load(source + at + SHIFT, mask=at < count), mask=at < count)


def test_accesses_outside_of_tensors_raise():
    source, target, short = torch.arange(40.0), torch.empty(40), torch.empty(39)
    _copy[(3,)](source, target, 40, 0, 16)
    assert torch.equal(source, target)
    for given, shift, what in (
        (target, 1, "load of 1 "),
        (target, -1, "load of 1 "),
        (short, 0, "store of 1 "),
    ):
        with pytest.raises(IndexError, match=what):
            _copy[(3,)](source, given, 40, shift, 16)
    with pytest.raises(ValueError, match="multiple_of"):
        _copy[(2,)](source, target, 40, 0, 12)


def test_what_was_never_written_is_not_a_number():
    assert torch.empty(3).isnan().all() and (torch.empty(3, dtype=torch.int32) == -1).all()


def test_a_fused_multiply_add_rounds_once():
    draw = np.random.default_rng(0)
    x, y = (draw.standard_normal(10000).astype(np.float32) for _ in range(2))
    near = (-(x * y)).astype(np.float32)
    for z in (near, near * np.float32(2.0**-24), near * np.float32(2.0**24)):
        exact = x.astype(np.longdouble) * y.astype(np.longdouble) + z.astype(np.longdouble)  # 64 bits suffice
        assert np.array_equal(_fused(x, y, z), exact.astype(np.float32))


@pytest.mark.parametrize("nbytes", [1, 1023, 16384 * 2, 16384 * 8 + 24])
def test_copies_of_the_modelled_wire(nbytes, monkeypatch):
    monkeypatch.setattr(spin, "globaltimer", lambda: 0)
    monkeypatch.setattr(spin, "CHANNELS", 3)
    source = torch.randint(256, (nbytes,), dtype=torch.uint8)
    target = torch.zeros(4 * nbytes, dtype=torch.uint8)
    spin.repeat_by_channels(target, source, parts=4, skipped=2)
    want = source.repeat(4).view(4, -1)
    want[2] = 0
    assert torch.equal(target.view(4, -1), want)
