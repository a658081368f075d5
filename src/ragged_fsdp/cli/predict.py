"""``ragged-fsdp predict``: what a training step will cost on any number of GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape

from ragged_fsdp.cli import ABOVE_ZERO, FROM_ZERO, HELP_OPTIONS, collecting_no_garbage, given_options
from ragged_fsdp.cli.plan_display import Column, errors_in_one_line, fitted_table, output_console

if TYPE_CHECKING:
    from ragged_fsdp.predict.card import Card
    from ragged_fsdp.predict.network import Network
    from ragged_fsdp.predict.step import Prediction, Setup
    from ragged_fsdp.predict.workload import Workload
    from ragged_fsdp.trainer.config import TrainConfig

__all__ = ["command"]

_GIB = 1 << 30
_FILE = click.Path(path_type=Path)
_INPUT = click.Path(path_type=Path, exists=True, dir_okay=False)
_FROM_ONE = click.IntRange(min=1)
_NETWORKS = {
    "a100": "a100-200g",
    "h100": "h200-400g",
    "h200": "h200-400g",
    "h800": "paper",
    "gb200": "nvl72",
    "b200": "b200-400g",
}
"""The network that usually comes with a GPU; what is used is always shown."""

_NOT_BESIDE_SEARCH = ("plot_file", "timeline")
_SEARCHED = ("replicas", "accumulate", "activation_checkpointing", "reshard_after_forward")
"""Settings of which ``--search`` tries several values; those that are given it keeps."""

_HELP = """Say what a training step of MODEL will cost: time, MFU, memory by category, what binds.

MODEL is any that `train --model` takes, or the TOML file of a training run. No GPU is needed, nothing is
downloaded.

\b
Examples:
  ragged-fsdp predict llama-3-70b --gpus 16 --tokens-per-gpu 8192 \\
      --hardware h100 --search
  ragged-fsdp predict gpt-oss-120b --gpus 64..4096 --tokens-per-gpu 8192 \\
      --hardware h200 --fsdp2
  ragged-fsdp predict llama-3-8b --gpus 8..100000 --batch-tokens 16777216 \\
      --hardware h200 --plot scaling.svg
  ragged-fsdp predict llama-3-70b --gpus 64 --tokens-per-gpu 4096 \\
      --hardware h200 --timeline step.svg
