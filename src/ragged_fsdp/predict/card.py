"""Calibration cards: how fast one GPU is, in a JSON file.

A card names its device and holds rates (copies, optimizer, memory) and, for layers that were run on it, the
time and memory of forward, backward and backward with recomputation at a few numbers of tokens. A card
without layers is a *roofline card*: the device's published peaks times shares that kernels usually reach.

Times of a layer that a card has are interpolated between its numbers of tokens (*measured*). Any other layer
is a roofline over its counted operations, times the ratio of measured to roofline time of the layers of its
sort that the card has (*modelled*).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ragged_fsdp.models.names import nearest

__all__ = [
    "DEVICES",
    "SORTS",
    "Card",
    "Device",
    "LayerCard",
    "Point",
    "device_named",
    "find_card",
    "load_card",
    "roofline_card",
]

_FORMAT = 2
_CARDS = Path(__file__).parent / "cards"
_ATTENTION_SHARE, _MEMORY_SHARE = 0.55, 0.80
"""Shares of the peaks that causal attention and copies usually reach."""
_INTERLEAVE, _CHUNK_CAT, _CHUNK_CAT_BF16, _COLLECT, _DECODE = 0.83, 0.48, 0.69, 0.81, 0.93
"""Shares of a copy's rate that these kernels reached on an H200."""
_HOST_ADAMW_GB_S = 40.0
"""A GPU's share of a host with eight of them."""
_CONTENTION = 0.5
_KERNEL_US = 3.0
SORTS = ("dense", "experts", "root")
_UNKNOWN_ERROR = 0.12
"""Error of a roofline by measured rates for a sort of layer that was not measured."""
_UNMEASURED_ERROR = {"dense": 0.25, "experts": 0.75, "root": 0.25}
"""Error of a roofline by a data sheet. On the H200's card layers with experts took 1.2 to 2.8 times theirs:
GPT-OSS-120B with 8192 tokens, all layers computed again, takes 1.8 times what its data sheet says."""


@dataclass(frozen=True)
class Device:
    """Published peaks of a GPU: dense bf16, memory."""

    name: str
    tflops: float
    memory_gb_s: float
    memory_gib: float
    host_gb_s: float
    """Useful of its PCIe or NVLink-C2C, one way."""
    matmul_share: float = 0.70
    """What large bf16 products usually reach of the peak: clocks fall under their power since Hopper."""


DEVICES: dict[str, Device] = {
    "a100-40g": Device("NVIDIA A100 40GB", 312.0, 1555.0, 39.4, 24.0, 0.82),
    "a100-80g": Device("NVIDIA A100 80GB", 312.0, 2039.0, 79.2, 24.0, 0.82),
    "h100": Device("NVIDIA H100 SXM", 989.5, 3350.0, 79.1, 50.0),
    "h800": Device("NVIDIA H800 SXM", 989.5, 3350.0, 79.1, 50.0),
    "h200": Device("NVIDIA H200", 989.5, 4800.0, 139.8, 50.0),
    "b200": Device("NVIDIA B200", 2250.0, 8000.0, 178.4, 50.0),
    "gb200": Device("NVIDIA GB200", 2500.0, 8000.0, 184.0, 180.0),
}
"""By the names that ``--hardware`` takes; ``memory_gib`` is what torch can allocate."""


@dataclass(frozen=True)
class Point:
    """One layer at one number of tokens; peaks are above what lived when the phase began.

    The peak of a backward is with the gradients of the layer's weights, in bf16.
    """

    tokens: int
    forward_ms: float
    backward_ms: float
    recompute_ms: float
    """What backward takes longer if it computes the forward again."""
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    recompute_saved_bytes: int
    recompute_peak_bytes: int
    """What is kept, and the most in backward, with recomputation."""
    roofline_forward_ms: float
    roofline_backward_ms: float
    contention: float
    """By how much of its time a copy on another stream delays this layer, since both want the memory."""


