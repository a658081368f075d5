"""A process group of N ranks that only this process is part of, on a modelled network.

The network has two levels, the links inside the node and the card to other nodes
(``ragged_fsdp.predict.network``), and each is one stream that all groups share. A collective waits for the
stream that called it, holds each level for the time ``price`` there says, and is done when both are: two
collectives on different levels run beside each other, two on the same level one after the other. On the
level that carries it longer it also writes plausible data where the other ranks' data would arrive, within
the time it holds. ``Work.wait`` makes the caller's stream wait for both, and the work keeps its tensors alive
until then, as NCCL's does. Nothing here knows which implementation is calling: the price depends on the bytes
and on the global ranks of the group alone.

What a collective of buffer ``B`` (the full buffer, all ranks' parts together) copies, by ``delivery``:

=================  ==========================  ============================================
collective         ``fake``                    ``channels``, ``memcpy``
=================  ==========================  ============================================
all-gather         read and write ``B`` once   the same (a ring forwards what it receives)
all-to-all         none (see below)            read and write ``B`` once
point to point     none (see below)            each receive is written once
reduce-scatter     none                        this rank's part is copied; the sum is free
gather, scatter    none                        what arrives at this rank is written once
others             none                        none
=================  ==========================  ============================================

``fake`` is the model of torch's own fake process group: gathers are device copies, everything else delivers
nothing. But rows of an all-to-all are delivered where they are small, and large ones once into the same
memory: what lay there before would become gradients, and weights of NaN were seen to make steps 15 %
faster, since such products draw less power. Receives likewise: with what this rank sent last, if it is as
large, and zeros if not. ``memcpy`` uses device copies for all, which take the whole device while they run.
With ``channels`` each collective is one kernel of a few thread blocks on a stream of high priority, as
NCCL's are under FSDP: it runs beside the computation, shares its memory bandwidth, and takes
multiprocessors from it.

Point-to-point calls that follow each other without a wait between them, as ``batch_isend_irecv`` makes
them, are under way together: of what is sent and what is received on a level, the larger counts, and one
step of latency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .network import Network, Place, Seconds, Traffic, exchange_price, network_of, price

__all__ = ["BACKEND", "DELIVERIES", "LEVELS", "PAYLOADS", "Wire", "WireGroup", "join"]

BACKEND = "wire"
PAYLOADS = ("repeat", "distinct", "zeros", "nothing")
DELIVERIES = ("fake", "channels", "memcpy")
LEVELS = Seconds._fields
_POOL_BYTES = 1 << 30
_INIT_STD = 0.02
_INT8_STD = 40.0  # codes of int8 fill their range
_SMALL_BYTES = 16 << 20  # copied within 10 us
_FREE, _NO_TIME, _NO_TRAFFIC = network_of(None), Seconds(0.0, 0.0), Traffic()


class Copy(NamedTuple):
    """Flat ``source``, which is part ``own`` of flat ``target``, delivered to all ``parts`` of it.

    None as the source delivers zeros.
    """

    target: torch.Tensor
    source: torch.Tensor | None
    parts: int = 1
    own: int = 0

    @property
    def in_place(self) -> bool:
        """Whether the source lies where the copy would put it, so that nothing need be copied."""
        return self.source.data_ptr() == self.target.data_ptr() + self.own * self.source.nbytes


@dataclass
class Wire:
    """The two links of this process: their network, what went over them, and their streams.

    ``payload`` says what a gather delivers for the other ranks: ``repeat`` copies this rank's part
    (what torch's fake process group does), ``distinct`` delivers random numbers of the size of freshly
    initialised weights (int8: of its range; bytes: float8 codes, which travel as such), ``zeros`` clears it.
    Matrix products on zeros draw less power and so run at higher clocks than any training will: results
    under ``zeros`` compare with other such results only.
    ``nothing`` leaves the memory as it is: for host times, where launching deliveries would count.
    """

    network: Network = _FREE
    """May be changed between steps."""
    payload: str = "repeat"
    delivery: str = "fake"
    moved_bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    held_s: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Seconds for which each kind of collective held each of :data:`LEVELS`."""
    _streams: dict[int, torch.Stream] = field(default_factory=dict)
    pairs: Traffic = _NO_TRAFFIC
    """What the point-to-point calls that are under way together have sent and received so far."""
    _sent: torch.Tensor | None = None
    """The last tensor that one of them sent, flat."""
    _pools: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)
    """Addresses of large rows that were delivered once: ``fake`` does not write them again."""

    def __post_init__(self) -> None:
        if self.payload not in PAYLOADS:
            raise ValueError(f"payload: expected one of {PAYLOADS}, got {self.payload!r}")
        if self.delivery not in DELIVERIES:
            raise ValueError(f"delivery: expected one of {DELIVERIES}, got {self.delivery!r}")

    @property
    def device_index(self) -> int | None:
        """The device from which anything went over the wire."""
        return next((stream.device_index for stream in self._streams.values()), None)

    def stream(self, level: int) -> torch.Stream:
        """The stream of one of :data:`LEVELS`, by its index."""
        if level not in self._streams:
            self._streams[level] = torch.Stream("cuda", priority=-1)
        return self._streams[level]

    @property
    def pool_bytes(self) -> int:
        """Memory held for ``distinct`` payloads; not the implementation's, so reports subtract it."""
        return sum(pool.nbytes for pool in self._pools.values())

    def reset_counts(self) -> None:
        for counts in (self.moved_bytes, self.calls, self.held_s):
            counts.clear()

    def drain(self) -> None:
        """Make the current stream wait for all that is on the wire."""
        for stream in self._streams.values():
            torch.cuda.current_stream().wait_stream(stream)

    def count(self, kind: str, nbytes: int, seconds: Seconds) -> None:
        self.moved_bytes[kind] += nbytes
        self.calls[kind] += 1
        if seconds is not _NO_TIME:
            for level, held in zip(LEVELS, seconds):
                self.held_s[kind, level] += held

    def pair(self, traffic: Traffic) -> tuple[int, Seconds]:
        """Bytes and seconds by which a point-to-point call makes those that are under way longer."""
        before, after = self.pairs, self.pairs.plus(traffic)
        self.pairs = after
        (moved, held), (moved_before, held_before) = (
            (max(sum(t[::2]), sum(t[1::2])), exchange_price(t, self.network)) for t in (after, before)
        )
        return int(moved - moved_before), Seconds(*(a - b for a, b in zip(held, held_before)))

    def end_pairs(self) -> None:
        """The next point-to-point call does not share the wire with those before."""
        self.pairs, self._sent = _NO_TRAFFIC, None

    def note_sent(self, flat: torch.Tensor) -> None:
        """What the next receive may deliver."""
        self._sent = flat

    def receive(self, flat: torch.Tensor) -> Copy:
        """What a receive delivers: what was sent last, if it is as large, else zeros."""
        sent = self._sent
        if sent is None or sent.dtype != flat.dtype or sent.numel() < flat.numel():
            return Copy(flat, None)
        return Copy(flat, sent[: flat.numel()])

    def carry(
        self, kind: str, copies: Sequence[Copy], seconds: Seconds, level: int | None = None
    ) -> list[torch.Event]:
        """Hold the levels and make the copies behind the current stream; done when all events are reached.

        Copies are made on ``level``, or where none is given on the level that is held longer.
        """
        longest = int(seconds.outside > seconds.inside) if level is None else level
        copies = self.worth_making(kind, copies)
        caller = torch.accelerator.current_stream(self.stream(longest).device_index)
        events = []
        for one, held in enumerate(seconds):
            if one != longest and not held:
                continue
            stream = self.stream(one)
            stream.wait_stream(caller)
            with stream:
                self.transfer(copies if one == longest else (), round(held * 1e9), one)
            events.append(stream.record_event())
        return events

    def transfer(self, copies: Sequence[Copy], hold_ns: int, level: int) -> None:
        """Make ``copies`` and occupy the current stream, that of ``level``, for ``hold_ns`` or longer."""
        if self.fuses and len(copies) == 1 and copies[0].source is not None:
            self._repeat_by_channels(copies[0], hold_ns)
            return
        if not copies or not hold_ns:
            for copy in copies:
                self.make(copy)
            if hold_ns:
                from .spin import spin_ns

                spin_ns(hold_ns)
            return
        from .spin import hold_since, stamp

        stamp(level)
        for copy in copies:
            self.make(copy)
        hold_since(level, hold_ns)

    def worth_making(self, kind: str, copies: Sequence[Copy]) -> Sequence[Copy]:
        """The copies of a collective that this delivery makes; the others are free in its model."""
        if self.delivery != "fake" or kind == "all_gather":
            return copies
        if kind not in ("all_to_all", "point_to_point") or self.payload == "nothing":
            return ()
        made = [c for c in copies if c.target.nbytes <= _SMALL_BYTES or c.target.data_ptr() not in self._seen]
        self._seen.update(copy.target.data_ptr() for copy in made)
        return made

    @property
    def fuses(self) -> bool:
        """Whether a collective is one kernel of few thread blocks, copies and modelled time together."""
        return self.delivery == "channels" and self.payload == "repeat"

    def make(self, copy: Copy) -> None:
        """Make one copy, as the payload and the delivery say."""
        if copy.source is None:
            copy.target.zero_()
        elif not copy.source.numel():
            return
        elif copy.target.is_cuda and self.fuses:
            self._repeat_by_channels(copy)
        elif copy.parts == 1:
            copy.target.copy_(copy.source)
        else:
            self._deliver(copy)

    @staticmethod
    def _repeat_by_channels(copy: Copy, hold_ns: int = 0) -> None:
        from .spin import repeat_by_channels

        skipped = copy.own if copy.in_place else -1
        repeat_by_channels(copy.target, copy.source, copy.parts, skipped, hold_ns)

    def _deliver(self, copy: Copy) -> None:
        """Fill the target, one part per rank, as an all-gather of the source would."""
        flat, part, own = copy.target, copy.source.numel(), copy.own
        if not copy.in_place:
            flat.narrow(0, own * part, part).copy_(copy.source)
        if self.payload == "repeat":
            self.repeat(flat, part, own)
        if self.payload in ("repeat", "nothing"):
            return
        for others in (flat[: own * part], flat[(own + 1) * part :]):
            if self.payload == "zeros":
                others.zero_()
            else:
                self._fill_from_pool(others)

    def _fill_from_pool(self, flat: torch.Tensor) -> None:
        pool = self._pools.get(flat.dtype)
        if pool is None:
            numel = _POOL_BYTES // flat.element_size() if flat.is_cuda else 4096
            pool = self._pools[flat.dtype] = _random(flat.dtype, numel, flat.device)
        for start in range(0, flat.numel(), pool.numel()):
            chunk = flat[start : start + pool.numel()]
            chunk.copy_(pool[: chunk.numel()])

    def repeat(self, flat: torch.Tensor, part_numel: int, rank: int) -> None:
        """Copy part ``rank`` over all parts by doubling: few launches, one read and one write per byte."""
        if rank:
            flat[:part_numel].copy_(flat.narrow(0, rank * part_numel, part_numel))
        done = part_numel
        while done < flat.numel():
            step = min(done, flat.numel() - done)
            flat.narrow(0, done, step).copy_(flat.narrow(0, 0, step))
            done += step


