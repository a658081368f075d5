"""Which memory torch's allocator reserved, and for whom: the segments of one implementation's first steps.

Every segment (a ``cudaMalloc``) is listed under the work that asked for its first block. Later blocks may be
others', but a segment never joins another one: a kind of work that needs larger blocks than the segments
that are free makes the allocator reserve more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .case import Case
from .network import network_of

__all__ = ["recorded_segments", "role_of", "segments_by_role"]

_MIB = 1 << 20
_ROLES = (
    ("gathered layers", {"unshard"}),
    ("rows of an exchange or gradient buffer", {"lease"}),
    ("reduced shards", {"_make_main"}),
    ("optimizer state", {"_init_group"}),
    ("forward", {"forward"}),
)
_BEFORE = "shards, before the first step"
_BACKWARD = "backward"

Segment = tuple[int, Sequence[str]]
"""Bytes, and the functions that were running when it was reserved, innermost first."""


def role_of(functions: Sequence[str]) -> str:
    """The work that functions of these names do; autograd's own work has no Python functions."""
    names = set(functions)
    return next((role for role, known in _ROLES if names & known), _BACKWARD)


def segments_by_role(existing_bytes: int, reserved: Iterable[Segment]) -> dict[str, Any]:
    """Mebibytes and sizes by role, in the order in which the roles came."""
    sizes: dict[str, Counter[float]] = defaultdict(Counter)
    for nbytes, functions in reserved:
        sizes[role_of(functions)][nbytes / _MIB] += 1
    found: dict[str, Any] = {_BEFORE: {"mib": existing_bytes / _MIB}}
    for role, counts in sizes.items():
        largest = [f"{count} x {size:g}" for size, count in sorted(counts.items(), reverse=True)]
        found[role] = {"mib": sum(size * count for size, count in counts.items()), "segments": largest}
    return found


def recorded_segments(case: Case, name: str, steps: int = 3) -> dict[str, Any]:
    """Train ``steps`` steps on the case's last wire and say what was reserved for what."""
    from .measure import host_ms, prepare

    run = prepare(case, name)
    run.wire.network = network_of(case.wires[-1])
    torch.cuda.empty_cache()
    existing = torch.cuda.memory_reserved()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    for _ in range(steps):
        host_ms(run)  # makes one whole step
    torch.cuda.synchronize()
    (trace,) = torch.cuda.memory._snapshot()["device_traces"][:1]
    reserved = [
        (event["size"], [frame["name"] for frame in event["frames"]])
        for event in trace
        if event["action"] == "segment_alloc"
    ]
    return {
        "case": case.to_json(),
        "implementation": name,
        "peak_allocated_mib": torch.cuda.max_memory_allocated() / _MIB,
        "peak_reserved_mib": torch.cuda.max_memory_reserved() / _MIB,
        "by_role": segments_by_role(existing, reserved),
    }
