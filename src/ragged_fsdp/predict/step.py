"""``predict``: the cost of one training step of a model on a cluster.

Everything is put together here: the computation of each kind of layer from a card, the groups from the plan
and the network, the schedule by replaying it. Each answer says what was measured and what is modelled, and
how far off it may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ragged_fsdp.fsdp.streams import arena_bytes
from ragged_fsdp.models.names import nearest
from ragged_fsdp.predict.books import OWN_KEPT, GroupCost, Host, LayerRun, StepCosts
from ragged_fsdp.predict.card import Card
from ragged_fsdp.predict.clocks import BOOST, replay_at_its_clock
from ragged_fsdp.predict.computation import Amount, runs_of
from ragged_fsdp.predict.groups import Wires, fsdp2_numel, group_cost, planned_numel
from ragged_fsdp.predict.network import Network
from ragged_fsdp.predict.optimizers import OPTIMIZERS, Update, elementwise, muon, with_state_on_host
from ragged_fsdp.predict.parallel import LayerPart, ReplicaRanks, exchanged, parts_of, refuse_without_experts
from ragged_fsdp.predict.replay import Replayed
from ragged_fsdp.predict.scale import Goodput, Scale, goodput, slowest
from ragged_fsdp.predict.workload import Workload

__all__ = ["HOST_BINDS", "LAUNCHES", "Margin", "Prediction", "Setup", "predict"]

_GIB = 1 << 30
_BF16, _FP32 = 2, 4
_WORKSPACE_BYTES = int(2.0 * _GIB)
"""CUDA context, cuBLAS and NCCL buffers: a usual figure, not of this model."""
_FRAGMENTATION = {True: 0.045, False: 0.20}
"""Reserved beyond allocated memory, as a share, with expandable segments and without (step benchmark)."""
LAUNCHES = {"ragged": (36.0, 0.0), "fsdp2": (62.0, 6.1)}
"""Small kernels that the host could launch in the time that sharding takes it for a collective, and for each
parameter of it. From the step benchmark's host times (``host.json``): 24 small layers of nine parameters took
52.0 ms unsharded, 75.8 with our 70 collectives, 132.0 with FSDP2's 72; cards of such machines have 8.9 and
10.2 us for a kernel. The part of FSDP2's parameters is theirs of its Python calls, counted as
``benchmarks.step calls`` does on layers of 9, 55 and 103 parameters: 1309 a layer and 128 for each of them.
Ours makes 364 and 2, which are not charged."""
_OPERATION_LAUNCHES = 3.2
"""Small kernels for an operation of a layer, of which those small layers have 72, forward and backward."""
HOST_BINDS = "the host's launches"
_HOST_ERROR = 0.40
"""Error of the host's time per collective: how the step benchmark's rows range around their mean."""
_NETWORK_ERROR = 0.15
_MEASURED_ERROR = 0.03
_COUNTED_MEMORY_ERROR, _MEASURED_MEMORY_ERROR = 0.08, 0.03


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
    kept: int | None = None
    """How many of the layers with which backward begins stay gathered; None: as many as do if not told."""
    park: int = 0
    codes: bool = False
    ep: int = 1
    """Expert parallelism: GPUs that share each layer's experts and send each other tokens."""
    ep_across_nodes: bool = False
    """Whether they lie on different nodes, and those with the same experts on one; else neighbours share."""
    tp: int = 1
    """Tensor parallelism: neighbours in rank that share their tokens and split each layer's matrices."""
    offload: bool = False
    """Whether shards, gradients and optimizer live in the host's memory (``CPUOffloadPolicy``)."""
    offload_optimizer: bool = False
    """Whether optimizer state alone lives there and visits the device (``optim.offload_state``)."""
    activation_checkpointing: int = 0
    compile: bool = False
    """Whether layers are compiled: operations bound by memory are fused."""
    optimizer: str = "adamw"
    expandable_segments: bool = True
    """How torch's allocator is set; without it more is reserved, and a gradient buffer stays allocated."""
    ring_table: tuple[tuple[float, float], ...] = ()
    scale: Scale = field(default_factory=Scale)
    host: Host | None = None
    """What launching takes; None: as many small kernels of the card's as were measured."""

    def __post_init__(self) -> None:
        choices: dict[str, Sequence[str]] = {
            "sharding": ("ragged", "fsdp2"),
            "reduction": ("auto", "reduce_scatter", "all_to_all", "two_level"),
            "reduce_dtype": ("fp32", "bf16"),
            "internode_dtype": ("bf16", "fp32"),
            "optimizer": OPTIMIZERS,
        }
        for name, valid in choices.items():
            value = getattr(self, name)
            if value not in valid:
                raise ValueError(f"{name} = {value!r}: {nearest(str(value), valid)}")
        for name in ("gpus", "tokens_per_gpu", "seq_len", "replicas", "micro_batches", "ep", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.kept is not None and self.kept < 0:
            raise ValueError(f"kept: expected at least 0 layers, got {self.kept}")
        if self.gpus % self.replicas:
            raise ValueError(f"replicas: expected a divisor of {self.gpus} GPUs, got {self.replicas}")
        for name in ("ep", "tp"):
            if self.shard % (count := getattr(self, name)):
                raise ValueError(
                    f"{name}: expected a divisor of the {self.shard} GPUs of a replica, got {count}"
                )
        if self.ep_across_nodes and self.ep == 1:
            raise ValueError("ep_across_nodes: needs ep, which is 1")
        if self.ep > 1 and self.tp > 1:
            raise ValueError(f"tp: not modelled beside ep, got tp = {self.tp} and ep = {self.ep}")
        if self.offload and self.optimizer == "muon":
            raise ValueError("offload: not modelled with optimizer = muon")
        if self.offload and self.offload_optimizer:
            raise ValueError("offload_optimizer: with offload the optimizer is on the host already")
        if self.tokens_per_gpu * self.tp % (self.seq_len * self.micro_batches):
            raise ValueError(
                f"tokens_per_gpu: expected whole sequences of {self.seq_len} tokens in {self.micro_batches} "
                f"micro-batches, got {self.tokens_per_gpu * self.tp}"
            )

    @property
    def shard(self) -> int:
        """GPUs of a replica."""
        return self.gpus // self.replicas

    @property
    def kept_layers(self) -> int:
        """Ours keeps two layers, unless all leave a slice on the node; FSDP2 keeps none."""
        if not self.reshard_after_forward:
            return OWN_KEPT
        own = OWN_KEPT if self.sharding == "ragged" and not self.park else 0
        return own if self.kept is None else self.kept

    @property
    def ranks(self) -> ReplicaRanks:
        return ReplicaRanks(self.shard, self.ep, self.tp, self.sharding == "fsdp2", self.ep_across_nodes)

    @property
    def amount(self) -> Amount:
        """Tokens of a micro-batch; ranks of tensor parallelism share theirs."""
        return Amount(self.tokens_per_gpu * self.tp // self.micro_batches, self.seq_len, self.compile)


@dataclass(frozen=True)
class Margin:
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
    seconds: Margin
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
    refuse_without_experts(workload, setup.ranks)
    wires = Wires(
        network=network,
        shard=setup.shard,
        replicas=setup.replicas,
        replica_ranks=setup.shard,
        implementation=setup.sharding,
        reduction=setup.reduction,
        reduce_bytes=_FP32 if setup.reduce_dtype == "fp32" else _BF16,
        internode_bytes=_FP32 if setup.internode_dtype == "fp32" else _BF16,
        codes=setup.codes,
        park=setup.park,
        offload=setup.offload,
        ring_table=setup.ring_table,
    )
    runs, measured = runs_of(workload, setup.amount, setup.ranks, card)
    slow = slowest(setup.gpus, setup.scale)
    for kind in workload.kinds:
        for again in (False, True):
            run = runs[kind.signature, again]
            run = replace(run, forward_s=run.forward_s * slow, backward_s=run.backward_s * slow)
            tokens = setup.amount.tokens
            runs[kind.signature, again] = exchanged(run, workload, kind, setup.ranks, tokens, again, network)
    parts = {kind.signature: parts_of(workload, kind, setup.ranks) for kind in workload.kinds}
    shard_numel = _shard_numel(workload, setup, parts)
    costs = _step_costs(workload, setup, card, wires, runs, parts)
    done = replay_at_its_clock(costs, card.boost or BOOST)
    tokens = setup.tokens_per_gpu * setup.gpus
    flops = workload.flops_per_token(setup.seq_len) * setup.tokens_per_gpu
    busy = _links(done)
    memory = dict(done.peak) | {"workspace": _WORKSPACE_BYTES}
    memory["fragmentation"] = int(_FRAGMENTATION[setup.expandable_segments] * done.peak_bytes)
    sorts = {kind.sort for kind in workload.kinds[:-1]}
    spreads = [card.spread(phase, sort) for phase in ("forward", "backward") for sort in sorts]
    compute_error = _MEASURED_ERROR if measured else max(spreads, default=_MEASURED_ERROR)
    shares = done.compute_s / done.seconds, done.exposed_s / done.seconds
    error = shares[0] * compute_error + shares[1] * _NETWORK_ERROR
    error = max(error, (1 + _HOST_ERROR) * done.host_s / done.seconds - 1)
    return Prediction(
        model=workload.name,
        setup=setup,
        network=network.name,
        hardware=card.name,
        seconds=Margin(done.seconds, error),
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


PartsByLayer = dict[str, list[LayerPart]]
"""The parts of each kind, by its signature."""


def _shard_numel(workload: Workload, setup: Setup, parts: PartsByLayer) -> int:
    count = planned_numel if setup.sharding == "ragged" else fsdp2_numel
    total = 0
    for kind in workload.kinds:
        total += kind.count * sum(count(part.shapes, part.ranks) for part in parts[kind.signature])
    return total


def _update(workload: Workload, setup: Setup, card: Card, network: Network, parts: PartsByLayer) -> Update:
    shard_numel = _shard_numel(workload, setup, parts)
    if setup.optimizer == "muon":
        counted = [(part, kind.count) for kind in workload.kinds for part in parts[kind.signature]]
        update = muon(counted, setup.gpus, setup.shard, card, network)
    else:
        update = elementwise(setup.optimizer, shard_numel, card, setup.offload)
    if setup.offload_optimizer:
        return with_state_on_host(update, shard_numel, card, in_parts=setup.optimizer != "muon")
    return update


def _step_costs(
    workload: Workload,
    setup: Setup,
    card: Card,
    wires: Wires,
    runs: dict[tuple[str, bool], LayerRun],
    parts: PartsByLayer,
) -> StepCosts:
    *kinds, root = workload.kinds
    priced = {
        signature: [
            group_cost(part.name, part.shapes, replace(wires, shard=part.ranks, apart=part.apart), card)
            for part in found
        ]
        for signature, found in parts.items()
    }
    every = setup.activation_checkpointing
    layers = []
    for place, index in enumerate(workload.order):
        signature = kinds[index].signature
        groups = [replace(group, name=f"{group.name} {place}") for group in priced[signature]]
        layers.append((groups, runs[signature, bool(every) and place % every == 0]))
    update = _update(workload, setup, card, wires.network, parts)
    ours = setup.sharding == "ragged"
    every_group = [group for groups, _ in layers for group in groups]
    everything = sum(group.gathered_bytes for group in every_group)
    persistent = {
        "weights": _shard_numel(workload, setup, parts) * _FP32,
        f"optimizer ({setup.optimizer})": update.state_bytes,
    }
    return StepCosts(
        root=priced[root.signature],
        root_run=runs[root.signature, False],
        layers=layers,
        persistent=dict.fromkeys(persistent, 0) if setup.offload else persistent,
        optimizer_s=update.seconds,
        optimizer_peak_bytes=update.peak_bytes,
        micro_batches=setup.micro_batches,
        kept_layers=setup.kept_layers,
        gathers_first=ours and wires.picked != "reduce_scatter",
        kept_bytes=0 if setup.reshard_after_forward else everything,
        fsdp2=not ours,
        arena_bytes=_arena(setup, every_group),
        host=setup.host or _host(setup.sharding, card),
    )


def _host(sharding: str, card: Card) -> Host:
    collective, parameter = LAUNCHES[sharding]
    kernel_s = card.kernel_us / 1e6
    return Host(collective * kernel_s, parameter * kernel_s, operation_s=_OPERATION_LAUNCHES * kernel_s)


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
    if done.host_s > 0.95 * done.seconds:
        return HOST_BINDS
    link = max(busy, key=lambda name: busy[name])
    names = {"inside": "links inside the node", "outside": "cards between nodes"}
    return names[link] if busy[link] > 0.5 * done.seconds else "latency and order"
