"""What ``fully_shard`` and its methods refuse, with FSDP2's exceptions and texts."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, init_device_mesh

from fsdp_cases import DIM, FeedForward, fsdp, fully_shard, is_sharded, ragged_only, rows
from rank_pool import spmd


@spmd(1)
def test_containers_without_forward(rank):
    for container in (nn.ModuleList([FeedForward()]), nn.ModuleDict({"a": FeedForward()})):
        with pytest.raises(ValueError, match="does not support containers that do not implement forward"):
            fully_shard(container)

    class WithForward(nn.ModuleList):
        def forward(self, x):
            return self[0](x)

    assert fully_shard(WithForward([FeedForward()]))(rows(rank, 0)).shape == (3, DIM)


@spmd(1)
def test_twice_on_one_module(rank):
    model = fully_shard(FeedForward())
    with pytest.raises(AssertionError, match="can only be applied to a module once"):
        fully_shard(model)


@spmd(1)
def test_deepcopy(rank):
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(fully_shard(FeedForward()))


@spmd(4)
def test_meshes(rank):
    with pytest.raises(ValueError, match="expects a 1D or 2D DeviceMesh but got"):
        fully_shard(FeedForward(), mesh=init_device_mesh(rank.device, (4, 1, 1)))
    with pytest.raises(AssertionError, match="mesh_dim_names specified"):
        fully_shard(FeedForward(), mesh=init_device_mesh(rank.device, (2, 2)))


@spmd(2)
def test_parameters(rank):
    model = FeedForward()
    model.scalar_p = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="Change scalar_p to a 1D tensor with numel equal to 1"):
        fully_shard(model)
    model = FeedForward()
    model.crooked = nn.Parameter(torch.randn(4, 6).t())
    with pytest.raises(NotImplementedError, match="FSDP does not support non-contiguous parameters"):
        fully_shard(model)


@ragged_only
@spmd(2)
def test_a_refused_module_is_left_unchanged(rank):
    model = FeedForward()
    model.scalar_p = nn.Parameter(torch.tensor(1.0))
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match="scalar_p"):
        fully_shard(model)
    assert type(model) is FeedForward
    assert all(before[name] is p for name, p in model.named_parameters())
    del model.scalar_p
    fully_shard(model)  # the module can still be sharded afterwards
    assert is_sharded(model.parameters())


@spmd(2)
def test_shard_placement(rank):
    with pytest.raises(AssertionError, match="Shard dim 1 is invalid for 1D tensor"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p: Shard(1))


@spmd(4)
def test_reshard_after_forward(rank):
    with pytest.raises(ValueError, match="factor of 4, not 3"):
        fully_shard(FeedForward(), reshard_after_forward=3)
    with pytest.raises(ValueError, match="should be a bool or an int"):
        fully_shard(FeedForward(), reshard_after_forward="yes")
    model = fully_shard(FeedForward())
    with pytest.raises(ValueError, match="should be a bool"):
        model.set_reshard_after_forward(2)


@spmd(1)
def test_setters(rank):
    model = fully_shard(FeedForward())
    with pytest.raises(ValueError, match="Expects FSDPModule but got"):
        model.set_modules_to_forward_prefetch([nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="Expects FSDPModule but got"):
        model.set_modules_to_backward_prefetch([nn.Linear(1, 1)])
    if hasattr(model, "set_reduce_scatter_max_input_buffers"):
        with pytest.raises(ValueError, match="positive"):
            model.set_reduce_scatter_max_input_buffers(0)
        for value in (2.5, True):
            with pytest.raises(TypeError, match="int"):
                model.set_reduce_scatter_max_input_buffers(value)
    with pytest.raises(ValueError, match="does not have a method"):
        fsdp.register_fsdp_forward_method(model, "missing")
    with pytest.raises(ValueError, match="Expects list of FSDPModules"):
        fsdp.share_comm_ctx([nn.Linear(1, 1)])
    fsdp.register_fsdp_forward_method(nn.Linear(1, 1), "missing")  # a no-op without fully_shard


@spmd(2)
def test_all_reduce_hook_stream_on_native_hsdp(rank):
    model = fully_shard(FeedForward(), mesh=rank.mesh(2, 1, names=("r", "s")))
    with pytest.raises(ValueError, match="stream cannot be set when using native HSDP"):
        model.set_all_reduce_hook(lambda grads: None, stream=object())


@ragged_only
@spmd(2)
def test_types_of_arguments(rank):
    """Errors name the argument; stock FSDP2 fails later and elsewhere."""
    cases = {
        "mesh": {"mesh": 2},
        "mp_policy": {"mp_policy": torch.bfloat16},
        "offload_policy": {"offload_policy": "cpu"},
        "orig_param_policy": {"orig_param_policy": 128},
        "shard_placement_fn": {"shard_placement_fn": Shard(0)},
        "ignored_params": {"ignored_params": ["weight"]},
    }
    for name, kwargs in cases.items():
        with pytest.raises((TypeError, ValueError), match=name):
            fully_shard(FeedForward(), **kwargs)
    with pytest.raises((TypeError, ValueError), match="module"):
        fully_shard("model")
    with pytest.raises((TypeError, ValueError), match=r"module|empty"):
        fully_shard([])
