"""A part of an optimizer's state: parameters that are updated together, and where their state is.

On the host it is one buffer. While a step runs it also has a slot of device memory, which parts take in
turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ragged_fsdp.dbuffer import FlatStorage
from ragged_fsdp.dtensor import wrap_local
from ragged_fsdp.optim.base import ExactStateOptimizer, group_names
from ragged_fsdp.optim.state import are_same, local_part, state_values
from ragged_fsdp.torch_internals import DTensorSpec, spec_of

__all__ = ["HOST", "Slot", "State", "StatePart", "steps_whole"]

HOST = torch.device("cpu")
_ALIGNMENT_BYTES = 256
_SCALED = ("grad_scale", "found_inf")
"""What ``torch.amp.GradScaler`` gives to optimizers whose step unscales by itself."""

State = defaultdict[Tensor, dict[str, Any]]


def steps_whole(kind: type[Optimizer]) -> bool:
    """Whether all parameters must be stepped together: nothing is known of optimizers of others."""
    return not issubclass(kind, ExactStateOptimizer) and not kind.__module__.startswith("torch.optim.")


@dataclass(frozen=True)
class _Entry:
    """A tensor of a parameter's state: where it lies in the buffer of its part, and what it is."""

    param: Tensor
    key: str
    offset_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    spec: DTensorSpec | None
    """None of plain tensors."""

    def view(self, memory: FlatStorage) -> Tensor:
        """The tensor, in memory that has the part's layout."""
        extent = _extent(self.shape, self.stride)
        flat = memory.tensor(self.offset_bytes, (extent,), self.dtype)
        local = flat.as_strided(self.shape, self.stride)
        return local if self.spec is None else wrap_local(local, self.spec)


