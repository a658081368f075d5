"""``expert_parallel``: the experts of a model's layers spread over ranks, in place, before ``fully_shard``.

What is changed of a module of experts: its parameters become DTensors over the mesh, ``Shard(0)`` where every
rank holds as many experts and ``RaggedShard`` otherwise, and its ``forward`` sends rows to their experts. The
router, and all else, stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp.agreement import done_alike
from ragged_fsdp.dtensor import RaggedShard, distribute_tensor
from ragged_fsdp.experts.all_to_all import all_to_all
from ragged_fsdp.experts.beside import SharedBeside
from ragged_fsdp.experts.common import CommonParameters
from ragged_fsdp.experts.dispatch import (
    AllGather,
    Dispatcher,
    Meanwhile,
    Route,
    SlicedTokens,
    check_made,
    takes_work,
)
from ragged_fsdp.experts.layers import apply_experts, expert_count, expert_modules, expert_parameters
from ragged_fsdp.experts.levels import two_level
from ragged_fsdp.experts.split import ExpertSplit
from ragged_fsdp.experts.tally import add_up
from ragged_fsdp.fsdp.autograd import in_backward
from ragged_fsdp.fsdp.parts.members import PRODUCT_ATTRIBUTE
from ragged_fsdp.topology import given_ranks_per_node
from ragged_fsdp.torch_internals import disable_dynamo

__all__ = [
    "SplitExperts",
    "divide_gradients",
    "expert_parallel",
    "mix",
    "split_experts_of",
    "split_placement",
    "spread",
]

MakeDispatcher = Callable[[DeviceMesh, ExpertSplit], Dispatcher]

_BACKENDS: dict[str, MakeDispatcher] = {
    "all_to_all": all_to_all,
    "all_gather": AllGather,
    "two_level": two_level,
}
_STYLES = ("ep_dispatch_experts", *_BACKENDS)
_OF_PARAMETERS = ("grouped_gemm", "replicated_with_grad_allreduce")
"""Styles of what is inside of a module of experts, which follows it."""
_SHARED = ("shared_experts", "shared_expert")
_ATTRIBUTE = "_ragged_fsdp_experts"


class SplitExperts:
    """What a module of experts has become: who holds which, how tokens get there, where they went."""

    def __init__(
        self, name: str, module: nn.Module, mesh: DeviceMesh, split: ExpertSplit, make: MakeDispatcher
    ) -> None:
        self.name, self.module, self.mesh = name, module, mesh
        self._make = make
        parameters = list(inspect.signature(type(module).forward).parameters)
        self._arguments = parameters[1:4]
        self.load: Tensor | None = None
        """Slots sent to each expert by this rank's tokens, in training, since they were last taken; None
        before the first."""
        self.dropped: Tensor | None = None
        """How many of those were dropped; None where none can be."""
        self._common = CommonParameters(module, mesh.get_group())
        self.beside: SharedBeside | None = None
        """A shared expert that is computed while rows travel."""
        self.use(split)

    def use(self, split: ExpertSplit) -> None:
        """Send tokens as ``split`` says from now on; the parameters must follow."""
        self.split, self.dispatcher = split, self._make(self.mesh, split)
        self._held = split.held[self.mesh.get_local_rank()]
        self._takes_work = takes_work(self.dispatcher)

    @disable_dynamo  # the host must know how many rows there are, and ranks must meet in order
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Tokens (N, D), their experts (N, K) and weights (N, K) to the mixed outputs (N, D)."""
        tokens, chosen, weights = (*args, *(kwargs[name] for name in self._arguments[len(args) :]))
        dispatcher = self.dispatcher
        if not self.module.training:
            dispatcher = getattr(dispatcher, "for_evaluation", dispatcher)
        overlaps = self.beside is not None and self._takes_work
        meanwhile = self.beside.work(tokens) if overlaps else None  # type: ignore[union-attr]
        with self._common.added_up():
            mixed, route = mix(self.module, dispatcher, tokens, chosen, weights, meanwhile, self._held)
        if self.module.training and not in_backward():  # a recomputed layer has been counted
            self._count(route.load, route.dropped)
        return mixed

    def _count(self, load: Tensor, dropped: Tensor | None) -> None:
        self.load = add_up(self.load, load)
        if dropped is not None:
            self.dropped = add_up(self.dropped, dropped)


def mix(
    module: nn.Module,
    dispatcher: Dispatcher,
    tokens: Tensor,
    chosen: Tensor,
    weights: Tensor,
    meanwhile: Meanwhile = None,
    held: int | None = None,
) -> tuple[Tensor, Route]:
    """Tokens (N, D) through the experts that each was sent to, weighted; and where they went.

    ``held`` is how many experts are here; without it, as many as the dispatcher counts.
    """
    more = () if meanwhile is None else (meanwhile,)
    rows, counts, route = dispatcher.dispatch(tokens, chosen, *more)
    held = counts.numel() if held is None else held
    check_made(dispatcher, "rows of dispatch", rows, (len(rows), tokens.shape[-1]))
    check_made(dispatcher, "counts of dispatch", counts, (held,))
    mixed = dispatcher.combine(apply_experts(module, rows, counts), weights, route)
    check_made(dispatcher, "result of combine", mixed, tuple(tokens.shape))
    return mixed.to(tokens.dtype), route


