"""All parts of an optimizer: when each is fetched, stepped and stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ragged_fsdp.dbuffer import FlatStorage
from ragged_fsdp.optim.base import ExactStateOptimizer, are_params_of
from ragged_fsdp.optim.offload.part import HOST, Slot, State, StatePart, steps_whole
from ragged_fsdp.optim.state import StateNote, local_part

__all__ = ["Lane", "Parts", "devices_of"]

_SLOTS = 3
"""Parts on the device at once: one that arrives, one that is updated, one that leaves."""


class Lane:
    """The parts of one device, its slots, and the streams on which state comes and goes."""

    def __init__(self, device: torch.device) -> None:
        self.slots = [Slot(device) for _ in range(_SLOTS)]
        self.parts: list[StatePart] = []
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._inward = self._outward = None
        if self._module is not None:
            self._inward, self._outward = self._module.Stream(device), self._module.Stream(device)

    def add(self, whole: Optimizer, kind: type[Optimizer], members: list[list[int]]) -> None:
        """One more part, for the slot that is next."""
        slot = self.slots[len(self.parts) % _SLOTS]
        self.parts.append(StatePart(whole, kind, members, slot))
        slot.parts.append(self.parts[-1])

    def step(self) -> None:
        """Step all parts that have work, with the copies of their neighbours beside each."""
        at_work = [part for part in self.parts if part.has_work()]
        slots = list(dict.fromkeys(part.slot for part in at_work))
        ahead: StatePart | None = None
        try:
            for slot in slots:
                slot.open()
            ready = self.record()
            for slot in slots:
                slot.stored = ready  # nothing is copied into memory that is still somebody's
            for part, following in zip(at_work, [*at_work[1:], None]):
                if part is not ahead:
                    self._fetch(part)
                ahead = following if following is None or following.slot is not part.slot else None
                if ahead is not None:
                    self._fetch(ahead)
                self._wait(part.fetched)
                part.run()
                self._store(part)
        finally:
            if self._module is not None:  # memory goes back to the allocator behind all that uses it
                for stream in (self._inward, self._outward):
                    self._module.current_stream(self._device).wait_stream(stream)
            for slot in slots:
                slot.memory.release()

    def record(self) -> Any:
        """An event after all that the current stream was given; None where there are no streams."""
        if self._module is None:
            return None
        event = torch.Event(self._device)
        event.record(self._module.current_stream(self._device))
        return event

    def _fetch(self, part: StatePart) -> None:
        """Start the copy of a part's state into its slot, after what was there has left."""
        if part.host is None or not part.nbytes:
            return
        with self._on(self._inward):
            self._wait(part.slot.stored)
            part.slot.bytes_of(part).copy_(_all_bytes(part.host), non_blocking=True)
            part.fetched = self.record()

    def _store(self, part: StatePart) -> None:
        """Start the copy of a part's state to the host, after its update."""
        if part.has_other_tensors():  # it was begun, or exchanged: rare
            part.lay_out()
            part.slot.stored = self.record()
            return
        if part.host is None or not part.nbytes:
            return
        updated = self.record()
        with self._on(self._outward):
            self._wait(updated)
            _all_bytes(part.host).copy_(part.slot.bytes_of(part), non_blocking=True)
            part.slot.stored = self.record()

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if self._module is None else self._module.stream(stream)  # type: ignore[no-any-return]

    def _wait(self, event: Any) -> None:
        if event is not None:
            self._module.current_stream(self._device).wait_event(event)


class Parts:
    """All parts of an optimizer, whose step is that of ``kind``, with at most so many elements in each."""

    def __init__(self, whole: Optimizer, kind: type[Optimizer], part_numel: int) -> None:
        self._whole = whole
        self._params = [list(group["params"]) for group in whole.param_groups]
        self._lanes: dict[torch.device, Lane] = {}
        for device, members in _cut(whole, kind, part_numel):
            self._lanes.setdefault(device, Lane(device)).add(whole, kind, members)
        self._seen: State | None = None
        self._noted: StateNote | None = None
        self._pending: list[Any] = []

    @property
    def parts(self) -> list[StatePart]:
        """Every part, of all devices."""
        return [part for lane in self._lanes.values() for part in lane.parts]

    def wait(self) -> None:
        """Block the host until the state that was last sent to it has arrived."""
        for event in self._pending:
            event.synchronize()
        self._pending = []

    def is_stale(self) -> bool:
        """Whether parameters or state were exchanged since the last step."""
        if not are_params_of(self._params, self._whole.param_groups):
            return True
        state: State = self._whole.__dict__["state"]
        return state is not self._seen or self._noted is None or not self._noted.is_of(state)

    def take(self) -> None:
        """Move what state the optimizer has to the parts."""
        state = self._whole.state
        for part in self.parts:
            part.take(state)
        if isinstance(self._whole, ExactStateOptimizer):
            self._whole._plan_all()  # what it prepared for steps of its own keeps state on the device

    def step(self) -> None:
        """One step of all parameters that have work."""
        self._pending = []  # or an optimizer that reads its state in a step waits for the last one's copies
        try:
            for lane in self._lanes.values():
                lane.step()
        finally:
            self.publish()

    def publish(self) -> None:
        """Let the optimizer's state be that of the parts, on the host."""
        state: State = self._whole.__dict__["state"]
        known = len(state)
        changed = [part.publish(state) for part in self.parts]
        if any(changed) or state is not self._seen:
            if len(state) > known:  # in the order of the parameters: ranks that gather it need the same one
                order = [param for params in self._params for param in params if param in state]
                entries = {param: state.pop(param) for param in order}
                state.update(entries)
            self._seen, self._noted = state, StateNote(state)
        self._pending = [event for lane in self._lanes.values() if (event := lane.record()) is not None]


def _cut(
    whole: Optimizer, kind: type[Optimizer], part_numel: int
) -> Iterator[tuple[torch.device, list[list[int]]]]:
    """Devices and parameters of the parts: positions in each group. All ranks cut alike.

    An optimizer may communicate in its step, as those of matrices do, so ranks must step the same parameters
    together whatever each holds of them.
    """
    groups = whole.param_groups
    if steps_whole(kind):
        device = next(iter(devices_of(whole, kind)), HOST)  # of groups without parameters: the host
        yield device, [list(range(len(group["params"]))) for group in groups]
        return
    members: list[list[int]] = [[] for _ in groups]
    device, numel = HOST, 0
    for index, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            here, more = local_part(param).device, _mean_numel(param)
            if any(members) and (here != device or numel + more > part_numel):
                yield device, members
                members, numel = [[] for _ in groups], 0
            members[index].append(position)
            device, numel = here, numel + more
    if any(members):
        yield device, members


def _mean_numel(param: Tensor) -> int:
    """Elements of a parameter that a rank has on average."""
    ranks = 1
    if isinstance(param, DTensor):
        for size, placement in zip(param.device_mesh.shape, param.placements):
            ranks *= 1 if placement.is_replicate() else size
    return -(-param.numel() // ranks)


def _all_bytes(memory: FlatStorage) -> Tensor:
    return memory.tensor(0, (memory.nbytes,), torch.uint8)


def devices_of(optimizer: Optimizer, kind: type[Optimizer]) -> list[torch.device]:
    """Where the parameters of an optimizer are; raise if they are apart and must be stepped together."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = list(dict.fromkeys(local_part(param).device for param in params))
    if len(found) > 1 and steps_whole(kind):
        raise ValueError(
            f"offload_state: expected the parameters of {kind.__name__} on one device, got {found}."
        )
    return found
