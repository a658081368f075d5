"""``ragged-fsdp plan``: what a layout costs before anything is launched."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from ragged_fsdp.cli import ABOVE_ZERO, FROM_ZERO, HELP_OPTIONS, collecting_no_garbage, given_options
from ragged_fsdp.cli.plan_costs import (
    Candidate,
    PaddingWarning,
    PlannedModel,
    PlanSettings,
    SpecGroup,
    advise,
    merge_equal,
    plan_model,
    recommendation,
    warnings_for,
)
from ragged_fsdp.cli.plan_display import (
    Curve,
    advice_table,
    ascii_picture,
    errors_in_one_line,
    group_table,
    network_table,
    output_console,
    plot,
    summary_table,
    svg_picture,
)
from ragged_fsdp.cli.plan_fp8 import plan_fp8
from ragged_fsdp.cli.plan_inputs import (
    Group,
    check_rules,
    expand_rules,
    load_shapes,
    parse_sizes,
    wrap_groups,
)
from ragged_fsdp.cli.plan_network import NetworkPlan, network_of

__all__ = ["command"]

_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_DETAILED_SIZES = 3
_USUAL_NODE = 8
_PATIENCE_SECONDS = 1.0  # before a progress bar appears
_T = TypeVar("_T")
_FILE = click.Path(path_type=Path)
_FROM_ONE = click.IntRange(min=1)
_HELP = """Lay a model's parameters out over FSDP ranks and show padding, bounds and buffers.

MODEL is any that `train --model` takes, or a config.json, or a JSON of tensors. By name:

\b
  deepseek-v3, gpt-oss-20b, gpt-oss-120b, llama-3-8b, llama-3-70b,
  llama-3-405b, qwen3-30b-a3b, qwen3-235b-a22b;
  nano, demo, small, medium, large (built in)

\b
Examples:
  ragged-fsdp plan deepseek-v3 -g '*.experts.*=128rows' -n 512,1024
  ragged-fsdp plan gpt-oss-120b -g '*.experts.*_proj=1rows|16rows|128rows' \\
      -n 8:1024:8 --plot padding.svg
  ragged-fsdp plan qwen3-30b-a3b -g '*.mlp.experts.*=32rows' -n 16 \\
      --show model.layers.0 --svg layer.svg
  ragged-fsdp plan gpt-oss-120b -n 64,256 --ranks-per-node 8
  ragged-fsdp plan gpt-oss-120b -n 64,1024 --fp8
  ragged-fsdp plan llama-3-70b --advise --gpus 512 --memory 60
  ragged-fsdp plan llama-3-70b --advise --gpus 512 --hardware h200 \\
      --tokens-per-gpu 8192