def _random(dtype: torch.dtype, numel: int, device: torch.device) -> torch.Tensor:
    """What other ranks' parts may be. Bytes are float8 codes, so not any byte: some are no numbers."""
    if dtype.itemsize > 1:
        return torch.empty(numel, dtype=dtype, device=device).normal_(std=_INIT_STD)
    drawn = torch.empty(numel, dtype=torch.bfloat16, device=device)
    if dtype == torch.int8:
        return drawn.normal_(std=_INT8_STD).clamp_(-127, 127).to(dtype)
    return drawn.normal_().to(torch.float8_e4m3fn).view(dtype)  # a scale times this has the scale's size


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """Tensors of one size that lie one behind the other, as one: few launches instead of one each."""
    first = tensors[0]
    step = first.nbytes
    if any(t.nbytes != step or t.data_ptr() != first.data_ptr() + i * step for i, t in enumerate(tensors)):
        return None
    return first.as_strided((first.numel() * len(tensors),), (1,))


class _Delivered(dist.Work):
    """Finished when all levels reached their events; ``wait`` orders the caller's stream after them."""

    def __init__(self, events: Sequence[torch.Event], tensors: tuple[torch.Tensor, ...], wire: Wire) -> None:
        super().__init__()
        self.events, self._wire = events, wire
        # Freed memory must not be reused under the wire.
        self.tensors: tuple[torch.Tensor, ...] | None = tensors

    def wait(self, timeout: Any = None) -> bool:
        if self._wire.pairs is not _NO_TRAFFIC:
            self._wire.end_pairs()
        if self.events:
            stream = torch.accelerator.current_stream(self._wire.device_index)
            for event in self.events:
                stream.wait_event(event)
        self.tensors = None
        return True

    def is_completed(self) -> bool:
        return all(event.query() for event in self.events)

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        self.wait()
        future.set_result(None)
        return future


