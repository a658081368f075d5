"""Asks torch the same questions before and after importing the package, about tensors that are not ours.

Run as a program. There is a question for everything that is replaced in torch; the answers have values,
placements, meshes, types and texts of errors, and warnings.
"""

import copy
import importlib
import io
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._state_dict_utils as state_dict_utils
import torch.distributed.tensor as dt
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is filled: fake collectives leave it
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
flat = init_device_mesh("cpu", (4,))
grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
buffer = torch.arange(20.0)


def on(mesh, *placements, data=None):
    data = torch.arange(16.0).view(4, 4) if data is None else data
    return dt.distribute_tensor(data.clone(), mesh, placements, src_data_rank=None)


def number(mesh, value=2.0, placement=None):
    return DTensor.from_local(torch.tensor(value), mesh, [placement or Replicate()] * mesh.ndim)


def pending(mesh):
    return number(mesh, 1.0, Partial())


def two_meshes():
    return [on(flat, Shard(0)), on(grid, Shard(0), Shard(1))]


def inside():
    return DTensor.from_local(buffer[4:8].view(2, 2), flat, [Shard(0)])


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    size = file.tell()
    file.seek(0)
    return size, torch.load(file, weights_only=False)


def unscaled():
    grads, flag = [on(flat, Shard(0)), on(flat, Replicate())], torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, torch.tensor(0.5))
    return grads, flag


def gradient(leaf, placement):
    leaf.requires_grad_()
    leaf.redistribute(placements=[placement]).to_local().sum().backward()
    return leaf.grad


def loaded(full, local):
    state_dict_utils._distribute_state_dict(full, local, torch.device("cpu"))
    return local


