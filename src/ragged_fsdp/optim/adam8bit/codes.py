"""Block-wise 8-bit codes: the dynamic map of Dettmers et al., its arithmetic, and the plain reference.

A block stores one fp32 scale, its largest magnitude, and one byte per element: the index of a value
of a fixed map of 256 numbers in [-1, 1] (*signed*, first moment) or [0, 1] (*unsigned*, second
moment), in ascending order. The map covers seven decades below 1; the decade ``(10^(i-7), 10^(i-6)]``,
``i`` = 0..6, is cut into ``n`` equal cells whose centres are the values, with ``n`` = ``2^i`` per sign
or ``2^(i+1)`` unsigned. Zero and one complete it::

    unsigned   0 | 2 cells | 4 cells | 8 | 16 | 32 | 64 | 128 cells | 1        256 codes
                 1e-7      1e-6                         0.1        1
    signed     the mirror image of  1 | 2 | 4 | 8 | 16 | 32 | 64  and  0 | 1 | 2 | ... | 64 | 1

Because the cells of a decade double, ``k = n + cell`` counts the values like the bits of a small float: its
leading bit is ``n``. A magnitude of 0 has k = 0 (signed) or 1 (unsigned), 1 has k = 128 or 256. In a decade,
k is linear in the magnitude, so a dozen operations on a few constants turn one into the other
(``nearest_index``, ``value_of_index``): that is what the GPU kernel does, since looking 256 values up costs
it more. On the CPU codes are searched among thresholds. Both ways are the same function: the thresholds are
those at which the computed index steps, found by bisection over floats, so that codes agree bit by bit on
every device.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

__all__ = [
    "CELL_OFFSET",
    "FIRST_OCTAVE",
    "LARGEST_SQUARE",
    "SMALLEST_SCALE",
    "SMALLEST_SQUARE",
    "dequantize",
    "fused_multiply_add",
    "map_constants",
    "nearest_index",
    "one_edge",
    "quantize",
    "rounding_key",
    "rounding_noise",
    "rounding_salt",
    "value_of_index",
    "value_table",
    "zero_code",
]

SMALLEST_SCALE = 1e-36
"""A block whose largest magnitude is below this is stored as zeros: its reciprocal would overflow."""
SMALLEST_SQUARE, LARGEST_SQUARE = 2.0**-100, 2.0**126
"""Second moments are clamped to these before their root is taken, which the kernel can then do without cases.

The smallest root is 9e-16: beside an epsilon of 1e-8, a rounding error.
"""
FIRST_OCTAVE = 104
"""Biased exponent of 2^-23, the first octave with constants of its own; 1 is in the last, 127."""
CELL_OFFSET = 0.888888955116272
"""8/9 as the fp32 number next above: with it, the last value of both maps is exactly 1."""

_DECADES = 7
_ROUNDER = 8388608.0  # 2^23: adding it rounds to an integer, left in the low bits
_MASK = 0xFFFFFFFF


def zero_code(signed: bool) -> int:
    """The code of the value 0: what a fresh state is filled with."""
    return 127 if signed else 0


def _top_index(signed: bool) -> int:
    return 128 if signed else 256


def _decades(signed: bool) -> list[tuple[int, float]]:
    """Cells and upper end of each decade."""
    return [(2 ** (i if signed else i + 1), 10.0 ** (i - _DECADES + 1)) for i in range(_DECADES)]


@cache
def map_constants(signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The fp32 numbers of a map: slopes and offsets by octave of a magnitude, cell widths by octave of ``k``.

    ``k`` is near ``magnitude * slope + offset + 1/2`` in the decade in which the octave begins. Entry j of
    the widths belongs to k in ``[2^(j-1), 2^j)`` if signed, so that j = 0 is k = 0, and to ``[2^j, 2^(j+1))``
    otherwise; the width of the value 0 is 0, so that it needs no case of its own.
    """
    decades = _decades(signed)
    slopes, offsets = [], []
    # Of the signed map, k steps from 0 to 1 in the middle between the values, within the octave before this.
    zero_edge, zero_octave = 0.275e-6, 2.0**-21 if signed else 0.0
    for octave in range(FIRST_OCTAVE, 128):
        start = 2.0 ** (octave - 127)
        cells, top = next((cells, top) for cells, top in decades if start < top * (1 + 0.9 / cells))
        slopes.append(cells / (0.9 * top) if start >= zero_octave else (1 - 8 / 9) / zero_edge)
        offsets.append(cells * 8 / 9 - 0.5)
    top_index = float(_top_index(signed))
    to_one = 1 / (_fp32(top_index + 0.5) - _fp32(top_index) * _fp32(CELL_OFFSET))
    widths = [0.0, *(0.9 * top / cells for cells, top in decades), float(to_one)]
    return _fp32(slopes), _fp32(offsets), _fp32(widths)


