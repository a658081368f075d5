"""Runs a case in a process of its own, which has never touched the device."""

from __future__ import annotations

import multiprocessing as mp
import traceback
from importlib import import_module
from typing import Any

__all__ = ["in_own_process"]


def in_own_process(module: str, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows that ``module.measure(case)`` returns; one with ``error`` if it fails."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "benchmarks.step.measure"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(theirs, module, case))
    process.start()
    theirs.close()
    try:
        found: Any = ours.recv()
    except EOFError:
        process.join()
        found = f"the process died with exit code {process.exitcode}"
    process.join()
    return [{**case, "error": found}] if isinstance(found, str) else found


def _measure(pipe: Any, module: str, case: dict[str, Any]) -> None:
    try:
        pipe.send(import_module(module).measure(case))
    except BaseException:
        pipe.send(traceback.format_exc(limit=-6))
    pipe.close()
