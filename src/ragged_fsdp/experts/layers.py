"""What the experts of a layer are: how many, which parameters hold them, and how they are applied to rows.

Two kinds of modules are known. One says so itself, by having what :class:`GroupedExperts` names. The other
is a module of transformers in which all experts of a layer are fused (the class is decorated with
``use_experts_implementation``): Qwen3-MoE, GPT-OSS, DeepSeek-V3, Mixtral and everything written like them.
Both are called as ``experts(tokens (N, D), chosen (N, K), weights (N, K)) -> (N, D)``.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ragged_fsdp.fsdp.parts.left_out import MANAGED_ATTRIBUTE
from ragged_fsdp.fsdp.parts.members import CODES_ATTRIBUTE, PRODUCT_ATTRIBUTE

__all__ = [
    "GroupedExperts",
    "apply_experts",
    "expert_count",
    "expert_modules",
    "expert_parameters",
    "grouped_linear",
    "held_part",
    "in_one_kernel",
]

_FUSED = ("num_experts", "has_gate", "has_bias", "is_transposed", "down_proj", "_apply_gate")
"""What transformers gives a module of fused experts."""


@runtime_checkable
class GroupedExperts(Protocol):
    """What a module of experts must have to be split over ranks.

    Parameters whose first dim is ``num_experts`` are split, along that dim. The others stay whole; where
    ``fully_shard`` takes the module by itself, their gradients are added up over the ranks in backward. The
    module's ``forward`` takes tokens (N, D), chosen experts (N, K) and weights (N, K).
    """

    num_experts: int

    def apply_to_groups(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows (R, D), ``counts[i]`` of them for the i-th expert that this rank holds, to their outputs.

        The parameters hold this rank's experts alone: :func:`held_part` of them. A rank without rows or
        experts calls it too, and its result must depend on the same parameters, as that of
        :func:`grouped_linear` does: ranks wait for each other in backward.

        Rows after the last group are padding, whose outputs and gradients are not used. What
        :func:`grouped_linear` makes of them on a GPU may be nan, though, and their gradient of zero times nan
        is nan: mask them before they meet a parameter that all experts share.
        """
        ...


def is_experts(module: nn.Module) -> bool:
    """Whether the module holds experts of a known kind."""
    return isinstance(module, GroupedExperts) or all(hasattr(module, name) for name in _FUSED)


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of experts in ``model``, by name."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def expert_count(module: nn.Module) -> int:
    """How many experts the layer has, on all ranks together."""
    return int(module.num_experts)  # type: ignore[arg-type]


def expert_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that hold one entry per expert, by name."""
    count = expert_count(module)
    return {n: p for n, p in module.named_parameters(recurse=False) if p.ndim and p.shape[0] == count}


def apply_experts(module: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
    """Rows grouped by the experts that this rank holds to their outputs; rows after them are padding."""
    if isinstance(module, GroupedExperts):
        return module.apply_to_groups(rows, counts)
    fused: Any = module
    up = _linear(fused, "gate_up_proj" if fused.has_gate else "up_proj", rows, counts)
    hidden = fused._apply_gate(up) if fused.has_gate else fused.act_fn(up)
    outputs = _linear(fused, "down_proj", hidden, counts)
    if getattr(fused, "has_post_expert_norm", False):
        # padding holds anything, and times a gradient of zero that may still be NaN in the norm's weight
        padding = torch.arange(len(rows), device=rows.device) >= counts.sum()
        outputs = fused.post_expert_norm(outputs.masked_fill(padding.unsqueeze(-1), 0.0))
    return outputs


def _linear(module: Any, name: str, rows: Tensor, counts: Tensor) -> Tensor:
    weight, bias = held_part(getattr(module, name)), getattr(module, f"{name}_bias", None)
    own_bias = None if bias is None else held_part(bias)
    return grouped_linear(rows, weight, counts, own_bias, transposed=not module.is_transposed)


def held_part(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter: all of it, or its experts."""
    if not isinstance(parameter, DTensor):
        return parameter
    local = parameter.to_local()
    for name in (PRODUCT_ATTRIBUTE, CODES_ATTRIBUTE, MANAGED_ATTRIBUTE):  # what says how to compute with it
        if hasattr(parameter, name):
            setattr(local, name, getattr(parameter, name))
    return local


def grouped_linear(
    rows: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None, *, transposed: bool = False
) -> Tensor:
    """Rows (R, D), grouped by expert with these counts, times their expert's matrix of (E, D, F).

    ``transposed`` matrices are (E, F, D). Rows after the groups come out as zeros, or as anything at all:
    nobody may use them. A weight that FP8 products compute with (:mod:`ragged_fsdp.fp8`) says so itself.
    """
    product = getattr(weight, PRODUCT_ATTRIBUTE, None)
    if product is None:
        rows = rows.to(weight.dtype)  # without rows too: other ranks send their outputs in this dtype
        weight = weight.transpose(-2, -1) if transposed else weight
    if not len(weight) or not len(rows):
        # no group, but autograd must reach both: the ranks wait for each other in its collectives
        columns = weight.shape[-2 if product is not None and transposed else -1]
        out = rows.sum() * rows.new_zeros(len(rows), columns) + weight.expand(0, *weight.shape).sum()
        return out if bias is None else out + bias.sum(0) * 0
    if product is not None:
        out = product.grouped(rows, weight, counts, transposed)
    else:
        grouped = rows.is_cuda and rows.dtype == torch.bfloat16
        out = (in_one_kernel if grouped else _one_by_one)(rows, weight, counts)
    if bias is None:
        return out
    # rows after the groups use an entry of zeros: their gradient is garbage and must reach no expert
    ends = counts.cumsum(0)
    expert = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)
    return out + torch.cat((bias, bias.new_zeros(1, bias.shape[-1])))[expert]


def _one_by_one(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Apply one expert after the other: the plain way, which asks the device for the counts."""
    sizes = counts.tolist()
    *parts, padding = rows.split([*sizes, len(rows) - sum(sizes)])
    outputs = [part @ weight[expert] for expert, part in enumerate(parts)]
    return torch.cat([*outputs, padding.new_zeros(len(padding), weight.shape[-1])])


def in_one_kernel(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Do what ``_one_by_one`` does in one kernel, without asking the device for the counts."""
    return F.grouped_mm(rows, weight, offs=counts.cumsum(0, dtype=torch.int32))
