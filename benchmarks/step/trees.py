"""The step of this source tree and of another one, in turns: what a change cost.

Clocks and temperatures change a time by a percent from minute to minute. So both trees stay alive on the
device, each in a process that finds its own ``ragged_fsdp`` first on the path, and every round asks both for
a few steps on each wire, the one that was last in the round before being first. The models, the wire and the
clock are this tree's for both. A ratio is the median over the rounds of the ratio within a round. Memory is
each process's own: the first turn shows that of a fresh start, and the largest counts. Both trees start from
the same weights and make the same steps, so that their losses should be the same too.
"""

from __future__ import annotations

import importlib
import os
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .case import Case
from .network import WireName, network_of, wire_text

__all__ = ["compare_trees", "play", "ratios"]

_ROOT = Path(__file__).resolve().parents[2]
_PLAYER = [sys.executable, "-m", "benchmarks.step.trees"]
_TIMES = ("forward_backward_ms", "step_ms", "host_ms")
_PEAKS = ("peak_allocated_gib", "peak_reserved_gib")


def compare_trees(
    case: Case,
    name: str,
    trees: dict[str, Path],
    say: Callable[[str], None],
    *,
    rounds: int,
    limit_s: float = 120.0,
) -> dict[str, Any]:
    """Results of implementation ``name`` of each tree, a folder with ``ragged_fsdp`` in it by its label.

    As :func:`.runner.run_case`'s, with a row per tree and wire; what failed has a row with ``error``.
    """
    players = {label: _Player(folder, case, name) for label, folder in trees.items()}
    turns: dict[str, list[dict[WireName, dict[str, Any]]]] = {label: [] for label in trees}
    errors: dict[str, str] = {}
    try:
        for label, player in players.items():
            errors |= _failure(label, player.answer(limit_s), say)
        for number in range(0 if errors else rounds):
            for label in list(players)[:: 1 if number % 2 == 0 else -1]:
                answer = players[label].ask("turn", limit_s * len(case.wires))
                errors |= _failure(label, answer, say)
                turns[label].append(answer)
            if errors:
                break
            say(f"{case.model}, {name}: round {number + 1} of {rounds} is over")
    finally:
        for player in players.values():
            player.end()
    rows = [{"tree": label, "implementation": name, "error": errors[label]} for label in errors]
    if not errors:
        rows = [_row(label, name, wire, turns[label]) for label in trees for wire in case.wires]
    return {"case": case.to_json(), "rows": rows}


def _failure(label: str, answer: dict[Any, Any], say: Callable[[str], None]) -> dict[str, str]:
    if "error" not in answer:
        return {}
    say(f"{label}: failed\n{answer['error']}")
    return {label: answer["error"]}


def _row(
    label: str, name: str, wire: WireName, turns: Sequence[dict[WireName, dict[str, Any]]]
) -> dict[str, Any]:
    """The turns of one tree on one wire as a row, with the figures of every round."""
    found = [turn[wire] for turn in turns]
    row: dict[str, Any] = {"tree": label, "implementation": name, "wire": wire, **found[-1]}
    del row["forward_backward_all_ms"]
    for key in _TIMES:
        row[f"{key}_by_round"] = [turn[key] for turn in found]
        row[key] = round(statistics.median(row[f"{key}_by_round"]), 3)
    return row | {key: max(turn[key] for turn in found) for key in _PEAKS}


def ratios(result: dict[str, Any], new: str, old: str) -> list[tuple[str, ...]]:
    """A table with a line per wire: times and memory of ``new``, each with what it is of ``old``'s."""
    head = ("implementation", "wire", "fwd+bwd ms", "/ old", "range", "step ms", "/ old", "host / old")
    lines = [(*head, "alloc GiB", "/ old", "reserved GiB", "/ old", "loss")]
    rows = {(row["tree"], row.get("wire")): row for row in result["rows"]}
    for (tree, wire), row in rows.items():
        other = rows.get((old, wire))
        if tree != new or other is None or "error" in row:
            continue
        whole = _by_round(row, other, "forward_backward_ms")
        lines.append(
            (
                row["implementation"],
                wire_text(wire),
                f"{row['forward_backward_ms']:.1f}",
                f"{statistics.median(whole):.4f}",
                f"{min(whole):.3f} to {max(whole):.3f}",
                f"{row['step_ms']:.1f}",
                f"{statistics.median(_by_round(row, other, 'step_ms')):.4f}",
                f"{statistics.median(_by_round(row, other, 'host_ms')):.2f}",
                *(cell for key in _PEAKS for cell in (f"{row[key]:.3f}", f"{row[key] / other[key]:.4f}")),
                "same" if row["loss"] == other["loss"] else f"{row['loss']:.9g}, was {other['loss']:.9g}",
            )
        )
    return lines


def _by_round(row: dict[str, Any], other: dict[str, Any], key: str) -> list[float]:
    return [a / b for a, b in zip(row[f"{key}_by_round"], other[f"{key}_by_round"])]


class _Player:
    """A process that has one tree's implementation on the device and answers when asked."""

    def __init__(self, folder: Path, case: Case, name: str) -> None:
        self._pipe, theirs = Pipe()
        path = [str(folder.resolve()), str(_ROOT), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [*_PLAYER, str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            pass_fds=[theirs.fileno()],
            cwd=_ROOT,
        )
        theirs.close()
        self._pipe.send((str(folder.resolve()), case, name))

    def ask(self, wanted: str, limit_s: float) -> dict[Any, Any]:
        with suppress(OSError):  # one that has died is told from its silence
            self._pipe.send(wanted)
        return self.answer(limit_s)

    def answer(self, limit_s: float) -> dict[Any, Any]:
        try:
            return (
                self._pipe.recv() if self._pipe.poll(limit_s) else {"error": f"no answer in {limit_s:.0f} s"}
            )
        except (EOFError, OSError):
            return {"error": "the process died"}

    def end(self) -> None:
        with suppress(OSError):
            self._pipe.send("end")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def play(pipe: Connection) -> None:
    """The life of a player: build the implementation, then time a turn whenever asked, until told to end."""
    try:
        folder, case, name = pipe.recv()
        found = Path(str(importlib.import_module("ragged_fsdp").__file__)).resolve()
        if not found.is_relative_to(folder):
            raise RuntimeError(f"expected ragged_fsdp from {folder}, got {found}")
        from .measure import prepare, timed

        run = prepare(case, name)
        pipe.send({"ready": True})
        while pipe.recv() != "end":
            turn = {}
            for wire in case.wires:
                run.wire.network = network_of(wire)
                turn[wire] = timed(replace(case, wires=(wire,)), run)
            pipe.send(turn)
    except EOFError:  # whoever asks is gone
        return
    except BaseException:
        pipe.send({"error": traceback.format_exc(limit=-6)})


if __name__ == "__main__":
    play(Connection(int(sys.argv[1])))
