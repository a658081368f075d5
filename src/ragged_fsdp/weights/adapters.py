"""LoRA adapters as PEFT adds them to a model: what the weights are with them, and their names without.

A layer with adapters holds its own weight in ``base_layer``, beside it two thin matrices for each adapter. A
server wants one weight, ``W + scaling * B @ A``, under the name the layer had. Rows of it need the same rows
of ``B`` and all of ``A``, so whoever holds rows of a weight can compute them::

    ...q_proj.base_layer.weight   (out, in)      ->   ...q_proj.weight
    ...q_proj.lora_A.default.weight  (r, in)     ->   (nothing)
    ...q_proj.lora_B.default.weight  (out, r)    ->   (nothing)

Modules that PEFT trains as copies (``modules_to_save``) are sent in place of what they were copied from.

A folder of the plain model is loaded into ``base_layer`` and into copies as well as originals; a folder that
PEFT wrote of an adapter has ``base_model.model....q_proj.lora_A.weight``, without the adapter's name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ragged_fsdp.packing import value_meta
from ragged_fsdp.weights.names import plain_name
from ragged_fsdp.weights.targets import Target

__all__ = ["Adapters", "Addition", "added", "fresh"]

_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, eq=False)
class Addition:
    """What one adapter adds to a tensor: ``scaling * left @ right``, or ``scaling * left`` to a bias."""

    layer: Any
    adapter: str
    left: Tensor
    right: Tensor | None
    is_transposed: bool = False
    """Whether the weight is stored as (in, out), as embeddings are."""

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """The adapter's tensors, as the model holds them."""
        return (self.left,) if self.right is None else (self.left, self.right)

    def rows(self, whole: Sequence[Tensor], first: int, last: int) -> Tensor:
        """What is added to rows ``first`` to ``last``, given all of the factors; in fp32, or fp64."""
        left, *rest = (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in whole)
        scaling = float(self.layer.scaling[self.adapter])  # asked for each time: schedules change it
        if not rest:
            return left[first:last] * scaling
        right = rest[0]
        product = right[:, first:last].t() @ left.t() if self.is_transposed else left[first:last] @ right
        return product * scaling


def added(base: Tensor, whole: Sequence[tuple[Addition, Sequence[Tensor]]], start: int, width: int) -> Tensor:
    """A run of a tensor's elements with what its adapters add; ``start`` counts elements, a row ``width``.

    Rounded once, to the dtype of the tensor, however many elements a rank has.
    """
    first, last = start // width, -(-(start + base.numel()) // width)
    total = base.to(torch.promote_types(base.dtype, torch.float32))
    for addition, factors in whole:
        delta = addition.rows(factors, first, last).reshape(-1)
        total = total + delta[start - first * width :][: base.numel()]
    return total.to(base.dtype)


