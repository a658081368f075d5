"""What the layers of a model compute and keep, counted on fake tensors: no device, no memory, no values.

Operations are counted by kind as FLOPs and bytes; a roofline makes seconds of them
(:meth:`PhaseCost.seconds`). Memory is what live storages hold: at the end of a forward what backward needs
(*saved*), and the most above that while a phase runs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ragged_fsdp.predict.workload import Phases, Workload
from ragged_fsdp.torch_internals import (
    FakeTensorMode,
    TorchDispatchMode,
    pytree,
    schema_of,
    storage_id,
)

__all__ = ["LayerCost", "PhaseCost", "Roofline", "count_costs", "grad_bytes"]

_aten = torch.ops.aten


@dataclass(frozen=True)
class Roofline:
    """Rates that a GPU sustains: products, attention, and everything that only reads and writes memory."""

    matmul_tflops: float
    attention_tflops: float
    memory_gb_s: float
    kernel_us: float
    """The least time between the starts of two kernels."""
    fused: float = 1.0
    """What is left of the bytes and kernels of operations bound by memory if they are compiled."""


@dataclass
class PhaseCost:
    """Operations and memory of one forward or backward of a layer."""

    operations: list[tuple[str, float, float]] = field(default_factory=list)
    """Kind (``matmul``, ``attention``, ``memory``), FLOPs and bytes of each."""
    peak_bytes: int = 0
    """The most that lives in it, above what lived when it began, with the gradients of its weights."""
    left_bytes: int = 0
    """What lives when it ends, above what lived when it began, without gradients of weights."""

    @property
    def flops(self) -> float:
        return sum(flops for _, flops, _ in self.operations)

    def launches(self, fused: float) -> float:
        """Kernels, of which ``fused`` are left of those that are bound by memory."""
        return sum(fused if kind == "memory" else 1.0 for kind, *_ in self.operations)

    def seconds(self, roofline: Roofline) -> float:
        """Each operation as long as its slower side, none shorter than a kernel."""
        rates = {
            "matmul": roofline.matmul_tflops * 1e12,
            "attention": roofline.attention_tflops * 1e12,
            "memory": math.inf,
        }
        memory, least = roofline.memory_gb_s * 1e9, roofline.kernel_us * 1e-6
        total = 0.0
        for kind, flops, moved in self.operations:
            seconds = max(flops / rates[kind], moved / memory, least)
            total += seconds * (roofline.fused if kind == "memory" else 1.0)
        return total


@dataclass
class LayerCost:
    """What one layer of a kind costs at a number of tokens."""

    forward: PhaseCost
    backward: PhaseCost
    output_bytes: int
    """What it hands to the next layer: all that stays of a layer that is computed again."""

    @property
    def saved_bytes(self) -> int:
        """Activations that wait for the backward."""
        return self.forward.left_bytes

    @property
    def recompute_peak_bytes(self) -> int:
        """The most in a backward that computes the forward again: what it saves then, and its own peak."""
        return self.saved_bytes - self.output_bytes + self.backward.peak_bytes


def count_costs(workload: Workload, sequences: int, seq_len: int) -> dict[str, LayerCost]:
    """The cost of each kind of the workload, by its signature."""
    cpu = torch.device("cpu")
    model = workload.build()  # before the mode, under which a parameter cannot be cast
    outputs: dict[int | None, int] = {None: 0}
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device=cpu)
        layers = workload.layers(model)
        for place, layer in enumerate(layers):
            layer.register_forward_hook(partial(_note_output, outputs, place))
        counter = _Counter(model, layers)
        phases = Phases(layers, counter.begin)
        with _KernelsOfAGpu(), counter, phases.step():
            loss = workload.loss(model, sequences, seq_len, cpu)
            phases.begin_backward()
            loss.backward()
            counter.end()
    places: list[int | None] = [*range(len(layers)), None]
    return {
        kind.signature: LayerCost(
            counter.phases[place, "forward"], counter.phases[place, "backward"], outputs[place]
        )
        for kind, place in zip(workload.kinds, places)
    }


def _note_output(outputs: dict[int | None, int], place: int, _: nn.Module, __: Any, output: Any) -> None:
    tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    outputs[place] = sum(t.numel() * t.element_size() for t in tensors)


def grad_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of the gradients that are there."""
    return sum(p.grad.untyped_storage().nbytes() for p in parameters if p.grad is not None)


