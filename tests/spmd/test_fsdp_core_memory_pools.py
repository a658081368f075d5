"""Memory for collectives that comes from elsewhere: custom communication objects, process groups."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from fsdp_core_cases import (
    OPTIMIZERS,
    assert_same_params,
    clone,
    make_net,
    shard,
    train_reference,
    train_sharded,
)
from ragged_fsdp.dbuffer import FlatStorage
from rank_pool import Rank, spmd


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
    reference = make_net(rank.device)
    model = shard(clone(reference), mesh=rank.mesh())
    gathers, scatters = Counter(), Counter()
    for module in (model, *model.blocks):
        module.set_custom_all_gather(Gather(gathers))
        module.set_custom_reduce_scatter(Scatter(scatters))
    model._set_unshard_async_op(async_op)
    expected = train_reference(reference, OPTIMIZERS["sgd"], rank.world_size, 4)
    losses = train_sharded(model, OPTIMIZERS["sgd"], rank.rank, rank.world_size, 4)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert_same_params(model, reference, rtol=1e-4, atol=1e-5)
    assert gathers["allocate"] == gathers["collective"] > 0
    assert scatters["allocate"] == scatters["collective"] == 4 * 4


class Pool:
    """Stands for the pool of a process group: notes what is allocated within it."""

    def __init__(self) -> None:
        self.is_open = False

    @contextmanager
    def allocating(self, device):
        self.is_open = True
        yield
        self.is_open = False


@spmd(2)
def test_buffers_of_collectives_come_from_the_pool(rank: Rank) -> None:
    reference = make_net(rank.device)
    model = shard(clone(reference), mesh=rank.mesh())
    pool, outside, inside = Pool(), [], []
    for module in (model, *model.blocks):
        module.set_allocate_memory_from_process_group_for_comm(True)  # gloo has no allocator: no effect
        (group,) = module._get_fsdp_state().groups
        if rank.device == "cpu":
            assert group.settings.comm_memory is None
        group.settings.comm_memory = pool
    materialize = FlatStorage.materialize

    def noted(storage: FlatStorage) -> None:
        if not storage.is_materialized:
            (inside if pool.is_open else outside).append(storage)
        materialize(storage)

    FlatStorage.materialize = noted
    try:
        expected = train_reference(reference, OPTIMIZERS["sgd"], 2, 3)
        losses = train_sharded(model, OPTIMIZERS["sgd"], rank.rank, 2, 3)
    finally:
        FlatStorage.materialize = materialize
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert not outside
    groups = [group for module in (model, *model.blocks) for group in module._get_fsdp_state().groups]
    for group in groups:
        (collected,) = group.reducer._fulls.values()
        assert group.model_weight.storage in inside and collected.storage in inside
    for module in (model, *model.blocks):
        module.set_allocate_memory_from_process_group_for_comm(False)
    assert all(group.settings.comm_memory is None for group in groups)


@spmd(1)
def test_memory_that_cannot_be_used_is_refused(rank: Rank) -> None:
    with pytest.raises(ValueError, match="at the start of its storage, got strides"):
        FlatStorage.over(torch.empty(4, 4, device=rank.device)[1:])
