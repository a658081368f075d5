"""Models to train: our own small mixture-of-experts transformer, and Hugging Face's causal LMs."""

from ragged_fsdp.models.config import BUILT_IN_SIZES, MoEConfig
from ragged_fsdp.models.moe import MoEOutput, MoETransformer

__all__ = ["BUILT_IN_SIZES", "MoEConfig", "MoEOutput", "MoETransformer"]
