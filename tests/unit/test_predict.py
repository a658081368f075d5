"""Predictions: the simulator against schedules worked out by hand, books against the real runtime."""

import json
import re
import shlex
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks.predict.paper import best_setting, draw
from click.testing import CliRunner
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from collective_calls import noted
from ragged_fsdp import MixedPrecisionPolicy, fully_shard
from ragged_fsdp.cli.main import main
from ragged_fsdp.cli.predict import parse_gpus, read_nccl_table
from ragged_fsdp.models.source import find_model
from ragged_fsdp.predict.books import GroupCost, Host, LayerRun, StepCosts
from ragged_fsdp.predict.card import DEVICES, LayerCard, Point, find_card, load_card, roofline_card
from ragged_fsdp.predict.costs import count_costs
from ragged_fsdp.predict.groups import Wires, group_cost
from ragged_fsdp.predict.measure import _Mark, _phases_of
from ragged_fsdp.predict.network import PROFILES, Network, Seconds
from ragged_fsdp.predict.optimizers import muon
from ragged_fsdp.predict.parallel import LayerPart, ReplicaRanks, parts_of
from ragged_fsdp.predict.pictures import plot_scaling
from ragged_fsdp.predict.replay import replay
from ragged_fsdp.predict.scale import Scale, goodput, slowest
from ragged_fsdp.predict.search import search
from ragged_fsdp.predict.simulate import Streams
from ragged_fsdp.predict.step import Setup, predict
from ragged_fsdp.predict.workload import Workload, kinds_of, workload_of
from rank_pool import DEVICE

CARD = roofline_card("h100")
NOTHING = LayerRun(0.0, 0.0, 0, 0, 0)


def group(name, gather=1.0, reduce=1.0, **more):
    """A group whose collectives hold the links inside the node so many seconds; 100 bytes gathered."""
    held = Seconds(gather, 0.0)
    parts = ((Seconds(reduce, 0.0), 0.0),)
    given = {"grad_bytes": 100, "buffer_bytes": 200, "shard_grad_bytes": 10, "reduce": parts}
    return GroupCost(name, 100, held, held, 0.0, **(given | more))


def stack(layers, run, root=None, **more):
    held = {"weights": 40, "optimizer": 80}
    return StepCosts([root] if root else [], NOTHING, [([g], run) for g in layers], held, 0.5, **more)


def spans_of(done, lane):
    return [(span.label, span.start, span.end) for span in done.spans if span.lane == lane]


# -- schedules by hand -----------------------------------------------------------------------------


def test_a_step_that_hides_its_network_but_for_both_ends():
    """Three layers, forward 2 s, backward 4 s, collectives 1 s. The last two layers stay gathered.

    ::

        link      |r|0|1| |2|          |R2|  |0|R1|     |R0|Rr
        compute       |f0 |f1 |f2 |b2    |b1    |b0    |    |opt
    """
    run = LayerRun(2.0, 4.0, 50, 60, 150)
    done = replay(stack([group(f"{i}") for i in range(3)], run, group("root")))
    assert spans_of(done, "compute") == [
        ("forward 0", 2.0, 4.0),
        ("forward 1", 4.0, 6.0),
        ("forward 2", 6.0, 8.0),
        ("backward 2", 8.0, 12.0),
        ("backward 1", 12.0, 16.0),
        ("backward 0", 16.0, 20.0),
        ("optimizer", 22.0, 22.5),
    ]
    assert spans_of(done, "inside") == [
        ("gather root", 0.0, 1.0),
        ("gather 0", 1.0, 2.0),
        ("gather 1", 2.0, 3.0),
        ("gather 2", 4.0, 5.0),
        ("reduce 2", 12.0, 13.0),
        ("gather 0", 13.0, 14.0),
        ("reduce 1", 16.0, 17.0),
        ("reduce 0", 20.0, 21.0),
        ("reduce root", 21.0, 22.0),
    ]
    assert done.seconds == 22.5 and done.compute_s == 18.5 and done.exposed_s == 4.0


def test_nothing_kept_and_a_slow_network():
    """Two layers, forward 1 s, backward 1 s, collectives 3 s: the link never rests and decides.

    Backward waits for the gather of each layer; the second gather is issued before the first backward ends.
    """
    run = LayerRun(1.0, 1.0, 0, 0, 0)
    done = replay(stack([group("0", 3.0, 3.0), group("1", 3.0, 3.0)], run, kept_layers=0))
    assert spans_of(done, "inside") == [
        ("gather 0", 0.0, 3.0),
        ("gather 1", 3.0, 6.0),
        ("gather 1", 7.0, 10.0),
        ("gather 0", 10.0, 13.0),
        ("reduce 1", 13.0, 16.0),
        ("reduce 0", 16.0, 19.0),
    ]
    assert spans_of(done, "compute")[-1] == ("optimizer", 19.0, 19.5)


def test_an_exchange_gathers_before_it_reduces():
    """With three layers and slow links the gather of layer 0 goes ahead of the reduction of layer 2."""
    run = LayerRun(1.0, 1.0, 0, 0, 0)
    layers = [group(f"{i}", 3.0, 3.0, keeps_grads=True) for i in range(3)]
    order = {
        first: [
            label
            for label, *_ in spans_of(
                replay(stack(layers, run, kept_layers=0, gathers_first=first)), "inside"
            )
        ]
        for first in (False, True)
    }
    assert order[False][3:] == ["gather 2", "gather 1", "reduce 2", "gather 0", "reduce 1", "reduce 0"]
    assert order[True][3:] == ["gather 2", "gather 1", "gather 0", "reduce 2", "reduce 1", "reduce 0"]


