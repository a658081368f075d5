"""ParamGroup: parameters that are gathered and reduced together, and where they are now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum, auto
from functools import partial
from typing import Any

import torch
from torch import nn

from ragged_fsdp.collectives import Comm, explain_failure
from ragged_fsdp.fsdp.autograd import on_parameters
from ragged_fsdp.fsdp.gather.packed import Pieces
from ragged_fsdp.fsdp.gather.transport import InPlace, Parking, Transport
from ragged_fsdp.fsdp.parts.members import ManagedParam, Members
from ragged_fsdp.fsdp.reduce.reducer import GradReducer
from ragged_fsdp.fsdp.reduce.transport import GradTransport
from ragged_fsdp.torch_internals import current_graph_task_id, joins_gathers, one_launch, version_of

__all__ = ["ALLOWED_MOVES", "ParamGroup", "Residence"]

_EAGER_GRAD_BYTES = 1 << 20  # gradients from this size on move into the buffer one by one, as they come


class Residence(IntEnum):
    """Where the parameters of a group are."""

    SHARDED = auto()
    """Sharded parameters are registered; nothing is gathered."""
    GATHERING = auto()
    """Sharded parameters are registered; a gather is under way."""
    UNSHARDED = auto()
    """Gathered parameters are registered, and visible to the stream that waited for them."""
    KEPT = auto()
    """Sharded parameters are registered; what the forward gathered stays in memory for the backward."""
    PARKED = auto()
    """Parameters sharded over a smaller mesh are registered, and a slice of the gathered buffer is kept."""


ALLOWED_MOVES = {
    (Residence.SHARDED, Residence.GATHERING): "unshard, prefetch",
    (Residence.PARKED, Residence.GATHERING): "unshard, prefetch",
    (Residence.GATHERING, Residence.UNSHARDED): "wait_for_unshard",
    (Residence.KEPT, Residence.UNSHARDED): "wait_for_unshard",
    (Residence.UNSHARDED, Residence.SHARDED): "reshard",
    (Residence.UNSHARDED, Residence.PARKED): "after forward, with reshard_after_forward an int",
    (Residence.UNSHARDED, Residence.KEPT): "after forward, for groups that backward needs first",
    (Residence.GATHERING, Residence.SHARDED): "a prefetch that nobody used",
    (Residence.KEPT, Residence.SHARDED): "a backward that did not come",
    (Residence.PARKED, Residence.SHARDED): "a manual reshard, a failed iteration",
}
"""From where to where, and when; anything else raises."""


class ParamGroup(Members):
    """Parameters with one plan, one transport of weights and one reducer of gradients."""

    def __init__(
        self,
        *parts: Any,
        gather: Callable[[Members], Transport],
        reduce: Callable[[Members], GradTransport],
    ) -> None:
        super().__init__(*parts)
        self._planned = gather(self)
        self.transport: Transport = self._planned
        self.parking: Parking | None = None
        """What is kept between forward and backward, with ``reshard_after_forward`` an int."""
        self._gathers: Transport = self._planned
        """What has the gather under way: its transport, or what is parked."""
        self.reducer = GradReducer(self, reduce(self))
        self._tables = [(table, name, p) for p in self.params for table, name in p.tables or ()]
        self._unusual = [p for p in self.params if p.tables is None]
        self.residence = Residence.SHARDED
        self._gather_done: Any = None
        """An event behind the gather under way."""
        self._counted: list[nn.Parameter] = []
        """The sharded parameters whose writes torch counts."""
        self._gathered_versions: list[int] = []
        """Counters of these writes at the last gather."""
        self.stale = True
        """Whether users may have replaced or cast parameters: before the first use, or by a state dict."""
        self.backward_id = -1
        """The number autograd gave the backward in which that of its modules began last."""
        self.beside: list[ParamGroup] = []
        """Groups of its call that are gathered with it in one launch, itself included, in the order of all
        ranks."""
        self._follow_state_dicts()

    # -- initialisation --------------------------------------------------------------------------

    @on_parameters
    def lazy_init(self) -> None:
        """Prepare the gathers of the parameters that are registered now."""
        if self.stale and self.residence is Residence.SHARDED:
            self.reset_sharded_params()
            for param in self.params:
                param.trains = param.sharded.requires_grad
            self.stale = False
        self._check_materialized()
        self.follow_trainable()
        self._choose_transport()
        self.transport.prepare()

    def _check_materialized(self) -> None:
        """Raise unless the sharded parameters have memory, and have it on the host if they are offloaded."""
        places = [(param.fqn, param.sharded.device) for param in self.params]
        on_meta = [name for name, device in places if device.type == "meta"]
        if on_meta:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, "
                f"but the following were still on meta device: {on_meta}\n"
                "For example, call module.to_empty(device) to materialize to device and "
                "call module.reset_parameters() on each module to initialize values."
            )
        elsewhere = [place for place in places if place[1].type != "cpu"]
        if self.offload and elsewhere:
            raise RuntimeError(
                "FSDP parameters should be materialized on CPU when enabling CPU offloading. "
                'For example, load a CPU state dict or call module.to_empty(device="cpu"). '
                f"Found following parameters on non-CPU device: {elsewhere}\n"
            )

    def _choose_transport(self) -> None:
        """Use the transport that was planned, unless a cast has changed some item sizes and not others."""
        planned, fits = self._planned, True
        if type(planned) is InPlace:
            fits = planned.fits_plan()
            if not fits and self.parking is not None:
                raise RuntimeError(
                    f"{self.label}: after fully_shard its parameters were cast to "
                    f"{[str(dtype) for dtype in self.gathered_dtypes]}, items of different sizes; "
                    "reshard_after_forward=int does not support that. Cast them before."
                )
        if fits is not (self.transport is planned):
            self.transport = planned if fits else Pieces(self)
            planned.weight = None  # type: ignore[attr-defined]  # unsharded parameters are made anew
            for param in self.params:
                param.unsharded = None

    def _follow_state_dicts(self) -> None:
        """State dicts are saved from and loaded into the sharded parameters."""

        def shard(*_: Any, **__: Any) -> None:
            self.to_sharded()

        def loaded(*_: Any) -> None:
            self.stale = True

        self._state_dict_hooks: list[Any] = []
        for module in {place.module for param in self.params for place in param.places}:
            self._state_dict_hooks += [
                module.register_state_dict_pre_hook(shard),
                module.register_load_state_dict_pre_hook(shard),
                module.register_load_state_dict_post_hook(loaded),
            ]

    def retire(self) -> None:
        """Another group takes over the parameters: nothing of the module may hold this one's memory."""
        for hook in self._state_dict_hooks:
            hook.remove()

    @on_parameters
    def reset_sharded_params(self) -> None:
        """Take over parameters that were replaced, cast or moved."""
        for param in self.params:
            param.adopt_registered()
        self._counted = [param.sharded for param in self.params if not param.sharded.is_inference()]
        self.transport.adopt_shards()

    # -- gather and reshard ----------------------------------------------------------------------

    def _move(self, to: Residence) -> None:
        if (self.residence, to) not in ALLOWED_MOVES:
            raise RuntimeError(
                f"{self.label}: no transition from {self.residence.name} to {to.name}; this is a bug."
            )
        self.residence = to

    def unshard(self, async_op: bool | None = None) -> None:
        """Issue the gather, unless it is under way or done; ``None`` takes the setting of the group."""
        if self.residence is Residence.SHARDED or self.residence is Residence.PARKED:
            try:
                self._issue_gather(self.settings.unshard_async_op if async_op is None else async_op)
            except BaseException:
                self._forget_launch()
                raise

    def _forget_launch(self) -> None:
        """A launch, or a user's hook beside it, raised: the watch would report it as not finished."""
        if self.context is not None:
            self.context.watch.inside = None

    @on_parameters
    def _issue_gather(self, async_op: bool) -> None:
        if self.beside and not async_op and self._issue_together():
            return
        context, mesh = self.context, self.mesh
        if context is None:  # another root's, that a module of this one is told to gather ahead
            raise RuntimeError(
                f"{self.label}: it cannot be gathered before its root has run a forward; run one, or call "
                "its unshard(), before a module of another root prefetches it."
            )
        if self.stale:
            self.lazy_init()
        self._gathered_versions = [*map(version_of, self._counted)]
        parked = self.parking if self.residence is Residence.PARKED else None
        if parked is not None:
            self.settle()
        self._gathers = gathers = parked or self.transport
        gathers.allocate()  # here, on the compute stream, which will also free it
        with context.on_stream("gather"):
            begun = context.watch.begin("all-gather", self, mesh.shard_group) if mesh.shard_size > 1 else None
            gathers.begin(async_op)
            self._gather_done = context.record(begun)
        self._move(Residence.GATHERING)

    def gather_beside(self, others: Sequence[ParamGroup]) -> None:
        """Be gathered in one launch with those of ``others`` with which that can be, itself among them."""
        pg = self.mesh.shard_group
        if pg.size() == 1 or not joins_gathers(pg, self.device):
            return
        beside = [g for g in others if g.mesh.shard_group is pg and type(g.transport) is InPlace]
        if self in beside and len(beside) > 1 and type(self.planned_comm) is Comm:
            self.beside = beside

    def _issue_together(self) -> bool:
        """Gather all of ``beside`` that are sharded with one launch; False if torch's functions do not."""
        context, pg = self.context, self.mesh.shard_group
        for group in self.beside:
            if group.stale and group.residence is Residence.SHARDED:
                group.lazy_init()  # before its transport is asked for: a cast may have changed it
        groups = [
            group
            for group in self.beside
            if group.residence is Residence.SHARDED
            and type(group.settings.gather_comm) is Comm
            and type(group.transport) is InPlace
        ]
        # a comparison of ranks between the two calls would become a part of the launch
        if self not in groups or len(groups) == 1 or context.order_check is not None:
            return False
        for group in groups:
            group._gathers = group.transport
            group.transport.allocate()
        with context.on_stream("gather"):
            begun = context.watch.begin("all-gather", self, pg)
            with explain_failure("all-gather", self.label, pg), one_launch(pg):
                for group in groups:
                    group.transport.begin(False)
            done = context.record(begun)
        for group in groups:
            group._gather_done = done
            group._gathered_versions = [*map(version_of, group._counted)]
            group._move(Residence.GATHERING)
        return True

    def wait_for_unshard(self) -> None:
        """Let the current stream see the gathered parameters and register them."""
        residence = self.residence
        if residence is Residence.GATHERING or residence is Residence.KEPT:
            self._finish_gather()
        elif self.context.owners is not None and residence is Residence.UNSHARDED:
            self.context.owners.check(self, "used")

    def hand_over(self) -> None:
        """In debug mode: gathered weights may be used and released on the current stream from here on."""
        if self.context.owners is not None:
            self.context.owners.hand_over(self)

    @on_parameters
    def _finish_gather(self) -> None:
        if self.residence is Residence.GATHERING:
            self._wait_gather()
        self._follow_requires_grad()
        self._register(unsharded=True)
        self._move(Residence.UNSHARDED)
        if self.context.owners is not None:
            self.context.owners.hand_over(self)

    def _wait_gather(self) -> None:
        self.context.wait(self._gather_done)  # before finish, which may write what the gather writes
        self._gather_done = None
        self._gathers.finish()

    def _follow_requires_grad(self) -> None:
        """Parameters train in both forms or in none; gradients that need not wait get hooks."""
        eager = self.context.max_grad_buffers > 1 or self.reducer.written
        for param in self.params:
            unsharded, trains = param.unsharded, param.sharded.requires_grad
            assert unsharded is not None
            param.trains = trains
            if unsharded.requires_grad != trains:
                unsharded.requires_grad_(trains)
            if eager and trains and param.grad_hook is None:
                param.grad_hook = self._hook_gradient(param, unsharded)

    def _hook_gradient(self, param: ManagedParam, unsharded: nn.Parameter) -> Any:
        """The hook that takes a large gradient as soon as it is accumulated; False for a small one."""
        if param.inner_shape.numel() * unsharded.dtype.itemsize < _EAGER_GRAD_BYTES:
            return False
        take = partial(self._take_gradient, self.params.index(param))
        return unsharded.register_post_accumulate_grad_hook(take)

    @on_parameters
    def _take_gradient(self, index: int, unsharded: torch.Tensor) -> None:
        """Move a large gradient into the buffer at once, if there is or may be a buffer now.

        With one gradient buffer the reduction before this group's may still use it: the gradients wait
        for the post-backward rather than stop the computation. So do those of a backward that code inside the
        layer's backward runs, which may read, replace or drop them: MLPs that are computed in tiles do.
        """
        grad = unsharded.grad
        if grad is None or current_graph_task_id() != self.backward_id:
            return
        if self.context.max_grad_buffers > 1 or self.reducer.written:
            unsharded.grad = None
            self.reducer.store([(index, grad)])

    @property
    def is_old(self) -> bool:
        """Whether the parameters were written since they were gathered, by an optimizer or by hand."""
        return self._gathered_versions != [*map(version_of, self._counted)]

    def settle(self) -> None:
        """Take for all forms what ``requires_grad_`` changed on the one that was registered, or held."""
        for param in self.params:
            forms = [form for form in (param.sharded, param.unsharded, param.parked) if form is not None]
            if len({form.requires_grad for form in forms}) == 1:
                param.trains = param.sharded.requires_grad
                continue
            param.trains = not param.trains  # one of them was changed, the others are as they were
            for form in forms:
                form.requires_grad_(param.trains)

    @on_parameters
    def reshard(self) -> None:
        """Register the sharded parameters and free the gathered ones."""
        if self.residence is not Residence.SHARDED:
            self._release()

    def _release(self) -> None:
        residence = self.residence
        if residence is Residence.UNSHARDED and self.context.owners is not None:
            self.context.owners.check(self, "released")
        if residence is Residence.GATHERING:
            self._wait_gather()  # memory that a collective still writes must not go back
        self._register(unsharded=False)
        if self.parking is not None:
            self.parking.forget()
        self.transport.release()
        self._move(Residence.SHARDED)

    def to_sharded(self) -> None:
        """Reshard at the user's wish, and take over what was changed on the gathered parameters."""
        if self.residence is Residence.UNSHARDED or self.residence is Residence.PARKED:
            self.settle()
        self.reshard()

    def keep(self) -> None:
        """Register the sharded parameters but keep the gathered data: backward starts here."""
        self._register(unsharded=False)
        self._move(Residence.KEPT)

    def park(self) -> None:
        """Register parameters over the smaller mesh and keep their part of the gathered data."""
        assert self.parking is not None
        self.parking.park()
        self._move(Residence.PARKED)

    def _register(self, *, unsharded: bool) -> None:
        """Swap the registered parameters: this runs four times per step for each parameter."""
        for table, name, param in self._tables:
            table[name] = param.unsharded if unsharded else param.sharded
        for param in self._unusual:
            param.register(param.unsharded if unsharded else param.sharded)  # type: ignore[arg-type]

    # -- backward --------------------------------------------------------------------------------

    @on_parameters
    def post_backward(self, *, release: bool | None = None, zeros: Sequence[Any] = ()) -> None:
        """Reshard and reduce; safe to call for a group that took no part in the backward.

        ``release`` takes the place of the setting. ``zeros`` says which parameters take part also without a
        gradient: on ranks that did not run the module.
        """
        self.collect(release)
        self.reduce(zeros)

    def collect(self, release: bool | None = None) -> None:
        """Take over the gradients and reshard; with ``reduce``, by a caller that is ``on_parameters``."""
        grads = self._take_gradients()
        if release is None:
            release = self.settings.reshard_after_backward
        if release and self.residence is not Residence.SHARDED:
            self._release()  # before the gradient buffer is allocated: it may take the same memory
        if grads:
            self.reducer.store(grads)

    def reduce(self, zeros: Sequence[Any] = ()) -> None:
        """Reduce what was collected, unless gradients are not synchronised now."""
        if self.settings.reduce_grads:
            if zeros or self.settings.reduce_unused:
                self.settle()  # it takes part even if it was not gathered since parameters were unfrozen
            try:
                self.reducer.reduce(zeros=zeros)
            except BaseException:
                self._forget_launch()
                raise

    def has_gradients(self) -> list[bool]:
        """For each parameter, whether there is a gradient of this rank to reduce."""
        return [
            index in self.reducer.written or (p.unsharded is not None and p.unsharded.grad is not None)
            for index, p in enumerate(self.params)
        ]

    def _take_gradients(self) -> list[tuple[int, torch.Tensor]]:
        """The gradients autograd left, by parameter; they are this list's alone."""
        taken = []
        for index, param in enumerate(self.params):
            unsharded = param.unsharded
            if unsharded is not None and (grad := unsharded.grad) is not None:
                taken.append((index, grad))
                unsharded.grad = None
        return taken

    def finish_backward(self) -> None:
        """After the last backward: drop an unused prefetch or kept data, wait for offloaded gradients."""
        if self.offload:
            self.reducer.finish_offload()
        if self.residence is Residence.GATHERING or self.residence is Residence.KEPT:
            self.reshard()

    def reset_iteration(self) -> None:
        """Forget an iteration that failed: gathered parameters and collected gradients are dropped."""
        for param in self.params:
            if param.unsharded is not None:
                param.unsharded.grad = None
        self.reducer.discard()
        self.to_sharded()

    def __repr__(self) -> str:
        return f"ParamGroup({self.label}, {len(self.params)} parameters, {self.residence.name})"
