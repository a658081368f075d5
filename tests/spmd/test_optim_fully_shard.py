"""The optimizers under fully_shard: the unsharded model's numbers, and torch's checkpoint functions."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._python_dispatch import TorchDispatchMode

from optim_cases import full
from ragged_fsdp import Whole, fully_shard
from ragged_fsdp.optim import AdamW8bit, FusedAdamW, Shampoo, block_policy, clip_grad_norm_
from rank_pool import spmd

BLOCK = (16, 16)
OPTIMIZERS = {
    "8bit": lambda p: AdamW8bit(p, lr=1e-2, block_shape=BLOCK, min_8bit_numel=512),
    "shampoo": lambda p: Shampoo(p, lr=1e-2, block_shape=BLOCK, start_step=2, min_numel=512),
    "fused": lambda p: FusedAdamW(p, lr=1e-2),
}


class Net(nn.Module):
    """Two layers, a tied pair, a frozen bias and a parameter that no input reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.inner = nn.Sequential(nn.Linear(32, 80), nn.GELU(), nn.Linear(80, 32))
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(64, 16))
        self.inner[0].bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.inner(self.embed(x)))


def _sharded(model):
    policy = block_policy(BLOCK, min_numel=512)
    for module in (model.inner, model):
        fully_shard(module, orig_param_policy=policy)
    return model


def _train(model, optimizer, steps, device):
    norms = []
    for step in steps:
        tokens = torch.randint(48, (6, 9), generator=torch.Generator().manual_seed(step)).to(device)
        nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(norms)


@spmd(1, 3)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_trains_as_unsharded_and_resumes(rank, kind):
    torch.manual_seed(0)
    plain = Net().to(rank.device)
    sharded = _sharded(copy.deepcopy(plain))
    optimizers = [OPTIMIZERS[kind](list(m.named_parameters())) for m in (plain, sharded)]
    norms = [_train(m, o, range(3), rank.device) for m, o in zip((plain, sharded), optimizers)]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=1e-6)
    for (name, left), right in zip(plain.named_parameters(), sharded.parameters()):
        # every rank has the whole batch, so gradients differ by the order of sums; 8-bit codes may flip
        torch.testing.assert_close(left, full(right), rtol=0, atol=2e-2 if kind == "8bit" else 2e-3, msg=name)

    saved = get_optimizer_state_dict(
        sharded, optimizers[1], options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rank.rank == 0:
        assert "unused" not in saved["state"] or not saved["state"]["unused"]
    resumed = _sharded(copy.deepcopy(plain))
    with torch.no_grad():
        for target, source in zip(resumed.parameters(), sharded.parameters()):
            target._local_tensor.copy_(source._local_tensor)
    optimizer = OPTIMIZERS[kind](list(resumed.named_parameters()))
    set_optimizer_state_dict(
        resumed,
        optimizer,
        copy.deepcopy(saved),  # torch shares the step counters otherwise
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False),
    )
    for model, opt in ((sharded, optimizers[1]), (resumed, optimizer)):
        _train(model, opt, [7, 8], rank.device)
    for (name, left), right in zip(sharded.named_parameters(), resumed.parameters()):
        assert torch.equal(left._local_tensor, right._local_tensor), name


@spmd(2)
def test_policy_keeps_blocks_whole_and_its_absence_is_an_error(rank):
    model = nn.Sequential(nn.Linear(96, 80, bias=False), nn.Linear(80, 96, bias=False))
    for layer in model:
        fully_shard(layer, orig_param_policy=lambda name, param: Whole())
    AdamW8bit(model.named_parameters())  # whole parameters have whole blocks
    cut = fully_shard(nn.Linear(96, 80, bias=False))
    with pytest.raises(ValueError, match=r"weight: .*cuts 16 x 64 blocks.*Rows\(count=16\)"):
        AdamW8bit(cut.named_parameters())


class FusedCalls(TorchDispatchMode):
    """How many tensors each call of torch's fused kernel got."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten._fused_adamw_:
            self.tensors.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@spmd(2)
def test_fused_updates_one_tensor_per_group(rank):
    model = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)) for _ in range(3))
    for layer in model:
        fully_shard(layer)
    optimizer = FusedAdamW(model.parameters())
    x = torch.ones(4, 32, device=rank.device)
    for layer in model:
        x = layer(x)
    x.sum().backward()
    with FusedCalls() as calls:
        optimizer.step()
    assert calls.tensors == [3] and len(list(model.parameters())) == 12
