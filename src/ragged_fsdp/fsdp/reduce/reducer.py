"""GradReducer: the gradients of a group, from autograd to the ``.grad`` of the sharded parameters.

A transport collects them and adds them over the shard group; the rest is here: which gradients there are, the
all-reduce over replicas and the user's hook, the division, the cast to the parameters' dtype, the assignment.
``main`` is this rank's part after the reduction; the ``.grad`` of the sharded parameters are its views.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ragged_fsdp.dbuffer import DBuffer
from ragged_fsdp.dtensor.geometry import contiguous_stride, is_ragged
from ragged_fsdp.dtensor.saving import claim
from ragged_fsdp.fsdp.parts.members import Members
from ragged_fsdp.fsdp.parts.plan import rank_major
from ragged_fsdp.fsdp.reduce.layout import GradLayout, Scaling, grad_layout, scaling
from ragged_fsdp.fsdp.reduce.transport import GradTransport
from ragged_fsdp.fsdp.streams import PendingReduction
from ragged_fsdp.torch_internals import AsyncCollectiveTensor, local_of, post_accumulate_grad_hooks_of

__all__ = ["GradReducer"]

_NONE: set[int] = set()


class GradReducer:
    """Collects and reduces the gradients of one group."""

    def __init__(self, members: Members, transport: GradTransport) -> None:
        self.members = members
        self.transport = transport
        self.written: set[int] = set()
        """Parameters of which the transport holds a gradient."""
        self._partial: tuple[torch.Tensor, frozenset[int]] | None = None
        """HSDP without all-reduce: the reduce-scattered shard, accumulated over backwards, and the parameters
        that have a gradient in it."""
        self._launching: tuple[DBuffer, DBuffer] | None = None
        """What the reduction that is being launched writes; if a hook raises, it is held until
        :meth:`discard`, before which the streams are waited for."""
        self._offload_event: Any = None
        self._layouts: dict[tuple[bool, ...], GradLayout] = {}
        self._layout: GradLayout = None  # type: ignore[assignment]  # from the first gradient on
        self._places: list[tuple[torch.Size, tuple[int, ...], int] | None] = []
        """Shape, strides and start of each parameter's part of the reduced shard; None if it has none."""
        self._main_kind: DBuffer | None = None
        self._empty_grads: dict[int, DTensor] = {}
        """Gradients of parameters that have no place: empty, so they are the same objects in every step."""
        self._claims = not all(is_ragged(param.spec) for param in members.params)
        ndim = members.mesh.mesh.ndim
        self._final = (*[Replicate()] * (ndim - 1), Shard(0))

    # -- collecting ------------------------------------------------------------------------------

    @property
    def grad_bytes(self) -> int:
        """Bytes of the group's gradients as they are added, on all ranks the same; 0 if nothing trains."""
        if not any(param.sharded.requires_grad for param in self.members.params):
            return 0
        return self._choose_layout().layout.buffer_numel * self.members.gradient_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that a reduction of the group needs on this rank; 0 if nothing in it is trainable."""
        return self.transport.nbytes(self._choose_layout()) if self.grad_bytes else 0

    def store(self, grads: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Take over gradients, by parameter, with one call for all; by a caller that is ``on_parameters``."""
        params, written = self.members.params, self.written
        if not written:
            self._begin(grads[0][1].dtype)
        layout = self._layout
        fresh: dict[int, torch.Tensor] = {}
        again: dict[int, torch.Tensor] = {}
        for index, grad in grads:
            inner = grad if params[index].grad_as_is else self._inner(index, grad)
            if not layout.runs[index]:  # asked here: few have none
                self._check_place(index)
            (again if index in written else fresh)[index] = inner
        self.transport.store(fresh, again)
        written.update(fresh)

    def _begin(self, dtype: torch.dtype) -> None:
        """Before the first gradient: wait for the last reduction of this group, and for room."""
        context = self.members.context
        context.finish_of(self)
        if self.transport.buffers:
            context.make_room(self.transport.companion)
        self.transport.begin(self._choose_layout(), self.members.reduce_dtype or dtype)

    def _check_place(self, index: int) -> None:
        """Raise on a parameter that was frozen when the gradients were laid out: it has no place there."""
        param = self.members.params[index]
        if not self._layout.runs[index] and param.inner_shape.numel():
            self._raise_changed(param.fqn)

    @staticmethod
    def _raise_changed(name: str) -> NoReturn:
        raise RuntimeError(
            f"{name}: requires_grad was changed while gradients were accumulated; change it after a "
            "reduction, or call reset_iter_state() to drop what was accumulated."
        )

    def _inner(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """The part of a gradient that data parallelism reduces, in the order in which the ranks cut it."""
        param, mesh = self.members.params[index], self.members.mesh
        if param.inner_spec is not None:  # the local tensor, in the parameter's placements
            grad = grad.wait() if isinstance(grad, AsyncCollectiveTensor) else grad
            if not isinstance(grad, DTensor):
                raise AssertionError(f"{param.name}: expected a DTensor gradient, got {type(grad).__name__}.")
            wanted = mesh.gradient_placements(grad, param.inner_spec.placements)
            grad = local_of(grad if grad.placements == wanted else grad.redistribute(placements=wanted))
            grad = grad.wait() if isinstance(grad, AsyncCollectiveTensor) else grad
        return rank_major(grad, param.shard_dim, mesh.shard_size) if param.shard_dim else grad

    def _choose_layout(self) -> GradLayout:
        trainable = tuple([p.trains for p in self.members.params])
        if trainable not in self._layouts:
            self._layouts[trainable] = grad_layout(self.members.plan, trainable)
        layout = self._layouts[trainable]
        if self.members.followed != trainable:  # also where the layout is that of the last reduction again
            self.members.follow_trainable()
        if self._layout is not layout:
            if self._partial is not None:
                self._raise_changed(self.members.label)
            self._layout, self._main_kind = layout, None
            params, rank = self.members.params, self.members.mesh.shard_rank
            pieces = [layout.local_piece(index, rank) for index in range(len(params))]
            self._places = [
                piece and (param.local_shape, contiguous_stride(param.local_shape), piece[1].shard_start)
                for param, piece in zip(params, pieces)
            ]
        return layout

    # -- reducing --------------------------------------------------------------------------------

    def reduce(self, *, zeros: Sequence[Any] = ()) -> None:
        """Reduce what was collected into the ``.grad`` of the sharded parameters.

        Those of which ``zeros`` says so, by index, or all where the user set it, take part without one.
        """
        asked = bool(zeros) or self.members.settings.reduce_unused or self._partial is not None
        without = self._without_gradient(zeros) if asked else None
        if not self.written and not without:
            return
        members, transport = self.members, self.transport
        context, settings, mesh = members.context, members.settings, members.mesh
        if not transport.buffers:
            context.make_room(transport.companion)
        transport.ready(self._missing() if len(self.written) < len(members.params) else _NONE)
        if without:
            self.written |= without
        if context.order_check is not None and self._process_group is not None:
            # a rank without a gradient of its own would drop its part of the others'
            named = ", ".join(members.params[index].name for index in sorted(self.written))
            context.order_check.note(f"reduction of {named}", members.label, self._process_group)
        ranks = mesh.shard_size * mesh.replicate_size
        how = scaling(transport.sum_dtype, ranks, settings.divide_factor, settings.sum_only)
        main = self._make_main(members.trainable_dtype)
        reduced = transport.target(main)
        self._launching = main, reduced
        added_to: list[torch.Tensor] = []
        with context.on_stream("reduce"):
            pg = self._process_group
            begun = None if pg is None else context.watch.begin("reduction of the gradients", members, pg)
            transport.scatter(reduced, how)
            if mesh.replicate_group is None and settings.all_reduce_hook is None:
                added_to = self._finish(main, reduced, how)
                done = context.record(begun)
            elif self._all_reduce_later(reduced):
                done = context.record(begun)
            else:  # beside the next reduce-scatter: all-reduces use another part of the network
                with context.on_stream("all_reduce", settings.all_reduce_hook_stream):
                    self._all_reduce(reduced, how)
                    added_to = self._finish(main, reduced, how)
                    done = context.record(begun)
        # ``main`` and what was added to are held until the compute stream has waited: a gradient dropped
        # during backward must not give its memory to that stream while the reduction still writes it
        held, stream = (main, reduced, added_to), context.current_stream() if context.streams else None
        entry = PendingReduction(done, transport.hand_over(), self, transport.companion, held, stream)
        self.written.clear()
        self._launching = None
        context.pending.append(entry)

    @cached_property
    def _process_group(self) -> Any:
        """That under which the reduction is watched: of its ranks, the first; None for one rank."""
        mesh = self.members.mesh
        if mesh.shard_size * mesh.replicate_size == 1:
            return None
        return mesh.shard_group if mesh.shard_size > 1 else mesh.replicate_group

    def _make_main(self, dtype: torch.dtype) -> DBuffer:
        """A new buffer for the reduced shard: the user may keep the gradients, so it is never reused."""
        if self._main_kind is None or self._main_kind.dtype != dtype:
            make = self.transport.make_buffer
            self._main_kind = make(self._layout, dtype, is_reduced=True, allocate=False)
            self._empty_grads = {}
        main = self._main_kind.empty_like()
        if self._claims:  # else a copy of a gradient that is not ragged would take the whole shard along
            claim(main.flat.untyped_storage())
        return main

    def _missing(self) -> set[int]:
        """Parameters that have a place among the gradients and no gradient."""
        return {index for index, runs in enumerate(self._layout.runs) if runs} - self.written

    def _without_gradient(self, zeros: Sequence[Any]) -> set[int]:
        """Parameters that got no gradient and take part with zeros.

        Those of which earlier backwards left a sum that is now all-reduced; of the trainable ones of a
        gathered group those of which ``zeros`` says so, or all where the user set it.
        """
        settings, found = self.members.settings, set[int]()
        if self._partial is not None and settings.all_reduce_grads:
            found |= self._partial[1]
        for index, param in enumerate(self.members.params):
            asked = settings.reduce_unused or (zeros and zeros[index])
            if asked and param.unsharded is not None and param.sharded.requires_grad:
                found.add(index)
        if found and not self.written:
            self._choose_layout()  # other parameters may train than before, with gradients of another dtype
            self._begin(self.members.gradient_dtype)
        found -= self.written
        for index in found:
            self._check_place(index)
        return found

    def _all_reduce_later(self, reduced: DBuffer) -> bool:
        """HSDP: add what earlier backwards left; keep the sum if this one is not to be all-reduced either."""
        if self.members.mesh.replicate_group is None:
            return False
        if self._partial is not None:
            left, had_gradients = self._partial
            reduced.flat.add_(left)
            self.written |= had_gradients
            self._partial = None
        if self.members.settings.all_reduce_grads:
            return False
        self._partial = reduced.flat.clone(), frozenset(self.written)
        return True

    def _all_reduce(self, reduced: DBuffer, how: Scaling) -> None:
        """Reduce the shard over the replicas, in place, then call the user's hook."""
        members, group = self.members, self.members.mesh.replicate_group
        if group is not None and group.size() > 1:
            members.launch("all-reduce", group, reduced.redistribute, self._final, average=how.average)
        if members.settings.all_reduce_hook is not None:
            members.settings.all_reduce_hook(reduced.flat)

    def _finish(self, main: DBuffer, reduced: DBuffer, how: Scaling) -> list[torch.Tensor]:
        """The sum becomes the gradients; those it was added to."""
        if how.after not in (None, 1.0):
            reduced.flat.div_(how.after)
        if reduced is not main:
            main.flat.copy_(reduced.flat)
        return self._assign(main.flat)

    def _assign(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Give each sharded parameter its part of the reduced shard; add where it already has a gradient.

        Those that were added to are returned: a hook of the user may drop them while this stream uses them.
        """
        members = self.members
        written = sorted(self.written)
        params = [members.params[i] for i in written]
        if members.offload:
            flat = self._offload(flat, [p.sharded for p in params])
        targets, sources = [], []
        for index, param in zip(written, params):
            place, existing = self._places[index], param.sharded.grad
            if place is None:  # most parameters, where there are more ranks than parameters
                if existing is None:
                    grad = self._empty_grads.get(index)
                    if grad is None:
                        grad = self._empty_grads[index] = param.sharded_grad(
                            flat.new_empty(param.local_shape)
                        )
                    param.sharded.grad = grad
            elif existing is None:
                param.sharded.grad = param.sharded_grad(flat.as_strided(*place))
            else:
                targets.append(local_of(existing))
                sources.append(flat.as_strided(*place))
        if targets:
            torch._foreach_add_(targets, sources)
        for param in params:
            hooks = post_accumulate_grad_hooks_of(param.sharded)
            for hook in hooks.values() if hooks else ():
                hook(param.sharded)
        return targets

    def _offload(self, flat: torch.Tensor, sharded: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy the reduced shard to the host; without waiting if nobody on the host reads it in backward."""
        members = self.members
        on_host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=members.pin_memory)
        if self._claims:  # these are the gradients now: without it one that is not ragged cannot be copied
            claim(on_host.untyped_storage())
        read_now = any(p.grad is not None or post_accumulate_grad_hooks_of(p) for p in sharded)
        non_blocking = members.pin_memory and not read_now and flat.device.type != "cpu"
        on_host.copy_(flat, non_blocking=non_blocking)
        if non_blocking:
            self._offload_event = members.context.record()
        return on_host

    # -- end of backward -------------------------------------------------------------------------

    def finish_offload(self) -> None:
        """Block the host until offloaded gradients have arrived."""
        if self._offload_event is not None:
            self._offload_event.synchronize()
            self._offload_event = None

    def discard(self) -> None:
        """Drop collected gradients and partial sums."""
        self.members.context.finish_of(self)
        self.transport.discard()
        self._partial = self._launching = None
        self.written.clear()
