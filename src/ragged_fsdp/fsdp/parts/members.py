"""What a group is made of: its parameters, the shard in which they lie, the switches that users change.

Transports and reducers work on :class:`Members`; the group itself adds the states of its parameters.

[Note: tensors of a parameter]
- original: what was registered when ``fully_shard`` was called; a plain tensor, or a DTensor from tensor
  or expert parallelism. It is dropped.
- inner: the original's local tensor, which data parallelism cuts; the original itself if plain. Of a frozen
  weight that is codes and scales it is their bytes (``packing.py``), and what follows is of these.
- sharded: a DTensor, ragged unless the user asked for a ``Shard``; its local tensor is this rank's piece of
  the group's main shard.
- unsharded: the parameter computation uses; a slice of the gathered buffer with the inner shape, wrapped
  in the original's DTensor spec if it had one. Its object is made once: autograd may hold it.
- main shard: the group's persistent local pieces, in the parameters' original dtypes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from ragged_fsdp.collectives import Comm, explain
from ragged_fsdp.dbuffer import DBuffer, FlatStorage
from ragged_fsdp.dtensor import ragged_spec, wrap_local
from ragged_fsdp.dtensor.geometry import contiguous_stride
from ragged_fsdp.fsdp.parts.left_out import (
    MANAGED_ATTRIBUTE,
    note_current,
    note_gathered,
    note_replaced,
)
from ragged_fsdp.fsdp.parts.mesh import ParallelMesh
from ragged_fsdp.fsdp.parts.plan import ChunkPlan, GroupPlan, gathered_dtype, inner_of
from ragged_fsdp.fsdp.streams import CommContext
from ragged_fsdp.layout import ALIGN_BYTES, align_up
from ragged_fsdp.packing import mark, packing_of
from ragged_fsdp.torch_internals import (
    DTensorSpec,
    TensorMeta,
    local_of,
    parameters_of,
    profiler_enabled,
    set_local,
    spec_of,
    storage_id,
)

__all__ = [
    "CODES_ATTRIBUTE",
    "PRODUCT_ATTRIBUTE",
    "GroupSettings",
    "MainShard",
    "ManagedParam",
    "Members",
    "Registration",
    "RowPieces",
    "pins_memory",
]

_TORCH = Comm()
PRODUCT_ATTRIBUTE = "_ragged_fsdp_fp8"
"""On a parameter, in each of its forms: the FP8 product that computes with it (:mod:`ragged_fsdp.fp8`)."""
CODES_ATTRIBUTE = "_ragged_fsdp_codes"
"""On a gathered parameter without values: the codes and scales that its product reads instead."""
_IDENTITIES = WeakIdKeyDictionary()
"""By original parameter what is known of it after it was freed, when its ``id()`` may be another's. Not an
attribute: a copy of the parameter that went through a file would have it too."""

# by the id of the sharded parameter; whether it still is that must be asked
_OWNERS: weakref.WeakValueDictionary[int, ManagedParam] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Registration:
    """One registration of a parameter: tied parameters and shared modules have several."""

    module: nn.Module
    attribute: str


class ManagedParam:
    """One parameter in all its forms: see [Note: tensors of a parameter]."""

    def __init__(self, name: str, original: nn.Parameter, places: Sequence[Registration]) -> None:
        self.name = name
        self.fqn = name
        """The parameter's name: below the root, once that is known."""
        self.places = tuple(places)
        # nn.Module.__setattr__ checks what we know; a class that overrides it wants to see the change
        usual = all(type(p.module).__setattr__ is nn.Module.__setattr__ for p in self.places)
        self.tables = [(parameters_of(p.module), p.attribute) for p in self.places] if usual else None
        self.identity: object = _IDENTITIES.get(original) or object()
        """Equal in every call that manages the same original."""
        self.inner_spec: DTensorSpec | None = spec_of(original) if isinstance(original, DTensor) else None
        self.packing = packing_of(original)
        """How a frozen weight of a class of its own becomes a plain tensor, and that tensor the weight."""
        plain = original
        if self.packing is not None:
            plain = nn.Parameter(self.packing.pack(original), requires_grad=False)
        self.inner_shape = inner_of(plain).shape
        self.global_shape = plain.shape
        self.dtype = plain.dtype
        self.sharded: nn.Parameter = plain
        self._original: nn.Parameter | None = original
        """The parameter as it came, until it is replaced, which a call that fails does not do."""
        self.unsharded: nn.Parameter | None = None
        self.parked: nn.Parameter | None = None
        """What is registered while the group is parked: the piece of a smaller mesh's rank."""
        self.shard_dim = 0
        """The dim that the shard group cuts; not 0 only where the user asked for such a ``Shard``."""
        self.grad_as_is = self.inner_spec is None
        """Whether autograd's gradient is what is reduced: no DTensor, and cut along dim 0."""
        self.product: Any = getattr(original, PRODUCT_ATTRIBUTE, None)
        self.trains = original.requires_grad
        """``requires_grad`` of its forms when they last agreed."""
        self.grad_hook: Any = None
        """Handle of the hook that takes a large gradient as soon as it is accumulated."""

    def attach(self, local: torch.Tensor, mesh: Any, placements: Sequence[Any], shard_dim: int = 0) -> None:
        """Make the sharded parameter from this rank's part, which the shard group cut along ``shard_dim``."""
        self.shard_dim = shard_dim
        self.grad_as_is &= shard_dim == 0
        self.spec = ragged_spec(mesh, tuple(placements), self.global_shape, self.dtype)
        self.sharded = nn.Parameter(wrap_local(local, self.spec), requires_grad=self.sharded.requires_grad)
        self.local_shape = local.shape

    def register(self, param: nn.Parameter) -> None:
        """Put ``param`` wherever this parameter is registered."""
        setattr(param, MANAGED_ATTRIBUTE, True)
        if self._original is not None:
            note_replaced(self._original, self.name)
            # only now: ``Module.to`` swaps no tensor that has a weak reference, and a call may be refused
            _IDENTITIES[self._original] = self.identity
            self._original = None
            self._mark()
        if param is self.sharded:
            _OWNERS[id(param)] = self
        for place in self.places:
            if self.tables is not None:
                parameters_of(place.module)[place.attribute] = param
            else:
                setattr(place.module, place.attribute, param)

    def _mark(self) -> None:
        """Say on the sharded parameter what it is."""
        # else a later call on a module below would take it, and nobody would see that a step made weights old
        setattr(self.sharded, MANAGED_ATTRIBUTE, True)
        if self.product is not None:
            setattr(self.sharded, PRODUCT_ATTRIBUTE, self.product)
        if self.packing is not None:
            mark(self.sharded, self.packing, [place.module for place in self.places])

    def adopt_registered(self) -> None:
        """Take over what the user registered in place of the sharded parameter."""
        param: Any = getattr(self.places[0].module, self.places[0].attribute)
        if param is self.sharded:
            self._mark()  # ``Module.to`` and its like leave the object and drop its attributes
            return
        owner = _OWNERS.get(id(param))
        if owner is not None and owner.sharded is param:
            raise ValueError(
                f"{self.fqn}: the sharded parameter was replaced by that of "
                f"'{owner.fqn}', which is cut elsewhere; tie parameters before fully_shard, "
                "in one call."
            )
        if not isinstance(param, DTensor):
            raise ValueError(
                f"{self.fqn}: the sharded parameter was replaced by a {type(param).__name__}; "
                f"expected a DTensor with placements {self.spec.placements}."
            )
        if param.shape != self.global_shape:
            raise ValueError(
                f"{self.fqn}: the sharded parameter was replaced by one of shape "
                f"{tuple(param.shape)}; expected {tuple(self.global_shape)}."
            )
        if param.placements != self.spec.placements and not param.is_meta:
            moved = param.detach().redistribute(self.spec.mesh, self.spec.placements)
            set_local(param, local_of(moved), spec_of(moved))  # the user's object stays
        note_replaced(self.sharded, self.fqn)
        note_current(param)
        self.sharded = param  # type: ignore[assignment]  # a parameter that is a DTensor
        _OWNERS[id(param)] = self
        self._mark()
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

    def make_unsharded(self, view: torch.Tensor) -> nn.Parameter:
        """The unsharded parameter over a slice of the gathered buffer."""
        data = view
        if self.inner_spec is not None:
            meta = self.inner_spec.tensor_meta
            if meta is not None and meta.dtype != view.dtype:
                meta = TensorMeta(meta.shape, contiguous_stride(meta.shape), view.dtype)
            data = DTensor(view, replace(self.inner_spec, tensor_meta=meta), requires_grad=False)
        self.trains = self.sharded.requires_grad
        if self.packing is not None:
            self.unsharded = self.packing.unpack(data)
        else:
            self.unsharded = nn.Parameter(data, requires_grad=self.trains)
        note_gathered(self.unsharded, self.fqn)
        setattr(self.unsharded, MANAGED_ATTRIBUTE, True)
        if self.product is not None:
            setattr(self.unsharded, PRODUCT_ATTRIBUTE, self.product)
        self.grad_hook = None
        return self.unsharded

    def __repr__(self) -> str:
        return f"ManagedParam({self.fqn}, {tuple(self.global_shape)}, {self.dtype})"


