"""Frozen weights stored as 8-bit codes: one byte per element and one fp32 scale per tile, on every level.

``gather_policy`` lets a weight travel as codes and keeps its values, which an optimizer updates. A weight
that is frozen needs no values: :func:`encode_frozen` replaces it by its codes before ``fully_shard``. They
are what a rank stores, what travels and what is gathered; a linear layer decodes its own matrix in each pass
and lets it go::

    stored     codes and scales, a part per rank        half of bf16
    gathered   codes and scales of a layer               half of bf16
    decoded    one matrix at a time                      in the dtype of the input
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ragged_fsdp.block_codes import band_shape, decode, encode_matrices
from ragged_fsdp.policy import BlockCodes
from ragged_fsdp.torch_internals import make_wrapper_subclass, return_and_correct_aliasing

__all__ = ["CodedWeight", "encode_frozen"]

_COPIES = ("aten.detach.default", "aten.clone.default", "aten._to_copy.default")
"""What modules do with a parameter when they are moved, copied or cast."""


def encode_frozen(model: nn.Module, policy: Callable[[str, nn.Parameter], BlockCodes | None]) -> list[str]:
    """Replace frozen weights of linear layers by their codes; the names of those that were.

    Attach adapters first, which freezes the base, and call ``fully_shard`` after it.

    Args:
        policy: ``policy(name, weight)``, the codes of a frozen weight of an ``nn.Linear``; None leaves it.
            Asked once of a weight that several layers share, by the first of its names; they go on sharing.

    Raises:
        TypeError, ValueError: naming the weight, if the answer is not usable for it; nothing is changed.
    """
    chosen = _choose(model, policy)
    for _, modules, codes in chosen:
        weight: Any = modules[0].weight
        coded = nn.Parameter(CodedWeight.encode(weight.detach(), codes), requires_grad=False)
        for module in modules:
            module.weight = coded
    return [name for name, _, _ in chosen]


def _choose(
    model: nn.Module, policy: Callable[[str, nn.Parameter], BlockCodes | None]
) -> list[tuple[str, list[nn.Module], BlockCodes]]:
    """Name, layers and codes of each weight to encode; not the weights, which go one by one as it is done."""
    places: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(path, recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((key, module))
    found: list[tuple[str, list[nn.Module], BlockCodes]] = []
    for weight, users in places.items():
        linear = [(key, module) for key, module in users if _is_weight_of_linear(key, module)]
        if not linear or weight.requires_grad:
            continue
        name = linear[0][0]
        codes = policy(name, weight)
        if codes is None:
            continue
        if not isinstance(codes, BlockCodes) or not codes.decoded:
            raise TypeError(f"{name}: the policy must return decoded BlockCodes or None, got {codes!r}.")
        if type(weight.data) is not Tensor or not weight.is_floating_point() or weight.dtype.itemsize == 1:
            kind = type(weight.data).__name__
            raise ValueError(
                f"{name}: no codes are made of a {kind} of {weight.dtype}; encode plain weights."
            )
        if weight.is_meta:
            raise ValueError(f"{name}: is on the meta device and has no values to encode.")
        try:
            codes.check(weight.shape)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if len(linear) < len(users):  # it would keep the values beside the codes, tied no more
            other = next(key for key, module in users if not _is_weight_of_linear(key, module))
            raise ValueError(f"{name}: is also {other}, which needs its values; the policy must return None.")
        found.append((name, [module for _, module in linear], codes))
    return found


def _is_weight_of_linear(key: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and key.rpartition(".")[2] == "weight"


class CodedWeight(Tensor):
    """A weight as codes and scales; linear layers compute with its values, which it can also return."""

    codes: Tensor
    """In the shape of the weight."""
    scales: Tensor
    """(bands, tiles): one per tile."""
    kind: BlockCodes

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, kind: BlockCodes, dtype: torch.dtype) -> CodedWeight:
        return make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scales: Tensor, kind: BlockCodes, dtype: torch.dtype) -> None:
        self.codes, self.scales, self.kind = codes, scales, kind

    @classmethod
    def encode(cls, weight: Tensor, kind: BlockCodes) -> CodedWeight:
        """The codes of a plain weight."""
        return cls(*encode_matrices(weight, kind), kind, weight.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values, rounded once from fp32 to ``dtype``, which is that of the weight if not given."""
        bands = self.codes.view(-1, *band_shape(self.kind, self.shape[-1]))
        out = torch.empty(bands.shape, dtype=dtype or self.dtype, device=self.codes.device)
        decode(bands, self.scales, out)
        return out.view(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], (self.kind, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> CodedWeight:
        return CodedWeight(inner["codes"], inner["scales"], *context)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CodedWeight({tuple(self.shape)}, {self.kind}, {self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:  # what a linear layer calls
            return _linear(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, self = dict(kwargs or {}), args[0]
        if str(func) in _COPIES:
            dtype = kwargs.pop("dtype", None) or self.dtype  # module.to(dtype): codes stay codes
            codes, scales = (func(part, *args[1:], **kwargs) for part in (self.codes, self.scales))
            made = cls(codes, scales, self.kind, dtype)
            return return_and_correct_aliasing(func, args, {}, made) if "detach" in str(func) else made
        raise NotImplementedError(
            f"{func}: a {cls.__name__} is frozen and computes in linear layers only; dequantize() it first."
        )


class _Linear(torch.autograd.Function):
    """``x @ values.T + bias``; the values are decoded anew in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
        ctx.weight = weight  # not saved: its memory is that of a gather, which comes again for the backward
        return torch.nn.functional.linear(x, weight.dequantize(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        to_x, _, to_bias = ctx.needs_input_grad
        return (
            grad @ ctx.weight.dequantize(grad.dtype) if to_x else None,
            None,
            grad.reshape(-1, grad.shape[-1]).sum(0) if to_bias else None,
        )


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    device = input.device.type
    if torch.is_autocast_enabled(device):
        input = input.to(torch.get_autocast_dtype(device))
    return _Linear.apply(input, weight, bias if bias is None else bias.to(input.dtype))
