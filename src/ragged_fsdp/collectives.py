"""The collectives of a buffer, in place on flat tensors, and the memory they work on.

A :class:`Comm` is how buffers are gathered and reduced: allocate, gather, reduce. There is one class per
kind of memory or of collective, and nothing above it knows which:

    ==================  ======================================  ==========================================
    class               memory                                  collectives
    ==================  ======================================  ==========================================
    Comm                the device's common pool                torch.distributed's
    ProcessGroupComm    a pool of the process group's backend   torch.distributed's
    UserComm            the user's, if the object allocates     one object of the user's
    LevelComm           the device's common pool                gathers between nodes, then inside them
    OverGroup           that of another comm                    another comm's reductions, over a group
    ==================  ======================================  ==========================================

Torch's functions are looked up by their public names at every call, so that a wrapper around them, or a
process group of the user's own, sees every collective (newer releases call ``all_gather_into_tensor``
``all_gather_single``). Dtypes a backend does not know (float8, complex, ...) are gathered and exchanged as
bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ragged_fsdp.topology import LevelGroups
from ragged_fsdp.torch_internals import WIRE_DTYPES, backend_name, backend_of, joins_gathers, one_launch

__all__ = [
    "Comm",
    "LevelComm",
    "OverGroup",
    "ProcessGroupComm",
    "UserComm",
    "all_reduce_",
    "all_to_all",
    "all_to_all_pieces",
    "explain",
    "explain_failure",
    "process_group_comm",
    "reduce_op",
    "send_and_receive",
    "wait_all",
]

_RENAMED = hasattr(dist, "all_gather_single")
_GATHER = "all_gather_single" if _RENAMED else "all_gather_into_tensor"
_SCATTER = "reduce_scatter_single" if _RENAMED else "reduce_scatter_tensor"
_COMMON_MEMORY = nullcontext()
_GATHER_STEPS = 8  # in which the slots of the other nodes come: each is shared while the next arrive


def all_reduce_(
    flat: torch.Tensor, group: dist.ProcessGroup, *, op: Any, async_op: bool = False
) -> dist.Work | None:
    """Reduce ``flat`` over the ranks in place."""
    return dist.all_reduce(flat, op=op, group=group, async_op=async_op)


def all_to_all(
    received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Send the r-th equal part of ``sent`` to rank r; ``received`` holds one part from each rank."""
    if sent.dtype not in WIRE_DTYPES:
        received, sent = received.view(torch.uint8), sent.view(torch.uint8)
    return dist.all_to_all_single(received, sent, group=group, async_op=async_op)


def all_to_all_pieces(
    received: list[torch.Tensor],
    sent: list[torch.Tensor],
    group: dist.ProcessGroup,
    *,
    async_op: bool = False,
) -> Any:
    """Send ``sent[r]`` to rank r and receive ``received[r]`` from it; parts lie anywhere and may be empty."""
    if sent[0].dtype not in WIRE_DTYPES:
        received, sent = ([part.view(torch.uint8) for part in parts] for parts in (received, sent))
    # gloo has no all-to-all of lists, and torch's fake group one whose parts must be alike in both directions
    if sent[0].device.type != "cpu" and backend_name(group, sent[0].device) != "fake":
        return dist.all_to_all(received, sent, group=group, async_op=async_op)
    mine = group.rank()
    received[mine].copy_(sent[mine])
    messages = [
        dist.P2POp(op, part, group=group, group_peer=rank)
        for op, parts in ((dist.isend, sent), (dist.irecv, received))
        for rank, part in enumerate(parts)
        if rank != mine and part.numel()
    ]
    works = dist.batch_isend_irecv(messages) if messages else []
    if not async_op:
        wait_all(works)
    return works


def send_and_receive(
    sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor], group: dist.ProcessGroup
) -> Any:
    """Start to send parts to some ranks and to receive some from others; the works to wait for."""
    nothing = next(iter(sent.values()))[:0]
    outputs, inputs = (
        [parts.get(rank, nothing) for rank in range(group.size())] for parts in (received, sent)
    )
    return all_to_all_pieces(outputs, inputs, group, async_op=True)


