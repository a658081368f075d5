"""Results as tables: ratios to the compute floor and to the bound, and copies beside collectives."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from .case import Case
from .implementations import SETTINGS
from .network import WireName, network_of, wire_text

__all__ = [
    "LABELS",
    "bound_ms",
    "case_of",
    "copies_ms",
    "copy_table",
    "error_table",
    "floor_ms",
    "headline",
    "load",
    "markdown",
    "markdown_table",
    "other_tables",
    "overhead_table",
    "own_bound_ms",
    "ratio_table",
    "real_table",
    "segment_table",
    "step_table",
    "wire_name",
]

_MORE = {3: "three", 4: "four", 8: "eight"}
LABELS = {
    "none": "no sharding",
    "ours": "ragged_fsdp",
    "ours-nothing-kept": "ragged_fsdp, nothing kept after forward",
    "ours-bf16": "ragged_fsdp, sums in bf16",
    "ours-nothing-kept-bf16": "ragged_fsdp, nothing kept, sums in bf16",
    "ours-reshard8": "ragged_fsdp, kept by 8 ranks after forward",
    "ours-2-buffers": "ragged_fsdp, 2 gradient buffers",
    "ours-fp8": "ragged_fsdp, FP8 products",
    "ours-fp8-nothing-kept": "ragged_fsdp, FP8 products, nothing kept",
    "ours-fp8-all-to-all": "ragged_fsdp, FP8 products, all-to-all",
    "ours-fp8-all-to-all-nothing-kept": "ragged_fsdp, FP8 products, all-to-all, nothing kept",
    "ours-fp8-two-level": "ragged_fsdp, FP8 products, two levels, nothing kept",
    "ours-fp8-tiles-two-level": "ragged_fsdp, FP8 products on tiles, two levels, nothing kept",
    "ours-all-to-all": "ragged_fsdp, all-to-all",
    "ours-all-to-all-2-pending": "all-to-all, 2 exchanges pending",
    "ours-all-to-all-no-prefetch": "all-to-all, no prefetch",
    "ours-all-to-all-prefetch-2": "all-to-all, prefetch of two layers",
    "ours-all-to-all-2-communicators": "all-to-all, two communicators",
    "ours-all-to-all-nothing-kept": "all-to-all, nothing kept after forward",
    "ours-all-to-all-budget": "all-to-all, 24 GiB kept after forward",
    "ours-all-to-all-int8": "all-to-all, weights gathered as int8",
    "ours-all-to-all-float8": "all-to-all, weights gathered as float8",
    "ours-two-level": "ragged_fsdp, two levels",
    "ours-two-level-nothing-kept": "two levels, nothing kept after forward",
    "ours-two-level-fp32-between": "two levels, nothing kept, fp32 between nodes",
    "ours-two-level-gather": "two levels, nothing kept, gathers too",
    "ours-two-level-float8": "two levels, nothing kept, weights gathered as float8",
    "ours-two-level-float8-kept2": "two levels, last two layers kept, weights gathered as float8",
    "ours-two-level-float8-kept4": "two levels, last four layers kept, weights gathered as float8",
    "ours-two-level-gather-float8": "two levels, nothing kept, gathers too, weights gathered as float8",
    "ours-two-level-reshard8": "two levels, kept by 8 ranks after forward",
    "ours-two-level-reshard8-kept2": "two levels, last two layers kept, others by 8 ranks",
    **{f"ours-two-level-kept{n}": f"two levels, last {word} layers kept" for n, word in _MORE.items()},
    "fsdp2": "FSDP2",
    "fsdp2-shard1": "FSDP2, Shard(1)",
    "fsdp2-kept2": "FSDP2, last two layers kept",
    **{f"fsdp2-kept{n}": f"FSDP2, last {word} layers kept" for n, word in _MORE.items()},
    "fsdp2-bf16": "FSDP2, sums in bf16",
    "fsdp2-kept2-bf16": "FSDP2, last two layers kept, sums in bf16",
    "fsdp2-reshard8": "FSDP2, kept by 8 ranks after forward",
    "fsdp2-reshard8-kept2": "FSDP2, last two layers kept, others by 8 ranks",
    "fsdp2-torchao-blockwise": "FSDP2, torchao's blockwise FP8 linear layers",
    "fsdp2-torchao-rowwise": "FSDP2, torchao's rowwise FP8 linear layers",
    "fsdp2-torchao-gathered": "FSDP2, torchao's tensorwise FP8 linear layers, gathered as codes",
    "fsdp1": "FSDP1",
    "megatron": "Megatron-FSDP",
    "megatron-double": "Megatron-FSDP, double buffers",
    "deepspeed": "DeepSpeed ZeRO-3",
    "deepspeed-layers": "DeepSpeed ZeRO-3, whole layers prefetched",
    "ddp": "DDP",
}
_COLUMNS = (
    "implementation", "setting", "wire", "fwd+bwd ms", "/ floor", "/ bound", "/ FSDP2", "step ms", "host ms",
    "alloc GiB", "/ FSDP2", "reserved GiB", "/ FSDP2", "res/alloc", "moved GiB",
)  # fmt: skip
_OTHER_LAYOUTS = ("fsdp2-shard1", "fsdp2-torchao")
_FSDP2 = tuple(n for n in LABELS if n.startswith("fsdp2") and not n.startswith(_OTHER_LAYOUTS))
_COMPARED = ("forward_backward_ms", "peak_allocated_gib", "peak_reserved_gib")


def load(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The results of several files; a floor serves those of the same layers that have none."""
    results = [result for path in paths for result in json.loads(path.read_text())["results"]]
    steps = [result for result in results if "wires" in result.get("case", ()) and "rows" in result]
    for row in (row for result in steps for row in result["rows"]):
        if "bandwidth_gb_s" in row:  # files from before networks had names
            row["wire"] = row.pop("bandwidth_gb_s")
    floors = {_workload(r["case"]): row for r in steps for row in r["rows"] if _is_floor(row)}
    for result in steps:
        floor = floors.get(_workload(result["case"]))
        if floor is not None and not any(_is_floor(row) for row in result["rows"]):
            result["rows"].insert(0, floor)
    return results


