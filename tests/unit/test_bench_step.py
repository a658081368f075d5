"""The step benchmark's own arithmetic: shapes, routing, the wire, traces, tables. No device needed."""

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.step import kernels, report  # noqa: E402
from benchmarks.step.case import Case  # noqa: E402
from benchmarks.step.implementations import IMPLEMENTATIONS, SETTINGS, build, missing  # noqa: E402
from benchmarks.step.layers import Layer, Stack, draw_routing  # noqa: E402
from benchmarks.step.reduction_error import (  # noqa: E402
    COLUMNS,
    Gradients,
    autograd_error,
    draw_gradients,
    errors,
    real_gradients,
    study,
)
from benchmarks.step.runner import run_case  # noqa: E402
from benchmarks.step.shapes import MODELS, Experts, layer_numel  # noqa: E402
from benchmarks.step.wire import Copy, Wire, join  # noqa: E402

from ragged_fsdp.collectives import Comm  # noqa: E402
from ragged_fsdp.predict.network import network_of  # noqa: E402

TINY = Case("tiny-moe", layers=2, tokens=64, ranks=8)


@pytest.fixture
def rank_of():
    """Join a wire as one of several ranks; leave it afterwards."""

    def make(ranks: int, rank: int = 0, payload: str = "repeat") -> Wire:
        wire = Wire(payload=payload)
        join(ranks, wire, rank)
        return wire

    yield make
    dist.destroy_process_group()


def test_fake_delivery_writes_large_rows_once(monkeypatch):
    monkeypatch.setattr("benchmarks.step.wire._SMALL_BYTES", 64)
    wire, rows = Wire(), torch.zeros(4, 16)
    large, small = Copy(rows.view(-1), rows[0], 4), Copy(rows[1], rows[0])
    assert wire.worth_making("all_to_all", [large, small]) == [large, small]
    assert wire.worth_making("all_to_all", [large, small]) == [small]
    assert wire.worth_making("all_gather", [large]) == [large]
    assert not wire.worth_making("reduce_scatter", [small])
    assert not Wire(payload="nothing").worth_making("all_to_all", [small])
    assert Wire(delivery="memcpy").worth_making("reduce_scatter", [small]) == [small]


@pytest.mark.parametrize("name", MODELS)
def test_layers_have_the_published_number_of_parameters(name):
    with torch.device("meta"):
        layer = Layer(MODELS[name])
    assert sum(p.numel() for p in layer.parameters()) == layer_numel(MODELS[name])


def test_published_totals():
    # 36, 58 and 80 such layers: 116.8 B (with embeddings), 671 B (58 MoE layers of 61) and 70.6 B parameters
    assert 36 * layer_numel(MODELS["gpt-oss-120b"]) == pytest.approx(115.67e9, rel=1e-3)
    assert 58 * layer_numel(MODELS["deepseek-v3"]) == pytest.approx(667.4e9, rel=1e-3)
    assert 80 * layer_numel(MODELS["llama-3-70b"]) == pytest.approx(68.45e9, rel=1e-3)


def test_the_bound_of_the_gpt_oss_case_is_90_gib():
    case = Case("gpt-oss-120b", 4, 8192, 64)
    assert case.bound_wire_gib == pytest.approx(89.8, abs=0.1)
    assert case.wire_ms(400) == pytest.approx(241, abs=1)
    assert case.wire_ms(None) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"model": "gpt-5"},
        {"tokens": 65},
        {"ranks": 0},
        {"payload": "ones"},
        {"reduce_dtype": "fp8"},
        {"warmup": 0},
        {"replicas": 3},
        {"carveout": -1},
    ],
)
def test_a_case_names_what_is_wrong(change):
    (name,) = change
    with pytest.raises(ValueError, match=name):
        Case(**({"model": "tiny-moe", "layers": 2, "tokens": 64, "ranks": 8} | change))