@dataclass(frozen=True)
class LayerCard:
    """The runs of one kind of layer."""

    model: str
    kind: str
    sort: str
    """``dense``, ``experts`` or ``root``: a roofline is off by something else for each."""
    signature: str
    seq_len: int
    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        if self.sort not in SORTS:
            raise ValueError(
                f"{self.model} {self.kind}: expected a sort of {', '.join(SORTS)}, got {self.sort}"
            )
        tokens = [point.tokens for point in self.points]
        if not tokens or tokens != sorted(set(tokens)) or tokens[0] < 1:
            raise ValueError(f"{self.model} {self.kind}: expected rising numbers of tokens, got {tokens}")

    def at(self, tokens: int) -> Point:
        """Times and bytes at ``tokens``: a line between neighbouring points; beyond them, their slope."""
        points = self.points
        if len(points) == 1:
            return _scaled(points[0], tokens / points[0].tokens, tokens)
        place = next((i for i, point in enumerate(points) if point.tokens >= tokens), len(points) - 1)
        low, high = (points[place - 1], points[place]) if place else (points[0], points[1])
        if tokens < points[0].tokens:  # a line through the first two would be below nothing
            return _scaled(points[0], tokens / points[0].tokens, tokens)
        share = (tokens - low.tokens) / (high.tokens - low.tokens)
        values = {
            f.name: getattr(low, f.name) + share * (getattr(high, f.name) - getattr(low, f.name))
            for f in fields(Point)
        }
        contention = max(0.0, values["contention"])  # beyond the last point a line may fall below
        return Point(**values | {"tokens": tokens, "contention": contention})


def _scaled(point: Point, factor: float, tokens: int) -> Point:
    values = {f.name: getattr(point, f.name) * factor for f in fields(Point)}
    return Point(**values | {"tokens": tokens, "contention": point.contention})


@dataclass(frozen=True)
class Card:
    """One GPU."""

    name: str
    device: str
    measured: bool
    """Whether the rates were measured on the device, rather than taken from its data sheet."""
    tflops: float
    """Published dense bf16 peak, for MFU."""
    memory_gib: float
    matmul_tflops: float
    attention_tflops: float
    memory_gb_s: float
    """Sustained, read and written bytes together."""
    kernel_us: float
    interleave_gb_s: float
    """Rate of the copy by which FSDP2 takes parameters out of a gathered buffer."""
    chunk_cat_gb_s: float
    """Rate of the copy by which FSDP2 takes bf16 gradients into a buffer of fp32."""
    chunk_cat_bf16_gb_s: float
    """Rate of the copy by which FSDP2 takes bf16 gradients into a buffer of bf16."""
    collect_gb_s: float
    """Rate of our copy of bf16 gradients into a buffer of fp32."""
    decode_gb_s: float
    """Rate of the kernel that makes bf16 weights of 8-bit codes."""
    sum_rows_gb_s: float
    """Rate of the kernel that adds received rows of gradients."""
    adamw_gb_s: float
    """Rate of the fused AdamW, which moves 28 bytes per fp32 element."""
    host_gb_s: float
    """Rate of a copy from the host's pinned memory, and back."""
    host_adamw_gb_s: float
    """Rate of the fused AdamW on the host, which updates offloaded parameters."""
    layers: tuple[LayerCard, ...] = ()
    versions: Mapping[str, str] | None = None
    grouped_beside: float | None = None
    """Times as long as alone that grouped products take beside a collective; None: not measured."""
    boost: float | None = None
    """The highest clock over that of large products; None: not measured."""

    def __post_init__(self) -> None:
        for name in ("grouped_beside", "boost"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"card {self.name}: {name} must be at least 1, got {value}")
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float) and value <= 0:
                raise ValueError(f"card {self.name}: {f.name} must be above 0, got {value}")

    def layer(self, signature: str, seq_len: int) -> LayerCard | None:
        """The runs of a layer at sequences of that length; None if the card has none."""
        found = [c for c in self.layers if c.signature == signature and c.seq_len == seq_len]
        return found[0] if found else None

    def ratio(self, phase: str, sort: str) -> float:
        """What a roofline time is multiplied with: all measured time of such layers over theirs, or 1."""
        pairs = self._pairs(phase, sort)
        return sum(took for took, _ in pairs) / sum(roof for _, roof in pairs) if pairs else 1.0

    def spread(self, phase: str, sort: str) -> float:
        """Relative error of a roofline time: the mean distance of such layers from :meth:`ratio`."""
        pairs = self._pairs(phase, sort)
        if len(pairs) < 2:
            return _UNKNOWN_ERROR if self.measured else _UNMEASURED_ERROR[sort]
        middle = self.ratio(phase, sort)
        return max(0.05, statistics.fmean(abs(took / roof / middle - 1) for took, roof in pairs))

    def _pairs(self, phase: str, sort: str) -> list[tuple[float, float]]:
        """Measured and roofline time of every run of such layers, ``phase`` being forward or backward."""
        pairs = [
            (getattr(point, f"{phase}_ms"), getattr(point, f"roofline_{phase}_ms"))
            for layer in self.layers
            if layer.sort == sort
            for point in layer.points
        ]
        return [pair for pair in pairs if pair[1]]

    def contention(self) -> float:
        """What copies cost a layer that the card does not have: the median of those it has."""
        return statistics.median(
            [point.contention for layer in self.layers for point in layer.points] or [_CONTENTION]
        )

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n")


