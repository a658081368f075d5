"""A model by name: one of our sizes, a published model, a Hugging Face config class, or a local folder.

The first part of every path is the same: :class:`ModelSource` builds the model on the meta device, as
often as asked, and knows how to give one module its initial values.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import nn

from ragged_fsdp.models.config import BUILT_IN_SIZES, MoEConfig
from ragged_fsdp.models.materialize import InitModule
from ragged_fsdp.models.moe import MoETransformer
from ragged_fsdp.models.moe_parallel import (
    SPLIT_ATTENTION,
    SPLIT_TENSORS,
    split_attention,
    split_tensors,
)
from ragged_fsdp.models.names import nearest
from ragged_fsdp.models.published import PUBLISHED, published_name
from ragged_fsdp.models.splits import Split

__all__ = ["ModelSource", "find_model"]


@dataclass(frozen=True)
class ModelSource:
    """How to make a model, and what the trainer must know about it."""

    name: str
    build: Callable[[], nn.Module]
    """A new model on the meta device."""
    init_with: Callable[[nn.Module], InitModule]
    """Given a meta model, the function that initialises one of its modules."""
    vocab_size: int
    layers: int
    attention_width: int
    """Channels of all query heads together, for counting FLOPs."""
    settings: dict[str, Any]
    """The model's config as plain values, saved with every checkpoint."""
    tp: Split | str
    """How tensor parallelism splits the model, or why it cannot."""
    tp_beside_ep: Split | str
    """How tensor parallelism splits what is not experts, or why it cannot."""
    weights: Path | None = None
    """A folder of safetensors to start from, or None for random initial values."""
    positions: int | None = None
    """The longest sequence that the model was made for; None without a limit."""
    rotary: bool = True
    """Whether it can compute with longer ones: positions are angles, not rows of a table."""


def find_model(name: str, changes: Mapping[str, str], *, random_weights: bool = False) -> ModelSource:
    """The source for a model's name, with fields of its config changed; ``ValueError`` if unknown."""
    if name in BUILT_IN_SIZES:
        return _built_in(name, changes)
    name = published_name(name) or name
    like_a_class = name[:1].isupper() and name.isidentifier()  # misspelt: the nearest class is named
    if name in PUBLISHED or like_a_class or Path(name).is_dir():
        if importlib.util.find_spec("transformers") is None:
            raise ValueError(f"model = {name!r}: needs transformers; in a checkout: pip install '.[hf]'")
        from ragged_fsdp.models.huggingface import find_hugging_face

        return find_hugging_face(name, changes, random_weights=random_weights)
    raise ValueError(
        f"model = {name!r}: not a built-in size, a published model, a Hugging Face config class or a local "
        f"folder; {nearest(name, [*BUILT_IN_SIZES, *PUBLISHED])}"
    )


def _built_in(name: str, changes: Mapping[str, str]) -> ModelSource:
    config = replace(BUILT_IN_SIZES[name], **_typed(changes))

    def build() -> MoETransformer:
        with torch.device("meta"):
            return MoETransformer(config)

    heads = {"heads": config.heads, "kv_heads": config.kv_heads}
    return ModelSource(
        name=name,
        build=build,
        init_with=_own_init,
        vocab_size=config.vocab_size,
        layers=config.layers,
        attention_width=config.hidden,
        settings={"family": "ragged_fsdp.MoETransformer", **vars(config)},
        tp=Split(split_tensors, heads | {"experts": config.experts}, SPLIT_TENSORS),
        tp_beside_ep=Split(split_attention, heads, SPLIT_ATTENTION),
    )


def _own_init(model: nn.Module) -> InitModule:
    assert isinstance(model, MoETransformer)
    return model.init_module


def _typed(changes: Mapping[str, str]) -> dict[str, Any]:
    """Texts to the types of the fields they change."""
    hints = get_type_hints(MoEConfig)
    names = [field.name for field in fields(MoEConfig)]
    typed: dict[str, Any] = {}
    for key, text in changes.items():
        if key not in names:
            raise ValueError(f"model_set {key}={text}: unknown field; {nearest(key, names)}")
        try:
            typed[key] = (
                {"true": True, "false": False}[text.lower()] if hints[key] is bool else hints[key](text)
            )
        except (KeyError, ValueError):
            raise ValueError(f"model_set {key}={text}: expected {hints[key].__name__}") from None
    return typed
