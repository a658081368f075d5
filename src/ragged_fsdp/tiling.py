"""Between a tensor's ordinary order and that of its tiles: the copies that tile and untile.

:class:`~ragged_fsdp.policy.Tiles` says what the stored order is. Its column panels are strided views on both
sides, so that a whole tensor is copied with one call for each size of tiles, at most four, and a copy that
casts or scatters anyway tiles on the way. Everything else in the package counts in the stored order.
"""

from __future__ import annotations

import torch

from ragged_fsdp.policy import TileKind, Tiles

__all__ = ["kind_views", "tiled", "untiled"]


_WIDE = torch.complex128


def kind_views(
    flat: torch.Tensor, whole: torch.Tensor, tile: tuple[int, int], *, wide: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views of alike shape (panels, ..., rows, tile columns) for each size of tiles: stored, and ordinary.

    ``flat`` has the elements of ``whole`` in the stored order; ``whole`` may have any strides. ``wide`` views
    are for copies alone: where a row of a tile is made of 16 bytes they have elements of 16 bytes, which a
    device copies several times faster than small ones that do not lie behind each other.
    """
    views = [
        (_stored(flat, kind, whole.shape), _ordinary(whole, kind)) for kind in Tiles(*tile).kinds(whole.shape)
    ]
    if wide and flat.dtype == whole.dtype:
        return [tuple(v.view(_WIDE) for v in pair) if all(map(_fits, pair)) else pair for pair in views]  # type: ignore[misc]
    return views


def _fits(view: torch.Tensor) -> bool:
    """Whether rows of a tile begin and end at multiples of 16 bytes."""
    counts = (view.storage_offset(), view.shape[-1], *view.stride()[:-1])
    return view.stride(-1) == 1 and all(count * view.itemsize % _WIDE.itemsize == 0 for count in counts)


def _stored(flat: torch.Tensor, kind: TileKind, shape: torch.Size) -> torch.Tensor:
    part = flat.narrow(0, kind.start, kind.numel)
    return part.view(-1, *shape[:-2], kind.rows, kind.tile_columns)


def _ordinary(whole: torch.Tensor, kind: TileKind) -> torch.Tensor:
    part = whole.narrow(-2, kind.first_row, kind.rows).narrow(-1, kind.first_column, kind.columns)
    return part.unflatten(-1, (-1, kind.tile_columns)).movedim(-2, 0)


def tiled(whole: torch.Tensor, tile: tuple[int, int] | None) -> torch.Tensor:
    """The elements of ``whole`` in the order of its tiles, flat: a copy; without a tile a view."""
    if tile is None:
        return whole.reshape(-1)
    flat = whole.new_empty(whole.numel())
    for stored, ordinary in kind_views(flat, whole, tile, wide=True):
        stored.copy_(ordinary)
    return flat


def untiled(
    flat: torch.Tensor, shape: torch.Size | tuple[int, ...], tile: tuple[int, int] | None
) -> torch.Tensor:
    """The tensor of ``shape`` whose elements ``flat`` has in the order of its tiles: a copy, or a view."""
    if tile is None:
        return flat.view(shape)
    whole = flat.new_empty(shape)
    for stored, ordinary in kind_views(flat, whole, tile, wide=True):
        ordinary.copy_(stored)
    return whole