def test_fsdp2_in_its_own_order():
    """Two layers; gathers and reductions 1 s, copies out 0.5 s, forward 2 s, backward 4 s.

    A gather of forward waits for no computation; one of backward for the copy out before it, and the copy of
    gradients for the reduction before.
    """
    run = LayerRun(2.0, 4.0, 0, 0, 0)
    layers = [group(f"{i}", copy_out_s=0.5, grad_copy_s=0.25) for i in range(2)]
    done = replay(stack(layers, run, kept_layers=0, fsdp2=True))
    assert spans_of(done, "inside") == [
        ("gather 0", 0.0, 1.0),
        ("gather 1", 1.0, 2.0),
        ("gather 1", 4.0, 5.0),
        ("gather 0", 6.5, 7.5),
        ("reduce 1", 10.75, 11.75),
        ("reduce 0", 15.5, 16.5),
    ]
    assert spans_of(done, "compute") == [
        ("copy out 0", 1.0, 1.5),
        ("forward 0", 1.5, 3.5),
        ("copy out 1", 3.5, 4.0),
        ("forward 1", 4.0, 6.0),
        ("copy out 1", 6.0, 6.5),
        ("backward 1", 6.5, 10.5),
        ("collect 1", 10.5, 10.75),
        ("copy out 0", 10.75, 11.25),
        ("backward 0", 11.25, 15.25),
        ("collect 0", 15.25, 15.5),
        ("optimizer", 16.5, 17.0),
    ]
    # persistent 120; layer 1 and the buffer of layer 0: 200; in the last backward layer 0, the other's
    # reduction 200 and its shard of gradients 10
    assert done.peak_bytes == 120 + 200 + 200 + 10
    kept = replay(stack(layers, run, kept_layers=2, fsdp2=True))
    assert [label for label, *_ in spans_of(kept, "inside")] == [
        "gather 0",
        "gather 1",
        "reduce 1",
        "reduce 0",
    ]


def test_copies_beside_a_layer_delay_it():
    """Half of the second for which a gather writes memory, and nothing of what ran before or after."""
    streams = Streams()
    streams.collective("gather", Seconds(3.0, 0.0), "gather", memory_s=1.0)
    assert streams.compute(2.0, "layer", contention=0.5) == 2.5
    assert streams.compute(2.0, "next", contention=0.5) == 4.5
    streams.wait("reduce", 6.0)
    streams.run("reduce", 2.0, "sum")
    assert streams.compute(1.0, "before it", contention=1.0) == 5.5


def test_the_books_of_memory_by_hand():
    """Two layers, nothing kept. The most lives in the backward of the first layer.

    weights 40 + optimizer 80; layer 0 gathered 100; in backward 0 the reduction of layer 1 is pending with
    its buffer of 200 and its reduced shard of 10; saved 50; the peak of the backward itself 150.
    """
    run = LayerRun(1.0, 1.0, 50, 60, 150)
    done = replay(stack([group("0"), group("1")], run, kept_layers=0))
    assert done.peak == {
        "weights": 40,
        "optimizer": 80,
        "gathered": 100,
        "activations": 50 + 150,
        "gradients": 10,
        "reduction": 200,
    }


def test_micro_batches_reduce_once():
    run = LayerRun(1.0, 1.0, 0, 0, 0)
    done = replay(stack([group("0"), group("1")], run, micro_batches=3))
    labels = [label for label, *_ in spans_of(done, "inside")]
    assert sum(label.startswith("reduce") for label in labels) == 2
    assert sum(label.startswith("gather") for label in labels) >= 6
    assert sum(label.startswith("forward") for label, *_ in spans_of(done, "compute")) == 6


# -- against the real runtime ----------------------------------------------------------------------


class _Layers(nn.Module):
    """Layers of different widths, so that a collective's size tells whose it is."""

    def __init__(self, count):
        super().__init__()
        self.head = nn.Linear(32, 8, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(32, 16 * (i + 2), bias=False), nn.ReLU(), nn.Linear(16 * (i + 2), 32, bias=False)
            )
            for i in range(count)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def fake_ranks():
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield 4
    dist.destroy_process_group()


def _sharded(count, reduction):
    model = _Layers(count)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, reduction=reduction)
    return fully_shard(model, mp_policy=policy, reduction=reduction)


@pytest.mark.skipif(DEVICE != "cpu", reason="books are kept on the CPU")
@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_to_all"])
def test_collectives_come_in_the_order_of_the_real_runtime(fake_ranks, reduction):
    """Three steps of a real model on a process group without other ranks, and the replay of its shapes."""
    model = _sharded(5, reduction)
    for _ in range(3):
        with noted() as notes:
            model(torch.randn(2, 32)).sum().backward()
    sizes = {sum(p.numel() for p in layer.parameters()): f"layer {i}" for i, layer in enumerate(model.layers)}
    sizes[32 * 8] = "root"
    real = [("gather" if call.kind == "gather" else "reduce", call.written.numel()) for call in notes.calls]
    kinds, order = kinds_of(model, model.layers)
    wires = Wires(PROFILES["flat"], fake_ranks, reduction=reduction)
    costs = [group_cost(kind.name, kind.shapes, wires, CARD) for kind in kinds]
    run = LayerRun(1e-3, 2e-3, 0, 0, 0)
    layers = [replace(costs[index], name=f"layer {place}") for place, index in enumerate(order)]
    done = replay(
        stack(layers, run, replace(costs[-1], name="root"), gathers_first=reduction != "reduce_scatter")
    )
    replayed = [tuple(span.label.split(" ", 1)) for span in done.spans if span.lane == "inside"]
    assert [kind for kind, _ in real] == [kind for kind, _ in replayed]
    named = [(kind, sizes[numel]) for kind, numel in real if kind == "gather"]
    assert named == [entry for entry in replayed if entry[0] == "gather"]


