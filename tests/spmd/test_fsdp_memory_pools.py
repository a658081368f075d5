"""Memory for collectives that comes from elsewhere: custom communication objects, process groups."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

import fsdp_inside
from collective_calls import noted
from fsdp_cases import Transformer, build, ragged_only, shard_blocks, tokens, train_both
from ragged_fsdp.collectives import Comm
from rank_pool import Rank, spmd

pytestmark = ragged_only


class Gather:
    """Gathers into memory of its own."""

    def __init__(self, calls: Counter) -> None:
        self.calls = calls
        self.given: list[int] = []

    def allocate(self, size, *, dtype, device):
        self.calls["allocate"] += 1
        made = torch.empty(*size, dtype=dtype, device=device)
        self.given.append(made.data_ptr())
        return made

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        assert output_tensor.data_ptr() in self.given
        self.calls["collective"] += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter(Gather):
    """Scatters from memory of its own."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        assert input_tensor.data_ptr() in self.given
        self.calls["collective"] += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


@pytest.mark.parametrize("async_op", [False, True])
@spmd(2, 3)
def test_custom_objects_allocate(rank: Rank, async_op: bool) -> None:
    model, reference = build(Transformer, rank.device)
    shard_blocks(model, mesh=rank.mesh())
    gathers, scatters = Counter(), Counter()
    for module in (model, *model.layers):
        module.set_custom_all_gather(Gather(gathers))
        module.set_custom_reduce_scatter(Scatter(scatters))
    model._set_unshard_async_op(async_op)
    train_both(model, reference, rank)
    assert gathers["allocate"] == gathers["collective"] > 0
    assert scatters["allocate"] == scatters["collective"] == 4 * 3


@pytest.mark.parametrize("reshard", [True, 2])
@spmd(4)
def test_memory_of_a_custom_gather_is_let_go_after_it(rank: Rank, reshard: bool | int) -> None:
    given: list[StorageWeakRef] = []

    class Remembered(Gather):
        def allocate(self, size, *, dtype, device):
            made = super().allocate(size, dtype=dtype, device=device)
            given.append(StorageWeakRef(made.untyped_storage()))
            return made

    model, _ = build(Transformer, rank.device)
    shard_blocks(model, mesh=rank.mesh(), reshard_after_forward=reshard)
    for module in (model, *model.layers):
        module.set_custom_all_gather(Remembered(Counter()))
    for step in range(2):
        model(tokens(rank, step)).backward()
    assert given and all(storage.expired() for storage in given)


@spmd(2)
def test_memory_that_cannot_be_used_is_refused(rank: Rank) -> None:
    class Crooked(Scatter):
        def allocate(self, size, *, dtype, device):
            return torch.empty(size[0] + 4, dtype=dtype, device=device)[4:]

    model, _ = build(Transformer, rank.device)
    shard_blocks(model, mesh=rank.mesh())
    model.layers[1].set_custom_reduce_scatter(Crooked(Counter()))
    with pytest.raises(ValueError, match=r"at the start of its storage, got strides \(1,\) at offset 4"):
        model(tokens(rank, 0)).backward()


class Pool(Comm):
    """Stands for the pool of a process group: notes the storages that grow within it."""

    common_memory = False

    def __init__(self) -> None:
        self.is_open = False
        self.allocated: set[int] = set()

    @contextmanager
    def memory(self, device: torch.device) -> Iterator[None]:
        self.is_open = True
        yield
        self.is_open = False

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Watch the storages of this process."""
        resize = torch.UntypedStorage.resize_

        def noted_resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            if self.is_open and storage.nbytes() < size:
                self.allocated.add(storage._cdata)
            return resize(storage, size)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "resize_", noted_resize)
            yield


@spmd(2)
def test_buffers_of_collectives_come_from_the_pool(rank: Rank) -> None:
    model, reference = build(Transformer, rank.device)
    shard_blocks(model, mesh=rank.mesh())
    pool, modules = Pool(), (model, *model.layers)
    for module in modules:
        module.set_allocate_memory_from_process_group_for_comm(True)  # gloo has no allocator: no effect
        if rank.device == "cpu":
            assert fsdp_inside.comm_memory_of(module) == [None]
        fsdp_inside.use_comm_memory(module, pool)
    with pool.noting(), noted() as notes:
        train_both(model, reference, rank, steps=3)
    gathered = [call.written for call in notes.of("gather")]
    reduced = [tensor for call in notes.of("reduce_scatter") for tensor in call.tensors]
    assert len(reduced) == 2 * 3 * 3 and len(gathered) >= 3 * 3
    for tensor in (*gathered, *reduced):  # also what a reduction writes: over NCCL both sides are registered
        assert tensor.untyped_storage()._cdata in pool.allocated
    for module in modules:
        module.set_allocate_memory_from_process_group_for_comm(False)
        assert fsdp_inside.comm_memory_of(module) == [None]