def pins_memory(policy: OffloadPolicy, device: torch.device) -> bool:
    """Whether offloaded memory is pinned: only an accelerator's copies gain from it."""
    return isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and device.type != "cpu"


class MainShard:
    """This rank's pieces of a group, one per parameter.

    Where all parameters have one dtype the shard is a sharded :class:`DBuffer`: one tensor to cast, to
    offload and to hand to optimizers. Where dtypes differ the pieces are packed behind each other, each at a
    multiple of 16 bytes, and move with one foreach call.
    """

    def __init__(
        self,
        plan: GroupPlan,
        mesh: ParallelMesh,
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        *,
        pin_memory: bool = False,
    ) -> None:
        self.plan = plan
        self.rank = mesh.shard_rank
        self.dtypes = tuple(dtypes)
        self.device = device
        self.buffer: DBuffer | None = None
        numels = [plan.local_range(i, self.rank).numel for i in range(len(self.dtypes))]
        if plan.same_items and len(set(self.dtypes)) == 1:
            self.buffer = DBuffer(
                plan.layout,
                plan.shapes,
                mesh.mesh,
                dtype=self.dtypes[0],
                device=device,
                pin_memory=pin_memory,
            )
            self.storage = self.buffer.storage
            starts = [
                plan.layout.local_range(i, self.rank).shard_start * self.buffer.cell_bytes
                for i in range(len(self.dtypes))
            ]
        else:
            sizes = (numel * dtype.itemsize for numel, dtype in zip(numels, self.dtypes))
            *starts, nbytes = accumulate((align_up(size, ALIGN_BYTES) for size in sizes), initial=0)
            self.storage = FlatStorage(nbytes, device, pin_memory=pin_memory)
        # views of one tensor, not tensors over one storage: the compiler can only trace the former
        whole = self.storage.tensor(0, (self.storage.nbytes,), torch.uint8)
        self.pieces = tuple(
            whole.narrow(0, start, numel * dtype.itemsize).view(dtype)
            for start, numel, dtype in zip(starts, numels, self.dtypes)
        )
        end = 0
        for start, piece in sorted(zip(starts, self.pieces), key=lambda placed: placed[0]):
            whole[end:start].zero_()  # padding must not gather garbage; pieces are not touched before use
            end = max(end, start + piece.nbytes)
        whole[end:].zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's shard, padding included."""
        return self.storage.nbytes

    def holds(self, index: int, local: torch.Tensor) -> bool:
        """Whether ``local`` still is this shard's piece of parameter ``index``."""
        piece = self.pieces[index]
        return (
            local.dtype == piece.dtype
            and local.numel() == piece.numel()
            and storage_id(local.untyped_storage()) == storage_id(self.storage.untyped)
            and (not piece.numel() or local.storage_offset() == piece.storage_offset())
        )

    def fill(self, slots: Sequence[torch.Tensor], *, non_blocking: bool) -> None:
        """Cast each piece into the slot of its parameter, with one foreach call."""
        filled = [(slot.view(-1), piece) for slot, piece in zip(slots, self.pieces) if piece.numel()]
        if filled:
            sources = [piece.to(slot.device, non_blocking=non_blocking) for slot, piece in filled]
            torch._foreach_copy_([slot for slot, _ in filled], sources)


