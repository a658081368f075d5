"""``predict``: the cost of one training step of a model on a cluster.

Everything is put together here: the computation of each kind of layer from a card, the groups from the plan
and the network, the schedule by replaying it. Each answer says what was measured and what is modelled, and
how far off it may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

from ragged_fsdp.fsdp.streams import arena_bytes
from ragged_fsdp.models.names import nearest
from ragged_fsdp.predict.card import Card, Point
from ragged_fsdp.predict.costs import LayerCost, Roofline, count_costs
from ragged_fsdp.predict.groups import Shapes, Wires, fsdp2_numel, group_cost, planned_numel
from ragged_fsdp.predict.network import Network, Place, Seconds, price
from ragged_fsdp.predict.replay import GroupCost, LayerRun, Replayed, StepCosts, replay
from ragged_fsdp.predict.scale import Goodput, Scale, goodput, slowest
from ragged_fsdp.predict.workload import ROOT, Kind, Workload

__all__ = ["OPTIMIZERS", "Prediction", "Setup", "Spread", "predict", "runs_of"]

_GIB = 1 << 30
_BF16, _FP32 = 2, 4
_WORKSPACE_BYTES = int(2.0 * _GIB)
"""CUDA context, cuBLAS and NCCL buffers: a usual figure, not of this model."""
_FRAGMENTATION = {True: 0.045, False: 0.20}
"""Reserved beyond allocated memory, as a share, with expandable segments and without (step benchmark)."""
_CONTENTION = 0.45
"""By how much of their time copies and sums on other streams delay computation, which shares the memory."""
_FUSED = 0.35
"""What a compiled layer still moves and launches of its operations bound by memory."""
_NETWORK_ERROR = 0.15
_MEASURED_ERROR = 0.03
_COUNTED_MEMORY_ERROR, _MEASURED_MEMORY_ERROR = 0.08, 0.03


@dataclass(frozen=True)
class Optimizer:
    """Bytes of state per parameter, and bytes that an update moves per parameter."""

    state_bytes: float
    moved_bytes: float


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(8.0, 28.0),
    "adam8bit": Optimizer(2.0 + 2 * 4 / 256, 16.0),
    "sgd": Optimizer(0.0, 12.0),
}
"""State beside the fp32 weights; ``moved`` counts weight, gradient and state, read and written."""


@dataclass(frozen=True)
class Setup:
    """A cluster and the settings of a run, by the names of ``ragged-fsdp train``."""

    gpus: int
    tokens_per_gpu: int
    seq_len: int = 4096
    replicas: int = 1
    """HSDP: groups of GPUs that each hold the whole model."""
    micro_batches: int = 1
    sharding: str = "ragged"
    reduction: str = "auto"
    reduce_dtype: str = "fp32"
    internode_dtype: str = "bf16"
    reshard_after_forward: bool = True
    """False keeps every layer gathered between forward and backward."""
    kept: bool = True
    """Whether the layers with which backward begins stay gathered (ours; FSDP2 keeps none)."""
    park: int = 0
    codes: bool = False
    ep: int = 1
    """Expert parallelism: neighbours in rank that share each layer's experts and send each other tokens."""
    activation_checkpointing: int = 0
    compile: bool = False
    """Whether layers are compiled: operations bound by memory are fused."""
    optimizer: str = "adamw"
    expandable_segments: bool = True
    """How torch's allocator is set; without it more is reserved, and a gradient buffer stays allocated."""
    ring_table: tuple[tuple[float, float], ...] = ()
    scale: Scale = field(default_factory=Scale)

    def __post_init__(self) -> None:
        choices: dict[str, Sequence[str]] = {
            "sharding": ("ragged", "fsdp2"),
            "reduction": ("auto", "reduce_scatter", "all_to_all", "two_level"),
            "reduce_dtype": ("fp32", "bf16"),
            "internode_dtype": ("bf16", "fp32"),
            "optimizer": tuple(OPTIMIZERS),
        }
        for name, valid in choices.items():
            value = getattr(self, name)
            if value not in valid:
                raise ValueError(f"{name} = {value!r}: {nearest(str(value), valid)}")
        for name in ("gpus", "tokens_per_gpu", "seq_len", "replicas", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.shard % self.ep:
            raise ValueError(f"ep: expected a divisor of the {self.shard} GPUs of a replica, got {self.ep}")
        if self.gpus % self.replicas:
            raise ValueError(f"replicas: expected a divisor of {self.gpus} GPUs, got {self.replicas}")
        if self.tokens_per_gpu % (self.seq_len * self.micro_batches):
            raise ValueError(
                f"tokens_per_gpu: expected whole sequences of {self.seq_len} tokens in {self.micro_batches} "
                f"micro-batches, got {self.tokens_per_gpu}"
            )

    @property
    def shard(self) -> int:
        return self.gpus // self.replicas


@dataclass(frozen=True)
class Spread:
    """A figure and how far off it may be, as a share of it."""

    value: float
    error: float

    @property
    def text(self) -> str:
        return f"{self.value:.3g} ±{self.error:.0%}"


@dataclass(frozen=True)
class Prediction:
    """What one step costs."""

    model: str
    setup: Setup
    network: str
    hardware: str
    seconds: Spread
    tokens_per_second: float
    mfu: float
    exposed_s: float
    compute_s: float
    links_s: dict[str, float]
    """Seconds that each link is busy."""
    memory: dict[str, int]
    """Bytes by category when there are most."""
    memory_error: float
    memory_limit: int
    padding: float
    reduction: str
    binds: str
    measured: bool
    """Whether the times of all layers come from runs of these layers."""
    goodput: Goodput
    replayed: Replayed

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.memory_limit

    def as_json(self) -> dict[str, Any]:
        """All figures, without the timeline."""
        found = {key: getattr(self, key) for key in ("model", "network", "hardware", "reduction", "binds")}
        return found | {
            "setup": asdict(self.setup),
            "step_s": self.seconds.value,
            "step_error": self.seconds.error,
            "tokens_per_s": self.tokens_per_second,
            "tokens_per_s_per_gpu": self.tokens_per_second / self.setup.gpus,
            "mfu": self.mfu,
            "exposed_s": self.exposed_s,
            "compute_s": self.compute_s,
            "links_s": self.links_s,
            "memory_bytes": self.memory,
            "memory_total_bytes": self.memory_bytes,
            "memory_error": self.memory_error,
            "memory_limit_bytes": self.memory_limit,
            "fits": self.fits,
            "padding": self.padding,
            "compute_measured": self.measured,
            "network_measured": bool(self.setup.ring_table),
            "goodput": asdict(self.goodput),
        }


def predict(workload: Workload, setup: Setup, card: Card, network: Network) -> Prediction:
    """The cost of one step of ``workload`` on ``setup.gpus`` GPUs of ``card`` in ``network``."""
    wires = Wires(
        network=network,
        shard=setup.shard,
        replicas=setup.replicas,
        implementation=setup.sharding,
        reduction=setup.reduction,
        reduce_bytes=_FP32 if setup.reduce_dtype == "fp32" else _BF16,
        internode_bytes=_FP32 if setup.internode_dtype == "fp32" else _BF16,
        codes=setup.codes,
        park=setup.park,
        ring_table=setup.ring_table,
    )
    runs, measured = runs_of(workload, setup, card)
    slow = slowest(setup.gpus, setup.scale)
    runs = {
        key: replace(run, forward_s=run.forward_s * slow, backward_s=run.backward_s * slow)
        for key, run in runs.items()
    }
    shard_numel = _shard_numel(workload, setup)
    if setup.ep > 1:
        for kind in workload.kinds:
            exchange = _tokens_exchange(workload, kind, setup, wires)
            for again in (False, True):
                key = _key(kind, again)
                runs[key] = replace(runs[key], exchange=exchange, recomputed=again)
    costs = _step_costs(workload, setup, card, wires, runs, shard_numel)
    done = replay(costs)
    tokens = setup.tokens_per_gpu * setup.gpus
    flops = workload.flops_per_token(setup.seq_len) * setup.tokens_per_gpu
    busy = _links(done)
    memory = dict(done.peak) | {"workspace": _WORKSPACE_BYTES}
    memory["fragmentation"] = int(_FRAGMENTATION[setup.expandable_segments] * done.peak_bytes)
    compute_error = _MEASURED_ERROR if measured else max(card.spread("forward"), card.spread("backward"))
    shares = done.compute_s / done.seconds, done.exposed_s / done.seconds
    error = shares[0] * compute_error + shares[1] * _NETWORK_ERROR
    return Prediction(
        model=workload.name,
        setup=setup,
        network=network.name,
        hardware=card.name,
        seconds=Spread(done.seconds, error),
        tokens_per_second=tokens / done.seconds,
        mfu=flops / done.seconds / (card.tflops * 1e12),
        exposed_s=done.exposed_s,
        compute_s=done.compute_s,
        links_s=busy,
        memory=memory,
        memory_error=_MEASURED_MEMORY_ERROR if measured else _COUNTED_MEMORY_ERROR,
        memory_limit=int(card.memory_gib * _GIB),
        padding=shard_numel * setup.shard / workload.numel - 1 if workload.numel else 0.0,
        reduction=wires.picked,
        binds=_binds(done, busy),
        measured=measured,
        goodput=goodput(done.seconds, setup.gpus, setup.scale),
        replayed=done,
    )


def _shard_numel(workload: Workload, setup: Setup) -> int:
    count = planned_numel if setup.sharding == "ragged" else fsdp2_numel
    total = 0
    for kind in workload.kinds:
        rest, experts = _split_experts(kind, setup.ep) if setup.ep > 1 else (kind.shapes, ())
        one = count(rest, setup.shard) + (count(experts, setup.shard // setup.ep) if experts else 0)
        total += one * kind.count
    return total


def _step_costs(
    workload: Workload,
    setup: Setup,
    card: Card,
    wires: Wires,
    runs: dict[str, LayerRun],
    shard_numel: int,
) -> StepCosts:
    *kinds, root = workload.kinds
    priced = [_layer_groups(kind, setup, wires, card) for kind in kinds]
    every = setup.activation_checkpointing
    layers = []
    for place, index in enumerate(workload.order):
        groups = [replace(group, name=f"{group.name} {place}") for group in priced[index]]
        again = bool(every) and place % every == 0
        layers.append((groups, runs[_key(kinds[index], again)]))
    optimizer = OPTIMIZERS[setup.optimizer]
    ours = setup.sharding == "ragged"
    every_group = [group for groups, _ in layers for group in groups]
    everything = sum(group.gathered_bytes for group in every_group)
    return StepCosts(
        root=group_cost(ROOT, root.shapes, wires, card) if root.numel else None,
        root_run=runs[_key(root, False)],
        layers=layers,
        persistent={
            "weights": shard_numel * _FP32,
            f"optimizer ({setup.optimizer})": int(shard_numel * optimizer.state_bytes),
        },
        optimizer_s=shard_numel * optimizer.moved_bytes / (card.adamw_gb_s * 1e9),
        micro_batches=setup.micro_batches,
        keeps=not setup.reshard_after_forward or (ours and setup.kept),
        gathers_first=ours and wires.picked != "reduce_scatter",
        kept_bytes=0 if setup.reshard_after_forward else everything,
        contention=_CONTENTION,
        arena_bytes=_arena(setup, every_group),
    )


def _layer_groups(kind: Kind, setup: Setup, wires: Wires, card: Card) -> list[GroupCost]:
    """One group, or with expert parallelism two: what every rank has, and its part of the experts."""
    if setup.ep == 1:
        return [group_cost("layer", kind.shapes, wires, card)]
    rest, experts = _split_experts(kind, setup.ep)
    groups = [group_cost("layer", rest, wires, card)]
    if experts:
        fewer = replace(wires, shard=wires.shard // setup.ep, apart=setup.ep)
        groups.append(group_cost("experts of layer", experts, fewer, card))
    return groups


def _split_experts(kind: Kind, ep: int) -> tuple[Shapes, Shapes]:
    """Parameters that every rank has, and those of one rank's experts."""
    rest, experts = [], []
    for name, shape in kind.shapes:
        if ".experts." not in f".{name}" or len(shape) < 2:
            rest.append((name, shape))
            continue
        if shape[0] % ep:
            raise ValueError(f"ep: {name} has {shape[0]} experts, which {ep} ranks cannot share evenly")
        experts.append((name, (shape[0] // ep, *shape[1:])))
    return tuple(rest), tuple(experts)


def _tokens_exchange(workload: Workload, kind: Kind, setup: Setup, wires: Wires) -> Seconds:
    """One way of the tokens of a micro-batch, each to its experts, among ``ep`` neighbours; bf16."""
    experts = [shape for name, shape in kind.shapes if ".experts." in f".{name}" and len(shape) == 3]
    if setup.ep == 1 or not experts:
        return Seconds(0.0, 0.0)
    tokens = setup.tokens_per_gpu // setup.micro_batches
    nbytes = tokens * workload.experts_per_token * workload.width * _BF16
    return price("all_to_all", nbytes, Place.even(setup.ep, wires.network), wires.network)


def _arena(setup: Setup, groups: Sequence[GroupCost]) -> int:
    """The gradient buffer that stays; FSDP2 has none."""
    if setup.expandable_segments or setup.sharding != "ragged":
        return 0
    return arena_bytes([group.buffer_bytes for group in groups])


def _links(done: Replayed) -> dict[str, float]:
    busy = {"inside": 0.0, "outside": 0.0}
    for span in done.spans:
        if span.lane in busy:
            busy[span.lane] += span.end - span.start
    return busy


def _binds(done: Replayed, busy: dict[str, float]) -> str:
    """What would have to be faster first."""
    if done.exposed_s < 0.05 * done.seconds:
        return "computation"
    link = max(busy, key=lambda name: busy[name])
    names = {"inside": "links inside the node", "outside": "cards between nodes"}
    return names[link] if busy[link] > 0.5 * done.seconds else "latency and order"


# -- computation -----------------------------------------------------------------------------------


def _key(kind: Kind, again: bool) -> str:
    return f"{kind.signature}{' again' if again else ''}"


def runs_of(workload: Workload, setup: Setup, card: Card) -> tuple[dict[str, LayerRun], bool]:
    """The computation of each kind at one micro-batch, plain and recomputed; whether all was measured."""
    tokens = setup.tokens_per_gpu // setup.micro_batches
    cards = {
        kind.signature: None if setup.compile else card.layer(kind.signature, setup.seq_len)
        for kind in workload.kinds
    }
    runs: dict[str, LayerRun] = {}
    measured = all(cards.values())
    counted = {} if measured else _counted(workload, tokens // setup.seq_len, setup.seq_len)
    for kind in workload.kinds:
        found = cards[kind.signature]
        if found is not None:
            point = found.at(tokens)
        else:
            point = _modelled(counted[kind.signature], tokens, card, _FUSED if setup.compile else 1.0)
        runs[_key(kind, False)] = LayerRun(
            point.forward_ms / 1e3,
            point.backward_ms / 1e3,
            int(point.saved_bytes),
            int(point.forward_peak_bytes),
            int(point.backward_peak_bytes),
        )
        runs[_key(kind, True)] = LayerRun(
            point.forward_ms / 1e3,
            (point.backward_ms + point.recompute_ms) / 1e3,
            int(point.recompute_saved_bytes),
            int(point.forward_peak_bytes),
            int(point.recompute_peak_bytes),
        )
    return runs, measured


@lru_cache(maxsize=64)
def _counted(workload: Workload, sequences: int, seq_len: int) -> dict[str, LayerCost]:
    """Costs on fake tensors. More than two sequences are a line through one and two: counting is slow."""
    if sequences <= 2:
        return count_costs(workload, sequences, seq_len)
    one, two = (_counted(workload, n, seq_len) for n in (1, 2))
    return {key: _line(one[key], two[key], sequences) for key in one}


def _line(one: LayerCost, two: LayerCost, at: int) -> LayerCost:
    def between(low: float, high: float) -> float:
        return low + (at - 1) * (high - low)

    phases = []
    for low, high in ((one.forward, two.forward), (one.backward, two.backward)):
        operations = [
            (kind, between(flops, more_flops), between(moved, more_moved))
            for (kind, flops, moved), (_, more_flops, more_moved) in zip(low.operations, high.operations)
        ]
        peak = int(between(low.peak_bytes, high.peak_bytes))
        left = int(between(low.left_bytes, high.left_bytes))
        phases.append(type(low)(operations, peak, left))
    return LayerCost(phases[0], phases[1], int(between(one.output_bytes, two.output_bytes)))


def _modelled(cost: LayerCost, tokens: int, card: Card, fused: float) -> Point:
    """A layer that the card has not seen: a roofline, times what the card's own layers took over theirs."""
    roofline = Roofline(card.matmul_tflops, card.attention_tflops, card.memory_gb_s, card.kernel_us, fused)
    forward, backward = cost.forward.seconds(roofline) * 1e3, cost.backward.seconds(roofline) * 1e3
    return Point(
        tokens=tokens,
        forward_ms=forward * card.ratio("forward"),
        backward_ms=backward * card.ratio("backward"),
        recompute_ms=forward * card.ratio("forward"),
        saved_bytes=cost.saved_bytes,
        forward_peak_bytes=cost.forward.peak_bytes,
        backward_peak_bytes=cost.backward.peak_bytes,
        recompute_saved_bytes=cost.output_bytes,
        recompute_peak_bytes=cost.recompute_peak_bytes,
        roofline_forward_ms=forward,
        roofline_backward_ms=backward,
    )
