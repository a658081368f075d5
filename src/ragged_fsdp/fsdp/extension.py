"""All-gather extensions: tensor subclasses that choose what is sent and what is made of it.

A local tensor with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` (FSDP2's protocol) sends the tensors
the first returns, such as float8 data and a scale, and computes with what the second makes of the gathered
ones. Such parameters form a group of their own. They keep their class, so they lie in no common buffer, and
they are cut into equal chunks of rows as ``Shard(0)`` does, because extensions pad and index by rows::

    rows   0 1 2 | 3 4 5 | 6 . .      7 rows on 3 ranks; a chunk is padded to 3 rows when it is sent

Gradients are reduced like those of any group.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import _unsafe_preserve_version_counter
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ragged_fsdp import collectives
from ragged_fsdp.dbuffer.storage import contiguous_stride
from ragged_fsdp.fsdp.autograd import on_parameters
from ragged_fsdp.fsdp.param import ManagedParam
from ragged_fsdp.fsdp.param_group import ParamGroup
from ragged_fsdp.fsdp.plan import GroupPlan
from ragged_fsdp.layout import GroupLayout, LocalRange, TensorSpec

__all__ = ["ExtensionGroup", "RowPieces", "RowPlan", "is_extended", "row_plan"]

_ALIGN_BYTES = 16
_SIGNATURE = (
    "fsdp_pre_all_gather(self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], "
    "module: nn.Module, mp_policy: MixedPrecisionPolicy)"
)


@dataclass(frozen=True)
class RowPlan(GroupPlan):
    """A plan in which every tensor is cut by itself, into equal chunks of rows."""

    @property
    def same_items(self) -> bool:
        """Never: gradients get a packed layout of their own."""
        return False

    def chunk_rows(self, index: int) -> int:
        """Rows of a chunk, the last ones filled up."""
        return -(-self.shapes[index][0] // self.layout.ranks)

    def tensor_layout(self, index: int) -> GroupLayout:
        """One tensor over the ranks, in its elements."""
        row = math.prod(self.shapes[index][1:])
        spec = TensorSpec(self.names[index], math.prod(self.shapes[index]), max(1, row))
        return GroupLayout((spec,), self.layout.ranks, 1, self.chunk_rows(index) * row, (0,), 0)

    def local_range(self, index: int, rank: int) -> LocalRange:
        """The rows of tensor ``index`` on ``rank``, in elements."""
        return self.tensor_layout(index).local_range(0, rank)


def row_plan(
    names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], ranks: int
) -> RowPlan:
    """Plan the parameters of an extension group; no search is needed."""
    specs = tuple(TensorSpec(name, math.prod(shape)) for name, shape in zip(names, shapes))
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += spec.numel
    layout = GroupLayout(specs, ranks, 1, -(-end // ranks), tuple(offsets), 0)
    fixed = tuple(tuple(shape) for shape in shapes)
    kinds = tuple(str(dtype) for dtype in dtypes)
    return RowPlan(tuple(names), fixed, kinds, (1,) * len(specs), layout, 1)


class RowPieces:
    """This rank's rows of each parameter, in the parameter's own class."""

    def __init__(
        self, plan: RowPlan, rank: int, inners: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        pieces = []
        for index, inner in enumerate(inners):
            part = plan.local_range(index, rank)
            row = max(1, math.prod(plan.shapes[index][1:]))
            rows = inner.detach().narrow(0, min(part.tensor_start // row, inner.shape[0]), part.numel // row)
            pieces.append(rows.clone() if inner.is_meta else rows.clone().to(device))
        self.pieces = tuple(pieces)


@dataclass
class _Gathered:
    """What one parameter sends and what was made of it; tensors persist, their storage comes and goes."""

    shapes: list[torch.Size] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Of each input in this rank's part of the message, in bytes."""
    outputs: list[torch.Tensor] = field(default_factory=list)
    inner: list[torch.Tensor] = field(default_factory=list)
    nbytes: dict[int, int] = field(default_factory=dict)
    metadata: Any = None

    def tensors(self) -> list[torch.Tensor]:
        """Everything whose storage is freed by a reshard."""
        return [*self.outputs, *self.inner]

    def materialize(self) -> None:
        """Bring freed storages back, uninitialised."""
        for tensor in self.tensors():
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                storage.resize_(self.nbytes[id(tensor)])

    def release(self) -> None:
        """Free the storages."""
        for tensor in self.tensors():
            storage = tensor.untyped_storage()
            if storage.nbytes():
                self.nbytes[id(tensor)] = storage.nbytes()
        for tensor in self.tensors():
            tensor.untyped_storage().resize_(0)


