"""Several nodes on one machine: each a network namespace with an address of its own, and a torchrun agent.

::

    node 0: 10.77.0.1 (rendezvous)   node 1: 10.77.0.2   node 2: 10.77.0.3
          eth0 ------------------ bridge ------------------ eth0          a link can be cut and healed

A node does what a cluster's service manager does: an agent that ended badly is started again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from ragged_fsdp.trainer.config import TrainConfig

__all__ = ["Node", "Pace", "enter_private_network", "start_network"]

_INSIDE = "RAGGED_FSDP_PRIVATE_NETWORK"
_RESTART_PAUSE_S = 0.5
_RENDEZVOUS = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=15"


def enter_private_network() -> None:
    """Start this program again in a network of its own, which is gone when the program ends."""
    if os.environ.get(_INSIDE):
        return
    flags = ["--net"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--net"]
    os.environ[_INSIDE] = "1"
    os.execvp("unshare", ["unshare", *flags, sys.executable, "-m", "benchmarks.faults.agents", *sys.argv[1:]])


class Pace:
    """A callback of the trainer: steps take two seconds while the run's folder has a file ``slow``.

    A tiny model would have trained to its end before a node has loaded torch again.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._slow = Path(config.run.run_dir) / "slow"

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if kind == "train" and self._slow.exists():
            time.sleep(2.0)

    def close(self) -> None:
        pass


def start_network() -> None:
    """The switch that the nodes hang on."""
    _ip("link add switch type bridge")
    _ip("link set switch up")


class Node:
    """A node of the cluster; ``command`` is what each of its workers runs."""

    def __init__(self, index: int, nodes: str, workers: int, command: Sequence[str], log: Path) -> None:
        self.index, self._command, self._log = index, command, log
        self._nodes, self._workers = nodes, workers
        self._away_until = self._pause_until = 0.0
        self._agent: subprocess.Popen[bytes] | None = None
        self.done = False
        self.lost = False
        """Whether it is gone for good."""
        self.host = 0
        """The node with the rendezvous, for agents that are started from now on."""
        self.address = _address(index)
        # Holds the namespace; ends with this program, however that ends: its input is then closed.
        self._namespace = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
        pid = self._namespace.pid
        self._port = f"port{pid}"
        while os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        _ip(f"link add {self._port} type veth peer name eth0 netns {pid}")
        _ip(f"link set {self._port} master switch up")
        for line in ("link set lo up", f"addr add {self.address}/24 dev eth0", "link set eth0 up"):
            subprocess.run(["nsenter", "-t", str(pid), "-n", "ip", *line.split()], check=True)

    def look(self) -> None:
        """Start the agent if it should run and does not."""
        now = time.monotonic()
        if self._agent is not None and (code := self._agent.poll()) is not None:
            self._agent = None
            self.done = code == 0
            self._pause_until = now + _RESTART_PAUSE_S
        if self._agent is None and not self.done and now >= max(self._away_until, self._pause_until):
            self._start()

    def _start(self) -> None:
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--no-python"),
            *("--nnodes", self._nodes, "--nproc-per-node", str(self._workers), "--max-restarts", "100"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{_address(self.host)}:29500"),
            *("--rdzv-id", "run"),
            *("--rdzv-conf", f"{_RENDEZVOUS},is_host={int(self.index == self.host)}"),
            *("--local-addr", self.address, "--monitor-interval", "0.2"),
        ]
        variables = {
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            # Else the ranks of a restart read the addresses of those before from the store that agents keep.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with self._log.open("ab") as log:
            self._agent = subprocess.Popen(
                ["nsenter", "-t", str(self._namespace.pid), "-n", *torchrun, *self._command],
                env={**os.environ, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def workers(self) -> list[psutil.Process]:
        """The processes that the agent has started."""
        try:
            return psutil.Process(self._agent.pid).children() if self._agent is not None else []
        except psutil.NoSuchProcess:
            return []

    def kill_worker(self) -> None:
        """SIGKILL to one worker; the agent lives."""
        self.workers()[0].kill()

    def kill_agent(self) -> None:
        """SIGKILL to the agent alone; its workers have to notice."""
        assert self._agent is not None
        self._agent.kill()

    def die(self, away_s: float) -> None:
        """Everything on the node is gone at once, and comes back after a while."""
        self._away_until = time.monotonic() + away_s
        workers = self.workers()
        self.kill_agent()
        for worker in workers:
            worker.kill()

    def leave(self, away_s: float) -> None:
        """SIGTERM to the agent, as before a node is taken away."""
        self._away_until = time.monotonic() + away_s
        assert self._agent is not None
        self._agent.send_signal(signal.SIGTERM)

    def cut(self) -> None:
        """Nothing comes through to the others any more, and nobody is told."""
        _ip(f"link set {self._port} down")

    def heal(self) -> None:
        """The link is as it was."""
        _ip(f"link set {self._port} up")

    def remove(self) -> None:
        """End all that runs on the node."""
        for process in [*self.workers(), self._agent, self._namespace]:
            if process is not None and (not isinstance(process, psutil.Process) or process.is_running()):
                process.kill()


def _address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def _ip(line: str) -> None:
    subprocess.run(["ip", *line.split()], check=True)
