"""Runs test functions on a pool of real ranks that is started once per test run.

A test is a function whose first argument is a :class:`Rank`; ``@spmd(1, 2, 4)`` makes it a pytest
test, once per world size, that runs on every rank of a pool of that size::

    @spmd(2, 3)
    def test_sum(rank):
        mesh = rank.mesh()
        ...

Other arguments come from ``pytest.mark.parametrize`` as usual and must be picklable. A rank that
fails reports its traceback; a rank that hangs is killed with its pool, and the next test gets a
new one. Warnings are filtered as pytest's settings say. ``pytest.skip`` on all ranks skips the
test; on some of them only it fails.
``RAGGED_FSDP_TEST_PRELOAD`` names modules that the ranks are forked with: heavy ones are imported once.
``RAGGED_FSDP_TEST_DEVICE=cuda`` runs the same tests over NCCL, several ranks sharing one device if
there are fewer devices than ranks.
"""

from __future__ import annotations

import builtins
import faulthandler
import functools
import importlib
import inspect
import multiprocessing as mp
import os
import socket
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

__all__ = ["DEVICE", "WARNING_FILTERS", "Rank", "shutdown_pools", "spmd"]

WARNING_FILTERS = "RAGGED_FSDP_TEST_WARNINGS"
"""The environment variable that brings pytest's ``filterwarnings`` to the ranks, one filter a line."""

DEVICE = os.environ.get("RAGGED_FSDP_TEST_DEVICE", "cpu")
_CONTEXT = mp.get_context("forkserver")
_PRELOAD = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp"]
if DEVICE == "cpu":  # not where an import could use CUDA: ranks are forked after it
    _PRELOAD += ["pytest", "hypothesis", "torch._dynamo", "ragged_fsdp.api", "ragged_fsdp.optim.muon"]
    _PRELOAD += ["ragged_fsdp.trainer.worker"]
_PRELOAD += os.environ.get("RAGGED_FSDP_TEST_PRELOAD", "").split()
_CONTEXT.set_forkserver_preload(_PRELOAD)
_POOLS: dict[int, _Pool] = {}
_DEFAULT_TIMEOUT_S = 120.0
_START_TIMEOUT_S = 90.0
_START_ATTEMPTS = 3
_END_S = 0.2 if DEVICE == "cpu" else 5.0
_SKIPPED = "skipped: "
_JOINED = "joined"
_DONE = "done, process groups: "
_MOST_GROUPS = 16


@dataclass(frozen=True)
class Rank:
    """What a test function knows about the rank it runs on."""

    rank: int
    world_size: int
    shared_dir: Path
    """An empty folder common to the ranks, new for each test."""

    @property
    def device(self) -> str:
        """The device type of this run: ``cpu`` or ``cuda``."""
        return DEVICE

    def mesh(self, *sizes: int, names: tuple[str, ...] | None = None) -> Any:
        """A device mesh over all ranks; 1-D without ``sizes``."""
        from torch.distributed import group

        return _mesh(sizes or (self.world_size,), names, group.WORLD)


