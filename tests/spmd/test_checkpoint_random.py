"""Random models, written by some ranks in one way and read by others in another: every bit must come back."""

import functools
import math
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor

from ragged_fsdp import Elements, Rows, Tiles, Whole, fully_shard, weights
from rank_pool import spmd

RANKS = 4
CASES = 20
NAMES = ["weight", "model", "optim", "größe", "with space", "my_orig_mod", "x" * 120, "p/q", "0"]
SHAPES = [(1,), (0,), (7,), (3, 5), (16, 16), (0, 3), (5, 4, 6), (33, 2), (2, 3, 2, 5), (1, 1), (8, 12)]
FLOATS = [torch.float32, torch.float32, torch.bfloat16, torch.float64]
BUFFERS = [torch.int64, torch.bool, torch.float32, torch.uint8]


class _Part(nn.Module):
    def forward(self, x):
        return x


def _values(shape, dtype, generator):
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def _model(seed, values):
    """Structure from ``seed``, elements from ``values``: nested, tied, frozen, empty, of several dtypes."""
    pick, generator = random.Random(seed), torch.Generator().manual_seed(values)
    modules, parameters = [_Part()], []
    names = pick.sample(NAMES, 5)
    for _ in range(pick.randint(1, 4)):
        parent, name = pick.choice(modules), pick.choice(names)
        if not hasattr(parent, name):
            parent.add_module(name, _Part())
            modules.append(getattr(parent, name))
    dtypes = FLOATS if pick.random() < 0.5 else [pick.choice(FLOATS)]
    for module in modules:
        for _ in range(pick.randint(0 if parameters else 1, 3)):
            name = f"{pick.choice(names)}{pick.choice(['', 'w'])}"
            if not hasattr(module, name):
                made = _values(pick.choice(SHAPES), pick.choice(dtypes), generator)
                parameters.append(nn.Parameter(made, requires_grad=pick.random() < 0.7))
                module.register_parameter(name, parameters[-1])
        if pick.random() < 0.5:
            made = _values(pick.choice([(), *SHAPES]), pick.choice(BUFFERS), generator)
            module.register_buffer("buffer", made, persistent=pick.random() < 0.7)
        if pick.random() < 0.3:
            module.register_parameter("tied", pick.choice(parameters))
    return modules


def _granularity(name, parameter):
    pick, choices = random.Random(name), [None, Whole(), Elements(1)]
    if parameter.ndim > 1:
        choices.append(Rows(1))
    if tuple(parameter.shape) in ((16, 16), (8, 12)):
        choices.append(Tiles(4, 4))
    return pick.choice(choices) if parameter.numel() else None


def _shard(modules, kind, pick, mesh):
    if kind == "plain":
        return
    root, below = modules[0], modules[1:]
    is_tied = len(list(root.parameters())) < len(list(root.named_parameters(remove_duplicate=False)))
    below = [] if is_tied else [m for m in reversed(below) if pick.random() < 0.5 and list(m.parameters())]
    if kind == "stock":
        shard, options = stock_fully_shard, {}
    else:
        shard, options = fully_shard, {"max_buffers": pick.choice([1, 3])}
        if pick.random() < 0.7:
            options["orig_param_policy"] = _granularity
        if pick.random() < 0.2:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if pick.random() < 0.3:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in [*below, root]:
        shard(module, mesh=mesh, **options)


@functools.cache
def _mesh(shape, world):
    """Over the first ranks; of two dims the first has replicas. Made by all ranks, in the same order."""
    ranks = torch.arange(math.prod(shape)).view(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("replica", "shard")[2 - len(shape) :])


def _whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _assert_equal(got, expected, what):
    assert got.keys() == expected.keys(), what
    for name, value in expected.items():
        mine = _whole(got[name])
        assert (mine.dtype, mine.shape) == (value.dtype, value.shape), (what, name)
        assert torch.equal(mine, value), (what, name)


@pytest.mark.filterwarnings("ignore::UserWarning")
@spmd(RANKS)
def test_what_any_ranks_write_any_ranks_read(rank):
    """Over one to four ranks or two pairs of replicas, by us or by FSDP2 or unsharded, by every road."""
    for seed in range(CASES):
        pick = random.Random(seed)
        shapes = [(1,), (2,), (3,), (4,), (2, 2)]
        writers, readers = (_mesh(pick.choice(shapes), dist.group.WORLD) for _ in range(2))
        kinds = [pick.choice(["ours", "ours", "ours", "stock", "plain"]) for _ in range(2)]
        road = pick.choice(["dcp", "run", "async", "safetensors"])
        what, folder = (seed, writers, readers, kinds, road), rank.shared_dir / f"{seed} {road}"
        if road == "safetensors":
            writers = _mesh((RANKS,), dist.group.WORLD)  # all ranks save
        reference = _model(seed, 1)[0].state_dict()
        if rank.rank < writers.size():
            _write(_model(seed, 1), kinds[0], road, pick, writers, folder)
        dist.barrier()
        if rank.rank < readers.size():
            pick, group = random.Random(seed + 100), _group(readers)
            model = _model(seed, 2)
            _shard(model, kinds[1], pick, readers)
            report = weights.load(model[0], folder, group=group, broadcast=pick.random() < 0.5)
            assert report.missing == report.unexpected == (), what
            _assert_equal(model[0].state_dict(), reference, what)
            if road != "safetensors":
                model = _model(seed, 3)
                _shard(model, kinds[1], pick, readers)
                state = model[0].state_dict()
                stored = {"model": state} if road == "run" else state
                dcp.load(stored, checkpoint_id=folder, process_group=group)
                _assert_equal(state, reference, what)
            sent = dict(weights.stream(model[0]).tensors())
            _assert_equal(sent, {name: reference[name] for name in sent}, what)
        dist.barrier()


def _group(mesh):
    return dist.group.WORLD if mesh.size() == RANKS else mesh.get_group()


def _write(modules, kind, road, pick, mesh, folder):
    group = _group(mesh)
    _shard(modules, kind, pick, mesh)
    state = modules[0].state_dict()
    if road == "safetensors":
        weights.save(modules[0], folder, max_file_bytes=pick.choice([200, 1 << 30]))
    elif road == "run":
        more = {"model": state, "optim": {"step": torch.ones(3), "lr": 0.1}}
        dcp.save(more, checkpoint_id=folder, process_group=group)
    elif road == "dcp":
        dcp.save(state, checkpoint_id=folder, process_group=group)
    else:
        written = dcp.async_save(state, checkpoint_id=folder, process_group=group)
        with torch.no_grad():
            for parameter in modules[0].parameters():
                parameter.fill_(9)
        written.result()
