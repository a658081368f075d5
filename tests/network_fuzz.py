"""Random models, meshes, nodes, options and steps, whose every number is known in advance.

The weights of a model are small integers, and so are the numbers that each rank multiplies them with: the
output of a forward is exact, and so is every sum of gradients before its division, in whatever dtype it
travels. A model that is sharded in any way must have the values that are worked out here in fp64.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import fsdp_inside
from fsdp_cases import fully_shard, placed_on
from late_streams import make_streams_late
from ordered_streams import OrderedStreams
from ragged_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, Rows, Whole, share_comm_ctx
from rank_pool import Rank
from trials import Trial

__all__ = ["NetworkTrial"]

_FAILURE = "on purpose"
_REFUSED = "needs nodes"


class Part(nn.Module):
    """Adds the products of some of its parameters with numbers that a test has put here."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            weight = torch.randint(-3, 4, shape).to(dtype)
            self.register_parameter(f"w{index}", nn.Parameter(weight))
        self.factors: dict[str, torch.Tensor] = {}
        self.fails_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails_in == "forward":
            raise RuntimeError(_FAILURE)
        x = x + 0.0  # ranks that use none of its parameters have a backward of it too
        for name, factor in self.factors.items():
            x = x + (getattr(self, name).double() * factor).sum()
        return _Fails.apply(x) if self.fails_in == "backward" else x


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(_FAILURE)


class Chain(Part):
    """Parts that run one after the other, each as a test says; and parameters of its own."""

    def __init__(self, shapes: list[list[tuple[int, ...]]], dtype: torch.dtype) -> None:
        super().__init__(shapes[0], dtype)
        self.parts = nn.ModuleList(Part(of_part, dtype) for of_part in shapes[1:])
        self.how: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part, how in zip(self.parts, self.how):
            if how == "recomputed":
                x = checkpoint(part, x, use_reentrant=False)
            elif how != "unused":
                x = part(x)
            if how == "twice":
                x = part(x)
        return super().forward(x)


_RUNS = {"once": 1, "recomputed": 1, "unused": 0, "twice": 2}


