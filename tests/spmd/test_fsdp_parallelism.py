"""Parameters that are DTensors already: tensor, expert and 3-D parallelism."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_cases import (
    DIM,
    RAGGED,
    Stack,
    average_gradients,
    build,
    fsdp,
    full,
    fully_shard,
    linear_on_a_full_mesh,
    placed_on,
    ragged_only,
    relative_error,
    rows,
)
from ragged_fsdp import Elements, RaggedShard, Rows, StridedRaggedShard, Whole
from ragged_fsdp.dtensor import is_ragged
from rank_pool import spmd

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def _check(model, reference, rank, dp_group, dp_index, tolerance=1e-6):
    data = dataclasses.replace(rank, rank=dp_index)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(3):
        loss, expected = (m(rows(data, step)).square().sum() for m in (model, reference))
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        loss.backward()
        expected.backward()
        average_gradients(reference, dp_group)
        for (name, p), q in zip(model.named_parameters(), reference.parameters()):
            assert p.grad.placements == p.placements, name
            assert relative_error(full(p.grad), q.grad) < tolerance, f"{name}.grad at step {step}"
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), reference.parameters()):
        assert relative_error(full(p), q.detach()) < 1e-4, name


@pytest.mark.parametrize("hidden", [20, 22], ids=["even", "uneven"])
@spmd(4)
def test_fsdp_with_tensor_parallelism(rank, hidden):
    mesh = rank.mesh(2, 2, names=("dp", "tp"))
    model, reference = build(lambda: Stack(hidden=hidden), rank.device)
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], PLAN)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor), name
        if p.device_mesh.ndim == 2:  # biases that TP replicates keep the parent mesh too
            assert p.device_mesh.mesh_dim_names == ("dp", "tp"), name
    _check(model, reference, rank, mesh["dp"].get_group(), mesh["dp"].get_local_rank())


@spmd(4)
def test_hsdp_with_tensor_parallelism_on_three_dimensions(rank):
    mesh = rank.mesh(2, 1, 2, names=("replicate", "shard", "tp"))
    model, reference = build(Stack, rank.device)
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], PLAN)
        fully_shard(layer, mesh=mesh["replicate", "shard"])
    fully_shard(model, mesh=mesh["replicate", "shard"])
    weight = model.layers[0].up.weight
    assert weight.device_mesh.mesh_dim_names == ("replicate", "shard", "tp")
    assert weight.placements[0] == Replicate()
    _check(model, reference, rank, mesh["replicate"].get_group(), mesh["replicate"].get_local_rank())


@spmd(4)
def test_clipping_with_tensor_parallelism(rank):
    mesh = rank.mesh(2, 2, names=("dp", "tp"))
    model, reference = build(Stack, rank.device)
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], PLAN)
    fully_shard(model, mesh=mesh["dp"])
    data = dataclasses.replace(rank, rank=mesh["dp"].get_local_rank())
    for module in (model, reference):
        module(rows(data, 0)).square().sum().backward()
    average_gradients(reference, mesh["dp"].get_group())
    norm = torch.nn.utils.clip_grad_norm_(
        [p for p in model.parameters() if p.grad.device_mesh.ndim == 2], 1e9
    )
    names = [n for n, p in model.named_parameters() if p.grad.device_mesh.ndim == 2]
    expected = torch.stack([reference.get_parameter(n).grad.norm() for n in names]).norm()
    torch.testing.assert_close(norm.full_tensor(), expected, rtol=1e-5, atol=0)
    own = torch.stack([full(model.get_parameter(n).grad).double().norm() for n in names]).norm()
    torch.testing.assert_close(norm.full_tensor().double(), own, rtol=1e-6, atol=0)  # 1e9 clips nothing


class _ExpertLayer(nn.Module):
    """Four experts whose results are summed over the expert-parallel group."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(DIM, DIM)
        self.experts = nn.Parameter(torch.randn(4, DIM, DIM) / DIM**0.5)

    def forward(self, x):
        experts = self.experts
        if isinstance(experts, DTensor):
            partial = torch.einsum("bd,edh->bh", self.dense(x), experts.to_local())
            return DTensor.from_local(partial, experts.device_mesh, [Partial()]).full_tensor()
        return torch.einsum("bd,edh->bh", self.dense(x), experts)


