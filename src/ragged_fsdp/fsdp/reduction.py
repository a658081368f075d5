"""The gradients of a group: collected into one buffer as they are produced, reduced in one collective.

``full`` holds the gradients of the whole group in the reduction dtype, from the first gradient of a
backward to the end of its reduction (or, without gradient sync, of a later one). ``main`` is this rank's
part after the reduction, in the parameters' dtype; the ``.grad`` of the sharded parameters are its views.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ragged_fsdp import collectives
from ragged_fsdp.dbuffer import DBuffer, FlatStorage
from ragged_fsdp.dbuffer.registry import BufferLink, attach
from ragged_fsdp.dtensor.geometry import contiguous_stride
from ragged_fsdp.fsdp.autograd import on_parameters
from ragged_fsdp.fsdp.comm_memory import allocator_of
from ragged_fsdp.fsdp.grad_layout import GradLayout, Segment, grad_layout
from ragged_fsdp.fsdp.row_plan import rank_major
from ragged_fsdp.fsdp.scaling import Scaling, scaling
from ragged_fsdp.fsdp.schedule import PendingReduction

if TYPE_CHECKING:
    from ragged_fsdp.fsdp.param import ManagedParam
    from ragged_fsdp.fsdp.param_group import ParamGroup

__all__ = ["GradReducer"]

_ALONE_NUMEL = 1 << 18


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy large tensors of the same dtype one by one: a foreach cuts them into pieces with a launch each.

    Casts stay with the foreach: its kernel is half again as fast as ``copy_``'s.
    """
    if not targets:
        return
    dtype = targets[0].dtype
    alone = [i for i, s in enumerate(sources) if s.dtype == dtype and s.numel() >= _ALONE_NUMEL]
    for index in reversed(alone):
        targets.pop(index).copy_(sources.pop(index))
    if targets:
        torch._foreach_copy_(targets, sources)


