"""How the kernels of products are cut and run, and how they read codes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ragged_fsdp.fp8.groups import BLOCK

__all__ = ["Config", "described", "launched"]


class Config(NamedTuple):
    """How a product is cut and run."""

    rows: int
    """Rows, and then columns, of a program's tile of the output."""
    columns: int
    warps: int
    stages: int
    """Blocks of the contracted dim that are loaded ahead."""
    parts: int = 1
    """Tiles beside each other that a program computes: they share its rows."""
    each: int = 16
    """Groups whose gradients a program computes."""
    registers: int = 0
    """The most registers of a thread; 0 leaves it to the compiler."""
    together: int = 8
    """Tiles of rows that share columns while those are in the cache."""


def described(codes: Tensor, block_rows: int) -> TensorDescriptor:
    """Codes (rows, columns) in blocks of so many rows and 128 columns."""
    return TensorDescriptor.from_tensor(codes, [block_rows, BLOCK])


def launched(config: Config) -> dict[str, int]:
    """What a launch is given beside the constants of its kernel."""
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return {**options, "maxnreg": config.registers} if config.registers else options