"""


_ADVISED_BY = {"model", "advising", "gpus", "memory", "hardware", "tokens_per_gpu", "as_json"}
"""What ``--advise`` takes with ``--hardware``."""


@click.command(help=_HELP, context_settings={"show_default": True, **HELP_OPTIONS})
@click.argument("model")
@click.option(
    "-n", "--fsdp", default="8,16,32,64,128,256,512,1024", help="FSDP sizes: 64 or 8,16 or FROM:TO:STEP."
)
@click.option(
    "-g",
    "--granularity",
    multiple=True,
    metavar="PATTERN=RULE",
    help="what stays on one rank: 128rows, tiles:128x128, 256elements, whole; A|B compares, first match wins",
)
@click.option(
    "-w",
    "--wrap",
    multiple=True,
    metavar="NAME",
    default=["layers"],
    help="what has a buffer of its own: layers, model, or a pattern of module names.",
)
@click.option(
    "--experts",
    default="built",
    help="built (as `train` has them: one tensor per layer), published (as the checkpoint) or separate.",
)
@click.option("--ep", type=_FROM_ONE, default=1, help="expert-parallel size: plan the experts of one rank.")
@click.option("--dtype", default="bf16", help=f"element type of the buffers: {', '.join(_ELEMENT_BYTES)}.")
@click.option(
    "--fp8",
    is_flag=True,
    help="products in FP8: which weights, by which rule not, and what is gathered, beside bf16.",
)
@click.option("--unit", type=_FROM_ONE, default=128, help="a shard is a multiple of this many elements.")
@click.option("--align", type=_FROM_ONE, default=1, help="tensors start at multiples of this many elements.")
@click.option("--order", default="best", help="of the tensors in a buffer: best, default, block or numel.")
@click.option("--max-buffers", type=_FROM_ONE, default=1, help="split a group into up to this many buffers.")
@click.option(
    "--nearest/--no-nearest",
    default=False,
    help="where a rule does not divide a tensor, take the largest block that does.",
)
@click.option("--threshold", type=FROM_ZERO, default=3.0, help="warn above this padding, in percent.")
@click.option(
    "--ranks-per-node",
    "--node",
    type=_FROM_ONE,
    help="show what a step sends inside nodes and between them; sizes named in advice are multiples of it, "
    f"or of {_USUAL_NODE}.",
)
@click.option("--json", "as_json", is_flag=True, help="print JSON and nothing else.")
@click.option("--plot", "plot_file", type=_FILE, help="padding against ranks, svg or png.")
@click.option("--show", help="draw the layout of this group at one FSDP size.")
@click.option("--svg", type=_FILE, help="write the picture of --show to this file.")
@click.option("--rows", type=_FROM_ONE, default=32, help="most ranks that --show draws.")
@click.option("--advise", "advising", is_flag=True, help="recommend FSDP sizes for --gpus.")
@click.option("--gpus", type=_FROM_ONE, default=1024, help="GPUs of the job, for --advise.")
@click.option("--memory", type=ABOVE_ZERO, help="GiB per GPU for state and buffers, for --advise.")
@click.option(
    "--state-bytes",
    type=FROM_ZERO,
    default=16.0,
    help="bytes of training state per parameter, for --advise.",
)
@click.option("--hardware", help="rank --advise by predicted time on such GPUs, as `predict --search` does.")
@click.option("--tokens-per-gpu", type=_FROM_ONE, help="tokens of a GPU in a step, for --hardware.")
def command(
    model: str,
    fsdp: str,
    granularity: tuple[str, ...],
    wrap: tuple[str, ...],
    experts: str,
    ep: int,
    dtype: str,
    fp8: bool,
    threshold: float,
    ranks_per_node: int | None,
    as_json: bool,
    plot_file: Path | None,
    show: str | None,
    svg: Path | None,
    rows: int,
    advising: bool,
    gpus: int,
    memory: float | None,
    state_bytes: float,
    hardware: str | None,
    tokens_per_gpu: int | None,
    **planner: Any,
) -> None:
    """Plan ``model`` and show what was asked for; ``planner`` are fields of ``PlanSettings``."""
    console, status = output_console(), Console(stderr=True)
    with collecting_no_garbage(), errors_in_one_line(status):
        base = PlanSettings(element_bytes=_element_bytes(dtype), **planner)
        if fp8:
            others = {"--granularity": granularity, "--advise": advising, "--show": show, "--plot": plot_file}
            others |= {"--ranks-per-node": ranks_per_node, "--experts": experts != "built", "--svg": svg}
            others |= {"--dtype": dtype != "bf16", "--hardware": hardware, "--tokens-per-gpu": tokens_per_gpu}
            if given := [name for name, value in others.items() if value]:
                raise ValueError(f"--fp8 compares ways of its own: leave {given[0]}.")
            with status.status(f"planning {model}"):
                found = plan_fp8(load_shapes(model, ep=ep), wrap, parse_sizes(fsdp), base)
            print(json.dumps(found.as_json(), indent=1)) if as_json else found.print(console)
            return
        if hardware is not None or tokens_per_gpu is not None:
            if not advising or hardware is None or tokens_per_gpu is None:
                raise ValueError("--hardware and --tokens-per-gpu go together, with --advise.")
            if more := [flag for name, flag in given_options().items() if name not in _ADVISED_BY]:
                raise ValueError(f"{more[0]}: --advise with --hardware is `predict --search`, without it.")
            _advise_by_time(model, gpus, hardware, tokens_per_gpu, memory, as_json)
            return
        compared = [replace(base, rules=rules) for rules in expand_rules(granularity)]
        sizes = _sizes_for(gpus, ranks_per_node or _USUAL_NODE) if advising else parse_sizes(fsdp)
        if show is not None and (len(sizes) > 1 or len(compared) > 1):
            raise ValueError("--show draws one layout: give one --fsdp size and one granularity.")
        if svg is not None and show is None:
            raise ValueError(f"--svg {str(svg)!r} writes the picture of --show: name a group there.")
        with status.status(f"reading {model}"):
            shapes = load_shapes(model, experts=experts, ep=ep)
        for settings in compared:
            check_rules(shapes.tensors, settings.rules)
        groups = wrap_groups(shapes.tensors, wrap)
        results = _plan_all(groups, sizes, compared, status)
        if show is not None:
            _show(console, results[0][1], results[0][2][0], show, svg, rows)
            return
        if plot_file is not None:
            curves = [_curve(*result) for result in results]
            plot(plot_file, f"{shapes.title}: padding of the sharded buffers", curves)
            status.print(f"wrote {plot_file}")
        held = None if memory is None else int(memory * 2**30)
        report = _Report(
            shapes.title, status, threshold / 100, ranks_per_node, dtype, gpus, state_bytes, held, advising
        )
        if as_json:
            print(json.dumps(report.as_json(results), indent=1))
        else:
            report.print(console, results)


def _advise_by_time(
    model: str, gpus: int, hardware: str, tokens_per_gpu: int, memory: float | None, as_json: bool
) -> None:
    """What ``predict --search`` prints: with hardware and tokens there is a time to compare by."""
    from ragged_fsdp.cli import predict

    asked = {"--gpus": gpus, "--hardware": hardware, "--tokens-per-gpu": tokens_per_gpu, "--memory": memory}
    given = [text for name, value in asked.items() if value is not None for text in (name, str(value))]
    extra = ["--json"] if as_json else []
    predict.command.main([model, *given, "--search", *extra], prog_name="predict", standalone_mode=False)


def _element_bytes(dtype: str) -> int:
    if dtype not in _ELEMENT_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(_ELEMENT_BYTES)}, got {dtype!r}.")
    return _ELEMENT_BYTES[dtype]


def _sizes_for(gpus: int, node: int) -> list[int]:
    """The FSDP sizes that whole nodes allow: the other factor is replicas."""
    return [n for n in range(1, gpus + 1) if gpus % n == 0 and (n % node == 0 or n == gpus)]


_Compared = tuple[PlanSettings, list[SpecGroup], list[PlannedModel]]


def _plan_all(
    groups: list[Group], sizes: list[int], compared: list[PlanSettings], status: Console
) -> list[_Compared]:
    """Every granularity at every size, with progress when it takes long."""
    merged = [(settings, merge_equal(groups, settings)) for settings in compared]
    results: list[_Compared] = [(settings, specs, []) for settings, specs in merged]
    work = [(place, size) for place in range(len(results)) for size in sizes]
    for place, size in _progress(work, "planning", status):
        settings, specs, plans = results[place]
        plans.append(plan_model(specs, size, settings))
    return results


def _progress(items: Sequence[_T], label: str, console: Console) -> Iterator[_T]:
    """``items`` in turn; the bar starts once they have taken a second and goes when they end."""
    began = time.monotonic()
    bar: Progress | None = None
    try:
        for done, item in enumerate(items):
            if bar is None and time.monotonic() - began > _PATIENCE_SECONDS:
                bar = Progress(console=console, transient=True)
                task = bar.add_task(label, total=len(items), completed=done)
                bar.start()
            if bar is not None:
                bar.update(task, completed=done)
            yield item
    finally:
        if bar is not None:
            bar.stop()


def _label(settings: PlanSettings, groups: list[SpecGroup]) -> str:
    """What stays together: the rules, and blocks that a file of tensors gives."""
    given = any(tensor.granularity is not None for group in groups for tensor in group.source.tensors)
    texts = (["blocks of the file"] if given else []) + [rule.text for rule in settings.rules]
    return ", ".join(texts) or "element-wise"


def _curve(settings: PlanSettings, groups: list[SpecGroup], plans: list[PlannedModel]) -> Curve:
    sizes, padding = [plan.ranks for plan in plans], [plan.padding_ratio for plan in plans]
    return Curve(_label(settings, groups), sizes, padding)


def _show(
    console: Console, groups: list[SpecGroup], plan: PlannedModel, wanted: str, svg: Path | None, rows: int
) -> None:
    """Draw the buffers of the group that has ``wanted`` among its names."""
    chosen = [g for g in plan.groups if wanted in (*g.group.names, g.group.title)]
    if not chosen:
        names = ", ".join(group.title for group in groups)
        raise ValueError(f"--show {wanted!r}: no such group; there are {names}.")
    for number, layout in enumerate(chosen[0].layouts):
        part = f", buffer {number + 1} of {len(chosen[0].layouts)}" if len(chosen[0].layouts) > 1 else ""
        title = f"{wanted} over {plan.ranks} ranks{part}: shards of {layout.shard_numel:,} elements"
        if svg is None:
            console.print(title, style="bold", highlight=False)
            console.print(ascii_picture(layout, console.width, rows), end="")
        else:
            path = svg if not number else svg.with_stem(f"{svg.stem}-{number + 1}")
            path.write_text(svg_picture(layout, title, rows), encoding="utf-8")
            console.print(f"wrote {path}")


@dataclass(frozen=True)
class _Report:
    """Tables or JSON for all granularities compared."""

    title: str
    status: Console
    threshold: float
    ranks_per_node: int | None
    dtype: str
    gpus: int
    state_bytes: float
    memory_bytes: int | None
    advising: bool

    def _candidates(self, plans: list[PlannedModel]) -> list[Candidate]:
        return advise(plans, self.gpus, self.state_bytes, self.memory_bytes)

    def _networks(self, plans: list[PlannedModel]) -> list[NetworkPlan]:
        """What each size sends over which link; nothing unless the user says what a node is."""
        if self.ranks_per_node is None:
            return []
        return [network_of(plan, self.ranks_per_node, self.dtype) for plan in plans]

    def as_json(self, results: list[_Compared]) -> dict[str, Any]:
        planned = []
        for settings, _, plans in results:
            entry: dict[str, Any] = {"granularity": [rule.text for rule in settings.rules]}
            entry |= {"unit": settings.unit, "align": settings.align, "max_buffers": settings.max_buffers}
            entry["sizes"] = [plan.as_json() for plan in plans]
            for size, network in zip(entry["sizes"], self._networks(plans)):
                size["network"] = network.as_json()
            if self.advising:
                entry["advice"] = [candidate.as_json() for candidate in self._candidates(plans)]
            else:
                entry["warnings"] = [vars(warning) for warning in self._warnings(settings, plans)]
            planned.append(entry)
        return {"model": self.title, "plans": planned}

    def print(self, console: Console, results: list[_Compared]) -> None:
        for settings, groups, plans in results:
            label = escape(_label(settings, groups))
            console.print(f"[bold]{escape(self.title)}[/], {label}", highlight=False)
            if self.advising:
                candidates = self._candidates(plans)
                console.print(advice_table(candidates, self.gpus, self.threshold, console.width))
                console.print(recommendation(candidates), highlight=False)
                continue
            for plan in plans if len(plans) <= _DETAILED_SIZES else ():
                console.print(group_table(plan, self.threshold, console.width))
            if len(plans) > 1:
                console.print(summary_table(plans, self.threshold, console.width))
            if networks := self._networks(plans):
                console.print(network_table(networks, console.width))
            for warning in self._warnings(settings, plans):
                console.print(f"[yellow]warning:[/] {escape(warning.text)}", highlight=False)
        if self.ranks_per_node is None and not self.advising:
            console.print(
                "--ranks-per-node N shows what a step sends inside nodes and between them.", style="dim"
            )

    def _warnings(self, settings: PlanSettings, plans: list[PlannedModel]) -> list[PaddingWarning]:
        """Warnings for the sizes shown in detail, or for the worst one of a range."""
        worst = plans if len(plans) <= _DETAILED_SIZES else [max(plans, key=lambda plan: plan.padding_ratio)]
        node = self.ranks_per_node or _USUAL_NODE
        with self.status.status("looking for sizes with less padding"):
            return [w for plan in worst for w in warnings_for(plan, settings, self.threshold, node)]
