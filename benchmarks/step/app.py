"""The commands of ``ragged-fsdp bench``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from .case import ALLOCATORS, OPTIMIZERS, REDUCE_DTYPES, Case
from .network import PROFILES, WireName, network_of
from .shapes import MODELS
from .wire import DELIVERIES, PAYLOADS

__all__ = ["app"]


_HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
_ALL = "none,ours,fsdp2,fsdp1,megatron,deepspeed"
_CONSOLE = Console(width=170)
_PATH = click.Path(path_type=Path)
_OUT = click.option("--out", type=_PATH, help="Write the results here as JSON.")
_LIMIT = click.option("--limit", default=120.0, help="Seconds one implementation may take.")
_OPTION = click.option("--option", multiple=True, help="name=value for our fully_shard; repeatable.")
_COMPARED = click.option("--implementations", default="none,ours,ours-all-to-all,fsdp2", help="Which to run.")
_WIRE = click.option(
    "--wire",
    help="'free' or GB/s of one NVLink domain; several separated by commas.  "
    "[default: free,400 if no --network is given]",
)
_NETWORK = click.option(
    "--network", help=f"Networks with nodes: {', '.join(PROFILES)}; several separated by commas."
)
_RANKS = click.option("--ranks", default=64, help="Ranks to be rank 0 of.")


class _Command(click.Command):
    """Answers ``-h`` also where no group stands above it.

    click makes a command's help option once, from the context that asks first: a command that left ``-h``
    to the group's settings would lose it for the whole process when a test asks it alone.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, context_settings=_HELP_OPTIONS, **settings)


class _InOrder(click.Group):
    """Help lists the commands as this file has them, not by the alphabet."""

    command_class = _Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_InOrder,
    context_settings={**_HELP_OPTIONS, "max_content_width": 110, "show_default": True},
)
def app() -> None:
    """Measure ragged_fsdp and its peers."""


def _wires(wire: str | None, network: str | None) -> tuple[WireName, ...]:
    """The flat wires and then the networks that were asked for; without either, the default wires."""
    if wire is None and network is None:
        wire = "free,400"
    try:
        flat = [None if part == "free" else float(part) for part in (wire or "").split(",") if part]
    except ValueError:
        raise click.BadParameter(
            f"wire: expected 'free' or GB/s, separated by commas, got {wire!r}"
        ) from None
    names = [part for part in (network or "").split(",") if part]
    try:
        named = [network_of(name) for name in names]
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    # Flat networks keep the name that they have in results of earlier runs.
    levels = [one.inside_gb_s if one.flat else one.name for one in named]
    return tuple(dict.fromkeys([*flat, *levels]))


