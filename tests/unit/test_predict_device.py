"""Predictions: clocks, multiprocessors that collectives hold, and what the host takes to launch."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from benchmarks.predict.host import host_of
from benchmarks.predict.layers import CALIBRATED, stack_workload
from benchmarks.predict.step_rows import compared
from torch import nn

from ragged_fsdp.predict.books import GroupCost, Host, LayerRun, StepCosts
from ragged_fsdp.predict.card import Point, load_card, roofline_card
from ragged_fsdp.predict.clocks import BOOST, clock, replay_at_its_clock
from ragged_fsdp.predict.costs import count_costs
from ragged_fsdp.predict.groups import Wires, group_cost
from ragged_fsdp.predict.network import PROFILES, Seconds
from ragged_fsdp.predict.parallel import Ranks, shared_point
from ragged_fsdp.predict.products import GROUPED_BESIDE, products_of
from ragged_fsdp.predict.replay import replay
from ragged_fsdp.predict.simulate import Streams
from ragged_fsdp.predict.step import Setup, predict
from ragged_fsdp.predict.workload import ROOT, Kind, Workload, kinds_of, workload_of

CARD = roofline_card("h100")
NOTHING = LayerRun(0.0, 0.0, 0, 0, 0)
RESULTS = Path(__file__).parents[2] / "benchmarks"


def group(gather, reduce=0.0, **more):
    held = Seconds(gather, 0.0)
    return GroupCost("g", 0, held, held, 0.0, grad_bytes=1, reduce=((Seconds(reduce, 0.0), 0.0),), **more)


def step(layers, **more):
    return StepCosts([], NOTHING, layers, {}, 0.0, **more)


# -- multiprocessors that a collective holds -------------------------------------------------------


def test_a_layer_beside_a_collective_takes_longer_for_as_long_as_it_lasts():
    """A gather of 4 s whose first second is copies; then, for 3 s, work takes twice as long."""
    streams = Streams()
    streams.collective("gather", Seconds(4.0, 0.0), "gather", memory_s=1.0)
    assert streams.compute(2.0, "1 s alone, 1 s of work in 2 s", held=1.0) == 3.0
    assert streams.compute(3.0, "half a second of work in the last 1 s, the rest alone", held=1.0) == 6.5
    assert streams.compute(1.0, "after it", held=1.0) == 7.5


def test_collectives_on_both_links_hold_once_and_a_free_network_holds_nothing():
    streams = Streams()
    streams.collective("gather", Seconds(2.0, 4.0), "gather")
    assert streams.compute(3.0, "2 s of work in 4 s, then 1 s", held=1.0) == 5.0
    streams = Streams()
    streams.collective("gather", Seconds(1.0, 0.0), "only copies", memory_s=1.0)
    assert streams.compute(2.0, "layer", held=1.0) == 2.0


def test_grouped_products_by_hand():
    """Four experts of (8, 16), two of them for each of 32 tokens; a router of (4, 8)."""
    shapes = (("router", (4, 8)), ("experts.up", (4, 8, 16)), ("norm", (8,)))
    kind = Kind("layers 0", "s", shapes, (0,))
    card = replace(CARD, matmul_tflops=1e-9, memory_gb_s=1e9)  # 1000 FLOP/s, and no time to read weights
    work = Workload("m", (kind,), (0,), lambda: nn.Module(), lambda m: m, lambda *_: 0, lambda _: 0.0, 8, 2)
    found = products_of(work, kind, 32, Ranks(1), card)
    assert found.plain_s == pytest.approx(2 * 32 * 32 / 1e3)
    assert found.grouped_s == pytest.approx(2 * 32 * 2 * 128 / 1e3)
    # twice and three times the roofline; grouped products are 16384 of 32000 ms in forward
    point = Point(32, 64e3, 192e3, 0.0, 0, 0, 0, 0, 0, 32e3, 64e3, 0.0)
    grouped_ms = 16384 * 2 + 2 * 16384 * 3
    assert found.held(point) == pytest.approx((GROUPED_BESIDE - 1) * grouped_ms / (64e3 + 192e3))
    slow = products_of(work, kind, 32, Ranks(1), replace(card, memory_gb_s=1e-9))
    assert slow.grouped_s == pytest.approx(2 * 512 / 1.0)  # bound by reading weights at 1 byte/s
    dense = Kind("layers 0", "s", shapes[:1], (0,))
    assert products_of(work, dense, 32, Ranks(1), card).held(point) == 0.0


def test_experts_apart_and_an_embedding_are_counted_as_they_are_used():
    apart = tuple((f"mlp.experts.{i}.up.weight", (16, 8)) for i in range(4))
    work = Workload("m", (), (), lambda: nn.Module(), lambda m: m, lambda *_: 0, lambda _: 0.0, 8, 2)
    card = replace(CARD, matmul_tflops=1e-9)
    found = products_of(work, Kind("layers 0", "s", apart, (0,)), 32, Ranks(1), card)
    assert found.plain_s == pytest.approx(2 * 32 * 2 * 128 / 1e3) and not found.grouped_s
    root = Kind(ROOT, "r", (("embed_tokens.weight", (100, 8)), ("lm_head.weight", (100, 8))), ())
    assert products_of(work, root, 32, Ranks(1), card).plain_s == pytest.approx(2 * 32 * 800 / 1e3)


# -- clocks ----------------------------------------------------------------------------------------


def test_tensor_parallel_ranks_split_grouped_products_too():
    workload = workload_of("demo")
    kind = workload.kinds[0]
    whole = products_of(workload, kind, 512, Ranks(8), CARD)
    split = products_of(workload, kind, 512, Ranks(8, tp=2), CARD)
    assert whole.grouped_s > 0 and split.seconds == whole.seconds / 2
    point = Point(512, 3.0, 6.0, 3.0, 0, 0, 0, 0, 0, 2.0, 4.0, 0.0)
    halves = shared_point(point, workload, kind, Ranks(8, tp=2), CARD)
    assert split.held(halves) == pytest.approx(whole.held(point), rel=0.05)  # but for norms and residuals


def test_the_clock_goes_with_the_third_root_of_the_load_and_ends():
    assert clock(1.0) == 1.0
    assert clock(0.8) == pytest.approx(0.8 ** (-1 / 3))
    assert clock(0.5) == clock(0.0) == BOOST
    assert clock(1.3) == 1.0  # a card whose layers are faster than its products: no clock is below theirs


def test_products_of_a_step_that_waits_run_at_the_clock_of_its_load():
    """One layer of 3 s, all products, behind a gather and before a reduction of 1 s each.

    At load L its products take 3 / clock(L), and L = 3 / (2 + that): the fixed point.
    """
    run = replace(NOTHING, forward_s=1.0, backward_s=2.0, forward_products_s=1.0, backward_products_s=2.0)
    costs = step([([group(1.0, 1.0)], run)])
    assert replay(costs).seconds == 5.0
    seconds = 5.0
    for _ in range(50):
        seconds = 2.0 + 3.0 / clock(3.0 / seconds)
    assert replay_at_its_clock(costs).seconds == pytest.approx(seconds, rel=2e-3)


def test_a_layer_that_draws_little_power_has_the_highest_clock_already():
    run = replace(NOTHING, forward_s=1.0, backward_s=2.0, forward_products_s=0.4, backward_products_s=0.8)
    costs = step([([group(1.0, 1.0)], run)])
    assert replay_at_its_clock(costs) == replay(costs)
    alone = replace(run, forward_products_s=1.0, backward_products_s=2.0)
    free = step([([group(0.0)], alone)])
    assert replay_at_its_clock(free).seconds == pytest.approx(3.0)  # as it was measured


# -- the host --------------------------------------------------------------------------------------


def test_a_step_takes_as_long_as_its_host_where_that_is_longer():
    """Two layers: two gathers each, but for what is kept, and reductions of three calls."""
    run = replace(NOTHING, forward_s=1.0, backward_s=1.0)
    layers = [([group(0.5, 0.5, reduce_calls=3)], run)] * 2
    for fsdp2 in (False, True):
        costs = partial(step, layers, kept_layers=0, fsdp2=fsdp2)
        device = replay(costs()).seconds
        assert replay(costs(host=Host(collective_s=0.01))).seconds == device
        slow = replay(costs(host=Host(collective_s=1.0, layer_s=2.0)))
        assert slow.seconds == slow.host_s == 2 * 2 + 2 * 3 + 2 * 2.0
        kept = replay(costs(host=Host(collective_s=1.0), kept_layers=2))
        assert kept.host_s == 2 + 2 * 3


@pytest.mark.parametrize("file, ranks", [("gpt-oss-nodes-64", 64), ("gpt-oss-nodes-1024", 1024)])
def test_collectives_are_as_many_as_the_step_benchmark_counted(file, ranks):
    """Two levels, eight layers, nothing kept: what the runtime called in a step on the GPU."""
    content = json.loads((RESULTS / "step" / "results" / f"{file}.json").read_text())
    rows = [row for result in content["results"] for row in result["rows"]]
    called = next(r for r in rows if r["implementation"] == "ours-two-level-nothing-kept")["collectives"]
    shapes = stack_workload("gpt-oss-120b").kinds[0].shapes
    cost = group_cost("g", shapes, Wires(PROFILES["h200-400g"], ranks, reduction="two_level"), CARD)
    assert called == {"all_gather": 16, "all_to_all": 8 * cost.reduce_calls}
    done = replay(step([([cost], NOTHING)] * 8, kept_layers=0, host=Host(collective_s=1.0)))
    assert done.host_s == sum(called.values())


def test_small_shards_are_exchanged_in_two_calls():
    """As the runtime packs them: all of a node, then all of a rail, each with the latency of one step."""
    network = replace(PROFILES["h200-400g"], inside_step_us=10.0, outside_step_us=20.0)
    small = group_cost("g", (("w", (16, 1024)),), Wires(network, 64, reduction="two_level"), CARD)
    assert small.reduce_calls == 2 and not small.keeps_grads
    slot = 256 * 2
    assert sum(held.inside for held, _ in small.reduce) == pytest.approx(10e-6 + 56 * slot / 400e9)
    assert sum(held.outside for held, _ in small.reduce) == pytest.approx(20e-6 + 7 * slot / 45e9)
    alone = Wires(replace(network, ranks_per_node=1), 64, reduction="two_level")
    assert group_cost("g", (("w", (16, 1024)),), alone, CARD).reduce_calls == 1


def test_a_host_that_binds_is_named():
    setup = Setup(gpus=64, tokens_per_gpu=256, seq_len=256, host=Host(collective_s=1.0))
    found = predict(workload_of("nano"), setup, CARD, PROFILES["h200-400g"])
    assert found.binds == "the host's launches" and found.seconds.value == found.replayed.host_s
    assert found.seconds.error == pytest.approx(0.4)
    longer = predict(workload_of("nano"), replace(setup, host=Host()), CARD, PROFILES["h200-400g"])
    calls = found.replayed.host_s  # of a second each
    near = replace(setup, host=Host(collective_s=0.9 * longer.seconds.value / calls))
    found = predict(workload_of("nano"), near, CARD, PROFILES["h200-400g"])
    assert found.seconds.value == longer.seconds.value  # not bound, but 1.4 times its host would be
    assert found.seconds.error == pytest.approx(max(longer.seconds.error, 1.4 * 0.9 - 1))
    assert predict(workload_of("nano"), replace(setup, host=None), CARD, PROFILES["flat"]).replayed.host_s > 0


# -- the committed card and rows -------------------------------------------------------------------


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(256)

    def forward(self, x):
        return self.norm(x)


def test_a_norm_keeps_its_input_as_on_a_gpu():
    """64 rows of 256 in bf16: the result, and two numbers a row; not two copies in fp32."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([_Normed()])

        def forward(self, x):
            return self.layers[0](x)

    def build():
        with torch.device("meta"):
            return Model().to(torch.bfloat16)

    def loss(model, sequences, seq_len, device):
        x = torch.zeros(sequences * seq_len, 256, dtype=torch.bfloat16, device=device)
        return F.mse_loss(model(x.requires_grad_()).float(), torch.zeros(sequences * seq_len, 256))

    kinds, order = kinds_of(build(), build().layers)
    workload = Workload("norm", kinds, order, build, lambda model: model.layers, loss, lambda _: 0.0)
    cost = count_costs(workload, 1, 64)[kinds[0].signature]
    assert cost.saved_bytes <= 64 * 256 * 2 + 64 * 2 * 4
    assert len(cost.forward.operations) == 1


