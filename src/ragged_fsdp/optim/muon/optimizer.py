"""Muon on sharded parameters: each matrix is gathered to one rank, orthogonalized there, and sent back.

    momentum (every rank, its own elements)
        -> packed all-to-all: slabs to their roots
        -> Newton-Schulz on the root, same-shape matrices as one batch
        -> packed all-to-all: updates to the holders
        -> weights (every rank, its own elements)

How matrices travel is :mod:`ragged_fsdp.optim.exchange`, which knows nothing of Muon; what happens to them is
:mod:`ragged_fsdp.optim.muon.passes`. The state is one momentum buffer per parameter, placed like the
parameter: it never depends on how the work is divided, so a checkpoint resumes at any world size. What is
divided how is the plan
(:mod:`ragged_fsdp.optim.exchange.plan`), made at the first step and compared between ranks before the first
transfer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ragged_fsdp.optim.base import CheckedStateOptimizer, loss_of, unchanged_by_errors
from ragged_fsdp.optim.checks import (
    check_options,
    number,
    require_distinct,
    require_matching_grad,
    require_option,
)
from ragged_fsdp.optim.exchange import Exchange, Exchanges, MatrixRule, Member
from ragged_fsdp.optim.exchange.matrices import slabs_of
from ragged_fsdp.optim.exchange.members import work_device
from ragged_fsdp.optim.muon.newton_schulz import (
    Coefficients,
    check_backend,
    choose_backend,
    newton_schulz_flops,
    orthogonalize,
    per_iteration,
)
from ragged_fsdp.optim.muon.passes import FamilyStep, LocalState, MuonWork
from ragged_fsdp.optim.muon.rules import adamw_step, is_hidden_matrix, scale_function
from ragged_fsdp.optim.state import StateForm, form_like, local_part, require_state
from ragged_fsdp.torch_internals import disable_dynamo

__all__ = ["Muon"]

_LOG = logging.getLogger(__name__)
_MUON, _ADAMW = "muon", "adamw"
_ADAMW_OPTIONS = ("adamw_lr", "adamw_betas", "adamw_eps", "adamw_weight_decay")
_STATE_KEYS = {_MUON: ("momentum_buffer",), _ADAMW: ("step", "exp_avg", "exp_avg_sq")}

IsMatrix = Callable[[str | None, Tensor], bool]
SplitRule = Callable[[str | None, Tensor], MatrixRule]


@dataclass(frozen=True)
class _Options:
    """What belongs to the whole optimizer rather than to a param group."""

    is_matrix: IsMatrix
    split: SplitRule | None
    ns_dtype: torch.dtype
    ns_backend: str
    compile: bool
    bucket_numel: int
    buckets_in_flight: int
    muon_defaults: dict[str, Any]
    adamw_defaults: dict[str, Any]


class Muon(CheckedStateOptimizer):
    """Muon for hidden matrices, AdamW for everything else, on plain tensors and on any DTensor parameters.

    Pass ``model.named_parameters()``: names tell embeddings and heads from hidden matrices. Each given
    param group becomes up to two, with ``group["algorithm"]`` ``"muon"`` and ``"adamw"``; a group that
    already has that key is taken as it says. A group's own ``adamw_...`` options are for its AdamW half, its
    others for both. :meth:`describe` shows who got what.

    Args:
        params: parameters, named parameters, or param groups of either.
        lr, weight_decay, momentum, nesterov: as in ``torch.optim.Muon``; the decay is decoupled.
        ns_coefficients: (a, b, c) of the iteration, or one triple per iteration.
        eps: lower bound of the norm that a matrix is divided by.
        ns_steps: iterations.
        adjust_lr_fn: how the step depends on the shape of a matrix: ``"original"`` (None),
            ``"match_rms_adamw"``, ``"spectral"`` or ``"none"``.
        transposed: weights are stored (inputs, outputs), not (outputs, inputs); matters to ``adjust_lr_fn``.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: of the inner AdamW; a learning rate or decay
            of None means Muon's.
        is_matrix: ``(name, parameter) -> bool``, the rule that chooses; by default
            :func:`~ragged_fsdp.optim.muon.rules.is_hidden_matrix`.
        split: ``(name, parameter) -> Fused | Flattened | None``: the matrices inside a parameter. Without
            a rule, the last two dims are a matrix and the others count matrices (experts).
        ns_dtype: of the iteration and of what is sent; bfloat16, float32 or float64.
        ns_backend: ``"auto"``, ``"plain"``, ``"triton"`` or ``"reference"``.
        compile: use the plain iteration, through ``torch.compile``.
        bucket_numel: elements of one bucket on one root.
        buckets_in_flight: how many buckets a rank may hold at once: 1, 2 or 3.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        transposed: bool = False,
        adamw_lr: float | Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        is_matrix: IsMatrix = is_hidden_matrix,
        split: SplitRule | None = None,
        ns_dtype: torch.dtype = torch.bfloat16,
        ns_backend: str = "auto",
        compile: bool = False,
        bucket_numel: int = 1 << 27,
        buckets_in_flight: int = 3,
    ) -> None:
        if ns_dtype not in (torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f"ns_dtype must be bfloat16, float32 or float64, got {ns_dtype}.")
        check_backend(ns_backend, compile)
        muon = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "transposed": transposed,
        }
        adamw = {"lr": lr, "weight_decay": weight_decay, "betas": adamw_betas, "eps": adamw_eps}
        adamw |= _given({"lr": adamw_lr, "weight_decay": adamw_weight_decay})
        self._options = _Options(
            is_matrix, split, ns_dtype, ns_backend, compile, bucket_numel, buckets_in_flight, muon, adamw
        )
        self._forget_exchanges()
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the parameters of a group, as a Muon group and an AdamW group where both kinds are there."""
        if isinstance(param_group["params"], Set):
            raise TypeError("Muon needs parameters in an order that is the same on all ranks, got a set.")
        named = _named(param_group["params"])
        chosen = param_group.get("algorithm")
        if chosen not in (None, _MUON, _ADAMW):
            raise ValueError(f"algorithm must be 'muon' or 'adamw', got {chosen!r}.")
        if chosen is None and any(name is None and p.ndim > 1 for name, p in named):
            _LOG.warning(
                "Muon got parameters without names: embeddings and heads cannot be told from hidden "
                "matrices; pass model.named_parameters() or groups with algorithm='muon' or 'adamw'."
            )
        is_matrix = self._options.is_matrix
        kinds = [chosen or (_MUON if is_matrix(name, p) else _ADAMW) for name, p in named]
        rest = {key: value for key, value in param_group.items() if key not in ("params", "algorithm")}
        own = {key.removeprefix("adamw_"): rest.pop(key) for key in _ADAMW_OPTIONS if key in rest}
        options = {
            _MUON: {**self._options.muon_defaults, **rest},
            _ADAMW: {**self._options.adamw_defaults, **rest, **_given(own)},
        }
        groups_before = len(self.param_groups)
        require_distinct([(Member(name, p).label, p) for name, p in named])
        try:
            for algorithm in (_MUON, _ADAMW):
                members = [pair for pair, kind in zip(named, kinds) if kind == algorithm]
                if not members and (named or algorithm == _ADAMW):
                    continue
                group = {**options[algorithm], "algorithm": algorithm}
                _check_group(group, members, self._rule_of)
                group["params"] = [pair if pair[0] is not None else pair[1] for pair in members]
                super().add_param_group(group)
        except BaseException:
            del self.param_groups[groups_before:]  # both halves or none
            raise

    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of all parameters that have a gradient."""
        loss = loss_of(closure)
        groups = [group for group in self.param_groups if group["algorithm"] == _MUON]
        # Everything that can be wrong is looked at before anything is changed or sent. What this rank alone
        # cannot do travels in the comparison of new plans: raised ahead of that, it would let others wait.
        failure: Exception | None = None
        families: dict[torch.device, list[FamilyStep]] = {}
        try:
            families = self._checked(groups)
        except Exception as error:
            failure = error
        prepared = []
        for exchange in self._exchanges(groups, failure):
            states = [self._local_state(p) for p in exchange.parameters]
            prepared.append((exchange, MuonWork(states, families[exchange.team.device])))
        for group in self.param_groups:
            if group["algorithm"] == _ADAMW:
                adamw_step(group, self.state)
        for exchange, work in prepared:
            exchange.run(work)
        return loss

    def describe(self) -> str:
        """A line per parameter: name, shape, algorithm, its matrices; after a step their ranks too."""
        roots = {
            id(p): ", ".join(str(rank) for rank in ranks)
            for exchange in self._latest
            for p, ranks in zip(exchange.parameters, exchange.roots())
        }
        lines = []
        for group in self.param_groups:
            for name, p in _members_of(group):
                line = f"{name or '(unnamed)'}  {tuple(p.shape)}  {group['algorithm']}"
                if group["algorithm"] == _MUON:
                    line += f"  {_matrices_text(p, self._rule_of(name, p))}"
                    line += f"  on ranks {roots[id(p)]}" if id(p) in roots else ""
                lines.append(line)
        return "\n".join(lines)

    @disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; state that does not lie like its parameter raises, and nothing is changed."""
        with unchanged_by_errors(self):
            super().load_state_dict(state_dict)
            self._require_states()

    def named_group_params(self, group_index: int) -> Iterator[tuple[str, Tensor]]:
        """The parameters of a group with what errors call them."""
        for name, param in _members_of(self.param_groups[group_index]):
            yield Member(name, param).label, param

    def _expected_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, StateForm | None]:
        keys = _STATE_KEYS[group["algorithm"]]
        return {key: None if key == "step" else form_like(param) for key in keys}

    def __getstate__(self) -> dict[str, Any]:  # type: ignore[override]
        return {**super().__getstate__(), "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_exchanges()  # they are bound to the parameters of the original

    def _forget_exchanges(self) -> None:
        options = self._options
        limits = {"bucket_numel": options.bucket_numel, "buckets_in_flight": options.buckets_in_flight}
        # Which plain parameters have a gradient may differ between ranks: they are remembered by themselves.
        self._sharded, self._local = (
            Exchanges("Muon", newton_schulz_flops, options.ns_dtype, **limits) for _ in range(2)
        )
        self._latest: tuple[Exchange, ...] = ()

    def _rule_of(self, name: str | None, parameter: Tensor) -> MatrixRule:
        return self._options.split(name, parameter) if self._options.split is not None else None

    def _checked(self, groups: list[dict[str, Any]]) -> dict[torch.device, list[FamilyStep]]:
        """What the Muon groups do in this step, by device; raises if a gradient, state or option is wrong."""
        for index, group in enumerate(self.param_groups):
            check_options(group, dict.fromkeys(("lr", "weight_decay", "eps"), "a number"))
            for name, p in self.named_group_params(index):
                if p.grad is not None:
                    require_matching_grad(name, p)
                    _require_usable(name, p, group["algorithm"], self.state.get(p, {}))
        devices = {work_device(p): None for group in groups for p in group["params"]}
        return {device: [self._family_step(group, device) for group in groups] for device in devices}

    def _exchanges(
        self, groups: list[dict[str, Any]], failure: Exception | None = None
    ) -> tuple[Exchange, ...]:
        """The exchanges of the trainable parameters, made when that set is first seen; raises a failure.

        Sharded parameters without a gradient take part all the same: which gradients there are may differ
        between ranks, and neither a plan nor a transfer must depend on that. Others need a gradient.
        """
        trainable = [[p for p in group["params"] if p.requires_grad] for group in groups]
        sharded = [[p for p in params if _is_sharded(p)] for params in trainable]
        local = [[p for p in params if p.grad is not None and not _is_sharded(p)] for params in trainable]
        alone: tuple[Exchange, ...] = ()
        try:  # those of this rank first: what it cannot plan there goes into the comparison of the others
            alone = self._remembered(self._local, groups, local, failure)
        except Exception as error:
            failure = error
        self._latest = self._remembered(self._sharded, groups, sharded, failure) + alone
        return self._latest

    def _remembered(
        self,
        exchanges: Exchanges,
        groups: list[dict[str, Any]],
        chosen: list[list[Tensor]],
        failure: Exception | None,
    ) -> tuple[Exchange, ...]:
        key = tuple(tuple(map(id, params)) for params in chosen)
        return exchanges.remembered(key, partial(self._members, groups, chosen), failure)

    def _members(self, groups: list[dict[str, Any]], chosen: list[list[Tensor]]) -> list[Member]:
        members: list[Member] = []
        for family, (group, params) in enumerate(zip(groups, chosen)):
            wanted = set(map(id, params))
            pairs = [pair for pair in _members_of(group) if id(pair[1]) in wanted]
            members += [Member(name, p, self._rule_of(name, p), family) for name, p in pairs]
        return members

    def _local_state(self, parameter: Tensor) -> LocalState:
        gradient = parameter.grad
        if gradient is None:
            local = local_part(parameter)
            return LocalState(local, None, local)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        buffer = local_part(state["momentum_buffer"])
        return LocalState(local_part(parameter), local_part(gradient).contiguous(), buffer)

    def _family_step(self, group: dict[str, Any], device: torch.device) -> FamilyStep:
        lr = float(group["lr"])
        coefficients = per_iteration(group["ns_coefficients"], group["ns_steps"])
        compiled, eps = self._options.compile, group["eps"]
        requested = "plain" if compiled else self._options.ns_backend
        backend = choose_backend(requested, device, self._options.ns_dtype)
        return FamilyStep(
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            decay=1.0 - lr * group["weight_decay"],
            lr=lr,
            scale_of=scale_function(group["adjust_lr_fn"], group["transposed"]),
            orthogonalize=lambda batch: orthogonalize(
                batch, coefficients, eps, backend=backend, compiled=compiled
            ),
        )


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Options that say something: None means those of Muon."""
    return {key: value for key, value in options.items() if value is not None}