class StatePart:
    """Parameters that are updated together: who steps them, and their state on the host and in a slot.

    ``state`` is what the step sees. Between steps its tensors have no memory; the optimizer's own state has
    the values, as views of ``host``.
    """

    def __init__(self, whole: Optimizer, kind: type[Optimizer], members: list[list[int]], slot: Slot) -> None:
        self.whole, self.kind = whole, kind
        self.members = [(index, chosen) for index, chosen in enumerate(members) if chosen]
        """Groups of the optimizer, and the positions of the part's parameters in them."""
        self.slot = slot
        self.params = [
            whole.param_groups[index]["params"][i] for index, chosen in self.members for i in chosen
        ]
        self.steps_whole = steps_whole(kind)
        self.state: State = defaultdict(dict)
        self.stepped: Optimizer = whole if self.steps_whole else self._copy()
        self.entries: list[_Entry] = []
        self.host: FlatStorage | None = None
        self.on_host: list[Tensor] = []
        """The entries on the host: what the optimizer's state shows."""
        self.views: list[Tensor] = []
        """The entries in the memory of the slot; none until the part has been given a place there."""
        self.noted: list[Any] = []
        """All values of ``state`` that the optimizer's state was last made from."""
        self.fetched: Any = None

    def _copy(self) -> Optimizer:
        """An optimizer of the same kind and options for these parameters alone, without hooks."""
        whole, groups = self.whole, []
        for index, chosen in self.members:
            group = whole.param_groups[index]
            own = {"params": [group["params"][i] for i in chosen], "param_names": self._names(index, chosen)}
            groups.append({**group, **own})
        attributes = {k: v for k, v in vars(whole).items() if not k.endswith("_hooks") and k != "_offload"}
        everyone = [param for group in whole.param_groups for param in group["params"]]
        attributes["_places"] = {param: place for place, param in enumerate(everyone)}
        made = self.kind.__new__(self.kind)
        made.__setstate__({**attributes, "state": self.state, "param_groups": groups})
        return made

    def _names(self, index: int, chosen: Sequence[int]) -> list[str]:
        names = group_names(self.whole, index)
        return [names[i] for i in chosen]

    @property
    def nbytes(self) -> int:
        """Bytes of the part's state."""
        return 0 if self.host is None else self.host.nbytes

    def has_work(self) -> bool:
        """Whether a step may change anything; of an optimizer of others nothing is known."""
        return self.steps_whole or any(param.grad is not None for param in self.params)

    def load(self, state_dict: dict[str, Any]) -> None:
        """Take this part's share of a state dict by way of the device, as the optimizer itself loads it."""
        state: dict[int, Any] = {}
        groups, count, saved = [], 0, state_dict["state"]
        for index, chosen in self.members:
            group = state_dict["param_groups"][index]
            ids = list(range(count, count + len(chosen)))
            count += len(chosen)
            state |= {
                i: saved[group["params"][c]] for i, c in zip(ids, chosen) if group["params"][c] in saved
            }
            groups.append({**group, "params": ids, "param_names": self._names(index, chosen)})
        self.stepped.load_state_dict({"state": state, "param_groups": groups})
        self.state = self.stepped.state
        self.lay_out()

    def take(self, state: State) -> None:
        """Move what state the optimizer has of these parameters, wherever it is, to the part's buffer."""
        for param in list(state) if self.steps_whole else self.params:  # some keep more than parameters'
            if found := state.get(param):
                self.state[param].update(found)
        self.lay_out()

    def run(self) -> None:
        """One step of the parameters on the current stream."""
        step: Any = self.kind.step
        step = step.__wrapped__ if getattr(step, "hooked", False) else step  # hooks are the whole's
        if self.steps_whole:
            shown, self.whole.state = self.whole.__dict__["state"], self.state
            try:
                step(self.whole)
            finally:
                self.state, self.whole.state = self.whole.__dict__["state"], shown
            return
        for (index, _), group in zip(self.members, self.stepped.param_groups):
            own = {"params": group["params"], "param_names": group["param_names"]}
            group.update({**self.whole.param_groups[index], **own})  # schedulers write to the whole's
        for name in _SCALED:
            setattr(self.stepped, name, getattr(self.whole, name, None))
        step(self.stepped)

    def has_other_tensors(self) -> bool:
        """Whether the step left other tensors in the state than those that are copied in and out."""
        return not are_same(self.views, [value for _, _, value in self._movable()])

    def _movable(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        """What belongs on the host: tensors of at least one dim that are there or on the part's device."""
        places = (self.slot.device, HOST)
        for param in self.params:
            for key, value in self.state.get(param, {}).items():
                if isinstance(value, Tensor) and value.ndim and local_part(value).device in places:
                    yield param, key, value

    def lay_out(self) -> None:
        """Copy the state to a new buffer on the host, on the current stream, and let go of where it was.

        Tensors that are neighbours in one storage stay neighbours: ``FusedAdam`` updates them as one.
        """
        movable = [(param, key, value, local_part(value)) for param, key, value in self._movable()]
        spans: dict[int, list[Any]] = {}  # by address of the storage: it, first and last byte, place
        for param, key, _, local in movable:
            if type(local) is not Tensor or local.layout is not torch.strided:
                names = (name for index, chosen in self.members for name in self._names(index, chosen))
                name = next(n for p, n in zip(self.params, names) if p is param)
                raise TypeError(
                    f"{name}: state {key} must be a dense tensor to be kept on the host, got "
                    f"{type(local).__name__} of {local.layout}."
                )
            if local.numel():
                storage, (start, stop) = local.untyped_storage(), _byte_span(local)
                span = spans.setdefault(storage.data_ptr(), [storage, start, stop, 0])
                span[1:3] = min(span[1], start), max(span[2], stop)
        nbytes = 0
        for span in spans.values():
            span[1] -= span[1] % _ALIGNMENT_BYTES
            span[3] = nbytes
            nbytes += -(-(span[2] - span[1]) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.host = FlatStorage(nbytes, HOST, pin_memory=self.slot.device != HOST)
        for storage, start, stop, place in spans.values():
            source = torch.empty(0, dtype=torch.uint8, device=storage.device)
            source.set_(storage, start, (stop - start,), (1,))
            self.host.tensor(place, (stop - start,), torch.uint8).copy_(source, non_blocking=True)
        self.entries, self.views = [], []
        for param, key, value, local in movable:
            offset = 0
            if local.numel():
                _, start, _, place = spans[local.untyped_storage().data_ptr()]
                offset = place + _byte_span(local)[0] - start
            spec = spec_of(value) if isinstance(value, DTensor) else None
            self.entries.append(_Entry(param, key, offset, local.dtype, local.shape, local.stride(), spec))
        self.on_host = [entry.view(self.host) for entry in self.entries]
        self._put(self.on_host)
        self.forget_addresses()  # they keep the memory alive that was copied

    def attach(self) -> None:
        """Let the state's tensors be in the memory of the slot."""
        self.views = [entry.view(self.slot.memory) for entry in self.entries]
        self._put(self.views)

    def _put(self, tensors: list[Tensor]) -> None:
        for entry, tensor in zip(self.entries, tensors):
            self.state[entry.param][entry.key] = tensor

    def forget_addresses(self) -> None:
        """Our optimizers note where the state lies: let them look again."""
        if isinstance(self.stepped, ExactStateOptimizer):
            self.stepped._plan_all()

    def publish(self, state: State) -> bool:
        """Write what has changed to the optimizer's state, tensors as on the host; whether anything had."""
        values = state_values(self.state)
        if are_same(self.noted, values):
            return False
        self.noted = values
        held = {(entry.param, entry.key): tensor for entry, tensor in zip(self.entries, self.on_host)}
        for param, own in self.state.items():
            shown = {key: held.get((param, key), value) for key, value in own.items()}
            state[param].clear()
            state[param].update(shown)
        return True


class Slot:
    """Memory on the device for the state of a part, while a step runs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: list[StatePart] = []
        self.memory = FlatStorage(0, device)
        self.stored: Any = None
        """An event after the last copy out of the memory."""
        self._address = 0

    def open(self) -> None:
        """Allocate on the current stream, and give every part its place."""
        nbytes = max(part.nbytes for part in self.parts)
        if self.memory.nbytes != nbytes:
            self.memory = FlatStorage(nbytes, self.device, allocate=False)
            for part in self.parts:
                part.views = []
        self.memory.materialize()
        moved = self.memory.untyped.data_ptr() != self._address
        self._address = self.memory.untyped.data_ptr()
        for part in self.parts:
            if len(part.views) != len(part.entries):
                part.attach()
            elif moved:
                part.forget_addresses()

    def bytes_of(self, part: StatePart) -> Tensor:
        """The part's state, as it is copied."""
        return self.memory.tensor(0, (part.nbytes,), torch.uint8)


def _byte_span(local: Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the one behind its last."""
    start = local.storage_offset() * local.element_size()
    return int(start), int(start) + _extent(local.shape, local.stride()) * local.element_size()


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from a tensor's first to its last."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride)) if 0 not in shape else 0