@spmd(4)
def test_expert_parallelism(rank):
    """Experts sharded over ``ep`` by their first dimension, and by FSDP over ``dp``."""
    mesh = rank.mesh(2, 2, names=("dp", "ep"))
    model, _ = build(_ExpertLayer, rank.device)
    torch.manual_seed(0)
    reference = _ExpertLayer().to(rank.device)
    local = distribute_tensor(model.experts.detach(), mesh["ep"], [Shard(0)])
    model.experts = nn.Parameter(local)
    fully_shard(model, mesh=mesh["dp"])
    assert model.experts.device_mesh.mesh_dim_names == ("dp", "ep")
    assert model.experts.shape == reference.experts.shape
    assert torch.equal(full(model.experts), reference.experts.detach())
    data = dataclasses.replace(rank, rank=mesh["dp"].get_local_rank())
    for module in (model, reference):
        module(rows(data, 0)).square().sum().backward()
    average_gradients(reference, mesh["dp"].get_group())
    assert relative_error(full(model.experts.grad), reference.experts.grad) < 1e-6


@spmd(4)
def test_parameters_of_one_module_on_two_meshes(rank):
    """Experts are sharded over two ranks and the rest over four, in one call."""
    whole, pair = rank.mesh(4, names=("dp",)), rank.mesh(2, 2, names=("outer", "edp"))["edp"]
    model, reference = build(_ExpertLayer, rank.device)

    placed = {mesh: placed_on(mesh) for mesh in (whole, pair)}

    def place(parameter):
        return placed[pair if parameter.ndim == 3 else whole]

    if RAGGED:  # a difference that only the ranks of one pair see is heard by all four
        differs, _ = build(_ExpertLayer, rank.device)
        differs.experts = nn.Parameter(differs.experts[: 4 - (rank.rank == 3)].detach())
        with pytest.raises(ValueError, match=r"rank 2 has 'experts \(4, .*rank 3 has 'experts \(3, "):
            fully_shard(differs, mesh=whole, shard_placement_fn=place)
        assert not isinstance(differs.dense.weight, DTensor)
    fully_shard(model, mesh=whole, shard_placement_fn=place)
    assert model.experts.device_mesh.size() == 2
    assert model.dense.weight.device_mesh.size() == 4
    for module in (model, reference):
        module(rows(rank, 0)).square().sum().backward()
    for name, q in reference.named_parameters():
        group = pair.get_group() if q.ndim == 3 else None
        dist.all_reduce(q.grad, group=group)
        q.grad.div_(dist.get_world_size(group))
        assert relative_error(full(model.get_parameter(name).grad), q.grad) < 1e-6, name


@spmd(4)
def test_larger_shards_must_fit_the_mesh_of_each_parameter(rank):
    """What four ranks can share after forward is too much for two; nothing is changed."""
    whole, pair = rank.mesh(4, names=("dp",)), rank.mesh(2, 2, names=("outer", "edp"))["edp"]
    placed = {mesh: placed_on(mesh) for mesh in (whole, pair)}
    model, _ = build(_ExpertLayer, rank.device)
    with pytest.raises(ValueError, match="should be a factor of 2, not 4"):
        fully_shard(
            model,
            mesh=whole,
            reshard_after_forward=4,
            shard_placement_fn=lambda parameter: placed[pair if parameter.ndim == 3 else whole],
        )
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@spmd(4)
def test_data_parallel_dims_of_a_full_mesh(rank):
    """``dp_mesh_dims``: parameters live on the whole mesh, FSDP takes its named dims."""
    model, reference, mesh = linear_on_a_full_mesh(rank)
    assert model.weight.device_mesh.mesh_dim_names == ("dp", "tp")
    data = dataclasses.replace(rank, rank=mesh["dp"].get_local_rank())
    x = distribute_tensor(rows(data, 0), mesh["tp"], [Replicate()])
    x = DTensor.from_local(x.to_local(), mesh, [Replicate(), Replicate()], run_check=False)
    model(x).square().sum().backward()
    reference(rows(data, 0)).square().sum().backward()
    average_gradients(reference, mesh["dp"].get_group())
    assert relative_error(full(model.weight.grad), reference.weight.grad) < 1e-6
    with pytest.raises(ValueError, match=r"not found in mesh\.mesh_dim_names"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="nope"))


