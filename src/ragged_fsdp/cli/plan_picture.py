"""Pictures of one layout: ranks as rows, tensors as coloured runs, padding hatched."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from string import ascii_letters

from rich.text import Text

from ragged_fsdp.cli.plan_report import short_name
from ragged_fsdp.layout import GroupLayout

__all__ = ["ascii_picture", "svg_picture"]

_PADDING = "░"
_TERMINAL = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
_SVG = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b", "#ff9da6")


@dataclass(frozen=True)
class _Run:
    """The part of one tensor, or of padding, that lies on one rank; positions within the shard."""

    start: int
    end: int
    index: int | None


def _rows(layout: GroupLayout) -> Iterator[list[_Run]]:
    """The runs of each rank in turn."""
    shard = layout.shard_numel
    row: list[_Run] = []
    rank = 0
    for start, end, index in layout.runs():
        while start < end:
            stop = min(end, (rank + 1) * shard)
            row.append(_Run(start - rank * shard, stop - rank * shard, index))
            start = stop
            if stop == (rank + 1) * shard:
                yield row
                row, rank = [], rank + 1


def _families(layout: GroupLayout) -> dict[str, int]:
    """Tensors that differ only in the number of a layer or an expert share a colour."""
    names = dict.fromkeys(short_name(spec.name) for spec in layout.specs if spec.numel)
    return {name: place for place, name in enumerate(names)}


def _shown(ranks: int, most: int) -> list[int | None]:
    """Ranks to draw; None stands for those left out in the middle."""
    if ranks <= most:
        return list(range(ranks))
    tail = max(1, most // 4)
    return [*range(most - tail), None, *range(ranks - tail, ranks)]


def ascii_picture(layout: GroupLayout, width: int, most_rows: int = 32) -> Text:
    """One line per rank, one letter per kind of tensor; small and capital letters tell neighbours apart."""
    families = _families(layout)
    picture = Text()
    if not layout.shard_numel:
        return picture.append("(no elements)\n")
    label = len(str(layout.ranks - 1)) + len("rank  ")
    columns = max(8, width - label - 1)
    wanted = _shown(layout.ranks, most_rows)
    drawn = {rank for rank in wanted if rank is not None}
    lines = {rank: row for rank, row in enumerate(_rows(layout)) if rank in drawn}
    for rank in wanted:
        if rank is None:
            picture.append(f"{'...':>{label}}  {layout.ranks - len(drawn)} more ranks\n", style="dim")
            continue
        picture.append(f"rank {rank:>{label - 6}} ", style="bold")
        for symbol, style in _cells(layout, lines[rank], columns, families):
            picture.append(symbol, style=style)
        picture.append("\n")
    picture.append_text(_legend(layout, families))
    return picture


def _cells(
    layout: GroupLayout, row: list[_Run], columns: int, families: dict[str, int]
) -> Iterator[tuple[str, str]]:
    """What lies at the middle of each of ``columns`` equal parts of a shard."""
    place = 0
    for column in range(columns):
        middle = (2 * column + 1) * layout.shard_numel // (2 * columns)
        while row[place].end <= middle:
            place += 1
        index = row[place].index
        if index is None:
            yield _PADDING, "dim"
        else:
            family = families[short_name(layout.specs[index].name)]
            letter = ascii_letters[family % 26]
            yield letter.upper() if index % 2 else letter, _TERMINAL[family % len(_TERMINAL)]


def _legend(layout: GroupLayout, families: dict[str, int]) -> Text:
    legend = Text()
    for name, family in families.items():
        members = [spec for spec in layout.specs if short_name(spec.name) == name and spec.numel]
        blocks = sorted({spec.block_numel for spec in members})
        legend.append(f"  {ascii_letters[family % 26]} ", style=_TERMINAL[family % len(_TERMINAL)])
        blocked = "element-wise" if blocks == [1] else f"blocks of {', '.join(f'{b:,}' for b in blocks)}"
        legend.append(f"{name}  {len(members)} x {members[0].numel:,}, {blocked}\n")
    legend.append(f"  {_PADDING} padding  {layout.padding_numel:,} elements, {layout.padding_ratio:.3%}\n")
    return legend


def svg_picture(layout: GroupLayout, title: str, most_rows: int = 128) -> str:
    """The same as a vector image; every run carries its tensor and range as a tooltip."""
    families = _families(layout)
    width, left, row_height = 960, 90, 14
    wanted = _shown(layout.ranks, most_rows)
    drawn = {rank for rank in wanted if rank is not None}
    lines = {rank: row for rank, row in enumerate(_rows(layout)) if rank in drawn}
    body: list[str] = []
    for line, rank in enumerate(wanted):
        y = 40 + line * row_height
        if rank is None:
            body.append(f'<text x="{left}" y="{y + 10}">... {layout.ranks - len(drawn)} more ranks</text>')
            continue
        body.append(f'<text x="{left - 8}" y="{y + 10}" text-anchor="end">rank {rank}</text>')
        for run in lines.get(rank, []):
            body.append(_svg_run(layout, run, rank, families, left, width, y, row_height - 2))
    bottom = 40 + len(wanted) * row_height + 20
    body += _svg_legend(layout, families, left, bottom)
    height = bottom + 16 * (len(families) + 1) + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 20}" height="{height}" '
        'font-family="monospace" font-size="11">\n'
        '<defs><pattern id="pad" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" fill="#fff"/>'
        '<line x1="0" y1="0" x2="0" y2="6" stroke="#999" stroke-width="2"/></pattern></defs>\n'
        '<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text x="{left}" y="22" font-size="14">{escape(title)}</text>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _svg_run(
    layout: GroupLayout,
    run: _Run,
    rank: int,
    families: dict[str, int],
    left: int,
    width: int,
    y: int,
    height: int,
) -> str:
    x = left + width * run.start / layout.shard_numel
    extent = width * (run.end - run.start) / layout.shard_numel
    if run.index is None:
        fill, opacity, name = "url(#pad)", 1.0, "padding"
    else:
        spec = layout.specs[run.index]
        fill = _SVG[families[short_name(spec.name)] % len(_SVG)]
        opacity = 0.75 if run.index % 2 else 1.0
        first = rank * layout.shard_numel + run.start - layout.offsets[run.index]
        name = f"{spec.name} elements {first:,} to {first + run.end - run.start:,}"
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{extent:.2f}" height="{height}" fill="{fill}" '
        f'fill-opacity="{opacity}"><title>{escape(name)}</title></rect>'
    )


def _svg_legend(layout: GroupLayout, families: dict[str, int], left: int, top: int) -> Iterator[str]:
    entries = [(name, _SVG[place % len(_SVG)]) for name, place in families.items()]
    entries.append((f"padding {layout.padding_ratio:.3%}", "url(#pad)"))
    for line, (name, fill) in enumerate(entries):
        y = top + 16 * line
        yield f'<rect x="{left}" y="{y}" width="12" height="12" fill="{fill}"/>'
        yield f'<text x="{left + 18}" y="{y + 10}">{escape(name)}</text>'
