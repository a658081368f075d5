"""Gradients that are reduced inside nodes and then between them, on ranks that pretend to have nodes."""

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_fsdp_exchange import Net
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import fsdp_inside
from collective_calls import noted
from fsdp_cases import Stack, build, fully_shard, logged, placed_on, ragged_only, rows, shard_blocks
from ragged_fsdp import BlockCodes, CPUOffloadPolicy, MixedPrecisionPolicy, Whole, collectives
from ragged_fsdp.collectives import Comm, LevelComm
from ragged_fsdp.topology import LevelGroups, find_levels, level_groups, subgroup
from rank_pool import DEVICE, Rank, spmd

pytestmark = ragged_only
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KINDS = {
    "fp32": ({}, torch.float32),
    "bf16": ({"mp_policy": BF16}, torch.bfloat16),
    "fp32 between": ({"mp_policy": BF16, "internode_dtype": torch.float32}, torch.float32),
}


@contextmanager
def on_host(rank: Rank, hosts: str) -> Iterator[None]:
    """This rank is on the host that the letter at its place names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_HOSTID", hosts[rank.rank])
        yield


def _plain_gradients(
    rank: Rank, plain: nn.Module, x: torch.Tensor, kind: str
) -> dict[str, list[torch.Tensor]]:
    """What every rank's autograd produces, by rank."""
    if kind != "fp32":
        plain.bfloat16()
        x = x.bfloat16()
    plain(x).float().sum().backward()
    found = {}
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            found[name] = [torch.empty_like(parameter.grad) for _ in range(rank.world_size)]
            dist.all_gather(found[name], parameter.grad)
    return found


def _by_levels(
    grads: list[torch.Tensor], nodes: Sequence[Sequence[int]], between: torch.dtype
) -> torch.Tensor:
    """The mean, added in fp32 in every node, rounded once, and added in fp32 between them."""
    sums = [torch.stack([grads[rank] for rank in node]).sum(0, dtype=torch.float32) for node in nodes]
    rounded = torch.stack([total.to(between) for total in sums])
    return rounded.sum(0, dtype=torch.float32) / len(grads)


def _check(rank: Rank, nodes: Sequence[Sequence[int]], kind: str, **options: object) -> nn.Module:
    """Compare the gradients of a step with sums by nodes, bit for bit; the model that made it."""
    more, between = KINDS[kind]
    net, plain = build(lambda: Net(5), rank.device)
    fully_shard(net, **{"mesh": rank.mesh(), "reduction": "two_level", **more, **options})
    x = rows(rank, 0, dim=7)
    net(x).float().sum().backward()
    for name, grads in _plain_gradients(rank, plain, x, kind).items():
        got = net.get_parameter(name).grad.full_tensor()
        assert torch.equal(got, _by_levels(grads, nodes, between)), name
    return net


