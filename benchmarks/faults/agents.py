"""torchrun on several nodes that die, leave, join and lose their links; then compare with a quiet run.

    python -m benchmarks.faults.agents            # 3 nodes, 30 faults; writes benchmarks/faults/agents.json

Each node is a network namespace of this machine with a torchrun agent that is started again when it ends
badly, as a service manager would (``nodes.py``). Faults, at random steps and in the middle of saves:

    worker   SIGKILL to a worker                   agent   SIGKILL to an agent; its worker has to notice
    node     SIGKILL to an agent and its worker    host    the same on the node that holds the rendezvous
    leave    SIGTERM to an agent (preemption)      link    a node's link is cut, and heals later

Nobody helps. Every loss of every step must be that of the quiet run to 1e-9 (in double precision, since
other numbers of ranks add in another order): a resume at a wrong step, with other data or another state is
a difference there. After each fault training must go on within the limit.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.faults.nodes import Node, enter_private_network, start_network

from ragged_fsdp.trainer.metrics import losses_by_step, read_metrics

HERE = Path(__file__).parent
KINDS = ("worker", "node", "leave", "agent", "link", "host")
_SETTINGS = (
    "--model nano --seq-len 32 --batch 12 --warmup 4 --precision fp64 --eval-every 0 --checkpoint-every 3 "
    "--keep-last 2 --no-tensorboard --log-every 1000 --device cpu --callback benchmarks.faults.nodes:Pace"
)


class Faults:
    """Which fault comes next, when, and how long it took until training went on."""

    def __init__(
        self, nodes: list[Node], run_dir: Path, options: argparse.Namespace, choose: random.Random
    ) -> None:
        self._nodes, self._run_dir, self._options, self._choose = nodes, run_dir, options, choose
        self.story: list[dict[str, Any]] = []
        self._healing: tuple[Node, float] | None = None
        self._struck_at: float | None = None
        self._last_fault_s = time.monotonic() + 60 * options.minutes
        run_dir.mkdir()
        (run_dir / "slow").touch()
        self._arm()

    def _arm(self) -> None:
        """Choose the step from which on the next fault may strike."""
        self._first = max(losses_by_step(self._run_dir), default=0) + self._choose.randint(1, 3)
        self._moment = "save" if len(self.story) % 2 else "step"

    def look(self) -> None:
        """Strike, heal, or notice that training went on; raises if it does not."""
        if self._healing is not None and time.monotonic() >= self._healing[1]:
            self._healing[0].heal()
            self._healing = None
        if self._struck_at is not None:
            self._notice()
        elif len(self.story) >= self._options.kills or time.monotonic() > self._last_fault_s:
            (self._run_dir / "slow").unlink(missing_ok=True)
        elif self._is_moment():
            self._strike()

    def _is_moment(self) -> bool:
        if max(losses_by_step(self._run_dir), default=0) < self._first:
            return False
        if not all(node.done or node.workers() for node in self._nodes):
            return False
        return self._moment == "step" or any((self._run_dir / "checkpoints").glob(".writing-*"))

    def _strike(self) -> None:
        kind = self._options.kinds[len(self.story) % len(self._options.kinds)]
        node = self._nodes[0] if kind == "host" else self._choose.choice(self._nodes[1:])
        away_s = self._choose.choice((0.0, 6.0))
        if kind == "worker":
            node.kill_worker()
        elif kind == "agent":
            node.kill_agent()
        elif kind == "leave":
            node.leave(away_s)
        elif kind == "link":
            node.cut()
            self._healing = node, time.monotonic() + self._options.timeout + away_s
        else:
            node.die(away_s)
        self._struck_at = time.time()
        step = max(losses_by_step(self._run_dir), default=0)
        self.story.append({"fault": kind, "node": node.index, "moment": self._moment, "after_step": step})

    def _notice(self) -> None:
        """Training went on if a run has started, and a step was taken in it, since the fault."""
        assert self._struck_at is not None
        rows = read_metrics(self._run_dir)
        starts = [i for i, row in enumerate(rows) if row["kind"] == "start" and row["time"] > self._struck_at]
        steps = [row for row in rows[starts[0] :] if row["kind"] == "train"] if starts else []
        passed_s = time.time() - self._struck_at
        if steps:
            start = rows[starts[0]]
            self.story[-1] |= {
                "went_on_after_s": round(passed_s, 1),
                "from_step": start["step"],
                "world_size": start["world_size"],
            }
            print(len(self.story), self.story[-1], flush=True)
            self._struck_at = None
            self._arm()
        elif passed_s > self._options.limit:
            raise SystemExit(f"no step within {self._options.limit} s of {self.story[-1]}")


def train(
    run_dir: Path, options: argparse.Namespace, kills: int, logs: Path
) -> tuple[list[dict[str, Any]], float]:
    """One run of the cluster through ``kills`` faults; returns what happened, and the seconds it took."""
    settings = [*_SETTINGS.split(), "--steps", str(options.steps), "--timeout", str(options.timeout)]
    command = [sys.executable, "-m", "ragged_fsdp", "train", *settings, "--run-dir", str(run_dir)]
    nodes: list[Node] = []
    began = time.monotonic()
    try:
        for index in range(options.nodes if kills else 1):
            span = f"1:{options.nodes}" if kills else "1"
            nodes.append(Node(index, span, options.workers, command, logs / f"{run_dir.name}-{index}.log"))
        faults = Faults(
            nodes, run_dir, argparse.Namespace(**{**vars(options), "kills": kills}), random.Random(0)
        )
        while not any(node.done for node in nodes):
            for node in nodes:
                node.look()
            faults.look()
            time.sleep(0.005)
    finally:
        for node in nodes:
            node.remove()
    return faults.story, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="per node")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="in this order, repeated")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--timeout", type=float, default=15.0, help="seconds that a collective may take")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds from a fault to the next step")
    parser.add_argument("--minutes", type=float, default=60.0, help="no more faults after these")
    parser.add_argument("--logs", type=Path, default=None, help="keep what the agents say in this folder")
    parser.add_argument("--out", type=Path, default=HERE / "agents.json")
    options = parser.parse_args()
    enter_private_network()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # ends the agents too
    start_network()
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(exist_ok=True)
        quiet, broken = Path(folder) / "quiet", Path(folder) / "broken"
        train(quiet, options, 0, logs)
        story, took_s = train(broken, options, options.kills, logs)
        curves = [losses_by_step(run) for run in (quiet, broken)]
    differences = [abs(curves[0][step] - curves[1].get(step, float("inf"))) for step in curves[0]]
    results = {
        "faults": story,
        "steps": options.steps,
        "nodes": options.nodes,
        "seconds": round(took_s),
        "slowest_recovery_s": max((fault.get("went_on_after_s", 0.0) for fault in story), default=None),
        "final_loss": [curve[options.steps] for curve in curves],
        "largest_difference_of_a_loss": max(differences),
        "torch": torch.__version__,
        "collective_timeout_s": options.timeout,
    }
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print({k: v for k, v in results.items() if k != "faults"})
    if len(story) < options.kills or max(differences) > 1e-9:
        raise SystemExit("the disturbed run differs from the quiet one, or ended before all faults")


if __name__ == "__main__":
    main()
