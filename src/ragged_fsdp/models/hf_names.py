"""Between the tensors a Hugging Face model holds and those its checkpoint files hold.

Since transformers 5 a model may hold several stored tensors as one (all experts of a layer fused), and
knows how to take them apart again when it is saved. That inverse, given one parameter at a time, tells
everything needed: with real values it exports a parameter; with meta tensors it tells names and shapes;
with the numbers 0, 1, 2, ... as values it tells where each stored element belongs.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

__all__ = ["StoredParts", "stored_parts"]


class StoredParts:
    """The stored tensors that one parameter of a model corresponds to."""

    def __init__(self, model: nn.Module, name: str, parameter: Tensor) -> None:
        self._model: Any = model
        self._name = name
        self.shapes = {k: tuple(v.shape) for k, v in self.take_apart(parameter.to("meta")).items()}
        """Name and shape of each stored tensor."""
        self.is_plain = len(self.shapes) == 1 and tuple(self.shapes.values()) == (tuple(parameter.shape),)

    def take_apart(self, full: Tensor) -> dict[str, Tensor]:
        """The stored tensors of a full parameter."""
        return revert_weight_conversion(self._model, {self._name: full})

    def assemble(self, full: Tensor, read: Callable[[str], Tensor]) -> None:
        """Fill ``full`` from the stored tensors that ``read`` returns, holding one of them at a time."""
        if self.is_plain:
            full.copy_(read(next(iter(self.shapes))))
            return
        for piece, parts in self._places(full):
            flat = piece.view(-1)
            for name, places in parts.items():
                stored = read(name)
                if stored.shape != places.shape:
                    raise ValueError(f"{name}: shape {tuple(stored.shape)} instead of {tuple(places.shape)}")
                flat[places.flatten()] = stored.flatten().to(full.dtype)

    def _places(self, full: Tensor) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Pieces of ``full``, each with the flat positions in it of every element of its stored tensors.

        Where each index of the first dim is stored by itself (experts), the pieces are these, so that the
        positions of one expert are held, not of all.
        """
        one = self.take_apart(torch.arange(full[:1].numel()).view_as(full[:1]))
        names = [{k.replace(".0.", f".{index}."): v for k, v in one.items()} for index in range(len(full))]
        if len(one) * len(full) == len(self.shapes) and {k for n in names for k in n} == set(self.shapes):
            yield from ((full[index], parts) for index, parts in enumerate(names))
        else:
            yield full, self.take_apart(torch.arange(full.numel()).view_as(full))


def stored_parts(model: nn.Module) -> dict[str, StoredParts]:
    """For each tensor of the model's state, tied ones once, what a checkpoint file stores for it."""
    seen: set[Tensor] = set()
    parts = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor not in seen:
            seen.add(tensor)
            parts[name] = StoredParts(model, name, tensor.detach())
    return parts
