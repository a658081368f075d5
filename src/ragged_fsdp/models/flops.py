"""How much arithmetic one token costs, for MFU."""

from collections.abc import Iterable

from torch import nn

__all__ = ["active_parameters", "flops_per_token"]


def active_parameters(
    shapes: Iterable[tuple[str, tuple[int, ...]]], experts: int, experts_per_token: int
) -> int:
    """Parameters that a token meets in a matrix product.

    A tensor of three dimensions led by the number of experts holds all experts of a layer, of which a
    token uses ``experts_per_token``; so does a name with an ``experts.<index>`` part. Vectors (norms,
    biases, also one for each expert) do not count.
    """
    total = 0.0
    for name, shape in shapes:
        if len(shape) < 2 or name.endswith("bias"):
            continue
        numel = 1
        for length in shape:
            numel *= length
        fused = len(shape) == 3 and shape[0] == experts
        total += numel * (experts_per_token / experts if fused or ".experts." in name else 1.0)
    return round(total)


def flops_per_token(model: nn.Module, *, layers: int, attention_width: int, seq_len: int) -> float:
    """Forward and backward FLOPs of one token: 6 per active parameter, plus causal attention.

    A frozen parameter has 4, as its own gradient is not computed.

    Attention multiplies queries with keys and weights with values, 2 * 2 FLOPs per channel and
    visible position, over half the positions on average, three times (one forward, two backward).
    Embeddings are looked up, not multiplied; a head that is tied to one is.
    """
    config = getattr(model, "config", None)
    experts = _first(config, ("experts", "num_local_experts", "num_experts", "n_routed_experts"), 1)
    chosen = _first(config, ("experts_per_token", "num_experts_per_tok"), experts)
    looked_up = tuple(
        f"{name}." for name, module in model.named_modules() if isinstance(module, nn.Embedding)
    )
    named = model.named_parameters(remove_duplicate=False)
    used = [(name, p) for name, p in named if not name.startswith(looked_up)]
    matrix = 0
    for trains, cost in ((True, 6), (False, 4)):
        shapes = [(name, tuple(p.shape)) for name, p in used if p.requires_grad is trains]
        matrix += cost * active_parameters(shapes, experts, chosen)
    return float(matrix + 3 * 4 * layers * attention_width * seq_len / 2)


def _first(config: object, names: tuple[str, ...], default: int) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return default
