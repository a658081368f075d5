"""ParamGroup: parameters that are gathered and reduced together, and the state of their buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from ragged_fsdp import collectives
from ragged_fsdp.dbuffer import DBuffer
from ragged_fsdp.fsdp.autograd import on_parameters, outside_compile
from ragged_fsdp.fsdp.comm_memory import allocator_of
from ragged_fsdp.fsdp.main_shard import MainShard, pins_memory
from ragged_fsdp.fsdp.mesh import ParallelMesh
from ragged_fsdp.fsdp.param import ManagedParam, check_materialized, settle_requires_grad
from ragged_fsdp.fsdp.parking import ParkingSpot
from ragged_fsdp.fsdp.phases import ALLOWED_MOVES, Phase, Residence
from ragged_fsdp.fsdp.plan import GroupPlan, gathered_dtype
from ragged_fsdp.fsdp.recast import RecastWeight, gathered_weight
from ragged_fsdp.fsdp.reduction import GradReducer
from ragged_fsdp.fsdp.schedule import CommContext
from ragged_fsdp.fsdp.settings import GroupSettings

__all__ = ["ParamGroup"]

_EAGER_GRAD_BYTES = 1 << 20  # gradients from this size on move into the buffer one by one, as they come


class ParamGroup:
    """Parameters with one plan, one gather and one reduction."""

    def __init__(
        self,
        params: Sequence[ManagedParam],
        modules: tuple[nn.Module, ...],
        mesh: ParallelMesh,
        plan: GroupPlan,
        main: MainShard,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
    ) -> None:
        self.params = list(params)
        self._tables = [(table, name, p) for p in self.params for table, name in p.tables or ()]
        self._unusual = [p for p in self.params if p.tables is None]
        self.modules = modules
        self.mesh = mesh
        self.plan = plan
        self.main = main
        self.device = device
        self.mp_policy = mp_policy
        self.offload = isinstance(offload_policy, CPUOffloadPolicy)
        self.pin_memory = pins_memory(offload_policy, device)
        self.settings = GroupSettings()
        self.context = CommContext()
        self.reducer = GradReducer(self)
        self.model_weight: DBuffer | RecastWeight | None = None
        self.parking: ParkingSpot | None = None
        self.reshard_after_forward = True
        self.fqn: str | None = None
        self.label_suffix = ""
        """Which of the groups of its call this one is, if there are several."""
        self.phase = Phase.IDLE
        self.residence = Residence.SHARDED
        self.keep_gathered = False
        """Whether the next reshard after forward keeps the data, because backward starts here."""
        self.speculative = False
        """Whether the gather under way was issued by the recorded order, not asked for."""
        self.gathered_in = -1
        """The forward below this root, by number, for which the parameters were gathered last."""
        self.forward_positions: list[int] = []
        """Where this group stands in the backward order: once for each forward since the last backward."""
        self.reduce_dtype: torch.dtype | None = None
        self._gather_done: Any = None
        self._gather_work: Any = None
        self._staging: torch.Tensor | None = None
        """What a custom all-gather writes, if it has an allocator of its own."""
        self.initialized = False
        self.stale = False
        """Whether a state dict was loaded since: it may have replaced parameters."""
        self._follow_state_dicts()

    # -- initialisation --------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """Name for errors and profiles."""
        return (self.fqn or (self.params[0].name if self.params else "")) + self.label_suffix

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered parameters."""
        return self.model_weight.nbytes if self.model_weight is not None else 0

    @property
    def grad_buffer_bytes(self) -> int:
        """Bytes of a gradient buffer of the whole group; 0 if nothing in it is trainable."""
        if not any(param.sharded.requires_grad for param in self.params):
            return 0
        return self.reducer.buffer_bytes()

    @on_parameters
    def lazy_init(self) -> None:
        """Read the parameters again before the first use: users may have replaced or cast them."""
        self.context.use_device(self.device)
        if self.residence is Residence.SHARDED and not self.initialized:
            self.reset_sharded_params()
            for param in self.params:
                param.trains = param.sharded.requires_grad
            self.initialized = True
        check_materialized(self.params, on_host=self.offload)
        self._choose_dtypes()

    def _follow_state_dicts(self) -> None:
        """State dicts are saved from and loaded into the sharded parameters."""

        def shard(*_: Any, **__: Any) -> None:
            self.to_sharded()

        def loaded(*_: Any) -> None:
            self.stale = True

        for module in {place.module for param in self.params for place in param.places}:
            module.register_state_dict_pre_hook(shard)
            module._register_load_state_dict_pre_hook(shard)
            module.register_load_state_dict_post_hook(loaded)

    def _choose_dtypes(self) -> None:
        param_dtype, reduce_dtype = self.mp_policy.param_dtype, self.mp_policy.reduce_dtype
        self.reduce_dtype = None if reduce_dtype == param_dtype else reduce_dtype
        self.follow_trainable()
        self._prepare_weight(param_dtype)

    def follow_trainable(self) -> None:
        """Choose the dtypes of gradients; again when other parameters train than before."""
        trainable = {p.dtype for p in self.params if p.trains}
        if len(trainable) > 1:
            raise AssertionError(f"FSDP expects uniform original parameter dtype but got {trainable}")
        self.trainable_dtype = next(iter(trainable), torch.float32)
        self.wire_dtype = gathered_dtype(self.trainable_dtype, self.mp_policy.param_dtype)
        """Of the gradients, as autograd produces them."""
        self.gradient_dtype = self.reduce_dtype or self.wire_dtype

    def _prepare_weight(self, param_dtype: torch.dtype | None) -> None:
        """Make the gathered buffer, without memory; again if the dtypes changed."""
        dtypes = tuple(gathered_dtype(p.dtype, param_dtype) for p in self.params)
        if self.model_weight is not None and self.model_weight.dtypes == dtypes:
            return
        self.model_weight = gathered_weight(self.plan, dtypes, self.mesh, self.device)
        if self.parking is not None and isinstance(self.model_weight, RecastWeight):
            raise RuntimeError(
                f"{self.label}: after fully_shard its parameters were cast to {[str(d) for d in dtypes]}, "
                "items of different sizes; reshard_after_forward=int does not support that. Cast them before."
            )
        for param in self.params:
            param.unsharded = None

    @on_parameters
    def reset_sharded_params(self) -> None:
        """Bring parameters that were replaced, cast or moved back into one main shard."""
        for param in self.params:
            param.adopt(param.registered())
        locals_ = [p.sharded._local_tensor for p in self.params]
        if all(self.main.holds(i, local) for i, local in enumerate(locals_)):
            return
        devices = {local.device for local in locals_}
        if len(devices) > 1 or next(iter(devices)).type == "meta":
            self._note_dtypes(locals_)
            return  # partly materialised: lazy init will name those that are missing
        device = devices.pop()
        self.main = MainShard(
            self.plan,
            self.mesh,
            [local.dtype for local in locals_],
            device,
            pin_memory=self.pin_memory and device.type == "cpu",
        )
        for param, piece, local in zip(self.params, self.main.pieces, locals_):
            piece.copy_(local.reshape(-1))
            param.point_at(piece)

    def _note_dtypes(self, locals_: Sequence[torch.Tensor]) -> None:
        for param, local in zip(self.params, locals_):
            param.dtype = local.dtype
            param.spec = param.sharded._spec

    # -- gather and reshard ----------------------------------------------------------------------

    def _move(self, to: Residence) -> None:
        if (self.residence, to) not in ALLOWED_MOVES:
            raise RuntimeError(
                f"{self.label}: no transition from {self.residence.name} to {to.name}; this is a bug."
            )
        self.residence = to

    def unshard(self, async_op: bool = False) -> None:
        """Issue the gather, unless it is under way or done."""
        if self.residence is Residence.GATHERING:
            return
        if self.residence is Residence.UNSHARDED:
            if self.phase is Phase.FORWARD:
                settle_requires_grad(self.params)
            return
        if self.phase is Phase.PRE_BACKWARD and not self.settings.unshard_in_backward:
            return
        self._issue_gather(async_op)

    @on_parameters
    def _issue_gather(self, async_op: bool) -> None:
        if self.stale:
            self.stale = False
            self.reset_sharded_params()
            self.lazy_init()
        source = self._gather_source()
        with self.context.on_stream("gather"):
            self._gather_work = self._gather(source, async_op)
            if self.mesh.shard_size > 1:
                self._gather_done = self.context.record_launch("all-gather", self, self.mesh.shard_group)
            else:
                self._gather_done = self.context.record()
        self._move(Residence.GATHERING)

    def _gather_source(self) -> Any:
        """What :meth:`_gather` works on, allocated on the compute stream: the buffer the parameters view."""
        weight = self.model_weight
        assert weight is not None
        if not (self.settings.keep_storage and weight.is_materialized):
            self._materialize(weight)
        self._stage(weight)
        if self.params[0].unsharded is None:
            for param, view in zip(self.params, weight.tensors):
                param.make_unsharded(view)
        return weight

    def _materialize(self, weight: Any) -> None:
        if self.settings.comm_memory is not None:
            with self.settings.allocating(self.device):
                weight.materialize()
        elif 0 < weight.nbytes == self.context.gather_pool.nbytes:
            with self.context.gather_pool.allocating(self.device):
                weight.materialize()
        else:
            weight.materialize()

    def _stage(self, weight: Any) -> None:
        """Allocate what the collective writes, if that is not the buffer itself."""
        allocate = allocator_of(self.settings.custom_all_gather)
        if allocate is not None and self.mesh.shard_size > 1:
            self._staging = allocate(weight.flat.shape, dtype=weight.dtype, device=self.device).view(-1)

    def _gather(self, weight: Any, async_op: bool) -> Any:
        if self.residence is Residence.PARKED and self.parking is not None:
            slot, group = self.parking.fill(weight)
        else:
            self.main.fill_slot(weight, non_blocking=self.pin_memory)
            slot, group = weight.slot, self.mesh.shard_group
        if group.size() == 1:
            return None
        full = weight.flat
        if self._staging is not None:
            full = self._staging
            slot = full.narrow(0, group.rank() * slot.numel(), slot.numel()).copy_(slot)
        launch, comm = collectives.all_gather_, self.settings.custom_all_gather
        return self.launch("all-gather", group, launch, full, slot, group, async_op=async_op, comm=comm)

    def wait_for_unshard(self) -> None:
        """Let the current stream see the gathered parameters and register them."""
        if self.residence is Residence.GATHERING:
            self._finish_gather()
        elif self.context.owners is not None and self.residence is Residence.UNSHARDED:
            self.context.owners.check(self, "used")

    def hand_over(self) -> None:
        """In debug mode: gathered weights may be used and released on the current stream from here on."""
        if self.context.owners is not None:
            self.context.owners.hand_over(self)

    @on_parameters
    def _finish_gather(self) -> None:
        self._wait_gather()
        self.speculative = self.keep_gathered = False
        self._follow_requires_grad()
        self._register(unsharded=True)
        if self.parking is not None:
            self.parking.clear()
        self._move(Residence.UNSHARDED)
        self.hand_over()

    def _wait_gather(self) -> None:
        self.context.wait(self._gather_done)
        if self._gather_work is not None:
            with collectives.explain_failure("all-gather", self.label, self.mesh.shard_group):
                self._gather_work.wait()
        self._gather_done = self._gather_work = None
        staging, self._staging = self._staging, None
        if staging is not None and self.model_weight is not None:
            self.model_weight.flat.copy_(staging)
        if isinstance(self.model_weight, RecastWeight):
            self.model_weight.put_together()

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
                self._hook_gradient(param, unsharded)

    def _hook_gradient(self, param: ManagedParam, unsharded: nn.Parameter) -> None:
        large = param.inner_shape.numel() * unsharded.dtype.itemsize >= _EAGER_GRAD_BYTES
        if not large:
            param.grad_hook = False
            return
        take = partial(self._take_gradient, self.params.index(param))
        param.grad_hook = unsharded.register_post_accumulate_grad_hook(take)

    def _take_gradient(self, index: int, unsharded: torch.Tensor) -> None:
        """Move a large gradient into the buffer at once, if there is or may be a buffer now.

        With one gradient buffer the reduction before this group's may still use it: the gradients wait
        for the post-backward rather than stop the computation.
        """
        grad = unsharded.grad
        if grad is not None and (self.context.max_grad_buffers > 1 or self.reducer.written):
            unsharded.grad = None
            self.reducer.store(index, grad)

    @on_parameters
    def reshard(self) -> None:
        """Register the sharded parameters and free the gathered ones, as the phase and settings say."""
        if self.context.owners is not None and self.residence is Residence.UNSHARDED:
            self.context.owners.check(self, "released")
        if self.phase is Phase.FORWARD:
            if not self.reshard_after_forward:
                return
            if self.parking is not None and self.residence is Residence.UNSHARDED:
                self._park()
                return
            if self.keep_gathered and self.residence is Residence.UNSHARDED:
                self._register(unsharded=False)
                self._move(Residence.GATHERING)
                return
        self.to_sharded()

    def to_sharded(self) -> None:
        """Free the gathered parameters whatever the phase."""
        if self.residence is Residence.SHARDED:
            return
        if self.residence is Residence.GATHERING:
            self._wait_gather()
        elif self.phase is Phase.IDLE:
            settle_requires_grad(self.params)
        self._register(unsharded=False)
        if self.parking is not None:
            self.parking.clear()
        self._release_weight()
        self._move(Residence.SHARDED)

    def _release_weight(self) -> None:
        assert self.model_weight is not None
        if not self.settings.keep_storage:
            self.model_weight.release()

    def drop_kept(self) -> None:
        """Give up data that was kept for a backward that did not come."""
        self.keep_gathered = False
        if self.residence is Residence.GATHERING:
            self.to_sharded()

    def _park(self) -> None:
        assert self.parking is not None and isinstance(self.model_weight, DBuffer)
        self.parking.keep(self.model_weight, self.params)
        self._release_weight()
        self._move(Residence.PARKED)

    def _register(self, *, unsharded: bool) -> None:
        """Swap the registered parameters: this runs four times per step for each parameter."""
        for table, name, param in self._tables:
            table[name] = param.unsharded if unsharded else param.sharded
        for param in self._unusual:
            param.register(param.unsharded if unsharded else param.sharded)  # type: ignore[arg-type]

    # -- backward --------------------------------------------------------------------------------

    @outside_compile
    @on_parameters
    def post_backward(self) -> None:
        """Reshard and reduce; safe to call for a group that took no part in the backward."""
        self.phase = Phase.POST_BACKWARD
        grads = self._take_gradients()
        if self.settings.reshard_after_backward:
            self.reshard()  # before the gradient buffer is allocated: it may take the same memory
        if grads:
            self.reducer.store_many(grads)
            grads.clear()
        if self.settings.reduce_grads:
            self.reducer.reduce()

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
        """After the last backward: drop an unused prefetch, wait for offloaded gradients."""
        self.reducer.finish_offload()
        if self.residence is Residence.GATHERING:
            self.to_sharded()
        self.forward_positions.clear()

    def reset_iteration(self) -> None:
        """Forget an iteration that failed: gathered parameters and collected gradients are dropped."""
        for param in self.params:
            if param.unsharded is not None:
                param.unsharded.grad = None
        self.reducer.discard()
        self.forward_positions.clear()
        self.keep_gathered = False
        self.phase = Phase.IDLE
        self.to_sharded()

    def launch(self, phase: str, pg: Any, collective: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call ``collective`` for this group: an error says where, a profiler that runs shows its name."""
        if self.context.order_check is not None:
            self.context.order_check.note(phase.replace("-", "_"), self)
        try:
            if not torch.autograd._profiler_enabled():
                return collective(*args, **options)
            with torch.profiler.record_function(f"FSDP::{phase.replace('-', '_')} ({self.label})"):
                return collective(*args, **options)
        except RuntimeError as error:
            collectives.explain(error, phase, self.label, pg)
            raise

    def __repr__(self) -> str:
        return f"ParamGroup({self.label}, {len(self.params)} parameters, {self.residence.name})"