class RowPieces:
    """This rank's rows of each parameter, in the parameter's own class, each with memory of its own."""

    def __init__(
        self, plan: ChunkPlan, rank: int, inners: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        pieces = []
        for inner in inners:
            # by chunk, as FSDP2 does: some classes know how to split rows and no other way to take some
            chunks = inner.detach().chunk(plan.layout.ranks)
            rows = chunks[rank] if rank < len(chunks) else inner.detach().narrow(0, inner.shape[0], 0)
            rows = rows.clone()
            pieces.append(rows if inner.is_meta else rows.to(device))
        self.pieces = tuple(pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's rows."""
        return sum(piece.nbytes for piece in self.pieces)


@dataclass
class GroupSettings:
    """One per group; ``FSDPModule``'s setters write it, the group reads it when it acts."""

    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    reduce_unused: bool = False
    """Whether a trainable parameter without a gradient takes part with zeros and gets a gradient."""
    divide_factor: float | None = None
    """What the sum of gradients is divided by; None is the number of data-parallel ranks."""
    sum_only: bool = False
    """Whether collectives may only sum; scaling is then done before or after them."""
    unshard_async_op: bool = False
    keep_storage: bool = False
    """Whether a reshard leaves the gathered storage allocated, so that its address does not change."""
    max_grad_buffers: int = 1
    """Gradient buffers alive at once below this group's root; the largest setting counts."""
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook_stream: Any = None
    gather_comm: Comm = _TORCH
    reduce_comm: Comm = _TORCH
    reduce_group: dist.ProcessGroup | None = None
    """A process group of its own for reductions over the shards, if asked for."""


@dataclass(eq=False)
class Members:
    """Parameters that are gathered and reduced together: their plan, shards, mesh, dtypes and settings."""

    params: list[ManagedParam]
    modules: tuple[nn.Module, ...]
    mesh: ParallelMesh
    plan: GroupPlan
    main: MainShard | RowPieces
    device: torch.device
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    settings: GroupSettings = field(default_factory=GroupSettings)
    planned_comm: Comm = _TORCH
    """What gathers where the user says nothing else."""
    context: CommContext = None  # type: ignore[assignment]  # the schedule's, once there is one
    label: str = ""
    """Name for errors and profiles: of the modules below the root, once that is known."""
    label_suffix: str = ""
    """Which of the groups of its call this one is, if there are several."""
    without_values: bool = False
    """Whether shards that replace others hold nothing yet, so that copying them would be in vain."""
    reduce_dtype: torch.dtype | None = None
    """In which gradients are summed, if not in the dtype that autograd produces."""

    def __post_init__(self) -> None:
        self.offload = isinstance(self.offload_policy, CPUOffloadPolicy)
        self.pin_memory = pins_memory(self.offload_policy, self.device)
        self.name_after("")

    def name_after(self, modules: str) -> None:
        """Be called by the names of its modules, or by its first parameter where they have none."""
        self.label = (modules or self.params[0].name) + self.label_suffix

    @property
    def gathered_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype that each parameter is computed with."""
        return tuple(gathered_dtype(param.dtype, self.mp_policy.param_dtype) for param in self.params)

    def follow_trainable(self) -> None:
        """Choose the dtypes of gradients; again when other parameters train than before."""
        param_dtype, reduce_dtype = self.mp_policy.param_dtype, self.mp_policy.reduce_dtype
        self.reduce_dtype = None if reduce_dtype == param_dtype else reduce_dtype
        self.followed = tuple([p.trains for p in self.params])
        """Which parameters trained when these dtypes were chosen."""
        trainable = {p.dtype for p in self.params if p.trains}
        if len(trainable) > 1:
            raise AssertionError(f"FSDP expects uniform original parameter dtype but got {trainable}")
        self.trainable_dtype = next(iter(trainable), torch.float32)
        self.wire_dtype = gathered_dtype(self.trainable_dtype, param_dtype)
        """The dtype in which autograd produces the gradients."""
        self.gradient_dtype = self.reduce_dtype or self.wire_dtype

    def launch(self, phase: str, pg: Any, collective: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call ``collective`` for this group: an error says where, a profiler that runs shows its name."""
        if self.context.order_check is not None:
            self.context.order_check.note(phase.replace("-", "_"), self.label, pg)
        try:
            if not profiler_enabled():
                return collective(*args, **options)
            with torch.profiler.record_function(f"FSDP::{phase.replace('-', '_')} ({self.label})"):
                return collective(*args, **options)
        except RuntimeError as error:
            explain(error, phase, self.label, pg)
            raise
