"""Time and memory of an 8-bit AdamW step on one GPU, beside fused fp32 AdamW and torchao's AdamW8bit.

    python benchmarks/optim/adam8bit_step.py --out benchmarks/optim/results

Cases: two Llama-3-8B layers, one GPT-OSS-20B layer (fused experts), and the shard that one of 64 ranks holds
of 32 Llama layers: many parameters with few elements each, where the host must keep up. A step is everything
between two synchronizations, host time included. Implementations take turns within a round; figures are
medians over rounds. The byte floor counts what must be read and written once, at the rate of a large copy
measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton

from ragged_fsdp.optim import AdamW8bit, FusedAdamW

LLAMA_LAYER = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)] + [(4096,)] * 2
GPT_OSS_LAYER = [(32, 2880, 5760), (32, 2880, 2880), (4096, 2880), (512, 2880), (512, 2880), (2880, 4096)]
CASES: dict[str, list[tuple[int, ...]]] = {
    "llama-8b, 2 layers": LLAMA_LAYER * 2,
    "gpt-oss-20b, 1 layer": [*GPT_OSS_LAYER, (2880,), (2880,)],
    "llama-8b, 32 layers, 1/64": [(max(1, s[0] // 64), *s[1:]) for s in LLAMA_LAYER] * 32,
}
Step = Callable[[], None]


@dataclass(frozen=True)
class Row:
    """One implementation on one case."""

    case: str
    implementation: str
    elements: int
    milliseconds: float
    of_fused_fp32: float
    of_byte_floor: float
    state_bytes_per_element: float


def _parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.randn(s, device="cuda").to(dtype)) for s in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-2
    return params


def _torchao(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit as TorchaoAdamW8bit

    return TorchaoAdamW8bit(params, lr=1e-4)


def _optimizers() -> dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]]:
    return {
        "torch AdamW(fused=True)": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
        "FusedAdamW": lambda p: FusedAdamW(p, lr=1e-4),
        "AdamW8bit": lambda p: AdamW8bit(p, lr=1e-4, min_8bit_numel=4096),
        "AdamW8bit, stochastic": lambda p: AdamW8bit(p, lr=1e-4, stochastic_rounding=True),
        "torchao AdamW8bit": _torchao,
    }


def _copy_rate() -> float:
    """Bytes per second of a large copy, read and write counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = [_timed(lambda: target.copy_(source)) for _ in range(10)]
    return 2 * source.numel() / statistics.median(times)


def _timed(step: Step) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    return sum(_nbytes(t) for t in tensors if isinstance(t, torch.Tensor))


def _nbytes(tensor: torch.Tensor) -> int:
    inner = getattr(tensor, "tensor_attrs", None)  # torchao's 8-bit tensors list theirs
    if inner is None:
        return tensor.nbytes
    return sum(getattr(tensor, name).nbytes for name in inner if name != "qmap")


def _floor_bytes(name: str, elements: int, itemsize: int) -> int:
    """Weights and gradients read, weights written, both moments read and written."""
    moment = 1 if "8bit" in name else itemsize
    return elements * (3 * itemsize + 4 * moment)


def _measure(case: str, dtype: torch.dtype, rounds: int, rate: float, left_out: list[str]) -> list[Row]:
    shapes = CASES[case]
    steps: dict[str, Step] = {}
    held: dict[str, torch.optim.Optimizer] = {}
    for name, make in _optimizers().items():
        if name in left_out:
            continue
        try:
            optimizer = make(_parameters(shapes, dtype))
        except ImportError as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        held[name], steps[name] = optimizer, optimizer.step
        for _ in range(3):
            optimizer.step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(_timed(step))
    elements = sum(torch.Size(s).numel() for s in shapes)
    median = {name: statistics.median(values) for name, values in times.items()}
    rows = []
    for name, seconds in median.items():
        floor = _floor_bytes(name, elements, dtype.itemsize) / rate
        rows.append(
            Row(
                f"{case}, {str(dtype).removeprefix('torch.')}",
                name,
                elements,
                seconds * 1e3,
                seconds / median["torch AdamW(fused=True)"],
                seconds / floor,
                _state_bytes(held[name]) / elements,
            )
        )
        print(f"{rows[-1]}", flush=True)
    return rows


def _table(rows: list[Row], head: str) -> str:
    lines = [
        head,
        "",
        "| case | implementation | ms | of fused AdamW | of byte floor | state bytes/element |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r.case} | {r.implementation} | {r.milliseconds:.3f} | {r.of_fused_fp32:.2f} | "
            f"{r.of_byte_floor:.2f} | {r.state_bytes_per_element:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the cases and write ``adam8bit_step.json`` and ``adam8bit_step.md``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each (default 20)")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"], help="of the weights")
    parser.add_argument(
        "--torchao", nargs="*", default=["float32"], help="dtypes with torchao, which compiles for a while"
    )
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rate = _copy_rate()
    rows: list[Row] = []
    for dtype in arguments.dtypes:
        for case in arguments.cases:
            left_out = [] if dtype in arguments.torchao else ["torchao AdamW8bit"]
            rows += _measure(case, getattr(torch, dtype), arguments.rounds, rate, left_out)
            torch.cuda.empty_cache()
            _write(rows, rate, arguments.rounds, arguments.out)


def _write(rows: list[Row], rate: float, rounds: int, folder: Path) -> None:
    name = torch.cuda.get_device_name()
    python = f"Python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}"
    command = " ".join(["python", "benchmarks/optim/adam8bit_step.py", *map(shlex.quote, sys.argv[1:])])
    head = (
        f"{name}, {python}, {date.today()}; a large copy {rate / 1e12:.2f} TB/s; medians of {rounds} steps.\n"
        f"`{command}`"
    )
    if not any("torchao" in row.implementation for row in rows):
        head += "\n\ntorchao's AdamW8bit was not part of this run."
    record: dict[str, Any] = {
        "hardware": name,
        "torch": torch.__version__,
        "copy_bytes_per_s": rate,
        "command": command,
    }
    record["rows"] = [asdict(row) for row in rows]
    (folder / "adam8bit_step.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "adam8bit_step.md").write_text(_table(rows, head))


if __name__ == "__main__":
    main()
