"""Time of a Muon step on one GPU, beside other implementations and the naive FLOP floor.

    python benchmarks/optim/muon_step.py --out benchmarks/optim/results

Cases: the matrices of Llama-3-8B layers, the expert tensors of one GPT-OSS-20B layer, and 64 experts of
2048x768. The floor is five iterations of ``4 m^2 n + 2 m^3`` operations at the bf16 rate of one large torch
product, measured in the same run, in a short burst; it counts no memory traffic. Under sustained load the
device runs slower, so the ratio to the floor at that rate is given too. A step is everything between two
synchronizations: momentum, iteration, weight update, host overhead. Implementations take turns within a
round; figures are medians over rounds. Before the timing each implementation's first update is
compared with the iteration in fp64 (fp32 products for the largest matrices).

``dion`` (microsoft/dion) is measured where ``import dion`` works and ``--dion`` is given; its Triton kernels
autotune for a minute per shape.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ragged_fsdp.optim.muon import Muon
from ragged_fsdp.optim.muon.newton_schulz import newton_schulz_flops, orthogonalize_reference

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
DION_COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
LR, STEPS = 0.02, 5
LLAMA_LAYER = [
    (4096, 4096),
    (1024, 4096),
    (1024, 4096),
    (4096, 4096),
    (14336, 4096),
    (14336, 4096),
    (4096, 14336),
]


@dataclass(frozen=True)
class Case:
    """Shapes of parameters; ``stacked``: the same as expert tensors, for implementations that take those."""

    name: str
    shapes: list[tuple[int, ...]]
    stacked: list[tuple[int, ...]] | None = None

    @property
    def flops(self) -> int:
        """Five naive iterations over all matrices."""
        return STEPS * sum(newton_schulz_flops(*shape) for shape in self.shapes)


CASES = {
    case.name: case
    for case in (
        Case("llama-3-8b, 2 layers", LLAMA_LAYER * 2),
        Case(
            "gpt-oss-20b experts, 1 layer",
            [(2880, 5760)] * 32 + [(2880, 2880)] * 32,
            [(32, 2880, 5760), (32, 2880, 2880)],
        ),
        Case("64 experts of 2048x768", [(2048, 768)] * 64, [(64, 2048, 768)]),
    )
}


@dataclass(frozen=True)
class Row:
    """One implementation on one case."""

    case: str
    implementation: str
    step_ms: float
    floor_ms: float
    of_floor: float
    of_sustained_floor: float
    relative_error: float
    peak_gib: float


def ours(**options: object) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    """Our optimizer with these options."""

    def build(parameters: list[Tensor]) -> torch.optim.Optimizer:
        group = {"params": parameters, "algorithm": "muon"}
        return Muon([group], lr=LR, weight_decay=0.0, adjust_lr_fn="none", **options)  # type: ignore[arg-type]

    return build


def torch_muon(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """torch's optimizer."""
    return torch.optim.Muon(parameters, lr=LR, weight_decay=0.0)


def dion_muon(kernels: str) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    """microsoft/dion with its five fixed iterations, by torch.compile or with its Triton kernels."""

    def build(parameters: list[Tensor]) -> torch.optim.Optimizer:
        import dion

        options = {"lr": LR, "mu": 0.95, "weight_decay": 0.0, "nesterov": True, "adjust_lr": None}
        return dion.Muon(parameters, **options, use_triton=kernels == "triton", use_polar_express=False)

    return build


@dataclass(frozen=True)
class Implementation:
    """How to build an optimizer, whether it gets stacked expert tensors, and its coefficients."""

    build: Callable[[list[Tensor]], torch.optim.Optimizer]
    stacked: bool = False
    coefficients: tuple[tuple[float, float, float], ...] = (COEFFICIENTS,) * STEPS


def implementations(dion_kernels: str | None) -> dict[str, Implementation]:
    """All that take part."""
    rows = {
        "ragged_fsdp, triton": Implementation(ours(ns_backend="triton")),
        "ragged_fsdp, plain": Implementation(ours(ns_backend="plain")),
        "ragged_fsdp, triton, stacked": Implementation(ours(ns_backend="triton"), stacked=True),
        "torch.optim.Muon": Implementation(torch_muon),
    }
    if dion_kernels is not None:
        build = dion_muon(dion_kernels)
        rows[f"dion.Muon, {dion_kernels}"] = Implementation(build, coefficients=DION_COEFFICIENTS)
    return rows