class GradReducer:
    """Collects and reduces the gradients of one group."""

    def __init__(self, group: ParamGroup) -> None:
        self.group = group
        self.companion = False
        """Whether its module has a much larger group: it neither waits for that one's reduction nor takes its
        place in the arena."""
        self.full: DBuffer | None = None
        """From the first gradient until a reduction takes it over."""
        self.written: set[int] = set()
        """Parameters whose slot of ``full`` holds a gradient."""
        self.partial: torch.Tensor | None = None
        """HSDP without all-reduce: the reduce-scattered shard, accumulated over backwards."""
        self.offload_event: Any = None
        self._layouts: dict[tuple[bool, ...], GradLayout] = {}
        self._layout: GradLayout | None = None
        self._places: list[tuple[torch.Size, tuple[int, ...], int] | None] = []
        """Shape, strides and start of each parameter's part of the reduced shard; None if it has none."""
        self._main_kind: DBuffer | None = None
        self._empty_grads: dict[int, DTensor] = {}
        """Of parameters that have no place: the same objects in every step, as there is nothing in them."""
        self._leased: FlatStorage | None = None
        """Where ``full`` lies, if not in storage of its own."""
        self._fulls: dict[FlatStorage | None, DBuffer] = {}
        """The buffer in each storage it has been in: its views are made once."""

    # -- collecting ------------------------------------------------------------------------------

    @on_parameters
    def store(self, index: int, grad: torch.Tensor) -> None:
        """Cast one gradient into its slot, or add it if the slot holds one already."""
        self.store_many([(index, grad)])

    def store_many(self, grads: Sequence[tuple[int, torch.Tensor]]) -> None:
        """The same for several gradients, with one call for all."""
        full = self._buffer(grads)
        layout, params, written = self._layout, self.group.params, self.written
        assert layout is not None
        fresh: dict[int, torch.Tensor] = {}
        again: dict[int, torch.Tensor] = {}
        for index, grad in grads:
            inner = grad if params[index].grad_as_is else self._inner(index, grad)
            if inner.dtype != full.dtype and self.group.reduce_dtype is None:
                raise AssertionError(
                    f"FSDP reduce-scatter expects uniform gradient dtype but got {full.dtype} and "
                    f"{inner.dtype} for {params[index].name}"
                )
            if not layout.same_as_weights:
                self._check_place(index)
            (again if index in written else fresh)[index] = inner
        written.update(fresh)
        _copy_all(*layout.pairs(full.tensors, fresh))
        targets, sources = layout.pairs(full.tensors, again)
        if targets:
            torch._foreach_add_(targets, sources)

    def _check_place(self, index: int) -> None:
        """Raise on the gradient of a parameter that was frozen when its group's gradients were laid out."""
        param = self.group.params[index]
        if not self._segments()[index] and param.inner_shape.numel():
            self._raise_changed(param.fqn or param.name)

    @staticmethod
    def _raise_changed(name: str) -> NoReturn:
        raise RuntimeError(
            f"{name}: requires_grad was changed while gradients were accumulated; change it after a "
            "reduction, or call reset_iter_state() to drop what was accumulated."
        )

    def _inner(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """The part of a gradient that data parallelism reduces, in the order in which the ranks cut it."""
        param = self.group.params[index]
        if param.inner_spec is not None:
            grad = self._inner_local(param, grad)
        return rank_major(grad, param.shard_dim, self.group.mesh.shard_size) if param.shard_dim else grad

    def _inner_local(self, param: ManagedParam, grad: torch.Tensor) -> torch.Tensor:
        """A DTensor gradient's local tensor in the parameter's placements."""
        if isinstance(grad, AsyncCollectiveTensor):
            grad = grad.wait()
        if not isinstance(grad, DTensor):
            raise AssertionError(f"{param.name}: expected a DTensor gradient, got {type(grad).__name__}.")
        assert param.inner_spec is not None
        spec = param.inner_spec
        wanted = self.group.mesh.gradient_placements(grad, spec.placements)
        if grad.placements != wanted:
            grad = grad.redistribute(placements=wanted)
        local = grad._local_tensor
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local

    def _buffer(self, grads: Sequence[tuple[int, torch.Tensor]]) -> DBuffer:
        """The gradient buffer, allocated at the first gradient."""
        if self.full is not None:
            return self.full
        return self._allocate(self.group.reduce_dtype or grads[0][1].dtype)

    def buffer_bytes(self) -> int:
        """Bytes this reducer needs beside the gradients, in each reduction."""
        return self.group.plan.layout.buffer_numel * self.group.gradient_dtype.itemsize

    @property
    def leases(self) -> bool:
        """Whether its buffer has a place in the arena.

        Without sync the gradients of every group stay, and memory of the user's communication is not ours.
        """
        settings = self.group.settings
        own = settings.comm_memory is not None or allocator_of(settings.custom_reduce_scatter) is not None
        return settings.reduce_grads and not own and not self.companion

    def _allocate(self, dtype: torch.dtype) -> DBuffer:
        context = self.group.context
        context.finish_of(self)  # the last reduction of this very buffer
        context.make_room(self.companion)
        layout = self._choose_layout().layout
        settings = self.group.settings
        allocate = allocator_of(settings.custom_reduce_scatter)
        if allocate is not None:
            given = allocate((layout.buffer_numel,), dtype=dtype, device=self.group.device)
            self._leased = None
            self.full = self._make_buffer(dtype, Partial(), storage=FlatStorage.over(given))
            return self.full
        nbytes = layout.buffer_numel * dtype.itemsize
        self._leased = context.lease(nbytes) if self.leases else None
        full = self._fulls.get(self._leased)
        if full is None or full.dtype != dtype or full.layout is not layout:
            full = self._make_buffer(dtype, Partial(), allocate=False, storage=self._leased)
            self._fulls[self._leased] = full
        if self._leased is None:
            with settings.allocating(self.group.device):
                full.materialize()
        self.full = full
        return full

    def _choose_layout(self) -> GradLayout:
        trainable = tuple([p.trains for p in self.group.params])
        if trainable not in self._layouts:
            self._layouts[trainable] = grad_layout(self.group.plan, trainable)
        if self._layout is not self._layouts[trainable]:
            if self.partial is not None:
                self._raise_changed(self.group.label)
            self.group.follow_trainable()
            self._layout = self._layouts[trainable]
            self._places = self._find_places(self._layout)
            self._main_kind = None
        return self._layouts[trainable]

    def _make_buffer(
        self,
        dtype: torch.dtype,
        placement: Any,
        *,
        device: torch.device | None = None,
        allocate: bool = True,
        storage: FlatStorage | None = None,
    ) -> DBuffer:
        assert self._layout is not None
        mesh = self.group.mesh.mesh
        return DBuffer(
            self._layout.layout,
            self._layout.shapes,
            mesh,
            (*[Replicate()] * (mesh.ndim - 1), placement),
            dtype=dtype,
            device=device or self.group.device,
            pin_memory=device is not None and self.group.pin_memory,
            allocate=allocate,
            storage=storage,
        )

    # -- reducing --------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Reduce what was collected into the ``.grad`` of the sharded parameters."""
        if self.group.settings.reduce_unused:
            self._touch_unused()
        if not self.written:
            return
        context, settings, mesh = self.group.context, self.group.settings, self.group.mesh
        self._make_ready()
        ranks = mesh.shard_size * mesh.replicate_size
        sum_dtype, main_dtype = self._sum_dtype(), self.group.trainable_dtype
        how = scaling(sum_dtype, ranks, settings.divide_factor, settings.sum_only)
        main = self._make_main(main_dtype)
        reduced = self._target(main, direct=sum_dtype == main_dtype)
        added_to: list[torch.Tensor] = []
        with context.on_stream("reduce"):
            self._scatter(reduced, how)
            if mesh.replicate_group is None and settings.all_reduce_hook is None:
                added_to = self._finish(main, reduced, how)
                done = self._record()
            elif self._all_reduce_later(reduced):
                done = self._record()
            else:  # beside the next reduce-scatter: all-reduces use another part of the network
                with context.on_stream("all_reduce", settings.all_reduce_hook_stream):
                    self._all_reduce(reduced, how)
                    added_to = self._finish(main, reduced, how)
                    done = self._record()
        release = self._releaser(main)
        self.written.clear()
        context.pending.append(PendingReduction(done, release, self, (reduced, added_to)))

    def _record(self) -> Any:
        """An event behind the reduction; None without streams."""
        context, mesh = self.group.context, self.group.mesh
        if mesh.shard_size * mesh.replicate_size == 1:
            return context.record()
        pg = mesh.shard_group if mesh.shard_size > 1 else mesh.replicate_group
        return context.record_launch("reduction of the gradients", self.group, pg)

    def _make_main(self, dtype: torch.dtype) -> DBuffer:
        """A new buffer for the reduced shard: the user may keep the gradients, so it is never reused."""
        if self._main_kind is None or self._main_kind.dtype != dtype:
            self._main_kind = self._make_buffer(dtype, Shard(0), allocate=False)
            self._empty_grads = {}
        return self._main_kind.empty_like()

    def _make_ready(self) -> None:
        """Last step before the collective, on the compute stream."""
        if len(self.written) < len(self.group.params):
            self._zero({i for i, s in enumerate(self._segments()) if s} - self.written)

    def _sum_dtype(self) -> torch.dtype:
        assert self.full is not None
        return self.full.dtype

    def _target(self, main: DBuffer, direct: bool) -> torch.Tensor:
        """Where the reduced shard goes: straight into ``main``, if dtypes agree and any memory will do."""
        assert self.full is not None
        settings = self.group.settings
        special = settings.comm_memory is not None or allocator_of(settings.custom_reduce_scatter) is not None
        return main.flat if direct and not special else self.full.slot

    def _scatter(self, reduced: torch.Tensor, how: Scaling) -> None:
        """Reduce over the shard group: this rank's part of the sum is ``reduced``."""
        group, full = self.group, self.full
        assert full is not None
        if how.before not in (None, 1.0):
            full.flat.div_(how.before)
        if group.mesh.shard_size > 1:
            pg = group.mesh.reduce_group or group.mesh.shard_group
            op, comm = collectives.reduce_op(how.average), group.settings.custom_reduce_scatter
            launch = collectives.reduce_scatter
            group.launch("reduce-scatter", pg, launch, reduced, full.flat, pg, op=op, comm=comm)
        elif reduced.data_ptr() != full.slot.data_ptr():
            reduced.copy_(full.slot)

    def _all_reduce_later(self, reduced: torch.Tensor) -> bool:
        """HSDP: add what earlier backwards left; keep the sum if this one is not to be all-reduced either."""
        if self.group.mesh.replicate_group is None:
            return False
        if self.partial is not None:
            reduced.add_(self.partial)
            self.partial = None
        if self.group.settings.all_reduce_grads:
            return False
        self.partial = reduced.clone()
        return True

    def _all_reduce(self, reduced: torch.Tensor, how: Scaling) -> None:
        """Reduce the shard over the replicas, then call the user's hook."""
        group, pg = self.group, self.group.mesh.replicate_group
        if pg is not None and group.mesh.replicate_size > 1:
            op = collectives.reduce_op(how.average)
            group.launch("all-reduce", pg, collectives.all_reduce_, reduced, pg, op=op)
        if group.settings.all_reduce_hook is not None:
            group.settings.all_reduce_hook(reduced)

    def _finish(self, main: DBuffer, reduced: torch.Tensor, how: Scaling) -> list[torch.Tensor]:
        """The sum becomes the gradients; those it was added to."""
        if how.after not in (None, 1.0):
            reduced.div_(how.after)
        if reduced is not main.flat:
            main.flat.copy_(reduced)
        return self._assign(main)

    def _assign(self, main: DBuffer) -> list[torch.Tensor]:
        """Give each sharded parameter its part of ``main``; add where it already has a gradient.

        Those that were added to are returned: a hook of the user may drop them while this stream uses them.
        """
        group = self.group
        written = sorted(self.written)
        params = [group.params[i] for i in written]
        if group.offload:
            main = self._offload(main, [p.sharded for p in params])
        flat, link, known = main.flat, BufferLink(main), BufferLink(weakref.ref(main))
        targets, sources = [], []
        for index, param in zip(written, params):
            place, existing = self._places[index], param.sharded.grad
            if place is None:  # most parameters, where there are more ranks than parameters
                if existing is None:
                    grad = self._empty_grads.get(index)
                    if grad is None:
                        grad = self._empty_grads[index] = param.empty_grad(flat)
                    param.sharded.grad = grad
                    attach(grad, known)
            elif existing is None:
                grad = param.sharded.grad = param.sharded_grad(flat.as_strided(*place))
                attach(grad, link)  # DBuffer.of(grad) finds it as long as a gradient lives
            else:
                targets.append(existing._local_tensor)
                sources.append(flat.as_strided(*place))
        if targets:
            torch._foreach_add_(targets, sources)
        for param in params:
            hooks = param.sharded._post_accumulate_grad_hooks
            for hook in hooks.values() if hooks else ():
                hook(param.sharded)
        return targets

    def _find_places(self, layout: GradLayout) -> list[tuple[torch.Size, tuple[int, ...], int] | None]:
        pieces = [layout.local_piece(i, self.group.mesh.shard_rank) for i in range(len(self.group.params))]
        return [
            piece and (param.local_shape, contiguous_stride(param.local_shape), piece[1].shard_start)
            for param, piece in zip(self.group.params, pieces)
        ]

    def _offload(self, main: DBuffer, sharded: Sequence[torch.Tensor]) -> DBuffer:
        """Copy the reduced shard to the host; without waiting if nobody on the host reads it in backward."""
        on_host = self._make_buffer(main.dtype, Shard(0), device=torch.device("cpu"))
        read_now = any(p.grad is not None or getattr(p, "_post_accumulate_grad_hooks", None) for p in sharded)
        non_blocking = self.group.pin_memory and not read_now and main.device.type != "cpu"
        on_host.flat.copy_(main.flat, non_blocking=non_blocking)
        if non_blocking:
            self.offload_event = self.group.context.record()
        return on_host

    def _touch_unused(self) -> None:
        """Take every trainable parameter of a gathered group as used, with a zero gradient."""
        unused = [
            i
            for i, p in enumerate(self.group.params)
            if p.unsharded is not None and p.sharded.requires_grad and i not in self.written
        ]
        if not unused:
            return
        if self.full is None:
            self._choose_layout()  # other parameters may train than before
            self._allocate(self.group.gradient_dtype)
        missing = set(unused)
        self._zero(missing)
        self.written |= missing

    def _segments(self) -> tuple[tuple[Segment, ...], ...]:
        assert self._layout is not None
        return self._layout.segments

    def _zero(self, indices: set[int]) -> None:
        assert self._layout is not None and self.full is not None
        slots = [self.full.tensors[s.index] for i in indices for s in self._layout.segments[i]]
        if slots:
            torch._foreach_zero_(slots)

    def _releaser(self, main: DBuffer) -> Any:
        """Hand what the reduction uses over to a function that frees it."""
        full, leased, context = self.full, self._leased, self.group.context
        self.full = self._leased = None
        assert full is not None

        def release() -> None:
            # ``main`` is kept until here: a gradient dropped during backward must not give its memory
            # to the compute stream while the reduction still writes it
            nonlocal main
            full.release() if leased is None else context.give_back(leased)
            del main

        return release

    # -- end of backward -------------------------------------------------------------------------

    def finish_offload(self) -> None:
        """Block the host until offloaded gradients have arrived."""
        if self.offload_event is not None:
            self.offload_event.synchronize()
            self.offload_event = None

    def discard(self) -> None:
        """Drop collected gradients and partial sums."""
        context = self.group.context
        context.finish_of(self)
        if self._leased is not None:
            context.give_back(self._leased)
        elif self.full is not None:
            self.full.release()
        self.full = self._leased = self.partial = None
        self.written.clear()
