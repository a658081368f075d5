"""The part of a model that must be looked at to know all of it: one layer of each kind, and the rest.

A deep model is a few kinds of layers, many times each. :func:`workload_of` builds it on the meta device, as
``train`` does, and leaves one layer of each kind; :class:`Phases` tells, while such a model runs, whose
forward or backward is running.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragged_fsdp.experts.layers import in_one_kernel
from ragged_fsdp.models.flops import flops_per_token
from ragged_fsdp.models.moe import Experts, at_least_float32
from ragged_fsdp.models.source import ModelSource, find_model
from ragged_fsdp.models.splits import Split
from ragged_fsdp.trainer.sharding import transformer_layers

__all__ = ["ROOT", "LayerKind", "Phases", "Workload", "kinds_of", "workload_of"]

ROOT = "root"
"""The kind of what is outside the layers: embedding, last norm, head and loss."""


@dataclass(frozen=True)
class LayerKind:
    """Layers of a model that are equal but for their place."""

    name: str
    signature: str
    """Tells layers apart that compute different things; the same in every process."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    places: tuple[int, ...]
    """Which layers of the model they are; of the root none."""

    @property
    def sort(self) -> str:
        """One of the sorts of a card."""
        if self.name == ROOT:
            return ROOT
        fused = any(len(shape) == 3 or ".experts." in f".{name}" for name, shape in self.shapes)
        return "experts" if fused else "dense"

    @property
    def numel(self) -> int:
        return sum(torch.Size(shape).numel() for _, shape in self.shapes)

    @property
    def count(self) -> int:
        return len(self.places) if self.name != ROOT else 1


@dataclass(frozen=True)
class Workload:
    """A model with one layer of each kind, and how to run it on so many sequences."""

    name: str
    kinds: tuple[LayerKind, ...]
    """The kinds of layers in the order of their first appearance, then the root."""
    order: tuple[int, ...]
    """For each layer of the whole model, which of the kinds it is."""
    build: Callable[[], nn.Module]
    """A new model on the meta device with one layer of each kind, in bf16."""
    layers: Callable[[nn.Module], nn.ModuleList]
    loss: Callable[[nn.Module, int, int, torch.device], Tensor]
    """Forward: the model, sequences, tokens of a sequence, device."""
    flops_per_token: Callable[[int], float]
    """Operations of the whole model, forward and backward, by tokens of a sequence; what MFU counts."""
    width: int = 0
    """Channels of a token between layers, and how many experts it visits: what expert parallelism sends."""
    experts_per_token: int = 0
    tp: Split | str = field(default="not known for this model", compare=False)
    """How tensor parallelism splits it, or why it cannot."""

    @property
    def numel(self) -> int:
        return sum(kind.numel * kind.count for kind in self.kinds)


def workload_of(name: str, changes: Mapping[str, str] | None = None) -> Workload:
    """The workload of a model by any name that ``train --model`` takes."""
    source = find_model(name, changes or {}, random_weights=True)
    whole = source.build()
    kinds, order = kinds_of(whole, transformer_layers(whole))

    def build() -> nn.Module:
        model = source.build().to(torch.bfloat16)
        layers = transformer_layers(model)
        kept = [layers[kind.places[0]] for kind in kinds[:-1]]
        del layers[:]
        layers.extend(kept)
        for module in model.modules():
            if isinstance(module, Experts):
                vars(module)["apply_to_groups"] = partial(_apply_in_one_kernel, module)
        return model

    def flops(seq_len: int) -> float:
        shape = {"layers": source.layers, "attention_width": source.attention_width}
        return flops_per_token(whole, **shape, seq_len=seq_len)

    config = getattr(whole, "config", None)
    width = _first(config, ("hidden_size", "hidden"))
    chosen = _first(config, ("num_experts_per_tok", "experts_per_token"))
    loss = _loss_of(source)
    return Workload(
        source.name, kinds, order, build, transformer_layers, loss, flops, width, chosen, source.tp
    )


