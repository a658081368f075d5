"""Kernels without a GPU: Triton's interpreter, made to round as a GPU does, with every access checked.

``TRITON_INTERPRET=1`` runs a kernel program by program on the CPU. :func:`make_faithful` changes what the
interpreter does unlike a GPU: bf16 is rounded to nearest, not cut off; a fused multiply-add rounds once; the
larger of a number and a nan is the number, and the nan that an operation makes has no sign; products of bf16
are those of its values; and the inline instruction of 8-bit Adam is known.

:class:`Memcheck` finds what a GPU may hide. While it is entered,

* every tensor that an operation makes lies between two zones that belong to nobody, and a load or store of a
  byte outside of all tensors raises, with the line of the kernel in the traceback;
* memory that was not initialised, and what a masked load has no value for, are nans;
* a ``tl.multiple_of`` that is not true raises;
* programs run from the last to the first, since a GPU promises no order.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["DEVICE", "INTERPRETED", "Memcheck", "make_faithful", "only_program"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
_NAN = np.uint32(0x7FFFFFFF).view(np.float32)
_ZONE = 4096
_ALIGNMENT = 256  # of the allocator of CUDA


def _bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """fp32 rounded half to even."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16
    )
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def _fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """``x * y + z`` in fp32 with one rounding: exact product, sum in fp64 rounded to odd, then to fp32."""
    product, added = np.broadcast_arrays(x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64))
    total = np.atleast_1d(product + added)
    back = total - product
    lost = (product - (total - back)) + (added - back)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(lost > 0, np.inf, -np.inf)
    odd = np.where(np.isfinite(total) & (lost != 0) & even, np.nextafter(total, towards), total)
    return np.where(np.isnan(odd), _NAN, odd.astype(np.float32)).reshape(product.shape)


def make_faithful() -> None:
    """Change Triton's interpreter for the rest of the process."""
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    triton.knobs.compilation.front_end_debugging = True  # errors come as they are
    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    cast, patch_tensor = builder.cast_impl, interpreter._patch_lang_tensor
    binary = builder.binary_op

    def cast_impl(self, src, dst_type):
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return handle(_bfloat16_bits(src.data), tl.bfloat16)
        return cast(self, src, dst_type)

    def binary_op(self, lhs, rhs, op):
        made = binary(self, lhs, rhs, op)
        if made.data.dtype == np.float32:
            made.data = np.where(np.isnan(made.data), _NAN, made.data)
        return made

    def create_dot(self, a, b, added, *options):
        exact = (self.create_fp_to_fp(part, tl.float32, None).data.astype(np.float64) for part in (a, b))
        return handle(np.matmul(*exact).astype(np.float32) + added.data, added.dtype.scalar)

    def create_inline_asm(self, asm, constraints, values, dtype, is_pure, pack):
        if asm.startswith("rcp.approx.ftz.f32"):
            (x,) = values
            return SimpleNamespace(get_result=lambda index: handle(np.float32(1) / x.data, tl.float32))
        raise NotImplementedError(asm)

    def patch_lang_tensor(tensor, scope):
        patch_tensor(tensor, scope)
        # a scalar is an array of one element there, which the NumPy of today makes no int of
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    for name, function in {
        "binary_op": binary_op,
        "cast_impl": cast_impl,
        "create_fma": lambda self, x, y, z: handle(_fused(x.data, y.data, z.data), tl.float32),
        "create_maxnumf": lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax),
        "create_minnumf": lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin),
        "create_dot": create_dot,
        "create_inline_asm": create_inline_asm,
    }.items():
        setattr(builder, name, function)
    interpreter._patch_lang_tensor = patch_lang_tensor
    np.seterr(all="ignore")  # infinities and nans are part of the tests