def _is_floor(row: dict[str, Any]) -> bool:
    return row["implementation"] == "none" and "forward_backward_ms" in row


def _workload(case: dict[str, Any]) -> tuple[Any, ...]:
    keys = ("model", "layers", "tokens")
    keys += ("recompute", "sequence", "carveout")  # came after the first files
    return tuple(case.get(key) or None for key in keys)


def floor_ms(result: dict[str, Any]) -> float | None:
    """Forward and backward of the unsharded layers in this run, if it was measured."""
    return next((row["forward_backward_ms"] for row in result["rows"] if _is_floor(row)), None)


def bound_ms(result: dict[str, Any], wire: WireName) -> float | None:
    """``max(floor, wire)``: neither the arithmetic nor the bytes can be skipped."""
    floor = floor_ms(result)
    return None if floor is None else max(floor, case_of(result).wire_ms(wire))


def own_bound_ms(result: dict[str, Any], row: dict[str, Any]) -> float | None:
    """The larger of the floor and the time of the bytes that this row moved, in rings without latency."""
    floor = floor_ms(result)
    if floor is None:
        return None
    return max(floor, case_of(result).wire_ms(row["wire"], sum(row["moved_gib"].values())))


def case_of(result: dict[str, Any]) -> Case:
    """The case of a result that was read from a file."""
    known = {k: v for k, v in result["case"].items() if k in Case.__dataclass_fields__}
    known["wires"] = tuple(known["wires"])
    known["options"] = tuple(tuple(pair) for pair in known["options"])
    return Case(**known)


def title(result: dict[str, Any]) -> str:
    """The case in words."""
    case = case_of(result)
    return (
        f"{case.shape.name} x{case.layers} layers, {case.tokens} tokens, "
        f"rank 0 of {f'{case.replicas} x ' if case.replicas > 1 else ''}{case.shard_ranks}, "
        f"{case.reduce_dtype} reduction, {case.payload} payload by {case.delivery}"
        + (f", sequences of {case.sequence}" if case.sequence is not None else "")
        + (", layers computed again in backward" if case.recompute else "")
        + (f", {case.carveout} multiprocessors left to collectives" if case.carveout else "")
        + (f", {case.optimizer.upper()}" if case.optimizer != "adamw" else "")
        + (f", {case.allocator} allocator" if case.allocator != "default" else "")
        + "".join(f", {name}={value}" for name, value in case.options)
        + "".join(f"; {network_of(wire).text}" for wire in case.wires if isinstance(wire, str))
    )


