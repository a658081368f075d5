"""Random parameters, layouts, options and things that users do, beside an optimizer of one process.

The other one has whole tensors and no memory: before every step it is made anew and loads its own state. So
what ours has prepared for its steps, and what it has noted of where things lie, must never show.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

import muon_cases
from optim_cases import full
from ragged_fsdp import CPUOffloadPolicy, Tiles, Whole, fully_shard
from ragged_fsdp.dtensor import RaggedShard, distribute_tensor
from ragged_fsdp.optim import (
    Adam8bit,
    AdamW8bit,
    FusedAdam,
    FusedAdamW,
    FusedSGD,
    Muon,
    Shampoo,
    block_policy,
    offload_state,
)
from ragged_fsdp.optim.blocks import block_grid
from ragged_fsdp.optim.offload import OffloadedState
from rank_pool import Rank
from trials import Trial

__all__ = ["OptimizerTrial"]

_BLOCKED = {
    Adam8bit: {"block_shape": (4, 4), "run": 16, "min_8bit_numel": 1},
    AdamW8bit: {"block_shape": (4, 4), "run": 16, "min_8bit_numel": 1},
    Shampoo: {"block_shape": (4, 4), "min_numel": 1, "start_step": 2, "root_interval": 2},
}
_TORCHS = {FusedAdam: torch.optim.Adam, FusedAdamW: torch.optim.AdamW, FusedSGD: torch.optim.SGD}
_SHAPES = [(), (0,), (1,), (7,), (64,), (100,), (16, 12), (5, 9), (8, 3), (1, 1), (0, 4)]
_SHAPES += [(3, 8, 4), (2, 5, 7), (0, 4, 4), (2, 3, 2, 2)]
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 6e-2}


class Sums(nn.Module):
    """Adds up the products of its parameters with numbers of their own, and what its children give."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        for name, p in self.named_parameters(recurse=False):
            if name in self.factors and p.requires_grad:
                x = x + (p * self.factors[name]).sum()
        return x


