"""Muon on parameters that are offloaded to the host: work on the device, state on the host.

Run with ``RAGGED_FSDP_TEST_DEVICE=cuda``; several ranks may share one device.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

import muon_cases as cases
from ragged_fsdp import fully_shard
from ragged_fsdp.optim import Muon
from rank_pool import DEVICE, spmd

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs RAGGED_FSDP_TEST_DEVICE=cuda")


def train(rank, policy: OffloadPolicy) -> tuple[nn.Module, Muon]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24), nn.LayerNorm(24))
    if not isinstance(policy, CPUOffloadPolicy):
        model.to(rank.device)
    fully_shard(model, mesh=rank.mesh(), offload_policy=policy)
    optimizer = Muon(model.named_parameters(), lr=0.02, ns_dtype=torch.float32, bucket_numel=500)
    for step in range(3):
        batch = torch.randn(8, 24, generator=torch.Generator().manual_seed(step)).to(rank.device)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@spmd(1, 2)
def test_offloaded_parameters(rank):
    """The weights of training without offload; the iteration runs on the device, the momentum on the host."""
    model, optimizer = train(rank, CPUOffloadPolicy())
    expected, _ = train(rank, OffloadPolicy())
    for parameter, wanted in zip(model.parameters(), expected.parameters()):
        assert parameter.to_local().device.type == "cpu"
        for value in optimizer.state[parameter].values():
            assert value.device.type == "cpu" or value.ndim == 0
        found = cases.whole(parameter.detach().to(rank.device))
        torch.testing.assert_close(found, cases.whole(wanted.detach()), rtol=1e-4, atol=1e-5)
    assert all(bound.device.type == "cuda" for bound in optimizer._latest)