class _Counter(TorchDispatchMode):
    """Attributes every operation and allocation to the phase that is running.

    What is outside the layers comes in parts (before, between and after them), which are one phase; its
    peak is counted from where the forward began and without what the layers have saved, since many more of
    them will have.
    """

    def __init__(self, model: nn.Module, layers: nn.ModuleList) -> None:
        super().__init__()
        self.phases: dict[tuple[int | None, str], PhaseCost] = {}
        self._weights = {storage_id(p.untyped_storage()) for p in model.parameters()}
        self._parameters, self._in_layers = list(model.parameters()), list(layers.parameters())
        self._live = 0
        self._seen: dict[int, int] = {}
        self._now: PhaseCost | None = None
        self._place: int | None = None
        self._started = self._base = 0
        self._saved = 0
        """Bytes saved by all layers together, while something outside them runs."""

    def begin(self, place: int | None, phase: str) -> None:
        self._end_phase()
        self._now = self.phases.setdefault((place, phase), PhaseCost())
        self._place, self._base = place, self._without_grads()
        self._started = self._live if place is not None else self._saved + grad_bytes(self._in_layers)

    def end(self) -> None:
        self._end_phase()
        self._now = None

    def _without_grads(self) -> int:
        """Gradients of weights are no activations: what becomes of them is the runtime's affair."""
        return self._live - grad_bytes(self._parameters)

    def _end_phase(self) -> None:
        if self._now is None:
            return
        left = self._without_grads() - self._base
        self._now.left_bytes += left
        if self._place is not None:
            self._saved += left

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        for tensor in outputs:
            self._watch(tensor)
        if self._now is not None:
            self._now.peak_bytes = max(self._now.peak_bytes, self._live - self._started)
            kind, flops = _flops(func, args, kwargs or {}, outputs)
            if not outputs or (kind == "memory" and _is_free(func)):  # a question, a view, or memory
                return result
            inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            nbytes = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
            self._now.operations.append((kind, flops, float(nbytes)))
        return result

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key in self._seen or key in self._weights:
            return
        self._seen[key] = storage.nbytes()
        self._live += storage.nbytes()
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._live -= self._seen.pop(key)


class _KernelsOfAGpu(TorchFunctionMode):
    """Lets two operations be one kernel that the CPU takes apart and a GPU does not.

    Attention with values of another head size (latent attention): the CPU's kernel has one head size and
    leaves the rest to plain products, which keep the whole square. A root-mean-square norm: the CPU's keeps
    two copies of its input in fp32 where a GPU's keeps the input and a number per row, as a layer norm does
    on both.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and args[0].shape[-1] != args[2].shape[-1]:
            query, key, value, *rest = args
            padded = F.pad(value, (0, query.shape[-1] - value.shape[-1]))
            return func(query, key, padded, *rest, **kwargs)[..., : value.shape[-1]]
        if func is F.rms_norm:
            return _as_layer_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _as_layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """A norm that reads, writes and keeps what ``rms_norm`` does on a GPU; its values do not matter here."""
    return F.layer_norm(input, normalized_shape, weight, None, eps or 1e-5)


_NO_WORK = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "detach",
    "alias",
    "_unsafe_view",
    "lift_fresh",
}


def _is_free(func: Any) -> bool:
    """Whether an operation only makes a view or takes memory."""
    schema = schema_of(func)
    views = not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
    return views or func.overloadpacket.__name__ in _NO_WORK


def _flops(func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> tuple[str, float]:
    """Kind and FLOPs of an operation; causal attention computes half of its square."""
    packet = func.overloadpacket
    if packet in _PRODUCTS:
        first = _PRODUCTS[packet]
        a, b = args[first], args[first + 1]
        return "matmul", 2.0 * a.shape[-1] * outputs[0].numel()
    if packet in _GROUPED:
        a, b = args[0], args[1]
        if a.dim() == 2 and b.dim() == 2:  # the gradient of the weights: every row is in one group
            return "matmul", 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
        return "matmul", 2.0 * a.shape[-1] * outputs[0].numel()
    if packet in _ATTENTION:
        query, key = args[_ATTENTION[packet]], args[_ATTENTION[packet] + 1]
        value = args[_ATTENTION[packet] + 2]
        *batch, queries, dim = query.shape
        square = math.prod(batch) * queries * key.shape[-2] * (dim + value.shape[-1]) * 2.0
        causal = any(argument is True for argument in (*args, *kwargs.values()))
        backward = 2.5 if _ATTENTION[packet] else 1.0
        return "attention", square * backward * (0.5 if causal else 1.0)
    return "memory", 0.0


_PRODUCTS: dict[Any, int] = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}
"""The place of a product's first matrix among its arguments."""
_GROUPED = {getattr(_aten, "_grouped_mm", None)} - {None}
_ATTENTION: dict[Callable[..., Any], int] = {
    getattr(_aten, f"_scaled_dot_product_{name}"): first
    for names, first in (
        (("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"), 0),
        (
            (
                "flash_attention_for_cpu_backward",
                "flash_attention_backward",
                "efficient_attention_backward",
                "cudnn_attention_backward",
            ),
            1,
        ),
    )
    for name in names
}
"""The place of the query among the arguments of attention; in a backward the gradient comes first."""
