"""Random models: any mix of shapes, matrices, placements, meshes and gradients equals one process."""

from __future__ import annotations

import random
from functools import partial

import torch

import muon_cases as cases
from ragged_fsdp.optim.exchange.matrices import Flattened, Fused, MatrixRule
from ragged_fsdp.optim.muon import Muon
from rank_pool import spmd

SEEDS = 8
ONE_DIM = ["ragged", "ragged_rows", "shard0", "shard_last", "replicate"]
TWO_DIMS = ["hsdp_shard0", "hsdp_ragged", "ragged_tp", "ragged_ep", "strided_ep"]


class Model:
    """Shapes, rules and placements drawn from a seed, the same on every rank."""

    def __init__(self, draw: random.Random, mesh, mesh_2d) -> None:
        self.device = mesh.device_type
        self.meshes = dict.fromkeys(ONE_DIM, mesh) | dict.fromkeys(TWO_DIMS, mesh_2d)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.rules: dict[str, MatrixRule] = {}
        self.kinds: dict[str, str] = {}
        for index in range(draw.randint(1, 12)):
            name = f"layers.{index}.w"
            outer = tuple(draw.randint(1, 9) for _ in range(draw.choice([0, 0, 0, 1, 1, 2])))
            self.shapes[name] = shape = (*outer, draw.randint(1, 14), draw.randint(1, 14))
            self.rules[name] = draw.choice([Flattened(), None] if len(outer) == 2 else fused_rules(shape))
            whole_rows = ["shard0", "ragged", "replicate", "hsdp_ragged", "plain"]
            self.kinds[name] = draw.choice(whole_rows if len(outer) == 2 else [*ONE_DIM, *TWO_DIMS, "plain"])

    def split(self, name: str, parameter: torch.Tensor) -> MatrixRule:
        return self.rules[name]

    def place(self, name: str, full: torch.Tensor) -> torch.Tensor:
        kind = self.kinds[name]
        if kind == "plain":
            return full.to(self.device, copy=True)
        return cases.place(full, self.meshes[kind], kind)


def fused_rules(shape: tuple[int, ...]) -> list[MatrixRule]:
    rules: list[MatrixRule] = [None]
    for dim in (-2, -1):
        size = shape[dim]
        if size > 1:
            rules.append(Fused(dim, (size - 1, 1)))
        if size % 2 == 0:
            rules.append(Fused(dim, (size // 2,) * 2, interleaved=True))
    return rules


def options(draw: random.Random) -> dict:
    return {
        "lr": 0.05,
        "ns_dtype": draw.choice([torch.float32, torch.bfloat16]),
        "momentum": draw.choice([0.0, 0.9]),
        "nesterov": draw.random() < 0.5,
        "weight_decay": draw.choice([0.0, 0.1]),
        "adjust_lr_fn": draw.choice([None, "spectral", "match_rms_adamw", "none"]),
        "transposed": draw.random() < 0.3,
        "bucket_numel": draw.choice([1, 50, 300, 10**6]),
        "buckets_in_flight": draw.choice([1, 2, 3]),
    }


@spmd(4)
def test_random_models(rank):
    mesh, mesh_2d = rank.mesh(), rank.mesh(2, 2, names=("outer", "inner"))
    for seed in range(SEEDS):
        draw = random.Random(seed)
        model, chosen = Model(draw, mesh, mesh_2d), options(draw)
        start = cases.full_tensors(seed, model.shapes)
        places = [model.place, lambda name, full: full.to(rank.device, copy=True)]
        copies = [{n: torch.nn.Parameter(place(n, v)) for n, v in start.items()} for place in places]
        chosen["split"] = model.split
        optimizers = [Muon([{"params": list(c.items()), "algorithm": "muon"}], **chosen) for c in copies]
        for step in range(3):
            for name, gradient in cases.full_tensors(100 * seed + step, model.shapes).items():
                missing, frozen = draw.random() < 0.2, draw.random() < 0.1
                for copy, place in zip(copies, places):
                    copy[name].requires_grad_(not frozen)
                    copy[name].grad = None if missing else place(name, gradient)
            for optimizer in optimizers:
                optimizer.step()
        for name, parameter in copies[0].items():
            found, wanted = cases.whole(parameter.detach()), copies[1][name].detach()
            what = (
                f"seed {seed}, {name} {model.shapes[name]} {model.kinds[name]} {model.rules[name]} {chosen}"
            )
            if rank.device == "cpu":
                assert torch.equal(found, wanted), what
            else:
                tolerance = 1e-4 if chosen["ns_dtype"] == torch.float32 else 0.05
                message = partial("{}: {}".format, what)
                torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, msg=message)