HOLDS_ONE_MORE = pytest.mark.xfail(
    torch.__version__.startswith("2.12."),
    strict=True,
    reason="a loop variable of torch 2.12's FSDP2 holds a layer's gradients while the next one's are reduced",
)


class _Even(_Layers):
    """Equal layers, large beside their activations."""

    def __init__(self, count):
        super().__init__(0)
        self.head = nn.Linear(256, 256, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 512, bias=False), nn.ReLU(), nn.Linear(512, 256, bias=False))
            for _ in range(count)
        )


@pytest.mark.skipif(DEVICE != "cpu", reason="torch's memory tracker counts CPU storages")
@pytest.mark.parametrize(
    ("sharding", "tokens"), [("ragged", 64), ("ragged", 256), pytest.param("fsdp2", 64, marks=HOLDS_ONE_MORE)]
)
def test_the_peak_is_that_of_a_real_run(fake_ranks, sharding, tokens):
    """Allocated bytes of steps of a sharded model, as torch's own tracker of storages counts them."""
    workload = _even_workload(6)
    setup = Setup(gpus=fake_ranks, tokens_per_gpu=tokens, seq_len=tokens, reduction="reduce_scatter")
    setup = replace(setup, sharding=sharding)
    setup = replace(setup, scale=Scale(jitter=0.0), expandable_segments=False)  # as on the CPU
    predicted = predict(workload, setup, CARD, PROFILES["flat"]).replayed
    model = _Even(6)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = {"ragged": fully_shard, "fsdp2": torch_fully_shard}[sharding]
    for layer in model.layers:
        shard(layer, mp_policy=policy)
    shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        x = torch.randn(tokens, 256, dtype=torch.bfloat16)
        model(x.requires_grad_()).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
        tracker.reset_mod_stats()
        step()
    measured = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert predicted.peak_bytes == pytest.approx(measured, rel=0.05)


def _even_workload(count):
    def loss(model, sequences, seq_len, device):
        x = torch.randn(sequences * seq_len, 256, device=device, dtype=torch.bfloat16)
        return model(x.requires_grad_()).float().sum()

    def build():
        with torch.device("meta"):
            return _Even(1).to(torch.bfloat16)

    with torch.device("meta"):
        whole = _Even(count)
    kinds, order = kinds_of(whole, whole.layers)
    return Workload("even", kinds, order, build, lambda model: model.layers, loss, lambda _: 1.0)


def test_costs_of_a_layer_by_hand():
    """Two products of (64, 256) with (512, 256) and back, and a ReLU; bf16."""
    workload = _even_workload(3)
    cost = count_costs(workload, 1, 64)[workload.kinds[0].signature]
    product = 2 * 64 * 256 * 512
    assert cost.forward.flops == 2 * product and cost.backward.flops == 4 * product
    hidden, output = 64 * 512 * 2, 64 * 256 * 2
    assert cost.output_bytes == output
    assert cost.saved_bytes == hidden + output  # the ReLU's result; its input is gone
    assert cost.forward.peak_bytes == 2 * hidden
    weights = 2 * 512 * 256 * 2
    assert cost.backward.peak_bytes >= weights  # its gradients
    assert cost.recompute_peak_bytes == cost.saved_bytes - output + cost.backward.peak_bytes


# -- what must hold for any cluster ----------------------------------------------------------------


@pytest.mark.parametrize("sharding", ["ragged", "fsdp2"])
@pytest.mark.parametrize("gpus", [8, 24, 1024])
def test_more_of_anything_is_never_slower(sharding, gpus):
    workload = workload_of("nano")
    setup = Setup(gpus=gpus, tokens_per_gpu=256, seq_len=256, sharding=sharding)
    slow = Network("slow", 10.0, 1.0, 8, 1.9, 4.0)
    most = (1 + 1e-9) * predict(workload, setup, CARD, slow).seconds.value
    faster = [
        replace(slow, inside_gb_s=20.0),
        replace(slow, card_gb_s=2.0),
        replace(slow, inside_step_us=0.0),
        replace(slow, outside_step_us=0.0),
    ]
    assert all(predict(workload, setup, CARD, network).seconds.value <= most for network in faster)
    assert predict(workload, setup, replace(CARD, memory_gb_s=8000.0), slow).seconds.value <= most
    assert predict(workload, replace(setup, optimizer="sgd"), CARD, slow).seconds.value <= most


def test_slowest_and_goodput_by_their_formulas():
    assert slowest(1, Scale()) == 1.0
    assert slowest(1024, Scale(jitter=0.01)) == pytest.approx(1 + 0.01 * (2 * 6.931471805599453) ** 0.5)
    found = goodput(1.0, 1000, Scale(mtbf_hours=1000.0, restart_s=60.0, save_s=10.0, checkpoint_s=590.0))
    assert found.hours_between_failures == 1.0
    assert found.share == pytest.approx(1 - 10 / 600 - (295 + 60) / 3600)
    best = goodput(1.0, 1000, Scale(mtbf_hours=1000.0, save_s=10.0))
    assert best.checkpoint_s == pytest.approx((2 * 10 * 3600) ** 0.5)


