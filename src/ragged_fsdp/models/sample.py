"""Text from a model: plain ancestral sampling, the same tokens on every rank."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["sample_tokens"]


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
    """``prompt`` (T,) followed by ``count`` sampled tokens.

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
