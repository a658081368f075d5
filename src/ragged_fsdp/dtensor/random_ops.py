"""Random numbers on ragged tensors: the values, and the generator, of the unsharded tensor.

Each rank draws the numbers of the whole tensor from its generator (seeded alike on every rank) and
keeps its own piece. Uniform and normal numbers on CPU are drawn in bounded chunks; elsewhere a
generator's order depends on the size drawn, so the whole tensor is drawn at once and freed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from ragged_fsdp.dtensor.construct import wrap_local
from ragged_fsdp.dtensor.errors import refusal
from ragged_fsdp.dtensor.geometry import RaggedLayout, is_ragged, ragged_layout, replicated, with_placements
from ragged_fsdp.dtensor.redistribute import redistribute_local_tensor
from ragged_fsdp.torch_internals import DTensorSpec, local_of, schema_of, spec_of

__all__ = ["run"]

aten = torch.ops.aten

# CPU generators draw these element after element, in blocks of 16 at most: chunks of a multiple of 16
# give the numbers of one large draw.
_CHUNKABLE = {aten.normal_.default, aten.uniform_.default}
_CHUNK_NUMEL = 1 << 22
_BLOCK_NUMEL = 16


def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a random op whose first operand is ragged."""
    tensor = args[0]
    if not (isinstance(tensor, DTensor) and is_ragged(spec_of(tensor))):
        return NotImplemented
    name = schema_of(op).name
    if name.endswith("_"):
        return _in_place(op, args, kwargs)
    if name.endswith("_like"):
        return _alike(op, args, kwargs)
    raise refusal(op, tensor, "its random numbers do not correspond to elements")


def _in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor: DTensor = args[0]
    local, layout = local_of(tensor), ragged_layout(tensor)
    if any(p.is_partial() for p in tensor.placements):
        raise refusal(op, tensor, "it would be written before its pending reduction")
    if local.is_meta:
        return tensor
    sharded = any(isinstance(p, Shard) for p in tensor.placements)
    if op in _CHUNKABLE and local.device.type == "cpu" and not sharded:
        _draw_chunks(op, local, layout, args[1:], kwargs)
    else:
        full = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
        op(full, *args[1:], **kwargs)
        local.copy_(_own_piece(full, spec_of(tensor)))
    return tensor


def _draw_chunks(
    op: Any, local: torch.Tensor, layout: RaggedLayout, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Draw all numbers in order, through a scratch buffer, keeping those of the own interval."""
    numel, flat = layout.inner_numel, local.view(-1)
    scratch = torch.empty(min(numel, _CHUNK_NUMEL + _BLOCK_NUMEL), dtype=local.dtype)
    begin = 0
    while begin < numel:
        end = begin + _CHUNK_NUMEL
        if numel - end < _BLOCK_NUMEL:  # a last draw of fewer than a block would take another path
            end = numel
        drawn = op(scratch[: end - begin], *args, **kwargs)
        lo, hi = max(begin, layout.start), min(end, layout.stop)
        if lo < hi:
            flat[lo - layout.start : hi - layout.start] = drawn[lo - begin : hi - begin]
        begin = end


def _alike(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor: DTensor = args[0]
    local = local_of(tensor)
    if local.is_meta:
        drawn = op(local, *args[1:], **kwargs)
    else:
        model = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
        drawn = _own_piece(op(model, *args[1:], **kwargs), spec_of(tensor))
    return wrap_local(drawn, with_placements(spec_of(tensor), tensor.placements, dtype=drawn.dtype))


def _own_piece(full: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    every = with_placements(spec, replicated(spec.mesh), dtype=full.dtype)
    return redistribute_local_tensor(full, every, with_placements(every, spec.placements))
