"""Shampoo on blocks that never leave their rank.

A matrix is cut into blocks, from its global shape alone (see ``blocks``). Each block G of its gradient
has two preconditioners, running means of G G^T and G^T G, and is updated along L^(-1/p) G R^(-1/p), scaled
to the length that an Adam step of the block would have (*grafting*): the direction is Shampoo's, the step
size Adam's. Blocks do not know of each other, so a step needs no communication where the sharding keeps them
whole, and gives the same numbers at any world size. Inverse roots are renewed every ``root_interval`` steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor.geometry import outer_mesh_dims
from ragged_fsdp.optim.adam8bit.reference import AdamScalars, adam_direction, prepared_grad, widened
from ragged_fsdp.optim.base import ExactStateOptimizer
from ragged_fsdp.optim.blocks import (
    LocalBlocks,
    form_over_blocks,
    from_blocks,
    grid_of,
    require_whole_blocks,
    state_over_blocks,
    to_blocks,
)
from ragged_fsdp.optim.checks import (
    ADAM_RANGES,
    as_tuple,
    check_options,
    is_excluded,
    name_patterns,
    require_optimisable,
)
from ragged_fsdp.optim.state import StateForm, form_like, fresh_moments, local_part

__all__ = ["Shampoo", "inverse_root"]

_LOG = logging.getLogger(__name__)
_STATISTICS = ("left", "right", "left_root", "right_root")


class Shampoo(ExactStateOptimizer):
    """Blocked Shampoo with grafting to Adam and decoupled weight decay.

    Args:
        params: parameters, named parameters or groups. Ragged or ``Shard`` DTensors and plain tensors.
        lr, eps, weight_decay: of the Adam step that sets the length of the update.
        betas: decay of the first moment, and of Adam's second moment and the preconditioners.
        block_shape: rows and columns of a block, powers of two; also what a shard must keep whole. Leading
            dims are batches of matrices.
        root_interval: steps between renewals of the inverse roots.
        start_step: the first step with a preconditioned update; those before are Adam's, while statistics
            build up.
        exponent: p of the inverse roots; 4 is Shampoo's for a matrix, 2 is close to a full-matrix Adam.
        damping: added to the eigenvalues of a preconditioner, relative to its largest.
        min_numel, exclude: parameters under so many elements, or with names that match one of these shell
            patterns, are updated by Adam alone; so are vectors.

    Every option may be set per group.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        block_shape: tuple[int, int] = (128, 128),
        root_interval: int = 10,
        start_step: int = 5,
        exponent: float = 4.0,
        damping: float = 1e-6,
        min_numel: int = 4096,
        exclude: Sequence[str] = (),
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": as_tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "block_shape": as_tuple(block_shape),
            "root_interval": root_interval,
            "start_step": start_step,
            "exponent": exponent,
            "damping": damping,
            "min_numel": min_numel,
            "exclude": name_patterns(exclude),
            "maximize": maximize,
        }
        self._blocks: dict[Tensor, LocalBlocks | None] = {}
        super().__init__(params, defaults)
        named = [pair for index in range(len(self.param_groups)) for pair in self.named_group_params(index)]
        plain = [name for name, param in named if self._blocks[param] is None]
        _LOG.info("Shampoo: Adam alone for %d parameters: %s", len(plain), ", ".join(plain) or "none")

    def _forget_plans(self) -> None:
        self._blocks = {}

    def _plan_group(self, index: int) -> None:
        group = self.param_groups[index]
        check_options(group, _RANGES)
        blocks: dict[Tensor, LocalBlocks | None] = {}
        for name, param in self.named_group_params(index):
            require_optimisable(name, param)
            alone = is_excluded(name, group) or param.ndim < 2 or param.numel() < group["min_numel"]
            blocks[param] = None if alone else self._blocks_of(name, param, group)
        self._blocks.update(blocks)

    @staticmethod
    def _blocks_of(name: str, param: Tensor, group: dict[str, Any]) -> LocalBlocks | None:
        """The blocks of a matrix on this rank; None if it is too small for one."""
        grid = grid_of(name, param, as_tuple(group["block_shape"]))
        if grid.tile is None:
            return require_whole_blocks(name, param, grid) if grid.tiled else None
        if not grid.tiled or (isinstance(param, DTensor) and outer_mesh_dims(param.placements)):
            raise ValueError(
                f"{name}: stored in {grid.granularity}; Shampoo takes whole tiles, of a parameter that "
                f"nothing else cuts; got shape {grid.shape}. Exclude it, or use tiles that divide it."
            )
        return require_whole_blocks(name, param, grid)

    def _expected_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, StateForm | None]:
        blocks, moment = self._blocks[param], form_like(param, torch.float32)
        expected: dict[str, StateForm | None] = {"step": None, "exp_avg": moment, "exp_avg_sq": moment}
        if blocks is not None:
            for key in _STATISTICS:
                side = _side(key, blocks)
                expected[key] = form_over_blocks(param, blocks.grid, torch.float32, (side, side))
        return expected

    def _update_all(self, every_grad: Sequence[dict[int, Tensor]]) -> None:
        for group, grads in zip(self.param_groups, every_grad):
            for index, grad in grads.items():
                self._update(group["params"][index], grad, group)

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        blocks, state = self._blocks[param], self.state[param]
        if not state:
            self._noted = None
            state.update(_new_state(param, blocks))
        state["step"] += 1
        step = int(state["step"])
        scalars = AdamScalars.of(group, step, decoupled=True)
        weight = local_part(param)
        mean, square = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
        if not weight.numel():
            return
        grad = prepared_grad(grad, weight, scalars)
        new_mean, new_square, direction = adam_direction(grad, mean, square, scalars)
        mean.copy_(new_mean)
        square.copy_(new_square)
        if blocks is not None:
            statistics = {key: local_part(state[key]) for key in _STATISTICS}
            statistics = {key: s.view(-1, *s.shape[-2:]) for key, s in statistics.items()}
            _accumulate(statistics, _as_matrices(grad, blocks), group["betas"][1])
            since_start = step - group["start_step"]
            if since_start >= 0 and since_start % group["root_interval"] == 0:
                _renew_roots(statistics, group)
            if since_start >= 0:
                grafted = _grafted(_as_matrices(mean, blocks), _as_matrices(direction, blocks), statistics)
                whole = F.pad(grafted, (0, blocks.grid.block_cols - grafted.shape[-1]))
                direction = from_blocks(whole.flatten(1), blocks).view(weight.shape)
        weight.copy_(widened(weight) * scalars.decay_factor - direction * scalars.step_size)


