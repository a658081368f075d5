"""Draws ``ragged.svg``, the picture of README: one group on four ranks, laid out by FSDP2 and by us.

Both layouts are computed: FSDP2's by its rule (each tensor cut into equal chunks of rows), ours by the
planner. Run this file to write the picture anew.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ragged_fsdp.planner import plan

__all__ = ["draw", "fsdp2_shards", "ragged_shards"]

RANKS = 4
CELL, HEIGHT, GAP, LEFT = 37, 34, 14, 92
INK, MUTED = "#1f2937", "#6b7280"


@dataclass(frozen=True)
class Row:
    """One row of a tensor; ``block`` counts the blocks that must not be cut. Padding has no name."""

    tensor: str
    block: int = 0


PAD = Row("")
FILL = {"E": ("#8ed1b2", "#4fae89"), "A": ("#9dbcf0",), "B": ("#f6c382",)}
ROWS = {"E": 8, "A": 6, "B": 2}
BLOCK = {"E": 4, "A": 1, "B": 1}


def _rows(tensor: str) -> list[Row]:
    whole = BLOCK[tensor] > 1
    return [Row(tensor, i // BLOCK[tensor] if whole else 0) for i in range(ROWS[tensor])]


def fsdp2_shards() -> list[list[Row]]:
    """Each tensor is cut into equal chunks of rows and padded to them."""
    shards: list[list[Row]] = [[] for _ in range(RANKS)]
    for tensor in ROWS:
        rows, chunk = _rows(tensor), -(-ROWS[tensor] // RANKS)
        for rank, shard in enumerate(shards):
            own = rows[rank * chunk : (rank + 1) * chunk]
            shard += own + [PAD] * (chunk - len(own))
    return shards


def ragged_shards() -> list[list[Row]]:
    """The planner's layout of the group."""
    shard_rows, offsets = plan(list(ROWS.values()), list(BLOCK.values()), RANKS, 1)
    buffer = [PAD] * (RANKS * shard_rows)
    for tensor, offset in zip(ROWS, offsets):
        buffer[offset : offset + ROWS[tensor]] = _rows(tensor)
    return [buffer[rank * shard_rows : (rank + 1) * shard_rows] for rank in range(RANKS)]


def _text(x: float, y: float, text: str, *, size: float = 12.5, fill: str = INK, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" {more}>{text}</text>'


def _cells(rows: Iterable[Row], x: float, y: float) -> list[str]:
    out = []
    for index, row in enumerate(rows):
        left = x + index * CELL
        fill = FILL[row.tensor][row.block] if row.tensor else "url(#pad)"
        label = row.tensor + (str(row.block) if row.tensor == "E" else "")
        out.append(
            f'<rect x="{left:g}" y="{y:g}" width="{CELL}" height="{HEIGHT}" fill="{fill}" stroke="#ffffff" '
            'stroke-width="1.5"/>'
        )
        out.append(_text(left + CELL / 2, y + 22, label, more='text-anchor="middle"'))
    return out


def _ranks(shards: list[list[Row]], y: float) -> list[str]:
    out, x = [_text(16, y + 21, "sharded", fill=MUTED)], float(LEFT)
    for rank, shard in enumerate(shards):
        width = len(shard) * CELL
        out += _cells(shard, x, y)
        out.append(
            f'<rect x="{x - 1.5:g}" y="{y - 1.5:g}" width="{width + 3}" height="{HEIGHT + 3}" rx="5" '
            f'fill="none" stroke="{INK}" stroke-width="2"/>'
        )
        out.append(
            _text(x + width / 2, y - 9, f"rank {rank}", size=11.5, fill=MUTED, more='text-anchor="middle"')
        )
        x += width + GAP
    return out


def _line(label: str, rows: Iterable[Row], y: float) -> list[str]:
    return [_text(16, y + 21, label, fill=MUTED), *_cells(rows, LEFT, y)]


def draw() -> str:
    """The picture as SVG."""
    theirs, ours = fsdp2_shards(), ragged_shards()
    tensors = [row for tensor in ROWS for row in _rows(tensor)]
    padding = sum(row == PAD for shard in theirs for row in shard)
    moved = sum(map(len, theirs)) / sum(map(len, ours)) - 1
    bold = 'font-weight="600"'
    theirs_in_words = (
        f"Both experts are cut; {padding} of {sum(map(len, theirs))} rows are padding; gathered rows are in "
        "the order of the ranks, so they are copied."
    )
    ours_in_words = (
        f"An expert is on one rank; no padding (FSDP2 moves {moved:.0%} more); the gathered buffer is the "
        "parameters: no copy in or out."
    )
    body = [
        _text(16, 30, "FSDP2: every tensor is cut into equal rows", size=16, more=bold),
        *_ranks(theirs, 66),
        *_line("gathered", [row for shard in theirs for row in shard], 118),
        *_line("copied out", tensors, 164),
        _text(LEFT, 222, theirs_in_words, fill=MUTED),
        _text(16, 268, "ragged: one planned buffer, cut between blocks", size=16, more=bold),
        *_ranks(ours, 304),
        *_line("gathered", [row for shard in ours for row in shard], 356),
        _text(LEFT, 414, ours_in_words, fill=MUTED),
    ]
    width = LEFT + max(len(shard) * RANKS for shard in theirs) * CELL + (RANKS - 1) * GAP + 20
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 434" '
            'font-family="system-ui,-apple-system,Segoe UI,Helvetica,DejaVu Sans,sans-serif">',
            '<defs><pattern id="pad" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f3f4f6"/>'
            '<line x1="0" y1="0" x2="0" y2="6" stroke="#cbd0d8" stroke-width="3"/></pattern></defs>',
            f'<rect width="{width}" height="434" rx="10" fill="#ffffff" stroke="#e5e7eb"/>',
            *body,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    (Path(__file__).parent / "ragged.svg").write_text(draw())
