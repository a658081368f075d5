"""The demo with its layers' matrices as they are, and gathered as 8-bit codes: what it costs in loss.

    python benchmarks/demo/codes.py          # writes codes.json beside it; on GPUs where there are any

Each run has the demo's settings and AdamW; with codes, every matrix of a layer is gathered and computed with
as one byte per element and a scale per tile of 32 x 32; the router, 8 rows, stays as it is.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from ragged_fsdp.cli.demo import SETTINGS
from ragged_fsdp.trainer.config_file import from_values
from ragged_fsdp.trainer.metrics import losses_by_step, read_metrics
from ragged_fsdp.trainer.start import start

HERE = Path(__file__).parent
MATRICES = ("layers.*_proj", "layers.*_proj.weight")
VARIANTS = {"none": None, "int8": "int8:32x32", "float8_e4m3fn": "float8_e4m3fn:32x32"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "codes.json")
    options = parser.parse_args()
    common = {
        "optimizer": "adamw",
        "granularity": {},
        "processes": options.processes,
        "checkpoint_every": 0,
        "save_at_end": False,
        "tensorboard": False,
        "log_every": 1000,
    }
    report: dict[str, Any] = {"settings": {**SETTINGS, **common}, "validation_loss": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in VARIANTS.items():
            for seed in range(options.seeds):
                run = Path(folder) / f"{name}-{seed}"
                codes = dict.fromkeys(MATRICES, text) if text else {}
                changes = {"run_dir": str(run), "gather_codes": codes, "seed": seed}
                start(from_values(SETTINGS, common, changes))
                curve = losses_by_step(run, "eval")
                report["validation_loss"].setdefault(name, []).append(curve)
                print(name, seed, curve[SETTINGS["steps"]], flush=True)
        began = next(row for row in read_metrics(run) if row["kind"] == "start")
        report["system"] = {"torch": began["torch"], "device": began["device"]}
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
