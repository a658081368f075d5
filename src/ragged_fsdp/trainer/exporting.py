"""A checkpoint as safetensors under the names its model's library uses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragged_fsdp.checkpoint.contents import CheckpointReader, StoredTensor
from ragged_fsdp.checkpoint.safetensors_writer import TensorToWrite, write_safetensors
from ragged_fsdp.weights.names import hugging_face_naming

__all__ = ["export"]

TakeApart = Callable[[str, Tensor], dict[str, Tensor]]
"""Name and value of a model's tensor to names and values in the file."""

_PREFIX = "model."


def export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 2**30,
    on_tensor: Callable[[str], None] = lambda name: None,
) -> list[Path]:
    """Write the model in ``checkpoint`` to ``out``; memory holds one of its tensors at a time.

    ``dtype`` converts floating-point tensors; ``on_tensor`` is told the name of each as it is written.
    """
    reader = CheckpointReader(checkpoint)
    stored = {t.name.removeprefix(_PREFIX): t for t in reader.tensors(_PREFIX)}
    if not stored:
        raise ValueError(f"{checkpoint} holds no 'model.*' tensors")
    take_apart, config = _conversion(reader.info.get("model", {}))

    def converted(name: str, value: Tensor) -> dict[str, Tensor]:
        parts = take_apart(name, value)
        return {
            k: v.to(dtype) if dtype is not None and v.is_floating_point() else v for k, v in parts.items()
        }

    def read_group(name: str) -> dict[str, Tensor]:
        on_tensor(name)
        return converted(name, reader.load(stored[name]))

    planned = [tensor for name, source in stored.items() for tensor in _plan(name, source, converted)]
    files = write_safetensors(out, planned, read_group, max_file_bytes=max_file_bytes)
    if config:
        (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    return files


def _plan(name: str, source: StoredTensor, converted: TakeApart) -> list[TensorToWrite]:
    """What a stored tensor will become, found out on the meta device."""
    parts = converted(name, torch.empty(source.shape, dtype=source.dtype, device="meta"))
    return [TensorToWrite(k, tuple(v.shape), v.dtype, group=name) for k, v in parts.items()]


def _conversion(settings: dict[str, Any]) -> tuple[TakeApart, dict[str, Any]]:
    """How the model's library names and cuts its tensors, and its ``config.json``."""
    config = dict(settings)
    if config.pop("family", None) != "transformers":
        return (lambda name, value: {name: value}), settings
    from ragged_fsdp.models.huggingface import model_from_settings

    naming: Any = hugging_face_naming(model_from_settings(config))
    return naming, config
