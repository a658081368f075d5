"""The settings with which a model trains fastest on a cluster, and why the others lose.

Two passes, so that it takes seconds: first how the model is spread (replicas, recomputation, micro-batches),
then, for the best few of these, how it is moved (reduction, what is kept, what is parked, expert and tensor
parallelism, codes).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ragged_fsdp.models.splits import refusal
from ragged_fsdp.predict.card import Card
from ragged_fsdp.predict.network import Network
from ragged_fsdp.predict.step import HOST_BINDS, Prediction, Setup, predict
from ragged_fsdp.predict.workload import Workload

__all__ = ["Found", "search"]

_FINALISTS = 4
_MICRO_BATCHES = (1, 2, 4, 8)
_RECOMPUTED = (0, 1, 2)
_EXPERT_PARALLEL = (4, 8, 16, 32, 64)
_TENSOR_PARALLEL = (2, 4, 8)
_KEPT = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Found:
    """One setting and what is against it."""

    prediction: Prediction
    why: str

    @property
    def flags(self) -> str:
        """The flags of ``train`` that ask for it; what is not a flag there is in brackets."""
        setup = self.prediction.setup
        parts = [f"--replicas {setup.replicas}"] if setup.replicas > 1 else []
        parts += [f"--ep {setup.ep}"] if setup.ep > 1 else []
        parts += ["--ep-across-nodes"] if setup.ep_across_nodes else []
        parts += [f"--tp {setup.tp}"] if setup.tp > 1 else []
        parts += [f"--accumulate {setup.micro_batches}"] if setup.micro_batches > 1 else []
        if setup.activation_checkpointing:
            parts.append(f"--activation-checkpointing {setup.activation_checkpointing}")
        parts.append(f"--reduction {self.prediction.reduction}")
        parts += ["--no-reshard-after-forward"] if not setup.reshard_after_forward else []
        parts += [f"[reshard_after_forward={setup.park}]"] if setup.park else []
        if setup.kept is not None:
            parts.append(f"[reshard_after_forward=False for the last {setup.kept} layers]")
        parts += ["--gather-codes '*=int8:128x128'"] if setup.codes else []
        return " ".join(parts)


def search(
    workload: Workload,
    setup: Setup,
    card: Card,
    network: Network,
    *,
    memory_bytes: int | None = None,
    allow_codes: bool = False,
    most: int = 8,
) -> list[Found]:
    """The best settings first; ``setup`` gives the cluster, the tokens and what is not searched."""
    limit = memory_bytes or int(card.memory_gib * (1 << 30))
    first = [predict(workload, option, card, network) for option in _spreads(setup, network)]
    best = sorted(first, key=lambda p: _rank(p, limit))[:_FINALISTS]
    everything = list(first)
    for finalist in best:
        for option in _moves(finalist.setup, workload, network, allow_codes):
            everything.append(predict(workload, option, card, network))
    ranked = sorted(everything, key=lambda p: _rank(p, limit))
    winner = ranked[0]
    shown = [Found(p, _why(p, winner, limit)) for p in _different(ranked)]
    fitting = [f for f in shown if f.prediction.memory_bytes <= limit][: most - 2]
    return fitting + [f for f in shown if f.prediction.memory_bytes > limit][:2]


def _rank(prediction: Prediction, limit: int) -> tuple[bool, float]:
    """What fits before what does not; then the faster, or that which needs least."""
    over = prediction.memory_bytes > limit
    return over, prediction.memory_bytes if over else prediction.seconds.value


def _spreads(setup: Setup, network: Network) -> Iterator[Setup]:
    node = network.ranks_per_node or setup.gpus
    for shard in range(1, setup.gpus + 1):
        if setup.gpus % shard or (shard % node and shard != setup.gpus and shard != 1):
            continue
        if shard % setup.ep or shard % setup.tp:
            continue
        for micro in _MICRO_BATCHES:
            if setup.tokens_per_gpu * setup.tp % (setup.seq_len * micro):
                continue
            for every in _RECOMPUTED:
                yield replace(
                    setup,
                    replicas=setup.gpus // shard,
                    micro_batches=micro,
                    activation_checkpointing=every,
                )


def _moves(setup: Setup, workload: Workload, network: Network, allow_codes: bool) -> Iterator[Setup]:
    node = network.ranks_per_node or 0
    if setup.reduction == "auto":  # else the user has chosen
        yield replace(setup, reduction="reduce_scatter")
    yield replace(setup, reshard_after_forward=False)
    yield from (replace(setup, kept=kept) for kept in _KEPT if kept < len(workload.order))
    if 1 < node < setup.shard and setup.shard % node == 0:
        yield replace(setup, park=node)
    if setup.ep == setup.tp == 1:  # else the user has chosen
        yield from _shared_layers(setup, workload, node)
    if allow_codes:
        yield replace(setup, codes=True)
        if 1 < node < setup.shard and setup.shard % node == 0:
            yield replace(setup, codes=True, park=node)


def _shared_layers(setup: Setup, workload: Workload, node: int) -> Iterator[Setup]:
    """Expert parallelism, of neighbours and across nodes, or tensor parallelism."""
    experts = [shape[0] for k in workload.kinds for name, shape in k.shapes if ".experts." in f".{name}"]
    for ep in _EXPERT_PARALLEL:
        if experts and all(count % ep == 0 for count in experts) and setup.shard % ep == 0:
            yield replace(setup, ep=ep)
            if 1 < node < setup.shard and ep < setup.shard:
                yield replace(setup, ep=ep, ep_across_nodes=True)
    for tp in _TENSOR_PARALLEL:
        if setup.shard % tp == 0 and refusal("tp", tp, workload.tp) is None:
            yield replace(setup, tp=tp)
            if not setup.tokens_per_gpu * tp % (setup.seq_len * setup.micro_batches * tp):
                yield replace(setup, tp=tp, micro_batches=setup.micro_batches * tp)


def _different(ranked: Sequence[Prediction]) -> Iterator[Prediction]:
    """Without settings that come to the same."""
    seen = set()
    for p in ranked:
        key = round(p.seconds.value, 6), p.memory_bytes
        if key not in seen:
            seen.add(key)
            yield p


def _why(p: Prediction, winner: Prediction, limit: int) -> str:
    if p.memory_bytes > limit:
        largest = max(p.memory, key=lambda name: p.memory[name])
        return f"needs {p.memory_bytes / 2**30:.0f} GiB, most of it {largest}"
    if p is winner:
        return "best"
    slower = p.seconds.value / winner.seconds.value - 1
    more_compute = p.compute_s - winner.compute_s
    more_waiting = p.exposed_s - winner.exposed_s
    cause = "computes more" if more_compute > more_waiting else "waits longer for the network"
    if p.binds == HOST_BINDS:
        cause = "the host launches for longer"
    return f"{slower:.1%} slower: {cause}"