def item(offset):
    chunk = ChunkStorageMetadata(offsets=torch.Size([offset]), sizes=torch.Size([2]))
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(), size=torch.Size([4]))
    return WriteItem(index=MetadataIndex("w", chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)


def split():
    writer = HuggingFaceStorageWriter("/nowhere", fqn_to_index_mapping={"w": 1, "v": 2})
    return writer._split_by_storage_plan({"w": 1, "v": 2}, [item(0), item(2)])


def counted(call):
    with CommDebugMode() as mode:
        call()
    return {str(op): count for op, count in mode.get_comm_counts().items()}


def sgd():
    params = [on(flat, Shard(0))]
    torch._fused_sgd_(
        params,
        [on(flat, Shard(0))],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )
    return params


CASES: dict[str, Callable[[], Any]] = {
    # several meshes
    "mul of two meshes": lambda: number(flat) * number(grid, 3.0),
    "mul of a matrix and a number of another mesh": lambda: on(grid, Shard(0), Replicate()) * number(flat),
    "stack of two meshes": lambda: torch.stack([number(flat), number(grid, 3.0)]),
    "stack of pending numbers": lambda: torch.stack([pending(flat), pending(grid)]),
    "foreach mul of two meshes": lambda: torch._foreach_mul([on(grid, Shard(0), Replicate())], number(flat)),
    "foreach add of two meshes": lambda: torch._foreach_add(two_meshes(), 1.0),
    "norms of two meshes": lambda: torch._foreach_norm(two_meshes()),
    # item and the other ops with handlers
    "item": lambda: number(flat).item(),
    "item of a pending sum": lambda: pending(flat).item(),
    "item of a sum": lambda: on(flat, Shard(0)).sum().item(),
    "item of a matrix": lambda: on(flat, Shard(0)).item(),
    "truth of a number": lambda: bool(number(flat) > 1),
    "argmax": lambda: on(flat, Shard(0)).argmax(1),
    "argmax of all": lambda: on(flat, Shard(1)).argmax(),
    "as_strided": lambda: on(flat, Replicate()).as_strided((2, 2), (1, 1)),
    "convolution": lambda: torch.nn.functional.conv1d(on(flat, Replicate()), torch.ones(4, 4, 1)),
    "unscale": unscaled,
    "fused sgd": sgd,
    "an op without a rule": lambda: torch.linalg.qr(on(flat, Shard(0))),
    # redistribution
    "gather": lambda: on(flat, Shard(0)).full_tensor(),
    "collectives of a gather": lambda: counted(lambda: on(flat, Shard(0)).full_tensor()),
    "collectives of an add": lambda: counted(lambda: on(flat, Shard(0)) + on(flat, Shard(1))),
    "between meshes": lambda: on(flat, Shard(0)).redistribute(grid, [Shard(0), Shard(0)]),
    "gradient of a gather": lambda: gradient(on(flat, Shard(0)), Replicate()),
    "gradient of a reduction": lambda: gradient(
        DTensor.from_local(torch.ones(4, 4), flat, [Partial()]), Shard(0)
    ),
    # construction
    "distribute nothing": lambda: dt.distribute_tensor(5, flat, [Shard(0)]),
    "distribute without a list": lambda: dt.distribute_tensor(torch.ones(4), flat, Shard(0)),
    "distribute with a number": lambda: dt.distribute_tensor(torch.ones(4), flat, 3),
    "distribute with too few placements": lambda: dt.distribute_tensor(torch.ones(4), grid, [Shard(0)]),
    "from_local": lambda: DTensor.from_local(torch.ones(2, 2), grid, [Shard(0), Shard(1)]),
    "from_local with a stride": lambda: DTensor.from_local(
        torch.ones(1, 4), flat, [Shard(0)], shape=torch.Size((4, 4)), stride=(1, 4)
    ),
    "zeros": lambda: dt.zeros(5, 3, device_mesh=flat, placements=[Shard(0)]),
    "randn": lambda: dt.randn(8, 3, device_mesh=flat, placements=[Shard(0)]),
    # copies and checkpoints
    "deepcopy": lambda: copy.deepcopy(on(flat, Shard(0))),
    "deepcopy inside a buffer": lambda: copy.deepcopy(inside()),
    "pickle inside a buffer": lambda: pickle.loads(pickle.dumps(inside())),
    "save inside a buffer": lambda: saved(inside()),
    "save": lambda: saved(on(flat, Shard(0))),
    "stage": lambda: StateDictStager().stage({"w": on(flat, Shard(0))}),
    "stage inside a buffer": lambda: StateDictStager().stage({"w": inside()}),
    "boxes": lambda: on(flat, Shard(0)).__create_chunk_list__(),
    "boxes of a pending sum": lambda: pending(flat).__create_chunk_list__(),
    "items to write": lambda: on(grid, Shard(0), Shard(1)).__create_write_items__("w", on(flat, Shard(0))),
    "shard": lambda: on(flat, Shard(0)).__get_tensor_shard__(MetadataIndex("w", torch.Size((0, 0)))),
    "safetensors files": split,
    "load a full state dict": lambda: loaded({"w": torch.ones(4, 4)}, {"w": on(flat, Shard(0))}),
    "load another shape": lambda: loaded({"w": torch.ones(3, 4)}, {"w": on(flat, Shard(0))}),
    "load nothing": lambda: loaded({}, {"w": on(flat, Shard(0))}),
}


def described(value):
    if isinstance(value, DTensor):
        return f"DTensor({value.to_local()}, {value.device_mesh}, {value.placements}, {value.stride()})"
    if isinstance(value, dict):
        return {str(k): described(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [described(v) for v in value]
    return repr(value)


def answer(case):
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            found = described(case())
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
    return found, [str(w.message) for w in heard]


def answers():
    return {name: answer(case) for name, case in CASES.items()}


def main() -> None:
    """Print each question whose answer changes with the import, then a summary."""
    first, second = answers(), answers()  # torch answers some differently the second time, from its caches
    assert "ragged_fsdp" not in sys.modules
    importlib.import_module("ragged_fsdp")
    assert "ragged_fsdp.dtensor" in sys.modules
    after = answers()
    for name in CASES:
        if after[name] not in (first[name], second[name]):
            print(f"{name}: {second[name]} before, {after[name]} after")
    refused = sum("Error: " in str(found) for found, _ in first.values())
    print(f"{len(CASES)} questions, {refused} refused")


if __name__ == "__main__":
    main()
