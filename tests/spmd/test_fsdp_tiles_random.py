"""Parameters in the order of tiles, and FP8 products: random shapes and options against one process."""

import copy
import random
from functools import partial

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from fsdp_cases import full, fully_shard, ragged_only
from ragged_fsdp import BlockCodes, Elements, Tiles, Whole, fp8
from ragged_fsdp.block_codes import quantize_dequantize
from ragged_fsdp.models import MoEConfig
from ragged_fsdp.models.moe import Experts
from ragged_fsdp.optim import FusedAdamW
from rank_pool import spmd

pytestmark = ragged_only
SEEDS = 3


class Waves(nn.Module):
    """Parameters of any shape, one of them used twice, some frozen."""

    def __init__(self, shapes, frozen, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        made = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        self.weights = nn.ParameterList(made)
        self.again = self.weights[0]
        for index in frozen:
            self.weights[index].requires_grad_(False)

    def forward(self, x):
        waves = [(x * (index + 1) * weight).sin().sum() for index, weight in enumerate(self.weights)]
        return torch.stack(waves).sum() + self.again.square().sum()


def options_for(draw, rank):
    """How to shard: what may change no number."""
    world, options = rank.world_size, {"reduction": "all_to_all"}
    options["reshard_after_forward"] = draw.choice([True, False, 2 if world == 4 else True])
    if draw.random() < 0.3:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if draw.random() < 0.3 and world == 4 and options["reshard_after_forward"] != 2:
        options["mesh"] = rank.mesh(2, 2, names=("replicate", "shard"))
    return options


def same(model, reference, what, note, exact):
    for (name, p), q in zip(model.named_parameters(), reference.parameters()):
        got, want = what(p), what(q)
        if want is None:
            assert got is None, (*note, name)
        else:
            got = full(got).to(want.device)
            assert torch.equal(got, want) if exact else torch.allclose(got, want, atol=1e-5), (*note, name)


def gradient(parameter):
    return parameter.grad


@spmd(1, 2, 3, 4)
def test_random_shapes_in_random_tiles(rank):
    for seed in range(SEEDS):
        draw = random.Random(f"{seed} {rank.world_size}")
        sizes = [0, *(1, 2, 3, 5, 7, 8, 12, 20) * 3]
        shapes = [tuple(draw.choices(sizes, k=draw.choice([1, 2, 2, 3, 4]))) for _ in range(4)]
        tile = (draw.choice([1, 2, 3, 8, 64]), draw.choice([1, 2, 3, 8, 64]))
        codes = BlockCodes(draw.choice(["int8", "float8_e4m3fn"]), tile) if draw.random() < 0.5 else None
        others, frozen = draw.choice([None, Elements(1), Whole()]), draw.sample(range(4), draw.randrange(3))
        options, note = options_for(draw, rank), (seed, shapes, tile, codes)

        def stored(name, p, tile=tile, others=others):
            return Tiles(*tile) if p.ndim > 1 else others

        def gathered(name, p, codes=codes):
            return codes if p.ndim > 1 else None

        net = Waves(shapes, frozen, seed).to(rank.device)
        whole = copy.deepcopy(net)
        fully_shard(net, orig_param_policy=stored, gather_policy=gathered, **options)
        same(net, whole, torch.Tensor.detach, note, exact=True)
        optimizers = FusedAdamW(net.parameters(), lr=0.01), torch.optim.AdamW(whole.parameters(), lr=0.01)
        for _ in range(2):
            computed = copy.deepcopy(whole)
            for p in computed.parameters():
                if codes is not None and p.ndim > 1 and p.numel():
                    p.data = quantize_dequantize(p.detach(), codes)
            for model in (net, computed):
                model(torch.ones((), device=rank.device)).backward()
            same(net, computed, gradient, note, exact=False)
            for p, q in zip(whole.parameters(), computed.parameters()):
                p.grad = q.grad
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            same(net, whole, torch.Tensor.detach, note, exact=False)
        folder = rank.shared_dir / str(seed)
        dcp.save(net.state_dict(), checkpoint_id=folder)
        rows = Waves(shapes, frozen, seed + 1).to(rank.device)
        fully_shard(rows, orig_param_policy=lambda name, p: Elements(1))
        state = rows.state_dict()
        dcp.load(state, checkpoint_id=folder)
        for (name, p), q in zip(net.named_parameters(), rows.parameters()):
            assert torch.equal(full(p).to(rank.device), full(q)), (*note, name)
            if p.numel() and "mesh" not in options:
                moved = p.detach().redistribute(placements=[Shard(draw.randrange(p.ndim))])
                back = moved.redistribute(placements=p.placements)
                assert torch.equal(back.to_local(), p.to_local()), (*note, name)


class Layer(nn.Module):
    """Linear layers, two of them with one weight, and experts of which the last gets nothing."""

    def __init__(self, wide, hidden, experts):
        super().__init__()
        self.up, self.also = nn.Linear(wide, hidden), nn.Linear(wide, hidden, bias=False)
        self.also.weight = self.up.weight
        self.down = nn.Linear(hidden, wide, bias=False)
        config = MoEConfig(hidden=wide, expert_hidden=hidden, experts=experts, experts_per_token=1)
        self.experts = Experts(config)

    def forward(self, x):
        x = x + self.down(torch.relu(self.up(x)) * self.also(x))
        chosen = torch.arange(len(x), device=x.device).unsqueeze(1) % max(1, self.experts.num_experts - 1)
        return x + self.experts(x, chosen, torch.ones_like(chosen, dtype=x.dtype))


@spmd(1, 2, 3, 4)
def test_random_fp8_layers_have_the_bits_of_one_process(rank):
    for seed in range(SEEDS):
        draw = random.Random(f"{seed} {rank.world_size}")
        tiles = draw.random() < 0.6
        sizes = [16, 48, 128, 144, 272] if tiles else [128, 256]
        wide, hidden, experts = draw.choice(sizes), draw.choice(sizes), draw.choice([1, 2, 3])
        rows, recompute = draw.choice([1, 3, 127, 129]), draw.choice([None, True, False])
        options, note = options_for(draw, rank), (seed, tiles, wide, hidden, experts, rows, recompute)
        torch.manual_seed(seed)
        whole = Layer(wide, hidden, experts).to(rank.device)
        whole.down.weight.requires_grad_(draw.random() < 0.7)
        net = copy.deepcopy(whole)
        for model in (net, whole):
            fp8.fp8_training(model, tiles=tiles)
        stored = {"orig_param_policy": fp8.orig_param_policy} if tiles else {}
        fully_shard(net, gather_policy=fp8.gather_policy, **stored, **options)
        for step in range(2):
            batch = torch.randn(rows, wide, generator=torch.Generator().manual_seed(step)).to(rank.device)
            results = []
            for model in (net, whole):
                x = batch.clone().requires_grad_()
                call = model if recompute is None else partial(checkpoint, model, use_reentrant=recompute)
                loss = call(x).square().mean()
                loss.backward()
                results.append((loss.detach(), x.grad))
            assert all(torch.equal(a, b) for a, b in zip(*results)), note
            same(net, whole, gradient, note, exact=rank.world_size != 3)  # a third is rounded
            with torch.no_grad():
                for p, q in zip(net.parameters(), whole.parameters()):
                    if p.grad is not None:
                        p -= 0.1 * p.grad
                        q.copy_(full(p))
                        p.grad = q.grad = None
