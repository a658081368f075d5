"""Communication streams on the CPU whose work is done as late as the events allow.

On a device a missing wait, or memory that is let go too early, shows only if a stream happens to be slow.
Here, what the runtime launches on its gather and reduce streams is kept in a queue, and done when the compute
stream waits for an event behind it, never before: a result that is read without a wait was not written yet,
memory that was released is missing, and memory that only the queue still holds, which an allocator would have
given to somebody else, is found by its count of users.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import fsdp_inside
from ragged_fsdp.collectives import wait_all

__all__ = ["LateStream", "make_streams_late", "touches_no_data"]

_STREAM_OF = {"gather": "gather", "reduce": "reduce", "all_reduce": "reduce"}
_WITHOUT_DATA = ("alias", "detach", "empty", "empty_like", "empty_strided", "new_empty", "resize_", "set_")


class LateStream:
    """Work in the order of its launch; an event is the number of tasks that were launched before it."""

    def __init__(self) -> None:
        self.launched = 0
        self._tasks: deque[tuple[Callable[[], Any], list[torch.Tensor]]] = deque()
        self._own: list[torch.Tensor] = []
        """Allocated on this stream, which may let it go whenever it likes."""

    def launch(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Call ``function`` later, with other tensors over the same memory: the caller's may go."""
        args, kwargs = tree_map(_alias, (args, kwargs))
        self._add(lambda: function(*args, **kwargs), (args, kwargs))

    def launch_new(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a ``function`` that makes tensors: they are there at once, their values later."""
        made = function(*args, **kwargs)
        args, kwargs, own = tree_map(_alias, (args, kwargs, made))
        self._own += tree_leaves(own)

        def fill() -> None:
            for tensor, value in zip(tree_leaves(own), tree_leaves(function(*args, **kwargs))):
                tensor.copy_(value)

        self._add(fill, (args, kwargs, own))
        return made

    def _add(self, task: Callable[[], None], used: Any) -> None:
        self._tasks.append((task, [t for t in tree_leaves(used) if isinstance(t, torch.Tensor)]))
        self.launched += 1

    def run_until(self, event: int) -> None:
        """Do what was launched before ``event``."""
        while self.launched - len(self._tasks) < event:
            for tensor in self._tasks[0][1]:
                self._check(tensor)
            with torch.no_grad():
                self._tasks.popleft()[0]()

    def _check(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        what = f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} that a stream still uses"
        if not tensor.numel():
            return
        if not storage.nbytes():
            raise AssertionError(f"{what} was released")
        own = [t for _, used in self._tasks for t in used] + self._own
        holders = sum(t.untyped_storage()._cdata == storage._cdata for t in own)
        if any(t.untyped_storage()._cdata == storage._cdata for t in self._own):
            return
        if torch._C._storage_Use_Count(storage._cdata) - 1 <= holders:  # one is ``storage`` itself
            raise AssertionError(f"{what} was let go")


def _alias(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def touches_no_data(func: Any) -> bool:
    """Whether an operation makes views or memory alone; collectives are intercepted by themselves."""
    schema = func._schema
    is_view = not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
    return is_view or func.namespace == "c10d" or func.overloadpacket.__name__ in _WITHOUT_DATA


class _Late(TorchDispatchMode):
    """While it is active, operations go to a stream."""

    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if touches_no_data(func):
            return func(*args, **kwargs)
        if not schema.is_mutable:
            return self.stream.launch_new(func, args, kwargs)
        self.stream.launch(func, args, kwargs)
        return kwargs.get("out", args[0]) if schema.returns else None


class _Current:
    """The streams of each context, and on which the runtime is now."""

    def __init__(self) -> None:
        self.stack: list[LateStream] = []
        self._of: dict[tuple[int, str], LateStream] = {}

    def on_stream(self, context: Any, name: str, stream: Any = None) -> ExitStack:
        target = self._of.setdefault((id(context), _STREAM_OF[name]), LateStream())
        entered = ExitStack()
        entered.callback(self.stack.pop)
        self.stack.append(target)
        entered.enter_context(_Late(target))
        return entered

    def record(self, context: Any, *_: Any) -> tuple[LateStream, int] | None:
        return (self.stack[-1], self.stack[-1].launched) if self.stack else None

    def wait(self, context: Any, event: tuple[LateStream, int] | None) -> None:
        if event is not None:
            event[0].run_until(event[1])

    def join(self, context: Any) -> None:
        for (owner, _), stream in self._of.items():
            if owner == id(context):
                stream.run_until(stream.launched)
        context.finish_all()

    def later(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            if not self.stack:
                return collective(*args, **kwargs)
            # a stream does not go on before a work of its own is done
            self.stack[-1].launch(lambda *a, **k: wait_all(collective(*a, **k)), args, kwargs)
            return None

        return launch


def make_streams_late(patch: pytest.MonkeyPatch) -> None:
    """From here on, until ``patch`` is undone; models must be made afterwards."""
    fsdp_inside.intercept_streams(patch, _Current())
    patch.setenv("RAGGED_FSDP_DEBUG", "1")  # released memory is filled with NaN
