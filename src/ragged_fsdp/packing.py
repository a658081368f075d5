"""Frozen weights that are no plain tensors: what is cut and gathered in their place, and what is made of it.

A quantised weight is codes with statistics: scales, largest magnitudes, zero points. A :class:`Packing` lays
the bytes of all of them behind each other in one plain tensor, each at a multiple of 16::

    weight          Int8Tensor(qdata (64, 32) int8, scale (64, 1) float32)
    shard it as     uint8 (2304,)        2048 bytes of codes, 256 of scales
    compute with    Int8Tensor(view of the gathered bytes, view of the gathered bytes)

That tensor is a parameter like others to plan, transport, state dict and checkpoint: it is cut anywhere,
never cast, and gathered in place. What the computation sees is made once, over the memory of the gathered
buffer, which comes and goes below it.

Tensors of a wrapper class say themselves what they are made of (``__tensor_flatten__``): torchao's
weight-only tensors, and :class:`ragged_fsdp.frozen_codes.CodedWeight`. Those with FSDP2's all-gather hooks
are left to these. bitsandbytes keeps statistics in attributes of a parameter and of its module:
:class:`FourBit` and :class:`EightBit` know them. A class of another library is one class here and a line in
``_BY_CLASS``.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ragged_fsdp.layout import ALIGN_BYTES, align_up
from ragged_fsdp.torch_internals import is_traceable_wrapper_subclass

__all__ = ["Packing", "is_packed", "mark", "packing_of", "value_meta", "values_of"]

_ATTRIBUTE = "_ragged_fsdp_packing"


class Packing(Protocol):
    """How one frozen parameter is packed; it holds none of the packed memory."""

    shape: torch.Size
    dtype: torch.dtype
    """The dtype of the values that the codes stand for; ``shape`` is theirs too."""

    @property
    def description(self) -> str:
        """What ranks must agree on beside the number of bytes."""

    def pack(self, original: nn.Parameter) -> Tensor:
        """The plain tensor that is sharded in the parameter's place."""

    def attach(self, sharded: nn.Parameter, modules: Sequence[nn.Module]) -> None:
        """The sharded form is there: ``modules``, where it is registered, must hold nothing of the whole."""

    def unpack(self, gathered: Tensor) -> nn.Parameter:
        """The parameter that the computation sees, over the memory of ``gathered``."""

    def values(self, gathered: Tensor) -> Tensor:
        """What the codes stand for, in ``dtype`` and ``shape``."""


def packing_of(param: nn.Parameter) -> Packing | None:
    """How ``param`` is packed; None for plain tensors, for what trains and for what gathers itself."""
    if param.requires_grad or isinstance(param, DTensor):
        return None
    for kind in type(param).__mro__:
        known = _BY_CLASS.get(f"{kind.__module__}.{kind.__qualname__}")
        if known is not None:
            return known.of(param)
    inner = param.data
    if not is_traceable_wrapper_subclass(inner) or hasattr(inner, "fsdp_pre_all_gather"):
        return None
    return TensorWrapper(inner)


def mark(sharded: nn.Parameter, packing: Packing, modules: Sequence[nn.Module]) -> None:
    """Let ``sharded`` be the sharded form of what ``packing`` packs."""
    setattr(sharded, _ATTRIBUTE, packing)
    packing.attach(sharded, modules)


def is_packed(tensor: Tensor) -> bool:
    """Whether a model's tensor is the sharded form of codes."""
    return hasattr(tensor, _ATTRIBUTE)