@pytest.mark.parametrize("name", CALIBRATED)
def test_bytes_that_are_counted_are_those_that_were_measured(name):
    """The layers of the step benchmark: what a GPU kept and its peaks, within 1 %."""
    card = load_card(RESULTS / "predict" / "results" / "h200-layers.json")
    workload = stack_workload(name)
    kind = workload.kinds[0]
    layer = card.layer(kind.signature, 4096)
    cost = count_costs(workload, 1, 4096)[kind.signature]
    point = layer.points[0]
    assert cost.saved_bytes == pytest.approx(point.saved_bytes, rel=0.01)
    assert cost.forward.peak_bytes == pytest.approx(point.forward_peak_bytes, rel=0.01)
    assert cost.backward.peak_bytes == pytest.approx(point.backward_peak_bytes, rel=0.01)
    assert cost.recompute_peak_bytes == pytest.approx(point.recompute_peak_bytes, rel=0.01)


def test_every_row_of_the_step_benchmark_is_within_the_bounds_of_the_page():
    """Times within 5 % and peaks within 3 % of what was measured, each model's layer being on the card."""
    card = load_card(RESULTS / "predict" / "results" / "h200-layers.json")
    rows = [row for row in compared(card) if not row.earlier]
    assert len(rows) == 71
    assert max(abs(row.time_error) for row in rows) <= 0.05
    assert max(abs(row.memory_error) for row in rows) <= 0.03
    assert host_of("gpt-oss-120b", "fsdp2").collective_s > host_of("gpt-oss-120b", "ours").collective_s