def test_routing_is_balanced_and_distinct():
    shape = MODELS["tiny-moe"].experts
    routing = draw_routing(64, shape, "cpu", seed=3)
    assert routing.chosen.flatten().bincount().tolist() == [64 * 2 // 8] * 8
    assert all(len(set(row)) == 2 for row in routing.chosen.tolist())
    assert routing.chosen.flatten()[routing.order].diff().min() >= 0
    assert torch.equal(routing.order[routing.inverse], torch.arange(128))
    with pytest.raises(ValueError, match="tokens: 3 x 2"):
        draw_routing(3, shape, "cpu")


def test_experts_match_a_loop_over_tokens():
    torch.manual_seed(0)
    shape = MODELS["tiny-moe"]
    stack = Stack(shape, 1).bfloat16()
    stack.bind(32, "cpu", torch.bfloat16)
    stack.layers[0].reset_parameters()
    experts = stack.layers[0].mlp
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    y = experts(x)
    y.float().sum().backward()
    fast = (y.detach(), x.grad, experts.down.grad)
    x.grad = experts.down.grad = None
    rows = []
    for token, chosen in zip(x.flatten(0, 1), experts.routing.chosen):
        weights = experts.router(token)[chosen].softmax(-1)
        answers = []
        for e in chosen.tolist():
            gate, up = (token @ experts.gate_up[e] + experts.gate_up_bias[e]).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            answers.append(hidden @ experts.down[e] + experts.down_bias[e])
        rows.append((weights.unsqueeze(-1) * torch.stack(answers)).sum(0))
    slow = torch.stack(rows).view_as(x)
    slow.float().sum().backward()
    for a, b in zip(fast, (slow.detach(), x.grad, experts.down.grad)):
        torch.testing.assert_close(a.float(), b.float(), rtol=0.05, atol=2e-3)


def _gradients(shape, recompute=False):
    torch.manual_seed(0)
    stack = Stack(shape, 2, recompute).bfloat16()
    stack.bind(32, "cpu", torch.bfloat16)
    for layer in stack.layers:
        layer.reset_parameters()
    stack(torch.randn(2, 16, 64, dtype=torch.bfloat16)).backward()
    return stack, {name: parameter.grad for name, parameter in stack.named_parameters()}


def test_layers_computed_again_in_backward_give_the_same_gradients():
    kept, again = (_gradients(MODELS["tiny-moe"], recompute)[1] for recompute in (False, True))
    assert kept.keys() == again.keys() and all(torch.equal(kept[name], again[name]) for name in kept)


def test_experts_apart_compute_what_stacked_ones_do():
    published = replace(MODELS["tiny-moe"], experts=Experts(8, 2, 32))
    stacked, apart = (
        Stack(replace(published, experts=replace(published.experts, separate=separate)), 1)
        for separate in (False, True)
    )
    own = stacked.layers[0].mlp
    for e, expert in enumerate(apart.layers[0].mlp.experts):
        gate, up = own.gate_up.detach()[e].normal_(std=0.1).T.chunk(2)
        expert.gate.weight.data, expert.up.weight.data = gate.clone(), up.clone()
        expert.down.weight.data = own.down.detach()[e].normal_(std=0.1).T.clone()
    rest = {name: p for name, p in stacked.named_parameters() if ".mlp." not in name or "router" in name}
    apart.load_state_dict(rest, strict=False)
    assert sum(p.numel() for p in stacked.parameters()) == sum(p.numel() for p in apart.parameters())
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    losses = []
    for stack in (stacked.bfloat16(), apart.bfloat16()):
        stack.bind(32, "cpu", torch.bfloat16)
        losses.append(stack(x))
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
    down = torch.stack([expert.down.weight.grad.T for expert in apart.layers[0].mlp.experts])
    torch.testing.assert_close(down, own.down.grad, rtol=0.05, atol=1e-4)


@pytest.mark.parametrize("payload", ["repeat", "distinct", "zeros", "nothing"])
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (3, 0), (5, 3), (8, 7)])
def test_a_gather_delivers_own_part_in_its_slot(rank_of, ranks, rank, payload):
    wire = rank_of(ranks, rank, payload)
    full = torch.zeros(ranks * 6)
    own = full[rank * 6 : (rank + 1) * 6]
    own.copy_(torch.arange(1.0, 7.0))
    dist.all_gather_into_tensor(full, own)
    apart = torch.zeros(ranks * 6)
    dist.all_gather_into_tensor(apart, own.clone())
    for gathered in (full, apart):
        assert gathered.view(ranks, 6)[rank].tolist() == [1, 2, 3, 4, 5, 6]
        if payload in ("repeat", "distinct"):
            assert bool(gathered.all())  # every rank's part was written
        if payload == "repeat":
            assert torch.equal(gathered.view(ranks, 6), own.expand(ranks, 6))
    assert wire.moved_bytes["all_gather"] == 2 * full.nbytes and wire.calls["all_gather"] == 2