class OptimizerTrial(Trial):
    """Parameters, how they lie on ranks, an optimizer and its steps."""

    def __init__(self, rank: Rank, seed: int) -> None:
        super().__init__(rank, seed)
        self.model: nn.Module | None = None

    def _run(self) -> None:
        torch.manual_seed(self.seed)
        self.kind = self.choose("kind", *_TORCHS, *_BLOCKED, Muon)
        how = self.choose("how", self._fully_shard, self._placed, self._neighbours)
        shapes = [s for s in _SHAPES if s or how != self._fully_shard]  # which takes no scalars
        self.shapes = {f"w{i}": self.draw.choice(shapes) for i in range(self.draw.randint(2, 9))}
        self.notes.append(f"shapes={self.shapes}")
        dtypes = [self.choose("dtype", *[torch.float32] * 3, torch.float64, torch.bfloat16)]
        if how != self._fully_shard and self.chance(0.2):
            dtypes = list(_TOLERANCE)
        self.plain = {
            name: nn.Parameter(torch.randn(shape).to(self.draw.choice(dtypes)))
            for name, shape in self.shapes.items()
        }
        self.ours: dict[str, nn.Parameter] = how()
        names = list(self.shapes)
        first = names[: self.draw.randint(1, len(names))]
        self.later = names[len(first) :]
        self._make_both(first)
        for _ in range(self.draw.randint(2, 7)):
            self.choose("then", *self.actions())()
            self._set_gradients()
            self._remake_other()
            assert self.optimizer.step(lambda: 3.0) == 3.0
            self.other.step()
            self._compare()

    # -- parameters --------------------------------------------------------------------------------

    def _neighbours(self) -> dict[str, nn.Parameter]:
        """Plain tensors, most of them one behind the other."""
        ours = {}
        flats = {dtype: torch.empty(2000, dtype=dtype) for dtype in _TOLERANCE}
        ends = dict.fromkeys(flats, 0)
        for name, p in self.plain.items():
            own = torch.empty_like(p)
            if self.chance(0.8):
                own = flats[p.dtype][ends[p.dtype] : ends[p.dtype] + p.numel()].view(p.shape)
                ends[p.dtype] += p.numel()
            ours[name] = nn.Parameter(own.detach().copy_(p.detach()))
        return ours

    def _placed(self) -> dict[str, nn.Parameter]:
        """Each parameter under placements of its own."""
        return {name: nn.Parameter(self._place(name, p.detach().clone())) for name, p in self.plain.items()}

    def _place(self, name: str, whole: Tensor) -> Tensor:
        kinds = ["ragged", "ragged_rows", "shard0", "shard_last", "replicate", "blocks", "plain"]
        two = ["hsdp_shard0", "hsdp_ragged", "ragged_tp", "ragged_ep", "strided_ep"]
        kind = self.choose(name, *kinds, *(two if self.rank.world_size == 4 else []))
        if kind == "plain" or whole.ndim == 0 or not whole.numel():
            return whole
        mesh = self.rank.mesh(2, 2, names=("outer", "inner")) if kind in two else self.rank.mesh()
        if kind != "blocks":
            return muon_cases.place(whole, mesh, kind)
        grid = block_grid(tuple(whole.shape), (4, 4), 16)
        granules = whole.numel() // grid.granule_numel if whole.numel() % grid.granule_numel == 0 else 1
        cuts = sorted(self.draw.choices(range(granules + 1), k=mesh.size() - 1))
        units = tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, granules]))
        ragged = RaggedShard(range(max(1, whole.ndim - 1)), units)
        return distribute_tensor(whole, mesh, [ragged], src_data_rank=None)

    def _fully_shard(self) -> dict[str, nn.Parameter]:
        model, homes = Sums(), {}
        parts = [Sums() for _ in range(3)]
        for index, part in enumerate(parts):
            model.add_module(f"part{index}", part)
        for name, p in self.plain.items():
            homes[name] = self.draw.choice([model, *parts])
            homes[name].register_parameter(name, nn.Parameter(p.detach().clone()))
        options: dict[str, Any] = {"mesh": self.rank.mesh()}
        if self.rank.world_size == 4 and self.chance(0.4):
            options["mesh"] = self.rank.mesh(2, 2, names=("outer", "inner"))
        if self.kind in _BLOCKED or self.chance(0.3):
            options["orig_param_policy"] = block_policy((4, 4), 16, min_numel=1)
        if self.chance(0.3):
            self.notes.append("tiles")
            options["orig_param_policy"] = lambda _, p: Tiles(4, 4) if p.ndim > 1 and p.numel() else Whole()
        if self.chance(0.2):
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for part in parts:
            if self.chance(0.7):
                fully_shard(part, **options)
        fully_shard(model, **options)
        self.model = model
        return {name: home.get_parameter(name) for name, home in homes.items()}

    # -- optimizers --------------------------------------------------------------------------------

    def _make_both(self, names: list[str]) -> None:
        options: dict[str, Any] = dict(_BLOCKED.get(self.kind, {}))
        if self.kind is FusedSGD:
            late = {"momentum": 0.8, "dampening": 0.3}
            options = self.choose("options", {}, {"momentum": 0.9, "nesterov": True}, late)
        elif self.kind in _TORCHS:
            options = {"amsgrad": self.chance(0.3)}
        elif self.kind is Muon:
            options = {"ns_dtype": self.choose("ns_dtype", torch.float32, torch.float64)}
            options["bucket_numel"] = self.choose("bucket_numel", 10, 10**6)
        else:
            options["exclude"] = self._unfit()
            if self.kind is not Shampoo:
                # of a parameter in tiles the noise goes by the place in their order, which whole tensors lack
                options["stochastic_rounding"] = self.chance(0.5) and "tiles" not in self.notes
        if self.kind is not Muon:
            options["maximize"] = self.chance(0.3)
        half = self.draw.randint(0, len(names))
        chosen = [part for part in (names[:half], names[half:]) if part]
        own = [
            {"lr": self.draw.choice([0.1, 0.01]), "weight_decay": self.draw.choice([0.0, 0.1])}
            for _ in chosen
        ]

        def groups(params: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
            return [{"params": [(n, params[n]) for n in part], **o} for part, o in zip(chosen, own)]

        self.optimizer: Optimizer = self.kind(groups(self.ours), **options)
        self.other_kind = _TORCHS.get(self.kind, self.kind)
        self.options = {**options, "foreach": False} if self.kind in _TORCHS else options
        self.other: Optimizer = self.other_kind(groups(self.plain), **self.options)
        if self.chance(0.35):
            self._offload()

    def _unfit(self) -> list[str]:
        """Parameters whose layout cuts blocks, or whose tiles at the edges are no blocks of whole tensors."""
        found = []
        for name, p in self.ours.items():
            tiled = any(getattr(placement, "tile", None) for placement in getattr(p, "placements", ()))
            try:
                self.kind([(name, p)], **_BLOCKED[self.kind])
            except ValueError:
                found.append(name)
            else:
                if tiled and (p.shape[-2] % 4 or p.shape[-1] % 4):
                    found.append(name)
        return found

    def _remake_other(self) -> None:
        """The other optimizer starts from its state alone."""
        state = copy.deepcopy(self.other.state_dict())
        groups = [
            {
                "params": list(zip(g["param_names"], g["params"])),
                **{k: g[k] for k in ("algorithm",) if k in g},
            }
            for g in self.other.param_groups
        ]
        self.other = self.other_kind(groups, **self.options)
        self.other.load_state_dict(state)

    # -- what users do -----------------------------------------------------------------------------

    def actions(self) -> list[Any]:
        return [
            self._nothing,
            self._reload,
            self._clear_all,
            self._clear_one,
            self._add,
            self._freeze,
            self._change_options,
            self._move,
            self._copy,
            self._offload,
            self._torchs_state_dicts,
            self._failing_closure,
            self._bad_gradient,
        ]

    def _nothing(self) -> None:
        pass

    def _reload(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def _clear_all(self) -> None:
        for optimizer in (self.optimizer, self.other):
            optimizer.state.clear()

    def _clear_one(self) -> None:
        name = self.draw.choice(list(self.shapes))
        self.optimizer.state.pop(self.ours[name], None)
        self.other.state.pop(self.plain[name], None)

    def _add(self) -> None:
        if self.later:
            name, decay = self.later.pop(0), self.draw.choice([0.0, 0.3])
            for optimizer, params in ((self.optimizer, self.ours), (self.other, self.plain)):
                optimizer.add_param_group({"params": [(name, params[name])], "weight_decay": decay})

    def _freeze(self) -> None:
        for name in self.shapes:
            frozen = self.chance(0.4)
            for params in (self.ours, self.plain):
                params[name].requires_grad_(not frozen)
                params[name].grad = None

    def _change_options(self) -> None:
        lr = torch.tensor(0.02, dtype=torch.float64) if self.chance(0.5) else 0.02
        for group in (*self.optimizer.param_groups, *self.other.param_groups):
            group["lr"], group["weight_decay"] = lr, 0.2
            if "betas" in group:
                group["betas"] = (0.8, 0.99)
            if self.kind is FusedSGD and not group["nesterov"]:
                group["momentum"] = 0.7

    def _move(self) -> None:
        """Memory of a parameter becomes another."""
        p = self.ours[self.draw.choice(list(self.shapes))]
        if not isinstance(p, DTensor):
            p.data = p.data.clone()

    def _copy(self) -> None:
        if self.model is None:
            both = self.ours, self.optimizer
            sharded = any(isinstance(p, DTensor) for p in self.ours.values())
            self.ours, self.optimizer = copy.deepcopy(both) if sharded else pickle.loads(pickle.dumps(both))

    def _offload(self) -> None:
        if not isinstance(self.optimizer, OffloadedState):
            offload_state(self.optimizer, part_numel=self.choose("part_numel", 1, 50, 10**6))

    def _torchs_state_dicts(self) -> None:
        """State by name, of whole tensors or of parts."""
        every = {} if self.model is None else set(self.model.parameters())
        stateless = self.kind is FusedSGD and not all(g["momentum"] for g in self.optimizer.param_groups)
        known = {p for p, entries in self.optimizer.state.items() if entries}
        if not every or every != known or stateless or not all(p.requires_grad for p in every):
            return  # torch takes no state of frozen parameters along, and cannot do without any
        options = StateDictOptions(full_state_dict=self.choose("full", True, False))
        state = copy.deepcopy(get_optimizer_state_dict(self.model, self.optimizer, options=options))
        set_optimizer_state_dict(self.model, self.optimizer, state, options=options)

    def _failing_closure(self) -> None:
        try:
            self.optimizer.step(lambda: 1 / 0)
        except ZeroDivisionError:
            return
        raise AssertionError("the closure's error is gone")

    def _bad_gradient(self) -> None:
        """Refused before anything has changed, which the comparison after the next step shows."""
        cut = [p for g in self.optimizer.param_groups for p in g["params"] if isinstance(p, DTensor)]
        cut = [p for p in cut if not all(isinstance(placement, Replicate) for placement in p.placements)]
        if not cut or (isinstance(self.optimizer, OffloadedState) and self.kind is not Muon):
            return  # which may have stepped the parts before it
        self._set_gradients()
        cut[-1].grad = None
        cut[-1].grad = distribute_tensor(
            torch.ones_like(full(cut[-1])), cut[-1].device_mesh, [Replicate()] * cut[-1].device_mesh.ndim
        )
        try:
            self.optimizer.step()
        except RuntimeError as error:
            assert "placements" in str(error), error
        else:
            raise AssertionError("a replicated gradient was taken")
        cut[-1].grad = None

    # -- gradients and what comes of them ----------------------------------------------------------

    def _set_gradients(self) -> None:
        if self.model is not None and self.chance(0.6):
            self._backward(self.model)
            return
        flats = {dtype: torch.zeros(2000, dtype=dtype) for dtype in _TOLERANCE}
        one_behind_the_other, end = self.chance(0.5), 0
        for name, p in self.ours.items():
            self.plain[name].grad = p.grad = None
            if not p.requires_grad or self.chance(0.25):
                continue
            grad = (torch.randn(p.shape) * self.draw.choice([0.0, 1e-4, 1.0, 100.0])).to(p.dtype)
            self.plain[name].grad = grad
            if not isinstance(p, DTensor):
                own = flats[p.dtype][end : end + p.numel()].view(p.shape)
                p.grad = own.copy_(grad) if one_behind_the_other else grad.clone()
                end += p.numel()
            elif any(type(placement).__name__ == "_StridedShard" for placement in p.placements):
                p.grad = muon_cases.place(grad, p.device_mesh, "strided_ep")
            else:
                p.grad = distribute_tensor(grad.clone(), p.device_mesh, p.placements, src_data_rank=None)

    def _backward(self, model: nn.Module) -> None:
        """Gradients where a backward leaves them."""
        self.optimizer.zero_grad(set_to_none=self.chance(0.5))
        for part in model.modules():
            assert isinstance(part, Sums)
            factors = {name: torch.randn(p.shape).to(p.dtype) for name, p in self.plain.items()}
            part.factors = {name: factor for name, factor in factors.items() if self.chance(0.8)}
        model(torch.zeros((), requires_grad=True)).backward()
        for name, p in self.ours.items():
            self.plain[name].grad = None if p.grad is None else full(p.grad).clone()

    def _compare(self) -> None:
        for name, p in self.ours.items():
            self._require_same(p, self.plain[name], name)
            mine, theirs = self.optimizer.state.get(p, {}), self.other.state.get(self.plain[name], {})
            assert mine.keys() == theirs.keys(), name
            for key, value in theirs.items():
                if key != "step" and value.shape == mine[key].shape:  # Shampoo's in tiles are a list
                    self._require_same(mine[key], value, f"{name}: {key}")

    def _require_same(self, ours: Tensor, theirs: Tensor, what: str) -> None:
        found, wanted = full(ours.detach()), theirs.detach()
        assert found.dtype == wanted.dtype, what
        tolerance = _TOLERANCE.get(found.dtype, 0.0)
        if self.kind is Shampoo:  # batches of products round by their number
            tolerance = max(tolerance, _TOLERANCE[torch.float32])
        elif self.kind not in _TORCHS:
            tolerance = 0.0
        largest = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
        torch.testing.assert_close(
            found, wanted, rtol=tolerance, atol=tolerance * largest, msg=lambda text: f"{what}: {text}"
        )
