"""``ragged-fsdp plan``: what a layout costs before anything is launched."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ragged_fsdp.cli.plan_advice import Candidate, PaddingWarning, advise, recommendation, warnings_for
from ragged_fsdp.cli.plan_models import NAMED_MODELS, load_shapes
from ragged_fsdp.cli.plan_picture import ascii_picture, svg_picture
from ragged_fsdp.cli.plan_plot import Curve, plot
from ragged_fsdp.cli.plan_progress import progress
from ragged_fsdp.cli.plan_report import ModelPlan, PlanSettings, SpecGroup, merge_equal, plan_model
from ragged_fsdp.cli.plan_rules import Group, expand_rules, parse_sizes, wrap_groups
from ragged_fsdp.cli.plan_table import advice_table, group_table, summary_table

__all__ = ["command"]

command = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_DETAILED_SIZES = 3

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help=f"{', '.join(NAMED_MODELS)}, a config.json, or a JSON of tensors."),
]
Sizes = Annotated[str, typer.Option("--fsdp", "-n", help="FSDP sizes: 64 or 8,16 or FROM:TO:STEP.")]
Rules = Annotated[
    list[str],
    typer.Option(
        "--granularity",
        "-g",
        metavar="PATTERN=RULE",
        help="what stays on one rank: 128rows, 256elements or whole; A|B compares; the first match wins.",
    ),
]
Wraps = Annotated[
    list[str],
    typer.Option(
        "--wrap",
        "-w",
        metavar="NAME",
        help="what has a buffer of its own: layers, model, or a pattern of module names.",
    ),
]
Experts = Annotated[str, typer.Option(help="published, fused (one tensor per layer) or separate.")]
Dtype = Annotated[str, typer.Option(help=f"element type of the buffers: {', '.join(_ELEMENT_BYTES)}.")]
Order = Annotated[str, typer.Option(help="of the tensors in a buffer: best, default, block or numel.")]
Nearest = Annotated[
    bool, typer.Option(help="where a rule does not divide a tensor, take the largest block that does.")
]
Node = Annotated[int, typer.Option(min=1, help="ranks per node: sizes named in advice are multiples.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="padding against ranks, svg or png.")]
Threshold = Annotated[float, typer.Option(min=0, help="warn above this padding, in percent.")]
Memory = Annotated[float | None, typer.Option(help="GiB per GPU for state and buffers, for --advise.")]
State = Annotated[float, typer.Option(min=0, help="bytes of training state per parameter, for --advise.")]


@command.command()
def plan(
    model: Model,
    fsdp: Sizes = "8,16,32,64,128,256,512,1024",
    granularity: Rules = [],  # noqa: B006
    wrap: Wraps = ["layers"],  # noqa: B006
    experts: Experts = "published",
    ep: Annotated[int, typer.Option(min=1, help="expert-parallel size: plan the experts of one rank.")] = 1,
    dtype: Dtype = "bf16",
    unit: Annotated[int, typer.Option(min=1, help="a shard is a multiple of this many elements.")] = 128,
    align: Annotated[int, typer.Option(min=1, help="tensors start at multiples of this many elements.")] = 1,
    order: Order = "best",
    max_buffers: Annotated[int, typer.Option(min=1, help="split a group into up to this many buffers.")] = 1,
    nearest: Nearest = False,
    threshold: Threshold = 3.0,
    node: Node = 8,
    json_output: Annotated[bool, typer.Option("--json", help="print JSON and nothing else.")] = False,
    plot_file: Plot = None,
    show: Annotated[str | None, typer.Option(help="draw the layout of this group at one FSDP size.")] = None,
    svg: Annotated[Path | None, typer.Option(help="write the picture of --show to this file.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="most ranks that --show draws.")] = 32,
    advise_sizes: Annotated[bool, typer.Option("--advise", help="recommend FSDP sizes for --gpus.")] = False,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the job, for --advise.")] = 1024,
    memory: Memory = None,
    state_bytes: State = 16.0,
) -> None:
    """Lay a model's parameters out over FSDP ranks and show padding, bounds and buffers.

    ragged-fsdp plan deepseek-v3 -g '*.mlp.*=128rows' -n 512,1024

    ragged-fsdp plan gpt-oss-120b -g '*.experts.*_proj=1rows|16rows|128rows' -n 8:1024:8 --plot padding.svg

    ragged-fsdp plan qwen3-30b-a3b -g '*.mlp.*=32rows' -n 16 --show model.layers.0

    ragged-fsdp plan llama3-70b -g '*=whole' --advise --gpus 512 --memory 60
    """
    console, status = _console(), Console(stderr=True)
    with _errors_in_one_line(status):
        base = PlanSettings((), nearest, unit, align, _element_bytes(dtype), max_buffers, order)
        compared = [replace(base, rules=rules) for rules in expand_rules(granularity)]
        sizes = _sizes_for(gpus, node) if advise_sizes else parse_sizes(fsdp)
        if show is not None and (len(sizes) > 1 or len(compared) > 1):
            raise ValueError("--show draws one layout: give one --fsdp size and one granularity.")
        if svg is not None and show is None:
            raise ValueError(f"--svg {str(svg)!r} writes the picture of --show: name a group there.")
        with status.status(f"reading {model}"):
            shapes = load_shapes(model, experts=experts, ep=ep)
        groups = wrap_groups(shapes.tensors, wrap)
        results = _plan_all(groups, sizes, compared, status)
        if show is not None:
            _show(console, results[0][1], results[0][2][0], show, svg, rows)
            return
        if plot_file is not None:
            curves = [_curve(settings, plans) for settings, _, plans in results]
            plot(plot_file, f"{shapes.title}: padding of the sharded buffers", curves)
            status.print(f"wrote {plot_file}")
        report = _Report(shapes.title, status, threshold / 100, node, gpus, state_bytes, memory, advise_sizes)
        if json_output:
            print(json.dumps(report.as_json(results), indent=1))
        else:
            report.print(console, results)


@contextmanager
def _errors_in_one_line(status: Console) -> Iterator[None]:
    """What the user got wrong, without a traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        status.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def _element_bytes(dtype: str) -> int:
    if dtype not in _ELEMENT_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(_ELEMENT_BYTES)}, got {dtype!r}.")
    return _ELEMENT_BYTES[dtype]


