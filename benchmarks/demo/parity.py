"""The demo's run on 1, 2, 3 and 4 processes, and under FSDP2 and DDP: one seed, one curve.

    python benchmarks/demo/parity.py                      # trains each variant, then writes the results
    python benchmarks/demo/parity.py --precision fp64     # the same in double precision
    python benchmarks/demo/parity.py --device cuda --out benchmarks/demo/cuda     # over NCCL
    python benchmarks/demo/parity.py --draw               # results.json and curves.svg from finished runs

A variant that has finished is not run again; one that was stopped goes on where it stopped. In double
precision rounding is too small to change a token's experts, so what is left are differences of the program.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from ragged_fsdp.cli.demo import SETTINGS
from ragged_fsdp.trainer.config_file import from_values
from ragged_fsdp.trainer.metrics import losses_by_step, read_metrics
from ragged_fsdp.trainer.start import start

HERE = Path(__file__).parent
PRECISIONS = ("fp32", "fp64")
VARIANTS = {
    "ragged, 4 processes": {"sharding": "ragged", "processes": 4},
    "FSDP2, 4 processes": {"sharding": "fsdp2", "processes": 4, "granularity": {}},
    "DDP, 4 processes": {"sharding": "ddp", "processes": 4, "granularity": {}},
    "ragged, 3 processes": {"sharding": "ragged", "processes": 3},
    "ragged, 2 processes": {"sharding": "ragged", "processes": 2},
    "ragged, 1 process": {"sharding": "ragged", "processes": 1},
}

Curve = dict[int, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/demo-parity"), help="folder of the runs")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results.json and curves.svg")
    parser.add_argument("--only", choices=list(VARIANTS), help="train this variant alone, and do not draw")
    parser.add_argument("--draw", action="store_true", help="do not train, only draw what there is")
    options = parser.parse_args()
    chosen = {options.only: VARIANTS[options.only]} if options.only else VARIANTS
    for name, changes in {} if options.draw else chosen.items():
        common = {
            "run_dir": str(run_folder(options.runs, options.precision, name)),
            "precision": options.precision,
            "tensorboard": False,
            "device": options.device,
            "muon_dtype": "fp32" if options.precision == "fp32" else "auto",  # bf16 on GPUs otherwise
            "checkpoint_every": 20,
            "keep_last": 1,
        }
        print(name, start(from_values(SETTINGS, common, changes))["eval_loss"], flush=True)
    if not options.only:
        summarize(options.runs, options.out)


def run_folder(runs: Path, precision: str, name: str) -> Path:
    return runs / precision / name.replace(", ", "-").replace(" ", "-")


def summarize(runs: Path, out: Path) -> None:
    """Results of all variants that have finished, and their curves."""
    report: dict[str, Any] = {"settings": SETTINGS}
    curves: dict[str, dict[str, tuple[Curve, Curve]]] = {}
    for precision in PRECISIONS:
        of_precision = {}
        for name in VARIANTS:
            folder = run_folder(runs, precision, name)
            rows = read_metrics(folder)
            if any(row["kind"] == "end" and row["status"] == "finished" for row in rows):
                of_precision[name] = (losses_by_step(folder), losses_by_step(folder, "eval"))
                began = next(row for row in rows if row["kind"] == "start")
                report["system"] = {"torch": began["torch"], "device": began["device"]}
        if of_precision:
            curves[precision] = of_precision
            report[precision] = results_of(of_precision)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(curves, out / "curves.svg")
    for precision, of_precision in curves.items():
        largest = report[precision]["largest_difference"]
        print(f"{precision}: {len(of_precision)} variants, largest differences {largest}")


def results_of(curves: dict[str, tuple[Curve, Curve]]) -> dict[str, Any]:
    """Losses of each variant, and how far they are apart at most."""
    train, validation = (spread([pair[kind] for pair in curves.values()]) for kind in (0, 1))
    first_apart = next((step for step, difference in train.items() if difference > 1e-4), None)
    return {
        "largest_difference": {
            "training": max(train.values()),
            "validation": max(validation.values()),
            "validation_at_the_end": list(validation.values())[-1],
            "first_step_with_training_losses_over_1e-4_apart": first_apart,
            "training_by_step": {step: train[step] for step in train if step % 10 == 0},
        },
        "variants": {
            name: {"validation_loss": evals, "last_training_loss": list(losses.values())[-1]}
            for name, (losses, evals) in curves.items()
        },
    }


def spread(curves: list[Curve]) -> Curve:
    """Largest minus smallest at each step."""
    return {
        step: max(curve[step] for curve in curves) - min(curve[step] for curve in curves)
        for step in curves[0]
    }


def draw(curves: dict[str, dict[str, tuple[Curve, Curve]]], path: Path) -> None:
    """Validation losses on the left; on the right how far training losses are from the first variant's."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    look = {"svg.hashsalt": "ragged_fsdp", "font.size": 9, "axes.grid": True, "grid.alpha": 0.25}
    with plt.rc_context(look):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
        for precision, line in zip(PRECISIONS, ("-", ":")):
            of_precision = curves.get(precision, {})
            for index, (name, (train, evals)) in enumerate(of_precision.items()):
                color = f"C{index}"
                if precision == PRECISIONS[0]:
                    mark = {"marker": "o^sDvx"[index], "markersize": 8 - index, "linewidth": 3 - 0.4 * index}
                    left.plot(list(evals), list(evals.values()), label=name, color=color, alpha=0.8, **mark)
                reference = next(iter(of_precision.values()))[0]
                apart = [max(abs(train[step] - reference[step]), 1e-17) for step in train]
                if index:
                    right.plot(list(train), apart, color=color, linestyle=line, linewidth=1.2)
        left.set(title="validation loss of the demo", xlabel="step")
        right.set(
            title=f"distance of training losses from '{next(iter(VARIANTS))}'\nfp32 (solid), fp64 (dotted)",
            xlabel="step",
            yscale="log",
        )
        left.legend(frameon=False)
        for axis in (left, right):
            axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
