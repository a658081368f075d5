"""The operations of FP8 training as torch sees them: quantise, product, weight gradient.

Each is an operator of torch (``torch.ops.ragged_fsdp.fp8_*``), so that compiled graphs and selective
checkpointing can name it. It runs on one of two backends with the same functions: ``emulation``, plain
torch for any device, or ``hopper``. Another recipe, such as MXFP8, is another such backend.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor
from torch.library import define, impl, register_fake

from ragged_fsdp.fp8 import emulation
from ragged_fsdp.fp8.groups import BLOCK, Groups, columns_of, empty_quantized, one_group

__all__ = [
    "BACKENDS",
    "backend_name",
    "groups_of",
    "product",
    "quantize",
    "weight_gradient",
]

logger = logging.getLogger("ragged_fsdp")
BACKENDS = ("auto", "emulation", "hopper")
_HOPPER = (9, 0)
_GROUPS = "Tensor? table, Tensor? starts"

Quantized = tuple[Tensor, Tensor, Tensor, Tensor]


@cache
def backend_name(wanted: str, device: torch.device) -> str:
    """The backend for a device; ``auto`` takes the fast one where there is one, and says if there is none."""
    missing = ""
    if device.type != "cuda":
        missing = f"a {device.type} device"
    elif torch.cuda.get_device_capability(device) != _HOPPER:
        missing = f"{torch.cuda.get_device_name(device)}, no Hopper GPU"
    elif find_spec("triton") is None:
        missing = "no Triton"
    if wanted == "hopper" and missing:
        raise RuntimeError(f"fp8: backend 'hopper' needs a Hopper GPU and Triton; here is {missing}.")
    if wanted == "auto" and missing and device.type == "cuda":
        logger.warning("fp8: %s; products are emulated, slower than in bf16", missing)
    return "hopper" if wanted != "emulation" and not missing else "emulation"


@cache
def _backend(name: str) -> ModuleType:
    if name == "emulation":
        return emulation
    from ragged_fsdp.fp8 import hopper

    return hopper


def _groups(table: Tensor | None, starts: Tensor | None, rows: int, device: torch.device) -> Groups:
    return one_group(rows, device) if table is None or starts is None else Groups(table, starts)


define(
    "ragged_fsdp::fp8_quantize",
    f"(Tensor values, {_GROUPS}, Tensor(a!)? seen, bool rowwise, bool turned, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
define(
    "ragged_fsdp::fp8_product",
    f"(Tensor codes, Tensor scales, Tensor weight, Tensor weight_scales, {_GROUPS}, ScalarType dtype, "
    "bool turned, str backend) -> Tensor",
)
define(
    "ragged_fsdp::fp8_weight_gradient",
    f"(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, {_GROUPS}, SymInt rows, ScalarType dtype, "
    "str backend) -> Tensor",
)
define("ragged_fsdp::fp8_groups", "(Tensor counts, SymInt rows, str backend) -> (Tensor, Tensor)")
_DEVICES = ("cpu", "cuda")


@impl("ragged_fsdp::fp8_groups", _DEVICES)
def _groups_of(counts: Tensor, rows: int, backend: str) -> tuple[Tensor, Tensor]:
    return _backend(backend).groups_of(counts, rows)


@register_fake("ragged_fsdp::fp8_groups")
def _fake_groups_of(counts: Tensor, rows: int, backend: str) -> tuple[Tensor, Tensor]:
    size = counts.shape[0]
    table = counts.new_empty((3, rows // BLOCK + size), dtype=torch.int32)
    return table, counts.new_empty((size + 1,), dtype=torch.int32)


@impl("ragged_fsdp::fp8_quantize", _DEVICES)
def _quantize(
    values: Tensor,
    table: Tensor | None,
    starts: Tensor | None,
    seen: Tensor | None,
    rowwise: bool,
    turned: bool,
    backend: str,
) -> Quantized:
    groups = _groups(table, starts, len(values), values.device)
    return _backend(backend).quantize(values, groups, seen, rowwise=rowwise, turned=turned)


@register_fake("ragged_fsdp::fp8_quantize")
def _fake_quantize(
    values: Tensor,
    table: Tensor | None,
    starts: Tensor | None,
    seen: Tensor | None,
    rowwise: bool,
    turned: bool,
    backend: str,
) -> Quantized:
    tiles = (values.shape[0] + BLOCK - 1) // BLOCK if table is None else table.shape[1]
    return empty_quantized(values, tiles, 1 if starts is None else starts.shape[0] - 1, rowwise, turned)


@impl("ragged_fsdp::fp8_product", _DEVICES)
def _product(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    table: Tensor | None,
    starts: Tensor | None,
    dtype: torch.dtype,
    turned: bool,
    backend: str,
) -> Tensor:
    groups = _groups(table, starts, len(codes), codes.device)
    return _backend(backend).product(codes, scales, weight, weight_scales, groups, dtype, turned)


@register_fake("ragged_fsdp::fp8_product")
def _fake_product(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    table: Tensor | None,
    starts: Tensor | None,
    dtype: torch.dtype,
    turned: bool,
    backend: str,
) -> Tensor:
    columns = columns_of(weight, weight_scales, codes.shape[1], turned)
    return codes.new_empty((codes.shape[0], columns), dtype=dtype)


@impl("ragged_fsdp::fp8_weight_gradient", _DEVICES)
def _weight_gradient(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    table: Tensor | None,
    starts: Tensor | None,
    rows: int,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    groups = _groups(table, starts, rows, a.device)
    return _backend(backend).weight_gradient(a, a_scales, b, b_scales, groups, dtype)


@register_fake("ragged_fsdp::fp8_weight_gradient")
def _fake_weight_gradient(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    table: Tensor | None,
    starts: Tensor | None,
    rows: int,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    groups = 1 if starts is None else starts.shape[0] - 1
    return a.new_empty((groups, a.shape[1], b.shape[1]), dtype=dtype)


groups_of = torch.ops.ragged_fsdp.fp8_groups.default
quantize = torch.ops.ragged_fsdp.fp8_quantize.default
"""See :func:`ragged_fsdp.fp8.emulation.quantize`."""
product = torch.ops.ragged_fsdp.fp8_product.default
"""See :func:`ragged_fsdp.fp8.emulation.product`."""
weight_gradient = torch.ops.ragged_fsdp.fp8_weight_gradient.default