class NetworkTrial(Trial):
    """A model on a mesh, what is set of it, and its steps."""

    def _run(self) -> None:
        with pytest.MonkeyPatch.context() as patch, ExitStack() as modes:
            self._try(patch, modes)

    def _try(self, patch: pytest.MonkeyPatch, modes: ExitStack) -> None:
        torch.manual_seed(self.seed)
        self._pretend(patch, modes)
        self.dtype = self.choose("dtype", *[torch.float32] * 3, torch.float64, torch.bfloat16)
        self.model = Chain(self._shapes(), self.dtype)
        self.weights = {n: p.detach().double() for n, p in self.model.named_parameters()}
        self.meshes: dict[str, list[int]] = {}
        """By parameter: the ranks over which its gradients are averaged."""
        if not self._shard():
            return
        self.sharded = dict(self.model.named_parameters())
        self._set()
        for step in range(self.draw.randint(1, 3)):
            self._step(step)

    def _pretend(self, patch: pytest.MonkeyPatch, modes: ExitStack) -> None:
        """Nodes, streams and messages that this machine does not have."""
        world = self.rank.world_size
        letters = self.choose("letters", 1, 2, 2, 2, 3, world)
        hosts = "".join(self.draw.choice("abcdefgh"[:letters]) for _ in range(world))
        if self.chance(0.6):
            hosts = "".join(sorted(hosts))
        if self.chance(0.5):
            size = self.choose("node", *[k for k in range(1, world + 1) if world % k == 0])
            hosts = "".join("abcdefgh"[r // size] for r in range(world))
            if self.chance(0.4):
                hosts = "".join(self.draw.sample(hosts, world))
        self.notes.append(f"hosts={hosts}")
        patch.setenv("NCCL_HOSTID", hosts[self.rank.rank])
        fsdp_inside.forget_levels(patch)
        if self.chance(0.5):
            fsdp_inside.exchange_in_rounds(
                patch, self.choose("rounds", 1, 2, 3), self.choose("rail calls", 1, 2, 8)
            )
        self.streams = self.choose("streams", "none", "ordered", "poisoned", "late")
        if self.streams == "poisoned":
            patch.setenv("RAGGED_FSDP_DEBUG", "1")
        elif self.streams == "late":
            make_streams_late(patch)
        elif self.streams == "ordered":
            modes.enter_context(OrderedStreams().install(patch))

    def _shapes(self) -> list[list[tuple[int, ...]]]:
        def shape() -> tuple[int, ...]:
            sizes = (0, 1, 1, 2, 3, 4, 5, 7, 8) if self.chance(0.2) else (1, 2, 3, 4, 5, 7, 8)
            return tuple(self.draw.choice(sizes) for _ in range(self.draw.randint(1, 3)))

        counts = [self.draw.randint(0, 3), *(self.draw.randint(1, 4) for _ in range(self.draw.randint(1, 4)))]
        return [[shape() for _ in range(count)] for count in counts]

    def _mesh(self) -> DeviceMesh:
        world = self.rank.world_size
        rows = self.choose("replicas", 0, 0, *[k for k in range(1, world + 1) if world % k == 0])
        if not rows:
            return self.rank.mesh()
        names = ("replicate", "shard")
        if self.choose("strided", False, True):
            return _transposed(self.rank, rows, names)
        return self.rank.mesh(rows, world // rows, names=names)

    # -- sharding ----------------------------------------------------------------------------------

    def _shard(self) -> bool:
        """Shard the model; False if the nodes that were drawn do not allow what was asked for."""
        mesh = self._mesh()
        self.replicas = mesh.size(0) if mesh.ndim == 2 else 1
        shards = mesh.size(mesh.ndim - 1)
        param, reduce = self.choose(
            "mp",
            (None, None), (None, None), (None, "float32"), ("bfloat16", "float32"), ("float16", "float32"),
            ("float16", None), ("bfloat16", None), ("float32", "bfloat16"), (None, "float64"),
        )  # fmt: skip
        made = [None if name is None else getattr(torch, name) for name in (param, reduce)]
        self.dtypes = [self.dtype, *(dtype for dtype in made if dtype is not None)]
        divisors = [k for k in range(1, shards + 1) if shards % k == 0]
        reduction = self.choose("reduction", "reduce_scatter", "all_to_all", "two_level", "two_level", "auto")
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(*made, cast_forward_inputs=False),
            "reduction": reduction,
            "gather": self.choose("gather", "flat", "two_level", "auto"),
            "ranks_per_node": self.choose("given", None, None, None, 1, 2, 3),
            "internode_dtype": self.choose("between", None, None, torch.float32, torch.bfloat16),
            "reshard_after_forward": self.choose("reshard", None, None, True, False, *divisors),
            "max_buffers": self.choose("buffers", 1, 1, 2),
        }
        if self.chance(0.2) and self.streams not in ("late", "ordered"):  # there the host is the device
            self.notes.append("offload")
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        kinds = [self.draw.choice((None, None, Whole(), Rows(1))) for _ in range(8)]
        numbers = itertools.count()
        if self.chance(0.6):
            by_name: dict[str, Any] = {}
            options["orig_param_policy"] = lambda name, p: by_name.setdefault(name, kinds[next(numbers) % 8])
        self.meshes = {name: list(range(self.rank.world_size)) for name in self.weights}
        placed = self.choose("placed", *["ragged"] * 6, "Shard(0)", "experts", "experts")
        if placed == "Shard(0)":
            options["shard_placement_fn"] = lambda p: Shard(0)
            if not isinstance(options["reshard_after_forward"], (bool, type(None))):
                options["reshard_after_forward"] = True
        elif placed == "experts" and mesh.ndim == 1 and shards > 1:
            self._place_experts(options)
        for module in (*self.model.parts, self.model):
            try:
                fully_shard(module, **options)
            except (ValueError, RuntimeError) as error:
                if _REFUSED not in str(error):
                    raise
                self.notes.append("refused")
                return False
        return True

    def _place_experts(self, options: dict[str, Any]) -> None:
        """Some parameters over groups of fewer ranks, that lie across those of the mesh."""
        world = self.rank.world_size
        size = self.choose("experts", *[k for k in range(1, world) if world % k == 0])
        mesh = self.rank.mesh(size, world // size, names=("expert", "other"))["expert"]
        options["reshard_after_forward"] = True
        result = placed_on(mesh)
        chosen = {n for n in self.weights if self.chance(0.4)}
        by_param = {self.model.get_parameter(n): result for n in chosen}
        options["shard_placement_fn"] = by_param.get
        for name in chosen:
            self.meshes[name] = mesh.mesh.tolist()

    def _set(self) -> None:
        """Settings that change how, and not what."""
        model = self.model
        if self.chance(0.3):
            model.set_reduce_scatter_max_input_buffers(self.choose("input buffers", 1, 2, 3))
        if self.chance(0.15):
            self.notes.append("own group")
            model.set_separate_reduce_scatter_group()
        if self.chance(0.2):
            self.notes.append("async")
            model._set_unshard_async_op(True)
        if self.chance(0.1):
            self.notes.append("keeps storage")
            model.set_keep_unsharded_storage(True)
        self.divisor: float | None = None
        modules = list(model.modules())
        sharded = [m for m in modules if isinstance(m, Part)]
        if self.chance(0.15):
            self.divisor = self.choose("divisor", 1.0, 2.0, 3.0)
            for part in sharded:
                part.set_gradient_divide_factor(self.divisor)
        if self.chance(0.15):
            self.notes.append("sums")
            for part in sharded:
                part.set_force_sum_reduction_for_comms(True)
        if self.chance(0.3):
            for part in sharded:
                if self.chance(0.5):
                    part.set_modules_to_forward_prefetch(
                        self.draw.choices(sharded, k=self.draw.randint(0, 3))
                    )
                if self.chance(0.5):
                    part.set_modules_to_backward_prefetch(
                        self.draw.choices(sharded, k=self.draw.randint(0, 3))
                    )
            self.notes.append("prefetch")
        if self.chance(0.2) and len(set(map(tuple, self.meshes.values()))) == 1:
            self._gather_by_hand(sharded)
        if self.chance(0.1):
            self.notes.append("shared")
            other = Chain([[(3,)], [(4,)]], torch.float32)
            for module in (*other.parts, other):
                fully_shard(module, mesh=self.rank.mesh())
            share_comm_ctx(self.draw.choice(([model, other], [other, model])))
            self.other = other

    def _gather_by_hand(self, sharded: list[nn.Module]) -> None:
        self.notes.append("own gather")

        def gather(output_tensor: Any, input_tensor: Any, group: Any, async_op: bool) -> Any:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

        if self.choose("allocates", False, True):
            gather.allocate = lambda size, *, dtype, device: torch.empty(size, dtype=dtype, device=device)
        for part in sharded:
            part.set_custom_all_gather(gather)

    # -- steps -------------------------------------------------------------------------------------

    def _step(self, step: int) -> None:
        """Micro-batches whose gradients add up, and what they must add up to."""
        self._freeze()
        self.unused_too = self.chance(0.25)
        self.model.set_reduce_scatter_unused_params(self.unused_too)
        self.expected: dict[str, torch.Tensor] = {}
        micros = self.draw.randint(1, 3)
        accumulates = self.choose("accumulates", "sharded", "unsharded", "partly", "unsharded and partly")
        if self.chance(0.12):
            self._fail(step)
        pending: list[tuple[torch.Tensor, int]] = []
        for micro in range(micros):
            last = micro == micros - 1
            loss = self._forward(step, micro)
            self._disturb()
            if not last and self.chance(0.2) and "recomputed" not in self.model.how:
                pending.append((loss, micro))  # its backward comes after the next forward's
                self.model.set_is_last_backward(False)
                continue
            for each, number in [(loss, micro), *reversed(pending)]:
                ends = last and number == (pending[0][1] if pending else micro)
                self._sync(accumulates, ends)
                self.model.set_is_last_backward(ends or not pending)
                each.backward()
            pending = []
            self.model.set_is_last_backward(True)
        self._check_gradients()
        self.model.zero_grad()
        with torch.no_grad():
            for name, param in self.sharded.items():
                param.grad = None
                param.add_(1)
                self.weights[name] += 1

    def _sync(self, accumulates: str, last: bool) -> None:
        if accumulates == "unsharded":
            self.model.set_requires_gradient_sync(last)
        elif accumulates == "partly":
            self.model.set_requires_all_reduce(last)
        elif accumulates == "unsharded and partly":
            self.model.set_requires_gradient_sync(last or self.chance(0.5))
            self.model.set_requires_all_reduce(last)

    def _freeze(self) -> None:
        self.model.reshard()
        for param in self.sharded.values():
            param.requires_grad_(self.chance(0.8))

    def _forward(self, step: int, micro: int, trains: bool = True) -> torch.Tensor:
        """One forward; its output is checked, and its gradients are added to what is expected."""
        self.model.how = [self.draw.choice((*["once"] * 4, *_RUNS)) for _ in self.model.parts]
        generator = torch.Generator().manual_seed(hash((self.seed, step, micro)) % 2**31)
        total = torch.tensor(0.0, dtype=torch.float64)
        learns = [False] * self.rank.world_size
        for number, part in enumerate([self.model, *self.model.parts]):
            runs = 1 if number == 0 else _RUNS[self.model.how[number - 1]]
            part.factors = {}
            prefix = "" if number == 0 else f"parts.{number - 1}."
            for name in [n for n in self.weights if n.rpartition(".")[0] == prefix[:-1]]:
                weight = self.weights[name]
                factors = torch.randint(-2, 3, (self.rank.world_size, *weight.shape), generator=generator)
                used = [self.chance(0.8)] * self.rank.world_size
                if self.unused_too and self.streams != "late":  # there a wait is a collective of all ranks
                    used = [self.chance(0.8) for _ in used]
                factors = factors * torch.tensor(used).view(-1, *[1] * weight.ndim)
                mine = factors[self.rank.rank].double()
                if used[self.rank.rank]:
                    part.factors[name.rpartition(".")[2]] = mine
                    total += runs * (weight * mine).sum()
                trains_here = self.sharded[name].requires_grad and runs > 0
                learns = [before or (trains_here and now) for before, now in zip(learns, used)]
                if trains and trains_here and any(used):
                    ranks = self.meshes[name]
                    mean = runs * factors[ranks].double().sum(0) / (self.divisor or len(ranks))
                    self.expected[name] = self.expected.get(name, 0) + mean
        needs = self.chance(0.6) or not all(learns) or self.unused_too  # all ranks have the same backwards
        x = torch.zeros((), dtype=torch.float64, requires_grad=trains and needs)
        out = self.model(x)
        assert out.item() == total.item(), f"output {out.item()}, expected {total.item()}"
        return out

    def _disturb(self) -> None:
        """What users do between a forward and its backward."""
        model, what = self.model, self.draw.random()
        if what < 0.1:
            self.notes.append("set reshard")
            model.set_reshard_after_forward(self.chance(0.5))
        elif what < 0.2:
            self.notes.append("evaluates")
            how, factors = model.how, [part.factors for part in model.parts]
            with torch.no_grad():
                self._forward(99, 0, trains=False)
            model.how = how
            for part, own in zip(model.parts, factors):
                part.factors = own
        elif what < 0.3:
            self.notes.append("by hand")
            part = self.draw.choice(list(model.parts))
            handle = part.unshard(async_op=self.chance(0.5))
            if handle is not None and self.chance(0.7):
                handle.wait()
            if self.chance(0.5):
                part.reshard()

    def _fail(self, step: int) -> None:
        part = self.draw.choice(list(self.model.parts))
        part.fails_in = self.choose("fails in", "forward", "backward")
        with_sync = self.chance(0.5)
        self.model.set_requires_gradient_sync(with_sync)
        try:
            self._forward(step, 50).backward()
        except RuntimeError as error:
            assert _FAILURE in str(error), error
        part.fails_in = ""
        self.model.set_requires_gradient_sync(True)
        self.model.reset_iter_state()
        self.model.zero_grad()
        for param in self.sharded.values():
            param.grad = None
        self.expected = {}

    def _check_gradients(self) -> None:
        worst = max(torch.finfo(dtype).eps for dtype in self.dtypes)
        for name, param in self.sharded.items():
            grad, expected = param.grad, self.expected.get(name)
            if expected is None:
                if grad is not None:
                    assert self.unused_too and not grad.full_tensor().any(), f"{name} has a gradient"
                continue
            assert grad is not None, f"{name} has no gradient"
            found = grad.full_tensor().double()
            atol = 8 * worst * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
            assert torch.allclose(found, expected, rtol=0, atol=atol), f"{name}: {found}, expected {expected}"


_TRANSPOSED: dict[Any, DeviceMesh] = {}


def _transposed(rank: Rank, rows: int, names: tuple[str, ...]) -> DeviceMesh:
    """Replicas of ranks that do not follow each other: one mesh for all trials."""
    key = (rank.world_size, rows)
    if key not in _TRANSPOSED:
        ranks = torch.arange(rank.world_size).view(-1, rows).T.contiguous()
        _TRANSPOSED[key] = DeviceMesh(rank.device, ranks, mesh_dim_names=names)
    return _TRANSPOSED[key]
