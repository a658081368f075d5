"""What a checkpoint costs training: how long the host is held up, and how much slower the next steps are.

    python -m benchmarks.faults.save_cost                     # on a GPU: 20 GB of shards, about a minute
    python -m benchmarks.faults.save_cost --gigabytes 0.05 --device cpu

One rank holds parameters and two moments in fp32, as a rank of a large run does, and trains in bf16 with
enough tokens that a step takes about a second. A save is made between two steps. The same with the copy that
this took the place of (each tensor by itself into pageable memory, before training goes on) is the peer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ragged_fsdp import fully_shard
from ragged_fsdp.checkpoint.dcp import Saver
from ragged_fsdp.checkpoint.store import CheckpointStore
from ragged_fsdp.optim import FusedAdamW

HERE = Path(__file__).parent
_BYTES_PER_PARAMETER = 12  # weight and two moments in fp32


class Run:
    """A stack of square layers that trains on noise."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._device = torch.device(options.device)
        width = options.width
        layers = max(1, round(options.gigabytes * 1e9 / _BYTES_PER_PARAMETER / width**2))
        mesh = init_device_mesh(options.device, (1,))
        with self._device:
            self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in self.model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = FusedAdamW(self.model.parameters(), lr=1e-5)
        self._input = torch.randn(options.tokens, width, device=self._device)

    def step(self) -> float:
        """Seconds of a step, from when the device is idle until it is again."""
        self._settle()
        began = time.perf_counter()
        self.model(self._input).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._settle()
        return time.perf_counter() - began

    def state(self) -> dict[str, Any]:
        """What a checkpoint of the trainer holds."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _nbytes(state: Any) -> int:
    if isinstance(state, dict):
        return sum(_nbytes(value) for value in state.values())
    return state.nbytes if isinstance(state, torch.Tensor) else 0


def _old_copy(state: Any) -> Any:
    """Each tensor by itself into pageable memory."""
    if isinstance(state, dict):
        return {key: _old_copy(value) for key, value in state.items()}
    return state.detach().to("cpu", copy=True) if isinstance(state, torch.Tensor) else state


def _measured(run: Run, saver: Saver, number: int, steps: int) -> dict[str, Any]:
    """One save between two steps; and the steps while it is written."""
    began = time.perf_counter()
    state = run.state()
    gathered_s = time.perf_counter() - began
    saver.save(number, state, {"step": number})
    blocked_s = time.perf_counter() - began
    after = [run.step() for _ in range(steps)]
    began = time.perf_counter()
    saver.wait()
    measured = {
        "blocked_s": blocked_s,
        "of_which_state_dict_s": gathered_s,
        "next_steps_s": after,
        "then_until_written_s": time.perf_counter() - began,
    }
    print(measured, flush=True)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=20.0, help="of parameters and moments")
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=49152, help="per step")
    parser.add_argument("--steps", type=int, default=8, help="before the saves, and after each")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints are written to")
    parser.add_argument("--out", type=Path, default=HERE / "save_cost.json")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        run = Run(options)
        saver = Saver(CheckpointStore(folder, keep_last=1, keep_best=False), background=True, timeout_s=600)
        run.optimizer.register_step_pre_hook(lambda *_: saver.before_update())
        run.step()
        quiet = [run.step() for _ in range(options.steps)]
        print(quiet, flush=True)
        held = _nbytes(run.state())
        began = time.perf_counter()
        _old_copy(run.state())
        peer_s = time.perf_counter() - began
        print(f"peer: {peer_s:.3f} s", flush=True)
        saves = [_measured(run, saver, number, options.steps) for number in (1, 2)]
    finally:
        dist.destroy_process_group()
        shutil.rmtree(folder, ignore_errors=True)
    usual = statistics.median(quiet)
    second = saves[1]
    results = {
        "gigabytes": held / 1e9,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "step_s": usual,
        "steps_s": quiet,
        "first_save": saves[0],
        "second_save": second,
        "blocked_ms": 1e3 * second["blocked_s"],
        "next_step_ratio": second["next_steps_s"][0] / usual,
        "steps_while_written_ratio": statistics.median(second["next_steps_s"]) / usual,
        "peer_blocked_ms": 1e3 * peer_s,
        "command": " ".join(["python -m benchmarks.faults.save_cost", *sys.argv[1:]]),
    }
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps({k: v for k, v in results.items() if not isinstance(v, list | dict)}, indent=1))


if __name__ == "__main__":
    main()
