"""Fine-tuning on one GPU, as rank 0 of many with the modelled network of ``benchmarks/step``.

    python -m benchmarks.tuning offload [--out FILE]     # optimizer state on the host against on the device
    python -m benchmarks.tuning lora [--out FILE]        # LoRA on Llama-3-8B layers: ours beside FSDP2

Every case runs in a process of its own. ``--small`` has shapes that a laptop's GPU, or a test, can do.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.step.runner import versions

from . import lora, offload
from .runner import in_own_process


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("offload", "lora"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", action="append", help="names of rows to measure (repeatable)")
    options = parser.parse_args()
    module = {"offload": offload, "lora": lora}[options.what]
    out = options.out or Path(__file__).parent / "results" / f"{options.what}.json"
    cases = [case for case in module.cases(options.small) if not options.only or case["row"] in options.only]
    rows: list[dict[str, Any]] = []
    for case in cases:
        for row in in_own_process(module.__name__, case):
            print(json.dumps(row), flush=True)
            rows.append(row)
        found = {"command": f"python -m benchmarks.tuning {options.what}", **versions(), "rows": rows}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
