"""A process group of N ranks that only this process is part of, with the wire free or modelled.

Each collective runs on one stream that all groups share, the *wire*: it waits for the stream that
called it, writes plausible data where the other ranks' data would arrive, and holds the wire until
``bytes / bandwidth`` have passed since it began. ``Work.wait`` makes the caller's stream wait for it, and
the work keeps its tensors alive until then, as NCCL's does. Nothing here knows which implementation is
calling, so all of them see the same wire.

What a collective of buffer ``B`` (the full buffer, all ranks' parts together) costs, by ``delivery``:

=================  ==========  ==========================  ============================================
collective         wire bytes  ``fake``                    ``channels``, ``memcpy``
=================  ==========  ==========================  ============================================
all-gather         B           read and write ``B`` once   the same (a ring forwards what it receives)
all-to-all         B           none (see below)            read and write ``B`` once
reduce-scatter     B           none                        this rank's part is copied; the sum is free
all-reduce         2 B         none                        none
others             B           none                        none
=================  ==========  ==========================  ============================================

``fake`` is the model of torch's own fake process group: gathers are device copies, everything else
delivers nothing. But rows of an all-to-all are delivered where they are small, and large ones once into the
same memory: what lay there before would become gradients, and weights of NaN were seen to make steps 15 %
faster, since such products draw less power. ``memcpy`` uses device copies for all, which take the whole
device while they run. With ``channels`` each collective is one kernel of a few thread blocks on a stream of
high priority, as NCCL's are under FSDP: it runs beside the computation, shares its memory bandwidth, and
takes multiprocessors from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

__all__ = ["BACKEND", "DELIVERIES", "PAYLOADS", "Wire", "WireGroup", "join"]

BACKEND = "wire"
PAYLOADS = ("repeat", "distinct", "zeros", "nothing")
DELIVERIES = ("fake", "channels", "memcpy")
_POOL_BYTES = 1 << 30
_INIT_STD = 0.02
_SMALL_BYTES = 256 << 20  # copied within 0.2 ms


class Copy(NamedTuple):
    """Flat ``source``, which is part ``own`` of flat ``target``, delivered to all ``parts`` of it."""

    target: torch.Tensor
    source: torch.Tensor
    parts: int = 1
    own: int = 0

    @property
    def in_place(self) -> bool:
        """Whether the source lies where the copy would put it, so that nothing need be copied."""
        return self.source.data_ptr() == self.target.data_ptr() + self.own * self.source.nbytes


@dataclass
class Wire:
    """The one link of this process: its bandwidth, what went over it, and its stream.

    ``payload`` says what a gather delivers for the other ranks: ``repeat`` copies this rank's part
    (what torch's fake process group does), ``distinct`` delivers random numbers of the size of freshly
    initialised weights, ``zeros`` clears it. Matrix products on zeros draw less power and so run at
    higher clocks than any training will: results under ``zeros`` compare with other such results only.
    ``nothing`` leaves the memory as it is: for host times, where launching deliveries would count.
    """

    bandwidth_gb_s: float | None = None
    """None: the wire is free. Otherwise 1e9 bytes per second."""
    payload: str = "repeat"
    delivery: str = "fake"
    moved_bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    _stream: torch.Stream | None = None
    _pools: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)
    """Addresses of large rows that were delivered once: ``fake`` does not write them again."""

    def __post_init__(self) -> None:
        if self.payload not in PAYLOADS:
            raise ValueError(f"payload: expected one of {PAYLOADS}, got {self.payload!r}")
        if self.delivery not in DELIVERIES:
            raise ValueError(f"delivery: expected one of {DELIVERIES}, got {self.delivery!r}")

    @property
    def stream(self) -> torch.Stream:
        if self._stream is None:
            self._stream = torch.Stream("cuda", priority=-1)
        return self._stream

    @property
    def pool_bytes(self) -> int:
        """Memory held for ``distinct`` payloads; not the implementation's, so reports subtract it."""
        return sum(pool.nbytes for pool in self._pools.values())

    def reset_counts(self) -> None:
        self.moved_bytes.clear()
        self.calls.clear()

    def drain(self) -> None:
        """Make the current stream wait for all that is on the wire."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def count(self, kind: str, nbytes: int) -> None:
        self.moved_bytes[kind] += nbytes
        self.calls[kind] += 1

    def transfer(self, copies: Sequence[Copy], nbytes: int) -> None:
        """Make ``copies`` and occupy the current stream for the time ``nbytes`` take, or longer."""
        hold_ns = 0 if self.bandwidth_gb_s is None else round(nbytes / self.bandwidth_gb_s)
        if self.fuses and len(copies) == 1:
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

        stamp()
        for copy in copies:
            self.make(copy)
        hold_since(hold_ns)

    def worth_making(self, kind: str, copies: Sequence[Copy]) -> Sequence[Copy]:
        """The copies of a collective that this delivery makes; the others are free in its model."""
        if self.delivery != "fake" or kind == "all_gather":
            return copies
        if kind != "all_to_all" or self.payload == "nothing":
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
        if not copy.source.numel():
            return
        if copy.target.is_cuda and self.fuses:
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
            pool = torch.empty(numel, dtype=flat.dtype, device=flat.device)
            pool = self._pools[flat.dtype] = pool.normal_(std=_INIT_STD)
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


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """Tensors of one size that lie one behind the other, as one: few launches instead of one each."""
    first = tensors[0]
    step = first.nbytes
    if any(t.nbytes != step or t.data_ptr() != first.data_ptr() + i * step for i, t in enumerate(tensors)):
        return None
    return first.as_strided((first.numel() * len(tensors),), (1,))


class _Delivered(dist.Work):
    """Finished when the wire reached the event; ``wait`` orders the caller's stream after it."""

    def __init__(
        self, event: torch.Event | None, tensors: tuple[torch.Tensor, ...], device_index: int = 0
    ) -> None:
        super().__init__()
        self._event = event
        self._device_index = device_index
        self._tensors: tuple[torch.Tensor, ...] | None = (
            tensors  # freed memory must not be reused under the wire
        )

    def wait(self, timeout: Any = None) -> bool:
        if self._event is not None:
            torch.accelerator.current_stream(self._device_index).wait_event(self._event)
        self._tensors = None
        return True

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        self.wait()
        future.set_result(None)
        return future


class WireGroup(dist.ProcessGroup):
    """Rank ``rank`` of ``size``; the other ranks do not exist."""

    def __init__(self, rank: int, size: int, wire: Wire) -> None:
        super().__init__(rank, size)
        self._own_rank, self._own_size, self._wire = rank, size, wire

    def size(self) -> int:
        return self._own_size

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _run(
        self, kind: str, nbytes: int, tensors: tuple[torch.Tensor, ...], copies: Sequence[Copy] = ()
    ) -> dist.Work:
        wire = self._wire
        wire.count(kind, nbytes)
        if not tensors or not tensors[0].is_cuda:
            for copy in copies:
                wire.make(copy)
            return _Delivered(None, tensors)
        stream = wire.stream
        stream.wait_stream(torch.accelerator.current_stream(stream.device_index))
        with stream:
            wire.transfer(wire.worth_making(kind, copies), nbytes)
        return _Delivered(stream.record_event(), tensors, stream.device_index)

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
        if output_splits or input_splits:
            both = min(output.numel(), source.numel())
            copy = Copy(output.view(-1)[:both], source.view(-1)[:both])
        else:  # the others send what this rank would send itself
            own = source.view(self._own_size, -1)[self._own_rank]
            copy = Copy(output.view(-1), own, self._own_size, self._own_rank)
        return self._run("all_to_all", max(output.nbytes, source.nbytes), (output, source), [copy])

    def alltoall(self, outputs: list, sources: list, opts: Any = None) -> dist.Work:
        own, rows = sources[self._own_rank].view(-1), _joined(outputs)
        if rows is not None:
            copies = [Copy(rows, own, len(outputs), self._own_rank)]
        else:
            copies = [Copy(output.view(-1), own[: output.numel()]) for output in outputs]
        nbytes = max(sum(t.nbytes for t in tensors) for tensors in (outputs, sources))
        return self._run("all_to_all", nbytes, (*outputs, *sources), copies)

    def allreduce(self, tensors: list, opts: Any = None) -> dist.Work:
        return self._run("all_reduce", 2 * sum(t.nbytes for t in tensors), tuple(tensors))

    def allreduce_coalesced(self, tensors: list, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list, opts: Any = None) -> dist.Work:
        return self._run("broadcast", sum(t.nbytes for t in tensors), tuple(tensors))

    def reduce(self, tensors: list, opts: Any = None) -> dist.Work:
        return self._run("reduce", sum(t.nbytes for t in tensors), tuple(tensors))

    def barrier(self, opts: Any = None) -> dist.Work:
        return _Delivered(None, ())


# torch 2.13 calls the same collectives by these names.
WireGroup.all_gather_single = WireGroup._allgather_base
WireGroup.reduce_scatter_single = WireGroup._reduce_scatter_base
WireGroup.all_to_all_single = WireGroup.alltoall_base
WireGroup.all_gather_single_coalesced = WireGroup.allgather_into_tensor_coalesced
WireGroup.reduce_scatter_single_coalesced = WireGroup.reduce_scatter_tensor_coalesced

_JOINED: list[Wire] = []


def _create(store: Any, rank: int, size: int, timeout: Any) -> WireGroup:
    return WireGroup(rank, size, _JOINED[-1])


def join(ranks: int, wire: Wire, rank: int = 0) -> None:
    """Make this process rank ``rank`` of ``ranks`` over ``wire`` (``torch.distributed`` is initialised)."""
    _JOINED.append(wire)
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, rank=rank, world_size=ranks, store=dist.HashStore())
