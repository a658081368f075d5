"""Collectives as others see them: counted where they run, noted and made to fail where they are called.

:func:`count` looks below everything, at the operators of c10d that the dispatcher runs. :func:`noted` stands
where a profiler or a user stands who wraps the functions of ``torch.distributed``: what it misses, they miss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FUNCTIONS", "GATHER", "Call", "Noted", "count", "failing", "noted"]

_FUNCTIONS = {  # some have two names, or one of the two, depending on the release of torch
    "all_gather_single": "gather",
    "all_gather_into_tensor": "gather",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "all_to_all": "all_to_all",
    "batch_isend_irecv": "all_to_all",  # of a list, over gloo
    "all_reduce": "all_reduce",
}
FUNCTIONS = {name: kind for name, kind in _FUNCTIONS.items() if hasattr(dist, name)}
"""The functions of ``torch.distributed`` in which a step may end, and the kind of each."""
GATHER = next(name for name, kind in FUNCTIONS.items() if kind == "gather")
"""The name under which this torch expects a gather to be called."""
_OPERATORS = {
    "_allgather_base_": "gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "allreduce_": "all_reduce",
}


class _Counter(TorchDispatchMode):
    """Counts c10d operators; unlike ``CommDebugMode`` it survives recomputation in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # desugar first: count what really runs
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            if _is_comparison(args):
                return func(*args, **(kwargs or {}))
            name = func.__name__.split(".")[0]
            self.counts[_OPERATORS.get(name, name)] += 1
        return func(*args, **(kwargs or {}))


def _is_comparison(args: tuple[Any, ...]) -> bool:
    """Whether it is the all-reduce of two integers with which ranks compare what they are about to do."""
    tensors = args[0] if args and isinstance(args[0], list) else []
    return len(tensors) == 1 and tensors[0].dtype == torch.int64 and tensors[0].numel() == 2


def count(fn: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """Run ``fn`` and count the collectives that really ran, by kind."""
    with _Counter() as counter:
        result = fn()
    return result, dict(counter.counts)


@dataclass(frozen=True)
class Call:
    """One call of a function of ``torch.distributed``."""

    name: str
    tensors: tuple[Any, ...]
    """What it was given to write and to read, in this order; one tensor where that is the same."""
    group: Any

    @property
    def kind(self) -> str:
        """``gather``, ``reduce_scatter``, ``all_to_all`` or ``all_reduce``."""
        return FUNCTIONS[self.name]

    @property
    def written(self) -> Tensor:
        """The tensor with the result."""
        return self.tensors[0]

    @property
    def read(self) -> Tensor:
        """The tensor with this rank's contribution."""
        return self.tensors[-1]


@dataclass
class Noted:
    """The calls so far, and whoever wants to know of each before it runs."""

    calls: list[Call] = field(default_factory=list)
    listeners: list[Callable[[Call], None]] = field(default_factory=list)

    def of(self, kind: str) -> list[Call]:
        """The calls of one kind, in their order."""
        return [call for call in self.calls if call.kind == kind]

    def counts(self) -> dict[str, int]:
        """How many there were, by kind."""
        return dict(Counter(call.kind for call in self.calls))

    def wrap(self, name: str) -> Callable[..., Any]:
        """The function that stands under ``name`` now, with a note of each call."""
        original = getattr(dist, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            call = Call(name, _tensors(args, kwargs), kwargs.get("group"))
            self.calls.append(call)
            for listener in self.listeners:
                listener(call)
            return original(*args, **kwargs)

        return noting


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The output and the input of a collective, by whichever name or position they came."""
    names = ("output", "output_tensor", "output_tensor_list", "input", "input_tensor", "input_tensor_list")
    found = [*args[:2], *(kwargs[name] for name in (*names, "tensor") if name in kwargs)]
    return tuple(t for t in found if isinstance(t, torch.Tensor | list))


@contextmanager
def noted(listener: Callable[[Call], None] | None = None) -> Iterator[Noted]:
    """Note the collectives that are called within it."""
    notes = Noted(listeners=[listener] if listener else [])
    with pytest.MonkeyPatch.context() as patch:  # a fixture would not be undone on the ranks
        for name in FUNCTIONS:
            patch.setattr(dist, name, notes.wrap(name))
        yield notes


@contextmanager
def failing(kinds: tuple[str, ...], error: Callable[[], BaseException], *, spared: int = 0) -> Iterator[None]:
    """Let collectives of these kinds raise, all but the first ``spared`` of them."""
    left = iter(range(spared))

    def fail_behind(original: Callable[..., Any]) -> Callable[..., Any]:
        def fail(*args: Any, **kwargs: Any) -> Any:
            if next(left, None) is None:
                raise error()
            return original(*args, **kwargs)

        return fail

    with pytest.MonkeyPatch.context() as patch:
        for name, kind in FUNCTIONS.items():
            if kind in kinds:
                patch.setattr(dist, name, fail_behind(getattr(dist, name)))
        yield