def value_meta(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Shape and dtype of the values of a model's tensor: of the weight, where that is packed."""
    packing: Packing | None = getattr(tensor, _ATTRIBUTE, None)
    return (tensor.shape, tensor.dtype) if packing is None else (packing.shape, packing.dtype)


def values_of(tensor: Tensor, whole: Tensor) -> Tensor:
    """The values of a model's tensor, given all of it: decoded where it is packed."""
    packing: Packing | None = getattr(tensor, _ATTRIBUTE, None)
    return whole if packing is None else packing.values(whole)


# -- bytes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """Where one tensor lies in the packed bytes."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, gathered: Tensor) -> Tensor:
        """The tensor over the gathered bytes."""
        flat = gathered.narrow(0, self.start, self.nbytes).view(self.dtype)
        return torch.as_strided(flat, self.shape, self.stride, flat.storage_offset())


def _runs(tensors: Sequence[Tensor]) -> tuple[tuple[_Run, ...], int]:
    """A run for each tensor, and the bytes of all of them."""
    runs, end = [], 0
    for tensor in tensors:
        stride = tuple(_in_memory(tensor)[1])
        runs.append(_Run(end, tensor.nbytes, tensor.dtype, tuple(tensor.shape), stride))
        end += align_up(tensor.nbytes, ALIGN_BYTES)
    return tuple(runs), end


def _in_memory(tensor: Tensor) -> tuple[Tensor, Sequence[int]]:
    """The elements as they lie, and the strides that see them: kernels may want columns in one run."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim))
    flat = tensor.permute(order)
    if not flat.is_contiguous():
        tensor = tensor.contiguous()
        flat = tensor
    return flat.reshape(-1), tensor.stride()


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    runs, nbytes = _runs(tensors)
    packed = torch.zeros(nbytes, dtype=torch.uint8, device=tensors[0].device)
    for run, tensor in zip(runs, tensors):
        packed.narrow(0, run.start, run.nbytes).copy_(_in_memory(tensor)[0].view(torch.uint8))
    return packed


# -- classes of tensors ------------------------------------------------------------------------------


class TensorWrapper:
    """A wrapper class whose tensors say what they are made of, some of which may be such tensors again."""

    def __init__(self, tensor: Any) -> None:
        self.shape, self.dtype, self._stride = tensor.shape, tensor.dtype, tensor.stride()
        self._kind = type(tensor)
        self._names, self._context = tensor.__tensor_flatten__()
        self._inside: dict[str, TensorWrapper] = {}
        for name in self._names:
            inner = getattr(tensor, name)
            if is_traceable_wrapper_subclass(inner):
                self._inside[name] = TensorWrapper(inner)
        self._runs = _runs(list(self._leaves(tensor)))[0]

    @property
    def description(self) -> str:
        kinds = " ".join(f"{run.dtype}{run.shape}" for run in self._runs)
        return f"{self._kind.__name__}{tuple(self.shape)} {self.dtype} of {kinds}"

    def _leaves(self, tensor: Any) -> Iterator[Tensor]:
        for name in self._names:
            inner = getattr(tensor, name)
            if name in self._inside:
                yield from self._inside[name]._leaves(inner)
            else:
                yield inner.detach()

    def _rebuild(self, leaves: Iterator[Tensor]) -> Tensor:
        parts = {
            name: self._inside[name]._rebuild(leaves) if name in self._inside else next(leaves)
            for name in self._names
        }
        return self._kind.__tensor_unflatten__(parts, self._context, self.shape, self._stride)

    def pack(self, original: nn.Parameter) -> Tensor:
        return _pack(list(self._leaves(original.data)))

    def attach(self, sharded: nn.Parameter, modules: Sequence[nn.Module]) -> None:
        pass

    def _over(self, gathered: Tensor) -> Any:
        return self._rebuild(run.of(gathered) for run in self._runs)

    def unpack(self, gathered: Tensor) -> nn.Parameter:
        return nn.Parameter(self._over(gathered), requires_grad=False)

    def values(self, gathered: Tensor) -> Tensor:
        return self._over(gathered).dequantize().to(self.dtype)


class FourBit:
    """bitsandbytes' ``Params4bit``: codes, and a magnitude per block that may be quantised itself.

    A table of 16 values stays whole on every rank, as do the 256 of a second quantisation.
    """

    def __init__(self, param: Any) -> None:
        state = param.quant_state
        self.shape, self.dtype = torch.Size(state.shape), state.dtype
        self._kind = type(param)
        self._settings = {
            name: getattr(param, name)
            for name in ("blocksize", "compress_statistics", "quant_type", "quant_storage")
        }
        self._runs = _runs(self._parts(param))[0]
        self._state = copy.copy(state)
        self._state.absmax = None
        if state.nested:
            self._state.offset, self._state.state2 = None, copy.copy(state.state2)
            self._state.state2.absmax = None

    @classmethod
    def of(cls, param: Any) -> FourBit | None:
        """None where the weight has not been quantised yet."""
        return None if getattr(param, "quant_state", None) is None or param.is_meta else cls(param)

    @property
    def description(self) -> str:
        kinds = " ".join(f"{run.dtype}{run.shape}" for run in self._runs)
        return f"{self._settings['quant_type']}{tuple(self.shape)} {self.dtype} of {kinds}"

    @staticmethod
    def _parts(param: Any) -> list[Tensor]:
        state = param.quant_state
        # the offset is a mean of this weight's magnitudes: other codes that are loaded come with theirs
        return [param.data, state.absmax, *([state.state2.absmax, state.offset] if state.nested else [])]

    def pack(self, original: nn.Parameter) -> Tensor:
        return _pack(self._parts(original))

    def attach(self, sharded: nn.Parameter, modules: Sequence[Any]) -> None:
        for module in modules:
            module.quant_state = None  # it would keep the magnitudes of the whole weight
            # else an evaluation on a CPU replaces the gathered codes by a copy in another order
            module.support_avx512bf16_for_cpu = False

    def unpack(self, gathered: Tensor) -> nn.Parameter:
        codes, absmax, *nested = (run.of(gathered) for run in self._runs)
        state = copy.copy(self._state)
        state.absmax, state.code = absmax, state.code.to(gathered.device)
        if nested:
            state.state2 = copy.copy(state.state2)
            state.state2.absmax, state.offset = nested
            state.state2.code = state.state2.code.to(gathered.device)
        return self._kind(codes, requires_grad=False, quant_state=state, bnb_quantized=True, **self._settings)

    def values(self, gathered: Tensor) -> Tensor:
        made: Any = self.unpack(gathered)
        functional = import_module(f"{self._kind.__module__.partition('.')[0]}.functional")
        return functional.dequantize_4bit(made.data, made.quant_state).to(self.dtype)


class EightBit:
    """bitsandbytes' ``Int8Params``: codes that stay a matrix; a magnitude per row, whole on every rank.

    The magnitudes are one tensor, wherever they are held: loading writes to what the sharded parameter has,
    and bitsandbytes then computes with it. So they lie where it computes, also when codes wait on the host.
    """

    def __init__(self, param: Any) -> None:
        self.shape, self.dtype = param.shape, torch.float32
        self._kind = type(param)
        self._magnitudes: Tensor | None = param.SCB
        self._holders: list[weakref.ref[Any]] = []
        """The sharded parameter, which holds this, and the modules that it is registered in."""

    @classmethod
    def of(cls, param: Any) -> EightBit | None:
        """None where the weight has not been quantised yet."""
        return cls(param) if param.dtype == torch.int8 and not param.is_meta else None

    @property
    def description(self) -> str:
        return self._kind.__name__

    def pack(self, original: nn.Parameter) -> Tensor:
        return original.data

    def attach(self, sharded: Any, modules: Sequence[Any]) -> None:
        holders = [weakref.ref(holder) for holder in (sharded, *modules)]
        if self._holders:  # what modules have by now is what was gathered, and where: they take it only once
            self._holders = holders
            assert self._magnitudes is not None
            self._hold_on(self._magnitudes.device)
            return
        for module in modules:
            state = getattr(module, "state", None)
            if state is None:  # an embedding
                continue
            if self._magnitudes is None:  # a forward has moved them there
                self._magnitudes = state.SCB
            state.CB = None  # the codes of the whole weight
        for module in modules:
            module.weight_format = torch.tensor(0, dtype=torch.uint8)
        # bitsandbytes saves them from the parameter and loads them to it; state dicts hold them, and torch
        # looks for what they hold among the module's attributes
        self._holders = holders
        self._hold_on(sharded.device)

    def _hold_on(self, device: torch.device) -> Tensor:
        assert self._magnitudes is not None  # codes are made with them
        self._magnitudes = self._magnitudes.to(device)
        for holder in (ref() for ref in self._holders):
            if holder is not None:
                holder.SCB = self._magnitudes
        return self._magnitudes

    def unpack(self, gathered: Tensor) -> nn.Parameter:
        magnitudes = self._hold_on(gathered.device)
        return self._kind(gathered, requires_grad=False, has_fp16_weights=False, CB=gathered, SCB=magnitudes)

    def values(self, gathered: Tensor) -> Tensor:
        assert self._magnitudes is not None
        return gathered.float() * (self._magnitudes.to(gathered.device) / 127.0)[:, None]


_BY_CLASS: dict[str, Any] = {
    "bitsandbytes.nn.modules.Params4bit": FourBit,
    "bitsandbytes.nn.modules.Int8Params": EightBit,
}
