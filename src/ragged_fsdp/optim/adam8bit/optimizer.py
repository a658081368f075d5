"""Adam and AdamW with both moments in 8 bits per element, in blocks that never leave their rank.

What happens to a parameter is decided by its global shape, its name and the options of its group, never by
the part a rank holds; a step then touches local memory only. See ``docs/optimizers.md``.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ragged_fsdp.optim.adam8bit.codes import rounding_key, zero_code
from ragged_fsdp.optim.adam8bit.reference import AdamScalars, BlockEntry, update_entry, update_exact
from ragged_fsdp.optim.base import ExactStateOptimizer
from ragged_fsdp.optim.blocks import (
    LocalBlocks,
    block_grid,
    form_over_blocks,
    grid_of,
    require_whole_blocks,
    state_over_blocks,
)
from ragged_fsdp.optim.checks import (
    ADAM_RANGES,
    as_tuple,
    check_options,
    is_excluded,
    name_patterns,
    require_optimisable,
)
from ragged_fsdp.optim.state import (
    StateForm,
    StepCounters,
    TensorAddresses,
    form_like,
    fresh_moments,
    local_part,
    state_like,
)

if TYPE_CHECKING:
    from ragged_fsdp.optim.adam8bit.launch import BlockBatch, ExactBatch

__all__ = ["Adam8bit", "AdamW8bit"]

_LOG = logging.getLogger(__name__)
_QUANTISED = ("exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales")
_EXACT = ("exp_avg", "exp_avg_sq")
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_BATCHES = 8
"""Sets of parameters with gradients whose launches are remembered; they rarely are more than one."""


@dataclass(frozen=True)
class _Plan:
    """How one parameter is treated; ``blocks`` is None if its state stays in fp32."""

    name: str
    position: int
    blocks: LocalBlocks | None


@dataclass(frozen=True)
class _Slot:
    """What a step needs of one parameter, except its gradient: that is not to be kept alive."""

    position: int
    """In the optimizer: what its random rounding depends on."""
    weight: Tensor
    moments: tuple[Tensor, ...]
    entry: BlockEntry | None

    @property
    def has_kernel(self) -> bool:
        """Whether the parameter is updated by a GPU kernel."""
        grid = None if self.entry is None else self.entry.blocks.grid
        sizes = () if grid is None else (grid.block_rows, grid.block_cols)
        even = not any(size & (size - 1) for size in sizes)  # a tile as high as its matrix may be any size
        return (
            even
            and self.weight.is_cuda
            and self.weight.is_contiguous()
            and self.weight.dtype in _KERNEL_DTYPES
        )


@dataclass
class _Batches:
    """Members of a group that step together: those of each launch, and those updated one by one."""

    blocks: list[tuple[BlockBatch, list[int]]] = field(default_factory=list)
    exact: list[tuple[ExactBatch, list[int]]] = field(default_factory=list)
    others: list[int] = field(default_factory=list)


class _GroupSlots:
    """The parameters of a group as the steps see them; built anew when groups or state are replaced."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self.params = [param for _, param in named]
        self.counters = StepCounters(self.params)
        self.addresses = TensorAddresses(self.params)
        self.slots: list[_Slot | None] = [None] * len(named)
        self.batches: dict[Any, _Batches] = {}

    def look_again(self) -> None:
        """Forget what was noted if the memory of a parameter is another now."""
        if self.addresses.have_changed():
            self.addresses = TensorAddresses(self.params)
            self.slots = [None] * len(self.params)
            self.batches.clear()

    def batches_of(self, indices: Sequence[int], grads: dict[int, Tensor]) -> _Batches:
        """How to update these members, whose gradients have these dtypes."""
        key = (tuple(indices), tuple(grads[index].dtype for index in indices))
        batches = self.batches.get(key)
        if batches is None:
            if len(self.batches) >= _MOST_BATCHES:
                self.batches.clear()
            batches = self.batches[key] = self._new_batches(*key)
        return batches

    def _new_batches(self, indices: Sequence[int], dtypes: Sequence[torch.dtype]) -> _Batches:
        batches = _Batches()
        blocks: dict[Any, list[int]] = defaultdict(list)
        exact: dict[Any, list[int]] = defaultdict(list)
        for index, grad_dtype in zip(indices, dtypes):
            slot = self.slot(index)
            if not slot.weight.numel():
                continue
            if not slot.has_kernel:
                batches.others.append(index)
            elif slot.entry is None:
                exact[slot.weight.dtype, grad_dtype, slot.weight.device].append(index)
            else:
                from ragged_fsdp.optim.adam8bit.launch import kernel_kind

                blocks[kernel_kind(slot.entry), grad_dtype].append(index)
        if blocks or exact:
            from ragged_fsdp.optim.adam8bit.launch import BlockBatch, ExactBatch

            for members in blocks.values():
                slots = [self.slot(index) for index in members]
                entries = [slot.entry for slot in slots if slot.entry is not None]
                batches.blocks.append((BlockBatch(entries, [slot.position for slot in slots]), members))
            for members in exact.values():
                slots = [self.slot(index) for index in members]
                batches.exact.append((ExactBatch([[s.weight, *s.moments] for s in slots]), members))
        return batches

    def slot(self, index: int) -> _Slot:
        slot = self.slots[index]
        assert slot is not None
        return slot


