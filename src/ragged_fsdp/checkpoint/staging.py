"""The copy of a state that is written while training goes on.

Tensors on a device are copied on a stream of their own into pinned memory that stays for the next save, one
copy for each buffer: parameters of a group and flat optimizer states lie side by side in one. The host goes
on at once. Forward and backward of the next step only read what is being copied; the update must wait, on
the device (:meth:`HostStaging.before_update`)::

    host      save | forward, backward, optimizer.step() ...
    compute        | forward ....... backward ........|wait| update
    copies         | buffer 1, buffer 2, ... buffer n |
    thread         |                                  | write
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ragged_fsdp.torch_internals import local_of, spec_of

__all__ = ["HostStaging"]

_ALIGN_BYTES = 16
_DENSE = 0.5  # copy the whole of a buffer if at least this share of it is saved


@dataclass
class _StorageSpan:
    """Bytes of one storage that are copied at once, and the tensors in them."""

    storage: torch.UntypedStorage
    begin: int
    end: int
    members: list[Tensor]


class HostStaging:
    """Host memory for the copies of one run's states."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._stream: Any = None
        self._under_way: tuple[Any, list[Tensor]] | None = None
        """An event behind the copies, and what they read: held until they are done, since what only the state
        refers to would be given back below them."""

    def copy(self, state: Any) -> Any:
        """The state in host memory; what was on a device is there once :meth:`wait` returns."""
        spans = _spans(_tensors(state))
        staged: dict[int, Tensor] = {}
        if spans:
            device = spans[0].members[0].device
            module = torch.get_device_module(device)
            self._stream = self._stream or module.Stream(device=device)
            self._stream.wait_stream(module.current_stream(device))
            self._fit([span.end - span.begin for span in spans], device)
            with module.stream(self._stream):
                for span, block in zip(spans, self._blocks):
                    whole = torch.empty(0, dtype=torch.uint8, device=device).set_(span.storage)
                    block.copy_(whole[span.begin : span.end], non_blocking=True)
                    for tensor in span.members:
                        staged[id(tensor)] = _same_view(tensor, block, span.begin)
            sources = [tensor for span in spans for tensor in span.members]
            self._under_way = self._stream.record_event(), sources
        return _rebuilt(state, staged)

    def before_update(self) -> None:
        """Let the current stream wait for the copies: what it writes next is what they read."""
        under_way = self._under_way  # once: the thread that writes may set it to None meanwhile
        if under_way is not None:
            event, sources = under_way
            torch.get_device_module(sources[0].device).current_stream().wait_event(event)

    def wait(self) -> None:
        """Wait on the host until the copies are done, in the thread that writes them."""
        if self._under_way is not None:
            self._under_way[0].synchronize()
            self._under_way = None

    def _fit(self, sizes: list[int], device: torch.device) -> None:
        """Make the blocks those of ``sizes``; from the second save on they are."""
        if [block.nbytes for block in self._blocks] != sizes:
            self._blocks = []  # before new ones are pinned
            self._blocks = [_pinned(size, device) for size in sizes]


def _pinned(size: int, device: torch.device) -> Tensor:
    """Pinned memory of just this size: torch's own allocator rounds up to a power of two."""
    if device.type != "cuda" or not size:
        return torch.empty(size, dtype=torch.uint8, pin_memory=bool(size))
    block = torch.empty(size, dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(block.data_ptr(), size, 0)))
    weakref.finalize(block, runtime.cudaHostUnregister, block.data_ptr()).atexit = False
    return block


def _tensors(state: Any) -> list[Tensor]:
    """The local tensors of a state that are on a device, in its order."""
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in _tensors(value)]
    if isinstance(state, list | tuple):
        return [tensor for value in state for tensor in _tensors(value)]
    if isinstance(state, Tensor):
        local = local_of(state) if isinstance(state, DTensor) else state
        return [local] if local.device.type not in ("cpu", "meta") else []
    return []


def _spans(tensors: list[Tensor]) -> list[_StorageSpan]:
    """One span for each storage, or for each tensor where little of the storage is saved."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    spans: list[_StorageSpan] = []
    for members in by_storage.values():
        own = [_StorageSpan(t.untyped_storage(), *_bytes_of(t), [t]) for t in members]
        begin, end = min(span.begin for span in own), max(span.end for span in own)
        saved = sum({(span.begin, span.end): span.end - span.begin for span in own}.values())
        if saved >= _DENSE * (end - begin):
            own = [_StorageSpan(members[0].untyped_storage(), begin, end, members)]
        spans += own
    return spans


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Where its elements begin and end in its storage."""
    item = tensor.element_size()
    begin = int(tensor.storage_offset()) * item // _ALIGN_BYTES * _ALIGN_BYTES  # a place for any dtype
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return begin, int(tensor.storage_offset() + last + 1) * item


def _same_view(tensor: Tensor, block: Tensor, begin: int) -> Tensor:
    """A tensor with the shape and strides of ``tensor`` in a copy of its storage from ``begin`` on."""
    empty = torch.empty(0, dtype=tensor.dtype)
    offset = tensor.storage_offset() - begin // tensor.element_size()
    return empty.set_(block.untyped_storage(), offset, tensor.shape, tensor.stride())


def _rebuilt(state: Any, staged: dict[int, Tensor]) -> Any:
    """A tree like ``state`` around the staged tensors, and around copies of what was on the host already."""
    if isinstance(state, dict):
        return {key: _rebuilt(value, staged) for key, value in state.items()}
    if isinstance(state, list | tuple):
        made = [_rebuilt(value, staged) for value in state]
        return type(state)(*made) if hasattr(state, "_fields") else type(state)(made)
    if isinstance(state, DTensor):
        local = local_of(state)
        found = staged.get(id(local))
        if found is None:
            return state.detach().clone()
        return DTensor(found, spec_of(state), requires_grad=False)
    if isinstance(state, Tensor):
        found = staged.get(id(state))
        return state.detach().clone() if found is None else found
    return copy.deepcopy(state)  # an array, say, that training goes on to change