def wire_name(wire: WireName) -> str:
    """A wire as the heads of columns and the axes of figures have it."""
    return "free wire" if wire is None else wire if isinstance(wire, str) else f"{wire:g} GB/s"


def _in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one setting together, by wire; what all peers do by default is first."""
    settings = list(dict.fromkeys(SETTINGS.values()))
    wires = list(dict.fromkeys(row.get("wire") for row in rows))
    return sorted(rows, key=lambda row: (settings.index(_setting(row)), wires.index(row.get("wire"))))


def _setting(row: dict[str, Any]) -> str:
    return SETTINGS[row["implementation"]]


def _over_fsdp2(result: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """Time and memory over those of FSDP2 in the same setting and on the same wire, where it was measured."""
    name = next((peer for peer in _FSDP2 if SETTINGS[peer] == _setting(row)), None)
    for other in result["rows"]:
        alike = other["implementation"] == name and other.get("wire") == row["wire"]
        if alike and "forward_backward_ms" in other and row["implementation"] not in ("none", name):
            return [f"{row[key] / other[key]:.2f}" for key in _COMPARED]
    return [""] * len(_COMPARED)


def _cells(result: dict[str, Any]) -> list[tuple[str, ...]]:
    floor = floor_ms(result)
    cells = []
    for row in _in_order(result["rows"]):
        label = LABELS.get(row["implementation"], row["implementation"])
        setting = _setting(row) if row["implementation"] != "none" else ""
        if "forward_backward_ms" not in row:
            cells.append((label, setting, _why_not(row), *("",) * (len(_COLUMNS) - 3)))
            continue
        time, bound = row["forward_backward_ms"], bound_ms(result, row["wire"])
        time_ratio, allocated_ratio, reserved_ratio = _over_fsdp2(result, row)
        cells.append(
            (
                label,
                setting,
                wire_text(row["wire"]),
                f"{time:.1f}",
                f"{time / floor:.2f}" if floor else "",
                f"{time / bound:.2f}" if bound else "",
                time_ratio,
                f"{row['step_ms']:.1f}",
                f"{row['host_ms']:.1f}",
                f"{row['peak_allocated_gib']:.1f}",
                allocated_ratio,
                f"{row['peak_reserved_gib']:.1f}",
                reserved_ratio,
                f"{row['peak_reserved_gib'] / max(row['peak_allocated_gib'], 1e-9):.2f}",
                f"{sum(row['moved_gib'].values()):.1f}",
            )
        )
    return cells


def _why_not(row: dict[str, Any]) -> str:
    if "skipped" in row:
        return "skipped: " + row["skipped"]
    said = row["error"].strip().splitlines()[-1].removeprefix("torch.")
    return "failed: " + said.split(". GPU")[0][:90]  # the rest of an out-of-memory error is about the machine


def step_table(result: dict[str, Any]) -> Table:
    """One case for the terminal."""
    return _table(title(result), _COLUMNS, _cells(result))


def markdown(result: dict[str, Any]) -> str:
    """One case for a document."""
    return f"**{title(result)}**\n\n{markdown_table([_COLUMNS, *_cells(result)])}"


def headline(result: dict[str, Any]) -> str:
    """One case in a few columns for a document, one row per implementation.

    Those that gather in bf16 and reduce in fp32, as all peers do, come first; on networks with nodes those in
    the peers' setting, compared with FSDP2 in the same one. Memory is the larger of the wires'.
    """
    wires = dict.fromkeys(row["wire"] for row in result["rows"] if "forward_backward_ms" in row)
    head = ["implementation"]
    for wire in wires:
        compared = "/ floor" if wire is None else "/ FSDP2" if isinstance(wire, str) else "/ bound"
        head += [f"ms, {wire_name(wire)}", compared]
    head += ["allocated GiB", "reserved GiB", "moved GiB"]
    names = dict.fromkeys(row["implementation"] for row in result["rows"])
    lines: list[list[str]] = [head]
    for name in sorted(names, key=_moves_less):
        rows = {row.get("wire"): row for row in result["rows"] if row["implementation"] == name}
        done = [row for row in rows.values() if "forward_backward_ms" in row]
        if not done:
            lines.append([LABELS[name], _why_not(*rows.values()), *[""] * (len(head) - 2)])
            continue
        cells = [LABELS[name]]
        for wire in wires:
            cells += _time_cells(result, rows[wire], wire) if wire in rows else ["", ""]
        memory = [max(row[key] for row in done) for key in ("peak_allocated_gib", "peak_reserved_gib")]
        moved = max(sum(row["moved_gib"].values()) for row in done)
        lines.append([*cells, *[f"{gib:.1f}" for gib in (*memory, moved)]])
    return f"**{title(result)}**\n\n{markdown_table(lines)}"


def _moves_less(name: str) -> tuple[bool, bool]:
    less = any(word in name for word in ("all-to-all", "bf16", "two-level"))
    return less, less and SETTINGS[name] != SETTINGS["fsdp2"]


def _time_cells(result: dict[str, Any], row: dict[str, Any], wire: WireName) -> list[str]:
    """The time of a row, and what it is compared with on its wire."""
    if isinstance(wire, str):
        return [f"{row['forward_backward_ms']:.1f}", _over_fsdp2(result, row)[0]]
    time, bound = row["forward_backward_ms"], bound_ms(result, wire)
    return [f"{time:.1f}", f"{time / bound:.2f}"] if bound else ["", ""]


def markdown_table(rows: Iterable[Iterable[str]]) -> str:
    """Rows for a document; the first is the head."""
    head, *lines = (f"| {' | '.join(row)} |\n" for row in rows)
    return head + "|" + "---|" * (head.count("|") - 1) + "\n" + "".join(lines)


def copy_table(results: Iterable[dict[str, Any]]) -> Table:
    """Copies beside the collective they serve, as in the paper's Table 1; the wire is the modelled one."""
    table = Table(title="copies around the collectives, ms per step")
    columns = (
        "case",
        "implementation",
        "gather wire",
        "copy-out",
        "reduce wire",
        "copy-in",
        "cat",
        "other copies",
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < 2 else "right")
    for result in results:
        for row in result["rows"]:
            if row.get("wire") is not None and row["implementation"] != "none":
                cells = [f"{value:.2f}" for value in copies_ms(row)]
                table.add_row(title(result), LABELS.get(row["implementation"], ""), *cells)
    return table


