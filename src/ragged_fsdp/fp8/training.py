"""``fp8_training``: which modules of a model compute in FP8, and what ``fully_shard`` gathers for them.

A linear layer gets another class, with the forward of :class:`Fp8Linear`; fused experts one whose forward
sends rows to ``grouped_linear``. Their weights carry an :class:`~ragged_fsdp.fp8.autograd.Fp8Product`, by
which :func:`gather_policy` and the products know them.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp.experts import Here, expert_modules, mix
from ragged_fsdp.experts.layers import expert_parameters, held_part
from ragged_fsdp.fp8.autograd import Fp8Product, Seen
from ragged_fsdp.fp8.groups import BLOCK
from ragged_fsdp.fp8.products import BACKENDS
from ragged_fsdp.fsdp.parts.left_out import MANAGED_ATTRIBUTE
from ragged_fsdp.fsdp.parts.members import CODES_ATTRIBUTE, PRODUCT_ATTRIBUTE
from ragged_fsdp.policy import BlockCodes, Tiles

__all__ = [
    "Fp8Linear",
    "Watch",
    "compute_in_fp8",
    "fits",
    "fp8_modules",
    "fp8_training",
    "gather_policy",
    "left_out",
    "nonfinite",
    "orig_param_policy",
]

logger = logging.getLogger("ragged_fsdp")
Include = Callable[[str, nn.Module], bool]
_CODES = BlockCodes("float8_e4m3fn", (BLOCK, BLOCK), decoded=False)
_IN_TILES = "store it in tiles (tiles=True; train --granularity '*_proj*=tiles:128x128'), "
_TILED_MULTIPLE = 16  # what the kernels read begins at multiples of 16 bytes
_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that read the weights of the linear layers in them, the latter where nothing is trained: nans."""
_EXCLUDED = re.compile(r"(^|\.)(lm_head|output|score|classifier|embed\w*|wte|wpe|\w*norm\w*|gate|router)$")


class Fp8Linear(nn.Linear):
    """A linear layer whose three products are in FP8."""

    fp8_products: dict[str, Fp8Product]

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``."""
        weight, product = self.weight, self.fp8_products["weight"]
        if isinstance(weight, DTensor):
            out = _split_linear(product, x, weight)
        else:
            out = product.linear(x, weight)
        return out if self.bias is None else out + self.bias


def _split_linear(product: Fp8Product, x: Tensor, weight: DTensor) -> Tensor:
    """The product with a weight that tensor parallelism split, by its rows or its columns."""
    if len(weight.placements) > 1 or type(weight.placements[0]) is not Shard:
        raise RuntimeError(
            f"fp8: {product.name} is placed as {weight.placements}, not gathered; call the module that "
            "fully_shard was applied to."
        )
    mesh, (placement,) = weight.device_mesh, weight.placements
    rows: Any = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    if placement.is_shard(0):  # each rank has columns of the output; the gradients of its input are added up
        here = rows.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        made: Placement = Shard(x.ndim - 1)
    else:
        here, made = rows.redistribute(placements=[Shard(x.ndim - 1)]).to_local(), Partial()
    return DTensor.from_local(product.linear(here, held_part(weight)), mesh, [made], run_check=False)


class Fp8Experts(nn.Module):
    """Fused experts whose products are in FP8."""

    fp8_products: dict[str, Fp8Product]
    fp8_arguments: list[str]
    num_experts: int

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Tokens (N, D), their experts (N, K) and weights (N, K) to the mixed outputs (N, D)."""
        names = self.fp8_arguments
        tokens, chosen, weights = (*args, *(kwargs[name] for name in names[len(args) :]))
        return mix(self, Here(self.num_experts), tokens, chosen, weights)[0]  # type: ignore[arg-type]


def _name_products(experts: Any, _: Any) -> None:
    """Before a forward, also one that another has replaced: weights say again how they are computed with.

    A weight of a copy of the model does not, nor one in another's place (``to_empty``, ``assign=True``): its
    products would be those of its dtype, without a word.
    """
    for own, product in experts.fp8_products.items():
        weight = getattr(experts, own)
        if not hasattr(weight, PRODUCT_ATTRIBUTE):
            setattr(weight, PRODUCT_ATTRIBUTE, product)


