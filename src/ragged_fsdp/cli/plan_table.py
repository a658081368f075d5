"""The tables of ``ragged-fsdp plan``."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ragged_fsdp.cli.plan_advice import Candidate
from ragged_fsdp.cli.plan_report import GroupPlan, ModelPlan

__all__ = ["advice_table", "bytes_text", "group_table", "summary_table"]


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


def _optimal(plan: GroupPlan | ModelPlan) -> str:
    return "proven" if plan.proven else f"within {plan.padding_ratio - plan.bound_ratio:.3%}"


def group_table(plan: ModelPlan, threshold: float) -> Table:
    """One row per group at one FSDP size, and the total."""
    table = Table(title=f"{plan.ranks} ranks", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("group")
    for column in ("tensors", "elements", "shard", "buffer", "per rank", "padding", "bound", "align"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("optimal")
    for group in plan.groups:
        table.add_row(
            group.group.title,
            str(len(group.group.specs)),
            _short(group.numel),
            " + ".join(f"{layout.shard_numel:,}" for layout in group.layouts),
            bytes_text(group.buffer_numel * group.element_bytes),
            bytes_text(group.shard_numel * group.element_bytes),
            _percent(group.padding_ratio, threshold),
            f"{group.bound_ratio:.3%}",
            bytes_text(group.alignment_bytes),
            _optimal(group),
        )
    table.add_section()
    table.add_row(
        "total",
        str(sum(len(group.group.specs) * group.count for group in plan.groups)),
        _short(plan.numel),
        "",
        bytes_text(plan.buffer_numel * plan.element_bytes),
        bytes_text(plan.bytes_per_rank),
        _percent(plan.padding_ratio, threshold),
        f"{plan.bound_ratio:.3%}",
        "",
        _optimal(plan),
        style="bold",
    )
    return table


def summary_table(plans: Sequence[ModelPlan], threshold: float) -> Table:
    """One row per FSDP size."""
    table = Table(title="all groups, by FSDP size", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("ranks", "padding", "bound", "per rank", "largest buffer"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("optimal")
    table.add_column("most padding in")
    for plan in plans:
        worst = plan.worst
        named = f"{worst.group.title} ({worst.padding_ratio:.3%})" if worst and worst.padding_ratio else ""
        table.add_row(
            f"{plan.ranks}",
            _percent(plan.padding_ratio, threshold),
            f"{plan.bound_ratio:.3%}",
            bytes_text(plan.bytes_per_rank),
            bytes_text(plan.largest_buffer_bytes),
            _optimal(plan),
            named,
        )
    return table


def advice_table(candidates: Sequence[Candidate], gpus: int, threshold: float) -> Table:
    """One row per FSDP size that divides the GPUs; the recommended one is marked."""
    table = Table(title=f"FSDP sizes for {gpus} GPUs", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("FSDP", "replicas", "padding", "bound", "state per rank", "largest buffer"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for candidate in candidates:
        verdict = "recommended" if candidate.recommended else "" if candidate.fits else "does not fit"
        table.add_row(
            str(candidate.plan.ranks),
            str(candidate.replicas),
            _percent(candidate.plan.padding_ratio, threshold),
            f"{candidate.plan.bound_ratio:.3%}",
            bytes_text(candidate.state_bytes),
            bytes_text(candidate.plan.largest_buffer_bytes),
            verdict,
            style="bold green" if candidate.recommended else None if candidate.fits else "dim",
        )
    return table
