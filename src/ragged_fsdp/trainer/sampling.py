"""A sample of the trained model's text."""

import torch

from ragged_fsdp.models.sample import sample_tokens
from ragged_fsdp.trainer.config import TrainConfig
from ragged_fsdp.trainer.ranks import Ranks
from ragged_fsdp.trainer.sharding import ShardedModel
from ragged_fsdp.trainer.tokenizers import Tokenizer

__all__ = ["sample_text"]


def sample_text(model: ShardedModel, tokenizer: Tokenizer, config: TrainConfig, ranks: Ranks) -> str:
    """The prompt and what the model makes of it; every rank takes part."""
    prompt = torch.tensor(tokenizer.encode(config.eval.sample_prompt) or [0], device=ranks.device)
    model.module.eval()
    with model.gathered():
        tokens = sample_tokens(
            lambda ids: model(ids).logits,  # type: ignore[attr-defined]
            prompt,
            config.eval.sample_tokens,
            context=config.data.seq_len,
            temperature=config.eval.temperature,
            seed=config.run.seed,
        )
    model.module.train()
    return tokenizer.decode(tokens.tolist())
