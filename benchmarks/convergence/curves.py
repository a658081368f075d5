"""One training curve: a model, an optimizer and a way to spread it over the ranks, on fixed batches.

All curves of a model and seed start from the same weights and see the same tokens in the same order, in fp32
(matrix products of a GPU in TF32), so that curves of one optimizer under two ways of sharding differ by the
order of gradient sums alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.convergence.runs import Setting
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ragged_fsdp import fully_shard
from ragged_fsdp.models import MoETransformer
from ragged_fsdp.models.materialize import materialize
from ragged_fsdp.optim import AdamW8bit, Muon, block_policy, clip_grad_norm_
from ragged_fsdp.trainer.batches import Batches, share
from ragged_fsdp.trainer.data import Tokens

BETAS, DECAY = (0.9, 0.95), 0.1
OPTIMIZERS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "adamw": lambda m, lr: torch.optim.AdamW(m.parameters(), lr=lr, betas=BETAS, weight_decay=DECAY),
    "adamw8bit": lambda m, lr: AdamW8bit(m.named_parameters(), lr=lr, betas=BETAS, weight_decay=DECAY),
    "muon": lambda m, lr: Muon(
        m.named_parameters(), lr=lr, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw", adamw_betas=BETAS
    ),
}
_EVALUATION_SEQUENCES = 256


@dataclass
class Curve:
    """The losses of one run; ``sharding`` is ``"one process"``, ``"ddp"`` or ``"ragged_fsdp"``."""

    model: str
    optimizer: str
    sharding: str
    lr: float
    seed: int = 1
    losses: list[float] = field(default_factory=list)
    evaluation: float = math.nan
    seconds_per_step: float = math.nan

    @property
    def name(self) -> str:
        """How the curve is called in tables and legends."""
        return f"{self.optimizer}, {self.sharding}"


def train_curve(curve: Curve, setting: Setting, tokens: Tokens, device: torch.device) -> Curve:
    """Train and fill in the losses; every rank calls this and gets the same numbers."""
    batches = _batches(curve, setting, tokens).to(device)
    model, call = _build(curve, setting, device)
    optimizer = OPTIMIZERS[curve.optimizer](model, curve.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, setting))
    losses: list[Tensor] = []
    start = time.perf_counter()
    for step, batch in enumerate(batches):
        if step == setting.steps // 5:  # compilation and first allocations are over
            _wait(device)
            start = time.perf_counter()
        loss, balance = _loss(call, batch)
        (loss + balance).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    _wait(device)
    curve.seconds_per_step = (time.perf_counter() - start) / (setting.steps - setting.steps // 5)
    curve.losses = _mean_over_ranks(torch.stack(losses))
    curve.evaluation = _evaluate(call, Batches(tokens.evaluation, setting.seq_len, curve.seed), device)
    return curve


def _batches(curve: Curve, setting: Setting, tokens: Tokens) -> Tensor:
    """(steps, sequences, seq_len + 1): what this rank trains on, read before the clock starts."""
    train = Batches(tokens.train, setting.seq_len, curve.seed)
    mine = share(setting.batch, dist.get_world_size(), dist.get_rank())
    firsts = range(0, setting.steps * setting.batch, setting.batch)
    return torch.stack([train.sequences(range(n + mine.start, n + mine.stop)) for n in firsts])


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
    materialize(model, twin, model.init_module, seed=curve.seed, device=device)
    if curve.sharding != "ddp":
        return model, model
    ids = [device.index] if device.type == "cuda" else None
    return model, DistributedDataParallel(model, device_ids=ids)


def _loss(call: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    output = call(tokens[:, :-1])
    return F.cross_entropy(output.logits.flatten(0, 1), tokens[:, 1:].flatten()), output.balance_loss.mean()


@torch.no_grad()
def _evaluate(call: nn.Module, held_out: Batches, device: torch.device) -> float:
    """The loss of the first held-out sequences, the same ones on any number of ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    count = min(_EVALUATION_SEQUENCES, held_out.windows) // (16 * world) * 16  # per rank
    starts = range(rank * count, (rank + 1) * count, 16)
    losses = [_loss(call, held_out.sequences(range(s, s + 16)).to(device))[0] for s in starts]
    return _mean_over_ranks(torch.stack(losses).mean()[None])[0]


def _lr_factor(step: int, setting: Setting) -> float:
    """Linear warm-up, then cosine decay to a tenth."""
    if step < setting.warmup:
        return (step + 1) / setting.warmup
    progress = (step - setting.warmup) / max(1, setting.steps - setting.warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def _mean_over_ranks(values: Tensor) -> list[float]:
    values = values.double()
    dist.all_reduce(values)
    return [round(v, 6) for v in (values / dist.get_world_size()).tolist()]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
