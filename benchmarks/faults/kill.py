"""Kill -9 of one rank, again and again, at random steps and during saves; then compare with a quiet run.

    python benchmarks/faults/kill.py            # 20 kills; writes benchmarks/faults/results.json

Each time the run ends within seconds and is started again with ``--resume auto``. At the end nothing may
differ from a run that was never disturbed: the losses of all steps, and every tensor of the last
checkpoint, bit for bit.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from ragged_fsdp.checkpoint.contents import CheckpointReader
from ragged_fsdp.trainer.config_file import from_values
from ragged_fsdp.trainer.launch import RankFailure
from ragged_fsdp.trainer.metrics import losses_by_step
from ragged_fsdp.trainer.start import start

HERE = Path(__file__).parent
SETTINGS: dict[str, Any] = {
    "model": "nano",
    "seq_len": 64,
    "batch": 12,
    "warmup": 4,
    "eval_every": 10,
    "eval_sequences": 6,
    "checkpoint_every": 3,
    "keep_last": 3,
    "tensorboard": False,
    "log_every": 1000,
    "processes": 3,
}


class Killer(threading.Thread):
    """Waits for its moment, then kills one rank of the run that this process has started."""

    def __init__(self, run_dir: Path, moment: str, after_steps: int, choose: random.Random) -> None:
        super().__init__(daemon=True)
        self._run_dir, self._moment, self._choose = run_dir, moment, choose
        self._first = self._step() + after_steps
        self.ended = threading.Event()
        self.killed_at_step: int | None = None

    def run(self) -> None:
        while not self.ended.is_set():
            if self._step() >= self._first and self._is_moment() and (ranks := self._ranks()):
                os.kill(self._choose.choice(ranks), signal.SIGKILL)
                self.killed_at_step = self._step()
                return
            time.sleep(0.001)

    def _is_moment(self) -> bool:
        saving = any((self._run_dir / "checkpoints").glob(".writing-*"))
        return saving if self._moment == "save" else True

    def _step(self) -> int:
        return max(losses_by_step(self._run_dir), default=0)

    def _ranks(self) -> list[int]:
        """The processes that our fork server made: those whose parent's parent is this process."""
        parent = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it may end while we look
                parent[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        return [pid for pid, above in parent.items() if parent.get(above) == os.getpid()]


def tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Model and optimizer in the checkpoint of a step."""
    reader = CheckpointReader(run_dir / "checkpoints" / f"step-{step:08d}")
    return {t.name: reader.load(t) for t in reader.tensors() if not t.name.startswith("rng")}


def disturbed(
    settings: dict[str, Any], run_dir: Path, kills: int, choose: random.Random
) -> list[dict[str, object]]:
    """Run to the end through ``kills`` kills; returns what happened at each."""
    story: list[dict[str, object]] = []
    while True:
        killer = None
        if len(story) < kills:
            moment = "save" if len(story) % 2 else "step"
            after_steps = choose.randint(1, max(1, settings["steps"] // kills - 2))
            killer = Killer(run_dir, moment, after_steps, choose)
            killer.start()
        began = time.monotonic()
        try:
            start(from_values(settings, {"run_dir": str(run_dir)}))
        except RankFailure as failure:
            assert killer is not None and killer.killed_at_step is not None, failure
            headline = " ".join(str(failure).splitlines()[:2])
            story.append({"moment": moment, "step": killer.killed_at_step, "said": headline})
            print(len(story), story[-1], f"{time.monotonic() - began:.1f} s", flush=True)
            continue
        finally:
            if killer is not None:
                killer.ended.set()
                killer.join()
        return story


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    settings = {**SETTINGS, "steps": options.steps, "device": options.device}
    with tempfile.TemporaryDirectory() as folder:
        quiet, broken = Path(folder) / "quiet", Path(folder) / "broken"
        start(from_values(settings, {"run_dir": str(quiet)}))
        story = disturbed(settings, broken, options.kills, random.Random(options.seed))
        losses = [losses_by_step(run) for run in (quiet, broken)]
        states = [tensors(run, options.steps) for run in (quiet, broken)]
    same_state = states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][name], states[1][name]) for name in states[0]
    )
    results = {
        "kills": story,
        "steps": options.steps,
        "final_loss": [curve[options.steps] for curve in losses],
        "same_losses_at_every_step": losses[0] == losses[1],
        "same_final_state_bit_for_bit": same_state,
        "tensors_compared": len(states[0]),
        "torch": torch.__version__,
        "device": options.device,
    }
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print({k: v for k, v in results.items() if k != "kills"})
    if len(story) < options.kills or not same_state or losses[0] != losses[1]:
        raise SystemExit("the disturbed run differs from the quiet one, or ended before all kills")


if __name__ == "__main__":
    main()