def test_two_levels_carry_the_bytes_of_the_network_page():
    """16 ranks on 2 nodes: inside 14 slots of bf16, between nodes one; a ring carries fp32."""
    network = Network("n", 1.0, 1.0, 8)
    shapes = (("w", (16 * (1 << 20), 1)),)
    slot = (1 << 20) * 2 / 1e9
    cost = group_cost("g", shapes, Wires(network, 16, reduction="two_level"), CARD)
    assert sum(held.inside for held, _ in cost.reduce) == pytest.approx(14 * slot)
    assert sum(held.outside for held, _ in cost.reduce) == pytest.approx(slot)
    ring = group_cost("g", shapes, Wires(network, 16, reduction="reduce_scatter"), CARD)
    assert sum(held.outside for held, _ in ring.reduce) == pytest.approx(16 * 2 * slot * 0.5 / 8)
    flat = group_cost("g", shapes, Wires(network, 16, reduction="all_to_all"), CARD)
    assert sum(held.outside for held, _ in flat.reduce) == pytest.approx(8 * slot)


@pytest.mark.parametrize("shape", [(16, 1024), (16 << 20, 8)])
@pytest.mark.parametrize("reduction", ["two_level", "auto"])
def test_nodes_of_one_rank_exchange_gradients_at_once(shape, reduction):
    """In their own dtype: there are no sums of nodes."""
    network, shapes = Network("n", 1.0, 1.0, 1), (("w", shape),)
    wires = Wires(network, 16, reduction=reduction, internode_bytes=4)
    assert group_cost("g", shapes, wires, CARD) == group_cost(
        "g", shapes, Wires(network, 16, reduction="all_to_all"), CARD
    )


def test_a_card_is_a_line_between_its_points_and_refuses_nonsense(tmp_path):
    def point(tokens, ms):
        return Point(tokens, ms, 2 * ms, ms, 10 * tokens, 0, 0, 0, 0, ms / 2, ms, 0.5)

    layer = LayerCard("m", "layers 0", "dense", "abc", 64, (point(100, 1.0), point(200, 3.0)))
    assert layer.at(150).forward_ms == 2.0 and layer.at(150).saved_bytes == 1500
    assert layer.at(300).forward_ms == 5.0 and layer.at(50).forward_ms == 0.5
    card = replace(CARD, layers=(layer,))
    assert card.ratio("forward", "dense") == 2.0 and card.ratio("backward", "dense") == 2.0
    assert card.ratio("forward", "experts") == 1.0  # nothing is known of those
    with pytest.raises(ValueError, match="expected a sort of dense, experts, root, got layer"):
        replace(layer, sort="layer")
    path = tmp_path / "card.json"
    card.save(path)
    assert load_card(path) == card == find_card(str(path))
    with pytest.raises(ValueError, match="rising numbers of tokens"):
        replace(layer, points=(point(200, 1.0), point(100, 1.0)))
    with pytest.raises(ValueError, match="memory_gb_s must be above 0"):
        replace(CARD, memory_gb_s=-1.0)
    for content in ("{", "[]", '{"format": 1, "name": "x"}'):
        path.write_text(content)
        with pytest.raises(ValueError, match="hardware"):
            load_card(path)


def test_the_error_of_a_data_sheet_has_room_for_what_was_measured():
    """GPT-OSS-120B on H200: by its card, within the error bar of its data sheet."""
    setup = Setup(gpus=8, tokens_per_gpu=8192, activation_checkpointing=1)
    workload, network = workload_of("gpt-oss-120b"), PROFILES["h200-400g"]
    measured = predict(workload, setup, find_card("h200"), network).seconds.value
    sheet = predict(workload, setup, roofline_card("h200"), network).seconds
    assert measured == pytest.approx(sheet.value, rel=sheet.error + 0.05)
    assert roofline_card("h200").spread("forward", "dense") == 0.25


def test_what_a_card_has_measured_is_used():
    workload = workload_of("nano")
    points = tuple(Point(t, t / 64, t / 32, t / 64, t, t, t, 1, t, 1.0, 1.0, 0.0) for t in (64, 128))
    layers = tuple(LayerCard("nano", k.name, k.sort, k.signature, 64, points) for k in workload.kinds)
    setup = Setup(gpus=1, tokens_per_gpu=128, seq_len=64, scale=Scale(jitter=0.0))
    found = predict(workload, setup, replace(CARD, layers=layers), PROFILES["flat"])
    layers_and_root = sum(k.count for k in workload.kinds)
    assert found.measured and found.compute_s == pytest.approx(layers_and_root * 6e-3, rel=0.05)
    assert not predict(workload, setup, CARD, PROFILES["flat"]).measured


def test_phases_of_a_run_from_its_marks():
    """One layer: forward leaves 70, its backward has 30 of gradients and a peak of 90 above its start."""

    class Event:
        def __init__(self, ms):
            self.ms = ms

        def elapsed_time(self, other):
            return other.ms - self.ms

    marks = [
        _Mark(None, "forward", Event(0.0), 1000, 0, 0, 0),
        _Mark(0, "forward", Event(1.0), 1010, 1020, 0, 0),
        _Mark(None, "forward", Event(4.0), 1080, 1100, 0, 0),
        _Mark(None, "backward", Event(5.0), 1090, 1150, 0, 0),
        _Mark(0, "backward", Event(6.0), 1085, 1160, 0, 0),
        _Mark(None, "backward", Event(12.0), 1045, 1175, 30, 30),
        _Mark(None, "end", Event(13.0), 1030, 1045, 30, 30),
    ]
    found = _phases_of(marks)
    assert (found[0, "forward"].ms, found[0, "forward"].left_bytes, found[0, "forward"].peak_bytes) == (
        3.0,
        70,
        90,
    )
    assert (found[0, "backward"].ms, found[0, "backward"].left_bytes) == (6.0, -70)
    assert found[0, "backward"].peak_bytes == 1175 - 1085
    assert found[None, "forward"].ms == 2.0 and found[None, "forward"].peak_bytes == 1150 - 1070


# -- the command -----------------------------------------------------------------------------------