class ExtensionGroup(ParamGroup):
    """A group whose parameters are gathered through their own hooks."""

    plan: RowPlan
    main: RowPieces  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gathered = [_Gathered() for _ in self.params]
        self._message: torch.Tensor | None = None

    def _prepare_weight(self, param_dtype: torch.dtype | None) -> None:
        for param in self.params:
            local = param.sharded._local_tensor
            has = [hasattr(local, f"fsdp_{when}_all_gather") for when in ("pre", "post")]
            if any(has) and not all(has):
                raise AssertionError(
                    "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined "
                    f"if using all-gather extensions: {param.fqn or param.name}"
                )
            if not any(has):
                raise NotImplementedError(
                    f"{param.fqn or param.name}: a {type(local).__name__} has no fsdp_pre_all_gather and "
                    "fsdp_post_all_gather, so how to gather it is unknown."
                )

    @on_parameters
    def reset_sharded_params(self) -> None:
        """Follow parameters that were replaced, cast or moved; each is its own storage."""
        for param in self.params:
            param.adopt(param.registered())
        self._note_dtypes([param.sharded._local_tensor for param in self.params])

    # -- gather ----------------------------------------------------------------------------------

    def _gather_source(self) -> torch.Tensor:
        """The extensions' inputs, packed into this rank's slot of the message."""
        return self._pack([self._inputs(index, param) for index, param in enumerate(self.params)])

    def _inputs(self, index: int, param: ManagedParam) -> list[torch.Tensor]:
        local = param.sharded._local_tensor
        if self.offload:
            local = local.to(self.device, non_blocking=self.pin_memory)
        pre = local.fsdp_pre_all_gather
        expected = len(inspect.signature(pre).parameters)
        if expected not in (1, 5):
            raise AssertionError(
                f"Invalid fsdp_pre_all_gather: {inspect.signature(pre)}\nExpects {_SIGNATURE}"
            )
        more = (
            param.inner_shape,
            contiguous_stride(param.inner_shape),
            param.places[0].module,
            self.mp_policy,
        )
        inputs, self._gathered[index].metadata = pre(self.mesh.shard_mesh, *(more if expected == 5 else ()))
        padded = (self.plan.chunk_rows(index), *param.inner_shape[1:])
        return [_pad(tensor, local.shape, padded) for tensor in inputs]

    def _pack(self, inputs: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Write the inputs into this rank's part of one message; on the compute stream, which frees it."""
        end = 0
        for state, tensors in zip(self._gathered, inputs):
            state.shapes, state.offsets = [t.shape for t in tensors], []
            for tensor in tensors:
                state.offsets.append(end)
                end += -(-tensor.numel() * tensor.element_size() // _ALIGN_BYTES) * _ALIGN_BYTES
        group = self.mesh.shard_group
        message = torch.empty(group.size() * end, dtype=torch.uint8, device=self.device)
        slot = message.narrow(0, group.rank() * end, end)
        for state, tensors in zip(self._gathered, inputs):
            if not state.outputs:
                state.outputs = [_output(tensor, group.size(), self.device) for tensor in tensors]
            for offset, tensor in zip(state.offsets, tensors):
                as_bytes = tensor.contiguous().view(-1).view(torch.uint8)
                slot.narrow(0, offset, as_bytes.numel()).copy_(as_bytes)
        self._message = message
        return slot

    def _gather(self, slot: torch.Tensor, async_op: bool) -> Any:
        """All inputs of all extensions with one collective."""
        group, message = self.mesh.shard_group, self._message
        if group.size() == 1 or message is None:
            return None
        self.context.note_collective("all_gather", self)
        with collectives.explain_failure("all-gather", self.label, group), self.profile("all_gather"):
            comm = self.settings.custom_all_gather
            return collectives.all_gather_(message, slot, group, async_op=async_op, comm=comm)

    def _wait_gather(self) -> None:
        super()._wait_gather()
        message, self._message = self._message, None
        if message is None:
            return  # the data of the forward was kept
        parts = message.view(self.mesh.shard_size, -1)
        for param, state in zip(self.params, self._gathered):
            state.materialize()
            with _unsafe_preserve_version_counter(tuple(state.outputs)):
                for offset, output in zip(state.offsets, state.outputs):
                    rows = output.view(self.mesh.shard_size, -1).view(torch.uint8)
                    rows.copy_(parts.narrow(1, offset, rows.shape[1]))
            self._make(param, state)

    def _make(self, param: ManagedParam, state: _Gathered) -> None:
        local = param.sharded._local_tensor
        outputs = tuple(
            output.view(-1, *shape[1:]) if len(shape) else output
            for output, shape in zip(state.outputs, state.shapes)
        )
        dtype = self.mp_policy.param_dtype or param.dtype
        metadata, state.metadata = state.metadata, None
        if param.unsharded is not None:
            local.fsdp_post_all_gather(outputs, metadata, dtype, out=param.unsharded)
            return
        made, inner = local.fsdp_post_all_gather(outputs, metadata, dtype)
        state.inner = list(inner)
        shape = tuple(param.inner_shape)
        param.make_unsharded(torch.as_strided(made, shape, contiguous_stride(shape), 0))

    def _release_weight(self) -> None:
        self._message = None
        for state in self._gathered:
            state.release()

    def _park(self) -> None:
        raise NotImplementedError(f"{self.label}: all-gather extensions need a bool reshard_after_forward.")


def _pad(tensor: torch.Tensor, local: torch.Size, padded: tuple[int, ...]) -> torch.Tensor:
    """Fill up an input that has one entry per row of a short chunk, so that all ranks send alike."""
    if tensor.shape != local or tuple(tensor.shape) == padded:
        return tensor
    full = tensor.new_zeros(padded)
    full.narrow(0, 0, tensor.shape[0]).copy_(tensor)
    return full


def _output(tensor: torch.Tensor, ranks: int, device: torch.device) -> torch.Tensor:
    return torch.empty(tensor.numel() * ranks, dtype=tensor.dtype, device=device)


def is_extended(param: torch.Tensor) -> bool:
    """Whether a parameter needs a group of this kind: its inner tensor is a wrapper subclass."""
    inner = param._local_tensor if isinstance(param, DTensor) else param.data
    return is_traceable_wrapper_subclass(inner) and not isinstance(inner, DTensor)
