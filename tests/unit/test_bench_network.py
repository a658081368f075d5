"""The benchmark's network: what collectives cost on nodes of several ranks, seen from their groups."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.step.case import Case  # noqa: E402
from benchmarks.step.wire import Copy, Wire, join  # noqa: E402

from ragged_fsdp.predict.network import (  # noqa: E402
    PROFILES,
    Network,
    Place,
    Seconds,
    Traffic,
    exchange_price,
    network_of,
    price,
)

H200 = PROFILES["h200-400g"]
NO_LATENCY = replace(H200, inside_step_us=0.0, outside_step_us=0.0)
GB = 1e9
WORLD, NODE, RAIL = range(64), range(8, 16), range(3, 64, 8)


def seconds(kind, nbytes, group, rank, network=NO_LATENCY):
    return tuple(price(kind, nbytes, Place.of(group, rank, network), network))


@pytest.mark.parametrize(
    ("kind", "group", "rank", "inside_gb", "card_gb"),
    [
        # 32 GB over 8 nodes of 8: each node receives 28 of them, over eight cards
        ("all_gather", WORLD, 11, 31.5, 3.5),
        ("reduce_scatter", WORLD, 11, 31.5, 3.5),
        ("all_reduce", WORLD, 11, 63.0, 7.0),
        ("all_to_all", WORLD, 11, 3.5, 28.0),  # the same bytes, but over one card: eight times as long
        ("broadcast", WORLD, 11, 32.0, 4.0),
        ("reduce", WORLD, 11, 32.0, 4.0),
        # inside a node nothing leaves it
        ("all_gather", NODE, 11, 28.0, 0.0),
        ("all_to_all", NODE, 11, 28.0, 0.0),
        ("broadcast", NODE, 11, 32.0, 0.0),
        # one rank of each node: only its own card
        ("all_gather", RAIL, 11, 0.0, 28.0),
        ("all_reduce", RAIL, 11, 0.0, 56.0),
        ("all_to_all", RAIL, 11, 0.0, 28.0),
        ("broadcast", RAIL, 11, 0.0, 32.0),
        # half a node each (tensor parallel ranks left out): four cards
        ("all_gather", [0, 2, 4, 6, 8, 10, 12, 14], 8, 28.0, 4.0),
        # cut unevenly, three ranks of a node and one of the next: the one card is the narrowest place
        ("all_gather", [0, 1, 2, 8], 1, 24.0, 24.0),
        ("all_gather", [0, 1, 2, 8], 8, 0.0, 24.0),
        ("reduce_scatter", [6, 7, 8, 9, 10], 9, 25.6, 9.6),
        ("all_to_all", [6, 7, 8, 9, 10], 9, 12.8, 12.8),
        ("all_to_all", [6, 7, 8, 9, 10], 6, 6.4, 19.2),
        # not in the order of nodes
        ("all_gather", [9, 0, 8, 1], 8, 24.0, 8.0),
        ("all_gather", [5], 5, 0.0, 0.0),
        ("barrier", WORLD, 0, 0.0, 0.0),
    ],
)
def test_bytes_by_level(kind, group, rank, inside_gb, card_gb):
    nbytes = 0 if kind == "barrier" else 32 * GB
    assert seconds(kind, nbytes, group, rank) == pytest.approx((inside_gb / 400, card_gb / 45))


def test_steps_of_rings_and_trees():
    us = 1e-6
    ring_inside, ring_outside = 56 * 1.9 * us, 7 * 4.0 * us
    assert seconds("all_gather", 0, WORLD, 0, H200) == pytest.approx(
        (ring_inside, ring_inside + ring_outside)
    )
    assert seconds("all_gather", 0, NODE, 8, H200) == pytest.approx((7 * 1.9 * us, 0))
    assert seconds("all_gather", 0, RAIL, 3, H200) == pytest.approx((0, 7 * 4.0 * us))
    tree_inside, tree_outside = 2 * 7 * 1.9 * us, 2 * 3 * 4.0 * us  # 8 nodes: three steps up, three down
    for kind in ("all_reduce", "barrier"):
        assert seconds(kind, 0, WORLD, 0, H200) == pytest.approx((tree_inside, tree_inside + tree_outside))
        assert seconds(kind, 0, [0, 8], 0, H200) == pytest.approx((0, 2 * 4.0 * us))
    assert seconds("all_to_all", 64, WORLD, 0, H200) == pytest.approx((1.9 * us, 4.0 * us), rel=1e-3)


def test_bytes_of_pairs():
    place = Place.of([0, 1, 8, 9], 1, NO_LATENCY)
    traffic = place.traffic([10, 999, 20, 30], [1, 999, 2, 300])
    assert traffic == Traffic(10, 1, 50, 302)
    assert tuple(exchange_price(traffic, NO_LATENCY)) == pytest.approx((10 / 400e9, 302 / 45e9))
    assert place.one_way(0, 7, sent=True) == Traffic(to_inside=7)
    assert place.one_way(3, 7, sent=False) == Traffic(from_outside=7)
    assert place.one_way(1, 7, sent=True) == Traffic()


def test_a_flat_network_charges_every_byte():
    flat = network_of(200.0)
    for group in (WORLD, RAIL):
        assert seconds("all_gather", 32 * GB, group, 11, flat) == pytest.approx((32 / 200, 0))
        assert seconds("all_reduce", 32 * GB, group, 11, flat) == pytest.approx((64 / 200, 0))
    assert Place.of([0, 1], 0, flat).traffic([3, 4], [5, 6]) == Traffic(7, 11, 0, 0)
    assert seconds("all_gather", 32 * GB, WORLD, 11, network_of(None)) == (0, 0)


def test_profiles_are_named_and_explained():
    assert set(PROFILES) == {"h200-400g", "paper", "nvl72", "b200-400g", "a100-200g", "flat", "free"}
    assert "8, 400 GB/s inside, 45 GB/s cards" in H200.text and network_of("free").free
    assert network_of(400.0).text == PROFILES["flat"].text == "one NVLink domain of 400 GB/s"
    one_domain = seconds("all_gather", 72 * GB, range(72), 0, PROFILES["nvl72"])
    assert one_domain == pytest.approx((71 / 800 + 71 * 1.9e-6, 0))
    with pytest.raises(ValueError, match="expected one of h200-400g"):
        network_of("token-ring")
    with pytest.raises(ValueError, match="expected one of"):
        Case("tiny-moe", 2, 64, 8, wires=("token-ring",))
    with pytest.raises(ValueError, match="ranks_per_node"):
        Network("none", 1.0, 1.0, 0)
    with pytest.raises(ValueError, match="kind"):
        price("all_together", 1, Place.of(WORLD, 0, H200), H200)


def test_the_bound_is_that_of_rings_on_the_slower_level():
    case = Case("gpt-oss-120b", 8, 8192, 64, ("h200-400g",))
    gib = case.bound_wire_gib * 2**30
    assert case.wire_ms("h200-400g") == pytest.approx(gib * 63 / 64 / 400e6)  # beats 56/64 / (8 x 45)
    assert case.wire_ms("paper") == pytest.approx(gib * 56 / 64 / (8 * 18e6))
    assert case.wire_ms(400.0) == pytest.approx(gib / 400e6)
    found = case.to_json()["networks"]["h200-400g"]
    assert (found["ranks_per_node"], found["card_gb_s"]) == (8, 45.0)


@pytest.fixture
def rank_of():
    """Join a network without latency as one of several ranks; leave it afterwards."""

    def make(ranks: int, rank: int = 0) -> Wire:
        wire = Wire(NO_LATENCY)
        join(ranks, wire, rank)
        return wire

    yield make
    dist.destroy_process_group()


def held(wire: Wire, kind: str) -> tuple[float, float]:
    return wire.held_s[kind, "inside"], wire.held_s[kind, "outside"]


def gathered(wire: Wire, mesh) -> tuple[float, float]:
    """Seconds of a gather over a 1-D mesh."""
    wire.reset_counts()
    part = torch.ones(64)
    dist.all_gather_into_tensor(torch.empty(64 * mesh.size()), part, group=mesh.get_group())
    return held(wire, "all_gather")


def test_groups_of_meshes_know_their_nodes(rank_of):
    wire = rank_of(64, rank=11)
    full = 64 * 64 * 4
    levels = init_device_mesh("cpu", (8, 8), mesh_dim_names=("node", "local"))
    assert levels["node"].get_group().place == Place.of(range(3, 64, 8), 11, NO_LATENCY)
    assert gathered(wire, levels["node"]) == pytest.approx((0, full / 8 * 7 / 8 / 45e9))
    assert gathered(wire, levels["local"]) == pytest.approx((full / 8 * 7 / 8 / 400e9, 0))
    assert gathered(wire, levels._flatten("all")) == pytest.approx(
        (full * 63 / 64 / 400e9, full * 56 / 64 / 8 / 45e9)
    )
    hybrid = init_device_mesh("cpu", (2, 32), mesh_dim_names=("replicate", "shard"))
    replicas, shards = hybrid["replicate"].get_group(), hybrid["shard"].get_group()
    assert (replicas.place.nodes, replicas.place.here) == (2, 1)
    assert (shards.place.ranks, shards.place.nodes, shards.place.fewest) == (32, 4, 8)
    cut = init_device_mesh("cpu", (4, 2, 8), mesh_dim_names=("pipe", "data", "tensor"))
    pair = cut["pipe", "data"]._flatten("pipe_data")
    assert pair.get_group().place.outside == tuple(rank // 8 != 1 for rank in range(3, 64, 8))
    uneven = dist.new_group([6, 7, 11], use_local_synchronization=True)
    assert (uneven.place.nodes, uneven.place.fewest, uneven.place.here, uneven.place.own) == (2, 1, 1, 2)


def test_a_group_sees_the_network_that_the_wire_has_now(rank_of):
    wire = rank_of(64)
    world = dist.group.WORLD
    assert world.place.nodes == 8
    wire.network = PROFILES["nvl72"]
    assert world.place.nodes == 1


def test_batched_calls_share_the_wire(rank_of):
    wire = rank_of(16, rank=1)
    out, into = torch.arange(8.0), torch.empty(8)
    small = torch.empty(2)
    batch = [
        dist.P2POp(dist.irecv, small, 12),
        dist.P2POp(dist.isend, out, 9),
        dist.P2POp(dist.irecv, into, 9),
        dist.P2POp(dist.isend, out, 0),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert held(wire, "point_to_point") == pytest.approx((32 / 400e9, 40 / 45e9))
    assert wire.moved_bytes["point_to_point"] == 64  # sent; 40 were received meanwhile
    assert into.tolist() == out.tolist() and small.tolist() == [0, 0]
    wire.reset_counts()
    dist.send(out, 9)
    dist.recv(into, 9)  # one after the other
    assert held(wire, "point_to_point") == pytest.approx((0, 64 / 45e9))
    assert wire._sent is None, "a tensor that was sent must not live on in the wire"


def test_coalesced_calls_are_one_work(rank_of):
    from torch.distributed.distributed_c10d import _coalescing_manager

    wire = rank_of(16)
    device = torch.device("cpu")
    parts = [torch.ones(2), torch.ones(4)]
    outputs = [torch.empty(32), torch.empty(64)]
    with _coalescing_manager(device=device, async_ops=True) as manager:
        for output, part in zip(outputs, parts):
            dist.all_gather_into_tensor(output, part)
    manager.wait()
    assert wire.calls == {"all_gather": 1} and all(bool((output == 1).all()) for output in outputs)
    with _coalescing_manager(device=device, async_ops=True) as manager:
        dist.isend(parts[0], 9)
        dist.irecv(outputs[0], 9)
    manager.wait()
    assert held(wire, "point_to_point") == pytest.approx((0, 128 / 45e9))


def test_collectives_with_a_root_and_of_uneven_rows(rank_of):
    wire = rank_of(16, rank=1)
    part, parts = torch.ones(4), [torch.zeros(4) for _ in range(16)]
    dist.gather(part, parts, dst=1)
    assert held(wire, "gather") == pytest.approx((7 * 16 / 400e9, 8 * 16 / 45e9)) and bool(parts[15].all())
    dist.scatter(part, parts, src=1)
    assert held(wire, "scatter") == pytest.approx((7 * 16 / 400e9, 8 * 16 / 45e9))
    wire.reset_counts()
    dist.gather(part, None, dst=9)
    dist.scatter(part, None, src=0)
    assert held(wire, "gather") == pytest.approx((0, 16 / 45e9))
    assert held(wire, "scatter") == pytest.approx((16 / 400e9, 0))
    rows = [0] * 16
    rows[0], rows[1], rows[9], rows[12] = 1, 5, 2, 3
    source, output = torch.ones(11, 4), torch.empty(6, 4)
    received = [0] * 16
    received[1], received[8] = 5, 1
    dist.all_to_all_single(output, source, received, rows)
    assert held(wire, "all_to_all") == pytest.approx((16 / 400e9, 5 * 16 / 45e9))
    dist.broadcast(part, src=0)
    dist.reduce(part, dst=0)
    assert held(wire, "broadcast") == held(wire, "reduce") == pytest.approx((16 / 400e9, 16 / 8 / 45e9))


@pytest.mark.parametrize("package", ["torch.distributed.fsdp", "ragged_fsdp"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_a_training_step_is_priced_by_where_its_groups_lie(rank_of, package, hybrid):
    fully_shard = __import__(package, fromlist=["fully_shard"]).fully_shard
    wire = rank_of(32, rank=5)
    mesh = init_device_mesh(
        "cpu", (2, 16) if hybrid else (32,), mesh_dim_names=("replicate", "shard") if hybrid else ("shard",)
    )
    model = torch.nn.Linear(64, 64, bias=False)
    fully_shard(model, mesh=mesh)
    wire.reset_counts()
    model(torch.ones(2, 64)).sum().backward()
    ranks = 16 if hybrid else 32
    nbytes = 64 * 64 * 4
    ring = nbytes * (1 - 1 / ranks) / 400e9, nbytes * (1 - 8 / ranks) / 8 / 45e9
    assert held(wire, "all_gather") == pytest.approx(ring)
    assert held(wire, "reduce_scatter") == pytest.approx(ring)
    across = (0, nbytes / 16 / 45e9) if hybrid else (0, 0)  # two ranks, a card each: 2 B (1 - 1/2)
    assert held(wire, "all_reduce") == pytest.approx(across)


class _Stream:
    """Notes what is launched on it, as a device's stream would run it."""

    current = None
    device_index = 0

    def __init__(self, *_, **__):
        self.work = []

    def __enter__(self):
        self.outer, _Stream.current = _Stream.current, self

    def __exit__(self, *_):
        _Stream.current = self.outer

    def wait_stream(self, other):
        self.work.append("wait" if other is not self else "deadlock")

    def record_event(self):
        return self


