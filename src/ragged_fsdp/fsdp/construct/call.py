"""One ``fully_shard`` call before it changes anything: its arguments, what it manages, the ranks' consent."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from ragged_fsdp.agreement import Disagreement, compare
from ragged_fsdp.collectives import explain_failure
from ragged_fsdp.fsdp.parts.left_out import MANAGED_ATTRIBUTE
from ragged_fsdp.fsdp.parts.members import ManagedParam, Registration
from ragged_fsdp.fsdp.parts.mesh import ParallelMesh
from ragged_fsdp.fsdp.runtime.state import state_of
from ragged_fsdp.topology import given_ranks_per_node
from ragged_fsdp.torch_internals import get_registry, is_traceable_wrapper_subclass, parameters_of

__all__ = [
    "Agreement",
    "Gather",
    "Managed",
    "Options",
    "Reduction",
    "collect",
    "moved_buffers",
    "replace_buffers",
]

Reduction = Literal["reduce_scatter", "all_to_all", "two_level", "auto"]
Gather = Literal["flat", "two_level", "auto"]

logger = logging.getLogger("ragged_fsdp")
_INTERNODE_DTYPES = (None, torch.bfloat16, torch.float32)
_MOST_CHARACTERS = 2000  # of an error that is told; some print a whole module
_PATIENCE_S = 5.0  # for the other ranks to hear of an error, before it is logged as well
_SAME_ON_ALL_RANKS = (
    "reduction",
    "gather",
    "node_size",
    "internode_dtype",
    "reshard_after_forward",
    "gathered_budget_bytes",
    "max_buffers",
    "mp_policy",
    "conditional",
)


@dataclass
class Options:
    """The arguments of ``fully_shard``; one of the wrong type raises, named."""

    reshard_after_forward: bool | int | str | None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: Iterable[nn.Parameter] | None
    orig_param_policy: Callable[[str, nn.Parameter], Any] | None
    reduction: str
    gathered_budget_bytes: int | None
    max_buffers: int
    gather_policy: Callable[[str, nn.Parameter], Any] | None
    gather: str
    ranks_per_node: int | None
    internode_dtype: torch.dtype | None
    conditional: bool

    def __post_init__(self) -> None:
        self.ignored = _parameter_set(self.ignored_params)
        for name, kind in (("mp_policy", MixedPrecisionPolicy), ("offload_policy", OffloadPolicy)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(
                    f"fully_shard: {name} must be of the class {kind.__name__}, got {getattr(self, name)!r}."
                )
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self.mp_policy, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(
                    f"fully_shard: mp_policy.{name} must be a floating torch.dtype or None, got {dtype!r}."
                )
        choices = {"reduction": get_args(Reduction), "gather": get_args(Gather)}
        for name, values in {**choices, "internode_dtype": _INTERNODE_DTYPES}.items():
            if getattr(self, name) not in values:
                raise ValueError(f"fully_shard: {name} must be one of {values}, got {getattr(self, name)!r}.")
        self.node_size = given_ranks_per_node(self.ranks_per_node)
        most = self.max_buffers
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise ValueError(f"fully_shard: max_buffers must be an int >= 1, got {most!r}.")
        if not isinstance(self.conditional, bool):
            raise TypeError(f"fully_shard: conditional must be a bool, got {self.conditional!r}.")
        for name in ("shard_placement_fn", "orig_param_policy", "gather_policy"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TypeError(f"fully_shard: {name} must be callable, got {getattr(self, name)!r}.")
        self._check_reshard()

    def _check_reshard(self) -> None:
        value, budget = self.reshard_after_forward, self.gathered_budget_bytes
        if (value == "auto") != (budget is not None):
            raise ValueError(
                'fully_shard: reshard_after_forward="auto" and gathered_budget_bytes go together, '
                f"got {value!r} and {budget!r}."
            )
        if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 0):
            raise ValueError(f"fully_shard: gathered_budget_bytes must be an int >= 0, got {budget!r}.")
        if value not in (None, "auto") and not isinstance(value, int):
            raise ValueError(
                "reshard_after_forward should be a bool or an int representing the "
                f"group size to reshard to, not {value}"
            )

    @property
    def reshard_to(self) -> int | None:
        """Over how many ranks shards are kept after forward, where ``reshard_after_forward`` says it."""
        value = self.reshard_after_forward
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def asks_the_network(self) -> bool:
        """Whether ranks must find out where they are before groups can be made."""
        return (self.reduction, self.gather) != ("reduce_scatter", "flat")

    @property
    def description(self) -> str:
        """One line per argument that decides which collectives run: what ranks must agree on."""
        return "\n".join(f"{name}={getattr(self, name)}" for name in _SAME_ON_ALL_RANKS)


def _parameter_set(given: Any) -> set[nn.Parameter]:
    """What was given as ``ignored_params``; raise unless it is a collection of parameters."""
    if given is None:
        return set()
    if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
        kind = type(given).__name__
        raise TypeError(f"fully_shard: ignored_params must be a set of parameters, got a {kind}.")
    params = list(given)
    for param in params:
        if not isinstance(param, nn.Parameter):
            raise TypeError(f"fully_shard: ignored_params must be a set of parameters, got {param!r} in it.")
    return set(params)


@dataclass(frozen=True)
class Managed:
    """What one call manages; parameters have names relative to the module passed."""

    modules: list[nn.Module]
    params: list[ManagedParam]
    buffers: list[torch.Tensor]


def collect(roots: Sequence[nn.Module], ignored: set[nn.Parameter]) -> Managed:
    """The modules below ``roots`` that no earlier call manages, and their parameters."""
    modules = [m for m in _modules(roots) if not ignored or not _only_ignored(m, ignored)]
    wanted: dict[nn.Parameter, None] = {}
    buffers: dict[torch.Tensor, None] = {}
    for module in modules:
        for name, param in module.named_parameters(recurse=False):
            if param in ignored:
                continue
            if param.ndim == 0:
                raise ValueError(
                    "fully_shard doesn't support scalar parameters. "
                    f"Change {name} to a 1D tensor with numel equal to 1."
                )
            wanted[param] = None
        buffers.update(dict.fromkeys(module.buffers(recurse=False)))
    places: dict[nn.Parameter, list[Registration]] = {}
    names: dict[nn.Parameter, str] = {}
    for qualified, place, param in _registrations(roots):
        if param in wanted:
            names.setdefault(param, qualified)
            places.setdefault(param, []).append(place)
    for param in wanted:
        if hasattr(param, MANAGED_ATTRIBUTE):
            raise ValueError(
                f"fully_shard: '{names[param]}' is already sharded by a call on a module above; "
                "call it bottom-up, on the children first."
            )
    params = [ManagedParam(names[param], param, places[param]) for param in wanted]
    return Managed(modules, params, list(buffers))


def _modules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """All modules to manage, children first; none that has a state of its own or that DDP replicates."""
    found: list[nn.Module] = []
    seen: set[nn.Module] = set()
    top = set(roots)

    def visit(module: nn.Module) -> None:
        if "replicate" in (get_registry(module) or {}):
            return
        if module not in top and state_of(module) is not None:
            return
        if isinstance(module, TorchFSDPModule) and state_of(module) is None:
            raise ValueError(
                f"fully_shard: a {type(module).__name__} in the model was sharded by "
                "torch.distributed.fsdp.fully_shard; use one of the two for all of it."
            )
        seen.add(module)
        for child in module.children():
            if child not in seen:
                visit(child)
        found.append(module)

    for root in roots:
        visit(root)
    return found


def _only_ignored(module: nn.Module, ignored: set[nn.Parameter]) -> bool:
    """Whether nothing below ``module`` is left to manage: no buffer and no parameter but ignored ones."""
    if next(module.buffers(), None) is not None:
        return False
    return all(param in ignored for param in module.parameters())


def _registrations(roots: Sequence[nn.Module]) -> Iterator[tuple[str, Registration, nn.Parameter]]:
    """Every name under which a parameter is registered, duplicates included."""
    many = len(roots) > 1
    for index, root in enumerate(roots):
        prefix = f"{index}." if many else ""
        for module_name, module in root.named_modules(remove_duplicate=False):
            dot = f"{module_name}." if module_name else ""
            for name, param in parameters_of(module).items():
                if param is not None:
                    yield f"{prefix}{dot}{name}", Registration(module, name), param


def moved_buffers(managed: Managed, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each buffer that lies elsewhere, with its copy on ``device``; raise on DTensors that cannot move.

    What is on the meta device waits for its initialisation.
    """
    for tensor in (*(param.sharded for param in managed.params), *managed.buffers):
        if isinstance(tensor, DTensor) and tensor.device != device and tensor.device.type != "meta":
            kind = tensor.device_mesh.device_type
            if kind != device.type:
                raise ValueError(
                    "Requires DTensor to have mesh of the same type as the FSDP mesh "
                    f"but got {kind} for DTensor and {device.type} for FSDP"
                )
            raise AssertionError(f"Expects DTensor to be moved to {kind} but got {tensor.device}")
    with torch.no_grad():
        return [
            (buffer, buffer.to(device))
            for buffer in managed.buffers
            if buffer.device != device and buffer.device.type != "meta"
        ]


