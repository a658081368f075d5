"""Between the tensors a model holds and those that files, or an inference engine, know.

A *naming* is a function of a model tensor's name and the tensor. It returns the one name the tensor has
outside, or its parts: names with views of the tensor. Given a tensor without memory it tells where each part
lies, by offset and strides; given a gathered one it gives the parts themselves, without a copy::

    experts.gate_up_proj (2, 6, 4)   ->   experts.0.gate.weight  t[0, :3]      offset  0, strides (4, 1)
                                          experts.0.up.weight    t[0, 3:]      offset 12
                                          experts.1.gate.weight  t[1, :3]      offset 24
                                          ...

A Hugging Face model has a naming of its own: the inverse of what ``from_pretrained`` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ragged_fsdp.torch_internals import base_of

__all__ = [
    "Naming",
    "OutsidePart",
    "Stored",
    "View",
    "default_naming",
    "hugging_face_naming",
    "ignored_unexpected",
    "parts_of",
    "plain_name",
]

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")  # activation checkpointing, torch.compile


def plain_name(name: str) -> str:
    """``layers.0._checkpoint_wrapped_module.norm.weight`` is ``layers.0.norm.weight``."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass(frozen=True, eq=False)
class Stored:
    """A part of a stored tensor, as indexing gives it: ``Stored("experts.gate_up", (3, slice(0, 768)))``."""

    name: str
    index: Any = ()


Naming = Callable[[str, Tensor], "str | Mapping[Any, Tensor]"]
"""Name and tensor of a model to its outside name, or to parts: by :class:`Stored` or name, a view of it."""


@dataclass(frozen=True)
class View:
    """Elements of a contiguous tensor: the offset of the first, sizes, and strides between them."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """Where a tensor lies in its base, which begins at its storage."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


@dataclass(frozen=True)
class OutsidePart:
    """One outside tensor, or an indexed part of one, that a model tensor is made of."""

    stored: str
    index: Any
    view: View | None
    """Where it lies in the model's tensor; None if it is computed from it in some other way."""
    shape: tuple[int, ...]


class _CopiesAreViews(TorchFunctionMode):
    """Within it ``contiguous`` and ``clone`` return the tensor itself, so that strides say where it lies."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.contiguous, Tensor.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def parts_of(naming: Naming, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[OutsidePart]:
    """The outside parts of a model tensor, found out on a tensor without memory."""
    probe = torch.empty(shape, dtype=dtype, device="meta")
    with _CopiesAreViews():
        given = naming(name, probe)
    if isinstance(given, str):
        return [OutsidePart(given, (), View.of(probe), shape)]
    if not isinstance(given, Mapping) or not all(isinstance(value, Tensor) for value in given.values()):
        raise TypeError(f"{name}: a naming returns a name or a mapping to tensors, got {given!r}.")
    parts = []
    for key, value in given.items():
        stored = key if isinstance(key, Stored) else Stored(key)
        is_view = value is probe or base_of(value) is probe
        parts.append(
            OutsidePart(stored.name, stored.index, View.of(value) if is_view else None, tuple(value.shape))
        )
    return parts


def default_naming(model: nn.Module, names: Naming | Mapping[str, str] | None) -> Naming:
    """What ``names=`` means: a naming, a table of names (others keep theirs), or the model's own naming."""
    if callable(names):
        return names
    if isinstance(names, Mapping):
        table = dict(names)
        return lambda name, tensor: table.get(name, name)
    if names is not None:
        raise TypeError(f"names must be a function, a mapping or None, got {type(names).__name__}.")
    if _is_hugging_face(model):
        return hugging_face_naming(model)
    return lambda name, tensor: name


def hugging_face_naming(model: nn.Module) -> Naming:
    """The names and parts under which transformers stores the model's tensors.

    Since transformers 5 a model may hold several stored tensors as one (all experts of a layer) and knows how
    to take them apart when it is saved.
    """
    from transformers.core_model_loading import revert_weight_conversion

    def naming(name: str, tensor: Tensor) -> Mapping[Any, Tensor]:
        return revert_weight_conversion(model, {name: tensor})  # type: ignore[arg-type]

    return naming


def _is_hugging_face(model: nn.Module) -> bool:
    return hasattr(model, "config") and any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.")
        for cls in type(model).__mro__
    )


def ignored_unexpected(model: nn.Module) -> Callable[[str], bool]:
    """Whether the model's library says that a stored tensor is not for the model."""
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    return lambda name: any(re.search(pattern, name) for pattern in patterns)