@pytest.mark.parametrize(("dtype", "std"), [(torch.float8_e4m3fn, 1), (torch.int8, 40)])
def test_codes_of_other_ranks_are_numbers_of_their_range(rank_of, dtype, std):
    """Behind this rank's last code may be anything, which would be another's if its part were repeated."""
    rank_of(4, 2, "distinct")
    full = torch.full((4 * 4096,), 0x7F, dtype=torch.uint8).view(dtype)  # as float8: not a number
    Comm().gather(full, full[2 * 4096 : 3 * 4096], dist.group.WORLD)  # float8 travels as bytes
    others = torch.cat((full[: 2 * 4096], full[3 * 4096 :])).float()
    assert others.isfinite().all() and others.std().item() == pytest.approx(std, rel=0.2)


def test_reductions_and_exchanges_are_counted(rank_of):
    wire = rank_of(4, 2)
    source, part = torch.arange(8.0), torch.zeros(2)
    dist.reduce_scatter_tensor(part, source)
    assert part.tolist() == [4, 5]
    received = torch.zeros(8)
    work = dist.all_to_all_single(received, source, async_op=True)
    assert work.wait() and received.tolist() == [4, 5] * 4  # every rank sends what this one sends itself
    parts = [torch.zeros(2) for _ in range(4)]
    dist.all_to_all(parts, list(source.view(4, 2)))
    rows = torch.zeros(4, 2)
    dist.all_to_all(list(rows.unbind()), list(source.view(4, 2)))
    assert all(p.tolist() == [4, 5] for p in (*parts, *rows))
    dist.all_reduce(source)
    dist.barrier()
    assert wire.moved_bytes == {"reduce_scatter": 32, "all_to_all": 96, "all_reduce": 64, "barrier": 0}
    wire.reset_counts()
    assert not wire.moved_bytes


@pytest.mark.parametrize(
    "name",
    ["none", "fsdp2", "fsdp2-shard1", "fsdp2-bf16", "fsdp2-kept3", "ours-2-buffers", "ours-all-to-all"]
    + ["ours-nothing-kept", "ours-bf16"]
    + [f"ours-all-to-all-{option}" for option in ("no-prefetch", "prefetch-2", "2-communicators", "int8")],
)
def test_implementations_train_on_one_rank_of_eight(rank_of, name):
    coded = name.endswith("int8")  # this rank's part has no scales where others have more tiles: no repeat
    wire = rank_of(TINY.ranks, payload="zeros" if coded else "repeat")
    torch.manual_seed(0)
    trainer = IMPLEMENTATIONS[name](TINY, torch.device("cpu"))
    trainer.stack.bind(TINY.tokens, "cpu", torch.bfloat16)
    x = torch.randn(TINY.batch, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):  # the first one learns the order
        wire.reset_counts()
        loss = trainer.forward_backward(x)
        if trainer.update is not None:
            trainer.update()
    assert torch.isfinite(loss) and x.grad is not None
    moved = sum(wire.moved_bytes.values())
    bytes_of = {"gather": (1 if coded else 2) * TINY.numel}
    bytes_of["reduce"] = (2 if "all-to-all" in name or "bf16" in name else 4) * TINY.numel
    kept = (name.startswith("ours") and "nothing" not in name) or "kept3" in name  # both layers, for backward
    gathers = 1 if kept else 2
    least = gathers * bytes_of["gather"] + bytes_of["reduce"]
    assert moved == 0 if name == "none" else least <= moved <= 1.15 * least