def documented_commands():
    """Every command of the page's shell blocks."""
    text = (Path(__file__).parents[2] / "docs" / "predict.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = [
        line for block in blocks for line in block.splitlines() if line.startswith("ragged-fsdp predict")
    ]
    assert len(lines) >= 4
    return [shlex.split(line)[1:] for line in lines]


def run(*arguments):
    return CliRunner().invoke(main, ["predict", *map(str, arguments)])


NANO = ("nano", "--seq-len", "64", "--hardware", "h100")


def test_the_command_prints_what_the_library_says(tmp_path, monkeypatch):
    timeline, plot = tmp_path / "step.svg", tmp_path / "scaling.svg"
    result = run(*NANO, "--gpus", "8..64", "--tokens-per-gpu", "128", "--fsdp2", "--json",
                 "--timeline", timeline, "--plot", plot)  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["predictions"]
    assert [row["setup"]["gpus"] for row in rows] == [8, 16, 32, 64] * 2
    setup = Setup(gpus=16, tokens_per_gpu=128, seq_len=64)
    found = predict(workload_of("nano"), setup, CARD, PROFILES["h200-400g"])
    assert rows[1]["step_s"] == found.seconds.value and rows[1]["memory_bytes"] == found.memory
    assert not rows[1]["compute_measured"] and rows[1]["step_error"] > 0
    names = {
        "weights",
        "gathered",
        "gradients",
        "activations",
        "workspace",
        "fragmentation",
        "optimizer (adamw)",
    }
    assert names <= set(rows[1]["memory_bytes"])
    bars = ElementTree.parse(timeline).getroot().iter("{http://www.w3.org/2000/svg}title")
    assert any(bar.text.startswith("backward layer 1") for bar in bars)
    drawn = re.findall(r"<!-- (.*?) -->", plot.read_text())  # texts, of which matplotlib draws the letters
    assert "64" in drawn and max(map(len, drawn)) <= 90  # a longer title is cut off on both sides
    for width in (80, 140):
        monkeypatch.setenv("COLUMNS", str(width))
        text = run(*NANO, "--gpus", "8,100000", "--tokens-per-gpu", "128", "--fsdp2").output
        assert max(map(len, text.splitlines())) <= width and "roofline card, nothing measured" in " ".join(
            text.split()
        )


PAPER = Path(__file__).parents[2] / "benchmarks" / "predict" / "results" / "paper.json"