def _is_sharded(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1


def _members_of(group: dict[str, Any]) -> Iterator[tuple[str | None, Tensor]]:
    """The parameters of a group with their names, if they came with names."""
    return zip(group.get("param_names", [None] * len(group["params"])), group["params"])


def _named(params: Any) -> list[tuple[str | None, Tensor]]:
    items = [params] if isinstance(params, Tensor) else list(params)
    named = [item if isinstance(item, tuple) else (None, item) for item in items]
    for name, p in named:
        if not isinstance(p, Tensor) or not isinstance(name, str | None):
            found = type(p).__name__ if name is None else f"{name!r} and {type(p).__name__}"
            raise TypeError(f"Muon needs parameters, or pairs of a name and a parameter, got {found}.")
    return named


def _require_usable(label: str, parameter: Tensor, algorithm: str, state: dict[str, Any]) -> None:
    """Raise unless a step can use the parameter as it lies, and what state there is."""
    if algorithm == _ADAMW:
        if state:
            require_state(label, parameter, state, dict.fromkeys(_STATE_KEYS[_ADAMW]))
        return
    _require_contiguous(label, parameter)  # ``to(memory_format=...)`` may have come since it was added
    if "momentum_buffer" in state:
        buffer = local_part(state["momentum_buffer"])
        if not buffer.is_contiguous():
            raise ValueError(f"{label}: momentum_buffer must be contiguous, got strides {buffer.stride()}.")


def _require_contiguous(label: str, parameter: Tensor) -> None:
    """Links address elements by their place in memory: of another order they would be others."""
    local = local_part(parameter)
    if not local.is_contiguous():
        raise ValueError(f"{label}: Muon needs contiguous parameters, got strides {local.stride()}.")


def _matrices_text(parameter: Tensor, rule: MatrixRule) -> str:
    counts: dict[str, int] = {}
    for slab in slabs_of(tuple(parameter.shape), rule):
        for matrix in slab.matrices:
            text = f"{matrix.rows}x{matrix.columns}"
            counts[text] = counts.get(text, 0) + 1
    return ", ".join(f"{count} of {text}" for text, count in counts.items())


def _check_group(
    group: dict[str, Any],
    members: list[tuple[str | None, Tensor]],
    rule_of: Callable[[str | None, Tensor], MatrixRule],
) -> None:
    """Bad values raise here, before anything is added, with the name of the parameter."""
    check_options(group, dict.fromkeys(("lr", "weight_decay", "eps"), "non-negative"))
    if group["algorithm"] == _ADAMW:
        return
    require_option(group, "momentum", 0.0 <= number(group["momentum"]) < 1.0, "in [0, 1)")
    per_iteration(group["ns_coefficients"], group["ns_steps"])
    scale_function(group["adjust_lr_fn"], group["transposed"])
    for name, parameter in members:
        label = Member(name, parameter).label
        if not parameter.is_floating_point():
            raise ValueError(f"{label}: Muon needs floating point parameters, got {parameter.dtype}.")
        if parameter.ndim < 2:
            raise ValueError(
                f"{label}: Muon needs at least two dims, got shape {tuple(parameter.shape)}; use 'adamw'."
            )
        _require_contiguous(label, parameter)
        try:
            slabs_of(tuple(parameter.shape), rule_of(name, parameter))
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from None
