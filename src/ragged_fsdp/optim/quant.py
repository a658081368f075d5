"""Block-wise 8-bit codes: the dynamic map of Dettmers et al., its thresholds, and the plain reference.

A block stores one fp32 scale, its largest magnitude, and one byte per element: the index of a value
of a fixed map of 256 numbers in [-1, 1] (*signed*, first moment) or [0, 1] (*unsigned*, second
moment), in ascending order. The map covers seven decades below 1; the decade ``(10^(i-7), 10^(i-6)]``,
``i`` = 0..6, is cut into ``n`` equal cells whose centres are the values, with ``n`` = ``2^i`` per sign
or ``2^(i+1)`` unsigned. Zero and one complete it::

    unsigned   0 | 2 cells | 4 cells | 8 | 16 | 32 | 64 | 128 cells | 1        256 codes
                 1e-7      1e-6                         0.1        1
    signed     the mirror image of  1 | 2 | 4 | 8 | 16 | 32 | 64  and  0 | 1 | 2 | ... | 64 | 1

Because the cells of a decade double, ``n + cell`` counts the values like the bits of a small float:
a code can be computed with a handful of multiplications (the GPU kernel does) instead of searched.
Both ways are the same function: the search thresholds below are those at which the computed index
steps, found by bisection over floats, so that codes agree bit by bit on every device.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

__all__ = [
    "DECADES",
    "SMALLEST_SCALE",
    "Codebook",
    "codebook",
    "dequantize",
    "quantize",
    "rounding_key",
    "rounding_noise",
    "value_table",
]

DECADES = 7
SMALLEST_SCALE = 1e-36
"""A block whose largest magnitude is below this is stored as zeros: its reciprocal would overflow."""


@dataclass(frozen=True)
class Codebook:
    """One of the two maps, with what the kernels need to compute codes without a search.

    For a normalised magnitude ``a`` in decade ``i`` (the last with ``a > edges[i-1]``), the index among
    magnitudes is ``min(floor(a * slopes[i] + offsets[i]), 2 * cells[i] - 1)``; below ``zero_edge`` it is
    zero, above ``one_edge`` it is the value 1.
    """

    signed: bool
    cells: tuple[int, ...]
    slopes: tuple[float, ...]
    offsets: tuple[float, ...]
    edges: tuple[float, ...]
    zero_edge: float
    one_edge: float
    values: tuple[float, ...]
    """The 256 values, ascending, rounded to fp32."""

    @property
    def zero_code(self) -> int:
        """The code of the value 0: what a fresh state is filled with."""
        return 127 if self.signed else 0


@cache
def codebook(signed: bool) -> Codebook:
    """The signed or the unsigned dynamic map."""
    cells = tuple(2 ** (i if signed else i + 1) for i in range(DECADES))
    tops = [10.0 ** (i - DECADES + 1) for i in range(DECADES)]
    decades = [[top * (0.1 + 0.9 * (c + 0.5) / n) for c in range(n)] for top, n in zip(tops, cells)]
    magnitudes = [v for decade in decades for v in decade]
    edges = [(below[-1] + above[0]) / 2 for below, above in itertools.pairwise(decades)]
    negative = [-v for v in reversed(magnitudes)] if signed else []
    return Codebook(
        signed=signed,
        cells=cells,
        slopes=tuple(_fp32(n / (0.9 * top)) for n, top in zip(cells, tops)),
        offsets=tuple(_fp32(n * 8 / 9) for n in cells),
        edges=tuple(_fp32(e) for e in edges),
        zero_edge=_fp32(magnitudes[0] / 2),
        one_edge=_fp32((magnitudes[-1] + 1) / 2),
        values=tuple(_fp32(v) for v in [*negative, 0.0, *magnitudes, 1.0]),
    )


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def computed_codes(normalised: Tensor, signed: bool) -> Tensor:
    """Codes by arithmetic, as the GPU kernel computes them; the definition of the rounding to nearest."""
    book = codebook(signed)
    magnitude = normalised.abs()
    decade = sum((magnitude > edge).long() for edge in book.edges)
    cells = torch.tensor(book.cells)[decade]
    index = magnitude * torch.tensor(book.slopes)[decade] + torch.tensor(book.offsets)[decade]
    index = torch.minimum(index.floor().long(), 2 * cells - 1) - (0 if signed else 1)
    index = torch.where(magnitude > book.zero_edge, index, 0)
    top = 128 if signed else 255
    index = torch.where(magnitude > book.one_edge, top, index)
    if not signed:
        return index
    return torch.where(normalised < 0, 127 - index.clamp(max=127), 127 + index)


@cache
def _thresholds(signed: bool, device: torch.device) -> Tensor:
    """255 floats: a normalised value gets the code ``k`` if exactly ``k`` of them lie below it."""
    low = torch.zeros(128 if signed else 255, dtype=torch.int32)
    high = torch.full_like(low, torch.tensor(1.0).view(torch.int32).item())
    target = torch.arange(1, low.numel() + 1) + (127 if signed else 0)
    while bool((high - low > 1).any()):  # non-negative floats are ordered like their bits
        middle = (low + high) // 2
        reached = computed_codes(middle.view(torch.float32), signed) >= target
        high, low = torch.where(reached, middle, high), torch.where(reached, low, middle)
    positive = low.view(torch.float32)
    if signed:  # strictly below -t is the next cell outwards; -1 has no value of its own
        negative = torch.nextafter(-positive[:127], torch.tensor(-torch.inf)).flip(0)
        positive = torch.cat([negative, positive])
    return positive.to(device)


@cache
def value_table(signed: bool, device: torch.device) -> Tensor:
    """The 256 values of a map as an fp32 tensor."""
    return torch.tensor(codebook(signed).values, dtype=torch.float32, device=device)


@cache
def step_table(signed: bool, device: torch.device) -> Tensor:
    """The index among magnitudes for every prefix of a float in [2^-23, 1]: one lookup instead of a search.

    A prefix (exponent and 6 or 7 bits) spans at most one threshold. Its int32 entry holds the index at
    its start above bit 20, and below it the largest suffix that does not reach the next index.
    """
    shift = 17 if signed else 16
    prefix = torch.arange((127 - 23) << (23 - shift), (127 << (23 - shift)) + 1, dtype=torch.int32)
    low = prefix << shift
    high = torch.minimum(low + (1 << shift) - 1, torch.tensor(127 << 23))
    thresholds = _thresholds(signed, torch.device("cpu"))[127 if signed else 0 :]
    first, last = (torch.bucketize(bits.view(torch.float32), thresholds) for bits in (low, high))
    if bool((last - first > 1).any()):
        raise AssertionError("a prefix spans two thresholds")
    suffix = thresholds[first.clamp(max=thresholds.numel() - 1)].view(torch.int32) - low
    suffix = torch.where(last > first, suffix, (1 << 20) - 1)
    return ((first.to(torch.int32) << 20) | suffix).to(torch.int32).to(device)


def quantize(blocks: Tensor, signed: bool, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales of fp32 ``blocks`` (count, block_numel): the reference of the kernels.

    Every operation rounds once, so the result does not depend on vector width or device. Without
    ``noise`` values round to the nearest of the map; with it (uniform in [0, 1), one per element) up
    with the probability that keeps the mean. A positive second moment never becomes zero: dividing
    by the root of a zero would make the next step as large as the first moment over epsilon.

    Returns:
        uint8 codes of the shape of ``blocks``, and fp32 scales (count,).
    """
    scales = blocks.abs().amax(dim=1) if signed else blocks.amax(dim=1)
    usable = scales > SMALLEST_SCALE
    inverse = torch.where(usable, scales.reciprocal(), 0.0)
    scales = torch.where(usable | scales.isnan(), scales, 0.0)
    normalised = blocks * inverse[:, None]
    if noise is None:
        codes = torch.bucketize(normalised, _thresholds(signed, blocks.device), out_int32=True)
    else:
        codes = _round_stochastically(normalised, value_table(signed, blocks.device), noise)
    if not signed:
        codes = torch.where(normalised > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8), scales


