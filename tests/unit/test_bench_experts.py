"""The benchmark of a layer of experts runs, and its ways compute the same layer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.experts import layer  # noqa: E402


def test_the_peers_compute_what_ours_computes():
    """On one rank, where nothing is exchanged: outputs and gradients of all ways."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    shape, bench = layer.SMALL["small"], layer.Bench("cpu", torch.float32, 12)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    before = dist.all_to_all_single
    dist.all_to_all_single = lambda out, given, *_, **__: out.copy_(given)
    try:
        held = layer.Held(shape, shape.experts, "cpu", torch.float32)
        split = layer.ExpertSplit.even(shape.experts, 1)
        dispatcher = layer.AllToAll(init_device_mesh("cpu", (1,)), split)
        found = []
        for way in range(3):
            tokens, chosen, weights = bench.inputs(shape, 12)
            if way == 0:
                rows, counts, route = dispatcher.dispatch(tokens, chosen)
                out = dispatcher.combine(layer.apply_experts(held, rows, counts), weights, route)
            elif way == 1:
                out = layer.torchtitan_style(held, tokens, chosen, weights, 1)
            else:
                out = layer.transformers_all_reduce(held, shape, 1)(tokens, chosen, weights)
            out.square().sum().backward()
            found.append((out.detach(), tokens.grad, weights.grad))
    finally:
        dist.all_to_all_single = before
        dist.destroy_process_group()
    for other in found[1:]:
        for ours, theirs in zip(found[0], other):
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-7)


def test_it_runs_and_writes_every_way(tmp_path):
    out = tmp_path / "layer.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.experts.layer",
        "--device",
        "cpu",
        "--small",
        "--tokens",
        "8",
    ]
    done = subprocess.run(
        [*command, "--ep", "16", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    ways = [r["way"] for r in rows if r["ep"] == 16]
    two = ["two levels", "two levels, capacity"]
    one = ["ours", "in four parts", "capacity", "in a graph", "capacity, at once"]
    assert ways == [*one, *two, "torchtitan", "transformers"]
    assert rows[0]["way"] == "FSDP alone"
    assert all(r["layer_ms"] >= r["placements"][r["best_placement"]]["weights_ms"] for r in rows[1:])


def test_a_group_across_nodes_sends_weights_inside_and_tokens_outside():
    """GPT-OSS over 8 of 64 ranks, by hand: 400 GB/s inside, 45 outside, latencies aside."""
    shape, nbytes = layer.SHAPES["gpt-oss-120b"], 8192 * 4 * 2880 * 2
    held = 16 * 3 * 2880 * 2880
    near, far = layer.Spread.all_of(8)
    assert near.weights(shape, 8) == pytest.approx((0, 3 * held * 2 * 7 / 8 / 45e9), rel=0.01)
    assert far.weights(shape, 8) == pytest.approx((3 * held * 2 * 7 / 8 / 400e9, 0), rel=0.03)
    assert near.exchange("all_to_all", nbytes, range(8)) == pytest.approx(
        (nbytes * 7 / 8 / 400e9, 0), rel=0.02
    )
    assert far.exchange("all_to_all", nbytes, range(8)) == pytest.approx((0, nbytes * 7 / 8 / 45e9), rel=0.02)
    assert [spread.name for spread in layer.Spread.all_of(64)] == ["all ranks"]


def test_what_shares_a_link_takes_its_turn():
    """A group of 16 across 8 nodes has two ranks on each: tokens and weights share the links inside."""
    shape = layer.SHAPES["gpt-oss-120b"]
    tokens = layer.Seconds(1.0, 2.0)
    found = layer.placed(shape, 16, 10.0, lambda spread: [tokens, tokens])["placements"]["across nodes"]
    weights = layer.Spread.all_of(16)[1].weights(shape, 16)
    assert weights.outside == 0 < weights.inside
    assert found["wire_ms"] == 4000 and found["layer_ms"] == 4010
    heavy = layer.Seconds(1.0, 0.0)
    found = layer.placed(shape, 16, 0.0, lambda spread: [heavy])["placements"]["across nodes"]
    assert found["layer_ms"] == pytest.approx(1000 + weights.inside * 1e3, abs=1e-3)
