"""A checkpoint as safetensors under the names its model's library uses."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragged_fsdp.checkpoint.contents import CheckpointReader, StoredTensor
from ragged_fsdp.checkpoint.place import AnyPath
from ragged_fsdp.checkpoint.safetensors_writer import TensorToWrite, write_safetensors
from ragged_fsdp.weights.codes import block_fp8, coded
from ragged_fsdp.weights.names import hugging_face_naming
from ragged_fsdp.weights.saving import copy_serving, new_folder
from ragged_fsdp.weights.targets import targets_of

__all__ = ["export"]

TakeApart = Callable[[str, Tensor], dict[str, Tensor]]
"""Name and value of a model's tensor to names and values in the file."""

_PREFIX = "model."
_QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
"""What transformers, vLLM and SGLang read of such a folder."""


def export(
    checkpoint: AnyPath,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    fp8: bool = False,
    max_file_bytes: int = 5 * 2**30,
    overwrite: bool = False,
    on_tensor: Callable[[str], None] = lambda name: None,
) -> list[Path]:
    """Write the model in ``checkpoint`` to the new folder ``out``; memory holds one of its tensors at a time.

    ``dtype`` converts floating-point tensors. With ``fp8`` matrices are written as DeepSeek-V3's are, codes
    and a ``weight_scale_inv`` per block, from the weights as they are stored: the bits that FP8 training
    computed with. ``on_tensor`` is told the name of each as it is written. Beside
    the weights lies what a server needs: the config, and tokenizer and generation settings of the folder that
    the run started from. The folder appears under its name when it is complete; one that is there is refused,
    or replaced with ``overwrite``.
    """
    reader = CheckpointReader(checkpoint)
    stored = {t.name.removeprefix(_PREFIX): t for t in reader.tensors(_PREFIX)}
    if not stored:
        raise ValueError(f"{checkpoint} holds no 'model.*' tensors")
    origin = _origin(reader.info)
    take_apart, config, tied = _conversion(reader.info.get("model", {}), origin)
    for name in tied & stored.keys():
        del stored[name]

    is_coded = coded("fp8") if fp8 else None

    def converted(name: str, value: Tensor) -> dict[str, Tensor]:
        made = {}
        for key, part in take_apart(name, value).items():
            if is_coded is not None and is_coded(key, tuple(part.shape)):
                made[key], made[f"{key}_scale_inv"] = block_fp8(part)
            else:
                made[key] = part.to(dtype) if dtype is not None and part.is_floating_point() else part
        return made

    def values() -> Iterator[tuple[str, Tensor]]:
        for name, source in stored.items():
            on_tensor(name)
            yield from converted(name, reader.load(source)).items()

    planned = [tensor for name, source in stored.items() for tensor in _plan(name, source, converted)]
    with new_folder(out, overwrite=overwrite) as writing:
        files = write_safetensors(writing, planned, values(), max_file_bytes=max_file_bytes)
        if config:
            if dtype is not None:
                config["dtype"] = str(dtype).removeprefix("torch.")
            if fp8:
                config["quantization_config"] = _QUANTIZATION
            (writing / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
        if origin is not None:
            copy_serving(origin, writing)
    return [out / file.name for file in files]


def _origin(info: dict[str, Any]) -> Path | None:
    """The Hugging Face folder that the run started from, if it is still there."""
    name = info.get("config", {}).get("model", {}).get("model", "")
    return Path(name) if name and (Path(name) / "config.json").is_file() else None


def _plan(name: str, source: StoredTensor, converted: TakeApart) -> list[TensorToWrite]:
    """What a stored tensor will become, found out on the meta device."""
    parts = converted(name, torch.empty(source.shape, dtype=source.dtype, device="meta"))
    return [TensorToWrite(k, tuple(v.shape), v.dtype) for k, v in parts.items()]


def _conversion(settings: dict[str, Any], origin: Path | None) -> tuple[TakeApart, dict[str, Any], set[str]]:
    """How the model's library names and cuts its tensors, its ``config.json``, and names of tied tensors
    that are stored under another."""
    config = dict(settings)
    if config.pop("family", None) != "transformers":
        return (lambda name, value: {name: value}), settings, set()
    from ragged_fsdp.models.huggingface import model_from_settings

    twin = model_from_settings(config)
    naming: Any = hugging_face_naming(twin)
    # training switched it off: a server continues sequences, as the folder says or as the library does
    config.pop("use_cache", None)
    if origin is not None:
        given = json.loads((origin / "config.json").read_text(encoding="utf-8"))
        config.update({"use_cache": given["use_cache"]} if "use_cache" in given else {})
    return naming, config, {name for target in targets_of(twin) for name in target.names[1:]}
