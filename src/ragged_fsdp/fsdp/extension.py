"""All-gather extensions: tensor subclasses that choose what is sent and what is made of it.

A local tensor with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` (FSDP2's protocol) sends the tensors
the first returns, such as float8 data and a scale, and computes with what the second makes of the gathered
ones. Such parameters form a group of their own. They keep their class, so they lie in no common buffer, and
they are cut into equal chunks of rows as ``Shard(0)`` does, because extensions pad and index by rows: see
:mod:`ragged_fsdp.fsdp.packed`. Gradients are reduced like those of any group.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ragged_fsdp.dtensor.geometry import contiguous_stride
from ragged_fsdp.fsdp.autograd import on_parameters
from ragged_fsdp.fsdp.packed import Gathered, PackedGroup
from ragged_fsdp.fsdp.param import ManagedParam
from ragged_fsdp.fsdp.row_plan import RowPlan

__all__ = ["ExtensionGroup", "RowPieces", "is_extended"]

_SIGNATURE = (
    "fsdp_pre_all_gather(self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], "
    "module: nn.Module, mp_policy: MixedPrecisionPolicy)"
)


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


class ExtensionGroup(PackedGroup):
    """A group whose parameters are gathered through their own hooks."""

    main: RowPieces  # type: ignore[assignment]

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
        inputs = [self._inputs(index, param) for index, param in enumerate(self.params)]
        slot = self._new_message([[t.nbytes for t in tensors] for tensors in inputs])
        ranks = self.mesh.shard_size
        for state, tensors in zip(self.gathered, inputs):
            state.shapes = [tensor.shape for tensor in tensors]
            if not state.outputs:
                state.outputs = [_output(tensor, ranks, self.device) for tensor in tensors]
            for offset, tensor in zip(state.offsets, tensors):
                as_bytes = tensor.contiguous().view(-1).view(torch.uint8)
                slot.narrow(0, offset, as_bytes.numel()).copy_(as_bytes)
        return slot

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
        inputs, self.gathered[index].metadata = pre(self.mesh.shard_mesh, *(more if expected == 5 else ()))
        padded = (self.plan.chunk_rows(index), *param.inner_shape[1:])
        return [_pad(tensor, local.shape, padded) for tensor in inputs]

    def _unpack(self, index: int, state: Gathered, parts: torch.Tensor) -> None:
        for offset, output in zip(state.offsets, state.outputs):
            rows = output.view(self.mesh.shard_size, -1).view(torch.uint8)
            rows.copy_(parts.narrow(1, offset, rows.shape[1]))
        self._make(self.params[index], state)

    def _make(self, param: ManagedParam, state: Gathered) -> None:
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
