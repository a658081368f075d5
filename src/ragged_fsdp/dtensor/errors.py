"""The error for operations that have no meaning on ragged tensors."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from ragged_fsdp.torch_internals import spec_of

__all__ = ["RaggedOpError", "refusal"]


class RaggedOpError(NotImplementedError):
    """An operation that a ragged tensor does not support; the message names the way out."""


def refusal(op: Any, operand: Any, why: str) -> RaggedOpError:
    """The error for ``op`` on ``operand`` (a DTensor or a spec), raised alike on every rank."""
    spec = spec_of(operand) if isinstance(operand, DTensor) else operand
    return RaggedOpError(
        f"{op} of a ragged tensor: {why}; shape {tuple(spec.shape)}, placements {spec.placements}. "
        "Use full_tensor() for the whole tensor, redistribute(placements=...) for another layout, or "
        "to_local() for this rank's piece."
    )