@spmd(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("views", [False, True])
def test_sums_are_rounded_once_between_nodes(rank: Rank, views: bool, kind: str) -> None:
    """Bit for bit: what leaves a node is one sum in the dtype that was asked for; nothing else is lost."""
    with pytest.MonkeyPatch.context() as patch:
        if views:
            fsdp_inside.exchange_in_rounds(patch, rounds=3)
        _check(rank, ((0, 1), (2, 3)), kind, ranks_per_node=2)


@spmd(4)
@pytest.mark.parametrize(
    ("hosts", "nodes"), [("aabb", ((0, 1), (2, 3))), ("abab", ((0, 2), (1, 3))), ("abba", ((0, 3), (1, 2)))]
)
def test_ranks_find_their_nodes(rank: Rank, hosts: str, nodes: tuple) -> None:
    """However the ranks lie on the hosts, also where a rail does not count its ranks as the nodes do."""
    mesh = _new_mesh(rank)
    for views in (False, True):
        with pytest.MonkeyPatch.context() as patch, on_host(rank, hosts):
            if views:
                fsdp_inside.exchange_in_rounds(patch, rounds=3)
            _check(rank, nodes, "bf16", mesh=mesh)


@spmd(6, timeout=170)
def test_nodes_of_different_size(rank: Rank) -> None:
    """Four ranks and two are three nodes of two; five and one have no common part."""
    mesh = _new_mesh(rank)
    # packed; views, a rail's messages one by one or together
    for rounds, rail_calls in ((0, 0), (3, 8), (1, 1), (3, 1)):
        with pytest.MonkeyPatch.context() as patch, on_host(rank, "aaaabb"):
            if rounds:
                fsdp_inside.exchange_in_rounds(patch, rounds, rail_calls)
            _check(rank, ((0, 1), (2, 3), (4, 5)), "bf16", mesh=mesh)
    with on_host(rank, "aaaaab"):
        mesh = _new_mesh(rank)
        net, _ = build(lambda: Net(5), rank.device)
        with pytest.raises(ValueError, match="6 ranks on nodes of up to 5, as 6 parts of 1"):
            fully_shard(net, mesh=mesh, reduction="two_level")
        assert not any(isinstance(p, DTensor) for p in net.parameters()), "nothing may have changed"
        _train(fully_shard(net, mesh=mesh, reduction="auto", mp_policy=BF16), rank)


@spmd(4)
@pytest.mark.parametrize("hosts", ["aaaa", "abcd"])
def test_one_node_and_one_rank_per_node_are_one_exchange(rank: Rank, hosts: str) -> None:
    """No level inside or none between: all sums are taken at once, and nothing is rounded on the way."""
    nodes = ((0, 1, 2, 3),)
    with on_host(rank, hosts):
        mesh = _new_mesh(rank)
        for rounds in (0, 3):
            with pytest.MonkeyPatch.context() as patch:
                if rounds:
                    fsdp_inside.exchange_in_rounds(patch, rounds)
                _check(rank, nodes, "fp32 between", mesh=mesh, internode_dtype=None)


@spmd(6, timeout=170)
def test_ranks_that_hold_nothing(rank: Rank) -> None:
    """Five tensors that are never cut, on three nodes of two: a rank, and so a place of a rail, is empty."""
    for rounds in (0, 1, 3):
        with pytest.MonkeyPatch.context() as patch:
            if rounds:
                fsdp_inside.exchange_in_rounds(patch, rounds)
            options = {"ranks_per_node": 2, "orig_param_policy": lambda name, p: Whole()}
            net = _check(rank, ((0, 1), (2, 3), (4, 5)), "bf16", **options)
    held = torch.tensor([sum(p.to_local().numel() for p in net.parameters())], device=rank.device)
    all_held = [torch.empty_like(held) for _ in range(6)]
    dist.all_gather(all_held, held)
    assert 0 in map(int, all_held)


_LAID = {
    "a node per replica": ([[0, 1, 2, 3], [4, 5, 6, 7]], 4, [[0, 1, 2, 3]]),
    "halves of nodes": ([[0, 1, 4, 5], [2, 3, 6, 7]], 4, [[0, 1], [2, 3]]),
    "every other rank": ([[0, 2, 4, 6], [1, 3, 5, 7]], 4, [[0, 1], [2, 3]]),
    "whole nodes": ([[0, 1, 2, 3], [4, 5, 6, 7]], 2, [[0, 1], [2, 3]]),
    "a rank of each node": ([[0, 2, 4, 6], [1, 3, 5, 7]], 2, [[0, 1, 2, 3]]),
}


@spmd(8, timeout=170)
def test_replicas_however_the_mesh_lies_on_the_nodes(rank: Rank) -> None:
    """Bit for bit: means of each replica's sums by levels, then of the two replicas."""
    for name, (ranks, ranks_per_node, nodes) in _LAID.items():
        mesh = DeviceMesh(rank.device, ranks, mesh_dim_names=("replicate", "shard"))
        options = {"reduction": "two_level", "ranks_per_node": ranks_per_node, "mp_policy": BF16}
        between = torch.bfloat16 if len(nodes) > 1 else torch.float32
        for rounds in (0, 3):
            net, plain = build(lambda: Net(5), rank.device)
            with pytest.MonkeyPatch.context() as patch:
                if rounds:
                    fsdp_inside.exchange_in_rounds(patch, rounds)
                fully_shard(net, mesh=mesh, **options)
                x = rows(rank, 0, dim=7)
                net(x).float().sum().backward()
            for parameter, grads in _plain_gradients(rank, plain, x, "bf16").items():
                first, second = (_by_levels([grads[r] for r in own], nodes, between) for own in ranks)
                got = net.get_parameter(parameter).grad.full_tensor()
                assert torch.equal(got, (first + second) / 2), f"{name}: {parameter}"


@spmd(4)
def test_levels_where_all_ranks_are_bound_to_devices(rank: Rank) -> None:
    """After ``init_process_group(device_id=...)``: torch splits groups with a device off that of all ranks,
    with all ranks, so those of levels must have none."""
    world, device = dist.group.WORLD, torch.device("cuda", 0)
    with pytest.MonkeyPatch.context() as patch:
        mesh = _new_mesh(rank)
        patch.setattr(world, "bound_device_id", device)
        _check(rank, ((0, 1), (2, 3)), "bf16", mesh=mesh, ranks_per_node=2)
        assert world.bound_device_id == device, "the user's other groups are made as before"
        net, _ = build(lambda: Net(5), rank.device)
        options = {"reduction": "auto", "gather": "two_level", "ranks_per_node": 2, "mp_policy": BF16}
        with noted() as calls:
            _train(fully_shard(net, mesh=mesh, **options), rank)
        assert {(call.group.size(), call.group.bound_device_id) for call in calls.of("gather")} == {(2, None)}
        assert not calls.of("reduce_scatter")


@spmd(8, timeout=170)
def test_replicas_accumulation_and_groups_that_cut_nodes(rank: Rank) -> None:
    """Eight ranks on nodes of two: replicas of four ranks, and groups of which a node holds one rank each."""
    meshes = {
        "replicas": rank.mesh(2, 4, names=("replicate", "shard")),
        "across": rank.mesh(4, 2, names=("shard", "other"))["shard"],
    }
    for name, mesh in meshes.items():
        found = []
        for reduction in ("reduce_scatter", "two_level"):
            net, _ = build(lambda: Net(5), rank.device)
            fully_shard(net, mesh=mesh, reduction=reduction, ranks_per_node=2)
            for micro in range(3):
                net.set_requires_gradient_sync(micro == 2)
                net(rows(rank, micro, dim=7)).sum().backward()
            found.append([None if p.grad is None else p.grad.to_local() for p in net.parameters()])
        for ours, expected in zip(*reversed(found)):
            assert (ours is None) == (expected is None), name
            if ours is not None:
                torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7, msg=name)


