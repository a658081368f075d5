"""What a run measures, one JSON object per line.

Kinds of lines: ``start`` (one per start or resume: processes, parameters, padding), ``train`` (one per
step), ``eval``, ``checkpoint``, ``note`` (what the user was told), ``end``. Written by rank 0 alone.
"""

import json
import os
from pathlib import Path
from typing import Any, TextIO

__all__ = ["JsonLines", "losses_by_step", "read_metrics"]


class JsonLines:
    """Appends to ``metrics.jsonl`` of a run, after dropping what a resumed run will write again."""

    def __init__(self, run_dir: Path, resumed_step: int) -> None:
        self._path = run_dir / "metrics.jsonl"
        _drop_after(self._path, resumed_step)
        self._file: TextIO = self._path.open("a")

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """One line."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All complete lines; the last one may be cut off by a crash and is then left out."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def losses_by_step(run_dir: Path, kind: str = "train") -> dict[int, float]:
    """The training or validation losses (``eval``) of a run."""
    return {row["step"]: row["loss"] for row in read_metrics(run_dir) if row["kind"] == kind}


def _drop_after(path: Path, step: int) -> None:
    """Keep the lines up to ``step``: a resumed run writes the later ones again."""
    if not path.exists():
        return
    kept = [row for row in read_metrics(path.parent) if row["step"] <= step and row["kind"] != "end"]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
    os.replace(temporary, path)