@pytest.mark.parametrize("sharding", ["ragged", "fsdp2"])
def test_the_committed_scaling_of_the_paper_is_what_is_predicted_now(sharding):
    rows = json.loads(PAPER.read_text())["strong"]
    (committed,) = [row for row in rows if row["sharding"] == sharding and row["batch_tokens"] == 16 << 20]
    now = best_setting("800B", 8192, (16 << 20) // 8192, sharding).as_json()
    then = committed["best"]["8192"]
    assert now["step_s"] == pytest.approx(then["step_s"], rel=0.02)
    assert (now["ep"], now["binds"]) == (then["ep"], then["binds"])


def test_the_same_figures_give_the_same_picture(tmp_path):
    predicted = predict(
        workload_of("nano"), Setup(gpus=8, tokens_per_gpu=64, seq_len=64), CARD, PROFILES["flat"]
    )
    tables = json.loads(PAPER.read_text())
    paths = [tmp_path / f"{name}.svg" for name in "abcd"]
    for scaling, paper in (paths[:2], paths[2:]):
        plot_scaling(scaling, "one", {"ragged": [predicted]})
        draw(tables, paper)
    assert paths[0].read_bytes() == paths[2].read_bytes() and paths[1].read_bytes() == paths[3].read_bytes()


def test_a_batch_is_shared_and_sizes_that_cannot_are_named():
    result = run(*NANO, "--gpus", "2..16", "--batch-tokens", 64 * 8)
    assert result.exit_code == 0 and "left out" in result.output and "16 GPUs" in result.output


def test_search_names_the_best_and_why_others_lose():
    workload = workload_of("nano")
    setup = Setup(gpus=16, tokens_per_gpu=256, seq_len=64)
    found = search(workload, setup, CARD, PROFILES["h200-400g"], allow_codes=True)
    assert found[0].why == "best" and all("slower" in entry.why for entry in found[1:])
    times = [entry.prediction.seconds.value for entry in found]
    assert times == sorted(times)
    tight = found[0].prediction.memory_bytes - 1
    limited = search(workload, setup, CARD, PROFILES["h200-400g"], memory_bytes=tight)
    assert limited[0].prediction.memory_bytes <= tight and any("needs" in entry.why for entry in limited)
    asked = ["--gpus", "16", "--hardware", "h100", "--tokens-per-gpu", "4096"]
    printed = run("nano", *asked, "--search")
    assert printed.exit_code == 0 and "best" in printed.output
    advised = CliRunner().invoke(main, ["plan", "nano", "--advise", *asked])
    assert advised.exit_code == 0 and advised.output == printed.output
    alone = CliRunner().invoke(main, ["plan", "nano", "--hardware", "h100"])
    assert alone.exit_code == 2 and "go together, with --advise" in " ".join(alone.output.split())
    for more in (["-w", "model"], ["--ep", "2"], ["--plot", "a.svg"]):
        refused = CliRunner().invoke(main, ["plan", "nano", "--advise", *asked, *more])
        assert refused.exit_code == 2 and "is `predict --search`" in " ".join(refused.output.split())


def test_search_keeps_more_layers_where_there_is_room():
    setup = Setup(gpus=64, tokens_per_gpu=4096)
    card, network = find_card("h200"), PROFILES["paper"]
    found = search(workload_of("llama-3-8b"), setup, card, network, memory_bytes=40 << 30, most=20)
    kept = {entry.prediction.setup.kept: entry for entry in found}
    assert {4, 8, 16} < set(kept), "more than two layers, and not all"
    assert "[reshard_after_forward=False for the last 8 layers]" in kept[8].flags


@pytest.mark.parametrize("reduction", ["all_to_all", "two_level"])
def test_search_keeps_the_reduction_that_was_chosen(reduction):
    setup = Setup(gpus=16, tokens_per_gpu=64, seq_len=64, reduction=reduction)
    found = search(workload_of("nano"), setup, CARD, PROFILES["h200-400g"], most=50)
    assert {entry.prediction.reduction for entry in found} == {reduction}


def test_search_names_the_host_where_it_binds():
    setup = Setup(gpus=16, tokens_per_gpu=256, seq_len=64, host=Host(collective_s=1e-3))
    found = search(workload_of("nano"), setup, CARD, PROFILES["h200-400g"])
    assert found[0].prediction.binds == "the host's launches"
    assert "the host launches for longer" in found[1].why


@pytest.mark.parametrize(("name", "sharing"), [("demo", {"tp": 2}), ("nano", {"ep": 4})])
def test_search_keeps_the_parallelism_that_was_chosen(name, sharing):
    setup = Setup(gpus=16, tokens_per_gpu=64 // sharing.get("tp", 1), seq_len=64, **sharing)
    found = search(workload_of(name), setup, CARD, PROFILES["h200-400g"])
    assert found[0].why == "best"
    assert {(entry.prediction.setup.tp, entry.prediction.setup.ep) for entry in found} == {
        (setup.tp, setup.ep)
    }


def test_a_training_run_s_file_is_a_model(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nmodel = "nano"\n[data]\nseq_len = 64\nbatch = 16\n[optimizer]\noptimizer = "adam8bit"\n'
    )
    result = run(path, "--gpus", "8", "--hardware", "h200", "--json")
    (row,) = json.loads(result.stdout)["predictions"]
    assert row["setup"]["tokens_per_gpu"] == 128 and "optimizer (adam8bit)" in row["memory_bytes"]
    other = run(path, "--gpus", "8", "--hardware", "h200", "--json", "--optimizer", "sgd")
    assert json.loads(other.stdout)["predictions"][0]["setup"]["optimizer"] == "sgd"


def test_a_training_run_s_settings_are_those_that_are_predicted(tmp_path):
    path = tmp_path / "run.toml"
    head = '[model]\nmodel = "nano"\n[data]\nseq_len = 64\nbatch = 16\n'
    path.write_text(
        f'{head}[optimizer]\noffload_optimizer = true\n[sharding]\nsharding = "fsdp2"\n'
        'internode_dtype = "fp32"\n'
    )
    rows = json.loads(run(path, "--gpus", "8", "--hardware", "h200", "--json").stdout)["predictions"]
    assert [row["setup"]["sharding"] for row in rows] == ["ragged", "fsdp2"]
    assert all(row["setup"]["offload_optimizer"] for row in rows)
    assert rows[0]["setup"]["internode_dtype"] == "fp32"
    for line in ('sharding = "ddp"', 'precision = "fp32"', "fp8 = true", 'ep = 2\ndispatch = "two_level"'):
        path.write_text(f"{head}[sharding]\n{line}\n")
        result = run(path, "--gpus", "8", "--hardware", "h200")
        assert result.exit_code == 2 and "is not modelled; expected" in " ".join(result.output.split())
    path.write_text(f"{head}[sharding]\nranks_per_node = 4\ngranularity = {{'*' = 'rows:2'}}\n")
    result = run(path, "--gpus", "8", "--hardware", "h200")
    assert result.exit_code == 0 and "without granularity and ranks_per_node; nodes are" in result.stderr


def test_a_table_of_nccl_tests_replaces_the_rate(tmp_path):
    path = tmp_path / "all_gather.txt"
    path.write_text(
        "#       size         count      type   redop    root     time   algbw   busbw #wrong\n"
        "     1048576         16384     float    none      -1    120.0    8.74    8.60      0\n"
        "  1073741824      16777216     float    none      -1   2900.0  370.26  364.48      0\n"
    )
    assert read_nccl_table(path) == ((1048576.0, 8.6), (1073741824.0, 364.48))
    wires = Wires(PROFILES["h200-400g"], 64, ring_table=read_nccl_table(path))
    assert wires.ring("all_gather", 1 << 30).outside == pytest.approx((1 << 30) * 63 / 64 / 364.48e9)
    exchange = "all_to_all", 1 << 30  # of which every card carries a GPU's own bytes, not a node's eighth
    assert wires.ring(*exchange) == Wires(PROFILES["h200-400g"], 64).ring(*exchange)
    one_node = replace(wires, shard=8).ring("all_gather", 1 << 30)
    assert one_node == pytest.approx(((1 << 30) * 7 / 8 / 364.48e9, 0.0))
    path.write_text("nothing")
    with pytest.raises(ValueError, match="no lines of nccl-tests"):
        read_nccl_table(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nan", "--gpus", "8", "--tokens-per-gpu", "64", "--hardware", "h200"], "did you mean 'nano'?"),
        (["nano", "--gpus", "8", "--tokens-per-gpu", "64"], "--hardware is missing"),
        (["nano", "--gpus", "8", "--tokens-per-gpu", "64", "--hardware", "h10"], "did you mean 'h100'?"),
        ([*NANO, "--gpus", "8", "--tokens-per-gpu", "64", "--network", "h200"], "did you mean 'h200-400g'?"),
        ([*NANO, "--gpus", "8"], "give one of --tokens-per-gpu and --batch-tokens"),
        ([*NANO, "--gpus", "x", "--tokens-per-gpu", "64"], "expected numbers or FROM..TO"),
        ([*NANO, "--gpus", "8", "--tokens-per-gpu", "65"], "expected whole sequences of 64 tokens"),
        ([*NANO, "--gpus", "8", "--tokens-per-gpu", "64", "--optimizer", "adam"], "did you mean 'adamw'?"),
        ([*NANO, "--gpus", "8", "--tokens-per-gpu", "64", "--replicas", "3"], "divisor of 8 GPUs"),
        ([*NANO, "--gpus", "8,16", "--tokens-per-gpu", "64", "--search"], "one number of GPUs"),
        ([*NANO, "--gpus", "8", "--tokens-per-gpu", "64", "--memory", "0"], "not in the range x>0"),
        ([*NANO, "--gpus", "8", "--tokens-per-gpu", "64", "--nccl-table", "no"], "'--nccl-table': File 'no'"),
        ([*NANO, "--gpus", "8", "--tokens-per-gpu", "64", "--timeline", "a.png"], "suffix must be .svg"),
        (
            [*NANO, "--gpus", "8", "--tokens-per-gpu", "64", "--search", "--plot", "a.svg"],
            "--plot shows what --search does not",
        ),
        (
            [*NANO, "--gpus", "8", "--tokens-per-gpu", "64", "--search", "--fsdp2"],
            "--search is of ours: leave --fsdp2",
        ),
        (
            [*NANO, "--gpus", "8", "--tokens-per-gpu", "64", "--search", "--replicas", "2"],
            "--replicas is among what --search looks for",
        ),
        ([*NANO, "--gpus", "8", "--tokens-per-gpu", "64", "--allow-codes"], "--allow-codes is for --search"),
        (
            ["llama-3-8b", "--hardware", "h100", "--gpus", "8", "--tokens-per-gpu", "4096", "--ep", "8"],
            "'llama-3-8b' has no experts",
        ),
        (
            [*NANO, "--gpus", "8", "--tokens-per-gpu", "64", "--reduction", "two_levels"],
            "did you mean 'two_level'?",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_the_committed_card_knows_the_layers_of_published_models():
    card = find_card("h200")
    assert card.measured and {layer.model for layer in card.layers} >= {
        "llama-3-70b",
        "gpt-oss-120b",
        "deepseek-v3",
    }
    setup = Setup(gpus=64, tokens_per_gpu=8192)
    found = predict(workload_of("llama-3-70b"), setup, card, PROFILES["h200-400g"])
    assert found.measured and 0.3 < found.mfu < 0.6


def test_experts_that_are_shared_are_gathered_by_fewer_and_send_tokens():
    workload = workload_of("nano")
    network = Network("n", 10.0, 1.0, 8, 1.9, 4.0)
    setup = Setup(gpus=16, tokens_per_gpu=256, seq_len=64)
    plain, shared = (predict(workload, replace(setup, ep=ep), CARD, network) for ep in (1, 4))
    labels = {span.label for span in shared.replayed.spans}
    assert any(label.startswith("tokens of layer 0") for label in labels)
    assert any(label.startswith("gather experts of layer 0") for label in labels)
    gathered = [p.replayed.peak["gathered"] for p in (plain, shared)]
    assert gathered[1] < gathered[0]
    assert shared.compute_s < plain.compute_s  # a rank reads fewer weights and collects fewer gradients
    with pytest.raises(ValueError, match="4 experts, which 8 ranks cannot share evenly"):
        predict(workload, replace(setup, ep=8), CARD, network)


def test_experts_across_nodes_gather_inside_and_send_tokens_outside():
    """16 GPUs on two nodes, two of them to a group: neighbours, or one of each node."""
    workload, network = workload_of("nano"), Network("n", 10.0, 1.0, 8, 1.9, 4.0)
    setup = Setup(gpus=16, tokens_per_gpu=256, seq_len=64, ep=2)
    lanes = []
    for across in (False, True):
        found = predict(workload, replace(setup, ep_across_nodes=across), CARD, network)
        spans = [(span.label, span.lane) for span in found.replayed.spans]
        lanes.append(
            {
                what: {lane for label, lane in spans if label.startswith(what)} & {"inside", "outside"}
                for what in ("tokens of layer 0", "gather experts of layer 0", "gather layer 0")
            }
        )
    both = {"inside", "outside"}
    assert [list(found.values()) for found in lanes] == [
        [{"inside"}, both, both],
        [{"outside"}, {"inside"}, both],
    ]
    with pytest.raises(ValueError, match="ep_across_nodes: needs ep"):
        replace(setup, ep=1, ep_across_nodes=True)


def test_the_search_tries_experts_across_nodes():
    """Large experts and few tokens: their weights are better gathered inside a node."""
    sizes = {"hidden": "64", "expert_hidden": "4096", "experts": "16"}
    setup = Setup(gpus=16, tokens_per_gpu=64, seq_len=64)
    found = search(workload_of("nano", sizes), setup, CARD, Network("n", 100.0, 1.0, 8, 1.9, 4.0))
    assert "--ep-across-nodes" in found[0].flags
    one = search(workload_of("nano", sizes), replace(setup, gpus=8), CARD, Network("n", 100.0, 1.0, 8))
    assert not any("--ep-across-nodes" in f.flags for f in one)


LLAMA = {
    "hidden_size": "64",
    "intermediate_size": "128",
    "num_hidden_layers": "2",
    "num_attention_heads": "4",
    "num_key_value_heads": "4",
    "vocab_size": "96",
}


@pytest.mark.parametrize(
    ("name", "changes"), [("nano", {"heads": "4", "kv_heads": "4"}), ("LlamaConfig", LLAMA)]
)
def test_tensor_parallel_ranks_split_what_the_trainer_splits(fake_ranks, name, changes):
    source = find_model(name, changes, random_weights=True)
    model = source.build()
    source.tp.apply(model, init_device_mesh("cpu", (4,)))
    split = {name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
    assert split
    workload = workload_of(name, changes)
    found = set()
    for kind in workload.kinds:
        for part in parts_of(workload, kind, ReplicaRanks(4, tp=4))[1:]:
            found |= {parameter for parameter, _ in part.shapes}
    inside = {re.sub(r"^.*layers\.\d+\.", "", parameter) for parameter in split}
    assert found == inside


def test_tensor_parallelism_shares_tokens_and_waits_for_sums():
    workload = workload_of("LlamaConfig", LLAMA)
    network = Network("n", 10.0, 1.0, 8, 1.9, 4.0)
    setup = Setup(gpus=16, tokens_per_gpu=64, seq_len=64)
    plain, split = (predict(workload, replace(setup, tp=tp), CARD, network) for tp in (1, 2))
    sums = [s for s in split.replayed.spans if s.label.startswith("tokens of") and s.lane == "inside"]
    assert len(sums) == 2 * (len(workload.order) + 1) and not any(
        "tokens" in s.label for s in plain.replayed.spans
    )
    shared = predict(workload, replace(setup, tokens_per_gpu=32, tp=2), CARD, network)
    assert shared.tokens_per_second > 0  # a sequence of two GPUs
    assert shared.memory["gathered"] < plain.memory["gathered"]
    with pytest.raises(ValueError, match="tp = 8 does not divide the model's num_attention_heads = 4"):
        predict(workload, replace(setup, tp=8), CARD, network)
    with pytest.raises(ValueError, match="not modelled beside ep"):
        replace(setup, tp=2, ep=2)


def test_muon_by_hand():
    """One matrix on one GPU: five iterations; then eight equal ones, one for each of eight GPUs."""
    square = LayerPart("layer", (("mlp.weight", (4096, 4096)), ("norm.weight", (4096,))), 1, 1, 1)
    alone = muon([(square, 1)], 1, 1, CARD, PROFILES["free"])
    naive_s = 5 * 6 * 4096**3 / (CARD.matmul_tflops * 1e12)
    moved_s = 26 * 4096**2 / (CARD.memory_gb_s * 1e9) + 28 * 4096 / (CARD.adamw_gb_s * 1e9)
    assert alone.seconds == pytest.approx(0.7 * naive_s + moved_s)
    assert alone.state_bytes == 4 * 4096**2 + 8 * 4096
    eighth = replace(square, ranks=8)
    assert muon([(eighth, 8)], 8, 8, CARD, PROFILES["free"]).seconds == pytest.approx(alone.seconds, rel=1e-3)
    few = muon([(eighth, 1)], 8, 8, CARD, PROFILES["free"]).seconds
    assert few > 0.7 * naive_s  # a matrix has one root, however many ranks there are
    slow = muon([(eighth, 8)], 8, 8, CARD, Network("slow", 1.0))
    assert slow.seconds > alone.seconds + 2 * 2 * 4096**2 / 1e9 * 0.9


def test_offloaded_state_is_not_on_the_device_and_comes_over_the_bus():
    workload = workload_of("nano")
    setup = Setup(gpus=8, tokens_per_gpu=64, seq_len=64, host=Host())
    here, there = (
        predict(workload, replace(setup, offload=way), CARD, PROFILES["flat"]) for way in (False, True)
    )
    assert there.memory["weights"] == there.memory["optimizer (adamw)"] == 0 < here.memory["weights"]
    casts = [
        sum(s.end - s.start for s in p.replayed.spans if s.label.startswith("cast")) for p in (here, there)
    ]
    assert casts[1] > casts[0] and there.seconds.value > here.seconds.value
    with pytest.raises(ValueError, match="not modelled with optimizer = muon"):
        replace(setup, offload=True, optimizer="muon")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_optimizer_whose_state_alone_is_on_the_host(optimizer):
    workload = workload_of("nano")
    setup = Setup(gpus=8, tokens_per_gpu=64, seq_len=64, optimizer=optimizer, host=Host())
    here, there = (
        predict(workload, replace(setup, offload_optimizer=way), CARD, PROFILES["flat"])
        for way in (False, True)
    )
    state = f"optimizer ({optimizer})"
    assert there.memory[state] == 0 < here.memory[state]
    assert there.memory["weights"] == here.memory["weights"]
    longer_s = there.seconds.value - here.seconds.value
    assert 0 < longer_s <= 2.01 * here.memory[state] / (CARD.host_gb_s * 1e9)
    with pytest.raises(ValueError, match="on the host already"):
        replace(setup, optimizer="adamw", offload=True, offload_optimizer=True)


@pytest.mark.parametrize("command", documented_commands())
def test_documented_commands_run(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output


def test_gpus_in_words():
    assert parse_gpus("8..100") == [8, 16, 32, 64, 100] and parse_gpus("4, 2") == [2, 4]


def test_calibrate_says_that_it_needs_a_gpu(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = CliRunner().invoke(main, ["calibrate", "nano", "--out", str(tmp_path / "c.json")])
    assert result.exit_code == 2 and "needs a CUDA device" in result.output
    bad = CliRunner().invoke(main, ["calibrate", "nano", "--out", str(tmp_path / "c.txt")])
    assert bad.exit_code == 2 and "a card is a .json file" in bad.output
    assert all(device.tflops > 0 for device in DEVICES.values())
