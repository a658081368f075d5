"""Element-wise ops with a smaller operand that does not broadcast against the local pieces by itself.

A piece whose cut goes through several dims is flat in them, so a row, a column or a ``(1, 1)`` tensor has no
dim of its own to broadcast along. Each element of the piece then takes the value that belongs to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor.construct import whole, wrap_local
from ragged_fsdp.dtensor.errors import refusal
from ragged_fsdp.dtensor.geometry import is_ragged, ragged_layout, with_placements
from ragged_fsdp.torch_internals import local_of, spec_of

__all__ = ["coordinates_of", "run", "values_for"]


def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``op`` with every operand laid out like the largest ragged one; NotImplemented if they are."""
    ragged = [v for v in (*args, *kwargs.values()) if isinstance(v, DTensor) and is_ragged(spec_of(v))]
    lead = max(ragged, key=lambda tensor: (tensor.ndim, tensor.numel()))
    smaller = [isinstance(a, torch.Tensor) and a.ndim > 0 and a.shape != lead.shape for a in args]
    for operand, to_spread in zip(args, smaller):
        if to_spread and torch.broadcast_shapes(operand.shape, lead.shape) != lead.shape:
            raise refusal(op, lead, f"an operand of shape {tuple(operand.shape)} is larger than it")
    if not any(smaller):
        return NotImplemented
    spread = (_like(lead, operand) if to_spread else operand for operand, to_spread in zip(args, smaller))
    return op(*spread, **kwargs)


def _like(lead: DTensor, operand: torch.Tensor) -> DTensor:
    """The operand repeated to the shape of ``lead``: only the piece that this rank needs of it."""
    if isinstance(operand, DTensor):
        operand = whole(operand)
    values = values_for(lead, operand, (0,) * lead.ndim)
    return wrap_local(values, with_placements(spec_of(lead), lead.placements, dtype=values.dtype))


def values_for(tensor: DTensor, values: torch.Tensor, offset: Sequence[int]) -> torch.Tensor:
    """What ``values`` has for each element of the local piece of ``tensor``.

    ``values`` broadcasts against the part of the global tensor that begins at ``offset``.
    """
    here, missing = coordinates_of(tensor), tensor.ndim - values.ndim
    index = [
        here[d + missing] - offset[d + missing] if size != 1 else torch.zeros_like(here[d + missing])
        for d, size in enumerate(values.shape)
    ]
    return values[tuple(index)] if index else values.expand(local_of(tensor).shape)


def coordinates_of(tensor: DTensor) -> list[torch.Tensor]:
    """The index of each element of the local piece along each dim of the global tensor."""
    layout, own, found = ragged_layout(tensor), local_of(tensor), []
    flat = torch.arange(layout.start, layout.stop, device=own.device)
    for size, offset in zip(reversed(layout.inner_shape), reversed(layout.inner_offset)):
        found.append((flat % max(size, 1) + offset).view(own.shape))
        flat = flat // max(size, 1)
    return found[::-1]
