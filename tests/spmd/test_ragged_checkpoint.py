"""Checkpoints of ragged tensors: layouts, world sizes, state-dict utilities."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from ragged_cases import assert_same, numbers, whole, world_units, worlds
from ragged_fsdp.dtensor import RaggedShard, StridedRaggedShard, distribute_tensor
from rank_pool import spmd

SHAPES = {"matrix": (8, 6), "cube": (5, 3, 4), "vector": (12,), "one": (1,)}


def values(device: str) -> dict[str, torch.Tensor]:
    return {name: numbers(i, *shape, device=device) for i, (name, shape) in enumerate(SHAPES.items())}


def ragged_state(mesh: DeviceMesh, tensors: dict[str, torch.Tensor], seed: int) -> dict[str, DTensor]:
    """Every tensor cut through all its dims, somewhere else for each seed; the last on one rank."""
    ranks, state = mesh.size(), {}
    for i, (name, tensor) in enumerate(tensors.items()):
        units = world_units(tensor.numel(), ranks, seed + i)
        state[name] = distribute_tensor(tensor, mesh, [RaggedShard(range(tensor.ndim), units)])
    return state


def assert_state(state: dict[str, DTensor], tensors: dict[str, torch.Tensor]) -> None:
    """Every tensor of ``state`` has the values of the plain one of its name."""
    for name, tensor in state.items():
        assert_same(tensor, tensors[name], name, exact=True)


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


@spmd(4)
def test_layouts_and_world_sizes(rank):
    tensors, mesh = values(rank.device), rank.mesh()
    grid = rank.mesh(2, 2, names=("dp", "tp"))
    placed = {
        **ragged_state(mesh, tensors, 0),
        "hybrid": distribute_tensor(tensors["cube"], grid, [Replicate(), RaggedShard((0, 1, 2), (23, 37))]),
        "strided": distribute_tensor(
            numbers(9, 5, 6, device=rank.device),
            grid,
            [StridedRaggedShard((0, 1), ((7, 11), (12, 0))), Shard(0)],
        ),
        "columns": distribute_tensor(tensors["matrix"], grid, [RaggedShard((0,), (3, 5)), Shard(1)]),
    }
    expected = {
        **tensors,
        "hybrid": tensors["cube"],
        "columns": tensors["matrix"],
        "strided": whole(placed["strided"]),
    }
    path = str(rank.shared_dir / "four")
    with CommDebugMode() as comm:
        dcp.save(placed, checkpoint_id=path)
    data = [op for op in comm.get_comm_counts() if "all_gather_into" in str(op) or "all_to_all" in str(op)]
    assert not data, data  # each rank writes what it holds
    chunks = dcp.FileSystemReader(path).read_metadata().state_dict_metadata["cube"].chunks
    assert sum(torch.Size(c.sizes).numel() for c in chunks) == tensors["cube"].numel()

    layouts = {
        "Shard(0)": lambda t, m: distribute_tensor(t, m, [Shard(0)]),
        "Shard(last)": lambda t, m: distribute_tensor(t, m, [Shard(t.ndim - 1)]),
        "Replicate": lambda t, m: distribute_tensor(t, m, [Replicate()]),
        "plain": lambda t, m: t,
        "ragged": lambda t, m: ragged_state(m, {"t": t}, 2)["t"],
    }
    for ranks in (4, 3, 2, 1):
        part = DeviceMesh(rank.device, list(range(ranks)))
        if rank.rank < ranks:
            for name, place in layouts.items():
                target = {key: place(torch.zeros_like(t), part) for key, t in expected.items()}
                dcp.load(target, checkpoint_id=path, process_group=part.get_group())
                for key, tensor in target.items():
                    assert_same(tensor, expected[key], f"{key} on {ranks} ranks as {name}", exact=True)
            back = str(rank.shared_dir / f"from{ranks}")
            dcp.save(ragged_state(part, tensors, 1), checkpoint_id=back, process_group=part.get_group())
        dist.barrier()
    for source in ("from3", "from1"):
        target = ragged_state(mesh, blank(tensors), 3)
        dcp.load(target, checkpoint_id=str(rank.shared_dir / source))
        assert_state(target, tensors)
    into_strided = {
        "strided": distribute_tensor(
            torch.zeros(5, 6), grid, [StridedRaggedShard((0,), ((1, 2), (2, 0))), Shard(0)]
        )
    }
    dcp.load(into_strided, checkpoint_id=path)
    assert_same(into_strided["strided"], expected["strided"])


@spmd(2)
def test_sharded_checkpoints_load_into_ragged_tensors_and_asynchronously(rank):
    tensors, mesh = values(rank.device), rank.mesh()
    stock = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in tensors.items()}
    dcp.save(stock, checkpoint_id=str(rank.shared_dir / "stock"))
    target = ragged_state(mesh, blank(tensors), 0)
    pointers = {name: t._local_tensor.data_ptr() for name, t in target.items()}
    dcp.load(target, checkpoint_id=str(rank.shared_dir / "stock"))
    for name, tensor in target.items():
        assert_same(tensor, tensors[name], exact=True)
        assert tensor._local_tensor.data_ptr() == pointers[name]  # written in place
    gloo = dist.new_group(backend="gloo")
    dcp.async_save(target, checkpoint_id=str(rank.shared_dir / "async"), process_group=gloo).result()
    again = ragged_state(mesh, blank(tensors), 1)
    dcp.load(again, checkpoint_id=str(rank.shared_dir / "async"))
    assert_state(again, tensors)


@spmd(2)
def test_safetensors_storage(rank):
    """Hugging Face files: read into ragged tensors, and written from them (sharded, then merged)."""
    hf = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    safetensors = pytest.importorskip("safetensors.torch")
    tensors, mesh = values("cpu"), rank.mesh()
    path = rank.shared_dir / "hf"
    path.mkdir(exist_ok=True)
    if rank.rank == 0:
        safetensors.save_file(
            {k: t.contiguous() for k, t in tensors.items()}, str(path / "model.safetensors")
        )
    dist.barrier()
    target = ragged_state(mesh, {k: torch.zeros_like(t, device=rank.device) for k, t in tensors.items()}, 0)
    dcp.load(target, storage_reader=hf.HuggingFaceStorageReader(str(path)))
    assert_state(target, tensors)
    out, merged = rank.shared_dir / "out", rank.shared_dir / "merged"
    for folder in (out, merged):
        writer = hf.HuggingFaceStorageWriter(
            str(folder),
            fqn_to_index_mapping=dict.fromkeys(tensors, 1),
            save_distributed=True,
            enable_consolidation=folder is merged,
        )
        dcp.save(target, storage_writer=writer)
    again = ragged_state(mesh, {k: torch.zeros_like(t, device=rank.device) for k, t in tensors.items()}, 1)
    dcp.load(again, storage_reader=hf.HuggingFaceStorageReader(str(out)))
    assert_state(again, tensors)
    if rank.rank == 0:
        (file,) = merged.glob("*.safetensors")
        loaded = safetensors.load_file(str(file))
        assert_same([loaded[name] for name in tensors], list(tensors.values()), exact=True)


class _Net(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, device=device)
        self.second = nn.Linear(8, 4, bias=False, device=device)


def make(mesh: DeviceMesh, seed: int, scale: float = 1.0) -> tuple[_Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = _Net(mesh.device_type)
    for i, (name, param) in enumerate(list(net.named_parameters())):
        owner, leaf = net.get_submodule(name.split(".")[0]), name.split(".")[1]
        placement = RaggedShard(range(param.ndim), world_units(param.numel(), mesh.size(), seed + i))
        setattr(owner, leaf, nn.Parameter(distribute_tensor(param.data * scale, mesh, [placement])))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for param in net.parameters():
        param.grad = param.detach().clone()
    optimizer.step()
    return net, optimizer


@spmd(*worlds(1, 3))
def test_state_dict_utilities(rank):
    mesh = rank.mesh()
    net, optimizer = make(mesh, 0)
    sharded = {"model": get_model_state_dict(net), "optim": get_optimizer_state_dict(net, optimizer)}
    weights = {k: whole(v) for k, v in sharded["model"].items()}
    moments = {k: whole(v["exp_avg"]) for k, v in sharded["optim"]["state"].items()}
    path = str(rank.shared_dir / "net")
    dcp.save(sharded, checkpoint_id=path)

    def check(other: nn.Module, opt: torch.optim.Optimizer) -> None:
        for k, v in get_model_state_dict(other).items():
            assert_same(v, weights[k])
        for k, v in get_optimizer_state_dict(other, opt)["state"].items():
            assert isinstance(v["exp_avg"].placements[0], RaggedShard)
            assert_same(v["exp_avg"], moments[k])

    other, opt = make(mesh, 5, scale=2.0)
    state = {"model": get_model_state_dict(other), "optim": get_optimizer_state_dict(other, opt)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(other, state["model"])
    set_optimizer_state_dict(other, opt, state["optim"])
    check(other, opt)

    for offload in (False, True):
        full = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        whole_model = get_model_state_dict(net, options=full)
        whole_optim = get_optimizer_state_dict(net, optimizer, options=full)
        if rank.rank == 0 or not offload:
            for k, v in whole_model.items():
                assert type(v) is torch.Tensor
                assert_same(v, weights[k])
        kept = get_model_state_dict(net, options=StateDictOptions(cpu_offload=True))
        assert all(v.device.type == "cpu" for v in kept.values())
        if offload:
            continue
        for broadcast in (False, True):
            other, opt = make(mesh, 3, scale=2.0)
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            mine = rank.rank == 0 or not broadcast
            model_state = dict(whole_model) if mine else {}  # torch fills the dict it is given
            set_model_state_dict(other, model_state, options=options)
            set_optimizer_state_dict(other, opt, copy.deepcopy(whole_optim) if mine else {}, options=options)
            check(other, opt)
    if rank.world_size > 1:
        with torch.device("meta"):
            empty = _Net("meta")
        for name, param in list(empty.named_parameters()):
            owner, leaf = empty.get_submodule(name.split(".")[0]), name.split(".")[1]
            placement = dict(net.named_parameters())[name].placements
            setattr(owner, leaf, nn.Parameter(distribute_tensor(param.data, mesh, placement)))
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(empty, dict(whole_model) if rank.rank == 0 else {}, options=options)
        for k, v in get_model_state_dict(empty).items():
            assert_same(v, weights[k])