def expert_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, str] | None = None,
    *,
    dispatcher: str | MakeDispatcher = "all_to_all",
    split: ExpertSplit | Mapping[str, ExpertSplit] | None = None,
    token_mesh: DeviceMesh | None = None,
    overlap: bool = True,
) -> nn.Module:
    """Spread the experts of ``model`` over the ranks of ``mesh``, in place; call it before ``fully_shard``.

    Every rank has its own tokens; their rows travel to the experts and back. Afterwards shard the modules of
    experts over the ranks that hold the same ones, everything else over all ranks, and tell the former how
    many parts a batch has (:func:`divide_gradients`): a gradient of an expert is a sum over the ranks of
    ``mesh`` already.

    Args:
        model: any module; on the meta device or with the same values on all ranks.
        mesh: 1-D, the ranks to spread experts over; or a mesh with a dim named ``ep``. Any number of ranks
            will do for any number of experts.
        plan: names of modules of experts, with ``*`` for numbers, to how tokens reach them: ``all_to_all``,
            ``all_gather``, ``two_level``, or transformers' ``ep_dispatch_experts`` for what ``dispatcher``
            says. An ``ep_plan`` of transformers is one. None spreads every module of experts that is found.
        dispatcher: ``all_to_all``, ``all_gather``, ``two_level``, or a function of mesh and split that makes
            a :class:`~ragged_fsdp.experts.Dispatcher`.
        split: how many experts each rank holds, for all modules or by name; even where not given.
        token_mesh: 1-D, ranks that share their tokens because attention is tensor parallel; each sends a part
            of them. They must be in one group of ``mesh``.
        overlap: compute a shared expert beside the others (``shared_experts`` or ``shared_expert`` of the
            module that holds them) while rows are on their way to theirs.

    Returns:
        The model.

    Raises:
        ValueError: the model has no experts, the plan or the split does not fit it, or the ranks disagree;
            nothing has been changed then.
    """
    mesh = _checked_mesh(mesh)
    how = dispatcher if isinstance(dispatcher, str) else "a dispatcher of the caller's"

    def prepare() -> dict[str, tuple[nn.Module, MakeDispatcher, ExpertSplit]]:
        found = _planned(model, plan, _maker(dispatcher))
        _check_named(split, found)
        for name, (module, _) in found.items():
            _check_module(model, name, module)
        return {n: (m, own, _split_for(n, m, mesh.size(), split)) for n, (m, own) in found.items()}

    def describe(prepared: dict[str, tuple[nn.Module, MakeDispatcher, ExpertSplit]]) -> str:
        lines = [f"{n} {_shapes(m)} {own} {how}" for n, (m, _, own) in prepared.items()]
        return "\n".join([*lines, f"nodes of {given_ranks_per_node(None)} ranks"])

    group, device = mesh.get_group(), torch.device(mesh.device_type)
    prepared = done_alike("spread experts", prepare, describe, [group], device)
    made = done_alike(  # by itself: what makes a dispatcher may communicate
        "make dispatchers",
        lambda: [
            SplitExperts(name, module, mesh, own, _sliced(make, token_mesh))
            for name, (module, make, own) in prepared.items()
        ],
        lambda _: "",
        [group],
        device,
    )
    for experts in made:  # nothing can fail from here on
        spread(experts)
        parent = model.get_submodule(experts.name.rpartition(".")[0])
        shared = [child for name, child in parent.named_children() if name in _SHARED]
        if overlap and shared:
            experts.beside = SharedBeside(shared[0])
    return model


def spread(experts: SplitExperts) -> None:
    """Leave this rank its part of the experts, and let the module's forward reach those of the others."""
    module = experts.module
    for name, parameter in expert_parameters(module).items():
        full = parameter.detach().contiguous()
        part = distribute_tensor(full, experts.mesh, [split_placement(experts.split)], src_data_rank=None)
        held = nn.Parameter(part, requires_grad=parameter.requires_grad)
        if hasattr(parameter, PRODUCT_ATTRIBUTE):  # fp8_training came first
            setattr(held, PRODUCT_ATTRIBUTE, getattr(parameter, PRODUCT_ATTRIBUTE))
        setattr(module, name, held)
    module.__dict__[_ATTRIBUTE] = experts
    module.forward = experts.forward  # type: ignore[method-assign]


def split_experts_of(model: nn.Module) -> dict[str, SplitExperts]:
    """The modules of ``model`` whose experts are spread over ranks, by name."""
    found = ((name, module.__dict__.get(_ATTRIBUTE)) for name, module in model.named_modules())
    return {name: experts for name, experts in found if experts is not None}


