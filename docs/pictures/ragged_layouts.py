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
CELL, GAP, TOP, LEGEND = 22, 30, 24, 216
THIN, THICK = 'stroke="white" stroke-width="0.7"', 'stroke="#222" stroke-width="1.6" stroke-linecap="square"'


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
            "(StridedRaggedShard((0,), ((1, 2), (2, 0))), Shard(0))",
            (5, 8),
            (2, 2),
            (StridedRaggedShard((0,), ((1, 2), (2, 0))), Shard(0)),
        ),
        Panel("(RaggedShard((0,), (4, 2)), Shard(1))", (6, 8), (2, 2), (RaggedShard((0,), (4, 2)), Shard(1))),
        Panel(
            "(Replicate(), RaggedShard((0,), (2, 4)))",
            (6, 8),
            (2, 2),
            (Replicate(), RaggedShard((0,), (2, 4))),
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
    """The panels side by side, two per line, each with its ranks and their local shapes beside it."""
    width = max(panel.shape[1] for panel in panels) * CELL + LEGEND
    height = max(panel.shape[0] for panel in panels) * CELL + TOP + GAP
    lines = math.ceil(len(panels) / 2)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * width}" height="{lines * height}" '
        f'viewBox="0 0 {2 * width} {lines * height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        out += _panel(panel, 12 + (number % 2) * width, 8 + (number // 2) * height)
    return "\n".join([*out, "</svg>", ""])


def _panel(panel: Panel, left: int, top: int) -> list[str]:
    held = owners(panel)
    out = [f'<text x="{left}" y="{top + 14}" font-weight="bold">{panel.title}</text>']
    for (row, column), ranks in sorted(held.items()):
        x, y = left + column * CELL, top + TOP + row * CELL
        share = CELL / len(ranks)
        for index, rank in enumerate(ranks):  # replicas share the cell
            at, fill = x + index * share, COLORS[rank]
            out.append(f'<rect x="{at:g}" y="{y}" width="{share:g}" height="{CELL}" fill="{fill}"/>')
        out.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="none" {THIN}/>')
    out += _cuts(panel, held, left, top + TOP)
    return out + _legend(panel, left + panel.shape[1] * CELL + 16, top + TOP)


def _cuts(panel: Panel, held: dict[tuple[int, int], list[int]], left: int, top: int) -> list[str]:
    """A dark line wherever neighbours belong to different ranks, and around the tensor."""
    out = []
    for row, column in product(range(panel.shape[0] + 1), range(panel.shape[1] + 1)):
        x, y = left + column * CELL, top + row * CELL
        own = held.get((row, column))
        if column < panel.shape[1] and own != held.get((row - 1, column)):
            out.append(f'<line x1="{x}" y1="{y}" x2="{x + CELL}" y2="{y}" {THICK}/>')
        if row < panel.shape[0] and own != held.get((row, column - 1)):
            out.append(f'<line x1="{x}" y1="{y}" x2="{x}" y2="{y + CELL}" {THICK}/>')
    return out


def _legend(panel: Panel, left: int, top: int) -> list[str]:
    """Each rank, its place on a 2-D mesh, and the shape of its local tensor."""
    out = []
    for rank, coordinate in enumerate(product(*(range(n) for n in panel.mesh_shape))):
        layout = compute_layout(panel.shape, panel.mesh_shape, coordinate, panel.placements)
        place = f" at {coordinate}" if len(coordinate) > 1 else ""
        y = top + rank * (CELL + 4)
        out.append(f'<rect x="{left}" y="{y + 2}" width="14" height="14" fill="{COLORS[rank]}"/>')
        out.append(f'<text x="{left + 20}" y="{y + 14}">rank {rank}{place}: {layout.local_shape}</text>')
    return out


def main() -> None:
    """Write every picture beside this script."""
    for name, panels in PICTURES.items():
        (Path(__file__).parent / name).write_text(draw(panels))


if __name__ == "__main__":
    main()
