"""Adam and AdamW with both moments in 8 bits per element, in blocks that never leave their rank.

What happens to a parameter is decided by its global shape, its name and the options of its group, never by
the part a rank holds; a step then touches local memory only. See ``docs/optimizers.md``.
"""

from __future__ import annotations

import fnmatch
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ragged_fsdp.optim.adam8bit_reference import (
    AdamScalars,
    BlockEntry,
    update_entry,
    update_exact,
)
from ragged_fsdp.optim.quant import codebook, rounding_key
from ragged_fsdp.optim.quant_grid import LocalBlocks, block_grid
from ragged_fsdp.optim.state import (
    ExactStateOptimizer,
    StepCounters,
    local_of,
    require_matching_grad,
    require_plain_shards,
    require_whole_blocks,
    state_like,
    state_over_blocks,
)

__all__ = ["Adam8bit", "AdamW8bit"]

_LOG = logging.getLogger(__name__)
_QUANTISED = ("exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales")
_EXACT = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Plan:
    """How one parameter is treated; ``blocks`` is None if its state stays in fp32."""

    name: str
    position: int
    blocks: LocalBlocks | None


@dataclass(frozen=True)
class _Slot:
    """What a step needs of one parameter, except its gradient: that is not to be kept alive."""

    param: Tensor
    plan: _Plan
    weight: Tensor
    address: int
    moments: tuple[Tensor, ...]
    kernel_kind: tuple[Any, ...] | None
    """What parameters of one kernel launch have in common; None on devices without the kernel."""

    @property
    def grad(self) -> Tensor:
        """The local gradient of this step."""
        assert self.param.grad is not None
        grad = local_of(self.param.grad)
        return grad if grad.is_contiguous() else grad.contiguous()


