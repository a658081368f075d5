"""torchrun on several nodes that die, leave, join and lose their links; then compare with a quiet run.

    python -m benchmarks.faults.agents            # 3 nodes, 30 faults; writes benchmarks/faults/agents.json
    python -m benchmarks.faults.agents --work DIR # the same, kept in DIR: started again, it goes on there

Each node is a network namespace of this machine with a torchrun agent that is started again when it ends
badly, as a service manager would (``nodes.py``). Faults at random steps, every second one amid a save:

    worker   SIGKILL to a worker                   agent   SIGKILL to an agent; its worker has to notice
    node     SIGKILL to an agent and its worker    host    the same on the node that holds the rendezvous
    leave    SIGTERM to an agent (preemption)      link    a node's link is cut, and heals later

Nobody helps. At the end two nodes are lost for good, one after the other, and the last one trains to the end:

    off      a link is cut and never heals         moved   the rendezvous' node dies for good; by hand, the
                                                           loops of the others get another endpoint

Every loss of every step must be that of the quiet run to 1e-9 (in double precision, since other numbers of
ranks add in another order): a resume at a wrong step, with other data or another state is a difference there.
After each fault training must go on, and the workers of before must have ended, within the limit.
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

import psutil
import torch
from benchmarks.faults.nodes import Node, enter_private_network, start_network

from ragged_fsdp.trainer.metrics import losses_by_step, read_metrics

HERE = Path(__file__).parent
KINDS = ("worker", "node", "leave", "agent", "link", "host")
LAST = ("off", "moved")
_SETTINGS = (
    "--model nano --seq-len 32 --batch 12 --warmup 4 --precision fp64 --eval-every 0 --checkpoint-every 3 "
    "--keep-last 2 --no-tensorboard --log-every 1000 --device cpu --callback benchmarks.faults.nodes:Pace"
)


class Faults:
    """Which fault comes next, when, and how long it took until training went on."""

    def __init__(
        self, nodes: list[Node], run_dir: Path, options: argparse.Namespace, kinds: list[str]
    ) -> None:
        self._nodes, self._run_dir, self._options, self._kinds = nodes, run_dir, options, kinds
        self._book = run_dir.with_suffix(".faults")
        text = self._book.read_text() if self._book.exists() else ""
        self.story: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
        self._choose = random.Random(len(self.story))
        self._healing: tuple[Node, float] | None = None
        self._struck_at: float | None = None
        self._before: list[psutil.Process] = []
        self._read: tuple[tuple[int, int], list[dict[str, Any]]] = (0, 0), []
        self._row: dict[str, Any] = {}
        self._last_fault_s = time.monotonic() + 60 * options.minutes
        run_dir.mkdir(exist_ok=True)
        (run_dir / "slow").touch()
        self._arm()

    def _arm(self) -> None:
        """Choose the step from which on the next fault may strike."""
        self._first = self._newest_step() + self._choose.randint(1, 3)
        self._moment = "save" if len(self.story) % 2 else "step"

    def look(self) -> None:
        """Strike, heal, or notice that training went on; raises if it does not."""
        if self._healing is not None and time.monotonic() >= self._healing[1]:
            self._healing[0].heal()
            self._healing = None
        if self._struck_at is not None:
            self._notice()
        elif len(self.story) >= len(self._kinds) or time.monotonic() > self._last_fault_s:
            (self._run_dir / "slow").unlink(missing_ok=True)
        elif self._is_moment():
            self._strike()

    def _is_moment(self) -> bool:
        if self._healing is not None or self._newest_step() < self._first:
            return False
        if self._moment == "save" and not any((self._run_dir / "checkpoints").glob(".writing-*")):
            return False
        return all(node.done or node.lost or node.workers() for node in self._nodes)

    def _strike(self) -> None:
        kind = self._kinds[len(self.story)]
        node = self._nodes[0] if kind in ("host", "moved") else self._choose.choice(self._nodes[1:])
        away_s = self._choose.choice((0.0, 6.0))
        self._before = [worker for each in self._nodes for worker in each.workers()]
        self._row = {"fault": kind, "node": node.index, "moment": self._moment}
        self._row["after_step"] = self._newest_step()
        self._struck_at = time.time()
        if kind == "worker":
            node.kill_worker()
        elif kind == "agent":
            node.kill_agent()
        elif kind == "leave":
            node.leave(away_s)
        elif kind in ("link", "off"):
            node.cut()
            node.lost = kind == "off"
            if kind == "link":
                self._healing = node, time.monotonic() + self._options.timeout + away_s
        elif kind == "moved":
            node.die(float("inf"))
            node.lost = True
            heir = next(each for each in self._nodes if not each.lost)
            for each in self._nodes:
                each.host = heir.index
        else:
            node.die(away_s)

    def _notice(self) -> None:
        """Training went on if a run has started, and a step was taken in it, since the fault."""
        assert self._struck_at is not None
        passed_s = round(time.time() - self._struck_at, 1)
        if not any(map(_runs, self._before)):
            self._row.setdefault("workers_of_before_ended_after_s", passed_s)
        rows = self._metrics()
        starts = [i for i, row in enumerate(rows) if row["kind"] == "start" and row["time"] > self._struck_at]
        if starts and any(row["kind"] == "train" for row in rows[starts[0] :]):
            start = rows[starts[0]]
            self._row.setdefault("went_on_after_s", passed_s)
            self._row |= {"from_step": start["step"], "world_size": start["world_size"]}
        if {"went_on_after_s", "workers_of_before_ended_after_s"} <= self._row.keys():
            self.story.append(self._row)
            print(len(self.story), self._row, flush=True)
            with self._book.open("a") as book:
                print(json.dumps(self._row), file=book)
            self._struck_at = None
            self._arm()
        elif passed_s > self._options.limit:
            raise SystemExit(f"a worker of before, or no step, {self._options.limit} s after {self._row}")

    def _newest_step(self) -> int:
        return max((row["step"] for row in self._metrics() if row["kind"] == "train"), default=0)

    def _metrics(self) -> list[dict[str, Any]]:
        """What the run has written; read again only when it has changed, as this looks all the time."""
        file = self._run_dir / "metrics.jsonl"
        stamp = (file.stat().st_mtime_ns, file.stat().st_size) if file.exists() else (0, 0)
        if stamp != self._read[0]:
            self._read = stamp, read_metrics(self._run_dir)
        return self._read[1]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def train(run_dir: Path, options: argparse.Namespace, kinds: list[str], logs: Path) -> list[dict[str, Any]]:
    """One run of the cluster through faults of these kinds, on one node if there are none; what happened."""
    settings = [*_SETTINGS.split(), "--steps", str(options.steps), "--timeout", str(options.timeout)]
    command = [sys.executable, "-m", "ragged_fsdp", "train", *settings, "--run-dir", str(run_dir)]
    nodes: list[Node] = []
    try:
        for index in range(options.nodes if kinds else 1):
            span = f"1:{options.nodes}" if kinds else "1"
            nodes.append(Node(index, span, options.workers, command, logs / f"{run_dir.name}-{index}.log"))
        faults = Faults(nodes, run_dir, options, kinds)
        while not any(node.done for node in nodes):
            for node in nodes:
                node.look()
            faults.look()
            time.sleep(0.01)
    finally:
        for node in nodes:
            node.remove()
    return faults.story


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="per node")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="in this order, repeated")
    parser.add_argument("--last", nargs="*", choices=LAST, default=LAST, help="after those, in this order")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds that a collective may take")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds from a fault to the next step")
    parser.add_argument("--minutes", type=float, default=60.0, help="no more faults after these")
    parser.add_argument("--work", type=Path, default=None, help="keep runs and logs here, and go on there")
    parser.add_argument("--out", type=Path, default=HERE / "agents.json")
    options = parser.parse_args()
    enter_private_network()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # ends the agents too
    start_network()
    kinds = [options.kinds[number % len(options.kinds)] for number in range(options.kills)] + [*options.last]
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        quiet, broken = work / "quiet", work / "broken"
        train(quiet, options, [], work)
        story = train(broken, options, kinds, work)
        curves = [losses_by_step(run) for run in (quiet, broken)]
    differences = [abs(curves[0][step] - curves[1].get(step, float("inf"))) for step in curves[0]]
    results = {
        "faults": story,
        "steps": options.steps,
        "nodes": options.nodes,
        "slowest_recovery_s": max((fault["went_on_after_s"] for fault in story), default=None),
        "slowest_end_of_workers_s": max(
            (fault["workers_of_before_ended_after_s"] for fault in story), default=None
        ),
        "final_loss": [curve[options.steps] for curve in curves],
        "largest_difference_of_a_loss": max(differences),
        "torch": torch.__version__,
        "collective_timeout_s": options.timeout,
        "command": f"benchmarks.faults.agents --timeout {options.timeout:g} --limit {options.limit:g}",
    }
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print({k: v for k, v in results.items() if k != "faults"})
    if len(story) < len(kinds) or max(differences) > 1e-9:
        raise SystemExit("the disturbed run differs from the quiet one, or ended before all faults")


if __name__ == "__main__":
    main()