def bf16_rates(seconds: float = 1.0) -> tuple[float, float]:
    """Operations per second of a bf16 product of 8192x8192 matrices: in a short burst, and sustained."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    flops = 2 * 8192**3
    timed(lambda: torch.mm(a, a, out=out), 3)
    burst = statistics.median(timed(lambda: torch.mm(a, a, out=out), 20))
    times: list[float] = []
    while sum(times) < seconds * 1e3:
        times += timed(lambda: torch.mm(a, a, out=out), 20)
    return flops / (burst * 1e-3), flops / (statistics.median(times[len(times) // 2 :]) * 1e-3)


def timed(call: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each call."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def parameters_of(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Weights with gradients that have a few large and many small singular values, as real ones do."""
    generator = torch.Generator("cuda").manual_seed(0)
    parameters = []
    for shape in shapes:
        p = torch.nn.Parameter(torch.zeros(shape, device="cuda"))
        p.grad = torch.randn(shape, device="cuda", generator=generator) * 1e-4
        left = torch.randn(*shape[:-1], 8, device="cuda", generator=generator)
        right = torch.randn(*shape[:-2], 8, shape[-1], device="cuda", generator=generator)
        p.grad += left @ right * 3e-5
        parameters.append(p)
    return parameters


def update_error(
    parameters: list[Tensor],
    shapes: list[tuple[int, ...]],
    coefficients: tuple[tuple[float, float, float], ...],
) -> float:
    """Largest relative error of the direction of the first update, over one matrix of each shape."""
    worst = 0.0
    for shape in set(shapes):
        p = parameters[shapes.index(shape)]
        update, gradient = (t if t.ndim == 2 else t[0] for t in (p.detach(), p.grad))
        dtype = torch.float64 if min(shape[-2:]) < 2000 else torch.float32
        # after one step of Nesterov momentum the update is a multiple of the gradient
        exact = orthogonalize_reference(gradient.to(dtype), coefficients, 1e-7)
        # implementations scale differently by shape: compare directions
        worst = max(worst, float((exact / exact.norm() + update / update.norm()).norm()))
    return worst


def measure(case: Case, rounds: int, rates: tuple[float, float], dion_kernels: str | None) -> list[Row]:
    """All implementations on one case, taking turns."""
    running: dict[str, torch.optim.Optimizer] = {}
    errors: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for name, implementation in implementations(dion_kernels).items():
        shapes = case.stacked if implementation.stacked else case.shapes
        if shapes is None:
            continue
        parameters = parameters_of(shapes)
        optimizer = implementation.build(parameters)
        optimizer.step()
        errors[name] = update_error(parameters, shapes, implementation.coefficients)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        torch.cuda.synchronize()
        peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
        running[name] = optimizer
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, optimizer in running.items():
            times[name] += timed(optimizer.step, 1)
    floor_ms, sustained_ms = (case.flops / rate * 1e3 for rate in rates)
    rows = []
    for name, values in times.items():
        step_ms = statistics.median(values)
        of_floors = step_ms / floor_ms, step_ms / sustained_ms
        rows.append(Row(case.name, name, step_ms, floor_ms, *of_floors, errors[name], peaks[name]))
    return rows


def table(rows: list[Row], rates: tuple[float, float]) -> str:
    """The rows as Markdown."""
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; bf16 product "
        f"{rates[0] / 1e12:.0f} TFLOP/s in a burst, {rates[1] / 1e12:.0f} sustained.",
        "",
        "| case | implementation | step ms | floor ms | of floor | sustained | update error | extra GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.case} | {row.implementation} | {row.step_ms:.2f} | {row.floor_ms:.2f} "
            f"| {row.of_floor:.2f} | {row.of_sustained_floor:.2f} | {row.relative_error:.1e} "
            f"| {row.peak_gib:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the cases and write ``muon_step.json`` and ``muon_step.md``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for muon_step.json and muon_step.md")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps per implementation")
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--dion", choices=["compiled", "triton"], help="measure dion too, with these kernels")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    rates = bf16_rates()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for name in arguments.case or CASES:
        rows += measure(CASES[name], arguments.rounds, rates, arguments.dion)
        torch.cuda.empty_cache()
        write(arguments.out, rows, rates)
    print(table(rows, rates))


def write(out: Path, rows: list[Row], rates: tuple[float, float]) -> None:
    """What is known so far, as JSON and as Markdown."""
    record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "bf16_rates": rates}
    record["rows"] = [asdict(row) for row in rows]
    (out / "muon_step.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "muon_step.md").write_text(table(rows, rates))


if __name__ == "__main__":
    main()
