"""Starting from the safetensors of a local Hugging Face folder, one parameter at a time."""

import contextlib
import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ragged_fsdp.models.hf_names import stored_parts
from ragged_fsdp.models.materialize import copy_full
from ragged_fsdp.models.names import plain_name

__all__ = ["load_weights"]


def load_weights(model: nn.Module, twin: nn.Module, folder: Path) -> None:
    """Give the sharded ``model`` the weights stored in ``folder``; ``twin`` is the same model on meta.

    Each rank reads a parameter in full, keeps its part and drops the rest. Raises ``ValueError`` naming
    what is missing or of another shape, before anything is changed.
    """
    files = _files_by_name(folder)
    parts = stored_parts(twin)
    for name, part in parts.items():
        for stored in part.shapes:
            if stored not in files:
                raise ValueError(f"{folder} has no tensor {stored!r}, needed for the model's {name!r}")
    held = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    targets = {plain_name(name): tensor for name, tensor in held}
    with contextlib.ExitStack() as stack:
        opened = {p: stack.enter_context(safe_open(p, framework="pt")) for p in set(files.values())}

        def read(name: str) -> Tensor:
            return opened[files[name]].get_tensor(name)

        for name, part in parts.items():
            target = targets[name]
            full = torch.empty(target.shape, dtype=target.dtype)
            part.assemble(full, read)
            copy_full(target, full.to(target.device))


def _files_by_name(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor: from the index file, or by asking the files."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found.update(dict.fromkeys(opened.keys(), file))
    return found