"""


@click.command(help=_HELP, context_settings={"show_default": True, **HELP_OPTIONS})
@click.argument("model")
@click.option("--gpus", required=True, help="64, or 8,64,512, or 8..100000 (doubling).")
@click.option("--tokens-per-gpu", type=_FROM_ONE, help="tokens of a GPU in a step.")
@click.option("--batch-tokens", type=_FROM_ONE, help="tokens of a step over all GPUs, instead.")
@click.option("--hardware", help="a GPU (h100, h200, ...) or a calibration card (.json).")
@click.option("--network", help="a network profile; by default the one that usually comes with the GPU.")
@click.option(
    "--nccl-table", type=_INPUT, help="output of nccl-tests' all_gather_perf, instead of its rates."
)
@click.option("--seq-len", type=_FROM_ONE, help="tokens of a sequence.  [default: 4096, or the TOML's]")
@click.option("--replicas", type=_FROM_ONE, default=1, help="HSDP: groups that each hold the whole model.")
@click.option("--ep", type=_FROM_ONE, default=1, help="expert parallelism: GPUs that share the experts.")
@click.option("--ep-across-nodes", is_flag=True, help="these lie on different nodes, weights inside one.")
@click.option("--tp", type=_FROM_ONE, default=1, help="tensor parallelism: GPUs that share their tokens.")
@click.option("--offload", is_flag=True, help="weights, gradients and optimizer are in the host's memory.")
@click.option("--offload-optimizer", is_flag=True, help="optimizer state alone is in the host's memory.")
@click.option("--accumulate", type=_FROM_ONE, default=1, help="micro-batches of a step.")
@click.option("--reduction", default="auto", help="auto, reduce_scatter, all_to_all or two_level.")
@click.option("--reduce-dtype", default="fp32", help="fp32 or bf16: of the sums of gradients.")
@click.option("--internode-dtype", default="bf16", help="bf16 or fp32: of sums that two_level sends.")
@click.option(
    "--reshard-after-forward/--no-reshard-after-forward", default=True, help="free layers between passes."
)
@click.option("--activation-checkpointing", type=click.IntRange(min=0), default=0, help="every n-th layer.")
@click.option("--compile", "compiled", is_flag=True, help="layers are compiled (modelled, never measured).")
@click.option("--codes", is_flag=True, help="weights are gathered as 8-bit codes.")
@click.option("--optimizer", default="adamw", help="adamw, adam8bit, muon or sgd.")
@click.option(
    "--expandable-segments/--no-expandable-segments", default=True, help="how torch's allocator is set."
)
@click.option("--memory", type=ABOVE_ZERO, help="GiB of a GPU that may be used.  [default: all of it]")
@click.option("--fsdp2", is_flag=True, help="show torch's FSDP2 beside ours.")
@click.option("--search", "searching", is_flag=True, help="find the best settings at one number of GPUs.")
@click.option("--allow-codes", is_flag=True, help="let --search round weights to 8-bit codes.")
@click.option("--jitter", type=FROM_ZERO, default=0.5, help="how much GPUs differ in speed, in percent.")
@click.option("--mtbf-hours", type=FROM_ZERO, default=50_700.0, help="GPU-hours between failures.")
@click.option("--restart-seconds", type=FROM_ZERO, default=600.0, help="lost by a restart.")
@click.option("--save-seconds", type=FROM_ZERO, default=30.0, help="for which a checkpoint stops training.")
@click.option("--checkpoint-seconds", type=FROM_ZERO, default=0.0, help="between checkpoints; 0: the best.")
@click.option("--json", "as_json", is_flag=True, help="print JSON and nothing else.")
@click.option("--plot", "plot_file", type=_FILE, help="throughput and MFU over GPUs, svg or png.")
@click.option("--timeline", type=_FILE, help="a picture of one step at the last number of GPUs, svg.")
def command(model: str, gpus: str, as_json: bool, **options: Any) -> None:
    """Predict and show what was asked for."""
    status = Console(stderr=True)
    with collecting_no_garbage(), errors_in_one_line(status):
        if options["timeline"] is not None and options["timeline"].suffix.lower() != ".svg":
            raise ValueError(f"--timeline {options['timeline']}: the suffix must be .svg.")
        request = _Request(model, gpus, options)
        if options["searching"]:
            _search(request, as_json, options)
        elif options["allow_codes"]:
            raise ValueError("--allow-codes is for --search; --codes gathers codes.")
        else:
            _predict(request, as_json, options, status)


class _Request:
    """The model, the hardware and a setup for each number of GPUs."""

    def __init__(self, model: str, gpus: str, options: dict[str, Any]) -> None:
        options = dict(options)
        name, changes = model, dict[str, str]()
        if model.endswith(".toml"):
            name, changes = _from_toml(Path(model), options)
        if (options["tokens_per_gpu"] is None) == (options["batch_tokens"] is None):
            raise ValueError("give one of --tokens-per-gpu and --batch-tokens.")
        self.fsdp2: bool = options["fsdp2"]
        """Whether FSDP2 is shown beside ours: by the flag, or since the run is one of FSDP2."""
        counts = parse_gpus(gpus)
        self.card, self.network = _hardware(options)
        from ragged_fsdp.predict.workload import workload_of

        self.workload: Workload = workload_of(name, changes)
        self.setups: list[Setup] = []
        self.skipped: list[int] = []
        for count in counts:
            setup = _setup(count, options)
            if setup is None:
                self.skipped.append(count)
            else:
                self.setups.append(setup)
        if not self.setups:
            raise ValueError(
                f"--batch-tokens {options['batch_tokens']}: at no number of GPUs does every GPU get whole "
                f"sequences of {options['seq_len'] or 4096} tokens."
            )

    def run(self, setup: Setup) -> Prediction:
        from ragged_fsdp.predict.step import predict

        return predict(self.workload, setup, self.card, self.network)


def parse_gpus(text: str) -> list[int]:
    """``64``, ``8,64`` or ``8..100000``: doubling from the first number, and the last one."""
    counts: list[int] = []
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        if not first.isdigit() or int(first) < 1 or (dots and (not last.isdigit() or int(last) < int(first))):
            raise ValueError(f"--gpus {text!r}: expected numbers or FROM..TO, got {part!r}.")
        count = int(first)
        counts.append(count)
        while dots and count * 2 <= int(last):
            count *= 2
            counts.append(count)
        if dots:
            counts.append(int(last))
    return sorted(set(counts))


def _from_toml(path: Path, options: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """The settings of a training run; flags that were given count."""
    from ragged_fsdp.trainer.config_file import from_values, load_toml

    config = from_values(load_toml(path))
    sharding, data = config.sharding, config.data
    _refuse_what_is_not_modelled(path, config)
    passed_over = [name for name in ("granularity", "ranks_per_node") if getattr(sharding, name)]
    if passed_over:
        click.echo(f"{path}: without {' and '.join(passed_over)}; nodes are those of --network", err=True)
    options["seq_len"] = options["seq_len"] or data.seq_len
    if options["tokens_per_gpu"] is None and options["batch_tokens"] is None:
        options["batch_tokens"] = data.batch * data.seq_len
    given = {
        "replicas": sharding.replicas,
        "ep": sharding.ep,
        "ep_across_nodes": sharding.ep_across_nodes,
        "tp": sharding.tp,
        "accumulate": data.accumulate,
        "reduction": sharding.reduction,
        "activation_checkpointing": sharding.activation_checkpointing,
        "optimizer": config.optimizer.optimizer,
        "offload_optimizer": config.optimizer.offload_optimizer,
        "fsdp2": sharding.sharding == "fsdp2",
        "internode_dtype": "fp32" if sharding.internode_dtype == "fp32" else "bf16",
        "reshard_after_forward": sharding.reshard_after_forward,
        "reduce_dtype": "bf16" if sharding.precision == "bf16-reduce" else "fp32",
        "codes": bool(sharding.gather_codes),
        "compiled": sharding.compile,
    }
    options |= {key: value for key, value in given.items() if key not in given_options()}
    return config.model.model, dict(config.model.model_set)


def _refuse_what_is_not_modelled(path: Path, config: TrainConfig) -> None:
    sharding = config.sharding
    modelled = {
        "sharding": ("ragged", "fsdp2"),
        "precision": ("auto", "bf16", "bf16-reduce"),
        "fp8": (False,),
        "dispatch": ("all_to_all",) if sharding.ep > 1 else (sharding.dispatch,),
    }
    for name, values in modelled.items():
        if (value := getattr(sharding, name)) not in values:
            expected = ", ".join(map(str, values))
            raise ValueError(f"{path}: {name} = {value} is not modelled; expected {expected}.")
    if config.model.freeze:
        raise ValueError(
            f"{path}: freeze = {config.model.freeze} is not modelled; expected every parameter to train."
        )


def _hardware(options: dict[str, Any]) -> tuple[Card, Network]:
    from ragged_fsdp.models.names import nearest
    from ragged_fsdp.predict.card import DEVICES, find_card
    from ragged_fsdp.predict.network import PROFILES

    if options["hardware"] is None:
        raise ValueError(f"--hardware is missing: a card (.json) or one of {', '.join(DEVICES)}.")
    card = find_card(options["hardware"])
    name = options["network"]
    if name is None:
        name = next((net for key, net in _NETWORKS.items() if key in card.device.lower()), None)
        if name is None:
            raise ValueError(f"--network is missing: for a {card.device} none is known.")
    if name not in PROFILES:
        raise ValueError(f"--network {name!r}: {nearest(name, PROFILES)}")
    if options["memory"] is not None:
        card = replace(card, memory_gib=float(options["memory"]))
    return card, PROFILES[name]


def _setup(gpus: int, options: dict[str, Any]) -> Setup | None:
    """The setup at one number of GPUs; None where a batch cannot be shared by them."""
    from ragged_fsdp.predict.scale import Scale
    from ragged_fsdp.predict.step import Setup

    seq_len = options["seq_len"] or 4096
    tokens = options["tokens_per_gpu"]
    if tokens is None:
        if options["batch_tokens"] * options["tp"] % (gpus * seq_len * options["accumulate"]):
            return None
        tokens = options["batch_tokens"] // gpus
    table = read_nccl_table(options["nccl_table"]) if options["nccl_table"] else ()
    return Setup(
        gpus=gpus,
        tokens_per_gpu=tokens,
        seq_len=seq_len,
        replicas=options["replicas"],
        micro_batches=options["accumulate"],
        ep=options["ep"],
        ep_across_nodes=options["ep_across_nodes"],
        tp=options["tp"],
        offload=options["offload"],
        offload_optimizer=options["offload_optimizer"],
        reduction=options["reduction"],
        reduce_dtype=options["reduce_dtype"],
        internode_dtype=options["internode_dtype"],
        reshard_after_forward=options["reshard_after_forward"],
        activation_checkpointing=options["activation_checkpointing"],
        codes=options["codes"],
        compile=options["compiled"],
        optimizer=options["optimizer"],
        expandable_segments=options["expandable_segments"],
        ring_table=table,
        scale=Scale(
            jitter=options["jitter"] / 100,
            mtbf_hours=options["mtbf_hours"],
            restart_s=options["restart_seconds"],
            save_s=options["save_seconds"],
            checkpoint_s=options["checkpoint_seconds"],
        ),
    )


def read_nccl_table(path: Path) -> tuple[tuple[float, float], ...]:
    """Bytes and bus bandwidth (GB/s, out of place) of the lines of ``all_gather_perf``."""
    table = []
    for line in path.read_text().splitlines():
        cells = line.split()
        if len(cells) >= 8 and cells[0].isdigit() and int(cells[0]) > 0:
            try:
                rate = float(cells[7])
            except ValueError:
                continue
            if rate > 0:
                table.append((float(cells[0]), rate))
    if not table:
        raise ValueError(f"--nccl-table {path}: no lines of nccl-tests (size, count, type, ..., busbw).")
    return tuple(sorted(table))


# -- answers ---------------------------------------------------------------------------------------


def _predict(request: _Request, as_json: bool, options: dict[str, Any], status: Console) -> None:
    ours = [request.run(setup) for setup in request.setups]
    curves = {"ragged": ours}
    if request.fsdp2:
        curves["fsdp2"] = [
            request.run(replace(setup, sharding="fsdp2", reduction="auto", codes=False))
            for setup in request.setups
        ]
    if options["plot_file"] is not None:
        from ragged_fsdp.predict.pictures import plot_scaling

        plot_scaling(options["plot_file"], _title(request, ours[0]), curves)
        status.print(f"wrote {options['plot_file']}")
    if options["timeline"] is not None:
        from ragged_fsdp.predict.pictures import timeline_svg

        options["timeline"].write_text(timeline_svg(ours[-1]), encoding="utf-8")
        status.print(f"wrote {options['timeline']}")
    if as_json:
        rows = [p.as_json() for predictions in curves.values() for p in predictions]
        print(json.dumps({"predictions": rows, "skipped_gpus": request.skipped}, indent=1))
        return
    console = output_console()
    console.print(f"[bold]{escape(_title(request, ours[0]))}[/]", highlight=False)
    console.print(_time_table(curves, console.width))
    console.print(_memory_table(curves, console.width))
    _notes(console, request, ours[-1])


def _title(request: _Request, first: Prediction) -> str:
    kind = "measured card" if request.card.measured else "roofline card, nothing measured"
    return f"{request.workload.name} on {request.card.device} ({kind}), {request.network.text}"


def _rows(
    curves: dict[str, list[Prediction]], cells: Callable[[Prediction], Sequence[str]]
) -> list[tuple[Sequence[str], str | None]]:
    rows: list[tuple[Sequence[str], str | None]] = []
    for group in zip(*curves.values()):
        for label, prediction in zip(curves, group):
            style = None if prediction.fits else "dim"
            rows.append(((str(prediction.setup.gpus), label, *cells(prediction)), style))
    return rows


def _time_table(curves: dict[str, list[Prediction]], width: int) -> Any:
    columns = (
        Column("GPUs"),
        Column("sharding", 3 if len(curves) == 1 else 0, text=True),
        Column("tokens/GPU", 5),
        Column("step"),
        Column("±"),
        Column("tokens/s", 1),
        Column("per GPU"),
        Column("MFU"),
        Column("waiting"),
        Column("goodput", 2),
        Column("reduction", 6, text=True),
        Column("binds", 4, text=True),
    )

    def cells(p: Prediction) -> Sequence[str]:
        return (
            f"{p.setup.tokens_per_gpu:,}",
            _seconds(p.seconds.value),
            f"{p.seconds.error:.0%}",
            f"{p.tokens_per_second:,.0f}",
            f"{p.tokens_per_second / p.setup.gpus:,.0f}",
            f"{p.mfu:.1%}",
            f"{p.exposed_s / p.seconds.value:.0%}",
            f"{p.goodput.share:.1%}",
            p.reduction,
            p.binds,
        )

    return fitted_table("time of a step", columns, _rows(curves, cells), width)


def _memory_table(curves: dict[str, list[Prediction]], width: int) -> Any:
    """Names as in the ledger; the columns that are small go first where the terminal is narrow."""
    names = ("weights", "gathered", "gradients", "reduction", "optimizer", "activations")
    stated = ("workspace", "fragmentation")
    spares = {"workspace": 6, "fragmentation": 5, "reduction": 2, "gathered": 1}
    columns = (
        Column("GPUs"),
        Column("sharding", 3 if len(curves) == 1 else 0, text=True),
        Column("total"),
        Column("±"),
        *(Column(name, spares.get(name, 0)) for name in (*names, *stated)),
        Column("padding", 4),
        Column("", text=True),
    )

    def cells(p: Prediction) -> Sequence[str]:
        memory = {key.partition(" ")[0]: value for key, value in p.memory.items()}
        return (
            f"{p.memory_bytes / _GIB:.1f}",
            f"{p.memory_error:.0%}",
            *(f"{memory.get(name, 0) / _GIB:.1f}" for name in (*names, *stated)),
            f"{p.padding:.2%}",
            "" if p.fits else "does not fit",
        )

    first = next(iter(curves.values()))[0]
    optimizer = first.setup.optimizer
    title = f"GiB of a GPU when most is used ({optimizer}; it has {first.memory_limit / _GIB:.0f})"
    return fitted_table(title, columns, _rows(curves, cells), width)


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 10 else f"{value:.1f} s"


def _notes(console: Console, request: _Request, last: Prediction) -> None:
    compute = (
        "times and memory of layers were measured on such a GPU"
        if last.measured
        else "layers are counted and modelled by a roofline"
        + (", times what others of their sort took over theirs on this card" if request.card.layers else "")
    )
    network = "the network is modelled"
    if last.setup.ring_table:
        network = "gathers and reduce-scatters are by the table, other collectives are modelled"
    lines = [
        f"{compute}; {network}; workspace, fragmentation and goodput are stated models (docs/predict.md)",
        f"a failure every {last.goodput.hours_between_failures:.1f} h at {last.setup.gpus} GPUs, "
        f"a checkpoint every {last.goodput.checkpoint_s / 60:.1f} min",
    ]
    if request.skipped:
        counts = ", ".join(map(str, request.skipped))
        lines.append(f"left out, the batch has no whole sequences for every GPU: {counts} GPUs")
    for line in lines:
        console.print(line, style="dim", highlight=False)


def least_state(request: _Request, setup: Setup) -> str:
    """What would fit, in words: a smaller optimizer state, or fewer tokens."""
    from ragged_fsdp.predict.search import search

    for optimizer in ("adam8bit", "sgd"):
        other = search(request.workload, replace(setup, optimizer=optimizer), request.card, request.network)[
            0
        ]
        if other.prediction.fits:
            needs = other.prediction.memory_bytes / _GIB
            return f"--optimizer {optimizer} would, with {other.flags} ({needs:.1f} GiB)"
    return "use more GPUs or fewer tokens per GPU"


def _search(request: _Request, as_json: bool, options: dict[str, Any]) -> None:
    from ragged_fsdp.predict.search import search

    for name, flag in given_options().items():
        if name in _NOT_BESIDE_SEARCH:
            raise ValueError(f"{flag} shows what --search does not: give one of them.")
        if name in _SEARCHED:
            raise ValueError(f"{flag} is among what --search looks for: give one of them.")
    if request.fsdp2:
        raise ValueError("--search is of ours: leave --fsdp2, or the sharding of the file.")
    if len(request.setups) > 1:
        raise ValueError("--search looks at one number of GPUs: give one.")
    setup = request.setups[0]
    found = search(request.workload, setup, request.card, request.network, allow_codes=options["allow_codes"])
    if as_json:
        entries = [entry.prediction.as_json() | {"flags": entry.flags, "why": entry.why} for entry in found]
        print(json.dumps({"found": entries}, indent=1))
        return
    console = output_console()
    first = found[0].prediction
    console.print(f"[bold]{escape(_title(request, first))}[/]", highlight=False)
    columns = (
        Column("FSDP"),
        Column("replicas", 2),
        Column("step"),
        Column("MFU"),
        Column("GiB"),
        Column("flags of train", text=True),
        Column("", text=True),
    )
    rows = [
        (
            (
                str(entry.prediction.setup.shard),
                str(entry.prediction.setup.replicas),
                _seconds(entry.prediction.seconds.value),
                f"{entry.prediction.mfu:.1%}",
                f"{entry.prediction.memory_bytes / _GIB:.1f}",
                escape(entry.flags),
                entry.why,
            ),
            "bold green" if entry.why == "best" else None if entry.prediction.fits else "dim",
        )
        for entry in found
    ]
    title = f"{setup.gpus} GPUs, {setup.tokens_per_gpu} tokens each, {request.card.memory_gib:.0f} GiB"
    console.print(fitted_table(title, columns, rows, console.width))
    if not first.fits:
        less = least_state(request, setup)
        console.print(f"nothing fits; {escape(less)}", highlight=False)
    _notes(console, request, first)