def divide_gradients(modules: Iterable[nn.Module], parts: int) -> None:
    """Let the gradients of sharded modules of experts be means over ``parts`` of a batch.

    A rank's experts have seen the tokens of all ranks that the experts are spread over. So their gradients,
    unlike others, are sums over several parts of the batch before ``fully_shard`` reduces them, and the mean
    must be over all parts. Works on modules of our ``fully_shard`` and of torch's.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise TypeError(
                f"divide_gradients: expected a module after fully_shard, got {type(module).__name__}."
            )
        module.set_gradient_divide_factor(parts)
        module.set_force_sum_reduction_for_comms(True)  # gloo can scale no other way


def split_placement(split: ExpertSplit) -> Placement:
    """How a parameter with an entry per expert lies on the mesh."""
    return Shard(0) if split.is_even else RaggedShard((0,), split.held)


def _checked_mesh(mesh: DeviceMesh) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expert_parallel: mesh must be a DeviceMesh, got {mesh!r}.")
    if mesh.ndim == 1:
        return mesh
    names: Sequence[str] = mesh.mesh_dim_names or ()
    if "ep" not in names:
        raise ValueError(
            f"expert_parallel: mesh must have one dim, or one named 'ep', got {tuple(mesh.shape)} named "
            f"{tuple(names)}; pass the dim that experts are to be spread over, such as mesh['experts']."
        )
    return mesh["ep"]


def _maker(dispatcher: str | MakeDispatcher) -> MakeDispatcher:
    if callable(dispatcher):
        return dispatcher
    if dispatcher not in _BACKENDS:
        raise ValueError(
            f"expert_parallel: dispatcher must be one of {', '.join(_BACKENDS)} or a function that makes "
            f"one, got {dispatcher!r}."
        )
    return _BACKENDS[dispatcher]


def _sliced(make: MakeDispatcher, token_mesh: DeviceMesh | None) -> MakeDispatcher:
    if token_mesh is None or token_mesh.size() == 1:
        return make
    return lambda mesh, split: SlicedTokens(make(mesh, split), token_mesh)


def _planned(
    model: nn.Module, plan: Mapping[str, str] | None, default: MakeDispatcher
) -> dict[str, tuple[nn.Module, MakeDispatcher]]:
    """The modules to spread and how tokens reach each."""
    known = expert_modules(model)
    if not known:
        raise ValueError(
            f"expert_parallel: {type(model).__name__} has no module of experts: neither one of transformers "
            "in which all experts of a layer are fused, nor one with num_experts and apply_to_groups "
            "(ragged_fsdp.experts.GroupedExperts)."
        )
    if plan is None:
        return {name: (module, default) for name, module in known.items()}
    found: dict[str, tuple[nn.Module, MakeDispatcher]] = {}
    for pattern, style in plan.items():
        if style in _OF_PARAMETERS and _is_inside(pattern, known):
            continue
        if style not in _STYLES:
            raise ValueError(
                f"expert_parallel: plan[{pattern!r}] is {style!r}; expected one of {', '.join(_STYLES)}."
            )
        names = _matching(pattern, known)
        if not names:
            raise ValueError(
                f"expert_parallel: plan[{pattern!r}] names no module of experts; there are "
                f"{', '.join(known)}."
            )
        found.update((n, (known[n], _BACKENDS.get(style, default))) for n in names)
    return {name: found[name] for name in known if name in found}


def _matching(pattern: str, modules: Collection[str]) -> list[str]:
    """The modules that a pattern of a plan names, which may leave out how their names begin."""
    return [name for name in modules if fnmatchcase(f".{name}", f"*.{pattern}")]


def _is_inside(pattern: str, modules: Collection[str]) -> bool:
    """Whether the pattern is of something inside one of the modules."""
    parts = pattern.split(".")
    return any(_matching(".".join(parts[:end]), modules) for end in range(1, len(parts)))


def _split_for(
    name: str, module: nn.Module, ranks: int, given: ExpertSplit | Mapping[str, ExpertSplit] | None
) -> ExpertSplit:
    count = expert_count(module)
    split = given.get(name) if isinstance(given, Mapping) else given
    if split is None:
        return ExpertSplit.even(count, ranks)
    if split.ranks != ranks or split.experts != count:
        raise ValueError(
            f"expert_parallel: {name} has {count} experts for {ranks} ranks, but its split is of "
            f"{split.experts} on {split.ranks}."
        )
    return split


def _check_named(given: Any, found: Mapping[str, Any]) -> None:
    for name in given if isinstance(given, Mapping) else ():
        if name not in found:
            raise ValueError(
                f"expert_parallel: split names {name!r}, which is not spread; there are {', '.join(found)}."
            )


def _check_module(model: nn.Module, name: str, module: nn.Module) -> None:
    holders = {id(p): n for n, m in model.named_modules() if m is not module for p in m.parameters(False)}
    for own, parameter in expert_parameters(module).items():
        if id(parameter) in holders:
            raise ValueError(
                f"expert_parallel: {name}.{own} is tied to a parameter of {holders[id(parameter)]}, and "
                "would be another one afterwards; experts that are the same must be one module."
            )
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"expert_parallel: {name}.{own} is a DTensor already; call it once, and before fully_shard."
            )


def _shapes(module: nn.Module) -> list[tuple[str, tuple[int, ...], str]]:
    return [(n, tuple(p.shape), str(p.dtype)) for n, p in expert_parameters(module).items()]
