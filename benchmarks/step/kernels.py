"""What the device did in one profiled step, from the profiler's trace: kernels by kind, name and stream."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "Kernel", "kind_of", "read_trace", "summarise"]

Kernel = tuple[str, int, float, float, int]
"""Name, stream, start and length in microseconds, bytes (0 where the trace does not say)."""

_PATTERNS = (
    ("attention", r"flash|fmha|attention|cudnn.*sdpa"),
    ("matmul", r"gemm|nvjet|cutlass|xmma|grouped_?mm|cublas"),
    ("optimizer", r"adam|FusedOptimizer"),
    ("interleaved copy", r"split_with_sizes|chunk_cat|CatArray|_foreach_copy|BatchedCopy"),
    ("copy or cast", r"copy|memcpy|cast|multi_tensor_apply"),
    ("fill", r"fill|memset"),
    ("normalisation", r"norm"),
    ("reduction", r"reduce"),
)
_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _PATTERNS)
KINDS = ("wire", *(kind for kind, _ in _PATTERNS), "elementwise and other")
_TOP = 24
_NAME_CHARS = 160


def kind_of(name: str) -> str:
    """The kind of a kernel by its name; the first pattern that fits decides."""
    return next((kind for kind, pattern in _COMPILED if pattern.search(name)), KINDS[-1])


def read_trace(path: Path) -> list[Kernel]:
    """The kernels, copies and fills of a chrome trace that ``torch.profiler`` exported."""
    wanted = {"kernel", "gpu_memcpy", "gpu_memset"}
    found = []
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") in wanted:
            args = event["args"]
            stream, nbytes = int(args.get("stream", -1)), int(args.get("bytes", 0))
            found.append((event["name"], stream, float(event["ts"]), float(event["dur"]), nbytes))
    return found


def summarise(kernels: Iterable[Kernel]) -> dict[str, Any]:
    """Milliseconds by kind and the longest kernels; whatever ran on the wire's stream is ``wire``.

    The wire's stream is the one that the spin kernel ran on: the profiled step starts with a spin.
    """
    kernels = list(kernels)
    wires = {stream for name, stream, *_ in kernels if "_wire_" in name}
    kinds: dict[str, float] = defaultdict(float)
    named: dict[tuple[str, int, str], list[float]] = defaultdict(lambda: [0.0, 0, 0])
    for name, stream, _, length, nbytes in kernels:
        kind = "wire" if stream in wires else kind_of(name)
        kinds[kind] += length / 1e3
        entry = named[name[:_NAME_CHARS], stream, kind]
        entry[0] += length / 1e3
        entry[1] += 1
        entry[2] += nbytes
    longest = sorted(named.items(), key=lambda item: -item[1][0])[:_TOP]
    return {
        "ms_by_kind": {kind: round(kinds[kind], 3) for kind in KINDS if kind in kinds},
        "longest": [
            {"name": n, "stream": s, "kind": k, "ms": round(ms, 3), "count": int(count), "bytes": int(nbytes)}
            for (n, s, k), (ms, count, nbytes) in longest
        ],
        "busy_ms": round(_union_ms(k for k in kernels if k[1] not in wires), 3),
    }


def _union_ms(kernels: Iterable[Kernel]) -> float:
    """Time in which at least one of the kernels ran."""
    total, end = 0.0, float("-inf")
    for start, length in sorted((k[2], k[3]) for k in kernels):
        total += max(0.0, start + length - max(start, end))
        end = max(end, start + length)
    return total / 1e3