def wait_all(works: Any) -> None:
    """Wait for asynchronous collectives: a work, works in lists, or None for what is done."""
    for work in works if isinstance(works, list) else [works]:
        if isinstance(work, list):
            wait_all(work)
        elif work is not None:
            work.wait()


class Comm:
    """Torch's collectives, on memory of the device's common pool."""

    common_memory = True
    """Whether any memory of the device will do: buffers may then be pooled, lent and kept by others."""
    allocates = False
    """Whether collectives work only on tensors from :meth:`allocate`; gathers are then copied out of them."""

    def memory(self, device: torch.device) -> AbstractContextManager:
        """Within it this thread's allocations on ``device`` are fit for :meth:`gather` and :meth:`reduce`."""
        return _COMMON_MEMORY

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A new, uninitialised tensor to gather into or to reduce."""
        with self.memory(device):
            return torch.empty(size, dtype=dtype, device=device)

    def gather(
        self, full: torch.Tensor, slot: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False
    ) -> dist.Work | None:
        """Fill ``full`` with the slots of all ranks; ``slot`` is this rank's part of it."""
        if full.dtype not in WIRE_DTYPES:
            full, slot = full.view(torch.uint8), slot.view(torch.uint8)
        return getattr(dist, _GATHER)(full, slot, group=group, async_op=async_op)

    def reduce(
        self,
        shard: torch.Tensor,
        full: torch.Tensor,
        group: dist.ProcessGroup,
        *,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``full`` over the ranks; this rank's part of the result is ``shard``."""
        return getattr(dist, _SCATTER)(shard, full, op=op, group=group, async_op=async_op)


class UserComm(Comm):
    """One object of the user's, for gathers or for reductions: FSDP2's ``AllGather`` or ``ReduceScatter``.

    It may have an ``allocate(size, *, dtype, device)``. A gradient buffer then lies in a tensor from there.
    Gathered weights cannot, since their storage must be the same in forward and backward; they are copied
    out.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self._allocate: Callable[..., torch.Tensor] | None = getattr(call, "allocate", None)
        self.allocates = self._allocate is not None
        self.common_memory = self._allocate is None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """What the user's object allocates, or memory of the common pool."""
        if self._allocate is None:
            return super().allocate(size, dtype=dtype, device=device)
        return self._allocate(size, dtype=dtype, device=device)

    def gather(
        self, full: torch.Tensor, slot: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False
    ) -> Any:
        """Call the user's all-gather."""
        if full.dtype not in WIRE_DTYPES:
            full, slot = full.view(torch.uint8), slot.view(torch.uint8)
        return self.call(output_tensor=full, input_tensor=slot, group=group, async_op=async_op)

    def reduce(
        self,
        shard: torch.Tensor,
        full: torch.Tensor,
        group: dist.ProcessGroup,
        *,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Call the user's reduce-scatter."""
        return self.call(output_tensor=shard, input_tensor=full, group=group, op=op, async_op=async_op)


class OverGroup(Comm):
    """The reductions of another comm over a process group of their own, beside gathers of the same ranks."""

    def __init__(self, comm: Comm, group: dist.ProcessGroup) -> None:
        self._comm, self._group = comm, group

    def reduce(
        self,
        shard: torch.Tensor,
        full: torch.Tensor,
        group: dist.ProcessGroup,
        *,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce over the group of its own instead of ``group``."""
        return self._comm.reduce(shard, full, self._group, op=op, async_op=async_op)


class LevelComm(Comm):
    """Gathers over nodes: a slot crosses to each other node once, straight to its place there, and is then
    shared inside.

    A ring over N ranks takes N - 1 steps, most of them short hops inside a node that wait for long ones. Here
    the long hops are independent, and while the slots of some nodes are shared those of the next arrive. What
    arrived together is shared with one launch over NCCL, so their number does not grow with that of nodes.
    The nodes' ranks must be consecutive, so that the slots of a node are one run of the buffer.
    """

    def __init__(self, over: LevelGroups, device: torch.device) -> None:
        if not over.levels.in_order:
            raise ValueError(f"LevelComm: the ranks of a node must be consecutive, got {over.levels.nodes}.")
        self._over = over
        self._joins = joins_gathers(over.local, device)

    def gather(
        self, full: torch.Tensor, slot: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False
    ) -> Any:
        """Gather along the rail and inside the node, step by step; another group has no levels here."""
        over = self._over
        if over.rail is None or not over.are_of(group):
            return super().gather(full, slot, group, async_op=async_op)
        if full.dtype not in WIRE_DTYPES:
            full, slot = full.view(torch.uint8), slot.view(torch.uint8)
        nodes, places = len(over.levels.nodes), over.levels.ranks_per_node
        wholes = full.view(nodes, -1).unbind()
        own = full.view(nodes, places, -1)[:, over.place].unbind()
        each = -(-(nodes - 1) // _GATHER_STEPS)
        steps = [range(first, min(first + each, nodes)) for first in range(1, nodes, each)]
        arriving = [([(over.node - ahead) % nodes for ahead in step], step) for step in steps]
        crossings = [self._cross(own, slot, sources, step) for sources, step in arriving]
        works = [self._share(wholes, own, [over.node], async_op)]
        for (sources, _), crossing in zip(arriving, crossings):
            wait_all(crossing)  # the other ranks of the node would receive what lay there before
            works.append(self._share(wholes, own, sources, async_op))
        return works if async_op else None

    def _cross(
        self, own: Sequence[torch.Tensor], slot: torch.Tensor, sources: Sequence[int], step: range
    ) -> Any:
        """Send this rank's slot to the nodes so far ahead, and receive those of ``sources`` at its place."""
        over, rail = self._over, self._over.rail
        assert rail is not None
        sent = {(over.node + ahead) % len(own): slot for ahead in step}
        return send_and_receive(sent, {node: own[node] for node in sources}, rail)

    def _share(
        self,
        wholes: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor],
        nodes: Sequence[int],
        async_op: bool,
    ) -> Any:
        """Gather the slots of some nodes from the ranks of this one."""
        local = self._over.local
        if not self._joins or len(nodes) == 1:
            return [super(LevelComm, self).gather(wholes[n], own[n], local, async_op=async_op) for n in nodes]
        with one_launch(local, async_ops=async_op) as launched:
            for node in nodes:
                super().gather(wholes[node], own[node], local)
        return launched if async_op else None


class ProcessGroupComm(Comm):
    """Torch's collectives, on memory that the process group's backend allocates.

    NCCL moves registered memory faster: memory from ``ncclMemAlloc``, which a process group hands out through
    an allocator of its own. Gathered weights are freed and brought back by resizing their storage, so it is
    the allocator below ``resize_`` that is exchanged, for as long as :meth:`memory` is entered.
    """

    common_memory = False

    def __init__(self, backend: Any) -> None:
        self._pool = torch.cuda.MemPool(backend.mem_allocator)

    def memory(self, device: torch.device) -> AbstractContextManager:
        """Within it this thread's allocations on ``device`` come from the process group's pool."""
        return torch.cuda.use_mem_pool(self._pool, device)


_COMMS: weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroupComm] = weakref.WeakKeyDictionary()


def process_group_comm(pg: dist.ProcessGroup, device: torch.device) -> Comm | None:
    """The comm over ``pg``'s memory, one for all its users; None if its backend has none on ``device``."""
    backend = backend_of(pg, device)
    if not backend.supports_tensor_alloc(device):
        return None
    if pg not in _COMMS:
        _COMMS[pg] = ProcessGroupComm(backend)
    return _COMMS[pg]


def reduce_op(average: bool) -> Any:
    """The reduction: the mean over the ranks or their sum."""
    return dist.ReduceOp.AVG if average else dist.ReduceOp.SUM


def explain(error: RuntimeError, phase: str, name: str, group: dist.ProcessGroup) -> None:
    """Add group, phase and rank to an error raised by a collective, such as a timeout."""
    error.add_note(
        f"ragged_fsdp: {phase} of group '{name}' failed on rank {dist.get_rank()} "
        f"(rank {group.rank()} of {group.size()} of '{group.group_name}')."
    )


@contextmanager
def explain_failure(phase: str, name: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Add group, phase and rank to whatever error a collective raises within it."""
    try:
        yield
    except RuntimeError as error:
        explain(error, phase, name, group)
        raise
