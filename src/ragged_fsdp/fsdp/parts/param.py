"""One managed parameter: its sharded form, its unsharded form, and where it is registered.

[Note: tensors of a parameter]
- original: what was registered when ``fully_shard`` was called; a plain tensor, or a DTensor from tensor
  or expert parallelism. It is dropped.
- inner: the original's local tensor, which data parallelism cuts; the original itself if plain.
- sharded: a DTensor, ragged unless the user asked for a ``Shard``; its local tensor is this rank's piece of
  the group's main shard.
- unsharded: the parameter computation uses; a slice of the gathered buffer with the inner shape, wrapped
  in the original's DTensor spec if it had one. Its object is made once: autograd may hold it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor import ragged_spec, wrap_local
from ragged_fsdp.dtensor.geometry import contiguous_stride
from ragged_fsdp.fsdp.parts.plan import inner_of
from ragged_fsdp.torch_internals import DTensorSpec, TensorMeta, local_of, parameters_of, set_local, spec_of

__all__ = [
    "MANAGED_ATTRIBUTE",
    "ManagedParam",
    "Place",
    "check_materialized",
    "settle_requires_grad",
]

MANAGED_ATTRIBUTE = "_ragged_fsdp_managed"
_UNIQUE_IDS = count()

# by the id of the sharded parameter; whether it still is that must be asked
_OWNERS: weakref.WeakValueDictionary[int, ManagedParam] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Place:
    """One registration of a parameter: tied parameters and shared modules have several."""

    module: nn.Module
    attribute: str


def _unique_id(param: nn.Parameter) -> int:
    """A number that belongs to this parameter for ever; ``id()`` may be reused after it is freed."""
    if not hasattr(param, "_ragged_fsdp_uid"):
        param._ragged_fsdp_uid = next(_UNIQUE_IDS)
    return param._ragged_fsdp_uid


class ManagedParam:
    """See [Note: tensors of a parameter]."""

    def __init__(self, name: str, original: nn.Parameter, places: Sequence[Place]) -> None:
        self.name = name
        self.fqn: str | None = None
        self.places = tuple(places)
        # nn.Module.__setattr__ checks what we know; a class that overrides it wants to see the change
        plain = all(type(p.module).__setattr__ is nn.Module.__setattr__ for p in self.places)
        self.tables = [(parameters_of(p.module), p.attribute) for p in self.places] if plain else None
        self.uid = _unique_id(original)
        self.inner_spec: DTensorSpec | None = spec_of(original) if isinstance(original, DTensor) else None
        self.inner_shape = inner_of(original).shape
        self.global_shape = original.shape
        self.dtype = original.dtype
        self.sharded: nn.Parameter = original
        self.unsharded: nn.Parameter | None = None
        self.shard_dim = 0
        """The dim that the shard group cuts; not 0 only where the user asked for such a ``Shard``."""
        self.grad_as_is = self.inner_spec is None
        """Whether autograd's gradient is what is reduced: no DTensor, and cut along dim 0."""
        self.trains = original.requires_grad
        """``requires_grad`` of both forms when they last agreed."""
        self.grad_hook: Any = None
        """Handle of the hook that takes a large gradient as soon as it is accumulated."""

    def attach_shard(self, piece: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> None:
        """Make the sharded parameter from this rank's flat ``piece``, rows of which are whole."""
        dims = max((len(p.dims) for p in placements if hasattr(p, "local_units")), default=0)
        row = self.inner_shape[dims:]
        self._attach(piece.view(-1, *row) if row.numel() else piece.view(0, *row), mesh, placements)

    def attach_chunk(
        self, piece: torch.Tensor, mesh: Any, placements: Sequence[Any], dim: int, rows: int
    ) -> None:
        """Make the sharded parameter from a flat ``piece`` that is a chunk of ``rows`` along ``dim``."""
        self.shard_dim = dim
        self.grad_as_is &= dim == 0
        shape = (*self.inner_shape[:dim], rows, *self.inner_shape[dim + 1 :])
        self._attach(piece.view(shape), mesh, placements)

    def attach_replicated(self, whole: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> None:
        """Make the "sharded" parameter where no mesh dim shards: its local tensor is the whole inner one."""
        self._attach(whole.view(self.inner_shape), mesh, placements)

    def _attach(self, local: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> None:
        self.spec = ragged_spec(mesh, tuple(placements), self.global_shape, self.dtype)
        self.sharded = nn.Parameter(wrap_local(local, self.spec), requires_grad=self.sharded.requires_grad)
        self.local_shape = local.shape

    def register(self, param: nn.Parameter) -> None:
        """Put ``param`` wherever this parameter is registered."""
        setattr(param, MANAGED_ATTRIBUTE, True)  # a later call on a module below must not take it
        if param is self.sharded:
            _OWNERS[id(param)] = self
        for place in self.places:
            if self.tables is not None:
                parameters_of(place.module)[place.attribute] = param
            else:
                setattr(place.module, place.attribute, param)

    def registered(self) -> nn.Parameter:
        """What is registered now; users may have replaced it."""
        return getattr(self.places[0].module, self.places[0].attribute)

    def adopt(self, param: nn.Parameter) -> None:
        """Take over a parameter that the user registered in place of the sharded one."""
        if param is self.sharded:
            return
        owner = _OWNERS.get(id(param))
        if owner is not None and owner.sharded is param:
            raise ValueError(
                f"{self.fqn or self.name}: the sharded parameter was replaced by that of "
                f"'{owner.fqn or owner.name}', which is cut elsewhere; tie parameters before fully_shard, "
                "in one call."
            )
        if not isinstance(param, DTensor):
            raise ValueError(
                f"{self.fqn or self.name}: the sharded parameter was replaced by a {type(param).__name__}; "
                f"expected a DTensor with placements {self.spec.placements}."
            )
        if param.shape != self.global_shape:
            raise ValueError(
                f"{self.fqn or self.name}: the sharded parameter was replaced by one of shape "
                f"{tuple(param.shape)}; expected {tuple(self.global_shape)}."
            )
        if param.placements != self.spec.placements and not param.is_meta:
            moved = param.detach().redistribute(self.spec.mesh, self.spec.placements)
            set_local(param, local_of(moved), spec_of(moved))  # the user's object stays
        self.sharded = param
        _OWNERS[id(param)] = self
        for place in self.places[1:]:
            parameters_of(place.module)[place.attribute] = param

    def point_at(self, piece: torch.Tensor) -> None:
        """Let the sharded parameter's local tensor be ``piece``; its object stays the same."""
        local = piece.view(self.local_shape)
        self.dtype = piece.dtype
        meta = self.spec.tensor_meta
        if meta is not None and meta.dtype != piece.dtype:
            self.spec = replace(self.spec, tensor_meta=TensorMeta(meta.shape, meta.stride, piece.dtype))
        # the wrapper's own storage offset must follow: the compiler compares it with the local tensor's
        self.sharded.data = wrap_local(local, self.spec)
        set_local(self.sharded, local, self.spec)  # type: ignore[arg-type]

    def sharded_grad(self, local: torch.Tensor) -> DTensor:
        """A gradient of the sharded parameter with this local part."""
        # without DTensor.__init__, which does nothing but costs as much as the rest
        return DTensor.__new__(DTensor, local, self.spec, requires_grad=False)

    def empty_grad(self, like: torch.Tensor) -> DTensor:
        """The gradient of a parameter of which this rank holds nothing, on the device of ``like``."""
        return self.sharded_grad(like.new_empty(self.local_shape))

    def make_unsharded(self, view: torch.Tensor) -> nn.Parameter:
        """The unsharded parameter over a slice of the gathered buffer."""
        data = view
        if self.inner_spec is not None:
            meta = self.inner_spec.tensor_meta
            if meta is not None and meta.dtype != view.dtype:
                meta = TensorMeta(meta.shape, contiguous_stride(meta.shape), view.dtype)
            data = DTensor(view, replace(self.inner_spec, tensor_meta=meta), requires_grad=False)
        self.trains = self.sharded.requires_grad
        self.unsharded = nn.Parameter(data, requires_grad=self.trains)
        setattr(self.unsharded, MANAGED_ATTRIBUTE, True)
        self.grad_hook = None
        return self.unsharded

    def __repr__(self) -> str:
        return f"ManagedParam({self.fqn or self.name}, {tuple(self.global_shape)}, {self.dtype})"


def settle_requires_grad(params: Iterable[ManagedParam]) -> None:
    """Take for both forms what ``requires_grad_`` changed on the one that was registered, or held."""
    for param in params:
        unsharded, sharded = param.unsharded, param.sharded
        if unsharded is None or unsharded.requires_grad == sharded.requires_grad:
            param.trains = sharded.requires_grad
            continue
        param.trains = not param.trains  # one of the two was changed, the other is as it was
        unsharded.requires_grad_(param.trains)
        sharded.requires_grad_(param.trains)


def check_materialized(params: Iterable[ManagedParam], *, on_host: bool) -> None:
    """Raise unless the sharded parameters have memory, and have it on the host if they are offloaded."""
    places = [(param.fqn or param.name, param.sharded.device) for param in params]
    on_meta = [name for name, device in places if device.type == "meta"]
    if on_meta:
        raise RuntimeError(
            "FSDP parameters should be materialized from meta device before training, "
            f"but the following were still on meta device: {on_meta}\n"
            "For example, call module.to_empty(device) to materialize to device and "
            "call module.reset_parameters() on each module to initialize values."
        )
    elsewhere = [place for place in places if place[1].type != "cpu"]
    if on_host and elsewhere:
        raise RuntimeError(
            "FSDP parameters should be materialized on CPU when enabling CPU offloading. "
            'For example, load a CPU state dict or call module.to_empty(device="cpu"). '
            f"Found following parameters on non-CPU device: {elsewhere}\n"
        )
