"""torchao's float8 linear layers, as its documentation uses them on FSDP2: peers of the FP8 products.

=============  =================================  ======================================================
recipe         scales                             what FSDP2 gathers
=============  =================================  ======================================================
``blockwise``  1 x 128 by 128 x 128               bf16; every rank quantises it, forward and backward
``rowwise``    one per row of each operand        bf16; every rank quantises it, forward and backward
``gathered``   one per tensor                     float8 codes: torchao knows them with such scales alone
=============  =================================  ======================================================

The last two are plain torch and meant to be compiled, so each of their layers is; the first has kernels of
its own. Experts, and layers whose sizes or biases a recipe does not take, stay in bf16. On a CPU ``rowwise``
and ``gathered`` are emulated, for tests; ``blockwise`` has no emulation.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["RECIPES", "after_update", "convert"]

RECIPES = ("blockwise", "rowwise", "gathered")
_MULTIPLE = {"blockwise": 128, "rowwise": 16, "gathered": 16}


def convert(stack: nn.Module, recipe: str, device: torch.device) -> None:
    """Put torchao's layers in the place of the linear layers of attention and MLP that the recipe takes."""
    taken = {
        name
        for name, module in stack.named_modules()
        if type(module) is nn.Linear and "router" not in name and _takes(recipe, module)
    }
    if not taken:
        raise ValueError(f"torchao, {recipe}: expected a linear layer that the recipe takes, got none")
    if recipe == "blockwise":
        from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinearConfig
        from torchao.quantization import quantize_

        quantize_(stack, Float8BlockwiseLinearConfig(), filter_fn=lambda module, name: name in taken)
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulated = {"emulate": device.type != "cuda"}
    if recipe == "gathered":
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, **emulated)
    else:
        config = Float8LinearConfig.from_recipe_name(recipe)
        object.__setattr__(config, "emulate", emulated["emulate"])  # recipes have no such argument
    convert_to_float8_training(stack, config=config, module_filter_fn=lambda module, name: name in taken)
    if device.type == "cuda":
        for name in taken:
            stack.get_submodule(name).compile(dynamic=False)


def after_update(stack: nn.Module) -> None:
    """The scales of all weights in one all-reduce, for the next step: ``gathered`` asks for it."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(stack)


def _takes(recipe: str, module: nn.Linear) -> bool:
    if recipe == "blockwise" and module.bias is not None:
        return False
    return not any(size % _MULTIPLE[recipe] for size in (module.in_features, module.out_features))