def _round_stochastically(normalised: Tensor, values: Tensor, noise: Tensor) -> Tensor:
    below = (torch.bucketize(normalised, values, right=True) - 1).clamp(0, 255)
    low, high = values[below], values[(below + 1).clamp(max=255)]
    return below + (noise * (high - low) < normalised - low)


def dequantize(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """The fp32 values of (count, block_numel) codes and (count,) scales."""
    return value_table(signed, codes.device)[codes.long()] * scales[:, None]


_MASK = 0xFFFFFFFF


def _mix32(state: Tensor) -> Tensor:
    """A bijection of 32-bit integers (held in int64) that spreads every input bit over the output."""
    state = ((state ^ (state >> 16)) * 0x7FEB352D) & _MASK
    state = ((state ^ (state >> 15)) * 0x846CA68B) & _MASK
    return state ^ (state >> 16)


def rounding_noise(element: Tensor, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Uniform numbers in [0, 1) for both moments, a function of the global element index and the key.

    Nothing else enters, so a step rounds alike however the parameter is sharded.
    """
    state = _mix32((element & _MASK) ^ key[0])
    first = _mix32((state + (element >> 32) + key[1]) & _MASK)
    second = _mix32(first ^ 0x9E3779B9)
    return (first >> 8).float() * 2.0**-24, (second >> 8).float() * 2.0**-24


def rounding_key(*words: int) -> tuple[int, int]:
    """Two 32-bit keys from integers such as the seed, the step and the parameter's position."""
    state = 0
    for word in words:  # splitmix64, absorbing one word at a time
        state = (state + (word & (2**64 - 1)) + 0x9E3779B97F4A7C15) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state & _MASK, state >> 32
