"""The demo's run on 1, 2, 3 and 4 processes, and under FSDP2 and DDP: one seed, one curve.

    python benchmarks/demo/parity.py            # trains each variant, then writes the results
    python benchmarks/demo/parity.py --draw     # writes results.json and curves.svg from finished runs

A variant that has finished is not run again; one that was stopped goes on where it stopped.
"""

import argparse
import json
import platform
from pathlib import Path

import torch

from ragged_fsdp.cli.demo import SETTINGS
from ragged_fsdp.trainer.config_file import from_values
from ragged_fsdp.trainer.metrics import read_metrics
from ragged_fsdp.trainer.start import start

HERE = Path(__file__).parent
VARIANTS = {
    "ragged, 4 processes": {"sharding": "ragged", "processes": 4},
    "FSDP2, 4 processes": {"sharding": "fsdp2", "processes": 4, "granularity": {}},
    "DDP, 4 processes": {"sharding": "ddp", "processes": 4, "granularity": {}},
    "ragged, 3 processes": {"sharding": "ragged", "processes": 3},
    "ragged, 2 processes": {"sharding": "ragged", "processes": 2},
    "ragged, 1 process": {"sharding": "ragged", "processes": 1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/demo-parity"), help="folder of the runs")
    parser.add_argument("--only", choices=list(VARIANTS), help="train this variant alone, and do not draw")
    parser.add_argument("--draw", action="store_true", help="do not train, only draw what there is")
    options = parser.parse_args()
    chosen = {options.only: VARIANTS[options.only]} if options.only else VARIANTS
    for name, changes in {} if options.draw else chosen.items():
        folder = options.runs / name.replace(", ", "-").replace(" ", "-")
        common = {
            "run_dir": str(folder),
            "tensorboard": False,
            "device": "cpu",
            "checkpoint_every": 20,
            "keep_last": 1,
        }
        print(name, start(from_values(SETTINGS, common, changes))["eval_loss"], flush=True)
    if not options.only:
        summarize(options.runs)


def summarize(runs: Path) -> None:
    """Results of all variants that have finished, and their curves."""
    results, curves = {}, {}
    for name in VARIANTS:
        rows = read_metrics(runs / name.replace(", ", "-").replace(" ", "-"))
        evals = {row["step"]: row["loss"] for row in rows if row["kind"] == "eval"}
        if any(row["kind"] == "end" and row["status"] == "finished" for row in rows):
            curves[name] = evals
            results[name] = {
                "validation_loss": evals,
                "last_training_loss": [row["loss"] for row in rows if row["kind"] == "train"][-1],
            }
    first = next(iter(curves.values()))
    spread = {
        step: max(c[step] for c in curves.values()) - min(c[step] for c in curves.values()) for step in first
    }
    system = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    report = {
        "settings": SETTINGS,
        "system": system,
        "largest_difference_by_step": spread,
        "variants": results,
    }
    (HERE / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(curves, HERE / "curves.svg")
    print(f"{len(curves)} variants; largest difference of a validation loss: {max(spread.values()):.2e}")


def draw(curves: dict[str, dict[int, float]], path: Path) -> None:
    """Validation losses on the left, their distance from the first variant's on the right."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    reference = next(iter(curves.values()))
    with plt.rc_context(
        {"svg.hashsalt": "ragged_fsdp", "font.size": 9, "axes.grid": True, "grid.alpha": 0.25}
    ):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
        for index, (name, curve) in enumerate(curves.items()):
            style = {
                "marker": "o^sDvx"[index],
                "markersize": 7 - index,
                "linewidth": 3 - 0.4 * index,
                "alpha": 0.8,
            }
            left.plot(list(curve), list(curve.values()), label=name, **style)
            right.plot(list(curve), [curve[step] - reference[step] for step in curve], label=name, **style)
        left.set(title="validation loss of the demo", xlabel="step")
        right.set(title=f"difference from {next(iter(curves))}", xlabel="step")
        left.legend(frameon=False)
        for axis in (left, right):
            axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
