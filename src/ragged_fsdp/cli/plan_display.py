"""How ``ragged-fsdp plan`` shows its answers: tables, a picture of one layout, curves of the padding.

In a picture ranks are rows, tensors are coloured and padding is hatched.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import ascii_letters
from typing import Literal

import click
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape as markup_escape
from rich.table import Table
from rich.text import Text

from ragged_fsdp.cli.plan_costs import Candidate, PlannedGroup, PlannedModel, short_name
from ragged_fsdp.cli.plan_network import NetworkPlan
from ragged_fsdp.layout import GroupLayout

__all__ = [
    "Column",
    "Curve",
    "advice_table",
    "ascii_picture",
    "bytes_text",
    "draw_curves",
    "errors_in_one_line",
    "fitted_table",
    "group_table",
    "network_table",
    "output_console",
    "plot",
    "summary_table",
    "svg_picture",
]

_PADDING = "░"
_TERMINAL = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
_SVG = ("#7ba6d6", "#f9a03f", "#7cc36e", "#c79ab9", "#ee8683", "#80c8c2", "#c2a083", "#f2d664", "#c6c6c6")


def output_console() -> Console:
    """The terminal; into a file or a pipe lines are as long as tables need, unless ``COLUMNS`` is set."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=140)


@contextmanager
def errors_in_one_line(status: Console) -> Iterator[None]:
    """Print what the user got wrong without a traceback, and exit with 2."""
    try:
        yield
    except BrokenPipeError:  # who reads has seen enough: click ends the process without a word
        raise
    except (ValueError, TypeError, OSError) as error:
        status.print(f"[red]Error:[/] {markup_escape(str(error))}", highlight=False, soft_wrap=True)
        raise click.exceptions.Exit(2) from None