class Adam8bit(ExactStateOptimizer):
    """Adam whose moments are 8-bit codes with one fp32 scale per block: 2.01 bytes of state per element.

    Args:
        params: parameters, named parameters or groups. Ragged or ``Shard`` DTensors and plain tensors.
        lr, betas, eps, weight_decay, maximize: as in ``torch.optim.Adam`` (L2 decay).
        block_shape: rows and columns of a tile of a matrix, powers of two. Leading dims are batches of
            matrices; rows are halved and columns doubled until they divide the rows of the matrix. None
            takes runs of elements for matrices too. Of parameters that are stored in ``Tiles`` it must be
            the tile.
        run: elements per block of vectors and of matrices too small for a tile.
        min_8bit_numel: parameters with fewer elements (globally) keep fp32 moments.
        exclude: shell patterns of names (``"*.embed.weight"``) that keep fp32 moments. Needs names: pass
            ``model.named_parameters()``.
        stochastic_rounding: round codes at random so that their mean is right, as a function of ``seed``,
            the step and the element's global index: alike at any world size.
        seed: of the stochastic rounding.

    Every option may be set per group. A parameter whose sharding cuts blocks raises when it is added,
    naming the granularity to ask ``fully_shard`` for; :func:`~ragged_fsdp.optim.block_policy` asks for it.
    """

    _decoupled = False
    _is_ready = True  # false while the constructor adds its groups

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        block_shape: tuple[int, int] | None = (32, 32),
        run: int = 256,
        min_8bit_numel: int = 4096,
        exclude: Sequence[str] = (),
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": as_tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "block_shape": as_tuple(block_shape),
            "run": run,
            "min_8bit_numel": min_8bit_numel,
            "exclude": name_patterns(exclude),
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
        }
        self._plans: dict[Tensor, _Plan] = {}
        self._members: list[_GroupSlots] = []
        self._is_ready = False
        super().__init__(params, defaults)
        self._is_ready = True
        self._log_plans(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; nothing is changed if one of its options or parameters is refused."""
        super().add_param_group(param_group)
        if self._is_ready:  # the groups of the constructor share one line
            self._log_plans(self.param_groups[-1:])

    def _forget_plans(self) -> None:
        self._plans, self._members = {}, []

    def _plan_group(self, index: int) -> None:
        group = self.param_groups[index]
        check_options(group, {**ADAM_RANGES, "min_8bit_numel": "non-negative", "seed": "an integer"})
        block_grid((1,), as_tuple(group["block_shape"]), group["run"])  # validates the block shapes
        position = sum(len(g["params"]) for g in self.param_groups[:index])
        named, plans = list(self.named_group_params(index)), {}
        for offset, (name, param) in enumerate(named):
            require_optimisable(name, param)
            blocks = None
            if not is_excluded(name, group) and param.numel() >= max(1, group["min_8bit_numel"]):
                grid = grid_of(name, param, as_tuple(group["block_shape"]), group["run"])
                blocks = require_whole_blocks(name, param, grid)
            plans[param] = _Plan(name, self._places.get(param, position + offset), blocks)
        self._plans.update(plans)
        self._members.append(_GroupSlots(named))

    def _log_plans(self, groups: Sequence[dict[str, Any]]) -> None:
        params = [param for group in groups for param in group["params"]]
        small = [param for param in params if self._plans[param].blocks is None]
        large = [param for param in params if self._plans[param].blocks is not None]
        _LOG.info(
            "%s: 8-bit state for %d parameters (%d elements), fp32 state for %d (%d elements): %s",
            type(self).__name__,
            len(large),
            sum(p.numel() for p in large),
            len(small),
            sum(p.numel() for p in small),
            ", ".join(self._plans[p].name for p in small) or "none",
        )

    def _expected_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, StateForm | None]:
        blocks = self._plans[param].blocks
        if blocks is None:
            return {"step": None, **dict.fromkeys(_EXACT, form_like(param, torch.float32))}
        codes, scales = form_like(param, torch.uint8), form_over_blocks(param, blocks.grid, torch.float32)
        return {"step": None, **{key: codes if key.endswith("codes") else scales for key in _QUANTISED}}

    def _update_all(self, every_grad: Sequence[dict[int, Tensor]]) -> None:
        for group, members, grads in zip(self.param_groups, self._members, every_grad):
            members.look_again()
            for index in grads:
                if members.slots[index] is None:
                    members.slots[index] = self._new_slot(members.params[index], members.counters)
            together = members.counters.by_count(grads)
            members.counters.advance(grads)
            for count, indices in together.items():
                self._update(members, indices, grads, group, int(count) + 1)

    def _new_slot(self, param: Tensor, counters: StepCounters) -> _Slot:
        self._noted = None
        plan, state = self._plans[param], self.state[param]
        is_new = not state
        counters.adopt(param, state)
        if is_new:
            state.update(_new_state(param, plan.blocks))
        expected = _EXACT if plan.blocks is None else _QUANTISED
        moments, weight = tuple(local_part(state[key]) for key in expected), local_part(param)
        entry = None
        if plan.blocks is not None:
            mean_codes, mean_scales, square_codes, square_scales = moments
            entry = BlockEntry(weight, mean_codes, mean_scales, square_codes, square_scales, plan.blocks)
        return _Slot(plan.position, weight, moments, entry)

    def _update(
        self,
        members: _GroupSlots,
        indices: Sequence[int],
        grads: dict[int, Tensor],
        group: dict[str, Any],
        step: int,
    ) -> None:
        """Update members of a group that take their ``step``-th step."""
        scalars = AdamScalars.of(group, step, self._decoupled)
        noise = (group["seed"], step) if group["stochastic_rounding"] else None
        batches = members.batches_of(indices, grads)
        for blocks, of_batch in batches.blocks:
            blocks.launch([grads[i] for i in of_batch], scalars, noise)
        for exact, of_batch in batches.exact:
            exact.launch([grads[i] for i in of_batch], scalars)
        if batches.others:
            slots = [(members.slot(i), grads[i]) for i in batches.others]
            _update_others(slots, scalars, noise)


class AdamW8bit(Adam8bit):
    """:class:`Adam8bit` with decoupled weight decay (0.01 by default), as ``torch.optim.AdamW``."""

    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        block_shape: tuple[int, int] | None = (32, 32),
        run: int = 256,
        min_8bit_numel: int = 4096,
        exclude: Sequence[str] = (),
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            maximize=maximize,
            block_shape=block_shape,
            run=run,
            min_8bit_numel=min_8bit_numel,
            exclude=exclude,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
        )


def _new_state(param: Tensor, blocks: LocalBlocks | None) -> dict[str, Tensor]:
    if blocks is None:
        return fresh_moments(param)
    local = local_part(param)
    count = blocks.grid_rows * blocks.grid_cols
    state = {}
    for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        codes = torch.full(local.shape, zero_code(signed), dtype=torch.uint8, device=local.device)
        scales = torch.zeros(count, dtype=torch.float32, device=local.device)
        state[f"{key}_codes"] = state_like(param, codes)
        state[f"{key}_scales"] = state_over_blocks(param, blocks.grid, scales)
    return state


def _update_others(
    slots: Sequence[tuple[_Slot, Tensor]], scalars: AdamScalars, noise: tuple[int, int] | None
) -> None:
    """The reference, for parameters that no kernel updates."""
    for slot, grad in slots:
        if slot.entry is None:
            mean, square = slot.moments
            update_exact(slot.weight, grad, mean, square, scalars)
            continue
        weight = slot.weight.contiguous()  # a copy if strided
        key = rounding_key(*noise, slot.position) if noise else None
        update_entry(replace(slot.entry, param=weight), grad, scalars, key)
        if weight is not slot.weight:
            slot.weight.copy_(weight)