def _new_mesh(rank: Rank) -> DeviceMesh:
    """All ranks, with a process group of its own: levels are found once per group."""
    return DeviceMesh.from_group(dist.new_group(), torch.device(rank.device).type)


def _train(net: nn.Module, rank: Rank, steps: int = 2) -> list[float]:
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in range(steps):
        loss = net(rows(rank, step, dim=7)).float().square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@spmd(4)
def test_one_collective_per_level(rank: Rank) -> None:
    """Half the ranks are asked at a time, and between nodes goes half of what goes inside."""
    net, _ = build(lambda: Net(5), rank.device)
    fully_shard(net, mesh=rank.mesh(), reduction="two_level", ranks_per_node=2, mp_policy=BF16)
    with noted() as calls:
        net(rows(rank, 0, dim=7)).float().sum().backward()
    inside, between = calls.of("all_to_all")
    assert [call.group.size() for call in (inside, between)] == [2, 2]
    assert dist.get_process_group_ranks(inside.group) == [rank.rank // 2 * 2, rank.rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(between.group) == [rank.rank % 2, rank.rank % 2 + 2]
    assert inside.read.nbytes == 2 * between.read.nbytes
    assert not calls.of("reduce_scatter")


@spmd(4)
def test_auto_says_what_it_picked_and_the_flat_exchange_is_warned_about(rank: Rank) -> None:
    with pytest.MonkeyPatch.context() as patch, logged(logging.INFO) as lines:
        fsdp_inside.say_again(patch)
        for reduction, nodes in (("auto", 2), ("auto", 2), ("auto", 4), ("all_to_all", 2), ("all_to_all", 4)):
            net, _ = build(lambda: Net(5), rank.device)
            options = {"reduction": reduction, "ranks_per_node": nodes, "mp_policy": BF16}
            _train(fully_shard(net, mesh=rank.mesh(), **options), rank)
    assert lines == [
        "fully_shard: reduction='auto' is 'two_level' here: 4 ranks on 2 nodes of 2",
        "fully_shard: reduction='auto' is 'all_to_all' here: 4 ranks on one node",
        "fully_shard: reduction='all_to_all' over 4 ranks on 2 nodes of 2: every rank sends its whole "
        "gradients over its own link to other nodes, up to 2 times what two levels send. Use "
        "reduction='two_level' or 'auto'.",
    ]


@spmd(4)
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"ranks_per_node": 0}, "ranks_per_node must be an int >= 1, got 0"),
        ({"internode_dtype": torch.float16}, "internode_dtype must be one of"),
        ({"ranks_per_node": None}, "node_size=2', rank 3 has 'node_size=None"),
    ],
)
def test_wrong_levels_are_named_on_every_rank(rank: Rank, options: dict, error: str) -> None:
    """Also where only one rank has them: the others are told, and nothing is changed."""
    given = {"reduction": "two_level", "ranks_per_node": 2} | (options if rank.rank == 3 else {})
    net, _ = build(lambda: Net(5), rank.device)
    with pytest.raises((ValueError, RuntimeError), match=error):
        fully_shard(net, mesh=rank.mesh(), **given)
    assert not any(isinstance(p, DTensor) for p in net.parameters())