@pytest.fixture
def device(monkeypatch):
    """Streams that note their work; collectives of any tensor run on them."""
    caller = _Stream.current = _Stream()
    launched = SimpleNamespace(
        spin_ns=lambda ns: _Stream.current.work.append(ns),
        stamp=lambda slot: _Stream.current.work.append(f"stamp {slot}"),
        hold_since=lambda slot, ns: _Stream.current.work.append((slot, ns)),
    )
    monkeypatch.setitem(sys.modules, "benchmarks.step.spin", launched)
    monkeypatch.setattr(torch, "Stream", _Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _=None: caller)


def test_each_level_is_held_for_its_own_time(device):
    wire = Wire(NO_LATENCY, delivery="memcpy")
    place = Place.of(WORLD, 0, NO_LATENCY)
    both = price("all_gather", 64 * 45_000, place, NO_LATENCY)  # 7.0875 us inside, 7 us on the card
    target = torch.zeros(8)
    events = wire.carry("all_gather", [Copy(target, torch.ones(1), 8)], both)
    inside, outside = wire.stream(0), wire.stream(1)
    assert events == [inside, outside] and bool(target.all())
    assert inside.work == ["wait", "stamp 0", (0, 7088)]  # copies on the level that is held longer
    assert outside.work == ["wait", 7000]
    rail = price("all_gather", 45_000, Place.of(RAIL, 3, NO_LATENCY), NO_LATENCY)
    assert wire.carry("all_gather", [], rail) == [outside] and outside.work[2:] == ["wait", 875]
    node = price("all_gather", 400_000, Place.of(NODE, 8, NO_LATENCY), NO_LATENCY)
    assert wire.carry("all_gather", [], node) == [inside] and inside.work[3:] == ["wait", 875]
    nothing = Seconds(0.0, 0.0)
    assert wire.carry("point_to_point", [], nothing, level=1) == [outside], "it comes with those before it"
    assert Wire().carry("all_gather", [], nothing) != [] and not outside.work[5:]