@ragged_only
@spmd(4)
def test_tensor_parallel_parameters_are_ragged_on_the_parent_mesh(rank):
    mesh = rank.mesh(2, 2, names=("dp", "tp"))
    model, _ = build(Stack, rank.device)
    parallelize_module(model.layers[0], mesh["tp"], PLAN)
    fully_shard(model, mesh=mesh["dp"])
    column, row = model.layers[0].up.weight, model.layers[0].down.weight
    assert is_ragged(column) and is_ragged(row)
    for parameter, dim in ((column, 0), (row, 1)):
        assert isinstance(parameter.placements[0], RaggedShard | StridedRaggedShard)
        assert parameter.placements[1] == Shard(dim)
        local = distribute_tensor(full(parameter), parameter.device_mesh, parameter.placements).to_local()
        assert torch.equal(local, parameter.to_local())


@ragged_only
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("granularity", "block"), [(None, 6), (Rows(2), 12), (Elements(4), 12), (Whole(), 48)]
)
@spmd(4)
def test_granularity_beside_tensor_parallelism(rank, granularity, block, replicas):
    """Rows of a row-parallel weight stay whole: the block is the LCM of a row and of what the policy asks."""
    names = ("replicate", "dp", "tp")
    mesh = rank.mesh(replicas, 4 // (2 * replicas), 2, names=names)
    data = mesh["replicate", "dp"] if replicas > 1 else mesh["dp"]
    net, reference = build(
        lambda: nn.ModuleDict({name: nn.Linear(12, 8, bias=False) for name in ("row", "column")}), rank.device
    )
    for name, dim in (("row", 1), ("column", 0)):
        weight = distribute_tensor(net[name].weight.detach(), mesh["tp"], [Shard(dim)])
        net[name].weight = nn.Parameter(weight)
        fully_shard(net[name], mesh=data, orig_param_policy=lambda *_: granularity)
    row, column = net["row"].weight, net["column"].weight
    assert type(row.placements[-2]) is RaggedShard and row.placements[-1] == Shard(1)
    assert isinstance(column.placements[-2], RaggedShard | StridedRaggedShard)
    assert column.placements[-1] == Shard(0)
    assert row.to_local().numel() % block == 0
    assert row.device_mesh.mesh_dim_names == (names if replicas > 1 else names[1:])
    for name, weight in (("row", row), ("column", column)):
        assert torch.equal(full(weight), reference[name].weight)
    x = DTensor.from_local(torch.ones(2, 6, device=rank.device), mesh["tp"], [Shard(1)])
    net["row"](x).redistribute(placements=[Replicate()]).to_local().sum().backward()
    assert row.grad.placements == row.placements
    torch.testing.assert_close(full(row.grad), torch.full((8, 12), 2.0, device=rank.device))


@ragged_only
@spmd(4)
def test_uneven_tensor_parallelism(rank):
    """5 rows over 2 tensor-parallel ranks leave 3 and 2: one placement, units per outer shard."""
    mesh = rank.mesh(2, 2, names=("dp", "tp"))
    net, reference = build(lambda: nn.Linear(DIM, 5), rank.device)
    for name, placement in (("weight", Shard(0)), ("bias", Replicate())):
        value = distribute_tensor(getattr(net, name).detach(), mesh["tp"], [placement])
        setattr(net, name, nn.Parameter(value))
    fully_shard(net, mesh=mesh["dp"], orig_param_policy=lambda name, p: Rows(1) if p.ndim == 2 else None)
    assert isinstance(net.weight.placements[0], StridedRaggedShard)
    assert net.weight.device_mesh.mesh_dim_names == ("dp", "tp")
    assert torch.equal(full(net.weight), reference.weight) and torch.equal(full(net.bias), reference.bias)

    class OnTheMesh(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return net(DTensor.from_local(x, mesh["tp"], [Replicate()])).full_tensor()

    model = OnTheMesh()
    _check(model, reference, rank, mesh["dp"].get_group(), mesh["dp"].get_local_rank())