class WireGroup(dist.ProcessGroup):
    """Rank ``rank`` of a group of global ranks; the other ranks do not exist."""

    def __init__(self, rank: int, global_ranks: Sequence[int], wire: Wire) -> None:
        super().__init__(rank, len(global_ranks))
        self._own_rank, self._own_size, self._wire = rank, len(global_ranks), wire
        self._global_ranks = tuple(global_ranks)
        self._placed: tuple[Network, Place] | None = None
        self._coalesced: list[_Delivered] | None = None

    def size(self) -> int:
        return self._own_size

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> WireGroup:
        """Itself, which has no ``supports_coalescing``: torch asks for it before batched calls since 2.14."""
        return self

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def place(self) -> Place:
        """Where the ranks of this group lie on the wire's present network."""
        network = self._wire.network
        if self._placed is None or self._placed[0] is not network:
            self._placed = network, Place.of(self._global_ranks, self._global_ranks[self._own_rank], network)
        return self._placed[1]

    def _run(
        self, kind: str, nbytes: int, tensors: tuple[torch.Tensor, ...], copies: Sequence[Copy] = ()
    ) -> dist.Work:
        """A collective in which all ranks take part alike."""
        network = self._wire.network
        seconds = _NO_TIME if network is _FREE else price(kind, nbytes, self.place, network)
        return self._carried(kind, nbytes, tensors, copies, seconds)

    def _exchange(
        self,
        kind: str,
        sent: Sequence[int],
        received: Sequence[int],
        tensors: tuple[torch.Tensor, ...],
        copies: Sequence[Copy] = (),
    ) -> dist.Work:
        """A collective of so many bytes to and from each rank of the group."""
        network = self._wire.network
        seconds = _NO_TIME
        if network is not _FREE:
            seconds = exchange_price(self.place.traffic(sent, received), network)
        return self._carried(kind, max(sum(sent), sum(received)), tensors, copies, seconds)

    def _carried(
        self,
        kind: str,
        nbytes: int,
        tensors: tuple[torch.Tensor, ...],
        copies: Sequence[Copy],
        seconds: Seconds,
        level: int | None = None,
    ) -> dist.Work:
        wire = self._wire
        if kind != "point_to_point" and wire.pairs is not _NO_TRAFFIC:
            wire.end_pairs()
        wire.count(kind, 2 * nbytes if kind == "all_reduce" else nbytes, seconds)
        events: list[torch.Event] = []
        if tensors[0].is_cuda if tensors else wire.device_index is not None:
            events = wire.carry(kind, copies, seconds, level)
        else:
            for copy in copies:
                wire.make(copy)
        work = _Delivered(events, tensors, wire)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """One work for all that was called since the start; each has its own price."""
        works, self._coalesced = self._coalesced or [], None
        tensors = tuple(tensor for work in works for tensor in work.tensors or ())
        return _Delivered([event for work in works for event in work.events], tensors, self._wire)

    def _gathered(self, output: torch.Tensor, part: torch.Tensor) -> Copy:
        """What an all-gather of ``part`` delivers."""
        return Copy(output.view(-1), part.view(-1), self._own_size, self._own_rank)

    def _allgather_base(self, output: torch.Tensor, part: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._run("all_gather", output.nbytes, (output, part), [self._gathered(output, part)])

    def allgather_into_tensor_coalesced(self, outputs: list, parts: list, opts: Any = None) -> dist.Work:
        copies = [self._gathered(output, part) for output, part in zip(outputs, parts)]
        return self._run("all_gather", sum(o.nbytes for o in outputs), (*outputs, *parts), copies)

    def allgather(self, outputs: list, parts: list, opts: Any = None) -> dist.Work:
        copies = [Copy(output.view(-1), parts[0].view(-1)) for output in outputs[0]]
        return self._run("all_gather", sum(o.nbytes for o in outputs[0]), (*outputs[0], *parts), copies)

    def _reduce_scatter_base(self, part: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([part], [source], opts)

    def reduce_scatter_tensor_coalesced(self, parts: list, sources: list, opts: Any = None) -> dist.Work:
        copies = []
        for part, source in zip(parts, sources):
            own = source.view(-1).narrow(0, self._own_rank * part.numel(), part.numel())
            if own.data_ptr() != part.data_ptr():
                copies.append(Copy(part.view(-1), own))
        return self._run("reduce_scatter", sum(s.nbytes for s in sources), (*parts, *sources), copies)

    def reduce_scatter(self, parts: list, sources: list, opts: Any = None) -> dist.Work:
        copies = [Copy(parts[0].view(-1), sources[0][self._own_rank].view(-1))]
        nbytes = sum(s.nbytes for s in sources[0])
        return self._run("reduce_scatter", nbytes, (*parts, *sources[0]), copies)

    def alltoall_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Any,
        input_splits: Any,
        opts: Any = None,
    ) -> dist.Work:
        tensors = (output, source)
        if output_splits or input_splits:
            both = min(output.numel(), source.numel())
            copy = Copy(output.view(-1)[:both], source.view(-1)[:both])
            sent, received = self._split(source, input_splits), self._split(output, output_splits)
            return self._exchange("all_to_all", sent, received, tensors, [copy])
        # the others send what this rank would send itself
        own = source.view(self._own_size, -1)[self._own_rank]
        copy = Copy(output.view(-1), own, self._own_size, self._own_rank)
        return self._run("all_to_all", max(output.nbytes, source.nbytes), tensors, [copy])

    def _split(self, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
        """Bytes of each rank's rows; none given: equal ones."""
        if not splits:
            return [tensor.nbytes // self._own_size] * self._own_size
        row_bytes = tensor.nbytes // max(1, tensor.shape[0])
        return [rows * row_bytes for rows in splits]

    def alltoall(self, outputs: list, sources: list, opts: Any = None) -> dist.Work:
        own, rows = sources[self._own_rank].view(-1), _joined(outputs)
        if rows is not None and own.numel():
            copies = [Copy(rows, own, len(outputs), self._own_rank)]
        else:  # who sends nothing to himself receives what he sends to another
            like = own if own.numel() else max((t.view(-1) for t in sources), key=torch.Tensor.numel)
            copies = [
                Copy(part, like[: part.numel()])
                for output in outputs
                if like.numel()
                for part in output.view(-1).split(like.numel())
            ]
        sent, received = ([t.nbytes for t in tensors] for tensors in (sources, outputs))
        return self._exchange("all_to_all", sent, received, (*outputs, *sources), copies)

    def send(self, tensors: list, to: int, tag: int = 0) -> dist.Work:
        self._wire.note_sent(tensors[0].view(-1))
        return self._pair(to, tensors[0], sent=True)

    def recv(self, tensors: list, source: int, tag: int = 0) -> dist.Work:
        return self._pair(source, tensors[0], self._wire.receive(tensors[0].view(-1)), sent=False)

    def _pair(self, peer: int, tensor: torch.Tensor, *copies: Copy, sent: bool) -> dist.Work:
        """One way between this rank and another one."""
        nbytes, seconds = self._wire.pair(self.place.one_way(peer, tensor.nbytes, sent=sent))
        kept = (tensor, *(copy.source for copy in copies if copy.source is not None))
        # A call that adds no time is still behind the others on its level: its bytes come with theirs.
        level = int(self.place.outside[peer])
        return self._carried("point_to_point", nbytes, kept, copies, seconds, level)

    def gather(self, outputs: list, parts: list, opts: Any) -> dist.Work:
        part, received = parts[0], outputs[0] if outputs else []
        copies = [Copy(output.view(-1), part.view(-1)) for output in received]
        return self._rooted("gather", part, received, copies, opts.rootRank)

    def scatter(self, outputs: list, parts: list, opts: Any) -> dist.Work:
        output, sent = outputs[0], parts[0] if parts else []
        copies = [Copy(output.view(-1), sent[self._own_rank].view(-1))] if sent else []
        return self._rooted("scatter", output, sent, copies, opts.rootRank)

    def _rooted(
        self, kind: str, own: torch.Tensor, of_all: list, copies: Sequence[Copy], root: int
    ) -> dist.Work:
        """The root exchanges a tensor with each rank, the others exchange theirs with the root."""
        if self._own_rank == root:
            many = [tensor.nbytes for tensor in of_all]
        else:
            many = [own.nbytes if rank == root else 0 for rank in range(self._own_size)]
        none = [0] * self._own_size
        outwards = (kind == "scatter") == (self._own_rank == root)
        sent, received = (many, none) if outwards else (none, many)
        return self._exchange(kind, sent, received, (own, *of_all), copies)

    def allreduce(self, tensors: list, opts: Any = None) -> dist.Work:
        return self._run("all_reduce", sum(t.nbytes for t in tensors), tuple(tensors))

    def allreduce_coalesced(self, tensors: list, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list, opts: Any = None) -> dist.Work:
        return self._run("broadcast", sum(t.nbytes for t in tensors), tuple(tensors))

    def reduce(self, tensors: list, opts: Any = None) -> dist.Work:
        return self._run("reduce", sum(t.nbytes for t in tensors), tuple(tensors))

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._run("barrier", 0, ())


# torch 2.13 calls the same collectives by these names.
WireGroup.all_gather_single = WireGroup._allgather_base
WireGroup.reduce_scatter_single = WireGroup._reduce_scatter_base
WireGroup.all_to_all_single = WireGroup.alltoall_base
WireGroup.all_gather_single_coalesced = WireGroup.allgather_into_tensor_coalesced
WireGroup.reduce_scatter_single_coalesced = WireGroup.reduce_scatter_tensor_coalesced

_JOINED: list[Wire] = []


def _create(options: Any, _: Any) -> WireGroup:
    ranks = options.global_ranks_in_group or range(options.group_size)
    return WireGroup(options.group_rank, ranks, _JOINED[-1])


def join(ranks: int, wire: Wire, rank: int = 0) -> None:
    """Make this process rank ``rank`` of ``ranks`` over ``wire`` (``torch.distributed`` is initialised)."""
    _JOINED.append(wire)
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, rank=rank, world_size=ranks, store=dist.HashStore())