def fp8_training(
    model: nn.Module, *, include: Include | None = None, tiles: bool = False, backend: str = "auto"
) -> nn.Module:
    """Let linear layers and fused experts of ``model`` compute forward and both gradients in FP8, in place.

    Call it before ``fully_shard``, and pass ``gather_policy=ragged_fsdp.fp8.gather_policy`` to that: the
    owners of a weight then quantise it once per gather, and codes travel. A model that is not sharded
    quantises its weights where it computes, to the same bits. Before it, ``parallelize_module`` may split
    linear layers; before or after it :func:`ragged_fsdp.experts.expert_parallel` may spread experts over
    ranks. Call it again where parameters are made anew: on a copy, after ``to_empty`` or ``assign=True``.

    Args:
        model: any module.
        include: ``include(name, module)`` says whether a linear layer, or a module of experts, computes in
            FP8. None takes all whose sizes fit, except heads, routers and what is tied to a module that does
            not compute in FP8, and logs a line about those whose sizes do not.
        tiles: the weights will be stored in tiles (``orig_param_policy=ragged_fsdp.fp8.orig_param_policy``).
            Their sizes must then be multiples of 16, otherwise of 128.
        backend: ``hopper``, ``emulation`` (slow, exact, on any device), or ``auto``.

    Returns:
        The model.

    Raises:
        ValueError: ``include`` asks for a module whose sizes do not fit, or nothing is found; nothing has
            been changed then.
    """
    _check_backend(backend)
    choice = _choose(model, include, tiles)
    if choice.unfit and include is not None:
        raise ValueError(f"fp8_training: {next(iter(choice.unfit.values()))}.")
    if not choice.taken:
        hint = f": {next(iter(choice.unfit.values()))}" if choice.unfit else ""
        raise ValueError(f"fp8_training: {type(model).__name__} has no module to compute in FP8{hint}.")
    seen = Seen()
    for name, module in choice.taken.items():
        _enable(name, module, backend, seen)
    if choice.unfit:
        unfit = list(choice.unfit.values())
        logger.warning("fp8: %d modules stay as they are, such as %s", len(unfit), unfit[0])
    return model


def left_out(model: nn.Module, *, include: Include | None = None, tiles: bool = False) -> dict[str, str]:
    """Parameters of ``model`` that would not compute in FP8, by name, and for each the rule that says so.

    Arguments are those of :func:`fp8_training`; nothing is changed, and a model on the meta device will do.
    """
    choice = _choose(model, include, tiles)
    rules: dict[int, str] = {}  # of matrices, by parameter
    for name, module in _candidates(model):
        for own, weight in _weights(module).items():
            unfit = choice.unfit.get(name, "").removeprefix(f"{name}.").removeprefix(f"{own} ")
            rules[id(weight)] = choice.excluded.get(name) or unfit
    for module in model.modules():
        if isinstance(module, nn.Linear):
            rules.setdefault(id(module.weight), f"{type(module).__name__} has a forward of its own")
    others = "no matrix of a linear layer or of fused experts"
    found = {name: rules.get(id(p), others) for name, p in model.named_parameters()}
    return {name: rule for name, rule in found.items() if rule}


def compute_in_fp8(parameter: nn.Parameter, name: str, *, tiles: bool = False, backend: str = "auto") -> None:
    """Let :func:`ragged_fsdp.experts.grouped_linear` multiply with ``parameter`` in FP8.

    For modules of one's own that hold stacked matrices; ``name`` is for messages, ``tiles`` and ``backend``
    are as in :func:`fp8_training`. Call it before ``fully_shard``.
    """
    _check_backend(backend)
    broken = _broken_rule({name: parameter}, tiles)
    if broken:
        raise ValueError(f"compute_in_fp8: {broken}.")
    setattr(parameter, PRODUCT_ATTRIBUTE, Fp8Product(name, backend, Seen()))


def fits(weight: Tensor, *, tiles: bool = False) -> bool:
    """Whether FP8 products can compute with matrices of this shape and dtype, in tiles or not."""
    return not _broken_rule({"": weight}, tiles)