def copies_ms(row: dict[str, Any]) -> tuple[float, float, float, float, float, float]:
    """Wire and copy of the gather path, of the reduction path, ``cat`` of either, and all other copies.

    Time on the wire is that of the level that is held longer.
    FSDP2 uses ``cat`` on both paths where it shards another dim than the first; layers have some too.
    """
    held = row.get("held_ms") or {  # files from before networks had names
        kind: [gib * (1 << 30) / row["wire"] / 1e6] for kind, gib in row["moved_gib"].items()
    }
    gather = max(held.get("all_gather", (0.0,)))
    reductions = [held[kind] for kind in ("reduce_scatter", "all_to_all", "all_reduce") if kind in held]
    reduce = max((sum(level) for level in zip(*reductions)), default=0.0)
    copies = [k for k in row["kernels"]["longest"] if k["kind"] in ("interleaved copy", "copy or cast")]
    out, into, cat = (
        sum(k["ms"] for k in copies if part in k["name"])
        for part in ("split_with_sizes", "chunk_cat", "CatArray")
    )
    return gather, out, reduce, into, cat, sum(k["ms"] for k in copies) - out - into - cat


def _table(title_text: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(title=title_text)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def overhead_table(result: dict[str, Any]) -> Table:
    """Host time per layer, and how much of it the sharding added to the unsharded layers."""
    rows = {row["implementation"]: row for row in result["rows"] if "host_ms_per_layer" in row}
    plain = rows["none"]["host_ms_per_layer"] if "none" in rows else 0.0
    theirs = rows["fsdp2"]["host_ms_per_layer"] if "fsdp2" in rows else None
    cells = []
    for name, row in rows.items():
        own = row["host_ms_per_layer"]
        added = (own - plain) / (theirs - plain) if theirs and theirs > plain and name != "none" else None
        cells.append(
            (
                LABELS.get(name, name),
                f"{own * 1e3:.0f}",
                f"{own / theirs:.2f}" if theirs else "",
                f"{(own - plain) * 1e3:.0f}",
                "" if added is None else f"{added:.2f}",
                f"{row['forward_backward_ms']:.1f}",
                f"{row['graph_forward_backward_ms']:.1f}" if "graph_host_ms" in row else "",
            )
        )
    columns = (
        "implementation", "host us/layer", "/ FSDP2", "over unsharded us", "/ FSDP2's", "fwd+bwd ms",
        "as a graph ms",
    )  # fmt: skip
    return _table("host time, " + title(result), columns, cells)


def ratio_table(result: dict[str, Any]) -> Table:
    """Times and memory of this source tree beside those of another."""
    from .trees import ratios

    head, *lines = ratios(result, new="new", old="old")
    return _table(title(result), head, lines)


def segment_table(found: dict[str, Any]) -> Table:
    """Reserved memory by the work it was reserved for."""
    cells = [
        (role, f"{entry['mib']:.0f}", ", ".join(entry.get("segments", ())))
        for role, entry in found["by_role"].items()
    ]
    cells.append(("peak reserved", f"{found['peak_reserved_mib']:.0f}", ""))
    cells.append(("peak allocated", f"{found['peak_allocated_mib']:.0f}", ""))
    return _table(
        f"{LABELS[found['implementation']]}, {title(found)}", ("reserved for", "MiB", "segments"), cells
    )


def other_tables(results: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Table]]:
    """The results of steps, and tables of all others: real ranks, segments, errors, single figures."""
    steps, tables, errors = [], [], []
    for result in results:
        if "noise" in result:
            errors.append(result)
        elif "case" not in result:
            tables.append(_table("", result, [[str(value) for value in result.values()]]))
        elif "by_role" in result:
            tables.append(segment_table(result))
        elif "wires" not in result["case"]:
            tables.append(real_table(result))
        else:
            steps.append(result)
    return steps, tables + ([error_table(errors)] if errors else [])


