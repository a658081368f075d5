"""The commands of ``ragged-fsdp bench``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .case import ALLOCATORS, REDUCE_DTYPES, Case
from .shapes import MODELS
from .wire import DELIVERIES, PAYLOADS

__all__ = ["app"]

app = typer.Typer(
    help="Measure ragged_fsdp and its peers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
_ALL = "none,ours,fsdp2,fsdp1,megatron,deepspeed"
_CONSOLE = Console(width=170)


def _wires(text: str) -> tuple[float | None, ...]:
    try:
        return tuple(None if part == "free" else float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"expected 'free' or GB/s, separated by commas, got {text!r}") from None


def _options(pairs: list[str]) -> tuple[tuple[str, Any], ...]:
    """``name=value`` pairs; numbers, true, false and none are converted, anything else stays text."""
    words = {"true": True, "false": False, "none": None}
    found: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign:
            raise typer.BadParameter(f"expected name=value, got {pair!r}")
        try:
            found[name] = words[value] if value in words else int(value)
        except ValueError:
            found[name] = value
    return tuple(sorted(found.items()))


def _need_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs a CUDA device, and torch sees none")


@app.command()
def step(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "gpt-oss-120b",
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens of this rank: whole sequences.")] = 8192,
    ranks: Annotated[str, typer.Option(help="Ranks to be rank 0 of; several separated by commas.")] = "64",
    wire: Annotated[str, typer.Option(help="'free' or GB/s; several separated by commas.")] = "free,400",
    implementations: Annotated[str, typer.Option(help="Which to run, in this order.")] = _ALL,
    reduce_dtype: Annotated[str, typer.Option(help=f"Reduction: {' or '.join(REDUCE_DTYPES)}.")] = "fp32",
    payload: Annotated[str, typer.Option(help=f"What gathers deliver: {' or '.join(PAYLOADS)}.")] = "repeat",
    delivery: Annotated[str, typer.Option(help=f"How it is copied: {' or '.join(DELIVERIES)}.")] = "fake",
    allocator: Annotated[str, typer.Option(help=f"CUDA allocator: {' or '.join(ALLOCATORS)}.")] = "default",
    warmup: Annotated[int, typer.Option(help="Steps before the timed ones.")] = 3,
    iterations: Annotated[int, typer.Option(help="Timed steps; the median counts.")] = 8,
    limit: Annotated[float, typer.Option(help="Seconds one implementation may take.")] = 120.0,
    option: Annotated[list[str], typer.Option(help="name=value for our fully_shard; repeatable.")] = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="Write the results here as JSON.")] = None,
    traces: Annotated[Path | None, typer.Option(help="Keep the profiler's traces in this folder.")] = None,
) -> None:
    """Time and memory of training steps on rank 0 of N.

    Each implementation runs in a process of its own.
    """
    from .implementations import IMPLEMENTATIONS
    from .report import copy_table, step_table
    from .runner import run_case, save

    names = implementations.split(",")
    if unknown := set(names) - set(IMPLEMENTATIONS):
        raise typer.BadParameter(
            f"implementations: got {sorted(unknown)}, expected any of {', '.join(IMPLEMENTATIONS)}"
        )
    try:
        shared = {
            "wires": _wires(wire),
            "reduce_dtype": reduce_dtype,
            "payload": payload,
            "delivery": delivery,
            "allocator": allocator,
        }
        shared |= {"warmup": warmup, "iterations": iterations, "options": _options(option)}
        cases = [Case(model, layers, tokens, int(n), **shared) for n in ranks.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
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
def overhead(
    layers: Annotated[int, typer.Option(help="Number of small layers.")] = 24,
    tokens: Annotated[int, typer.Option(help="Tokens of this rank: whole sequences.")] = 128,
    ranks: Annotated[int, typer.Option(help="Ranks to be rank 0 of.")] = 64,
    implementations: Annotated[str, typer.Option(help="Which to run.")] = "none,ours,ours-all-to-all,fsdp2",
    rounds: Annotated[int, typer.Option(help="Turns each takes, five steps each; the median counts.")] = 8,
    graphs: Annotated[bool, typer.Option(help="Also capture the step as a CUDA graph and replay it.")] = True,
    option: Annotated[list[str], typer.Option(help="name=value for our fully_shard; repeatable.")] = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="Write the results here as JSON.")] = None,
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
def real(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "2,4",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 50,
    device: Annotated[str, typer.Option(help="cuda (NCCL) or cpu (gloo).")] = "cuda",
    debug: Annotated[bool, typer.Option(help="Run ours a second time with freed storage poisoned.")] = True,
    limit: Annotated[float, typer.Option(help="Seconds one run may take.")] = 120.0,
    out: Annotated[Path | None, typer.Option(help="Write the results here as JSON.")] = None,
) -> None:
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
def calls(
    ranks: Annotated[int, typer.Option(help="Ranks to be rank 0 of.")] = 64,
    implementations: Annotated[str, typer.Option(help="Which to run.")] = "none,ours,ours-all-to-all,fsdp2",
    out: Annotated[Path | None, typer.Option(help="Write the results here as JSON.")] = None,
) -> None:
    """Python calls per layer, counted on the CPU.

    Needs no device and has no noise.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    from .calls import calls_per_layer
    from .runner import save

    rows, own = [], multiprocessing.get_context("spawn")  # each has a process group of its own
    for name in implementations.split(","):
        with ProcessPoolExecutor(1, mp_context=own) as pool:
            rows += pool.submit(calls_per_layer, name, ranks).result()
        _CONSOLE.out(f"{name:>16}: {rows[-1]['calls_per_layer']:6.0f} calls per layer")
        if out is not None:
            save(out, rows)


