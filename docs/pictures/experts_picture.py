"""Draws ``experts.svg``: the way of the rows of three ranks to five experts and back.

The places of rows are computed as ``AllToAll`` does: order by an expert's place in its rank's list, then by
rank, and an exchange for each such place. Run this file to write the picture anew.
"""

from dataclasses import dataclass
from pathlib import Path

from ragged_fsdp.experts.split import ExpertSplit

__all__ = ["arrived", "draw", "number", "ordered"]

SPLIT = ExpertSplit.even(5, 3)
CHOSEN = [[(1, 4), (0, 2), (1, 3)], [(4, 0), (2, 3), (1, 0)], [(3, 1), (2, 4), (4, 0)]]
"""For each rank its tokens, and of each the two experts that it chose."""
FOLLOWED = (0, 0)
"""The token whose rows are outlined: rank and number."""
NAMES = "abcde"
FILL = ("#9dbcf0", "#c9daf8", "#8ed1b2", "#c4e8d7", "#f6c382")
CELL, HEIGHT, LEFT, GAP = 40, 30, 178, 34
INK, MUTED, LINE = "#1f2937", "#6b7280", 58


@dataclass(frozen=True)
class Slot:
    """A token of a rank on its way to one of its experts."""

    rank: int
    token: int
    expert: int


def slots(rank: int) -> list[Slot]:
    """The slots of a rank, token by token."""
    return [Slot(rank, token, expert) for token, both in enumerate(CHOSEN[rank]) for expert in both]


def number(expert: int) -> int:
    """An expert's place in the list of its rank, and its rank, as one number."""
    rank = max(r for r in range(SPLIT.ranks) if SPLIT.first[r] <= expert)
    return (expert - SPLIT.first[rank]) * SPLIT.ranks + rank


def ordered(rank: int) -> list[Slot]:
    """In the order in which they are sent."""
    return sorted(slots(rank), key=lambda slot: number(slot.expert))


def arrived(rank: int) -> list[Slot]:
    """What a rank receives: for each of its experts, the rows of each rank."""
    first, held = SPLIT.first[rank], SPLIT.held[rank]
    return [
        slot
        for expert in range(first, first + held)
        for other in range(SPLIT.ranks)
        for slot in ordered(other)
        if slot.expert == expert
    ]


def _text(x: float, y: float, text: str, *, size: float = 12.5, fill: str = INK, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" {more}>{text}</text>'


def _cells(row: list[Slot], x: float, y: float) -> list[str]:
    out, outlined = [], []
    for index, slot in enumerate(row):
        left = x + index * CELL
        box = f'x="{left:g}" y="{y:g}" width="{CELL}" height="{HEIGHT}"'
        out.append(f'<rect {box} fill="{FILL[slot.expert]}" stroke="#ffffff" stroke-width="1.5"/>')
        label = f"{NAMES[slot.expert]}{slot.rank}.{slot.token}"
        out.append(_text(left + CELL / 2, y + 20, label, size=11.5, more='text-anchor="middle"'))
        if (slot.rank, slot.token) == FOLLOWED:
            outlined.append(f'<rect {box} fill="none" stroke="{INK}" stroke-width="2.5" rx="3"/>')
    return out + outlined


def draw() -> str:
    """The picture as SVG."""
    most = max(len(way(rank)) for way in (slots, arrived) for rank in range(SPLIT.ranks))
    column = most * CELL + GAP
    width = LEFT + SPLIT.ranks * column - GAP + 20
    steps = [
        ("tokens, two slots each", slots),
        ("take: in order", ordered),
        ("an all-to-all per part", arrived),
    ]
    body = []
    for rank in range(SPLIT.ranks):
        first = SPLIT.first[rank]
        held = ", ".join(NAMES[first : first + SPLIT.held[rank]])
        title = f"rank {rank}: experts {held}" if SPLIT.held[rank] > 1 else f"rank {rank}: expert {held}"
        body.append(_text(LEFT + rank * column, 34, title, size=14, more='font-weight="600"'))
    for step, (label, way) in enumerate(steps):
        y = 54 + step * LINE
        body.append(_text(16, y + 20, label, fill=MUTED))
        for rank in range(SPLIT.ranks):
            body += _cells(way(rank), LEFT + rank * column, y)
    y = 54 + len(steps) * LINE
    last = (
        "Each expert multiplies its rows; the outputs go the same way back, and the slots of a token are "
        "summed with its weights (combine)."
    )
    body.append(_text(16, y + 6, last, fill=MUTED))
    body.append(_text(16, y + 26, "Outlined: the two rows of token 0 of rank 0.", fill=MUTED))
    height = y + 44
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="system-ui,-apple-system,Segoe UI,Helvetica,DejaVu Sans,sans-serif">',
            f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff" stroke="#e5e7eb"/>',
            *body,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    (Path(__file__).parent / "experts.svg").write_text(draw())
