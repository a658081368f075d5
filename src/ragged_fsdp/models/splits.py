"""How the layers of a model are split over tensor-parallel ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Split", "refusal"]


@dataclass(frozen=True)
class Split:
    """One way of splitting a model that is still on the meta device."""

    apply: Callable[[nn.Module, DeviceMesh], None]
    """Makes DTensors over the (1-D) mesh of the parameters that are split; the others stay as they are."""
    sizes: Mapping[str, int]
    """Name and size of everything that the number of ranks must divide."""
    modules: tuple[str, ...]
    """Names of the modules whose parameters are split, ``*`` for the number of a layer."""


def refusal(option: str, ranks: int, split: Split | str) -> str | None:
    """Why a model cannot be split over so many ranks, or None; a text for ``split`` says why it never can."""
    if ranks == 1:
        return None
    if isinstance(split, str):
        return f"{option} = {ranks}: {split}"
    for name, size in split.sizes.items():
        if size % ranks:
            fits = [n for n in range(1, size + 1) if not any(s % n for s in split.sizes.values())]
            return (
                f"{option} = {ranks} does not divide the model's {name} = {size}; "
                f"for this model {option} can be {', '.join(map(str, fits))}"
            )
    return None
