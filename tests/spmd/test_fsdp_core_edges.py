"""Corners that have no other home: granularity beside TP, empty groups, casts, streams, odd inputs."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_core_cases import assert_same_grads, batch, clone, counting_gathers, full, loss_of, make_net, shard
from ragged_fsdp import Elements, RaggedShard, Rows, StridedRaggedShard, Whole, fully_shard, share_comm_ctx
from ragged_fsdp.fsdp.param_group import ParamGroup
from ragged_fsdp.fsdp.phases import Residence
from rank_pool import Rank, spmd


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("granularity", "block"), [(None, 6), (Rows(2), 12), (Elements(4), 12), (Whole(), 48)]
)
@spmd(4)
def test_granularity_beside_tensor_parallelism(rank: Rank, granularity, block: int, replicas: int) -> None:
    """Rows of a row-parallel weight stay whole: the block is the LCM of a row and of what the policy asks."""
    names = ("replicate", "dp", "tp")
    mesh = rank.mesh(replicas, 4 // (2 * replicas), 2, names=names)
    data = mesh["replicate", "dp"] if replicas > 1 else mesh["dp"]
    torch.manual_seed(2)
    plain = {"row": nn.Linear(12, 8, bias=False), "column": nn.Linear(12, 8, bias=False)}
    net = nn.ModuleDict(plain).to(rank.device)
    expected = {name: module.weight.detach().clone() for name, module in net.items()}
    for name, dim in (("row", 1), ("column", 0)):
        net[name].weight = nn.Parameter(distribute_tensor(expected[name], mesh["tp"], [Shard(dim)]))
    for name in ("row", "column"):
        fully_shard(net[name], mesh=data, orig_param_policy=lambda *_: granularity)
    row, column = net["row"].weight, net["column"].weight
    assert type(row.placements[-2]) is RaggedShard and row.placements[-1] == Shard(1)
    assert type(column.placements[-2]) in (RaggedShard, StridedRaggedShard) and column.placements[
        -1
    ] == Shard(0)
    assert row.to_local().numel() % block == 0
    assert row.device_mesh.mesh_dim_names == (names if replicas > 1 else names[1:])
    for name, weight in (("row", row), ("column", column)):
        assert torch.equal(full(weight.detach()), expected[name])
    x = DTensor.from_local(torch.ones(2, 6, device=rank.device), mesh["tp"], [Shard(1)])
    net["row"](x).redistribute(placements=[Replicate()]).to_local().sum().backward()
    assert row.grad.placements == row.placements
    torch.testing.assert_close(full(row.grad), torch.full((8, 12), 2.0, device=rank.device))


class _OnlyEmpty(nn.Module):
    """The root's own group has no element at all."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.inner = nn.Parameter(torch.empty(0, 3)), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.nothing.sum()


@spmd(1, 3)
def test_a_group_without_elements(rank: Rank) -> None:
    model = _OnlyEmpty().to(rank.device)
    reference = clone(model)
    fully_shard(model.inner, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    for _ in range(2):
        for module in (model, reference):
            module.zero_grad()
            module(torch.ones(2, 3, device=rank.device)).sum().backward()
        assert_same_grads(model, reference)
    assert model.nothing.grad.shape == (0, 3)


@spmd(2)
def test_a_bf16_model_moved_to_fp32_keeps_its_policy(rank: Rank) -> None:
    """Parameters follow the cast; compute and reduction follow the policy."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = shard(make_net(rank.device).bfloat16(), mesh=rank.mesh(), mp_policy=policy)
    model.float()
    loss_of(model, batch(rank.device, 0, 2).chunk(2)[rank.rank]).backward()
    groups = [group for module in (model, *model.blocks) for group in module._get_fsdp_state().groups]
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    assert {g.model_weight.dtype for g in groups} == {torch.bfloat16}
    assert {full.dtype for g in groups for full in g.reducer._fulls.values()} == {torch.float32}


@spmd(2)
def test_reused_ids_are_no_shared_parameters(rank: Rank) -> None:
    """A parameter freed by one call may leave its id to a parameter of the next one."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(20))).to(rank.device)
    for layer in model:
        fully_shard(layer, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    model(torch.ones(1, 8, device=rank.device)).sum().backward()


@spmd(2)
def test_streams_shared_after_the_first_forward(rank: Rank) -> None:
    """All states below each root follow, also those found in the meantime."""
    stages = [shard(make_net(rank.device), mesh=rank.mesh()) for _ in range(2)]
    tokens = batch(rank.device, 0, 2).chunk(2)[rank.rank]
    for stage in stages:
        loss_of(stage, tokens).backward()
    share_comm_ctx(stages)
    comm = stages[0]._get_fsdp_state().comm
    for stage in stages:
        for module in (stage, *stage.blocks):
            state = module._get_fsdp_state()
            assert state.comm is state.root.comm is state.groups[0].context is comm
    calls: list[str] = []
    with counting_gathers(calls):
        for stage in stages:
            stage.zero_grad()
            loss_of(stage, tokens).backward()
    assert calls
    first, second = (list(stage.parameters()) for stage in stages)
    assert all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in zip(first, second))


class _Dropped(nn.Module):
    """A layer that may be left out: it then returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.drop else self.linear(x)


class _Spy(nn.Module):
    """Notes where the weights of a group are when a gradient passes."""

    def __init__(self) -> None:
        super().__init__()
        self.group: ParamGroup | None = None
        self.seen: list[Residence] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda _: self.seen.append(self.group.residence))
        return x * 1


@spmd(2)
def test_a_module_that_returns_its_input(rank: Rank) -> None:
    """Its backward starts and ends at one gradient: it is gathered for nothing, but not left gathered."""
    first, spy, dropped, last = model = nn.Sequential(_Dropped(), _Spy(), _Dropped(), _Dropped())
    model.to(rank.device)
    for layer in (first, dropped, last):
        fully_shard(layer, mesh=rank.mesh(), reshard_after_forward=True)
    fully_shard(model, mesh=rank.mesh())
    (spy.group,) = dropped._get_fsdp_state().groups
    for step in range(3):
        dropped.drop = step > 0
        model(torch.ones(2, 4, device=rank.device)).sum().backward()
        assert spy.seen.pop() is Residence.SHARDED and not spy.seen
        assert (dropped.linear.weight.grad is None) == dropped.drop
        model.zero_grad()


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear(x.mul_(2) if y is None else x.mul_(2) + y)


@spmd(1, 2)
@pytest.mark.parametrize("inputs", [1, 2])
def test_an_input_changed_in_place_raises(rank: Rank, inputs: int) -> None:
    """The change would cut off the end of the module's backward; with one input or several, torch says so."""
    model = fully_shard(_InPlace().to(rank.device), mesh=rank.mesh())
    tensors = [torch.ones(2, 4, device=rank.device, requires_grad=True) * 1 for _ in range(inputs)]
    with pytest.raises(RuntimeError, match="modified inplace"):
        model(*tensors)


@spmd(2)
def test_tensors_without_values(rank: Rank) -> None:
    """As tools do that estimate the memory of a model without having it."""
    mesh = rank.mesh()
    with FakeTensorMode():
        net = nn.Sequential(nn.Linear(8, 8, device=rank.device), nn.Linear(8, 4, device=rank.device))
        for layer in (*net, net):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for _ in range(2):
            net(torch.ones(2, 8, device=rank.device)).sum().backward()
            optimizer.step()
        assert all(isinstance(p.grad.to_local(), FakeTensor) for p in net.parameters())
