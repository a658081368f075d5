"""One optimizer step and one evaluation, as every rank makes them together.

The loss of a step is the mean over all of its tokens, and its gradient must not depend on how they are
spread: each rank sums over its own tokens and divides by those of the whole step; the factor
``data_parts`` undoes the mean that the reduction of gradients takes over the parts of the batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ragged_fsdp.models.moe import at_least_float32
from ragged_fsdp.optim import clip_grad_norm_
from ragged_fsdp.trainer.batches import Batches, share
from ragged_fsdp.trainer.config import TrainConfig
from ragged_fsdp.trainer.ranks import Ranks
from ragged_fsdp.trainer.sharding import ShardedModel
from ragged_fsdp.trainer.timing import StepClock

__all__ = ["StepResult", "evaluate", "train_step"]


@dataclass(frozen=True)
class StepResult:
    """Losses and gradient norm of a step. They stay on the device, so that the host need not wait for it."""

    loss: Tensor
    balance_loss: Tensor
    """The routers' balance loss, a mean over the sequences; 0 for models that have none."""
    grad_norm: Tensor


def train_step(
    model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    first_sample: int,
    config: TrainConfig,
    ranks: Ranks,
    clock: StepClock,
) -> StepResult:
    """Forward, backward and update on the samples from ``first_sample`` on."""
    batch, pieces = config.data.batch, config.data.accumulate
    step_tokens = batch * config.data.seq_len
    loss_sum = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for piece in range(pieces):
        with clock.phase("data"):
            ids = _my_sequences(batches, first_sample, share(batch, pieces, piece), ranks)
        with model.micro_batch(last=piece == pieces - 1):
            with clock.phase("forward"):
                tokens_loss, balance_loss = summed_losses(model, ids)
            loss = tokens_loss / step_tokens + balance_loss / batch
            with clock.phase("backward"):
                (loss * ranks.data_parts).backward()
        loss_sum += torch.stack((tokens_loss.detach(), balance_loss.detach().to(tokens_loss.dtype)))
    with clock.phase("optimizer"):
        grad_norm = clip_gradients(model, config.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    with clock.phase("reduce_loss"):
        tokens_sum, balance_sum = _sum_over_parts(loss_sum, ranks)
    return StepResult(tokens_sum / step_tokens, balance_sum / batch, grad_norm)


def summed_losses(model: ShardedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropies of all tokens, and of the sequences' balance losses (0 without a router)."""
    output = model(ids[:, :-1])
    logits = at_least_float32(output.logits.flatten(0, 1))  # type: ignore[attr-defined]
    tokens_loss = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")
    return tokens_loss, _balance_loss(model, output, tokens_loss)


def _balance_loss(model: ShardedModel, output: Any, tokens_loss: Tensor) -> Tensor:
    """Our model has one for each sequence; one of transformers has one for all that it was given."""
    own = getattr(output, "balance_loss", None)
    if own is not None:
        return own.sum()
    of_batch = getattr(output, "aux_loss", None)  # with output_router_logits; not for models without routers
    if not isinstance(of_batch, Tensor) or not len(output.logits):
        return tokens_loss.new_zeros(())
    return of_batch * (model.module.config.router_aux_loss_coef * len(output.logits))


def clip_gradients(model: ShardedModel, limit: float) -> Tensor:
    """The norm of all gradients together; they are scaled down to ``limit`` if it is larger (0: never)."""
    return clip_grad_norm_(model.module.parameters(), limit or float("inf"))


@torch.no_grad()
def evaluate(model: ShardedModel, batches: Batches, config: TrainConfig, ranks: Ranks) -> float:
    """Mean loss over the first ``eval_sequences`` sequences, the same ones each time."""
    count = min(config.eval.eval_sequences, batches.windows)
    at_once = config.data.batch // config.data.accumulate
    loss_sum = torch.zeros((), dtype=torch.float64, device=ranks.device)
    model.module.eval()
    for start in range(0, count, at_once):
        chunk = range(start, min(start + at_once, count))
        ids = _my_sequences(batches, 0, chunk, ranks)
        # A rank without a sequence still takes part in the gathers: it evaluates the first one, for nothing.
        mine = len(ids) > 0
        loss, _ = summed_losses(model, ids if mine else batches.sequences(range(1)).to(ranks.device))
        loss_sum += loss * mine
    model.module.train()
    return float(_sum_over_parts(loss_sum, ranks)) / (count * config.data.seq_len)


def _sum_over_parts(value: Tensor, ranks: Ranks) -> Tensor:
    """The sum of what the parts of the batch gave; ranks that share a part have the same value."""
    dist.all_reduce(value)
    return value * (ranks.data_parts / ranks.world_size)


def _my_sequences(batches: Batches, first_sample: int, part: range, ranks: Ranks) -> Tensor:
    """The sequences of ``part`` of a step that falls to this rank."""
    mine = share(len(part), ranks.data_parts, ranks.data_index)
    start = first_sample + part.start
    return batches.sequences(range(start + mine.start, start + mine.stop)).to(ranks.device)
