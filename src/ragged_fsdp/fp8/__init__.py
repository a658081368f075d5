"""FP8 training: products in E4M3 with scales of blocks, straight from gathered codes."""

from ragged_fsdp.fp8.training import (
    Fp8Linear,
    Watch,
    compute_in_fp8,
    fits,
    fp8_modules,
    fp8_training,
    gather_policy,
    left_out,
    nonfinite,
    orig_param_policy,
)

__all__ = [
    "Fp8Linear",
    "Watch",
    "compute_in_fp8",
    "fits",
    "fp8_modules",
    "fp8_training",
    "gather_policy",
    "left_out",
    "nonfinite",
    "orig_param_policy",
]
