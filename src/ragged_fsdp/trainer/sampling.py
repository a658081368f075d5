"""A sample of the trained model's text."""

from collections.abc import Callable

import torch
from torch import Tensor

from ragged_fsdp.trainer.config import TrainConfig
from ragged_fsdp.trainer.ranks import Ranks
from ragged_fsdp.trainer.sharding import ShardedModel
from ragged_fsdp.trainer.tokenizers import Tokenizer

__all__ = ["sample_text", "sample_tokens"]


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


@torch.no_grad()
def sample_tokens(
    logits_of: Callable[[Tensor], Tensor],
    prompt: Tensor,
    count: int,
    *,
    context: int,
    temperature: float,
    seed: int,
) -> Tensor:
    """``prompt`` (T,) followed by ``count`` tokens, each sampled from what follows those before it.

    ``logits_of`` maps (1, T) token ids to (1, T, vocab). Every rank of a sharded model calls this
    together; the generator is seeded, so all of them make the same steps. Temperature 0 is greedy.
    """
    generator = torch.Generator(device=prompt.device).manual_seed(seed)
    tokens = prompt
    for _ in range(count):
        logits = logits_of(tokens[-context:].unsqueeze(0))[0, -1].float()
        if temperature == 0:
            chosen = logits.argmax().view(1)
        else:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, chosen.to(tokens.dtype)))
    return tokens
