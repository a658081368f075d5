"""Hugging Face's causal language models: built on the meta device, by config class or from a local folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ragged_fsdp.models.hf_parallel import attention_split, tensor_split
from ragged_fsdp.models.materialize import InitModule
from ragged_fsdp.models.names import nearest
from ragged_fsdp.models.published import PUBLISHED
from ragged_fsdp.models.source import ModelSource

__all__ = ["find_hugging_face", "model_from_settings"]


def find_hugging_face(name: str, changes: Mapping[str, str], *, random_weights: bool) -> ModelSource:
    """The source for a published model, a config class such as ``LlamaConfig``, or a folder with a config."""
    folder = Path(name) if Path(name).is_dir() else None
    config = _config(name, folder, changes)
    config.use_cache = False  # training never continues a sequence

    text = config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    has_weights = folder is not None and any(folder.glob("*.safetensors"))
    return ModelSource(
        name=name,
        build=lambda: _on_meta(config),
        init_with=_init_with,
        vocab_size=text.vocab_size,
        layers=text.num_hidden_layers,
        attention_width=heads * head_dim,
        settings={"family": "transformers", **json.loads(config.to_json_string(use_diff=False))},
        tp=tensor_split(config),
        tp_beside_ep=attention_split(config),
        weights=folder if has_weights and not random_weights else None,
        positions=getattr(text, "max_position_embeddings", None),
        rotary=any(hasattr(text, name) for name in ("rope_parameters", "rope_theta", "rope_scaling")),
    )


def _config(name: str, folder: Path | None, changes: Mapping[str, str]) -> PretrainedConfig:
    """The config with its changes; fields that follow from others (a list of layers) do so."""
    if folder is not None:
        if not (folder / "config.json").exists():
            raise ValueError(f"model = {name!r}: the folder has no config.json")
        try:  # code that a folder brings along is not run, and nobody is asked whether it should be
            stored = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the library raises errors of several kinds
            raise ValueError(f"model = {name!r}: transformers cannot read its config: {error}") from error
        cls, values = type(stored), stored.to_dict()
    elif name in PUBLISHED:
        values = {**PUBLISHED[name]}
        cls = type(AutoConfig.for_model(values.pop("model_type")))
    else:
        cls, values = _config_class(name), {}
    values.update(_parsed(cls(), changes))
    try:
        config = cls(**values)
        config.validate()
    except Exception as error:  # the library's validators raise errors of several kinds
        raise ValueError(f"model = {name!r} with {dict(changes)}: {error}") from error
    return config


def _config_class(name: str) -> type[PretrainedConfig]:
    known = {cls.__name__: cls for cls in AutoModelForCausalLM._model_mapping}
    if name in known:
        return known[name]
    raise ValueError(
        f"model = {name!r}: transformers {transformers.__version__} has no causal language model with this "
        f"config class; {nearest(name, known)}"
    )


def _parsed(config: PretrainedConfig, changes: Mapping[str, str]) -> dict[str, Any]:
    """Values from texts, as JSON where it is JSON; only for fields that the config knows."""
    fields = {key for key in config.to_dict() if not key.startswith("_")}
    fields |= {*config.attribute_map, "head_dim"}  # aliases; and what models read whether it is set or not
    values: dict[str, Any] = {}
    for key, text in changes.items():
        if key not in fields:
            unknown = f"model_set {key}={text}: unknown field of {type(config).__name__}"
            raise ValueError(f"{unknown}; {nearest(key, fields)}")
        try:
            values[key] = json.loads(text)
        except json.JSONDecodeError:
            values[key] = text
    return values


def _init_with(model: nn.Module) -> InitModule:
    """The library's own initial values for a module, drawn from the given generator's seed."""

    def init_module(module: nn.Module, generator: torch.Generator) -> None:
        devices = [generator.device] if generator.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(generator.initial_seed())
            init: Any = model._init_weights
            init(module)

    return init_module


def model_from_settings(settings: dict[str, Any]) -> nn.Module:
    """A model on the meta device from the values of its ``config.json``."""
    return _on_meta(AutoConfig.for_model(**settings))


def _on_meta(config: PretrainedConfig) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
