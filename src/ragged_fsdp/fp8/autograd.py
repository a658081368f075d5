"""Forward and both gradients of a product with a coded weight, for linear layers and for grouped experts.

    ==================  ===================================  ==================================
    what                operands, contracted dim last        scales
    ==================  ===================================  ==================================
    forward             x (rows, in), W (out, in)            1 x 128, 128 x 128
    input gradient      dy (rows, out), W as (in, out)       1 x 128, 128 x 128
    weight gradient     dy turned (out, rows),               1 x 128, 1 x 128 (along the rows)
                        x turned (in, rows)
    ==================  ===================================  ==================================

What stays from forward to backward is x turned, one byte per element, and the weight's codes, whose memory
the runtime frees and fills again. The input gradient contracts the weight's first dim, and so does the
forward of a weight of shape (in, out), as fused experts have it: the backend turns it, before or while it
multiplies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ragged_fsdp.block_codes import encode_matrices
from ragged_fsdp.fp8 import products
from ragged_fsdp.fp8.gathered import KeptCodes, ProductWeight
from ragged_fsdp.fp8.products import backend_name
from ragged_fsdp.fsdp.parts.left_out import MANAGED_ATTRIBUTE
from ragged_fsdp.fsdp.parts.members import CODES_ATTRIBUTE
from ragged_fsdp.torch_internals import version_of

__all__ = ["Fp8Product", "Seen"]

_QUANTIZED_ATTRIBUTE = "_ragged_fsdp_quantized"
_GROUPS_ATTRIBUTE = "_ragged_fsdp_groups"


class Seen:
    """Which products saw something that is not finite: one tensor per device, so one operation copies all."""

    def __init__(self) -> None:
        self._products = 0
        self._flags: dict[torch.device, Tensor] = {}

    def place(self) -> int:
        """Room for one product more; before the first of them computes."""
        self._products += 1
        return self._products - 1

    def on(self, device: torch.device) -> Tensor:
        """(products, 2, 1): inputs, and gradients of outputs, that were not finite."""
        if device not in self._flags:
            with torch.inference_mode(False):  # a tensor of inference mode could not be changed outside of it
                self._flags[device] = torch.zeros(self._products, 2, 1, dtype=torch.int32, device=device)
        return self._flags[device]

    def copied(self) -> list[Tensor]:
        """What was seen until now, on each device; nothing waits for the device."""
        return [flags.clone() for flags in self._flags.values()]

    def clear(self) -> None:
        """Nothing was seen."""
        for flags in self._flags.values():
            flags.zero_()


class Fp8Product:
    """How one parameter is computed with; lies on the parameter, and on its module."""

    transport = KeptCodes
    """How ``fully_shard`` gathers the parameter."""

    def __init__(self, name: str, backend: str, seen: Seen) -> None:
        self.name = name
        self.backend = backend
        self.seen = seen
        self.place = seen.place()

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x @ weight.T`` for a weight of (out, in)."""
        rows = x.reshape(-1, x.shape[-1])
        coded = self._coded(weight)
        codes, scales = coded.codes, coded.scales.unsqueeze(0)
        codes = codes.unsqueeze(0) if codes.dim() > 1 else codes  # flat: in the order of tiles
        backend = backend_name(self.backend, x.device)
        turned = torch.is_grad_enabled() and weight.requires_grad
        quantized = self._quantized(x, rows, turned, backend)
        out = _Product.apply(
            rows, weight, codes, scales, *quantized, None, None, False, backend, self._flag(x)
        )
        return out.view(*x.shape[:-1], weight.shape[0])

    def grouped(self, rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
        """Rows of each expert times its matrix of (experts, in, out), or (experts, out, in) if transposed."""
        coded = self._coded(weight)
        backend = backend_name(self.backend, rows.device)
        groups = _groups_of(counts, len(rows), backend)
        turned = torch.is_grad_enabled() and weight.requires_grad
        quantized = products.quantize(rows.detach(), *groups, self._flag(rows, 0), True, turned, backend)
        flag = self._flag(rows)
        return _Product.apply(rows, weight, *coded, *quantized, *groups, not transposed, backend, flag)

    def _flag(self, x: Tensor, which: int = 1) -> Tensor | None:
        # a compiled graph may not hold what it mutates outside of it
        return None if torch.compiler.is_compiling() else self.seen.on(x.device)[self.place, which]

    def _quantized(self, x: Tensor, rows: Tensor, turned: bool, backend: str) -> products.Quantized:
        """Codes of ``x``; layers that share an input share them too."""
        if not _knows_its_version(x):
            return products.quantize(rows.detach(), None, None, self._flag(x, 0), True, turned, backend)
        known = getattr(x, _QUANTIZED_ATTRIBUTE, None)
        if known is None or known[0] != (version_of(x), backend) or (turned and not known[1]):
            made = products.quantize(rows.detach(), None, None, self._flag(x, 0), True, turned, backend)
            known = ((version_of(x), backend), turned, made)
            setattr(x, _QUANTIZED_ATTRIBUTE, known)
        return known[2]

    def _coded(self, weight: Tensor) -> ProductWeight:
        """The codes that were gathered; of a weight that is not sharded they are made here."""
        coded = getattr(weight, CODES_ATTRIBUTE, None)
        if coded is not None:
            return coded
        if getattr(weight, MANAGED_ATTRIBUTE, False):
            raise RuntimeError(
                f"fp8: {self.name} was gathered as {weight.dtype}, not as codes; pass "
                "gather_policy=ragged_fsdp.fp8.gather_policy to the fully_shard call that manages it; before "
                "that, call fp8_training again on a copy of a model, and after to_empty() or assign=True."
            )
        with torch.no_grad():
            return ProductWeight(*encode_matrices(weight.detach()))


def _knows_its_version(tensor: Tensor) -> bool:
    """Whether what is made of a tensor may be kept beside it: it says when its values change.

    A compiled graph reuses memory without telling the tensor, and a tensor of inference mode does not count.
    While a CUDA graph is captured a tensor may be its static input, of which each replay must make it anew;
    what autograd has computed is no input.
    """
    if torch.compiler.is_compiling() or tensor.is_inference():
        return False
    return tensor.grad_fn is not None or not _is_captured(tensor)


def _is_captured(tensor: Tensor) -> bool:
    """Whether what is launched on the tensor goes into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _groups_of(counts: Tensor, rows: int, backend: str) -> tuple[Tensor, Tensor]:
    """The table of rows grouped so; both products of a layer of experts have the same counts and share it."""
    if not _knows_its_version(counts):
        return products.groups_of(counts, rows, backend)
    made_for = (version_of(counts), rows, backend)
    known = getattr(counts, _GROUPS_ATTRIBUTE, None)
    if known is None or known[0] != made_for:
        known = (made_for, products.groups_of(counts, rows, backend))
        setattr(counts, _GROUPS_ATTRIBUTE, known)
    return known[1]


class _Product(torch.autograd.Function):
    """The product of quantised rows with coded matrices; ``rows`` and ``weight`` are what gradients go to."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        codes: Tensor,
        scales: Tensor,
        x_codes: Tensor,
        x_scales: Tensor,
        x_turned: Tensor,
        x_turned_scales: Tensor,
        table: Tensor | None,
        starts: Tensor | None,
        turn: bool,
        backend: str,
        seen: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, x_turned, x_turned_scales, table, starts)
        ctx.turn, ctx.backend, ctx.seen, ctx.rows = turn, backend, seen, rows.shape[0]
        ctx.dtypes = rows.dtype, weight.dtype
        ctx.matrix = weight.dim() == 2
        return products.product(x_codes, x_scales, codes, scales, table, starts, rows.dtype, turn, backend)

    @staticmethod
    @once_differentiable  # a gradient's own would miss what goes through the codes
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        codes, scales, x_turned, x_turned_scales, table, starts = ctx.saved_tensors
        to_rows, to_weight = ctx.needs_input_grad[:2]
        backend, (rows_dtype, weight_dtype) = ctx.backend, ctx.dtypes
        made = products.quantize(grad.contiguous(), table, starts, ctx.seen, to_rows, to_weight, backend)
        d_rows = d_weight = None
        if to_rows:
            operands = (made[0], made[1], codes, scales, table, starts)
            d_rows = products.product(*operands, rows_dtype, not ctx.turn, backend)
        if to_weight:
            x, dy = (x_turned, x_turned_scales), (made[2], made[3])
            sides = (*x, *dy) if ctx.turn else (*dy, *x)
            d_weight = products.weight_gradient(*sides, table, starts, ctx.rows, weight_dtype, backend)
            if ctx.matrix:
                d_weight = d_weight.squeeze(0)
        return (d_rows, d_weight, *(None,) * 11)
