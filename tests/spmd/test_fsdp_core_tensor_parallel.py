"""Data parallelism beside tensor parallelism that does not divide evenly."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_core_cases import full
from ragged_fsdp import Rows, StridedRaggedShard, fully_shard
from rank_pool import Rank, spmd


@spmd(4)
def test_uneven_tensor_parallelism(rank: Rank) -> None:
    """5 rows over 2 tensor-parallel ranks leave 3 and 2: one placement, units per outer shard."""
    mesh = rank.mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(5)
    net = nn.Linear(6, 5).to(rank.device)
    reference = nn.Linear(6, 5).to(rank.device)
    reference.load_state_dict(net.state_dict())
    for name, placement in (("weight", Shard(0)), ("bias", Replicate())):
        value = distribute_tensor(getattr(net, name).detach(), mesh["tp"], [placement])
        setattr(net, name, nn.Parameter(value))
    fully_shard(net, mesh=mesh["dp"], orig_param_policy=lambda name, p: Rows(1) if p.ndim == 2 else None)
    assert isinstance(net.weight.placements[0], StridedRaggedShard)
    assert net.weight.device_mesh.mesh_dim_names == ("dp", "tp")
    assert torch.equal(full(net.weight.detach()), reference.weight)
    assert torch.equal(full(net.bias.detach()), reference.bias)
    optimizer, expected = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, reference))
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(rank.device)
        mine = x.chunk(2)[mesh.get_local_rank("dp")]
        weight_out = net(DTensor.from_local(mine, mesh["tp"], [Replicate()]))
        weight_out.full_tensor().square().mean().backward()
        torch.stack([reference(part).square().mean() for part in x.chunk(2)]).mean().backward()
        for param, other in zip(net.parameters(), reference.parameters()):
            torch.testing.assert_close(full(param.grad), other.grad)
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
    assert torch.allclose(full(net.weight.detach()), reference.weight, atol=1e-6)