@pytest.mark.parametrize("name", ["fsdp2-reshard8", "ours-reshard8"])
def test_what_the_node_keeps_is_gathered_inside_it(rank_of, name):
    wire, case = rank_of(32), replace(TINY, ranks=32)
    wire.network = network_of("h200-400g")
    trainer = build(name, case, torch.device("cpu"))
    trainer.stack.bind(case.tokens, "cpu", torch.bfloat16)
    x = torch.randn(case.batch, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        wire.reset_counts()
        trainer.forward_backward(x)
    once = 2 * case.numel * (1 - 8 / 32) / 8 / 45e9  # one gather of all layers on the cards; four calls
    assert once <= wire.held_s["all_gather", "outside"] < 1.3 * once + 4 * 60e-6
    assert wire.moved_bytes["all_gather"] > 1.9 * 2 * case.numel


@pytest.mark.parametrize("name", ["fsdp2", "ours-nothing-kept"])
def test_replicas_add_an_all_reduce_between_them(rank_of, name):
    wire, case = rank_of(32), replace(TINY, ranks=32, replicas=2)
    wire.network = network_of("h200-400g")
    trainer = build(name, case, torch.device("cpu"))
    trainer.stack.bind(case.tokens, "cpu", torch.bfloat16)
    x = torch.randn(case.batch, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):  # in the first step ranks also compare what they are about to do
        wire.reset_counts()
        trainer.forward_backward(x)
    assert wire.calls["all_reduce"] == case.layers and wire.held_s["all_reduce", "inside"] == 0
    shard_bytes = 4 * case.numel / 16
    assert 2 * shard_bytes <= wire.moved_bytes["all_reduce"] < 4 * shard_bytes  # FSDP2 pads 8 experts to 16
    with pytest.raises(ValueError, match="megatron: cannot be built with 2 replicas"):
        build("megatron", case, torch.device("cpu"))


def test_a_process_that_fails_or_is_missing_is_a_row(monkeypatch):
    from benchmarks.step import implementations

    monkeypatch.setitem(implementations._NEEDS, "fsdp1", "no_such_module")
    said = []
    result = run_case(TINY, ["fsdp1", "fsdp2"], said.append, limit_s=100)
    assert missing("fsdp1") == "no_such_module" and missing("none") is None
    assert said[0] == "fsdp1: skipped, no_such_module is not installed"
    skipped, failed = result["rows"]
    assert "skipped" in skipped and "error" in failed  # without a device every measurement fails
    text = report.markdown(json.loads(json.dumps(result)))
    assert "no_such_module is not installed" in text and "failed: " in text


def _row(name, wire, ms, **more):
    shared = {"step_ms": ms + 1, "host_ms": 5.0, "host_ms_per_layer": 1.0, "kernels": {"longest": []}}
    shared |= {"peak_allocated_gib": 2.0, "peak_reserved_gib": 3.0, "moved_gib": {"all_gather": 1.0}}
    return shared | {"implementation": name, "wire": wire, "forward_backward_ms": ms} | more


def test_ratios_are_to_the_floor_and_to_the_slower_of_floor_and_wire():
    case = Case("llama-3-70b", 4, 4096, 64, (None, 200.0))
    rows = [_row("none", None, 100.0), _row("fsdp2", None, 150.0), _row("fsdp2", 200.0, 300.0)]
    result = {"case": case.to_json(), "rows": rows}
    assert report.bound_ms(result, None) == 100
    assert report.bound_ms(result, 200.0) == pytest.approx(case.wire_ms(200.0))
    text = report.markdown(result)
    assert "| 1.50 | 1.50 |" in text and f"| 3.00 | {300 / case.wire_ms(200.0):.2f} |" in text


def test_rows_of_the_same_setting_are_compared_first():
    case = Case("llama-3-70b", 8, 4096, 512, ("h200-400g",), replicas=2)
    rows = [
        _row("ours", "h200-400g", 80.0),
        _row("fsdp2", "h200-400g", 100.0),
        _row("fsdp2-kept2", "h200-400g", 160.0, peak_allocated_gib=2.5),
        _row("ours-nothing-kept", "h200-400g", 97.0, peak_allocated_gib=1.0, peak_reserved_gib=1.5),
        {"implementation": "fsdp1", "error": "ValueError: fsdp1: cannot be built with 2 replicas"},
    ]
    _, _, head, _, *lines = report.markdown({"case": case.to_json(), "rows": rows}).splitlines()
    columns = [part.strip() for part in head.strip("|").split("|")]
    found = [dict(zip(columns, (part.strip() for part in line.strip("|").split("|")))) for line in lines]
    assert [row["setting"] for row in found] == ["nothing kept"] * 3 + ["2 layers kept"] * 2
    ours = next(line for line in lines if line.startswith("| ragged_fsdp, nothing kept"))
    assert "| 0.97 |" in ours and "| 1.0 | 0.50 | 1.5 | 0.50 |" in ours
    assert "| 0.50 |" in next(line for line in lines if line.startswith("| ragged_fsdp |"))
    assert "rank 0 of 2 x 256" in report.title({"case": case.to_json()})
    assert "45 GB/s cards" in report.title({"case": case.to_json()})


def test_kernels_by_kind_and_stream():
    trace = [
        ("_wire_spin", 20, 0.0, 1.0, 0),
        ("Memcpy DtoD", 20, 1.0, 50.0, 4096),
        ("nvjet_tst_128", 7, 0.0, 100.0, 0),
        ("void at::native::split_with_sizes_copy_out", 7, 90.0, 30.0, 0),
        ("chunk_cat_cuda_kernel", 7, 130.0, 20.0, 0),
    ]
    found = kernels.summarise(trace)
    kinds = {"wire": 0.051, "matmul": 0.1, "interleaved copy": 0.05}
    assert found["ms_by_kind"] == pytest.approx(kinds)
    assert found["busy_ms"] == pytest.approx(0.14)  # overlapping kernels count once, the wire not at all
    row = _row("fsdp2", 400.0, 1.0, kernels=found)
    gather, out, reduce, into, cat, other = report.copies_ms(row)
    assert (out, into, cat, other, reduce) == pytest.approx((0.03, 0.02, 0, 0, 0), abs=1e-9)
    assert gather == pytest.approx(2**30 / 400e6)


def test_figures_are_drawn(tmp_path):
    from benchmarks.step.plots import draw

    results = []
    for ranks in (64, 128):
        case = Case("llama-3-70b", 4, 4096, ranks, (None, 200.0))
        rows = [_row("none", None, 100.0), _row("ours", None, 110.0), _row("ours", 200.0, 300.0)]
        results.append({"case": case.to_json(), "rows": rows})
        results.append({"case": case.to_json() | {"payload": "zeros"}, "rows": rows[:1]})  # not comparable
    results.append({"case": results[0]["case"] | {"allocator": "expandable"}, "rows": results[0]["rows"]})
    written = draw(results, tmp_path)
    assert [p.name for p in written] == ["llama-3-70b.svg", "llama-3-70b-ranks.svg", "throughput.svg"]
    assert all(p.stat().st_size > 1000 for p in written)
    assert ">300<" in written[0].read_text()  # numbers stand on the bars
    assert 0 < report.own_bound_ms(results[0], results[0]["rows"][2]) < report.bound_ms(results[0], 200.0)


def test_no_two_ways_of_the_figures_look_alike():
    from benchmarks.step.plots import _COLOURS

    channels = {name: [int(c[i : i + 2], 16) for i in (1, 3, 5)] for name, c in _COLOURS.items()}
    for one, other in itertools.combinations(channels, 2):
        assert sum(abs(a - b) for a, b in zip(channels[one], channels[other])) > 60, (one, other)


@pytest.mark.parametrize("ranks", [4, 64])
def test_local_fp32_sums_are_as_exact_as_fp32_reductions(ranks):
    found = errors(draw_gradients(ranks, 4096, noise=4.0), ranks_per_node=4)
    for exact in ("bf16 all-to-all, fp32 sum", "fp32 reduce-scatter", "two-level, fp32 between"):
        assert found[exact] < 1e-7
    assert found["bf16 reduce-scatter"] > 1e-3
    if ranks == 64:
        assert found["rounding to bf16"] < found["two-level, bf16 between"] < 3 * found["rounding to bf16"]
        assert found["two-level, bf16 between"] < found["bf16 reduce-scatter"] / 3
    with pytest.raises(ValueError, match="expected a multiple of 3"):
        errors(draw_gradients(4, 8, noise=1.0), ranks_per_node=3)


def test_one_rounding_of_a_nodes_sum_by_hand():
    """Two nodes of two: their sums 257 and 3 take nine and two bits; bf16 has eight, so 257 becomes 256."""
    sent = torch.tensor([[256.0], [1.0], [1.0], [2.0]]).bfloat16()
    gradients = Gradients(torch.tensor([[257.0], [1.0], [1.0], [1.0]]), sent)
    assert gradients.of_first(2).sent.tolist() == [[256.0], [1.0]]
    found = errors(gradients, ranks_per_node=2)
    assert found["two-level, fp32 between"] == found["bf16 all-to-all, fp32 sum"] == 0
    assert found["two-level, bf16 between"] == pytest.approx(1 / 260)
    assert found["bf16 reduce-scatter"] == pytest.approx(2 / 260)  # 256, 256, 258 of which is 256 + 2
    assert found["rounding to bf16"] == pytest.approx(1 / 260)  # 257 is handed over as 256
    assert autograd_error(gradients) == pytest.approx(0)  # 256 + 1 + 1 + 2 is 257 + 1 + 1 + 1


def test_noise_is_measured_in_units_of_what_ranks_have_in_common():
    assert draw_gradients(64, 4096, noise=4.0).noise == pytest.approx(4.0, rel=0.1)


def test_real_gradients_of_both_precisions_and_their_table():
    (gradients,) = real_gradients(4, [1])
    assert gradients.exact.dtype == torch.float32 and gradients.sent.dtype == torch.bfloat16
    assert gradients.exact.shape == gradients.sent.shape and len(gradients.exact) == 4
    assert 0 < autograd_error(gradients) < 0.1 and 0 < gradients.noise < 10
    rows = study([4], 2, [1.0], [0], gloo_ranks=0)
    assert [(row["gradients"], row["ranks"]) for row in rows] == [("drawn", 4), ("real", 4)]
    assert report.error_table(rows).row_count == 2 and {*COLUMNS} - {*rows[0]} == {"bf16 autograd"}


def test_a_timeline_has_a_lane_per_stream(tmp_path):
    from benchmarks.step.timeline import draw_timeline, lanes, spans

    events = [
        ("nvjet", 7, 0.0, 90.0),
        ("nvjet", 7, 100.0, 50.0),
        ("cat", 7, 150.0, 5.0),
        ("reduce", 9, 200.0, 10.0),
    ]
    events += [("_wire_spin", 20, 0.0, 400.0)]
    trace = [
        {"cat": "kernel", "name": n, "ts": ts, "dur": dur, "args": {"stream": stream}}
        for n, stream, ts, dur in events
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": trace}))
    named = lanes(kernels.read_trace(path))
    assert list(named) == ["compute", "communication 1", "wire"]
    matmul, other = spans(named["compute"], wire=False)
    assert matmul == (0.0, 150.0, "matmul") and other[:2] == (150.0, 155.0)
    assert draw_timeline([path], tmp_path / "t.svg").stat().st_size > 1000
    levels = [("_wire_spin", 21, 1.0, 5.0, 0), ("_wire_spin", 20, 0.0, 1.0, 0), ("nvjet", 7, 0.0, 1.0, 0)]
    assert [(lane, own[0][1]) for lane, own in lanes(levels).items()] == [
        ("compute", 7),
        ("wire inside", 20),
        ("wire outside", 21),
    ]


def _stack_of(layers, times):
    case = Case("llama-3-70b", layers, 4096, 64, ("h200-400g",))
    return {"case": case.to_json(), "rows": [_row(name, "h200-400g", ms) for name, ms in times.items()]}


def test_a_model_is_composed_from_two_depths():
    from benchmarks.step.compose import PEAK_TFLOPS, compose, composed_table, flops_per_token

    shape = MODELS["llama-3-70b"]
    attention = 2 * 2 * 4096 * 8192 / 2 * 3  # scores and values, half of each masked, backward twice forward
    assert flops_per_token(shape) == 6 * layer_numel(shape) + attention
    moe = MODELS["tiny-moe"]
    idle = 6 * (3 * 64 * 32 + 2 * 32 + 64)  # experts that a token does not visit
    assert flops_per_token(moe) == 6 * (layer_numel(moe) - idle) + 3 * 16 * 2 * 64
    deep, shallow = _stack_of(8, {"fsdp2": 170.0, "none": 9.0}), _stack_of(4, {"fsdp2": 90.0, "ours": 80.0})
    (found,) = compose([deep, shallow])
    assert found.implementation == "fsdp2" and found.step_ms == 11.0 + 80 * 20.0
    assert found.tokens_per_s == pytest.approx(4096 / 1.611)
    done = found.tokens_per_s * 80 * flops_per_token(shape)
    assert found.mfu == pytest.approx(done / (PEAK_TFLOPS * 1e12))
    assert "all 80 layers composed" in composed_table([shallow, deep])
    with pytest.raises(ValueError, match="two depths"):
        compose([deep, deep])
    with pytest.raises(ValueError, match="same ranks"):
        compose([deep, {**shallow, "case": shallow["case"] | {"ranks": 8}}])


def test_networks_and_flat_wires_are_chosen_together():
    from benchmarks.step.app import _wires

    assert _wires(None, None) == (None, 400.0)
    assert _wires("200", "h200-400g,paper") == (200.0, "h200-400g", "paper")
    assert _wires(None, "free,flat,nvl72") == (None, 400.0, "nvl72")


def test_the_suite_saves_as_it_goes_goes_on_and_stops_at_its_deadline(tmp_path, monkeypatch):
    from benchmarks.step import suite

    ran = []

    def run(case, names, say, **given):
        ran.append((*names,))
        assert "rounds" in given or len(names) == 1  # each of the others is on disk before the next starts
        return {"case": case.to_json(), "rows": [_row(name, None, 100.0 + len(ran)) for name in names]}

    for measurement in ("run_case", "take_turns"):
        monkeypatch.setattr(suite, measurement, run)
    limits = {"deadline_s": 60.0, "limit_s": 10.0}
    first = suite.run_suite(tmp_path, lambda _: None, names=["gpt-oss-256", "host"], **limits)
    assert [path.stem for path in first] == ["gpt-oss-256", "host"]
    assert ran[-1] == suite.SUITE["host"].implementations  # they take turns
    cut = json.loads(first[1].read_text())
    cut["results"][0]["rows"].pop()
    first[1].write_text(json.dumps(cut))  # as if the run had ended early
    rest = suite.run_suite(tmp_path, lambda _: None, **limits)
    assert {path.stem for path in rest} == set(suite.SUITE) - {"gpt-oss-256"}
    alone = [planned for planned in suite.SUITE.values() if not planned.rounds]
    assert len(ran) == sum(len(planned.implementations) for planned in alone) + 2
    assert len(report.load(first[:1])[0]["rows"]) == len(suite.SUITE["gpt-oss-256"].implementations)
    assert suite.run_suite(tmp_path / "late", lambda _: None, deadline_s=1.0, limit_s=10.0) == []


def test_the_suite_has_known_cases_only():
    from benchmarks.step.app import app
    from benchmarks.step.suite import SUITE
    from click.testing import CliRunner

    named = {name for planned in SUITE.values() for name in planned.implementations}
    assert named <= set(IMPLEMENTATIONS) and set(IMPLEMENTATIONS) == set(SETTINGS) <= set(report.LABELS)
    shown = CliRunner().invoke(app, ["suite", "--list", "--only", "host,llama-64", "--skip", "llama-64"])
    assert shown.exit_code == 0 and shown.output.split(":")[0] == "host"
    wrong = CliRunner().invoke(app, ["suite", "--list", "--only", "llama-65"])
    assert wrong.exit_code == 2 and "llama-65" in wrong.output


def test_over_nodes_both_sides_are_in_one_run():
    from benchmarks.step.suite import SUITE

    over_nodes = {name: planned for name, planned in SUITE.items() if isinstance(planned.case.wires[0], str)}
    assert {"gpt-oss-nodes-64-sgd", "deepseek-nodes-256-separate"} <= set(over_nodes)
    for name, planned in over_nodes.items():
        settings = {SETTINGS[one] for one in planned.implementations if one.startswith("ours")}
        theirs = {SETTINGS[one] for one in planned.implementations if one.startswith("fsdp2")}
        assert settings <= theirs, f"{name}: a row of ours has no row of FSDP2 in its setting"


@pytest.mark.parametrize(
    "name",
    ["gpt-oss-nodes-64-sgd", "deepseek-nodes-256-separate", "gpt-oss-nodes-64-recompute", "gpt-oss-hsdp-512"],
)
def test_cases_of_the_suite_run_with_small_layers(rank_of, monkeypatch, name):
    """Without a device: the options of each case, on layers of 64 columns and 32 ranks."""
    from benchmarks.step.suite import SUITE

    planned, tiny = SUITE[name], MODELS["tiny-moe"]
    experts = replace(tiny.experts, bias=False, separate=planned.case.shape.experts.separate)
    monkeypatch.setitem(MODELS, "tiny", replace(tiny, experts=experts))
    case = replace(planned.case, model="tiny", layers=2, tokens=64, ranks=32)
    wire, took = rank_of(case.ranks), {}
    wire.network = network_of(case.wires[0])
    for one in planned.implementations:
        trainer = build(one, case, torch.device("cpu"))
        trainer.stack.bind(case.tokens, "cpu", torch.bfloat16)
        x = torch.randn(case.batch, 16, 64, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2):
            wire.reset_counts()
            loss = trainer.forward_backward(x)
            trainer.update()
        assert torch.isfinite(loss)
        took[one] = dict(wire.calls)
    assert all(calls["all_gather"] == 2 * case.layers for calls in took.values())
    assert all(("all_reduce" in calls) == (case.replicas > 1) for calls in took.values())


@pytest.mark.parametrize("numel", [64, 100])
def test_ways_to_add_rows_make_the_same_sums(numel):
    from benchmarks.step.app import app
    from benchmarks.step.sums import WAYS
    from click.testing import CliRunner

    rows = torch.randint(-8, 9, (8, numel)).bfloat16()  # sums of these are exact
    for name, way in WAYS.items():
        out = torch.full((numel,), float("nan"), dtype=torch.bfloat16)
        way(rows, out)
        assert torch.equal(out, rows.float().sum(0).bfloat16()), name
    wrong = CliRunner().invoke(app, ["sums", "--ranks", "60"])
    assert wrong.exit_code == 2 and "multiple of 8, got 60" in wrong.output


def test_a_floor_serves_files_without_one(tmp_path):
    paths = [tmp_path / "64.json", tmp_path / "128.json"]
    for path, ranks, row in zip(paths, (64, 128), (_row("none", None, 100.0), _row("fsdp2", None, 150.0))):
        case = Case("llama-3-70b", 4, 4096, ranks)
        path.write_text(json.dumps({"results": [{"case": case.to_json(), "rows": [row]}]}))
    assert [report.floor_ms(result) for result in report.load(paths)] == [100.0, 100.0]


def test_a_shared_device_has_a_daemon_of_its_own(tmp_path, monkeypatch):
    from benchmarks.shared_device import shared_device

    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setenv("PATH", "")
    with shared_device() as environment:
        assert environment == {}  # no such program here
    said = tmp_path / "said"
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(f'#!/bin/sh\nread line; echo "$CUDA_MPS_PIPE_DIRECTORY $1$line" >> {said}\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with shared_device() as environment:
        pipes = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(pipes).is_dir()
    assert said.read_text().split() == [pipes, "-d", pipes, "quit"] and not Path(pipes).exists()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", pipes)
    with shared_device() as environment:
        assert environment == {}  # somebody else's is used as it is


def test_reserved_memory_is_listed_under_the_work_it_was_reserved_for():
    from benchmarks.step.segments import segments_by_role

    mib = 1 << 20
    reserved = [
        (64 * mib, ["linear", "forward", "step"]),
        (32 * mib, ["materialize", "unshard", "pre_forward", "forward"]),
        (48 * mib, []),
        (64 * mib, ["silu", "forward"]),
        (4 * mib, ["_init_group", "step"]),
    ]
    by_role = segments_by_role(8 * mib, reserved)
    assert {role: entry["mib"] for role, entry in by_role.items()} == {
        "shards, before the first step": 8,
        "forward": 128,
        "gathered layers": 32,
        "backward": 48,
        "optimizer state": 4,
    }
    assert by_role["forward"]["segments"] == ["2 x 64"]
    found = {"case": TINY.to_json(), "implementation": "ours", "by_role": by_role}
    table = report.segment_table(found | {"peak_allocated_mib": 200.0, "peak_reserved_mib": 220.0})
    assert table.row_count == 7