def _fp32(value: float | list[float]) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device="cpu").to(torch.float32)


def value_of_index(index: Tensor, signed: bool) -> Tensor:
    """The fp32 magnitude of ``k``, by the operations of the kernel."""
    middle = index.to(torch.float32) + 0.5  # of the cell; it has the leading bit of k, or is 1/2
    bits = middle.view(torch.int32)
    cells = (bits & 0x7F800000).view(torch.float32)
    octave = (bits >> 23) - (126 if signed else 127)
    return (middle - cells * CELL_OFFSET) * _on(index.device, signed)[2][octave.long()]


def nearest_index(magnitude: Tensor, signed: bool) -> Tensor:
    """``k`` of the nearest value (a rounding error of fp32 aside): the definition of rounding to nearest.

    Across the upper end of a decade k continues at a fifth of the slope; the last cell reaches over the
    end, to the middle between its value and the next decade's first. A positive second moment never
    becomes zero: dividing by its root would make the next step as large as the first moment over epsilon.
    """
    slopes, offsets, _ = _on(magnitude.device, signed)
    magnitude = torch.fmin(magnitude, torch.ones((), device=magnitude.device))
    octave = ((magnitude.view(torch.int32) >> 23).clamp(min=FIRST_OCTAVE) - FIRST_OCTAVE).long()
    slope, offset = slopes[octave], offsets[octave]
    here = fused_multiply_add(magnitude, slope, offset)
    beyond = fused_multiply_add(here, 0.2, fused_multiply_add(offset, 1.8, 0.5))
    end = fused_multiply_add(offset, 2.25, 1.625)
    k = torch.where(here >= end, beyond, torch.minimum(here, end - 1.5))
    index = (k + _ROUNDER).view(torch.int32) & 0x1FF
    index = torch.where(magnitude > one_edge(signed), _top_index(signed), index)
    if signed:
        return index
    return torch.where(magnitude > 0, index.clamp(min=2), 1)


def fused_multiply_add(left: Tensor, right: Tensor | float, addend: Tensor | float) -> Tensor:
    """``left * right + addend``, rounded once: products of fp32 numbers are exact in fp64.

    (The sum is then rounded twice. That could only matter to a value whose exact result lies within 2^-30 of
    the middle between two floats; a test proves that no threshold is such a value.)
    """
    wide = [torch.as_tensor(x, dtype=torch.float32, device=left.device).double() for x in (right, addend)]
    return (left.double() * wide[0] + wide[1]).float()