def _options(pairs: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    """``name=value`` pairs; numbers, true, false and none are converted, anything else stays text."""
    words = {"true": True, "false": False, "none": None}
    found: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign:
            raise click.BadParameter(f"expected name=value, got {pair!r}")
        try:
            found[name] = words[value] if value in words else int(value)
        except ValueError:
            found[name] = value
    return tuple(sorted(found.items()))


def _need_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise click.BadParameter("this benchmark needs a CUDA device, and torch sees none")


@app.command()
@click.option("--model", default="gpt-oss-120b", help=f"One of {', '.join(MODELS)}.")
@click.option("--layers", default=4, help="Number of layers.")
@click.option("--tokens", default=8192, help="Tokens of this rank: whole sequences.")
@click.option("--ranks", default="64", help="Ranks to be rank 0 of; several separated by commas.")
@_WIRE
@_NETWORK
@click.option("--implementations", default=_ALL, help="Which to run, in this order.")
@click.option("--replicas", default=1, help="Copies of the sharded model among the ranks (HSDP).")
@click.option("--reduce-dtype", default="fp32", help=f"Reduction: {' or '.join(REDUCE_DTYPES)}.")
@click.option("--payload", default="repeat", help=f"What gathers deliver: {' or '.join(PAYLOADS)}.")
@click.option("--delivery", default="fake", help=f"How it is copied: {' or '.join(DELIVERIES)}.")
@click.option("--allocator", default="default", help=f"CUDA allocator: {' or '.join(ALLOCATORS)}.")
@click.option("--optimizer", default="adamw", help=f"Optimizer: {' or '.join(OPTIMIZERS)}.")
@click.option("--recompute", is_flag=True, help="Compute each layer again in backward.")
@click.option("--sequence", type=int, help="Tokens of a sequence.  [default: of the published shape]")
@click.option("--carveout", default=0, help="Multiprocessors that matrix products leave to collectives.")
@click.option("--warmup", default=3, help="Steps before the timed ones.")
@click.option("--iterations", default=8, help="Timed steps; the median counts.")
@_LIMIT
@_OPTION
@_OUT
@click.option("--traces", type=_PATH, help="Keep the profiler's traces in this folder.")
def step(
    ranks: str,
    wire: str | None,
    network: str | None,
    implementations: str,
    limit: float,
    option: tuple[str, ...],
    out: Path | None,
    traces: Path | None,
    **case_fields: Any,
) -> None:
    """Time and memory of training steps on rank 0 of N.

    Each implementation runs in a process of its own.
    """
    from .implementations import IMPLEMENTATIONS
    from .report import copy_table, step_table
    from .runner import run_case, save

    names = implementations.split(",")
    if unknown := set(names) - set(IMPLEMENTATIONS):
        raise click.BadParameter(
            f"implementations: got {sorted(unknown)}, expected any of {', '.join(IMPLEMENTATIONS)}"
        )
    try:
        shared = {"wires": _wires(wire, network), "options": _options(option), **case_fields}
        cases = [Case(ranks=int(n), **shared) for n in ranks.split(",")]
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    _need_cuda()
    results = []
    for case in cases:
        results.append(run_case(case, names, _CONSOLE.out, limit_s=limit, trace_dir=traces))
        _CONSOLE.print(step_table(results[-1]))
        if out is not None:
            save(out, results)
    if any(None not in case.wires or len(case.wires) > 1 for case in cases):
        _CONSOLE.print(copy_table(results))


@app.command()
@click.option("--layers", default=24, help="Number of small layers.")
@click.option("--tokens", default=128, help="Tokens of this rank: whole sequences.")
@_RANKS
@_COMPARED
@click.option("--rounds", default=8, help="Turns each takes, five steps each; the median counts.")
@click.option(
    "--graphs/--no-graphs", default=True, help="Also capture the step as a CUDA graph and replay it."
)
@_OPTION
@_OUT
def overhead(
    layers: int,
    tokens: int,
    ranks: int,
    implementations: str,
    rounds: int,
    graphs: bool,
    option: tuple[str, ...],
    out: Path | None,
) -> None:
    """Host time per layer.

    Many small layers, so that the device waits for the host.
    """
    from .report import overhead_table
    from .runner import save
    from .turns import take_turns

    _need_cuda()
    case = Case(
        "small-dense", layers, tokens, ranks, iterations=10, payload="nothing", options=_options(option)
    )
    result = take_turns(case, implementations.split(","), _CONSOLE.out, rounds=rounds, graphs=graphs)
    _CONSOLE.print(overhead_table(result))
    if out is not None:
        save(out, [result])


@app.command()
@click.argument("other", type=click.Path(path_type=Path))
@click.option("--cases", default="gpt-oss-64,llama-64", help="Cases of the suite, separated by commas.")
@_WIRE
@_NETWORK
@click.option("--implementations", default="ours,ours-all-to-all", help="Which of ours to run.")
@click.option("--rounds", default=6, help="Turns each tree takes; the median counts.")
@click.option("--iterations", default=4, help="Timed steps of a turn and wire.")
@click.option("--limit", default=120.0, help="Seconds one tree may take to start, or for a wire.")
@_OUT
def trees(
    other: Path,
    cases: str,
    wire: str | None,
    network: str | None,
    implementations: str,
    rounds: int,
    iterations: int,
    limit: float,
    out: Path | None,
) -> None:
    """This source tree and OTHER, a folder with ragged_fsdp in it, in turns.

    Time and memory of steps, and their ratios: what a change cost.
    """
    from dataclasses import replace

    from .report import ratio_table
    from .runner import save
    from .suite import SUITE
    from .trees import compare_trees

    if unknown := sorted(set(cases.split(",")) - set(SUITE)):
        raise click.BadParameter(f"cases: got {unknown}, expected any of {', '.join(SUITE)}")
    if not (other / "ragged_fsdp" / "__init__.py").is_file():
        raise click.BadParameter(f"other: expected a folder with ragged_fsdp in it, got {other}")
    _need_cuda()
    folders = {"old": other, "new": Path(__file__).resolve().parents[2] / "src"}
    results = []
    for name in cases.split(","):
        case = replace(SUITE[name].case, wires=_wires(wire, network), iterations=iterations)
        for implementation in implementations.split(","):
            start = time.monotonic()
            found = compare_trees(case, implementation, folders, _CONSOLE.out, rounds=rounds, limit_s=limit)
            results.append(found)
            _CONSOLE.print(ratio_table(found))
            _CONSOLE.out(f"{name}, {implementation}: {time.monotonic() - start:.0f} s")
            if out is not None:
                save(out, results)


@app.command()
@click.option("--ranks", default="2,4", help="Numbers of ranks, separated by commas.")
@click.option("--steps", default=50, help="Training steps.")
@click.option("--device", default="cuda", help="cuda (NCCL) or cpu (gloo).")
@click.option("--debug/--no-debug", default=True, help="Run ours a second time with freed storage poisoned.")
@click.option("--limit", default=120.0, help="Seconds one run may take.")
@_OUT
def real(ranks: str, steps: int, device: str, debug: bool, limit: float, out: Path | None) -> None:
    """Train over real collectives: losses and memory.

    The same model under ours, FSDP2 and DDP.
    """
    from contextlib import nullcontext

    from benchmarks.shared_device import shared_device

    from .real_ranks import compare, planned_runs, run_real
    from .report import real_table
    from .runner import save

    if device == "cuda":
        _need_cuda()
    results: list[dict[str, Any]] = []
    with shared_device() if device == "cuda" else nullcontext({}) as environment:
        for case, runs in planned_runs([int(text) for text in ranks.split(",")], steps, device, debug):
            rows: list[dict[str, Any]] = []
            for one, name in runs:
                start = time.monotonic()
                rows.append(run_real(one, name, limit, environment))
                outcome = rows[-1].get("error", "trained").strip().splitlines()[-1]
                took = time.monotonic() - start
                _CONSOLE.out(f"{case.ranks} ranks, {case.model}, {name}: {outcome}  [{took:.0f} s]")
                if out is not None:
                    save(out, [*results, compare(case, rows)])
            results.append(compare(case, rows))
            _CONSOLE.print(real_table(results[-1]))


@app.command()
@_RANKS
@_COMPARED
@click.option("--names", is_flag=True, help="Name the files that are crossed.")
@_OUT
def calls(ranks: int, implementations: str, names: bool, out: Path | None) -> None:
    """Python calls per layer and files crossed, counted on the CPU.

    Needs no device and has no noise.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    from .calls import DEPTHS, calls_per_layer
    from .runner import save

    rows, own = [], multiprocessing.get_context("spawn")  # each has a process group of its own
    for name in implementations.split(","):
        with ProcessPoolExecutor(1, mp_context=own) as pool:
            rows += pool.submit(calls_per_layer, name, ranks).result()
        files = rows[-1].pop("files", {})
        _CONSOLE.out(f"{name:>16}: {rows[-1]['calls_per_layer']:6.0f} calls per layer")
        for direction, crossed in files.items():
            changes = rows[-1][f"{direction}_file_changes"]
            _CONSOLE.out(
                f"{'':>18}{direction} of {DEPTHS[1]} layers: {len(crossed)} files, {changes} changes of file"
                + (f": {', '.join(crossed)}" if names else "")
            )
        if out is not None:
            save(out, rows)


@app.command()
@click.option("--model", default="llama-3-70b", help="A model of dense layers.")
@click.option("--tokens", default=4096, help="Tokens of this rank.")
@_OUT
def weight_gradients(model: str, tokens: int, out: Path | None) -> None:
    """Time of one layer's weight gradients.

    Kept, cast into a gradient buffer, or written into it.
    """
    import torch

    from .runner import save
    from .weight_gradients import study

    _need_cuda()
    row = study(MODELS[model], tokens, torch.device("cuda"))
    _CONSOLE.print(row)
    if out is not None:
        save(out, [row])


@app.command()
@click.option("--models", default="gpt-oss-120b,llama-3-70b", help="Whose gradients; several with commas.")
@click.option("--tokens", default=8192, help="Rows of the products beside the sums.")
@_RANKS
@click.option("--ranks-per-node", default=8, help="Rows that are added.")
@_OUT
def sums(models: str, tokens: int, ranks: int, ranks_per_node: int, out: Path | None) -> None:
    """Ways to add what a node's ranks send each other.

    How long they take, alone and beside matrix products, and by how much they delay those.
    """
    from .runner import save
    from .sums import study

    if unknown := sorted(set(models.split(",")) - set(MODELS)):
        raise click.BadParameter(f"models: got {unknown}, expected any of {', '.join(MODELS)}")
    if ranks % ranks_per_node:
        raise click.BadParameter(f"ranks: expected a multiple of {ranks_per_node}, got {ranks}")
    _need_cuda()
    rows = [row for name in models.split(",") for row in study(MODELS[name], tokens, ranks, ranks_per_node)]
    for row in rows:
        _CONSOLE.print(row)
    if out is not None:
        save(out, rows)


@app.command()
@click.option("--ranks", default="64,256,1024", help="Emulated ranks, separated by commas.")
@click.option("--ranks-per-node", default=8, help="Of the emulated ranks.")
@click.option("--gradients", default="drawn,real", help="Random ones, those of a small model, or both.")
@click.option("--noise", default="1,4,16", help="Of drawn gradients: of each rank over the common signal.")
@click.option("--after-steps", default="0,200", help="Of real gradients: steps the model was trained for.")
@click.option(
    "--real-ranks", default=4, help="Ranks that run over gloo too, with drawn gradients, on two nodes."
)
@_OUT
def reduction_error(
    ranks: str,
    ranks_per_node: int,
    gradients: str,
    noise: str,
    after_steps: str,
    real_ranks: int,
    out: Path | None,
) -> None:
    """Error of the reductions of bf16 gradients.

    In fp32, in bf16, by all-to-all with a local fp32 sum, and in two levels; beside what rounding each
    gradient to bf16 brings.
    """
    from .reduction_error import study
    from .report import error_table
    from .runner import save

    kinds, sizes = gradients.split(","), [int(text) for text in ranks.split(",")]
    if unknown := sorted({*kinds} - {"drawn", "real"}):
        raise click.BadParameter(f"gradients: got {unknown}, expected drawn, real or both")
    if wrong := [size for size in sizes if size % ranks_per_node]:
        raise click.BadParameter(f"ranks: expected multiples of {ranks_per_node}, got {wrong}")
    levels = [float(text) for text in noise.split(",")] if "drawn" in kinds else []
    steps = [int(text) for text in after_steps.split(",")] if "real" in kinds else []
    rows = study(sizes, ranks_per_node, levels, steps, real_ranks)
    _CONSOLE.print(error_table(rows))
    if out is not None:
        save(out, rows)


@app.command()
@click.option("--out", type=_PATH, default=Path("results"), help="Folder for the result files.")
@click.option("--only", default="", help="Cases to run, in this order, separated by commas.")
@click.option("--skip", default="", help="Cases to leave out, separated by commas.")
@click.option("--list", "listed", is_flag=True, help="Name the cases and end.")
@click.option("--deadline", default=3600.0, help="Start nothing new after this many seconds.")
@_LIMIT
@click.option("--traces", type=_PATH, help="Keep our traces in this folder.")
def suite(
    out: Path, only: str, skip: str, listed: bool, deadline: float, limit: float, traces: Path | None
) -> None:
    """Run every case of the committed figures.

    Most telling first; cases the folder has are not repeated.
    """
    from .suite import SUITE, run_suite

    chosen, left_out = (list(filter(None, text.split(","))) for text in (only, skip))
    if unknown := sorted({*chosen, *left_out} - set(SUITE)):
        raise click.BadParameter(f"cases: got {unknown}, expected any of {', '.join(SUITE)}")
    names = [name for name in chosen or SUITE if name not in left_out]
    if listed:
        for name in names:
            _CONSOLE.out(f"{name}: {', '.join(SUITE[name].implementations)}")
        return
    _need_cuda()
    _show(run_suite(out, _CONSOLE.out, names=names, deadline_s=deadline, limit_s=limit, trace_dir=traces))


@app.command()
@click.argument("case", default="llama-64")
@click.option("--implementation", default="ours-all-to-all", help="Whose memory.")
@click.option("--out", type=_PATH, help="Write the result here as JSON.")
def segments(case: str, implementation: str, out: Path | None) -> None:
    """What torch's allocator reserves memory for.

    In the first steps of CASE, a case of the suite (llama-64 if none is given): why it is more than is used.
    """
    from .implementations import IMPLEMENTATIONS
    from .report import segment_table
    from .runner import save
    from .segments import recorded_segments
    from .suite import SUITE

    for name, given, known in (("case", case, SUITE), ("implementation", implementation, IMPLEMENTATIONS)):
        if given not in known:
            raise click.BadParameter(f"{name}: got {given!r}, expected one of {', '.join(known)}")
    _need_cuda()
    found = recorded_segments(SUITE[case].case, implementation)
    _CONSOLE.print(segment_table(found))
    if out is not None:
        save(out, [found])


@app.command()
@click.argument("results", nargs=-1, required=True, type=_PATH)
@click.option("--markdown", is_flag=True, help="Print tables for a document.")
@click.option("--headline", is_flag=True, help="Print short tables for a document.")
@click.option("--plots", type=_PATH, help="Draw figures into this folder.")
def show(results: tuple[Path, ...], markdown: bool, headline: bool, plots: Path | None) -> None:
    """Show saved results as tables, and draw them.

    RESULTS are JSON files written by the other commands.
    """
    from . import report

    loaded = _show(results, report.headline if headline else report.markdown if markdown else None)
    if plots is not None:
        from .plots import draw

        for path in draw(loaded, plots):
            _CONSOLE.out(f"wrote {path}")


def _show(
    results: Sequence[Path], for_a_document: Callable[[dict[str, Any]], str] | None = None
) -> list[dict[str, Any]]:
    """Print the tables of all files; returns the results of steps."""
    from . import report

    loaded, tables = report.other_tables(report.load(results))
    for table in tables:
        _CONSOLE.print(table)
    for result in loaded:
        if for_a_document is None:
            _CONSOLE.print(report.step_table(result))
        else:
            print(for_a_document(result))
    return loaded


@app.command()
@click.argument("folder", type=_PATH)
def goals(folder: Path) -> None:
    """What was aimed at and what was reached.

    A table for a document, of the result files that 'suite' wrote to FOLDER; bold misses its goal.
    """
    from .goals import goal_table
    from .report import markdown_table

    if not folder.is_dir():
        raise click.BadParameter(f"folder: expected one with result files, got {folder}")
    print(markdown_table(goal_table(folder)), end="")


@app.command()
@click.argument("results", nargs=2, type=_PATH)
def compose(results: tuple[Path, Path]) -> None:
    """A whole model from stacks of two depths.

    Tokens per second and MFU, composed from the two RESULTS; a table for a document.
    """
    from .compose import composed_table
    from .report import load

    try:
        print(composed_table(load(results)), end="")
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@app.command()
@click.argument("traces", nargs=-1, required=True, type=_PATH)
@click.option(
    "--out",
    type=_PATH,
    default=Path("timeline.svg"),
    help="The figure to write; the ending chooses the format.",
)
def timeline(traces: tuple[Path, ...], out: Path) -> None:
    """Draw what each stream did in profiled steps.

    TRACES are files kept with 'step --traces'.
    """
    from .timeline import draw_timeline

    _CONSOLE.out(f"wrote {draw_timeline(traces, out)}")
