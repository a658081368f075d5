"""What a rank must copy from the same rank of another replica to be equal to it.

The local parts of parameters, buffers and optimizer state are listed by name; those that lie behind each
other in one storage are one *run*, so that a group's shard and the flat state of an optimizer are one piece
of memory each, to send and to stage::

    storage   | a . | b . . . | c | pad | d . |        parameters a to d of one group on this rank
    runs      |      a b c        |     | d   |

Nothing is gathered and nothing communicates. Numbers that are not tensors (learning rates, step counts) and
what the user adds travel as JSON in the header, in which tuples and keys that are no text keep what they are.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ragged_fsdp.fsdp.runtime.module import reshard_all
from ragged_fsdp.optim.offload import OffloadedState
from ragged_fsdp.optim.state import local_part, state_like, wrap_state

__all__ = ["Offer", "Piece", "ReplicaState"]

VERSION = 2
_PLAIN, _LIKE, _OTHER = "plain", "like", "other"
"""How state lies: no DTensor; as its parameter does; in a form its optimizer knows (values per block)."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


@dataclass(frozen=True)
class Piece:
    """The local part of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    form: str = _PLAIN

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return math.prod(self.shape) * self.dtype.itemsize

    def to_json(self) -> list[Any]:
        """What :meth:`from_json` takes."""
        return [self.name, str(self.dtype).removeprefix("torch."), list(self.shape), self.form]

    @classmethod
    def from_json(cls, given: Any) -> Piece:
        """Raises ValueError unless ``given`` is a piece."""
        ok = isinstance(given, list) and len(given) == 4 and isinstance(given[0], str) and given[1] in _DTYPES
        ok = ok and isinstance(given[2], list) and all(type(n) is int and n >= 0 for n in given[2])
        if not ok or given[3] not in (_PLAIN, _LIKE, _OTHER):
            raise ValueError(
                f"a piece of a replica's state must be name, dtype, shape and form, got {given!r}."
            )
        return cls(given[0], _DTYPES[given[1]], tuple(given[2]), given[3])


@dataclass(frozen=True)
class Offer:
    """The live state of a rank, to be sent before it changes."""

    header: dict[str, Any]
    runs: tuple[Tensor, ...]
    """Bytes of each run, over the memory of the state itself."""
    ready: Any = None
    """An event behind the last write to the runs; None without streams."""

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return sum(run.numel() for run in self.runs)


class ReplicaState:
    """The state of a model and its optimizer on this rank.

    Args:
        model: sharded; its parameters are looked up now, because a running forward registers others.
        optimizer: of these parameters and no others.
        extra: by name, a function that returns what else to copy, made of numbers, text, lists, tuples and
            dicts, and one that takes it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        extra: Mapping[str, tuple[Callable[[], Any], Callable[[Any], None]]] | None = None,
    ) -> None:
        self._model = model
        reshard_all(model)
        self.params: dict[str, Tensor] = dict(model.named_parameters())
        saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
        self._buffer_names = {name for name, buffer in model.named_buffers() if id(buffer) in saved}
        """Names of buffers that a checkpoint has. What a replica computes for itself (a table that grows with
        the longest sequence) need not fit another one, nor what its modules know of it."""
        self._optimizer = optimizer
        self._extra = dict(extra or {})
        self._name_of = {id(param): name for name, param in self.params.items()}
        for index, group in enumerate(optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                if id(param) not in self._name_of:
                    raise ValueError(
                        f"param_groups[{index}]['params'][{position}]: of shape {tuple(param.shape)}, is no "
                        "parameter of the model; make the optimizer after fully_shard, of this model."
                    )
        self._values()  # what cannot be copied is refused now, not when a peer needs it

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups of parameters, with their options."""
        return self._optimizer.param_groups

    # -- giving ----------------------------------------------------------------------------------

    def offer(self, ready: Any = None) -> Offer:
        """What this rank has now. Any thread may ask, also beside a forward, which only reads the state.

        What is read or copied for it is behind ``ready`` on the current stream, and the offer's own event
        behind that.
        """
        if ready is not None:
            stream = torch.accelerator.current_stream()
            stream.wait_event(ready)
        # a forward may write to buffers (BatchNorm) while they are sent
        found = [
            (piece, tensor.clone() if piece.name.startswith("buffer.") else tensor)
            for piece, tensor in self._model_tensors()
        ]
        state: dict[str, dict[str, list[Any]]] = {}
        for name, param, entries in self._states():
            state[name] = {}
            for key, value in entries.items():
                state[name][key] = []
                if isinstance(value, Tensor):
                    found.append((_piece(f"optim.{key}.{name}", value, param), value))
                else:
                    state[name][key].append(_as_json(f"optimizer state {key} of {name}", value))
        runs = list(_runs((piece, local_part(tensor).detach()) for piece, tensor in found))
        header = {
            "version": VERSION,
            "runs": [[piece.to_json() for piece in pieces] for pieces, _ in runs],
            "state": state,  # in the optimizer's own order; a list with a value, empty for a tensor
            **self._values(),
        }
        behind = None if ready is None else stream.record_event()
        return Offer(header, tuple(flat for _, flat in runs), behind)

    def _values(self) -> dict[str, Any]:
        """What is no tensor, but for the state of parameters."""
        return {
            "optimizer": self._optimizer_kind(),
            "groups": [
                {k: _as_json(f"option {k} of the optimizer", v) for k, v in group.items() if k != "params"}
                for group in self.groups
            ],
            "extra": {name: _as_json(f"extra {name}", give()) for name, (give, _) in self._extra.items()},
        }

    def _optimizer_kind(self) -> str:
        """The class of the optimizer; whether its state is on the host makes no difference."""
        optimizer = self._optimizer
        return (optimizer._kind if isinstance(optimizer, OffloadedState) else type(optimizer)).__name__

    def _model_tensors(self) -> Iterator[tuple[Piece, Tensor]]:
        now = self._model.named_buffers()  # a forward may have put others in their place
        buffers = {name: buffer for name, buffer in now if name in self._buffer_names}
        for kind, tensors in (("param", self.params), ("buffer", buffers)):
            for name, tensor in tensors.items():
                yield _piece(f"{kind}.{name}", tensor), tensor

    def _states(self) -> Iterator[tuple[str, Tensor, Mapping[str, Any]]]:
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if entries := self._optimizer.state.get(param):
                    yield self._name_of[id(param)], param, entries

    def fingerprint(self) -> str:
        """Hash of what rank r of every replica must have alike: names, shapes, dtypes, what trains, how."""
        lines = [f"{piece} {tensor.requires_grad}" for piece, tensor in self._model_tensors()]
        return _hash("\n".join([self._optimizer_kind(), *lines]))

    def options_hash(self) -> str:
        """Hash of the options with which the optimizer is about to step: learning rates and all others."""
        told = [
            {k: _as_json(k, v) for k, v in group.items() if k not in ("params", "param_names")}
            for group in self._optimizer.param_groups
        ]
        return _hash(json.dumps(told, sort_keys=True))

    # -- taking ----------------------------------------------------------------------------------

    def check(self, header: dict[str, Any]) -> list[list[Piece]]:
        """The pieces of each run that ``header`` announces; ValueError unless they fit this rank."""
        if header.get("version") != VERSION:
            raise ValueError(f"the peer's state has version {header.get('version')!r}, expected {VERSION}.")
        runs = [[Piece.from_json(piece) for piece in run] for run in header["runs"]]
        given = {piece.name: piece for run in runs for piece in run}
        if len(given) != sum(map(len, runs)):
            raise ValueError("the peer's state names a tensor twice.")
        for expected, _ in self._model_tensors():
            found = given.pop(expected.name, None)
            if found != expected:
                raise ValueError(f"{expected.name}: the peer has {found}, this rank {expected}.")
        trained = {self._name_of[id(p)] for group in self._optimizer.param_groups for p in group["params"]}
        for name in given:
            kind, _, rest = name.partition(".")
            if kind != "optim" or rest.partition(".")[2] not in trained:
                raise ValueError(f"{name}: the peer has it, this rank has not.")
        if header["optimizer"] != (own := self._optimizer_kind()):
            raise ValueError(f"the peer's optimizer is {header['optimizer']}, this rank's {own}.")
        sizes = [len(header["groups"]), len(self._optimizer.param_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the peer's optimizer has {sizes[0]} groups of parameters, this rank's {sizes[1]}."
            )
        if set(header["extra"]) != set(self._extra):
            raise ValueError(
                f"extra: the peer has {sorted(header['extra'])}, this rank {sorted(self._extra)}."
            )
        return runs

    @torch.no_grad()
    def load(self, header: dict[str, Any], staged: list[Tensor]) -> None:
        """Take over a peer's state, between a backward and a forward; ``staged``: the bytes of each run."""
        reshard_all(self._model)  # what an evaluation left gathered would be of the old weights
        locals_: dict[str, tuple[Piece, Tensor]] = {}
        for pieces, run in zip(self.check(header), staged):
            if (
                pieces[0].name.startswith("optim.") and pieces[0].shape
            ):  # becomes state, so it lies where that does
                run = run.to(local_part(self.params[_param_of(pieces[0])]).device)
            start = 0
            for piece in pieces:
                flat = run[start : start + piece.nbytes]
                locals_[piece.name] = piece, flat.view(piece.dtype).view(piece.shape)
                start += piece.nbytes
        own = {piece.name: local_part(tensor) for piece, tensor in self._model_tensors()}
        values = [locals_.pop(name)[1] for name in own]
        self._load_optimizer(header, locals_)  # first: it may refuse, and then nothing has changed
        torch._foreach_copy_(list(own.values()), values)
        for name, (_, take) in self._extra.items():
            take(_from_json(header["extra"][name]))

    def _load_optimizer(self, header: dict[str, Any], tensors: dict[str, tuple[Piece, Tensor]]) -> None:
        """Through the optimizer's own door, which knows how to plan anew; all of it is local."""
        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        position = 0
        for group, given in zip(self._optimizer.param_groups, header["groups"]):
            ids = list(range(position, position + len(group["params"])))
            position += len(ids)
            options = {k: _as_own(group.get(k), _from_json(v)) for k, v in given.items()}
            groups.append({**options, "params": ids})
            for index, param in zip(ids, group["params"]):
                name = self._name_of[id(param)]
                if entries := header["state"].get(name):
                    state[index] = {
                        key: _from_json(kept[0])
                        if kept
                        else self._wrap(*tensors[f"optim.{key}.{name}"], param, group, key)
                        for key, kept in entries.items()
                    }
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _wrap(self, piece: Piece, local: Tensor, param: Tensor, group: dict[str, Any], key: str) -> Tensor:
        """The local part of a parameter's state as the optimizer holds it."""
        if piece.form == _LIKE:
            return state_like(param, local)
        if piece.form == _OTHER:
            form = self._optimizer._expected_state(param, group)[key]
            return wrap_state(param, local, form.shape, form.placements)
        return local


def _param_of(piece: Piece) -> str:
    return piece.name.split(".", 2)[2]


def _piece(name: str, tensor: Tensor, like: Tensor | None = None) -> Piece:
    local, form = local_part(tensor), _PLAIN
    if like is not None and isinstance(tensor, DTensor):
        same = tensor.shape == like.shape and tensor.placements == getattr(like, "placements", None)
        form = _LIKE if same else _OTHER
    return Piece(name, local.dtype, tuple(local.shape), form)


def _runs(found: Iterator[tuple[Piece, Tensor]]) -> Iterator[tuple[list[Piece], Tensor]]:
    """Tensors in order of their addresses, joined where one ends and the next of its dtype begins."""
    pieces: list[Piece] = []
    first: Tensor | None = None
    nbytes = 0
    for piece, tensor in sorted(found, key=lambda item: (item[0].name.split(".")[0], item[1].data_ptr())):
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()  # a copy, made before the state can change
        joins = (
            first is not None
            and first.dtype == tensor.dtype
            and first.data_ptr() + nbytes == tensor.data_ptr()
            and first.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            and tensor.numel() > 0
        )
        if not joins:
            if first is not None:
                yield pieces, _bytes_from(first, nbytes)
            pieces, first, nbytes = [], tensor, 0
        pieces.append(piece)
        nbytes += piece.nbytes
    if first is not None:
        yield pieces, _bytes_from(first, nbytes)


def _bytes_from(first: Tensor, nbytes: int) -> Tensor:
    """``nbytes`` bytes from the start of ``first``, beyond its end within its storage."""
    flat = torch.empty(0, dtype=torch.uint8, device=first.device)
    return flat.set_(first.untyped_storage(), first.storage_offset() * first.element_size(), (nbytes,), (1,))


def _as_json(what: str, value: Any) -> Any:
    """``value`` as JSON that :func:`_from_json` undoes; raises, naming ``what``, if there is none.

    JSON itself would make lists of tuples and text of the keys of a dict: a scheduler whose milestones are
    texts passes them all without a word. Tensors of one element become numbers.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, dict):
        return {"dict": [[_as_json(what, k), _as_json(what, v)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_as_json(what, v) for v in value]}
    if isinstance(value, list):
        return [_as_json(what, v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"{what}: a replica's state holds tensors, numbers, text, lists, tuples and dicts, got {value!r}."
    )


def _from_json(given: Any) -> Any:
    if isinstance(given, dict):
        if "tuple" in given:
            return tuple(map(_from_json, given["tuple"]))
        return {_from_json(k): _from_json(v) for k, v in given["dict"]}
    return [_from_json(v) for v in given] if isinstance(given, list) else given


def _as_own(own: Any, given: Any) -> Any:
    """A value of a peer as this rank holds it: a tensor has become a number."""
    return torch.full_like(own, given) if isinstance(own, Tensor) else given


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