@cache
def _on(device: torch.device, signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    slopes, offsets, widths = map_constants(signed)
    return slopes.to(device), offsets.to(device), widths.to(device)


@cache
def one_edge(signed: bool) -> float:
    """Above this magnitude the nearest value is 1."""
    last = value_of_index(torch.tensor([_top_index(signed) - 1], device="cpu"), signed)
    return float(_fp32(float(1 + last.double()) / 2))


@cache
def value_table(signed: bool, device: torch.device) -> Tensor:
    """The 256 values of a map as an fp32 tensor, ascending."""
    if not signed:
        return value_of_index(torch.arange(1, 257, device="cpu"), False).to(device)
    magnitudes = value_of_index(torch.arange(129, device="cpu"), True)
    return torch.cat([-magnitudes[1:128].flip(0), magnitudes]).to(device)


@cache
def _thresholds(signed: bool, device: torch.device) -> Tensor:
    """255 floats: a normalised value gets the code ``c`` if exactly ``c`` of them lie below it."""
    first = 1 if signed else 2
    target = torch.arange(first, _top_index(signed) + 1, dtype=torch.int32, device="cpu")
    low = torch.zeros_like(target)
    high = torch.full_like(low, _fp32(1.0).view(torch.int32).item())
    while bool((high - low > 1).any()):  # non-negative floats are ordered like their bits
        middle = (low + high) // 2
        reached = nearest_index(middle.view(torch.float32), signed) >= target
        high, low = torch.where(reached, middle, high), torch.where(reached, low, middle)
    positive = low.view(torch.float32)
    if signed:  # strictly below -t is the next cell outwards; -1 has no value of its own
        negative = torch.nextafter(-positive[:127], _fp32(-torch.inf)).flip(0)
        positive = torch.cat([negative, positive])
    return positive.to(device)


def quantize(blocks: Tensor, signed: bool, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales of fp32 ``blocks`` (count, block_numel): the reference of the kernels.

    Every operation rounds once, so the result does not depend on vector width or device. Without
    ``noise`` values round to the nearest of the map; with it (uniform in (0, 1), one per element) to one of
    the two neighbours, with the probability that keeps the mean.

    Returns:
        uint8 codes of the shape of ``blocks``, and fp32 scales (count,).
    """
    scales = blocks.abs().amax(dim=1) if signed else blocks.amax(dim=1)
    usable = scales > SMALLEST_SCALE
    inverse = torch.where(usable, scales.reciprocal(), 0.0)
    scales = torch.where(usable | scales.isnan(), scales, 0.0)
    normalised = blocks * inverse[:, None]
    codes = torch.bucketize(normalised, _thresholds(signed, blocks.device), out_int32=True)
    if noise is not None:
        codes = _round_stochastically(normalised, codes, signed, noise)
    return codes.to(torch.uint8), scales


def _round_stochastically(normalised: Tensor, codes: Tensor, signed: bool, noise: Tensor) -> Tensor:
    """Move on to the neighbour beyond, with probability |value - nearest| / |neighbour - nearest|."""
    magnitude = torch.fmin(normalised.abs(), torch.ones((), device=normalised.device))
    index = (codes - 127).abs() if signed else codes + 1
    nearest = value_of_index(index, signed)
    onwards = torch.where(magnitude >= nearest, 1, -1)  # 0 has no neighbour below
    other = value_of_index(index + onwards, signed)
    moves = noise * (other - nearest).abs() < (magnitude - nearest).abs()
    index = torch.where(moves, index + onwards, index)
    if signed:
        return torch.where(normalised < 0, 127 - index.clamp(max=127), 127 + index)
    return torch.where(magnitude > 0, index.clamp(min=2), 1) - 1


def dequantize(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """The fp32 values of (count, block_numel) codes and (count,) scales."""
    return value_table(signed, codes.device)[codes.long()] * scales[:, None]


def _mix32(state: Tensor) -> Tensor:
    """A bijection of 32-bit integers (held in int64) that spreads every input bit over the output."""
    state = ((state ^ (state >> 16)) * 0x7FEB352D) & _MASK
    state = ((state ^ (state >> 15)) * 0x846CA68B) & _MASK
    return state ^ (state >> 16)


def rounding_noise(row: Tensor, col: Tensor, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Uniform numbers in (0, 1) for both moments, a function of the element's global place and the key.

    Nothing else enters, so a step rounds alike however the parameter is sharded. Rows are mixed once for all
    their elements; an element then costs one mix, whose halves serve the two moments.
    """
    of_row = _mix32((_mix32(row ^ key[0]) + key[1]) & _MASK)
    bits = _mix32((of_row + col * 0x9E3779B9) & _MASK)
    return ((bits >> 16).float() + 0.5) * 2.0**-16, ((bits & 0xFFFF).float() + 0.5) * 2.0**-16


def rounding_key(seed: int, step: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys; the parameter's position changes the second alone, so that a kernel can add it."""
    state = 0
    for word in (seed, step):  # splitmix64, absorbing one word at a time
        state = (state + (word & (2**64 - 1)) + 0x9E3779B97F4A7C15) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state & _MASK, ((state >> 32) + rounding_salt(position)) & _MASK


def rounding_salt(position: int) -> int:
    """What the position of a parameter adds to the second key."""
    return (position * 0x85EBCA6B) & _MASK
