"""One training curve: a model, an optimizer and a way to spread it over the ranks, on fixed batches.

All curves of a model start from the same weights and see the same tokens in the same order, in fp32, so that
curves of one optimizer under two ways of sharding differ by the order of gradient sums alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ragged_fsdp import fully_shard
from ragged_fsdp.models import MoEConfig, MoETransformer
from ragged_fsdp.models.materialize import materialize
from ragged_fsdp.optim import AdamW8bit, Muon, block_policy, clip_grad_norm_
from ragged_fsdp.trainer.batches import Batches, share

MODELS = {
    "dense": MoEConfig(
        hidden=256, layers=4, heads=4, kv_heads=2, experts=1, experts_per_token=1, expert_hidden=768
    ),
    "moe": MoEConfig(
        hidden=256, layers=4, heads=4, kv_heads=2, experts=8, experts_per_token=2, expert_hidden=256
    ),
}
TINY_MODELS = {
    "dense": MoEConfig(
        hidden=64, layers=2, heads=2, kv_heads=1, experts=1, experts_per_token=1, expert_hidden=128
    ),
    "moe": MoEConfig(
        hidden=64, layers=2, heads=2, kv_heads=1, experts=4, experts_per_token=2, expert_hidden=64
    ),
}
BETAS, DECAY = (0.9, 0.95), 0.1
OPTIMIZERS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "adamw": lambda m, lr: torch.optim.AdamW(m.parameters(), lr=lr, betas=BETAS, weight_decay=DECAY),
    "adamw8bit": lambda m, lr: AdamW8bit(m.named_parameters(), lr=lr, betas=BETAS, weight_decay=DECAY),
    "muon": lambda m, lr: Muon(
        m.named_parameters(), lr=lr, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw", adamw_betas=BETAS
    ),
}


@dataclass(frozen=True)
class Setting:
    """What every curve of a run has in common."""

    models: dict[str, MoEConfig]
    seq_len: int
    batch: int
    steps: int
    lr: float
    muon_lr: float
    warmup: int
    seed: int = 1


@dataclass
class Curve:
    """The losses of one run."""

    model: str
    optimizer: str
    sharding: str
    losses: list[float] = field(default_factory=list)
    evaluation: float = math.nan
    seconds_per_step: float = math.nan

    @property
    def name(self) -> str:
        """How the curve is called in tables and legends."""
        return f"{self.optimizer}, {self.sharding}"


def train_curve(
    curve: Curve, setting: Setting, train: Batches, evaluation: Batches, device: torch.device
) -> Curve:
    """Train and fill in the losses; every rank calls this and gets the same numbers."""
    model, call = _build(curve, setting, device)
    lr = setting.muon_lr if curve.optimizer == "muon" else setting.lr
    optimizer = OPTIMIZERS[curve.optimizer](model, lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, setting))
    rank, world = dist.get_rank(), dist.get_world_size()
    losses: list[Tensor] = []
    start = time.perf_counter()
    for step in range(setting.steps):
        if step == setting.steps // 5:  # compilation and first allocations are over
            _wait(device)
            start = time.perf_counter()
        mine = share(setting.batch, world, rank)
        samples = range(step * setting.batch + mine.start, step * setting.batch + mine.stop)
        loss, balance = _loss(call, train.sequences(samples).to(device))
        (loss + balance).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    _wait(device)
    curve.seconds_per_step = (time.perf_counter() - start) / (setting.steps - setting.steps // 5)
    curve.losses = _mean_over_ranks(torch.stack(losses))
    with torch.no_grad():
        held_out = [_loss(call, evaluation.sequences(_part(rank, world, i)).to(device))[0] for i in range(4)]
    curve.evaluation = _mean_over_ranks(torch.stack(held_out).mean()[None])[0]
    return curve


def _build(curve: Curve, setting: Setting, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """The model whose parameters are optimised, and the module to call; weights depend on the seed alone."""
    config = setting.models[curve.model]
    with torch.device("meta"):
        model, twin = MoETransformer(config), MoETransformer(config)
    if curve.sharding == "ragged_fsdp":
        policy = block_policy()
        for layer in model.layers:
            fully_shard(layer, orig_param_policy=policy, reshard_after_forward=False)
        fully_shard(model, orig_param_policy=policy)
    materialize(model, twin, model.init_module, seed=setting.seed, device=device)
    if curve.sharding == "ragged_fsdp":
        return model, model
    ids = [device.index] if device.type == "cuda" else None
    return model, DistributedDataParallel(model, device_ids=ids)


def _loss(call: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    output = call(tokens[:, :-1])
    return F.cross_entropy(output.logits.flatten(0, 1), tokens[:, 1:].flatten()), output.balance_loss.mean()


def _lr_factor(step: int, setting: Setting) -> float:
    """Linear warm-up, then cosine decay to a tenth."""
    if step < setting.warmup:
        return (step + 1) / setting.warmup
    progress = (step - setting.warmup) / max(1, setting.steps - setting.warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def _part(rank: int, world: int, index: int) -> range:
    return range((index * world + rank) * 8, (index * world + rank + 1) * 8)


def _mean_over_ranks(values: Tensor) -> list[float]:
    values = values.double()
    dist.all_reduce(values)
    return [round(v, 6) for v in (values / dist.get_world_size()).tolist()]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