def real_table(result: dict[str, Any]) -> Table:
    """Losses and memory of real ranks."""
    case, cells = result["case"], []
    for row in result["rows"]:
        label = LABELS.get(row["implementation"], row["implementation"]) + (
            ", poisoned" if row["debug"] else ""
        )
        if "losses" not in row:
            cells.append((label, "failed: " + row["error"].strip().splitlines()[-1][:80], "", "", "", ""))
            continue
        flat, difference = row["flat_from_step_2"], row["largest_relative_difference"]
        reserved = f"{row['reserved_mib'][-1]:.0f}" if row["reserved_mib"] else ""
        first, last = row["losses"][0], row["losses"][-1]
        cells.append(
            (
                label,
                f"{first:.6f}",
                f"{last:.6f}",
                "" if difference is None else f"{difference:.1e}",
                reserved,
                "" if not row["reserved_mib"] else "yes" if flat else "NO",
            )
        )
    text = (
        f"{case['model']} x{case['layers']}, {case['ranks']} ranks, "
        f"{case['compute']} compute, {case['steps']} steps"
    )
    columns = (
        "implementation",
        "first loss",
        "last loss",
        "largest difference",
        "reserved MiB",
        "flat from step 2",
    )
    return _table(text, columns, cells)


def error_table(rows: Iterable[dict[str, Any]]) -> Table:
    """Relative errors of the reductions."""
    from .reduction_error import COLUMNS

    cells = (
        (
            f"{r['gradients']}, step {r['after_steps']}" if "after_steps" in r else r["gradients"],
            f"{r['ranks']}{' (gloo)' if r.get('over_gloo') else ''}",
            f"{r['noise']:.3g}",
            *(f"{r[name]:.1e}" if name in r else "" for name in COLUMNS),
        )
        for r in rows
    )
    return _table("error against the fp64 mean", ("gradients", "ranks", "noise", *COLUMNS), cells)