@functools.cache
def _mesh(sizes: tuple[int, ...], names: tuple[str, ...] | None, world: Any) -> Any:
    """One for all tests: a process group over gloo has a thread that wakes a hundred times a second, and a
    hundred idle groups per rank, left by the tests before, took more than one of two cores."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(DEVICE, sizes, mesh_dim_names=names)


def spmd(*world_sizes: int, timeout: float = _DEFAULT_TIMEOUT_S) -> Callable[[Callable], Callable]:
    """Turn ``fn(rank, **params)`` into a pytest test that runs on pools of these sizes."""

    def decorate(fn: Callable) -> Callable:
        @functools.wraps(fn)
        def test(world_size: int, tmp_path: Path, **params: Any) -> None:
            _pool(world_size).run(fn.__module__, fn.__qualname__, params, tmp_path, timeout)

        own = list(inspect.signature(fn).parameters.values())[1:]
        extra = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in ("world_size", "tmp_path")]
        keyword = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=inspect.Parameter.empty) for p in own
        ]
        test.__signature__ = inspect.Signature(keyword + extra)
        test.on_rank = fn
        return pytest.mark.parametrize("world_size", world_sizes)(test)

    return decorate


def shutdown_pools() -> None:
    """Stop every pool; called once at the end of the test run."""
    for pool in _POOLS.values():
        pool.stop()
    _POOLS.clear()


def _pool(world_size: int) -> _Pool:
    pool = _POOLS.get(world_size)
    for _ in range(_START_ATTEMPTS):
        if pool is not None and pool.healthy:
            return pool
        pool = _POOLS[world_size] = _Pool(world_size)
        pool.await_start()  # another program may have taken the port that was free
    if not pool.healthy:
        pytest.fail(f"no pool of {world_size} ranks came up in {_START_ATTEMPTS} attempts", pytrace=False)
    return pool


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class _Pool:
    def __init__(self, world_size: int) -> None:
        self.healthy = True
        self._pipes, self._processes = [], []
        port = _free_port()
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def await_start(self) -> None:
        """Wait until every rank has joined the process group; a pool where one did not is not healthy."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        try:
            joined = all(
                pipe.poll(max(0.0, deadline - time.monotonic())) and pipe.recv() == _JOINED
                for pipe in self._pipes
            )
        except EOFError:  # a rank died
            joined = False
        if not joined:
            self.stop()

    def run(self, module: str, qualname: str, params: dict, shared_dir: Path, timeout: float) -> None:
        for pipe in self._pipes:
            pipe.send((module, qualname, params, str(shared_dir)))
        deadline = time.monotonic() + timeout
        failures, silent, skips, groups = [], [], {}, 0
        for rank, pipe in enumerate(self._pipes):
            # After a first failure the others may wait for it in a collective: give them little time.
            left = max(0.0, deadline - time.monotonic())
            wait = 10.0 if failures else min(30.0, left) if skips else left
            try:
                answer = pipe.recv() if pipe.poll(wait) else None
            except EOFError:
                answer = "the process died"
            if answer is None:
                silent.append(rank)
            elif answer.startswith(_SKIPPED):
                skips[rank] = answer.removeprefix(_SKIPPED)
            elif answer.startswith(_DONE):
                groups = max(groups, int(answer.removeprefix(_DONE)))
            else:
                failures.append(f"rank {rank}: {answer}")
        if skips and len(skips) < len(self._pipes):
            failures.append(f"only some of the ranks skipped the test: {skips}")
        if silent or failures:
            self.stop()
            hung = f"no answer from ranks {silent} (hang?)\n" if silent else ""
            pytest.fail(hung + "\n".join(failures), pytrace=False)
        if groups > _MOST_GROUPS:  # left by tests that make their own: even idle they take a core, see _mesh
            self.stop()
        if skips:
            pytest.skip(skips[0])

    def stop(self) -> None:
        self.healthy = False
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(rank: int, world_size: int, port: int, pipe: Any) -> None:
    """The life of one rank: join the process group, then run what is sent until the pipe closes."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        NCCL_HOSTID=f"rank{rank}",  # NCCL ranks may share a device only if they look like several hosts
        TORCHINDUCTOR_CACHE_DIR=tempfile.mkdtemp(prefix="inductor-"),
    )
    faulthandler.enable()
    _filter_warnings()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
    _let_gloo_have_one_thread()
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=100))
    pipe.send(_JOINED)
    while True:
        try:
            module, qualname, params, shared_dir = pipe.recv()
        except EOFError:
            break
        pipe.send(_run_one(module, qualname, params, Rank(rank, world_size, Path(shared_dir))))
    os._exit(0)  # a destroy would wait for ranks that were killed


def _let_gloo_have_one_thread() -> None:
    """Make the gloo groups of this process with one worker thread each, where torch gives them two.

    Two that end works at the same time corrupt the heap (torch 2.11 to 2.15; see ``joins_gathers`` in
    ``torch_internals.py``), for which each ``full_tensor()`` is an occasion. A rank of the pool makes many
    thousands, and died of it in a later test.
    """
    from torch.distributed import distributed_c10d as c10d

    stock = c10d.ProcessGroupGloo.__init__

    def with_one_thread(
        self: Any, store: Any, rank: int, size: int, timeout: timedelta, **newer: Any
    ) -> None:
        options = self._Options()
        options._devices, options._timeout = [self.create_default_device()], timeout
        options._threads = 1
        stock(self, store, rank, size, options)

    # not a subclass: torch asks for the class when it finds a group again, when a subclass may be forgotten
    c10d.ProcessGroupGloo.__init__ = with_one_thread


def _filter_warnings() -> None:
    for line in os.environ.get(WARNING_FILTERS, "").splitlines():
        action, message, category, module = (*line.split(":"), "")[:4]
        warnings.filterwarnings(action, message, getattr(builtins, category), module)


def _run_one(module: str, qualname: str, params: dict, rank: Rank) -> str:
    import torch

    torch.manual_seed(0)
    try:
        fn = getattr(importlib.import_module(module), qualname)
        getattr(fn, "on_rank", fn)(rank, **params)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    except pytest.skip.Exception as skipped:
        return _SKIPPED + str(skipped)
    except BaseException:
        _drain()
        return traceback.format_exc()
    return f"{_DONE}{len(torch.distributed.distributed_c10d._world.pg_map)}"


def _drain() -> None:
    """Let the kernels of a failed rank end: one that dies before them can take others on its GPU along."""
    import torch

    if DEVICE == "cuda":
        waits = threading.Thread(
            target=torch.cuda.synchronize, args=(torch.cuda.current_device(),), daemon=True
        )
        waits.start()
        waits.join(_END_S)