def _sizes_for(gpus: int, node: int) -> list[int]:
    """The FSDP sizes that whole nodes allow: the other factor is replicas."""
    return [n for n in range(1, gpus + 1) if gpus % n == 0 and (n % node == 0 or n == gpus)]


def _console() -> Console:
    """The terminal; where output goes to a file or a pipe, lines are long enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


Planned = tuple[PlanSettings, list[SpecGroup], list[ModelPlan]]


def _plan_all(
    groups: list[Group], sizes: list[int], compared: list[PlanSettings], status: Console
) -> list[Planned]:
    """Every granularity at every size, with progress when it takes long."""
    merged = [(settings, merge_equal(groups, settings)) for settings in compared]
    results: list[Planned] = [(settings, specs, []) for settings, specs in merged]
    work = [(place, size) for place in range(len(results)) for size in sizes]
    for place, size in progress(work, "planning", status):
        settings, specs, plans = results[place]
        plans.append(plan_model(specs, size, settings))
    return results


def _label(settings: PlanSettings) -> str:
    return ", ".join(rule.text for rule in settings.rules) or "element-wise"


def _curve(settings: PlanSettings, plans: list[ModelPlan]) -> Curve:
    return Curve(_label(settings), [plan.ranks for plan in plans], [plan.padding_ratio for plan in plans])


def _show(
    console: Console, groups: list[SpecGroup], plan: ModelPlan, wanted: str, svg: Path | None, rows: int
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
            path.write_text(svg_picture(layout, title, rows))
            console.print(f"wrote {path}")


class _Report:
    """Tables or JSON for all granularities compared."""

    def __init__(
        self,
        title: str,
        status: Console,
        threshold: float,
        node: int,
        gpus: int,
        state_bytes: float,
        memory: float | None,
        advising: bool,
    ) -> None:
        self.title, self.status = title, status
        self.threshold, self.node, self.gpus = threshold, node, gpus
        self.state_bytes, self.advising = state_bytes, advising
        self.memory_bytes = None if memory is None else int(memory * 2**30)

    def _candidates(self, plans: list[ModelPlan]) -> list[Candidate]:
        return advise(plans, self.gpus, self.state_bytes, self.memory_bytes)

    def as_json(self, results: list[Planned]) -> dict[str, Any]:
        planned = []
        for settings, _, plans in results:
            entry: dict[str, Any] = {"granularity": [rule.text for rule in settings.rules]}
            entry |= {"unit": settings.unit, "align": settings.align, "max_buffers": settings.max_buffers}
            entry["sizes"] = [plan.as_json() for plan in plans]
            if self.advising:
                entry["advice"] = [candidate.as_json() for candidate in self._candidates(plans)]
            else:
                entry["warnings"] = [warning.as_json() for warning in self._warnings(settings, plans)]
            planned.append(entry)
        return {"model": self.title, "plans": planned}

    def print(self, console: Console, results: list[Planned]) -> None:
        for settings, _, plans in results:
            console.print(f"[bold]{escape(self.title)}[/], {escape(_label(settings))}", highlight=False)
            if self.advising:
                candidates = self._candidates(plans)
                console.print(advice_table(candidates, self.gpus, self.threshold))
                console.print(recommendation(candidates), highlight=False)
                continue
            for plan in plans if len(plans) <= _DETAILED_SIZES else ():
                console.print(group_table(plan, self.threshold))
            if len(plans) > 1:
                console.print(summary_table(plans, self.threshold))
            for warning in self._warnings(settings, plans):
                console.print(f"[yellow]warning:[/] {escape(warning.text)}", highlight=False)

    def _warnings(self, settings: PlanSettings, plans: list[ModelPlan]) -> list[PaddingWarning]:
        """Warnings for the sizes shown in detail, or for the worst one of a range."""
        worst = plans if len(plans) <= _DETAILED_SIZES else [max(plans, key=lambda plan: plan.padding_ratio)]
        with self.status.status("looking for sizes with less padding"):
            return [w for plan in worst for w in warnings_for(plan, settings, self.threshold, self.node)]