def replace_buffers(moved: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Let each buffer be its copy; its object stays."""
    for buffer, copy in moved:
        if is_traceable_wrapper_subclass(buffer):
            torch.utils.swap_tensors(buffer, copy)
        else:
            buffer.data = copy


class Agreement:
    """A block around all of a call that may fail before the ranks have compared what they are about to do.

    An exception that leaves the block before :meth:`reach` takes the place of this rank's statement in the
    comparison, in which the other ranks wait: they raise an error that names this rank. Where every rank
    fails each raises its own exception, as it would alone.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        self._is_open = True

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if not self._is_open or not isinstance(error, Exception):  # an interrupt waits for nobody
            return
        notes = getattr(error, "__notes__", ())
        failure = " ".join([f"{type(error).__name__}: {error}", *notes])[:_MOST_CHARACTERS]
        # Seen even if no other rank ever comes; where they come, the exception alone says it.
        text = f"fully_shard failed on rank {dist.get_rank()}, waiting to tell the others: {failure}"
        late = threading.Timer(_PATIENCE_S, logger.warning, (text,))
        late.daemon = True
        late.start()
        try:
            self._compare(self.mesh, "", "", failure=failure)
        except Exception as other:  # this rank's own error is the one to see
            error.add_note(f"ragged_fsdp: the other ranks could not be told: {other}")
        finally:
            late.cancel()

    def reach(self, statements: Sequence[tuple[ParallelMesh, str]], name: str) -> None:
        """Raise on every rank, naming the first difference or failure, unless all ranks state the same.

        There is a text for each mesh. This call's own is first: all its ranks learn of a difference or a
        failure there, and none goes on to the next. Where there are others it is also the last, so that all
        its ranks learn what some of them learnt in a mesh of fewer ranks.
        """
        self._is_open = False
        (own, text), *others = statements
        found = self._compare(own, name, text)
        if found is None:
            for mesh, text in others:
                found = self._compare(mesh, name, text, known=found)
        if found is not None and found.failures:
            rank, failure = found.failures[0]
            raise RuntimeError(f"fully_shard: nothing was changed, because rank {rank} raised {failure}")
        if found is not None:
            raise ValueError(f"fully_shard: the ranks disagree; {found.difference}.")

    def _compare(
        self,
        mesh: ParallelMesh,
        name: str,
        text: str,
        *,
        failure: str | None = None,
        known: Disagreement | None = None,
    ) -> Disagreement | None:
        groups = (mesh.shard_group, mesh.replicate_group)
        with explain_failure("comparison of the plans", name, mesh.shard_group):
            return compare(text, groups, self.device, failure=failure, known=known)