class _Live:
    """The bytes of the tensors that live: first and last addresses, each in a zone of its own."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}
        self._sorted: tuple[np.ndarray, np.ndarray] | None = None

    def add(self, start: int, nbytes: int) -> None:
        self._ends[start], self._sorted = start + nbytes, None

    def remove(self, start: int) -> None:
        self._ends.pop(start, None)
        self._sorted = None

    @contextmanager
    def also(self, sizes: dict[int, int]) -> Iterator[None]:
        """Within it these bytes too, of tensors made before or by numpy: nobody tells when they go."""
        new = {start: nbytes for start, nbytes in sizes.items() if start not in self._ends}
        for start, nbytes in new.items():
            self.add(start, nbytes)
        try:
            yield
        finally:
            for start in new:
                self.remove(start)

    def outside(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """Those of the addresses whose ``nbytes`` are not all of one tensor."""
        if self._sorted is None:
            starts = sorted(self._ends)
            self._sorted = np.array(starts, np.int64), np.array([self._ends[s] for s in starts], np.int64)
        starts, ends = self._sorted
        place = np.searchsorted(starts, addresses, side="right") - 1
        return addresses[(place < 0) | (addresses + nbytes > ends[place])]

    def place(self, tensor: Tensor, is_filled: bool) -> Tensor:
        """The tensor with zones around it."""
        nbytes = (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1) * tensor.element_size()
        whole = np.full(nbytes + 2 * _ZONE + _ALIGNMENT, 0xFF, np.uint8)
        first = -(whole.ctypes.data + _ZONE) % _ALIGNMENT + _ZONE
        inside = whole[first : first + nbytes]
        self.add(inside.ctypes.data, nbytes)
        weakref.finalize(inside, self.remove, inside.ctypes.data)
        flat = torch.from_numpy(inside).view(tensor.dtype)
        placed = flat.as_strided(tensor.shape, tensor.stride())
        return placed.copy_(tensor) if is_filled else placed


class Memcheck(TorchDispatchMode):
    """See the module's description."""

    def __init__(self) -> None:
        super().__init__()
        self._live = _Live()
        self._changes = ExitStack()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        leaves, tree = tree_flatten(func(*args, **(kwargs or {})))
        if func._schema.is_mutable:
            return tree_unflatten(leaves, tree)  # nothing new
        is_filled = "empty" not in func.__name__
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.numel() and leaf.untyped_storage().data_ptr() not in given:
                leaves[index] = self._live.place(leaf, is_filled)
        return tree_unflatten(leaves, tree)

    def __enter__(self) -> Memcheck:
        from triton.runtime import interpreter

        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        load, store, set_index = builder.create_masked_load, builder.create_masked_store, builder.set_grid_idx
        patch_core, launch = interpreter._patch_lang_core, executor.__call__

        def checked_load(this, ptrs, mask, other, *options, **more):
            self._check("load", ptrs, mask)
            if other is None:
                bits = np.full(ptrs.data.shape, -1, f"i{_bytes_at(ptrs)}")
                other = interpreter.TensorHandle(
                    bits.view(interpreter._get_np_dtype(ptrs.get_element_ty())), ptrs.get_element_ty()
                )
            return load(this, ptrs, mask, other, *options, **more)

        def checked_store(this, ptrs, value, mask, *options):
            self._check("store", ptrs, mask)
            return store(this, ptrs, value, mask, *options)

        def patched_core(lang, scope):
            patch_core(lang, scope)
            scope.set_attr(lang, "multiple_of", _checked_multiple)

        def launched(this, *args, **kwargs):
            given = [t.untyped_storage() for a in (*args, *kwargs.values()) for t in _tensors_of(a)]
            with self._live.also({storage.data_ptr(): storage.nbytes() for storage in given}):
                launch(this, *args, **kwargs)

        def from_the_last(this, *index):
            set_index(this, *(size - 1 - i for size, i in zip(this.grid_dim, index)))

        for owner, name, value in (
            (builder, "create_masked_load", checked_load),
            (builder, "create_masked_store", checked_store),
            (builder, "set_grid_idx", from_the_last),
            (executor, "__call__", launched),
            (interpreter, "_patch_lang_core", patched_core),
        ):
            self._changes.enter_context(mock.patch.object(owner, name, value))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._changes.close()

    def _check(self, what: str, pointers: Any, mask: Any) -> None:
        mask = getattr(mask, "data", mask)
        addresses = pointers.data[np.broadcast_to(mask, pointers.data.shape)].astype(np.int64)
        outside = self._live.outside(addresses, _bytes_at(pointers))
        if outside.size:
            raise IndexError(f"{what} of {outside.size} elements outside of all tensors, of {addresses.size}")


def _bytes_at(pointers: Any) -> int:
    return max(1, pointers.get_element_ty().primitive_bitwidth // 8)


def _tensors_of(argument: Any) -> Iterator[Tensor]:
    """The tensors of an argument of a kernel, which may be a tuple of them or a descriptor."""
    if isinstance(argument, tuple):
        for part in argument:
            yield from _tensors_of(part)
    elif isinstance(base := getattr(argument, "base", argument), Tensor):
        yield base


def _checked_multiple(value: Any, number: Any) -> Any:
    number = getattr(number, "value", number)
    if hasattr(value, "handle") and (value.handle.data % number).any():
        raise ValueError(f"multiple_of: {value.handle.data} is no multiple of {number}")
    return value


@contextmanager
def only_program(*index: int) -> Iterator[None]:
    """Launches run this program alone, whatever their grid says, and touch no more memory than it does."""
    from triton.runtime import interpreter

    def set_index(builder: Any, *_: int) -> None:
        builder.grid_idx = index

    with (
        mock.patch.object(interpreter.InterpreterBuilder, "set_grid_idx", set_index),
        mock.patch.object(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None),  # copies to itself
    ):
        yield
