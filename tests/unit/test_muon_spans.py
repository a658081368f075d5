"""The benchmark's reading of profiles: which stage a kernel belongs to, and what ran beside what."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.optim.stage_spans import StageSpan, draw, overlap, stage_spans


def trace(folder: Path) -> Path:
    """Two buckets; kernels as (name, launch, start, length, stream) within the marks of their stages."""
    stages = {
        "Muon start 0": [("_momentum", 1, 20, 100, 7), ("ncclSendRecv", 5, 120, 300, 20)],
        "Muon start 1": [("_momentum", 11, 130, 100, 7), ("ncclSendRecv", 15, 420, 1000, 20)],
        "Muon iterate 0": [
            ("_gram", 22, 420, 400, 7),
            ("gemm", 23, 820, 100, 7),
            ("nccl", 29, 1420, 200, 20),
        ],
        "Muon iterate 1": [("_gram", 32, 1420, 500, 7)],
    }
    events = []
    for index, (stage, kernels) in enumerate(stages.items()):
        events.append({"cat": "user_annotation", "name": stage, "ts": 10 * index, "dur": 9.5})
        for name, launch, start, length, stream in kernels:
            link = {"correlation": len(events)}
            events.append({"cat": "cuda_driver", "name": "launch", "ts": launch, "dur": 1, "args": link})
            link = {**link, "stream": stream}
            events.append({"cat": "kernel", "name": name, "ts": start, "dur": length, "args": link})
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_kernels_belong_to_the_stage_that_launched_them(tmp_path) -> None:
    spans = stage_spans(trace(tmp_path))
    found = {(s.stage, s.bucket, s.communication): (s.start, s.end) for s in spans}
    assert found["start", 0, True] == (100, 400)  # times count from the first kernel
    assert found["start", 1, True] == (400, 1400)
    assert found["iterate", 0, False] == (400, 900)
    assert found["iterate", 0, True] == (1400, 1600)
    first, second = overlap(spans)
    assert first == {"bucket": 0, "iterate_ms": 0.5, "beside_collective_ms": 0.5}
    assert second == {"bucket": 1, "iterate_ms": 0.5, "beside_collective_ms": 0.2}
    drawn = draw({"a step": spans}, tmp_path / "step.svg").read_text()
    assert ">iterate 0<" in drawn and ">gather 1<" in drawn
    short = [*spans, StageSpan("finish", 0, False, 1700.0, 1705.0)]
    drawn = draw({"a step": short}, tmp_path / "step.svg").read_text()
    assert ">apply 0<" not in drawn and ": apply<" in drawn  # no text runs over its neighbours
