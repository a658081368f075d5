"""Do ragged sharding and FSDP2 differ by more than rounding? The same short run in three precisions, twice.

    python benchmarks/demo/rounding.py          # writes rounding.json beside it; on GPUs where there are any

If rounding is all that differs, the distance shrinks with the precision, and a run repeats bit for bit.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from ragged_fsdp.trainer.config_file import from_values
from ragged_fsdp.trainer.metrics import losses_by_step, read_metrics
from ragged_fsdp.trainer.start import start

HERE = Path(__file__).parent
SETTINGS: dict[str, Any] = {
    "model": "demo",
    "seq_len": 256,
    "batch": 24,
    "warmup": 5,
    "steps": 12,
    "eval_sequences": 0,
    "tensorboard": False,
    "processes": 2,
    "checkpoint_every": 0,
    "save_at_end": False,
}
PRECISIONS = ("bf16", "fp32", "fp64")


def curve(run_dir: Path, sharding: str, precision: str) -> dict[int, float]:
    """Training loss by step of a new run."""
    changes = {"run_dir": str(run_dir), "sharding": sharding, "precision": precision}
    start(from_values(SETTINGS, changes))
    return losses_by_step(run_dir)


def compare(runs: dict[str, dict[int, float]]) -> dict[str, Any]:
    """Distances between the runs of one precision."""
    ragged, fsdp2 = runs["ragged"], runs["fsdp2"]
    return {
        "repeats_bit_for_bit": ragged == runs["ragged again"] and fsdp2 == runs["fsdp2 again"],
        "largest_distance": max(abs(ragged[step] - fsdp2[step]) for step in ragged),
        "losses": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "rounding.json")
    options = parser.parse_args()
    report: dict[str, Any] = {"settings": SETTINGS}
    with tempfile.TemporaryDirectory() as folder:
        for precision in PRECISIONS:
            runs = {
                name: curve(Path(folder) / f"{precision} {name}", name.split()[0], precision)
                for name in ("ragged", "fsdp2", "ragged again", "fsdp2 again")
            }
            report[precision] = compare(runs)
        began = next(row for row in read_metrics(Path(folder) / "bf16 ragged") if row["kind"] == "start")
        report["system"] = {"torch": began["torch"], "device": began["device"]}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    for precision in PRECISIONS:
        print(precision, {k: v for k, v in report[precision].items() if k != "losses"})


if __name__ == "__main__":
    main()
