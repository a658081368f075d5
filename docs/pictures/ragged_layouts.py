"""Draws the layouts of docs/raggedshard.md as SVG, from the layouts that the code computes.

python docs/pictures/ragged_layouts.py        # rewrites the .svg files beside this script
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from torch.distributed.tensor import Placement, Replicate, Shard

from ragged_fsdp.dtensor.geometry import compute_layout
from ragged_fsdp.placement import RaggedShard, StridedRaggedShard

__all__ = ["PICTURES", "Panel", "draw", "owners"]

COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")
CELL, GAP, TOP = 22, 34, 24


@dataclass(frozen=True)
class Panel:
    """One tensor under one layout."""

    title: str
    shape: tuple[int, int]
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]


PICTURES: dict[str, tuple[Panel, ...]] = {
    "ragged-granularity.svg": (
        Panel("rows: RaggedShard((0,), (1, 0, 3, 2))", (6, 8), (4,), (RaggedShard((0,), (1, 0, 3, 2)),)),
        Panel(
            "elements: RaggedShard((0, 1), (11, 7, 20, 10))",
            (6, 8),
            (4,),
            (RaggedShard((0, 1), (11, 7, 20, 10)),),
        ),
        Panel(
            "blocks of 2 rows: RaggedShard((0,), (1, 2, 0, 0))",
            (6, 8),
            (4,),
            (RaggedShard((0,), (1, 2, 0, 0)),),
        ),
        Panel("one rank: RaggedShard((0,), (0, 0, 1, 0))", (6, 8), (4,), (RaggedShard((0,), (0, 0, 1, 0)),)),
    ),
    "ragged-composition.svg": (
        Panel(
            "(StridedRaggedShard((0,), (2, 1)), Shard(0))",
            (6, 8),
            (2, 2),
            (StridedRaggedShard((0,), (2, 1)), Shard(0)),
        ),
        Panel(
            "uneven: ((1, 2), (2, 0)), Shard(0), 5 rows",
            (5, 8),
            (2, 2),
            (StridedRaggedShard((0,), ((1, 2), (2, 0))), Shard(0)),
        ),
        Panel("(RaggedShard((0,), (4, 2)), Shard(1))", (6, 8), (2, 2), (RaggedShard((0,), (4, 2)), Shard(1))),
        Panel(
            "(Replicate, RaggedShard((0,), (2, 4)))", (6, 8), (2, 2), (Replicate(), RaggedShard((0,), (2, 4)))
        ),
    ),
}


def owners(panel: Panel) -> dict[tuple[int, int], list[int]]:
    """Which ranks hold each element."""
    held: dict[tuple[int, int], list[int]] = {}
    for rank, coordinate in enumerate(product(*(range(n) for n in panel.mesh_shape))):
        layout = compute_layout(panel.shape, panel.mesh_shape, coordinate, panel.placements)
        for offsets, sizes in layout.boxes():
            for row, column in product(*(range(o, o + s) for o, s in zip(offsets, sizes))):
                held.setdefault((row, column), []).append(rank)
    return held


def draw(panels: tuple[Panel, ...]) -> str:
    """The panels side by side, two per line, with a legend of the ranks."""
    width = max(panel.shape[1] for panel in panels) * CELL + GAP + 120
    height = max(panel.shape[0] for panel in panels) * CELL + TOP + GAP
    lines = math.ceil(len(panels) / 2)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * width}" height="{lines * height + 30}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        out += _panel(panel, 12 + (number % 2) * width, 8 + (number // 2) * height)
    ranks = max(math.prod(panel.mesh_shape) for panel in panels)
    for rank in range(ranks):
        x, y = 12 + rank * 90, lines * height + 8
        out.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{COLORS[rank]}"/>')
        out.append(f'<text x="{x + 20}" y="{y + 12}">rank {rank}</text>')
    return "\n".join([*out, "</svg>", ""])


def _panel(panel: Panel, left: int, top: int) -> list[str]:
    out = [f'<text x="{left}" y="{top + 14}">{panel.title}</text>']
    for (row, column), ranks in sorted(owners(panel).items()):
        x, y = left + column * CELL, top + TOP + row * CELL
        share = CELL / len(ranks)
        for index, rank in enumerate(ranks):
            at, fill = x + index * share, COLORS[rank]
            out.append(f'<rect x="{at:g}" y="{y}" width="{share:g}" height="{CELL}" fill="{fill}"/>')
        out.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="none" stroke="white"/>')
    return out


def main() -> None:
    """Write every picture beside this script."""
    for name, panels in PICTURES.items():
        (Path(__file__).parent / name).write_text(draw(panels))


if __name__ == "__main__":
    main()
