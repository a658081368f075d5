"""Transports that are not in place: every parameter is cut by itself, so the chunks are copied together.

A gathered parameter is a view of a common buffer only if it is one run of it, and at most one parameter can
run across the border of two shards. Where each is cut into equal chunks, the chunks of a rank are copied
into a message, and from the gathered message into the parameters. There is still one collective for the
group::

    message   a0 b0|a1 b1|a2 b2      gathered: a part per rank
    weights   a0 a1 a2  b0 b1 b2     persistent tensors, whose storage comes and goes

:class:`Chunks` is for parameters with an explicit ``Shard(dim)``, which are cut as the user says, at the
price of these copies. :class:`Extensions` is for tensor subclasses with ``fsdp_pre_all_gather`` and
``fsdp_post_all_gather`` (FSDP2's protocol): they send the tensors the first returns, such as float8 data
and a scale, and compute with what the second makes of the gathered ones. They keep their class, so they lie
in no common buffer, and are cut by rows, because extensions pad and index by rows. :class:`Pieces` stands in
for the default where a cast made its buffer impossible.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor.geometry import contiguous_stride
from ragged_fsdp.fsdp.gather.transport import InPlace, Message, note_shards
from ragged_fsdp.fsdp.parts.members import ManagedParam, Members
from ragged_fsdp.fsdp.parts.plan import ChunkPlan, rank_major
from ragged_fsdp.layout import ALIGN_BYTES, align_up
from ragged_fsdp.torch_internals import (
    is_traceable_wrapper_subclass,
    local_of,
    unsafe_preserve_version_counter,
)

__all__ = ["Chunks", "Extensions", "Pieces", "is_extended"]

_SIGNATURE = (
    "fsdp_pre_all_gather(self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], "
    "module: nn.Module, mp_policy: MixedPrecisionPolicy)"
)


@dataclass
class Gathered:
    """What one parameter sends and what was made of it; tensors persist, their storage comes and goes."""

    shapes: list[torch.Size] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Where each input begins in a rank's part of the message, in bytes."""
    outputs: list[torch.Tensor] = field(default_factory=list)
    inner: list[torch.Tensor] = field(default_factory=list)
    metadata: Any = None
    _freed: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)
    """Storages without memory, and the bytes that they had."""

    def materialize(self) -> None:
        """Bring freed storages back, uninitialised."""
        for storage, nbytes in self._freed:
            storage.resize_(nbytes)
        self._freed = []

    def release(self) -> None:
        """Free the storages; what extensions made may lie in those of its inputs."""
        if not self._freed:
            storages = [tensor.untyped_storage() for tensor in (*self.outputs, *self.inner)]
            self._freed = [(storage, storage.nbytes()) for storage in storages]
        for storage, _ in self._freed:
            storage.resize_(0)  # not dropped: what autograd saved finds the values of the next gather in it


class _Packed:
    """Sends and receives through a message; subclasses say what goes in and what is made of it."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.gathered = [Gathered() for _ in members.params]
        self._message = Message(members)

    @property
    def plan(self) -> ChunkPlan:
        """How the parameters are cut."""
        assert isinstance(self.members.plan, ChunkPlan)
        return self.members.plan

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered parameters."""
        dtypes = self.members.gathered_dtypes
        return sum(p.inner_shape.numel() * d.itemsize for p, d in zip(self.members.params, dtypes))

    def _new_message(self, nbytes: Sequence[Sequence[int]]) -> torch.Tensor:
        """Allocate a message for inputs of so many bytes per parameter; this rank's row of it."""
        end = 0
        for state, sizes in zip(self.gathered, nbytes):
            state.offsets = []
            for size in sizes:
                state.offsets.append(end)
                end += align_up(size, ALIGN_BYTES)  # the bytes are viewed in dtypes, which must start aligned
        return self._message.allocate(end)

    def begin(self, async_op: bool) -> None:
        """Gather all inputs with one collective, on the stream of gathers."""
        self._message.send(async_op)

    def finish(self) -> None:
        """Make the parameters from the message."""
        parts = self._message.take()
        if parts is None:  # it raised before, and the group is released now
            return
        for index, state in enumerate(self.gathered):
            state.materialize()
            # else autograd would take the gather for a change of weights that it saved, and refuse to go back
            with unsafe_preserve_version_counter(tuple(state.outputs)):
                self._unpack(index, state, parts)

    def _unpack(self, index: int, state: Gathered, parts: torch.Tensor) -> None:
        """Make a parameter from the gathered message, one row of bytes per rank."""
        raise NotImplementedError

    def release(self) -> None:
        """Free the parameters' storages."""
        for state in self.gathered:
            state.release()