@app.command()
def weight_gradients(
    model: Annotated[str, typer.Option(help="A model of dense layers.")] = "llama-3-70b",
    tokens: Annotated[int, typer.Option(help="Tokens of this rank.")] = 4096,
    out: Annotated[Path | None, typer.Option(help="Write the results here as JSON.")] = None,
) -> None:
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
def reduction_error(
    ranks: Annotated[str, typer.Option(help="Emulated ranks, separated by commas.")] = "4,64,256,1024",
    noise: Annotated[str, typer.Option(help="Noise of each rank over the common signal.")] = "1,4,16",
    real_ranks: Annotated[int, typer.Option(help="Ranks to run for real over gloo.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Write the results here as JSON.")] = None,
) -> None:
    """Error of the reductions of bf16 gradients.

    In fp32, in bf16, and by all-to-all with a local fp32 sum.
    """
    from . import reduction_error as study
    from .report import error_table
    from .runner import save

    rows = []
    for level in (float(text) for text in noise.split(",")):
        rows.append({"ranks": real_ranks, "noise": level, "real": True, **study.real(real_ranks, level)})
        rows += [{"ranks": int(n), "noise": level, **study.emulated(int(n), level)} for n in ranks.split(",")]
    _CONSOLE.print(error_table(rows))
    if out is not None:
        save(out, rows)


@app.command()
def suite(
    out: Annotated[Path, typer.Option(help="Folder for the result files.")] = Path("results"),
    only: Annotated[str, typer.Option(help="Cases to run, in this order, separated by commas.")] = "",
    skip: Annotated[str, typer.Option(help="Cases to leave out, separated by commas.")] = "",
    listed: Annotated[bool, typer.Option("--list", help="Name the cases and end.")] = False,
    deadline: Annotated[float, typer.Option(help="Start nothing new after this many seconds.")] = 3600.0,
    limit: Annotated[float, typer.Option(help="Seconds one implementation may take.")] = 120.0,
    traces: Annotated[Path | None, typer.Option(help="Keep our traces in this folder.")] = None,
) -> None:
    """Run every case of the committed figures.

    Most telling first; cases the folder has are not repeated.
    """
    from .suite import SUITE, run_suite

    chosen, left_out = (list(filter(None, text.split(","))) for text in (only, skip))
    if unknown := sorted({*chosen, *left_out} - set(SUITE)):
        raise typer.BadParameter(f"cases: got {unknown}, expected any of {', '.join(SUITE)}")
    names = [name for name in chosen or SUITE if name not in left_out]
    if listed:
        for name in names:
            _CONSOLE.out(f"{name}: {', '.join(SUITE[name].implementations)}")
        return
    _need_cuda()
    show(run_suite(out, _CONSOLE.out, names=names, deadline_s=deadline, limit_s=limit, trace_dir=traces))


@app.command()
def segments(
    case: Annotated[str, typer.Argument(help="A case of the suite.")] = "llama-64",
    implementation: Annotated[str, typer.Option(help="Whose memory.")] = "ours-all-to-all",
    out: Annotated[Path | None, typer.Option(help="Write the result here as JSON.")] = None,
) -> None:
    """What torch's allocator reserves memory for.

    In the first steps: why it is more than is used.
    """
    from .implementations import IMPLEMENTATIONS
    from .report import segment_table
    from .runner import save
    from .segments import recorded_segments
    from .suite import SUITE

    for name, given, known in (("case", case, SUITE), ("implementation", implementation, IMPLEMENTATIONS)):
        if given not in known:
            raise typer.BadParameter(f"{name}: got {given!r}, expected one of {', '.join(known)}")
    _need_cuda()
    found = recorded_segments(SUITE[case].case, implementation)
    _CONSOLE.print(segment_table(found))
    if out is not None:
        save(out, [found])


@app.command()
def show(
    results: Annotated[list[Path], typer.Argument(help="JSON files written by the other commands.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables for a document.")] = False,
    plots: Annotated[Path | None, typer.Option(help="Draw figures into this folder.")] = None,
) -> None:
    """Show saved results as tables, and draw them."""
    from . import report

    loaded, tables = report.other_tables(report.load(results))
    for table in tables:
        _CONSOLE.print(table)
    for result in loaded:
        if markdown:
            print(report.markdown(result))
        else:
            _CONSOLE.print(report.step_table(result))
    if plots is not None:
        from .plots import draw

        for path in draw(loaded, plots):
            _CONSOLE.out(f"wrote {path}")


@app.command()
def goals(
    folder: Annotated[Path, typer.Argument(help="Folder of result files that 'suite' wrote.")],
) -> None:
    """What was aimed at and what was reached.

    A table for a document; bold misses its goal.
    """
    from .goals import goal_table
    from .report import markdown_table

    if not folder.is_dir():
        raise typer.BadParameter(f"folder: expected one with result files, got {folder}")
    print(markdown_table(goal_table(folder)), end="")


@app.command()
def timeline(
    traces: Annotated[list[Path], typer.Argument(help="Traces kept with 'step --traces'.")],
    out: Annotated[Path, typer.Option(help="The figure to write; the ending chooses the format.")] = Path(
        "timeline.svg"
    ),
) -> None:
    """Draw what each stream did in profiled steps."""
    from .timeline import draw_timeline

    _CONSOLE.out(f"wrote {draw_timeline(traces, out)}")
