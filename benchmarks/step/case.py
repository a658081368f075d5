"""What is measured: one case, and the bounds that follow from its shapes alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from .network import Place, WireName, network_of, price
from .shapes import MODELS, LayerShape, layer_numel
from .wire import DELIVERIES, PAYLOADS

__all__ = ["ALLOCATORS", "OPTIMIZERS", "REDUCE_DTYPES", "Case"]

REDUCE_DTYPES = ("fp32", "bf16")
ALLOCATORS = ("default", "expandable")
OPTIMIZERS = ("adamw", "sgd")
_GIB = 1 << 30
_COMPUTE_BYTES = 2
_REDUCE_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Case:
    """One model on rank 0 of ``ranks``; ``wires`` name networks, None being the free one."""

    model: str
    layers: int
    tokens: int
    ranks: int
    wires: tuple[WireName, ...] = (None,)
    reduce_dtype: str = "fp32"
    payload: str = "repeat"
    delivery: str = "fake"
    allocator: str = "default"
    """How torch's caching allocator is set: ``expandable`` is ``expandable_segments:True``."""
    warmup: int = 3
    iterations: int = 8
    options: tuple[tuple[str, Any], ...] = ()
    """Arguments only our implementation understands, as sorted pairs."""
    replicas: int = 1
    """Above 1: hybrid sharding, the ranks being so many copies of the sharded model."""
    optimizer: str = "adamw"
    recompute: bool = False
    """Whether backward computes each layer again instead of keeping its activations."""
    sequence: int | None = None
    """Tokens of a sequence, where they are not the published shape's."""
    carveout: int = 0
    """Multiprocessors that matrix products leave free. A grouped product has a thread block for each
    multiprocessor that it counts: where a collective holds one, some blocks wait for the others to end."""

    def __post_init__(self) -> None:
        choices = {
            "model": sorted(MODELS),
            "reduce_dtype": REDUCE_DTYPES,
            "payload": PAYLOADS,
            "delivery": DELIVERIES,
            "allocator": ALLOCATORS,
            "optimizer": OPTIMIZERS,
        }
        for name, expected in choices.items():
            if getattr(self, name) not in expected:
                raise ValueError(f"{name}: expected one of {tuple(expected)}, got {getattr(self, name)!r}")
        for wire in self.wires:
            network_of(wire)
        for name in ("layers", "tokens", "ranks", "iterations", "replicas", "sequence"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if self.carveout < 0:
            raise ValueError(f"carveout: expected at least 0, got {self.carveout}")
        if self.warmup < 1:
            raise ValueError(
                f"warmup: expected at least 1, since the first step allocates, got {self.warmup}"
            )
        if self.ranks % self.replicas:
            raise ValueError(f"replicas: expected a divisor of {self.ranks} ranks, got {self.replicas}")
        if self.tokens % self.shape.sequence:
            raise ValueError(f"tokens: expected a multiple of {self.shape.sequence}, got {self.tokens}")

    @property
    def shape(self) -> LayerShape:
        published = MODELS[self.model]
        return published if self.sequence is None else replace(published, sequence=self.sequence)

    @property
    def shard_ranks(self) -> int:
        return self.ranks // self.replicas

    @property
    def ranks_per_node(self) -> int:
        """Of the case's networks with nodes, which must agree; all ranks where there is none."""
        found = {network_of(wire).ranks_per_node for wire in self.wires} - {None}
        if len(found) > 1:
            raise ValueError(f"networks: expected nodes of one size, got nodes of {sorted(found)} ranks")
        return found.pop() if found else self.ranks

    @property
    def batch(self) -> int:
        return self.tokens // self.shape.sequence

    @property
    def numel(self) -> int:
        return self.layers * layer_numel(self.shape)

    @property
    def bound_wire_gib(self) -> float:
        """The bytes of the bound: gather each layer twice (the last once), reduce each once, no padding.

        bf16 gathers, reductions in ``reduce_dtype``. Who sums on arrival or keeps more layers moves less.
        """
        per_layer = layer_numel(self.shape)
        gathered = (2 * self.layers - 1) * per_layer * _COMPUTE_BYTES
        return (gathered + self.numel * _REDUCE_BYTES[self.reduce_dtype]) / _GIB

    def wire_ms(self, wire: WireName, gib: float | None = None) -> float:
        """The time of ``gib`` (:attr:`bound_wire_gib`) in rings without latency, on the slower level."""
        gib = self.bound_wire_gib if gib is None else gib
        network = replace(network_of(wire), inside_step_us=0.0, outside_step_us=0.0)
        place = Place.of(range(self.shard_ranks), 0, network)
        return max(price("all_gather", gib * _GIB, place, network)) * 1e3

    def to_json(self) -> dict[str, Any]:
        found = asdict(self) | {"bound_wire_gib": round(self.bound_wire_gib, 3), "numel": self.numel}
        named = [wire for wire in self.wires if isinstance(wire, str)]
        return found | {"networks": {name: asdict(network_of(name)) for name in named}} if named else found
