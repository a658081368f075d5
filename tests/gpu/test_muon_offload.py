"""Optimizers on parameters that are offloaded to the host: state on the host, Muon's work on the device.

Run with ``RAGGED_FSDP_TEST_DEVICE=cuda``; several ranks may share one device.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

import muon_cases as cases
from ragged_fsdp import fully_shard
from ragged_fsdp.optim import AdamW8bit, FusedAdamW, Muon, block_policy
from rank_pool import DEVICE, spmd

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs RAGGED_FSDP_TEST_DEVICE=cuda")


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "muon": lambda p: Muon(p, lr=0.02, ns_dtype=torch.float32, bucket_numel=500),
    "8bit": lambda p: AdamW8bit(p, lr=0.02, min_8bit_numel=512),
    "fused": lambda p: FusedAdamW(p, lr=0.02),
}


def train(rank, policy: OffloadPolicy, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24), nn.LayerNorm(24))
    if not isinstance(policy, CPUOffloadPolicy):
        model.to(rank.device)
    blocks = block_policy(min_numel=512)
    fully_shard(model, mesh=rank.mesh(), offload_policy=policy, orig_param_policy=blocks)
    optimizer = OPTIMIZERS[kind](model.named_parameters())
    for step in range(3):
        batch = torch.randn(8, 24, generator=torch.Generator().manual_seed(step)).to(rank.device)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return model, optimizer


@spmd(1, 2)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_offloaded_parameters(rank, kind):
    """The weights of training without offload, with state on the host; Muon iterates on the device."""
    model, optimizer = train(rank, CPUOffloadPolicy(), kind)
    expected, _ = train(rank, OffloadPolicy(), kind)
    for parameter, wanted in zip(model.parameters(), expected.parameters()):
        assert parameter.to_local().device.type == "cpu"
        for value in optimizer.state[parameter].values():
            assert value.device.type == "cpu" or value.ndim == 0
        found = cases.whole(parameter.detach().to(rank.device))
        atol = 1e-2 if kind == "8bit" else 1e-5  # gradients differ in their last bits, and codes may flip
        torch.testing.assert_close(found, cases.whole(wanted.detach()), rtol=1e-4, atol=atol)
    if isinstance(optimizer, Muon):
        assert {exchange.team.device.type for exchange in optimizer._latest} == {"cuda"}