def _first(config: Any, names: tuple[str, ...]) -> int:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)


def _loss_of(source: ModelSource) -> Callable[[nn.Module, int, int, torch.device], Tensor]:
    def loss(model: nn.Module, sequences: int, seq_len: int, device: torch.device) -> Tensor:
        ids = torch.randint(source.vocab_size, (sequences, seq_len), device=device)
        logits = at_least_float32(model(ids).logits.flatten(0, 1))
        return F.cross_entropy(logits, ids.flatten(), reduction="sum") / ids.numel()

    return loss


def _apply_in_one_kernel(experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
    """What a GPU does for its experts; it never asks how many rows an expert has, which is not known."""
    gate, up = in_one_kernel(rows, experts.gate_up_proj, counts).chunk(2, dim=-1)
    return in_one_kernel(F.silu(gate) * up, experts.down_proj, counts)


def kinds_of(model: nn.Module, layers: nn.ModuleList) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """The kinds of ``layers`` and the root, and which kind each layer is."""
    config = getattr(model, "config", None)
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    found: dict[str, list[int]] = {}
    shapes: dict[str, tuple[tuple[str, tuple[int, ...]], ...]] = {}
    for place, layer in enumerate(layers):
        signature, shape = _signature(layer, layer.named_parameters(), types[place])
        found.setdefault(signature, []).append(place)
        shapes[signature] = shape
    inside = {id(parameter) for parameter in layers.parameters()}
    rest = ((name, p) for name, p in model.named_parameters() if id(p) not in inside)
    root, root_shapes = _signature(model, rest, "")
    kinds = [
        LayerKind(f"layers {_ranges(places)}", signature, shapes[signature], tuple(places))
        for signature, places in found.items()
    ]
    kind_of_place = {place: index for index, places in enumerate(found.values()) for place in places}
    order = tuple(kind_of_place[place] for place in range(len(layers)))
    return (*kinds, LayerKind(ROOT, root, root_shapes, ())), order


def _signature(
    module: nn.Module, parameters: Iterator[tuple[str, nn.Parameter]], variant: str
) -> tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]:
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in parameters)
    text = f"{type(module).__name__} {variant} {shapes}"
    return hashlib.sha256(text.encode()).hexdigest()[:16], shapes


def _ranges(places: list[int]) -> str:
    """``0-2, 5``; many ranges (every second layer) by their first and last place and their number."""
    ranges: list[list[int]] = []
    for place in places:
        if ranges and ranges[-1][1] == place - 1:
            ranges[-1][1] = place
        else:
            ranges.append([place, place])
    if len(ranges) > 3:
        return f"{places[0]}..{places[-1]} ({len(places)})"
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


class Phases:
    """Hooks that say when the forward or backward of a layer begins and ends.

    ``mark(place, phase)`` is called at each boundary with what begins there: the place of a layer, or None
    for what is outside the layers, and ``forward`` or ``backward``. What a layer computes again in backward
    counts as its backward.
    """

    def __init__(self, layers: nn.ModuleList, mark: Callable[[int | None, str], None]) -> None:
        self._layers, self._mark = layers, mark
        self._backward = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one forward and backward; the hooks are there inside it only."""
        handles: list[Any] = []
        self._backward = False
        for place, layer in enumerate(self._layers):
            handles += [
                layer.register_forward_pre_hook(lambda *_, place=place: self._forward(place)),
                layer.register_forward_hook(lambda *_: self._forward(None)),
                layer.register_full_backward_pre_hook(lambda *_, place=place: self._mark(place, "backward")),
                layer.register_full_backward_hook(lambda *_: self._mark(None, "backward")),
            ]
        self._mark(None, "forward")
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin_backward(self) -> None:
        """The forward is over; forwards that come now are computed again."""
        self._backward = True
        self._mark(None, "backward")

    def _forward(self, place: int | None) -> None:
        if not self._backward:
            self._mark(place, "forward")