class Adam8bit(ExactStateOptimizer):
    """Adam whose moments are 8-bit codes with one fp32 scale per block: 2.01 bytes of state per element.

    Args:
        params: parameters, named parameters or groups. Ragged or ``Shard`` DTensors and plain tensors.
        lr, betas, eps, weight_decay, maximize: as in ``torch.optim.Adam`` (L2 decay).
        block_shape: rows and columns of a tile of a matrix, powers of two. Leading dims are batches of
            matrices; rows are halved and columns doubled until they divide the rows of the matrix.
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

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        block_shape: tuple[int, int] = (32, 32),
        run: int = 256,
        min_8bit_numel: int = 4096,
        exclude: Sequence[str] = (),
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "block_shape": tuple(block_shape),
            "run": run,
            "min_8bit_numel": min_8bit_numel,
            "exclude": (exclude,) if isinstance(exclude, str) else tuple(exclude),
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
        }
        self._plans: dict[Tensor, _Plan] = {}
        self._slots: dict[Tensor, _Slot] = {}
        self._counters: list[StepCounters] = []
        self._tables: dict[Any, Any] = {}
        super().__init__(params, defaults)
        self._log_plans()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; nothing is changed if one of its parameters cannot be optimised."""
        super().add_param_group(param_group)
        try:
            self._plan_group(len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans, self._slots, self._tables, self._counters = {}, {}, {}, []
        for index in range(len(self.param_groups)):  # options may have come with the state
            self._plan_group(index)

    def _plan_group(self, index: int) -> None:
        group = self.param_groups[index]
        _check_options(group)
        position = sum(len(g["params"]) for g in self.param_groups[:index])
        plans = {}
        for offset, (name, param) in enumerate(self.named_group_params(index)):
            require_plain_shards(name, param)
            if not param.is_floating_point():
                raise TypeError(f"{name}: expected a floating-point parameter, got {param.dtype}.")
            blocks = None
            if _is_quantised(name, param, group):
                grid = block_grid(tuple(param.shape), tuple(group["block_shape"]), group["run"])
                blocks = require_whole_blocks(name, param, grid)
            plans[param] = _Plan(name, position + offset, blocks)
        self._plans.update(plans)

    def _log_plans(self) -> None:
        small = [p for p, plan in self._plans.items() if plan.blocks is None]
        large = [p for p, plan in self._plans.items() if plan.blocks is not None]
        _LOG.info(
            "%s: 8-bit state for %d parameters (%d elements), fp32 state for %d (%d elements): %s",
            type(self).__name__,
            len(large),
            sum(p.numel() for p in large),
            len(small),
            sum(p.numel() for p in small),
            ", ".join(self._plans[p].name for p in small) or "none",
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; no communication."""
        loss = self._loss_of(closure)
        if len(self._counters) != len(self.param_groups):
            self._counters = [StepCounters(group["params"]) for group in self.param_groups]
            self._slots = {}
        ready = [
            self._ready_slots(index) for index in range(len(self.param_groups))
        ]  # raises first, if at all
        for group, counters, slots in zip(self.param_groups, self._counters, ready):
            before, by_step = counters.counts(), defaultdict(list)
            for index, slot in slots:
                by_step[before[index] + 1].append(slot)
            counters.advance([index for index, _ in slots])
            for step, of_step in by_step.items():
                self._update(of_step, group, step)
        return loss

    def _ready_slots(self, group_index: int) -> list[tuple[int, _Slot]]:
        """The parameters with a gradient and their positions in the group."""
        slots, counters = [], self._counters[group_index]
        for index, param in enumerate(self.param_groups[group_index]["params"]):
            if param.grad is None:
                continue
            slot = self._slots.get(param)
            if slot is None or slot.address != local_of(param).data_ptr():
                slot = self._slots[param] = self._new_slot(param, counters)
            require_matching_grad(slot.plan.name, param)
            slots.append((index, slot))
        return slots

    def _new_slot(self, param: Tensor, counters: StepCounters) -> _Slot:
        plan, state = self._plans[param], self.state[param]
        if not state:
            counters.adopt(param, state)
            state.update(_new_state(param, plan.blocks))
        expected = _EXACT if plan.blocks is None else _QUANTISED
        if missing := [key for key in expected if key not in state]:
            raise RuntimeError(
                f"{plan.name}: state {missing} is missing, found {sorted(state)}: it was saved by another "
                "optimizer or under other options (min_8bit_numel, exclude)."
            )
        counters.adopt(param, state)
        moments, weight = tuple(local_of(state[key]) for key in expected), local_of(param)
        kind = None
        if plan.blocks is not None and weight.is_cuda and weight.is_contiguous():
            grid = plan.blocks.grid
            kind = (grid.block_rows, grid.block_cols, weight.dtype, weight.device)
        return _Slot(param, plan, weight, weight.data_ptr(), moments, kind)

    def _update(self, slots: Sequence[_Slot], group: dict[str, Any], step: int) -> None:
        """Update parameters that take their ``step``-th step."""
        scalars = AdamScalars.of(group, step, self._decoupled)
        exact: list[_Slot] = []
        kinds: dict[Any, list[BlockEntry]] = defaultdict(list)
        for slot in slots:
            if not slot.weight.numel():
                continue
            if slot.plan.blocks is None:
                exact.append(slot)
            elif slot.kernel_kind is None:
                _update_any_stride(_entry(slot, group, step), scalars)
            else:
                entry = _entry(slot, group, step)
                kinds[slot.kernel_kind, entry.grad.dtype].append(entry)
        if exact:
            _update_exact(exact, scalars)
        if kinds:
            self._launch(kinds, scalars)

    def _launch(self, kinds: dict[Any, list[BlockEntry]], scalars: AdamScalars) -> None:
        from ragged_fsdp.optim.adam8bit_triton import update_entries

        for kind, entries in kinds.items():
            key = (kind, len(entries), entries[0].param.data_ptr())
            self._tables[key] = update_entries(entries, scalars, self._tables.get(key))


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
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **options)


def _is_quantised(name: str, param: Tensor, group: dict[str, Any]) -> bool:
    if group["exclude"] and "param_names" not in group:
        raise ValueError(
            f"exclude={group['exclude']!r} matches names, but parameters came without; pass "
            "model.named_parameters()."
        )
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in group["exclude"]):
        return False
    return param.numel() >= max(1, group["min_8bit_numel"])


def _check_options(group: dict[str, Any]) -> None:
    for key, ok, expected in (
        ("lr", float(group["lr"]) >= 0, "non-negative"),
        ("eps", group["eps"] > 0, "positive"),
        ("weight_decay", group["weight_decay"] >= 0, "non-negative"),
        ("betas", all(0 <= beta < 1 for beta in group["betas"]), "in [0, 1)"),
        ("min_8bit_numel", group["min_8bit_numel"] >= 0, "non-negative"),
    ):
        if not ok:
            raise ValueError(f"{key} must be {expected}, got {group[key]}.")
    block_grid((1,), tuple(group["block_shape"]), group["run"])  # validates the block shapes


def _new_state(param: Tensor, blocks: LocalBlocks | None) -> dict[str, Tensor]:
    local = local_of(param)
    if blocks is None:
        return {key: state_like(param, _filled_like(local, 0, torch.float32)) for key in _EXACT}
    count = blocks.grid_rows * blocks.grid_cols
    state = {}
    for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        codes = _filled_like(local, codebook(signed).zero_code, torch.uint8)
        scales = torch.zeros(count, dtype=torch.float32, device=local.device)
        state[f"{key}_codes"] = state_like(param, codes)
        state[f"{key}_scales"] = state_over_blocks(param, blocks.grid, scales)
    return state


def _entry(slot: _Slot, group: dict[str, Any], step: int) -> BlockEntry:
    plan = slot.plan
    key = rounding_key(group["seed"], step, plan.position) if group["stochastic_rounding"] else None
    assert plan.blocks is not None
    mean_codes, mean_scales, square_codes, square_scales = slot.moments
    return BlockEntry(
        slot.weight, slot.grad, mean_codes, mean_scales, square_codes, square_scales, plan.blocks, key
    )


def _update_exact(slots: Sequence[_Slot], scalars: AdamScalars) -> None:
    update_exact(
        [slot.weight for slot in slots],
        [slot.grad for slot in slots],
        [slot.moments[0] for slot in slots],
        [slot.moments[1] for slot in slots],
        scalars,
    )


def _filled_like(local: Tensor, value: int, dtype: torch.dtype) -> Tensor:
    return torch.full(local.shape, value, dtype=dtype, device=local.device)


def _update_any_stride(entry: BlockEntry, scalars: AdamScalars) -> None:
    """The reference, through a contiguous copy where the weights are not contiguous."""
    param, grad = entry.param.contiguous(), entry.grad.contiguous()
    update_entry(replace(entry, param=param, grad=grad), scalars)
    if param is not entry.param:
        entry.param.copy_(param)