@spmd(4)
def test_offload_and_poisoned_memory(rank: Rank) -> None:
    """Memory that is read before it is written, or after it was given back, would be NaN."""
    losses = []
    for reduction, rounds in (("reduce_scatter", 0), ("two_level", 0), ("two_level", 3)):
        for offload in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("RAGGED_FSDP_DEBUG", "1")
                if rounds:
                    fsdp_inside.exchange_in_rounds(patch, rounds)
                net, _ = build(lambda: Net(5), rank.device)
                options = {"reduction": reduction, "ranks_per_node": 2, **offload}
                losses.append(_train(fully_shard(net, mesh=rank.mesh(), **options), rank, steps=3))
    for other in losses[1:]:
        torch.testing.assert_close(torch.tensor(other), torch.tensor(losses[0]), rtol=1e-5, atol=1e-6)


_CODES = {"gather_policy": lambda name, p: BlockCodes("int8", (4, 4)) if name == "up.weight" else None}
GATHERED = {
    "plain": {},
    "bf16": {"mp_policy": BF16},
    "codes": _CODES,
    "chunks": {"shard_placement_fn": lambda p: Shard(0)},
    "kept in the node": {"reshard_after_forward": 2},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@spmd(4)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("case", GATHERED)
def test_a_gather_in_two_levels_brings_the_same_bits(rank: Rank, case: str, asynchronous: bool) -> None:
    found = []
    for gather in ("flat", "two_level"):
        model, _ = build(lambda: Stack(layers=3), rank.device)
        shard_blocks(model, mesh=rank.mesh(), gather=gather, ranks_per_node=2, **GATHERED[case])
        for module in (model, *model.layers):
            module._set_unshard_async_op(asynchronous)
        with noted() as calls:
            losses = [model(rows(rank, step)).float().square().mean() for step in range(2)]
            losses[-1].backward()
        found.append([*losses, *[p.grad.to_local() for p in model.parameters()]])
    for ours, expected in zip(*reversed(found)):
        assert torch.equal(ours, expected)
    sizes = {call.group.size() for call in calls.of("gather")}
    assert sizes == {2}, "no gather of the second model may ask all ranks at once"


@pytest.mark.parametrize("joins", [False, True] if DEVICE == "cpu" else [True])
@spmd(6, timeout=170)
def test_a_gather_over_three_nodes(rank: Rank, joins: bool) -> None:
    """Slots that come from nodes before and behind, also in steps of more than one node."""
    group = rank.mesh().get_group()
    with pytest.MonkeyPatch.context() as patch:
        launched = fsdp_inside.join_gathers(patch) if joins and rank.device == "cpu" else []
        levels = LevelComm(_over(rank, ranks_per_node=2), torch.device(rank.device))
        for dtype in (torch.float32, torch.uint8, torch.float8_e4m3fn):
            for steps in (1, 2, 8):
                patch.setattr(collectives, "_GATHER_STEPS", steps)
                results = []
                for comm in (Comm(), levels):
                    full = torch.zeros(6 * 5, device=rank.device).to(dtype)
                    slot = full.view(6, 5)[rank.rank]
                    slot.copy_(torch.arange(5, device=rank.device).add(10 * rank.rank).to(dtype))
                    comm.gather(full, slot, group)
                    results.append(full.view(torch.uint8))
                assert torch.equal(*results)
    if rank.device == "cpu":
        assert len(launched) == (3 if joins else 0), "both other nodes in one step, for each dtype"


def _over(rank: Rank, ranks_per_node: int) -> LevelGroups:
    group, device = rank.mesh().get_group(), torch.device(rank.device)
    return level_groups(group, find_levels(group, device, ranks_per_node), device)


@spmd(4)
def test_ranks_that_made_other_groups_before_meet(rank: Rank) -> None:
    """The name under which ranks make a group together does not depend on what else each of them is in."""
    world, device = dist.group.WORLD, torch.device(rank.device)
    alone = [subgroup(world, [rank.rank], device) for _ in range(rank.rank)]
    pair = [0, 3] if rank.rank in (0, 3) else [1, 2]
    for _ in range(2):
        group = subgroup(world, pair, device)
        assert dist.get_process_group_ranks(group) == pair
        value = torch.ones(1, device=device)
        dist.all_reduce(value, group=group)
        assert value.item() == 2
    assert len(set(alone)) == rank.rank


@spmd(4)
def test_groups_of_some_ranks_leave_those_of_all_their_names(rank: Rank) -> None:
    """Torch names a group of all ranks by what a rank has made before; who made more would wait for ever."""
    device = torch.device(rank.device)
    for _ in range(rank.rank):
        subgroup(dist.group.WORLD, [rank.rank], device)
    group = dist.new_group(timeout=timedelta(seconds=20))
    value = torch.ones(1, device=device)
    dist.all_reduce(value, group=group)
    assert value.item() == 4


@spmd(4)
def test_groups_of_other_ranks_do_not_matter(rank: Rank) -> None:
    """The first ranks of all nodes often have a group of their own: torch's names for groups count those."""
    dist.new_group([0, 2])
    _check(rank, ((0, 1), (2, 3)), "bf16", mesh=_new_mesh(rank), ranks_per_node=2)


@spmd(4)
def test_a_group_in_another_order_is_refused(rank: Rank) -> None:
    """Its parts would count otherwise, and gradients would be those of another rank."""
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        pytest.skip("this torch sorts the ranks of every group")
    group = dist.new_group([3, 2, 1, 0], sort_ranks=False)
    net, _ = build(lambda: Net(5), rank.device)
    mesh = DeviceMesh.from_group(group, torch.device(rank.device).type)
    with pytest.raises(ValueError, match=r"search for nodes needs .* order of the world, got \[3, 2, 1, 0\]"):
        fully_shard(net, mesh=mesh, reduction="auto", ranks_per_node=2)
    assert not any(isinstance(p, DTensor) for p in net.parameters())


class _Block(nn.Module):
    """A dense part and experts, which are sharded over other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.experts = nn.Parameter(torch.randn(6, 8) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(x)) + x @ self.experts.T @ self.experts


@spmd(6, timeout=170)
def test_groups_of_one_module_that_pick_differently(rank: Rank) -> None:
    """Experts over ranks of one node and of two: the order of gathers and reductions is the same on all."""
    own = next(pair for pair in ((0, 3), (1, 4), (2, 5)) if rank.rank in pair)
    groups = {pair: dist.new_group(list(pair)) for pair in ((0, 3), (1, 4), (2, 5))}
    experts = placed_on(DeviceMesh.from_group(groups[own], torch.device(rank.device).type))

    def place(p: nn.Parameter) -> Any:
        return experts if p.shape == (6, 8) else None

    found = []
    for options in ({"reduction": "auto", "internode_dtype": torch.float32}, {"reduction": "reduce_scatter"}):
        with on_host(rank, "aaaabb"):
            torch.manual_seed(0)
            model = nn.Sequential(*[_Block() for _ in range(4)]).to(rank.device)
            options |= {"mesh": _new_mesh(rank), "mp_policy": BF16, "shard_placement_fn": place}
            for block in model:
                fully_shard(block, **options)
            fully_shard(model, **options)
        with noted() as calls:
            for step in range(3):
                model(rows(rank, step, dim=8)).float().square().mean().backward()
        found.append([p.grad.to_local() for p in model.parameters() if p.grad is not None])
        assert bool(calls.of("all_to_all")) == (options["reduction"] == "auto")
    assert len(found[0]) == len(found[1]) > 0
    for ours, expected in zip(*found):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@spmd(4)
def test_replicas_that_pick_differently_raise_together(rank: Rank) -> None:
    """The shard group of one replica lies on nodes without a common part; the other's ranks learn of it."""
    mesh = DeviceMesh(rank.device, torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "shard"))
    net, _ = build(lambda: Net(5), rank.device)
    with pytest.MonkeyPatch.context() as patch:
        fsdp_inside.refuse_levels(patch, on=rank.rank < 2)
        with pytest.raises((ValueError, RuntimeError), match="no levels here"):
            fully_shard(net, mesh=mesh, reduction="two_level", ranks_per_node=2)
    assert not any(isinstance(p, DTensor) for p in net.parameters())