def gather_policy(name: str, parameter: nn.Parameter) -> BlockCodes | None:
    """For ``fully_shard(gather_policy=...)``: codes for the weights that FP8 products compute with."""
    return _CODES if hasattr(parameter, PRODUCT_ATTRIBUTE) else None


def orig_param_policy(name: str, parameter: nn.Parameter) -> Tiles | None:
    """For ``fully_shard(orig_param_policy=...)``: tiles for weights of FP8 products."""
    return Tiles(BLOCK, BLOCK) if hasattr(parameter, PRODUCT_ATTRIBUTE) else None


def fp8_modules(model: nn.Module) -> dict[str, Fp8Linear | Fp8Experts]:
    """The modules of ``model`` that compute in FP8, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, (Fp8Linear, Fp8Experts))}


class Watch:
    """Names what FP8 products saw that is not finite, as of a moment, without waiting for it.

    Where a step's loss is read while the next one runs, the next one has been computed with what the first
    one spoiled, and has seen it everywhere. So :meth:`mark` at the end of each step, and ask for the names
    when the loss of that step turns out not to be finite.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = fp8_modules(model).items()
        self._products = [
            (f"{name}.{own}", product)
            for name, module in modules
            for own, product in module.fp8_products.items()
        ]
        self._seen = list(dict.fromkeys(product.seen for _, product in self._products))
        self._marked: dict[Seen, list[Tensor]] = {}

    def mark(self) -> None:
        """Keep what was seen until now; one small copy on the device."""
        self._marked = {seen: seen.copied() for seen in self._seen}

    def names(self) -> list[str]:
        """What was seen until the last mark, the first thing first; the device is asked.

        Inputs come in the order of the model, then gradients of outputs in that of backward.
        """
        on_host = {seen: [flags.cpu() for flags in marked] for seen, marked in self._marked.items()}

        def was_seen(product: Fp8Product, which: int) -> bool:
            return any(bool(flags[product.place, which]) for flags in on_host.get(product.seen, ()))

        inputs = [f"{name}: an input" for name, product in self._products if was_seen(product, 0)]
        gradients = [
            f"{name}: a gradient of its output" for name, product in self._products if was_seen(product, 1)
        ]
        return [*inputs, *reversed(gradients)]


def nonfinite(model: nn.Module) -> list[str]:
    """What was not finite since the last call, by name, the first thing first.

    Inputs come in the order of the model, then gradients of outputs in that of backward, then weights that
    are not finite now. The device is asked, so call it where a loss or a norm of gradients was not finite,
    before the next step. A compiled module does not note its inputs and gradients.
    """
    watch = Watch(model)
    watch.mark()
    found = watch.names()
    for name, module in fp8_modules(model).items():
        for own, product in module.fp8_products.items():
            product.seen.clear()
            weight = getattr(module, own)
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            if not hasattr(weight, CODES_ATTRIBUTE) and not bool(local.detach().isfinite().all()):
                found.append(f"{name}.{own}: the weight")
    return found


class _Choice(NamedTuple):
    """Modules by name: those that compute in FP8, and those that do not with the rule that says so."""

    taken: dict[str, nn.Module]
    excluded: dict[str, str]
    unfit: dict[str, str]


def _choose(model: nn.Module, include: Include | None, tiles: bool) -> _Choice:
    """Which of the modules that could compute in FP8 do."""
    choice = _Choice({}, {}, {})
    readers = {
        id(m): type(own).__name__
        for own in model.modules()
        if isinstance(own, _READERS)
        for m in own.children()
    }
    for name, module in _candidates(model):
        if include is not None and not include(name, module):
            choice.excluded[name] = "include= leaves it out"
        elif include is None and _EXCLUDED.search(name):
            choice.excluded[name] = "left out by its name: a head, a router, a norm or an embedding"
        elif id(module) in readers:
            choice.unfit[name] = (
                f"{name}.weight is read by its {readers[id(module)]}, past the layer: exclude it"
            )
        elif broken := _broken_rule({f"{name}.{own}": w for own, w in _weights(module).items()}, tiles):
            choice.unfit[name] = broken
        else:
            choice.taken[name] = module
    while tied := _tied_to_others(model, choice.taken):  # which leaves fewer, so others may be tied to these
        name, own, other = tied
        del choice.taken[name]
        if include is None:
            choice.excluded[name] = f"tied to {other}, which does not compute in FP8"
        else:
            choice.unfit[name] = (
                f"{name}.{own} is tied to {other}, which does not compute in FP8 and would read nans: "
                "include both or neither"
            )
    return choice