class Pieces(_Packed):
    """Gathers the pieces of a planned group one by one: where a cast changed some item sizes and not others.

    ``module.to(dtype)`` after ``fully_shard`` keeps every cut where it is: sharded parameters, optimizer
    states and checkpoints do not move. But where int8 codes stay while bf16 norms become fp32, the pieces of
    a rank no longer fill its shard as planned, and the gathered parameters are no runs of one buffer.
    """

    def prepare(self) -> None:
        """Make the gathered tensors, without memory; again if the dtypes changed."""
        members = self.members
        for index, (param, dtype) in enumerate(zip(members.params, members.gathered_dtypes)):
            state = self.gathered[index]
            if state.outputs and state.outputs[0].dtype == dtype:
                continue
            whole = torch.empty(self._whole_numel(index), dtype=dtype, device=members.device)
            self.gathered[index] = state = Gathered(outputs=[whole])
            state.release()
            param.unsharded = None

    def _whole_numel(self, index: int) -> int:
        return self.members.params[index].inner_shape.numel()

    def _room(self, index: int) -> int:
        """Elements of a parameter that a rank's part of the message has room for."""
        plan, ranks = self.members.plan, range(self.members.mesh.shard_size)
        return max(plan.local_range(index, rank).numel for rank in ranks)

    def allocate(self) -> None:
        """Cast the pieces into this rank's row of a new message."""
        members, outputs = self.members, [state.outputs[0] for state in self.gathered]
        row = self._new_message([[self._room(i) * out.dtype.itemsize] for i, out in enumerate(outputs)])
        targets, sources = [], []
        for index, (param, out) in enumerate(zip(members.params, outputs)):
            local = local_of(param.sharded)
            if not local.numel():
                continue
            at = row.narrow(0, self.gathered[index].offsets[0], local.numel() * out.dtype.itemsize)
            targets.append(at.view(out.dtype).view(local.shape))
            sources.append(local.to(members.device, non_blocking=members.pin_memory))
        if targets:
            torch._foreach_copy_(targets, sources)

    def _unpack(self, index: int, state: Gathered, parts: torch.Tensor) -> None:
        whole, param = state.outputs[0], self.members.params[index]
        for rank, part in enumerate(parts):
            at = self.members.plan.local_range(index, rank)
            if at.numel:
                piece = part.narrow(0, state.offsets[0], at.numel * whole.dtype.itemsize).view(whole.dtype)
                whole.narrow(0, at.tensor_start, at.numel).copy_(piece)
        if param.unsharded is None:
            param.make_unsharded(whole.view(param.inner_shape))

    adopt_shards = InPlace.adopt_shards


class Chunks(Pieces):
    """Gathers chunks along any dim into whole parameters, each with one copy."""

    def _whole_numel(self, index: int) -> int:
        return self.members.mesh.shard_size * self._room(index)  # the last chunks are filled up

    def _room(self, index: int) -> int:
        return self.plan.chunk_rows(index) * self.plan.row_numel(index)

    def _unpack(self, index: int, state: Gathered, parts: torch.Tensor) -> None:
        whole, param, dim = state.outputs[0], self.members.params[index], self.plan.dims[index]
        ranks, chunk = self.members.mesh.shard_size, self._room(index)
        if whole.numel():
            nbytes = chunk * whole.dtype.itemsize
            chunks = parts.narrow(1, state.offsets[0], nbytes).view(whole.dtype)
            target = whole.view(ranks, chunk)
            if dim:  # divides evenly
                target = rank_major(whole.view(param.inner_shape), dim, ranks)
            target.copy_(chunks.view(target.shape))
        if param.unsharded is None:
            param.make_unsharded(whole.narrow(0, 0, param.inner_shape.numel()).view(param.inner_shape))


class Extensions(_Packed):
    """Gathers parameters through their own hooks."""

    def prepare(self) -> None:
        """Raise on a class without the hooks; what is gathered is known when they have run."""
        for param in self.members.params:
            local = local_of(param.sharded)
            has = [hasattr(local, f"fsdp_{when}_all_gather") for when in ("pre", "post")]
            if any(has) and not all(has):
                raise AssertionError(
                    "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined "
                    f"if using all-gather extensions: {param.fqn}"
                )
            if not any(has):
                raise NotImplementedError(
                    f"{param.fqn}: a {type(local).__name__} has no fsdp_pre_all_gather and "
                    "fsdp_post_all_gather, so how to gather it is unknown."
                )

    def adopt_shards(self) -> None:
        """Follow shards that were replaced, cast or moved; each is its own storage."""
        note_shards(self.members)

    def allocate(self) -> None:
        """Pack the extensions' inputs into this rank's row of a new message."""
        inputs = [self._inputs(index, param) for index, param in enumerate(self.members.params)]
        row = self._new_message([[t.nbytes for t in tensors] for tensors in inputs])
        ranks, device = self.members.mesh.shard_size, self.members.device
        for state, tensors in zip(self.gathered, inputs):
            state.shapes = [tensor.shape for tensor in tensors]
            if not state.outputs:
                state.outputs = [
                    torch.empty(tensor.numel() * ranks, dtype=tensor.dtype, device=device)
                    for tensor in tensors
                ]
            for offset, tensor in zip(state.offsets, tensors):
                as_bytes = tensor.contiguous().view(-1).view(torch.uint8)
                row.narrow(0, offset, as_bytes.numel()).copy_(as_bytes)

    def _inputs(self, index: int, param: ManagedParam) -> list[torch.Tensor]:
        members, local = self.members, local_of(param.sharded)
        if members.offload:
            local = local.to(members.device, non_blocking=members.pin_memory)
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
            members.mp_policy,
        )
        inputs, self.gathered[index].metadata = pre(members.mesh.shard_mesh, *(more if expected == 5 else ()))
        padded = (self.plan.chunk_rows(index), *param.inner_shape[1:])
        return [_pad(tensor, local.shape, padded) for tensor in inputs]

    def _unpack(self, index: int, state: Gathered, parts: torch.Tensor) -> None:
        for offset, output in zip(state.offsets, state.outputs):
            rows = output.view(self.members.mesh.shard_size, -1).view(torch.uint8)
            rows.copy_(parts.narrow(1, offset, rows.shape[1]))
        param = self.members.params[index]
        local: Any = local_of(param.sharded)
        outputs = tuple(
            output.view(-1, *shape[1:]) if len(shape) else output
            for output, shape in zip(state.outputs, state.shapes)
        )
        dtype = self.members.mp_policy.param_dtype or param.dtype
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


def is_extended(param: torch.Tensor) -> bool:
    """Whether a parameter is gathered by :class:`Extensions`: its inner tensor is a wrapper subclass."""
    inner = local_of(param) if isinstance(param, DTensor) else param.data
    return is_traceable_wrapper_subclass(inner) and not isinstance(inner, DTensor)
