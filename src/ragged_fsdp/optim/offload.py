"""Optimizer state in the host's memory: it comes to the device for the update, and goes back.

The parameters of an optimizer are taken in *parts*, some tens of megabytes of state each. The state of a part
is one pinned buffer on the host. A step moves it through three slots of device memory, which exist only while
the step runs::

    copies in     part 0 | part 1 | part 2 | part 3 | ...
    update                 part 0 | part 1 | part 2 | part 3 | ...
    copies out                      part 0 | part 1 | part 2 | part 3 | ...

The host waits for nothing: ``optimizer.state`` does, when it is read, until the copies out have arrived. Each
part is stepped by a copy of the optimizer that knows its parameters alone, so the arithmetic is the
optimizer's own. An optimizer whose parameters must be stepped together (Muon, which divides its matrices over
the ranks; any that is not torch's or ours) has one part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ragged_fsdp.dbuffer import FlatStorage
from ragged_fsdp.dtensor import wrap_local
from ragged_fsdp.optim.base import (
    ExactStateOptimizer,
    are_params_of,
    are_same,
    between_load_hooks,
    group_names,
    local_part,
    loss_of,
    state_values,
    unchanged_by_errors,
)
from ragged_fsdp.torch_internals import DTensorSpec, disable_dynamo, spec_of

__all__ = ["OffloadedState", "offload_state"]

_SLOTS = 3
"""Parts on the device at once: one that arrives, one that is updated, one that leaves."""
_ALIGNMENT_BYTES = 256
_HOST = torch.device("cpu")
_SCALED = ("grad_scale", "found_inf")
"""What ``torch.amp.GradScaler`` gives to optimizers whose step unscales by itself."""

_OptimizerT = TypeVar("_OptimizerT", bound=Optimizer)
State = defaultdict[Tensor, dict[str, Any]]


def offload_state(optimizer: _OptimizerT, *, part_numel: int = 1 << 23) -> _OptimizerT:
    """Keep the state of an optimizer in the host's memory; changes the optimizer, and returns it.

    Updates are the optimizer's own, bit for bit; parameters and gradients stay where they are. Call it before
    making learning-rate schedulers. State that the optimizer has moves at its next step.

    Args:
        optimizer: any of ours, or of ``torch.optim`` but ``LBFGS``. One of another origin works too, but all
            of its state is on the device during a step.
        part_numel: elements of a rank's parameters that are updated at a time. Three times their state is on
            the device during a step.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"offload_state: expected an optimizer, got {type(optimizer).__name__}.")
    name = type(optimizer).__name__
    if "state" not in vars(optimizer):
        raise TypeError(f"offload_state: {name} has no state of its own; give the optimizer that it wraps.")
    if isinstance(optimizer, OffloadedState):
        raise ValueError(f"offload_state: the state of this {name} is on the host already.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("offload_state: LBFGS keeps lists of tensors in its state, which cannot be moved.")
    if "step" in vars(optimizer):
        raise ValueError(
            f"offload_state: something has replaced the step of this {name}, as schedulers do; call "
            "offload_state right after making the optimizer."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("offload_state: expected differentiable=False, got True: copies have no gradient.")
    if part_numel < 1:
        raise ValueError(f"part_numel: expected at least 1, got {part_numel}.")
    _devices(optimizer)
    optimizer.__class__ = _class_over(type(optimizer))  # type: ignore[assignment]
    optimizer._part_numel = part_numel  # type: ignore[attr-defined]
    return optimizer


def _class_over(kind: type[Optimizer]) -> type[Optimizer]:
    if kind not in _KINDS:
        _KINDS[kind] = type(f"Offloaded{kind.__name__}", (OffloadedState, kind), {"_kind": kind})
    return _KINDS[kind]


_KINDS: dict[type[Optimizer], type[Optimizer]] = {}


def _new(kind: type[Optimizer]) -> Optimizer:
    """An optimizer that a copy or a pickle is about to give its state."""
    made = _class_over(kind)
    return made.__new__(made)


def _steps_whole(kind: type[Optimizer]) -> bool:
    """Whether all parameters must be stepped together: nothing is known of optimizers of others."""
    return not issubclass(kind, ExactStateOptimizer) and not kind.__module__.startswith("torch.optim.")


def _devices(optimizer: Optimizer) -> list[torch.device]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = list(dict.fromkeys(local_part(param).device for param in params))
    kind = getattr(optimizer, "_kind", type(optimizer))
    if len(found) > 1 and _steps_whole(kind):
        raise ValueError(
            f"offload_state: expected the parameters of {kind.__name__} on one device, got {found}."
        )
    return found


def _hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that runs the optimizer's hooks, as torch makes it of the step of each class."""
    wrapped: Any = Optimizer.profile_hook_step(step)
    wrapped.hooked = True
    return wrapped  # type: ignore[no-any-return]


class OffloadedState(Optimizer):
    """What :func:`offload_state` adds to the class of an optimizer."""

    _kind: type[Optimizer]
    _part_numel: int = 1 << 23
    _offload: _Offload | None = None

    @property
    def state(self) -> State:  # type: ignore[override]
        """State by parameter, on the host; waits until the last step's has arrived there."""
        if self._offload is not None:
            self._offload.wait()
        return self.__dict__["state"]  # type: ignore[no-any-return]

    @state.setter
    def state(self, state: State) -> None:
        self.__dict__["state"] = state

    @_hooked
    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters, a part at a time; the loss of the closure, which runs once."""
        loss = loss_of(closure)
        self._offloaded().step()
        return loss

    @disable_dynamo
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, of this optimizer with or without offload; a part at a time is on the device."""
        with unchanged_by_errors(self, _offload=self._offload):
            if _steps_whole(self._kind):
                super().load_state_dict(state_dict)
                self._offload_anew()
            else:
                self._load_parts(state_dict)

    def _load_parts(self, state_dict: dict[str, Any]) -> None:
        """Let torch load the groups, between the hooks of the user, which see the state too."""
        adapted: list[dict[str, Any]] = []

        def hide(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            adapted.append(loaded)
            return {**loaded, "state": {}}

        def load(_: Optimizer) -> None:
            fresh = _Offload(self)
            for part in fresh.parts:
                part.load(adapted[0])
            fresh.publish()
            self._offload = fresh

        with between_load_hooks(self, hide, load):
            Optimizer.load_state_dict(self, state_dict)  # parts load as their kind does

    def __getstate__(self) -> dict[str, Any]:  # type: ignore[override]
        return {**super().__getstate__(), "_part_numel": self._part_numel}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy or a pickle, which finds the optimizer's own class: this one is made as it is needed."""
        return _new, (self._kind,), self.__getstate__()

    def _offloaded(self) -> _Offload:
        """The parts; made anew if parameters or state were exchanged since the last step."""
        stale = self._offload is None or self._offload.is_stale()
        return self._offload_anew() if stale else self._offload  # type: ignore[return-value]

    def _offload_anew(self) -> _Offload:
        """New parts, with what state there is."""
        offload = _Offload(self)
        offload.take()
        offload.publish()
        self._offload = offload
        return offload


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


class _Part:
    """Parameters that are updated together: who steps them, and their state on the host and in a slot.

    ``state`` is what the step sees. Between steps its tensors have no memory; the optimizer's own state has
    the values, as views of ``host``.
    """

    def __init__(self, whole: OffloadedState, members: list[list[int]], slot: _Slot) -> None:
        self.whole = whole
        self.members = [(index, chosen) for index, chosen in enumerate(members) if chosen]
        """Groups of the optimizer, and the positions of the part's parameters in them."""
        self.slot = slot
        self.params = [
            whole.param_groups[index]["params"][i] for index, chosen in self.members for i in chosen
        ]
        self.steps_whole = _steps_whole(whole._kind)
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
        whole, kind, groups = self.whole, self.whole._kind, []
        for index, chosen in self.members:
            group = whole.param_groups[index]
            own = {"params": [group["params"][i] for i in chosen], "param_names": self._names(index, chosen)}
            groups.append({**group, **own})
        attributes = {k: v for k, v in vars(whole).items() if not k.endswith("_hooks") and k != "_offload"}
        everyone = [param for group in whole.param_groups for param in group["params"]]
        attributes["_places"] = {param: place for place, param in enumerate(everyone)}
        made = kind.__new__(kind)
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
        step: Any = self.whole._kind.step
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
        places = (self.slot.device, _HOST)
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
        self.host = FlatStorage(nbytes, _HOST, pin_memory=self.slot.device != _HOST)
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


class _Slot:
    """Memory on the device for the state of a part, while a step runs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: list[_Part] = []
        self.memory = FlatStorage(0, device)
        self.stored: Any = None
        """After the last copy out of it."""
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

    def bytes_of(self, part: _Part) -> Tensor:
        """The part's state, as it is copied."""
        return self.memory.tensor(0, (part.nbytes,), torch.uint8)


class _Lane:
    """The parts of one device, its slots, and the streams on which state comes and goes."""

    def __init__(self, device: torch.device) -> None:
        self.slots = [_Slot(device) for _ in range(_SLOTS)]
        self.parts: list[_Part] = []
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._inward = self._outward = None
        if self._module is not None:
            self._inward, self._outward = self._module.Stream(device), self._module.Stream(device)

    def add(self, whole: OffloadedState, members: list[list[int]]) -> None:
        """One more part, for the slot that is next."""
        slot = self.slots[len(self.parts) % _SLOTS]
        self.parts.append(_Part(whole, members, slot))
        slot.parts.append(self.parts[-1])

    def step(self) -> None:
        """Step all parts that have work, with the copies of their neighbours beside each."""
        at_work = [part for part in self.parts if part.has_work()]
        slots = list(dict.fromkeys(part.slot for part in at_work))
        ahead: _Part | None = None
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

    def _fetch(self, part: _Part) -> None:
        """Start the copy of a part's state into its slot, after what was there has left."""
        if part.host is None or not part.nbytes:
            return
        with self._on(self._inward):
            self._wait(part.slot.stored)
            part.slot.bytes_of(part).copy_(_all_bytes(part.host), non_blocking=True)
            part.fetched = self.record()

    def _store(self, part: _Part) -> None:
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


class _Offload:
    """All parts of an optimizer: what :class:`OffloadedState` knows of its parameters and state."""

    def __init__(self, whole: OffloadedState) -> None:
        self._whole = whole
        self._params = [list(group["params"]) for group in whole.param_groups]
        self._lanes: dict[torch.device, _Lane] = {}
        for device, members in _cut(whole):
            self._lanes.setdefault(device, _Lane(device)).add(whole, members)
        self._seen: State | None = None
        self._noted: list[Any] = []
        self._pending: list[Any] = []

    @property
    def parts(self) -> list[_Part]:
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
        return state is not self._seen or not are_same(self._noted, state_values(state))

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
            self._seen, self._noted = state, state_values(state)
        self._pending = [event for lane in self._lanes.values() if (event := lane.record()) is not None]


def _cut(whole: OffloadedState) -> Iterator[tuple[torch.device, list[list[int]]]]:
    """Devices and parameters of the parts: positions in each group. All ranks cut alike.

    An optimizer may communicate in its step, as those of matrices do, so ranks must step the same parameters
    together whatever each holds of them.
    """
    groups = whole.param_groups
    if _steps_whole(whole._kind):
        device = next(iter(_devices(whole)), _HOST)  # of groups without parameters: the host
        yield device, [list(range(len(group["params"]))) for group in groups]
        return
    members: list[list[int]] = [[] for _ in groups]
    device, numel = _HOST, 0
    for index, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            here, more = local_part(param).device, _mean_numel(param)
            if any(members) and (here != device or numel + more > whole._part_numel):
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


def _byte_span(local: Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the one behind its last."""
    start = local.storage_offset() * local.element_size()
    return int(start), int(start) + _extent(local.shape, local.stride()) * local.element_size()


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from a tensor's first to its last."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride)) if 0 not in shape else 0


def _all_bytes(memory: FlatStorage) -> Tensor:
    return memory.tensor(0, (memory.nbytes,), torch.uint8)
