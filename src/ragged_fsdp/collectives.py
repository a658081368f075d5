"""The collectives of a group buffer, by the names this torch has, with errors that say where.

Every function works in place on flat tensors and is looked up on ``torch.distributed`` at each call, since
profilers and tests intercept the names there (newer releases call ``all_gather_into_tensor``
``all_gather_single``). Where nobody does, the three of a step call the process group itself: what torch's
functions check costs more than the launch, and is true of what is passed here. Dtypes a backend does not
know (float8, complex, ...) travel as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions, ReduceScatterOptions

__all__ = [
    "all_gather_",
    "all_reduce_",
    "all_to_all",
    "all_to_all_pieces",
    "explain",
    "explain_failure",
    "reduce_op",
    "reduce_scatter",
    "same_on_all_ranks",
]

_WIRE_DTYPES = frozenset(
    {
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    }
)

_RENAMED = hasattr(dist, "all_gather_single")


class _Collective:
    """One of torch's functions, and the method of a process group in which it ends."""

    def __init__(self, new_name: str, name: str, method: str, options: type, ops: Sequence[Any]) -> None:
        self.name, self._method = (new_name, new_name) if _RENAMED else (name, method)
        self.stock = getattr(dist, self.name)
        """torch's function; what stands under its name now may be another one."""
        self._options = {(op, later): _options(options, op, later) for op in ops for later in (False, True)}

    def launch(
        self, group: dist.ProcessGroup, *args: Any, async_op: bool, op: Any = None
    ) -> dist.Work | None:
        """The work under way, or None when it has been waited for."""
        work = getattr(group, self._method)(*args, self._options[op, async_op])
        if async_op or work is None:
            return work
        work.wait()
        return None


def _options(kind: type, op: Any, async_op: bool) -> Any:
    made = kind()
    made.asyncOp = async_op
    if op is not None:
        made.reduceOp = op
    return made


_GATHER = _Collective(
    "all_gather_single", "all_gather_into_tensor", "_allgather_base", AllgatherOptions, [None]
)
_SCATTER = _Collective(
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    ReduceScatterOptions,
    [dist.ReduceOp.SUM, dist.ReduceOp.AVG],
)
_EXCHANGE = _Collective("all_to_all_single", "all_to_all_single", "alltoall_base", AllToAllOptions, [None])


def all_gather_(
    full: torch.Tensor,
    slot: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    async_op: bool = False,
    comm: Callable[..., Any] | None = None,
) -> dist.Work | None:
    """Fill ``full`` with the slots of all ranks; ``slot`` is this rank's part of ``full`` and in place."""
    if full.dtype not in _WIRE_DTYPES:
        full, slot = full.view(torch.uint8), slot.view(torch.uint8)
    if comm is not None:
        return comm(output_tensor=full, input_tensor=slot, group=group, async_op=async_op)
    if (function := getattr(dist, _GATHER.name)) is not _GATHER.stock:
        return function(full, slot, group=group, async_op=async_op)
    return _GATHER.launch(group, full, slot, async_op=async_op)


def reduce_scatter(
    shard: torch.Tensor,
    full: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    op: Any,
    async_op: bool = False,
    comm: Callable[..., Any] | None = None,
) -> dist.Work | None:
    """Reduce ``full`` over the ranks and keep this rank's part in ``shard``, which may lie in ``full``."""
    if comm is not None:
        return comm(output_tensor=shard, input_tensor=full, group=group, op=op, async_op=async_op)
    if (function := getattr(dist, _SCATTER.name)) is not _SCATTER.stock:
        return function(output=shard, input=full, group=group, op=op, async_op=async_op)
    return _SCATTER.launch(group, shard, full, op=op, async_op=async_op)


def all_reduce_(
    flat: torch.Tensor, group: dist.ProcessGroup, *, op: Any, async_op: bool = False
) -> dist.Work | None:
    """Reduce ``flat`` over the ranks in place."""
    return dist.all_reduce(flat, op=op, group=group, async_op=async_op)


def all_to_all(
    received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Send the r-th equal part of ``sent`` to rank r; ``received`` holds one part from each rank."""
    if sent.dtype not in _WIRE_DTYPES:
        received, sent = received.view(torch.uint8), sent.view(torch.uint8)
    if (function := getattr(dist, _EXCHANGE.name)) is not _EXCHANGE.stock:
        return function(received, sent, group=group, async_op=async_op)
    return _EXCHANGE.launch(group, received, sent, [], [], async_op=async_op)


def all_to_all_pieces(
    received: list[torch.Tensor],
    sent: list[torch.Tensor],
    group: dist.ProcessGroup,
    *,
    async_op: bool = False,
) -> dist.Work | None:
    """The same for parts that lie anywhere: ``sent[r]`` goes to rank r; parts may be empty."""
    return dist.all_to_all(received, sent, group=group, async_op=async_op)


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
    """The same for whatever runs within it."""
    try:
        yield
    except RuntimeError as error:
        explain(error, phase, name, group)
        raise


def same_on_all_ranks(value: int, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks of ``group`` passed the same 62-bit ``value``: one 16-byte all-reduce."""
    if group.size() == 1:
        return True
    with unset_fake_temporarily():  # memory is estimated with tensors that have no values
        largest = torch.tensor([value, -value], dtype=torch.int64, device=device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        high, low = largest.tolist()
    return high == -low