class Adapters:
    """The adapters of a model: names without them, and what is added to which tensor.

    ``merging=False`` looks at names alone, and takes adapters of any kind.
    """

    def __init__(self, model: nn.Module, *, merging: bool = True) -> None:
        self._merging = merging
        self.of: dict[int, tuple[Addition, ...]] = {}
        """By id of the model's tensor."""
        self.base: nn.Module = model
        """The model whose names are used outside."""
        self._prefix = ""
        self._layers: dict[str, list[str]] = {}
        """Layers with adapters: their names, and the adapters that are active."""
        self._copies: dict[str, str | None] = {}
        self._biases = {
            adapter: getattr(config, "bias", "none")
            for adapter, config in getattr(model, "peft_config", {}).items()
        }
        """Which biases of the model each adapter trains: none, all, or lora_only."""
        if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            self.base = model.get_base_model()  # type: ignore[operator]
            inside = next(name for name, module in model.named_modules() if module is self.base)
            self._prefix = plain_name(f"{inside}.") if inside else ""
        for name, module in model.named_modules():
            self._look_at(plain_name(f"{name}.")[:-1], module)

    def plain(self, name: str) -> str | None:
        """The name of a tensor in the model without adapters; None for what only the adapters have."""
        for path, kept in self._copies.items():
            if name.startswith(f"{path}."):
                if kept is None:
                    inside = f"{path}.original_module."
                else:
                    inside = f"{path}.modules_to_save.{kept}."
                if not name.startswith(inside):
                    return None
                name = f"{path}.{name.removeprefix(inside)}"
        return self._without_layers(name)

    def sent(self, target: Target) -> Target | None:
        """A tensor under its names in the model without adapters alone; None for what only adapters have.

        ``ValueError`` for an adapter of one of several names: what it adds is not what the others have.
        """
        kept = tuple(name for name in target.names if self.plain(name) is not None)
        if len(kept) > 1 and id(target.tensor) in self.of:
            added_to = self.of[id(target.tensor)][0].adapter
            raise ValueError(
                f"{kept[0]} and {kept[1]} are one tied weight, and the adapter {added_to!r} is of one layer: "
                "merged, it would change both; untie them before the adapter is added"
            )
        return Target(kept, target.tensor) if kept else None

    def loaded(self, name: str) -> str | None:
        """The name under which a folder of the model without adapters has a tensor; copies have it too."""
        for path in self._copies:
            if name.startswith(f"{path}."):
                kind, _, rest = name.removeprefix(f"{path}.").partition(".")
                name = f"{path}.{rest if kind == 'original_module' else rest.partition('.')[2]}"
        return self._without_layers(name)

    def in_adapter(self, name: str, which: str | None = None) -> str | None:
        """The name of a tensor in a folder of an adapter, by default the active one; None if it has none."""
        for path, kept in self._copies.items():
            inside = f"{path}.modules_to_save.{which or kept}."
            if name.startswith(inside):
                return f"{_PEFT_PREFIX}{path.removeprefix(self._prefix)}.{name.removeprefix(inside)}"
        for path, active in self._layers.items():
            kind, adapter, *rest = [*name.removeprefix(f"{path}.").split("."), ""]
            if (
                name.startswith(f"{path}.")
                and kind != "base_layer"
                and adapter in (active if which is None else (which,))
            ):
                own = ".".join([path.removeprefix(self._prefix), kind, *rest[:-1]])
                return f"{_PEFT_PREFIX}{own}"
        return f"{_PEFT_PREFIX}{name.removeprefix(self._prefix)}" if self._is_trained(name, which) else None

    def _is_trained(self, name: str, which: str | None) -> bool:
        """Whether it is a bias of the model that is trained, and stored, with an adapter."""
        kinds = {kind for adapter, kind in self._biases.items() if which in (None, adapter)}
        if any(name.startswith(f"{path}.") for path in self._copies):
            return False
        layer, _, own = name.rpartition(".base_layer.")
        of_a_layer = own == "bias" and layer in self._layers
        return ("lora_only" in kinds and of_a_layer) or ("all" in kinds and name.endswith("bias"))

    def _without_layers(self, name: str) -> str | None:
        for path in self._layers:  # outer ones first: a layer may lie in another's base_layer
            if name.startswith(f"{path}."):
                inside = f"{path}.base_layer."
                if not name.startswith(inside):
                    return None
                name = f"{path}.{name.removeprefix(inside)}"
        return name.removeprefix(self._prefix)

    def _look_at(self, name: str, module: Any) -> None:
        if hasattr(module, "original_module") and isinstance(
            getattr(module, "modules_to_save", None), nn.ModuleDict
        ):
            active = [a for a in _active(module) if a in module.modules_to_save]
            self._copies[name] = active[0] if active else None
            return
        is_lora = all(hasattr(module, own) for own in ("base_layer", "lora_A", "lora_B", "scaling"))
        if not is_lora:
            if not any(cls.__name__ == "BaseTunerLayer" for cls in type(module).__mro__):
                return
            if self._merging:
                raise ValueError(
                    f"{name}: adapters of {type(module).__name__} cannot be merged into a stream; only LoRA "
                    "of linear layers and embeddings can"
                )
        self._layers[name] = _active(module)
        if not self._merging:
            return
        merged = set(getattr(module, "merged_adapters", ()))
        for adapter in _active(module):
            if adapter not in merged:
                self._add(name, module, adapter)

    def _add(self, name: str, layer: Any, adapter: str) -> None:
        embeds = adapter in getattr(layer, "lora_embedding_A", ())
        if not embeds and adapter not in layer.lora_A:
            return
        weight = getattr(layer.base_layer, "weight", None)
        if adapter in getattr(layer, "lora_variant", ()) or not isinstance(weight, Tensor):
            raise ValueError(
                f"{name}: the adapter {adapter!r} is no plain LoRA of a weight; merge it before streaming"
            )
        if embeds:
            right, left = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
        else:
            right, left = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        is_transposed = embeds or bool(getattr(layer, "fan_in_fan_out", False))
        shape = (left.shape[0], right.shape[-1])
        expected = shape[::-1] if is_transposed else shape
        held, dtype = value_meta(weight)
        if left.ndim != 2 or right.ndim != 2 or tuple(held) != expected:
            raise ValueError(
                f"{name}: the adapter {adapter!r} makes a matrix of shape {expected}, which cannot be added "
                f"to a weight of shape {tuple(held)}; only LoRA of linear layers and embeddings can "
                "be merged into a stream"
            )
        if not dtype.is_floating_point or dtype.itemsize == 1:
            raise ValueError(f"{name}: an adapter cannot be added to a weight of {dtype}")
        self._note(weight, Addition(layer, adapter, left, right, is_transposed))
        bias = None if embeds else getattr(layer.lora_B[adapter], "bias", None)
        if bias is not None:
            if getattr(layer.base_layer, "bias", None) is None:
                raise ValueError(f"{name}: the adapter {adapter!r} has a bias, the layer has none")
            self._note(layer.base_layer.bias, Addition(layer, adapter, bias, None))

    def _note(self, tensor: Tensor, addition: Addition) -> None:
        self.of[id(tensor)] = (*self.of.get(id(tensor), ()), addition)


def _active(module: Any) -> list[str]:
    """The adapters that a module computes with."""
    if getattr(module, "disable_adapters", False) is True:
        return []
    active = module.active_adapters
    return [active] if isinstance(active, str) else list(active)


def fresh(name: str, shape: tuple[int, ...]) -> Tensor | None:
    """The first values of an adapter's tensor, as PEFT's own are made; None for one that is not LoRA's.

    Drawn from the name: the same on every rank, and on any number of them.
    """
    kind = next((part for part in name.split(".") if part.startswith("lora_")), "")
    if kind in ("lora_B", "lora_embedding_A"):  # one of the two is zero: an adapter begins with no effect
        return torch.zeros(shape)
    if kind not in ("lora_A", "lora_embedding_B"):
        return None
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]))
    if kind == "lora_embedding_B":
        return torch.randn(shape, generator=generator)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