def load_card(path: Path) -> Card:
    """The card in a file; ``ValueError`` names what is wrong with it."""
    try:
        content = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"hardware {path}: cannot read the card: {error}") from None
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise ValueError(f"hardware {path}: not a calibration card of format {_FORMAT}.")
    try:
        layers = tuple(
            LayerCard(**entry | {"points": tuple(Point(**point) for point in entry["points"])})
            for entry in content.pop("layers", ())
        )
        return Card(**content, layers=layers)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"hardware {path}: {error}") from None


def roofline_card(name: str) -> Card:
    """A card from the data sheet of ``name``, a key of :data:`DEVICES`."""
    device = DEVICES[name]
    memory = device.memory_gb_s * _MEMORY_SHARE
    return Card(
        name=name,
        device=device.name,
        measured=False,
        tflops=device.tflops,
        memory_gib=device.memory_gib,
        matmul_tflops=device.tflops * device.matmul_share,
        attention_tflops=device.tflops * _ATTENTION_SHARE,
        memory_gb_s=memory,
        kernel_us=_KERNEL_US,
        interleave_gb_s=memory * _INTERLEAVE,
        chunk_cat_gb_s=memory * _CHUNK_CAT,
        chunk_cat_bf16_gb_s=memory * _CHUNK_CAT_BF16,
        collect_gb_s=memory * _COLLECT,
        decode_gb_s=memory * _DECODE,
        sum_rows_gb_s=memory,
        adamw_gb_s=memory,
        host_gb_s=device.host_gb_s,
        host_adamw_gb_s=_HOST_ADAMW_GB_S,
    )


def find_card(name: str) -> Card:
    """The card that ``--hardware`` names: a JSON file, a committed card, or a device without one."""
    path = Path(name)
    if path.suffix == ".json":
        return load_card(path)
    committed = sorted(file.stem for file in _CARDS.glob("*.json"))
    if name in committed:
        return load_card(_CARDS / f"{name}.json")
    if name in DEVICES:
        return roofline_card(name)
    known: Sequence[str] = [*DEVICES, *committed]
    raise ValueError(f"hardware {name!r}: neither a card (.json) nor a known GPU; {nearest(name, known)}")


def device_named(name: str) -> Device | None:
    """The published peaks of the device that torch calls ``name``."""
    plain = name.lower()
    found = [d for key, d in DEVICES.items() if key.partition("-")[0] in plain]
    if "a100" in plain:
        found = [DEVICES["a100-40g" if "40" in plain else "a100-80g"]]
    return found[-1] if found else None