_RANGES = {
    **ADAM_RANGES,
    "root_interval": "at least 1",
    "start_step": "at least 1",
    "exponent": "positive",
    "damping": "positive",
    "min_numel": "non-negative",
}


def _new_state(param: Tensor, blocks: LocalBlocks | None) -> dict[str, Tensor]:
    state = {"step": torch.zeros((), dtype=torch.float32, device="cpu"), **fresh_moments(param)}
    if blocks is not None:
        device = local_part(param).device
        count = blocks.grid_rows * blocks.grid_cols
        for key in _STATISTICS:
            side = _side(key, blocks)
            zeros = torch.zeros(count, side, side, dtype=torch.float32, device=device)
            state[key] = state_over_blocks(param, blocks.grid, zeros)
    return state


def _side(key: str, blocks: LocalBlocks) -> int:
    """Rows of a preconditioner: those of a block on the left, its columns on the right."""
    grid = blocks.grid
    return grid.block_rows if key.startswith("left") else min(grid.block_cols, grid.cols)


def _as_matrices(values: Tensor, blocks: LocalBlocks) -> Tensor:
    """Local values as (count, rows, columns) blocks; columns beyond the parameter are zero."""
    grid = blocks.grid
    matrices = to_blocks(values.reshape(-1), blocks).view(-1, grid.block_rows, grid.block_cols)
    return matrices[:, :, : min(grid.block_cols, grid.cols)]


def _accumulate(statistics: dict[str, Tensor], grads: Tensor, beta: float) -> None:
    """Running means of G G^T and G^T G."""
    transposed = grads.mT
    for key, product in (("left", (grads, transposed)), ("right", (transposed, grads))):
        statistics[key].mul_(beta).add_((product[0] @ product[1]).mul_(1 - beta))


def _renew_roots(statistics: dict[str, Tensor], group: dict[str, Any]) -> None:
    for key in ("left", "right"):
        root = inverse_root(statistics[key], group["exponent"], group["damping"])
        statistics[f"{key}_root"].copy_(root)


def inverse_root(matrices: Tensor, exponent: float, damping: float) -> Tensor:
    """``M^(-1/exponent)`` of symmetric positive semi-definite (count, n, n) matrices.

    Eigenvalues are raised to at least ``damping`` times the largest, and by as much; a matrix of zeros
    (a block that never had a gradient) gives the identity, one with non-finite entries NaN.
    """
    largest = torch.linalg.matrix_norm(matrices, ord=torch.inf)  # bounds the spectral norm
    finite = largest.isfinite()
    scale = torch.where(finite & (largest > 0), largest, 1.0)[:, None, None]
    values, vectors = _eigh(torch.where(finite[:, None, None], matrices / scale, 0.0))
    top = values[:, -1:].clamp(min=torch.finfo(values.dtype).tiny)
    powers = (values.clamp(min=0) + damping * top) * scale[:, :, 0]
    root = (vectors * powers.pow(-1.0 / exponent)[:, None, :]) @ vectors.mT
    identity = torch.eye(matrices.shape[-1], dtype=root.dtype, device=root.device)
    root = torch.where((largest > 0)[:, None, None], root, identity)
    return torch.where(finite[:, None, None], root, torch.nan)


def _eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors; by fp64 if fp32 does not converge, as may happen to matrices of low rank."""
    try:
        return torch.linalg.eigh(matrices)
    except torch.linalg.LinAlgError:
        values, vectors = torch.linalg.eigh(matrices.double())
        return values.to(matrices.dtype), vectors.to(matrices.dtype)


def _grafted(mean: Tensor, adam: Tensor, statistics: dict[str, Tensor]) -> Tensor:
    """Shampoo's direction with the length of Adam's, block by block."""
    direction = statistics["left_root"] @ mean @ statistics["right_root"]
    length = torch.linalg.matrix_norm(direction, keepdim=True)
    wanted = torch.linalg.matrix_norm(adam, keepdim=True)
    return direction * torch.where(length > 0, wanted / length, 0.0)
