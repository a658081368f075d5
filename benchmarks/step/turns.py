"""Host time of several implementations that take turns.

The time to launch a step changes by a quarter from minute to minute with what else the machine does. So all
implementations stay alive, each in a process of its own, and every round asks each of them for a few
steps: a slow minute meets all of them.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import statistics
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from .case import Case
from .runner import PRELOAD, installed

__all__ = ["take_turns"]

_STEPS_PER_TURN = 5


def take_turns(
    case: Case,
    names: Iterable[str],
    say: Callable[[str], None],
    *,
    rounds: int,
    graphs: bool = False,
    limit_s: float = 120.0,
) -> dict[str, Any]:
    """Results of one case, as :func:`.runner.run_case`'s, with the median host time over all rounds.

    With ``graphs`` each implementation's step is then captured as a CUDA graph and replayed.
    """
    players, rows = _start(case, names, say, limit_s)
    for row in [row for row in rows if row.pop("ready", False)]:
        row |= _ask(players[row["implementation"]], "time", limit_s)
        say(f"{row['implementation']}: timed")
    running = {row["implementation"]: row for row in rows if "host_ms" in row}
    for row in running.values():
        row["host_all_ms"] = []
    for turn in range(rounds):
        for name, row in running.items():
            row["host_all_ms"] += _ask(players[name], _STEPS_PER_TURN, limit_s).get("host_ms", [])
        say(f"round {turn + 1} of {rounds} is over")
    for name, row in running.items():
        row["host_ms"] = round(statistics.median(row["host_all_ms"]), 3)
        row["host_ms_per_layer"] = round(row["host_ms"] / case.layers, 4)
        if graphs:
            row |= _ask(players[name], "graph", limit_s)
    for pipe, process in players.values():
        with suppress(OSError):  # one that failed has ended
            pipe.send("end")
        process.join(10)
    return {"case": case.to_json(), "rows": rows}


def _start(
    case: Case, names: Iterable[str], say: Callable[[str], None], limit_s: float
) -> tuple[dict[str, tuple[Any, Any]], list[dict[str, Any]]]:
    """A pipe and a process for each, and its first answer: all are built before any is timed."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    players: dict[str, tuple[Any, Any]] = {}
    rows: list[dict[str, Any]] = []
    for name in installed(names, say, rows):
        ours, theirs = context.Pipe()
        process = context.Process(target=_play, args=(theirs, case, name), daemon=True)
        process.start()
        theirs.close()
        players[name] = (ours, process)
    for name, (pipe, _) in players.items():
        row = _answer(pipe, limit_s)
        say(f"{name}: ready" if "error" not in row else f"{name}: failed\n{row['error']}")
        rows.append({"implementation": name, "wire": None, **row})
    return players, rows


def _ask(player: tuple[Any, Any], wanted: int | str, limit_s: float) -> dict[str, Any]:
    player[0].send(wanted)
    return _answer(player[0], limit_s)


def _answer(pipe: Any, limit_s: float) -> dict[str, Any]:
    try:
        return pipe.recv() if pipe.poll(limit_s) else {"error": f"no answer within {limit_s:.0f} s"}
    except EOFError:
        return {"error": "the process died"}


def _play(pipe: Any, case: Case, name: str) -> None:
    """Answer "time", a number of steps (with their host times) and "graph", until told to end."""
    try:
        from .graphs import replayed
        from .measure import host_ms, prepare, timed

        run = prepare(case, name)
        pipe.send({"ready": True})
        while (wanted := pipe.recv()) != "end":
            if wanted == "time":
                pipe.send(timed(case, run))
                gc.collect()
            elif wanted == "graph":
                pipe.send(replayed(case, run))
            else:
                pipe.send({"host_ms": [round(host_ms(run), 3) for _ in range(wanted)]})
    except EOFError:  # whoever asks is gone
        return
    except BaseException:
        pipe.send({"error": traceback.format_exc(limit=-6)})
        time.sleep(0.1)