def bytes_text(count: int) -> str:
    """A number of bytes in the largest binary unit that keeps it above one."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.2f} {units[0]}"


def _short(count: int) -> str:
    """A number of elements with a decimal prefix."""
    for size, letter in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)


def _percent(ratio: float, threshold: float) -> str:
    text = f"{ratio:.3%}"
    return f"[yellow]{text}[/]" if ratio > threshold else text


def _optimal(plan: PlannedGroup | PlannedModel) -> str:
    return "proven" if plan.proven else f"within {plan.padding_ratio - plan.bound_ratio:.3%}"


@dataclass(frozen=True)
class Column:
    """A column of a table; where the terminal is narrow, those with the largest ``spare`` go first."""

    name: str
    spare: int = 0
    text: bool = False
    """Whether it is of words, at the left, and may be wrapped."""


def fitted_table(
    title: str, columns: Sequence[Column], rows: Sequence[tuple[Sequence[str], str | None]], width: int
) -> Table:
    """A table of at most ``width`` columns of text; a row is its cells and a style.

    What does not fit is left out by column, and the title says which: cells are never cut. ``---`` as the
    only cell of a row draws a line.
    """
    cells = [row for row, _ in rows if len(row) == len(columns)]
    needed = [
        max(cell_len(Text.from_markup(text).plain) for text in (column.name, *(row[i] for row in cells)))
        for i, column in enumerate(columns)
    ]
    shown = list(range(len(columns)))
    while sum(needed[i] + 3 for i in shown) > width:
        least = max((i for i in shown if columns[i].spare), key=lambda i: columns[i].spare, default=None)
        if least is None:
            break
        shown.remove(least)
    left_out = [columns[i].name for i in range(len(columns)) if i not in shown]
    if left_out:
        title += f" (not shown at this width: {', '.join(left_out)})"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i in shown:
        column = columns[i]
        justify: Literal["left", "right"] = "left" if column.text else "right"
        table.add_column(column.name, justify=justify, no_wrap=not column.text)
    for row, style in rows:
        if len(row) != len(columns):
            table.add_section()
        else:
            table.add_row(*(row[i] for i in shown), style=style)
    return table


_LINE: tuple[Sequence[str], str | None] = (("---",), None)


def group_table(plan: PlannedModel, threshold: float, width: int) -> Table:
    """One row per group at one FSDP size, and the total."""
    columns = (
        Column("group", text=True),
        Column("tensors", 4),
        Column("elements", 1),
        Column("shard", 3),
        Column("buffer"),
        Column("per rank"),
        Column("padding"),
        Column("bound", 2),
        Column("FSDP2"),
        Column("align", 6),
        Column("optimal", 5, text=True),
    )
    rows: list[tuple[Sequence[str], str | None]] = []
    for group in plan.groups:
        cells = (
            group.group.title,
            str(len(group.group.specs)),
            _short(group.numel),
            " + ".join(f"{layout.shard_numel:,}" for layout in group.layouts),
            bytes_text(group.buffer_numel * group.element_bytes),
            bytes_text(group.shard_numel * group.element_bytes),
            _percent(group.padding_ratio, threshold),
            f"{group.bound_ratio:.3%}",
            f"{group.fsdp2_ratio:.3%}",
            bytes_text(group.alignment_bytes),
            _optimal(group),
        )
        rows.append((cells, None))
    total = (
        "total",
        str(sum(len(group.group.specs) * group.count for group in plan.groups)),
        _short(plan.numel),
        "",
        bytes_text(plan.buffer_numel * plan.element_bytes),
        bytes_text(plan.bytes_per_rank),
        _percent(plan.padding_ratio, threshold),
        f"{plan.bound_ratio:.3%}",
        f"{plan.fsdp2_ratio:.3%}",
        "",
        _optimal(plan),
    )
    title = f"{plan.ranks} ranks; padding of this layout, and FSDP2's"
    return fitted_table(title, columns, [*rows, _LINE, (total, "bold")], width)


def summary_table(plans: Sequence[PlannedModel], threshold: float, width: int) -> Table:
    """One row per FSDP size."""
    columns = (
        Column("ranks"),
        Column("padding"),
        Column("bound", 1),
        Column("FSDP2"),
        Column("per rank"),
        Column("largest buffer"),
        Column("optimal", 2, text=True),
        Column("most padding in", 3, text=True),
    )
    rows = []
    for plan in plans:
        worst = plan.worst
        cells = (
            f"{plan.ranks}",
            _percent(plan.padding_ratio, threshold),
            f"{plan.bound_ratio:.3%}",
            f"{plan.fsdp2_ratio:.3%}",
            bytes_text(plan.bytes_per_rank),
            bytes_text(plan.largest_buffer_bytes),
            _optimal(plan),
            f"{worst.group.title} ({worst.padding_ratio:.3%})" if worst and worst.padding_ratio else "",
        )
        rows.append((cells, None))
    return fitted_table("all groups, by FSDP size", columns, rows, width)


def network_table(networks: Sequence[NetworkPlan], width: int) -> Table:
    """What one GPU sends in a step over either link, by FSDP size; what ``auto`` picks is marked."""
    columns = (
        Column("levels", text=True),
        Column("collective", text=True),
        Column("inside its node"),
        Column("over its card"),
        Column("", text=True),
    )
    rows: list[tuple[Sequence[str], str | None]] = []
    for network in networks:
        picked = next(entry for entry in network.traffic if entry.collective == network.auto)
        for number, entry in enumerate(network.traffic):
            cells = (
                "" if number else str(network.levels),
                f"{entry.collective}: {entry.detail}",
                bytes_text(entry.inside_bytes),
                bytes_text(entry.card_bytes),
                "auto" if entry is picked else "",
            )
            rows.append((cells, "bold green" if entry is picked else None))
        rows.append(_LINE)
    return fitted_table(
        "bytes a GPU sends in a step, nothing kept between forward and backward", columns, rows, width
    )


def advice_table(candidates: Sequence[Candidate], gpus: int, threshold: float, width: int) -> Table:
    """One row per FSDP size that divides the GPUs; the recommended one is marked."""
    columns = (
        Column("FSDP"),
        Column("replicas"),
        Column("padding"),
        Column("bound", 2),
        Column("FSDP2", 1),
        Column("state per rank"),
        Column("largest buffer", 3),
        Column("", text=True),
    )
    rows = []
    for candidate in candidates:
        cells = (
            str(candidate.plan.ranks),
            str(candidate.replicas),
            _percent(candidate.plan.padding_ratio, threshold),
            f"{candidate.plan.bound_ratio:.3%}",
            f"{candidate.plan.fsdp2_ratio:.3%}",
            bytes_text(candidate.state_bytes),
            bytes_text(candidate.plan.largest_buffer_bytes),
            "recommended" if candidate.recommended else "" if candidate.fits else "does not fit",
        )
        rows.append((cells, "bold green" if candidate.recommended else None if candidate.fits else "dim"))
    return fitted_table(f"FSDP sizes for {gpus} GPUs", columns, rows, width)


@dataclass(frozen=True)
class _Stretch:
    """The part of one tensor, or of padding, that lies on one rank; positions within the shard."""

    start: int
    end: int
    index: int | None


def _rows(layout: GroupLayout) -> Iterator[list[_Stretch]]:
    """The stretches of each rank in turn."""
    shard = layout.shard_numel
    row: list[_Stretch] = []
    rank = 0
    for start, end, index in layout.runs():
        while start < end:
            stop = min(end, (rank + 1) * shard)
            row.append(_Stretch(start - rank * shard, stop - rank * shard, index))
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
    layout: GroupLayout, row: list[_Stretch], columns: int, families: dict[str, int]
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
        if members[0].tile is not None:
            blocked = f"tiles of {members[0].tile[0]} x {members[0].tile[1]}"
        legend.append(f"{name}  {len(members)} x {members[0].numel:,}, {blocked}\n")
    legend.append(f"  {_PADDING} padding  {layout.padding_numel:,} elements, {layout.padding_ratio:.3%}\n")
    return legend


def svg_picture(layout: GroupLayout, title: str, most_rows: int = 128) -> str:
    """A layout as a vector image: stretches of tensors with their elements, and their ranges as tooltips."""
    families, colours = _families(layout), _svg_colours(layout)
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
        for stretch in lines.get(rank, []):
            body.append(_svg_stretch(layout, stretch, rank, colours, left, width, y, row_height - 2))
    bottom = 40 + len(wanted) * row_height + 20
    body += _svg_legend(layout, families, colours, left, bottom)
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


def _svg_stretch(
    layout: GroupLayout,
    stretch: _Stretch,
    rank: int,
    colours: dict[str, tuple[str, bool]],
    left: int,
    width: int,
    y: int,
    height: int,
) -> str:
    numel = stretch.end - stretch.start
    x = left + width * stretch.start / layout.shard_numel
    extent = width * numel / layout.shard_numel
    if stretch.index is None:
        fill, opacity, name, text = "url(#pad)", 1.0, f"padding {numel:,} elements", ""
    else:
        spec = layout.specs[stretch.index]
        family = short_name(spec.name)
        fill, several = colours[family]
        opacity = 0.7 if several and stretch.index % 2 else 1.0  # neighbours of one family, such as experts
        first = rank * layout.shard_numel + stretch.start - layout.offsets[stretch.index]
        name = f"{spec.name} elements {first:,} to {first + numel:,}"
        texts = (f"{family} {numel:,}", f"{numel:,}", "")  # what fits, at six units a letter
        text = next(text for text in texts if 6 * len(text) + 8 <= extent or not text)
    number = f'<text x="{x + 4:.2f}" y="{y + height - 3}" font-size="10" fill="#000">{escape(text)}</text>'
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{extent:.2f}" height="{height}" fill="{fill}" '
        f'fill-opacity="{opacity}"><title>{escape(name)}</title></rect>' + (number if text else "")
    )


def _svg_colours(layout: GroupLayout) -> dict[str, tuple[str, bool]]:
    """A colour for each family of tensors, no two alike, and whether it has several members.

    The largest families have the colours that differ most.
    """
    numel, members = Counter[str](), Counter(short_name(spec.name) for spec in layout.specs)
    for spec in layout.specs:
        numel[short_name(spec.name)] += spec.numel
    found = {}
    for place, (name, _) in enumerate(numel.most_common()):
        more = place - len(_SVG)
        hue, light = 137.508 * more % 360, (72, 58, 82)[more % 3]  # the golden angle comes to no hue twice
        colour = _SVG[place] if more < 0 else f"hsl({hue:.0f} 45% {light}%)"
        found[name] = colour, members[name] > 1
    return found


def _svg_legend(
    layout: GroupLayout, families: dict[str, int], colours: dict[str, tuple[str, bool]], left: int, top: int
) -> Iterator[str]:
    entries = [(name, colours[name][0]) for name in families]
    entries.append((f"padding {layout.padding_ratio:.3%}", "url(#pad)"))
    for line, (name, fill) in enumerate(entries):
        y = top + 16 * line
        yield f'<rect x="{left}" y="{y}" width="12" height="12" fill="{fill}"/>'
        yield f'<text x="{left + 18}" y="{y + 10}">{escape(name)}</text>'


@dataclass(frozen=True)
class Curve:
    """One line of the figure: FSDP sizes and the padding there, as a ratio."""

    label: str
    ranks: Sequence[int]
    padding: Sequence[float]
    dashed: bool = False


def draw_curves(axes: object, title: str, curves: Sequence[Curve]) -> None:
    """Draw ``curves`` on matplotlib ``axes``."""
    for curve in curves:
        style = "--" if curve.dashed else "-"
        marker = "o" if len(curve.ranks) < 20 else None
        percent = [100 * ratio for ratio in curve.padding]
        axes.plot(curve.ranks, percent, style, marker=marker, markersize=3, linewidth=1.2, label=curve.label)
    axes.set_title(title)
    axes.set_xlabel("FSDP size (ranks)")
    axes.set_ylabel("padding (% of the parameters)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def plot(path: Path, title: str, curves: Sequence[Curve]) -> None:
    """Write the figure to ``path``; its suffix (svg, png, pdf) decides the format."""
    if path.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise ValueError(f"plot {str(path)!r}: the suffix must be .svg, .png or .pdf.")
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    draw_curves(axes, title, curves)
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    plt.close(figure)