def _tied_to_others(model: nn.Module, taken: Mapping[str, nn.Module]) -> tuple[str, str, str] | None:
    """One that is taken and shares a weight with one that is not: its name, the weight's, the other's."""
    modules = {id(module) for module in taken.values()}
    others = {
        id(p): name
        for name, module in model.named_modules()
        if id(module) not in modules
        for p in module.parameters(recurse=False)
    }
    found = (
        (n, own, others.get(id(w))) for n, module in taken.items() for own, w in _weights(module).items()
    )
    return next(((name, own, other) for name, own, other in found if other is not None), None)


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers with torch's own forward, and modules of experts whose products are ours to replace."""
    experts = expert_modules(model)
    for name, module in model.named_modules():
        if name in experts:
            if hasattr(module, "has_gate") or getattr(module, "uses_grouped_linear", False):
                yield name, module
        elif (
            isinstance(module, nn.Linear)
            and type(module).forward in (nn.Linear.forward, Fp8Linear.forward)
            and isinstance(module.weight, nn.Parameter)  # a parametrized one is computed from others
        ):
            yield name, module


def _weights(module: nn.Module) -> Mapping[str, Tensor]:
    """The parameters of a module that are matrices, or stacks of them."""
    if isinstance(module, nn.Linear):
        return {"weight": module.weight}
    return {n: p for n, p in expert_parameters(module).items() if p.ndim == 3}


def _broken_rule(weights: Mapping[str, Tensor], tiles: bool) -> str:
    """Which rule the first weight that does not fit breaks and what to do; nothing if all fit."""
    multiple = _TILED_MULTIPLE if tiles else BLOCK
    for name, weight in weights.items():
        if getattr(weight, MANAGED_ATTRIBUTE, False):
            return f"{name} is sharded already; call it before fully_shard"
        if isinstance(weight, DTensor) and weight.ndim == 2:
            split = weight.placements[0]
            if (
                len(weight.placements) > 1
                or not isinstance(split, Shard)
                or weight.shape[split.dim] % weight.device_mesh.size()
            ):
                return (
                    f"{name} is placed as {weight.placements}; FP8 products take one even Shard: exclude it"
                )
        rows, columns = (weight.to_local() if isinstance(weight, DTensor) else weight).shape[-2:]
        if rows % multiple or columns % multiple:
            fits_tiles = not (tiles or rows % _TILED_MULTIPLE or columns % _TILED_MULTIPLE)
            return (
                f"{name} has matrices of {rows} x {columns}; FP8 products need multiples of {multiple}: "
                f"{_IN_TILES if fits_tiles else ''}pad the layer, or exclude it"
            )
        if not weight.dtype.is_floating_point or weight.dtype.itemsize == 1:
            return f"{name} is {weight.dtype}; FP8 products quantise fp32 or bf16 weights"
    return ""


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"fp8: backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")


def _enable(name: str, module: Any, backend: str, seen: Seen) -> None:
    experts = not isinstance(module, nn.Linear)
    for own, weight in _weights(module).items():
        if not hasattr(weight, PRODUCT_ATTRIBUTE):
            setattr(weight, PRODUCT_ATTRIBUTE, Fp8Product(f"{name}.{own}", backend, seen))
    module.fp8_products = {own: getattr(p, PRODUCT_ATTRIBUTE) for own, p in _weights(module).items()}
    if experts and not isinstance(module, Fp8Experts):
        module.fp8_arguments = list(inspect.signature(type(module).forward).parameters)[1:4]
        module.register_forward_pre_hook(_name_products)
    if not isinstance(module, (Fp8Experts, Fp8Linear)):
        kind: Any = type(module)
        module.__class__ = _with(Fp8Experts if experts else Fp8Linear, kind)


@cache
def _with(first: Any, second: Any) -> Any:
    """The user's class with another forward; the same for all modules of the class."""
    if second is nn.Linear:
        return first
    return type(f"Fp8{second.__name__}", (first, second), {"__module__": second.__module__})
