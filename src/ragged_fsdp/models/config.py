"""The shape of our mixture-of-experts transformer, and the sizes that have a name."""

from dataclasses import dataclass, fields

__all__ = ["BUILT_IN_SIZES", "MoEConfig"]


@dataclass(frozen=True)
class MoEConfig:
    """Everything that decides the parameters of a :class:`~ragged_fsdp.models.moe.MoETransformer`."""

    vocab_size: int = 256
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    experts: int = 8
    experts_per_token: int = 2
    expert_hidden: int = 128
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    balance_weight: float = 0.01
    """Weight of the load-balancing loss of the router; 0 turns it off."""
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and (not isinstance(value, int) or value < 1):
                raise ValueError(f"model {field.name}: expected a positive integer, got {value!r}")
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(
                f"model hidden {self.hidden} over {self.heads} heads: each head needs an even, whole "
                f"number of channels; use a multiple of {2 * self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"model kv_heads {self.kv_heads} must divide heads {self.heads}")
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"model experts_per_token {self.experts_per_token} is more than the {self.experts} experts"
            )

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden // self.heads


BUILT_IN_SIZES: dict[str, MoEConfig] = {
    "nano": MoEConfig(hidden=32, layers=2, heads=2, kv_heads=1, experts=4, expert_hidden=32),
    "demo": MoEConfig(hidden=128, layers=4, heads=4, kv_heads=2, experts=8, expert_hidden=128),
    "small": MoEConfig(hidden=512, layers=8, heads=8, kv_heads=2, experts=16, expert_hidden=512),
    "medium": MoEConfig(
        hidden=1024, layers=16, heads=16, kv_heads=4, experts=32, experts_per_token=4, expert_hidden=1024
    ),
    "large": MoEConfig(
        hidden=2880, layers=24, heads=45, kv_heads=9, experts=32, experts_per_token=4, expert_hidden=2880
    ),
}
"""Names accepted by ``--model``; ``large`` has the experts of GPT-OSS-20B."""
