"""Random module trees, and random steps on them, that run sharded and unsharded.

A seed makes a tree: parameters that are unused, tied or frozen, layers that are sharded in a list, a node
that several others share, children that run twice, detached, without grad, recomputed or changed in place.
The same seed makes a program: microbatches with and without synchronisation, several backwards of one graph,
gradients of gradients, several forwards before a backward, evaluations, optimizer steps, parameters that are
frozen and unfrozen, adapters that are attached late. :func:`differences` runs it on both models, in fp64,
and says where they part.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from ragged_fsdp import Elements, Rows, Whole, adopt_parameters

WIDTH = 6
TOLERANCE = 1e-12
HOW = (
    *("plain",) * 4,
    "unused",
    "twice",
    "detached",
    "no_grad",
    "recomputed",
    "recomputed, old",
    "beside",
    "changed in place",
)
LIST_ORDERS = ((0, 1), (0,), (1,), (1, 0), (0, 1, 0))


class Node(nn.Module):
    """Children that run in ways a random number chooses, and parameters of its own, some of them unused."""

    def __init__(
        self, draw: random.Random, depth: int, shared: Node | None, *, is_root: bool = False
    ) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.spare = nn.Parameter(torch.randn(draw.choice((1, WIDTH))))
        self.uses_scale, self.uses_spare = draw.random() < 0.7, draw.random() < 0.3
        self.hands_on = draw.random() < 0.2
        """Whether its side output is its input."""
        self.leaf = nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5)
        self.leaf_by_weight = draw.random() < 0.3
        """Whether the leaf's weight is used and the leaf never called."""
        if draw.random() < 0.2:
            self.twin = nn.Linear(WIDTH, WIDTH)
            self.twin.weight = self.leaf.weight
        self.pair = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2 if draw.random() < 0.25 else 0))
        """Sharded as a list; its modules run in an order of their own, or one of them does not."""
        self.pair_order = draw.choice(LIST_ORDERS)
        count = 0 if depth == 0 else draw.randint(1, 3)
        self.children_ = nn.ModuleList(Node(draw, depth - 1, shared) for _ in range(count))
        if shared is not None and draw.random() < 0.3:
            self.children_.append(shared)
        self.how = [draw.choice(HOW) for _ in self.children_]
        self.returns = draw.choice((tuple, list, dict))
        self.shards = is_root or draw.random() < 0.5
        self.keeps = draw.choice((None, None, True, False, "auto"))
        """What ``reshard_after_forward`` is."""
        for module in (self, self.leaf, *self.pair):
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(draw.random() < 0.8)

    def forward(self, x: Tensor, *, factor: Tensor | None = None) -> Any:
        given = x
        if factor is not None:
            x = x * factor
        if self.uses_scale:
            x = x * self.scale
        x = x @ self.leaf.weight.T if self.leaf_by_weight else self.leaf(x)
        side = x * self.spare if self.uses_spare else given if self.hands_on else x
        for index in self.pair_order if self.pair else ():
            x = x + torch.sin(self.pair[index](x))
        for child, how in zip(self.children_, self.how):
            x, side = self.run(child, how, x, side)
        if hasattr(self, "twin"):
            x = torch.sin(self.twin(x))
        if hasattr(self, "late"):
            x = x + self.late(x)
        x = torch.sin(x)
        return {"main": x, "side": side} if self.returns is dict else self.returns((x, side))

    @staticmethod
    def outputs(returned: Any) -> tuple[Tensor, Tensor]:
        """Main and side output of a node, in whatever they came."""
        return tuple(returned.values()) if isinstance(returned, dict) else tuple(returned)

    def run(self, child: Node, how: str, x: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
        if how == "unused":
            return x, side
        if how == "no_grad":
            with torch.no_grad():
                return x + self.outputs(child(x))[0], side
        if how in ("recomputed", "recomputed, old"):

            def call(value: Tensor) -> tuple[Tensor, Tensor]:
                return self.outputs(child(value))

            return checkpoint(call, x, use_reentrant=how != "recomputed")
        main, other = self.outputs(child(x, factor=side if how == "beside" else None))
        if how == "twice":
            main = main + self.outputs(child(main))[0]
        if how == "detached":
            main = x + main.detach()
        if how == "changed in place":
            main.mul_(0.5).add_(x)
        return main, (side + other if how == "beside" else side)


def tree(seed: int) -> Node:
    """The tree of a seed, with the same values each time."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    shared = Node(draw, 1, None) if draw.random() < 0.4 else None
    if shared is not None:
        shared.shards = True  # its users may be in several groups
    return Node(draw, 2, shared, is_root=True).double()


def nodes(module: Node) -> Iterator[Node]:
    """All nodes once, children first."""
    seen: set[Node] = set()

    def walk(node: Node) -> Iterator[Node]:
        if node in seen:
            return
        seen.add(node)
        for child in node.children_:
            yield from walk(child)
        yield node

    return walk(module)


def _granularity(draw: random.Random) -> Callable[[str, nn.Parameter], Any]:
    kinds = (None, Elements(3), Whole(), Rows(1), Rows(2))
    return lambda name, parameter: (
        None if parameter.numel() < WIDTH else draw.choice(kinds[: 3 + parameter.ndim])
    )


def _arguments(node: Node, draw: random.Random, *, ours: bool, parks: bool) -> dict[str, Any]:
    """Of one call of ``fully_shard``; stock FSDP2 takes a part of them."""
    world = dist.get_world_size()
    keeps = node.keeps
    drawn: dict[str, Any] = {"reshard_after_forward": 2 if parks and keeps is True else keeps}
    if draw.random() < 0.15 and drawn["reshard_after_forward"] != 2:
        drawn["shard_placement_fn"] = lambda parameter: Shard(0)
    if not ours:
        return {**drawn, "reshard_after_forward": None} if keeps == "auto" else drawn
    drawn["reduction"] = draw.choice(("reduce_scatter", "all_to_all", "two_level")[: 3 - world % 2])
    drawn["ranks_per_node"] = draw.choice((1, 2))
    drawn["max_buffers"] = draw.choice((1, 1, 2))
    if keeps == "auto":
        drawn["gathered_budget_bytes"] = draw.choice((300, 3000))
    if draw.random() < 0.3:
        drawn["orig_param_policy"] = _granularity(draw)
    return drawn


def shard_tree(model: Node, seed: int, shard: Callable[..., Any], mesh: DeviceMesh, **options: Any) -> None:
    """Shard the nodes that want it, their pairs as a list."""
    draw = random.Random(seed + 1)
    ours = shard.__module__.startswith("ragged_fsdp")
    if draw.random() < 0.15:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    parks = draw.random() < 0.2 and mesh.shape == (4,)
    for node in nodes(model):
        for wanted in ([list(node.pair)] if node.pair else []) + ([node] if node.shards else []):
            shard(wanted, mesh=mesh, **_arguments(node, draw, ours=ours, parks=parks), **options)


class Run:
    """A program on one of the two models; both draw the same numbers."""

    def __init__(self, model: Node, seed: int, *, is_sharded: bool, rank: int, device: str) -> None:
        self.model, self.is_sharded = model, is_sharded
        self.draw = random.Random(seed + 2)
        self.values = torch.Generator().manual_seed(1000 * seed + rank)
        # before the forward: after one without a backward the root is gathered, and has other parameters
        self.parameters = dict(model.named_parameters())
        self.device = torch.device(device)
        self.can_ask = not any("recomputed, old" in node.how for node in nodes(model))
        """Whether gradients of inputs can be asked for: not through a reentrant checkpoint."""
        self.can_ask_twice = self.can_ask and not any(node.pair for node in nodes(model))
        """Whether gradients of those can be asked for: a list of modules that runs in several places may not
        be gathered again for them, and raises."""
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=1e-3)
        self.log: list[dict[str, Tensor | None]] = []
        """Per step: gradients by parameter, those of the inputs, losses."""

    def rows(self, needs_grad: bool = False) -> Tensor:
        x = torch.randn(3, WIDTH, generator=self.values, dtype=torch.float64).to(self.device)
        return x.requires_grad_(self.draw.random() < 0.5 or needs_grad)

    def forward(self, x: Tensor) -> list[Tensor]:
        """A list of losses that are to have a backward one after the other."""
        main, side = (output.square().mean() for output in Node.outputs(self.model(x)))
        losses = self.draw.choice(
            ([main], [main], [side], [main + side], [main, side], [main, main], [side, main])
        )
        return [loss for loss in losses if loss.requires_grad] or [main + side] * (main + side).requires_grad

    def microbatch(self, seen: dict[str, Tensor | None], is_last: bool) -> None:
        # the last one has a backward if one before had: it reduces what those left
        inputs = [self.rows(needs_grad=is_last) for _ in range(self.draw.choice((1, 1, 1, 2)))]
        graphs = [self.forward(x) for x in inputs]
        if self.draw.random() < 0.5:
            graphs.reverse()
        for x, losses in zip(inputs, graphs):
            if self.draw.random() < 0.3 and self.can_ask and x.requires_grad and losses:
                again = self.draw.random() < 0.5 and self.can_ask_twice
                (found,) = torch.autograd.grad(
                    losses[0], x, retain_graph=True, create_graph=again, allow_unused=True
                )
                seen[f"asked {len(seen)}"] = None if found is None else found.detach().clone()
                if again and found is not None and found.requires_grad:
                    losses.append(found.square().sum())
            if self.draw.random() < 0.1:
                self.evaluate(seen)
            for index, loss in enumerate(losses):
                seen[f"loss {len(seen)}"] = loss.detach().clone()
                loss.backward(retain_graph=index + 1 < len(losses))
        for x in inputs:
            seen[f"input {len(seen)}"] = None if x.grad is None else x.grad.clone()

    def evaluate(self, seen: dict[str, Tensor | None]) -> None:
        context = self.draw.choice((torch.no_grad, torch.inference_mode))
        with context():
            seen[f"evaluation {len(seen)}"] = Node.outputs(self.model(self.rows()))[0].clone()

    def between_steps(self) -> None:
        """What users do by hand."""
        choice = self.draw.choice(
            ("nothing", "nothing", "state_dict", "reshard", "unshard", "settings", "part", "late")
        )
        node = self.draw.choice(list(nodes(self.model)))
        x, kept, buffers = self.rows(), self.draw.random() < 0.5, self.draw.choice((1, 2, 3))
        if choice == "part" and node.shards and node is not self.model:
            with torch.no_grad():
                self.log[-1]["part"] = Node.outputs(node(x))[0]
        if choice == "late" and not hasattr(node, "late"):
            self.attach(node)
        if not self.is_sharded:
            return
        if choice == "state_dict":
            self.model.state_dict()
        elif choice in ("reshard", "unshard") and node.shards:
            getattr(node, choice)()
        elif choice == "settings":
            self.model.set_reduce_scatter_max_input_buffers(buffers)
            if node.shards:
                node.set_reshard_after_backward(kept, recurse=False)

    def attach(self, node: Node) -> None:
        """An adapter that comes after ``fully_shard``."""
        node.late = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        for parameter in node.late.parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(self.log)))
        node.late.to(self.device)
        if self.is_sharded:
            adopt_parameters(self.model)
        name = next(name for name, module in self.model.named_modules() if module is node.late)
        self.parameters.update((f"{name}.{key}", p) for key, p in node.late.named_parameters())
        self.optimizer.add_param_group({"params": list(node.late.parameters())})

    def step(self) -> None:
        draw, seen = self.draw, {}
        if draw.random() < 0.2:
            self.evaluate(seen)
        synchronised = [draw.random() < 0.5 for _ in range(draw.randint(0, 2))] + [True]
        for index, sync in enumerate(synchronised):
            if self.is_sharded:
                self.model.set_requires_gradient_sync(sync)
            self.microbatch(seen, is_last=index + 1 == len(synchronised))
        seen.update(self.gradients())
        self.log.append(seen)
        if draw.random() < 0.5:
            self.optimizer.step()
        if draw.random() < 0.7:
            self.optimizer.zero_grad(set_to_none=draw.random() < 0.7)
        if draw.random() < 0.3:
            self.freeze()
        self.between_steps()

    def gradients(self) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {}
        for name, parameter in self.parameters.items():
            grad = parameter.grad
            if grad is None:
                found[name] = None
            elif isinstance(grad, DTensor):
                found[name] = grad.full_tensor().clone()
            else:  # what DDP does; what earlier steps left has the same mean again
                dist.all_reduce(grad)
                found[name] = grad.div_(dist.get_world_size()).clone()
        return found

    def freeze(self) -> None:
        """Change ``requires_grad`` of some, on what is registered now or on what the optimizer holds."""
        registered = dict(self.model.named_parameters())
        use_registered = self.draw.random() < 0.5
        for name, parameter in self.parameters.items():
            if self.draw.random() < 0.3:
                value = self.draw.random() < 0.7
                (registered[name] if use_registered else parameter).requires_grad_(value)


def differences(seed: int, shard: Callable[..., Any], mesh: DeviceMesh, **options: Any) -> list[str]:
    """Where what the sharded tree computes is not what the unsharded one does, in words."""
    rank = dist.get_rank()
    models = [tree(seed).to(mesh.device_type), tree(seed).to(mesh.device_type)]
    shard_tree(models[0], seed, shard, mesh, **options)
    where_it_runs = {"rank": rank, "device": mesh.device_type}
    ours, theirs = (
        Run(model, seed, is_sharded=index == 0, **where_it_runs) for index, model in enumerate(models)
    )
    wrong = []
    for step in range(3):
        try:
            theirs.step()
        except RuntimeError:  # a checkpoint that autograd refuses
            break
        ours.step()
        found, expected = ours.log[-1], theirs.log[-1]
        assert found.keys() == expected.keys(), (seed, found.keys(), expected.keys())
        for name, value in expected.items():
            got, where = found[name], f"seed {seed}, step {step}, {name}"
            if value is not None and got is not None and got.device != value.device:
                got = got.to(value.device)  # offloaded gradients lie on the host
            if (value is None) != (got is None):
                wrong.append(f"{where}: {'missing' if got is None else 'present'}")
            elif value is not None and (got - value).abs().max() > TOLERANCE * (1 + value.abs().max()):
                wrong.append(
                    f"{where}: differs by {(got - value).abs().max():.1e} of {value.abs().max():.1e}"
                )
    return wrong
