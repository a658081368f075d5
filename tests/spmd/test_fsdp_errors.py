"""What ``fully_shard`` and its methods refuse, with FSDP2's exceptions and texts."""

import copy
import inspect
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import fsdp_inside
from fsdp_cases import DIM, FeedForward, fsdp, fully_shard, is_sharded, ragged_only, rows
from ragged_fsdp import DBuffer
from ragged_fsdp.agreement import together
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
    model = FeedForward()
    with pytest.raises(AssertionError, match="can only be applied to a module once"):
        fully_shard([model, model])
    assert type(model) is FeedForward
    assert not is_sharded(model.parameters())


@spmd(1)
def test_deepcopy(rank):
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(fully_shard(FeedForward()))


@spmd(4)
def test_meshes(rank):
    with pytest.raises(ValueError, match="expects a 1D or 2D DeviceMesh but got"):
        fully_shard(FeedForward(), mesh=rank.mesh(4, 1, 1))
    with pytest.raises(AssertionError, match="mesh_dim_names specified"):
        fully_shard(FeedForward(), mesh=rank.mesh(2, 2))


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
def test_a_rank_that_fails_in_a_group_of_some_is_named_as_all_know_it(rank):
    """Rank 3 is the second of its group: another one would be looked at."""

    def fail_on_the_last() -> int:
        if rank.rank == 3:
            raise OSError("on purpose")
        return rank.rank

    mesh = rank.mesh(2, 2, names=("a", "b"))
    if rank.rank < 2:
        assert together(fail_on_the_last, mesh["b"].get_group()) == [0, 1]
    else:
        with pytest.raises(
            (OSError, RuntimeError), match=r"^on purpose$|^rank 3 failed: OSError: on purpose$"
        ):
            together(fail_on_the_last, mesh["b"].get_group())


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
        "dp_mesh_dims": {"dp_mesh_dims": "shard"},
        "mp_policy.reduce_dtype": {"mp_policy": fsdp.MixedPrecisionPolicy(reduce_dtype="bf16")},
        "mp_policy.param_dtype": {"mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.int32)},
    }
    for name, kwargs in cases.items():
        with pytest.raises((TypeError, ValueError), match=name):
            fully_shard(FeedForward(), **kwargs)
    with pytest.raises((TypeError, ValueError), match="module"):
        fully_shard("model")
    with pytest.raises((TypeError, ValueError), match=r"module|empty"):
        fully_shard([])
    model = fully_shard(FeedForward())
    calls = {
        "factor": lambda: model.set_gradient_divide_factor(0),
        "hook": lambda: model.set_all_reduce_hook(3),
        "comm": lambda: model.set_custom_all_gather(3),
        "event": lambda: model.set_post_optim_event(3),
        "method": lambda: fsdp.register_fsdp_forward_method(model, 3),
        "Expects list of FSDPModules": lambda: fsdp.share_comm_ctx(3),
        "Expects FSDPModule": lambda: model.set_modules_to_forward_prefetch(3),
    }
    for text, call in calls.items():
        with pytest.raises((TypeError, ValueError), match=f"{text}.* 3|{text}.* 0"):
            call()


@ragged_only
@spmd(1)
def test_sparse_gradients(rank):
    """The error comes before the first gather and names the parameter; in FSDP2 backward fails without."""
    tokens = torch.tensor([1, 2], device=rank.device)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)).to(rank.device)
    fully_shard(model)
    with pytest.raises(NotImplementedError, match=r"0\.weight: its embedding has sparse=True"):
        model(tokens)
    with torch.no_grad():
        expected = model(tokens)
    model[0].requires_grad_(False)
    model.train()
    assert torch.equal(model(tokens), expected)


@ragged_only  # stock FSDP2 shards the parameters of a parent again
@pytest.mark.parametrize("after_forward", [False, True])
@spmd(2)
def test_a_child_after_its_parent(rank, after_forward):
    """The parent's call took the child's parameters: top-down order is refused, on every rank."""
    model = nn.Sequential(FeedForward(), FeedForward()).to(rank.device)
    fully_shard(model)
    if after_forward:
        model(rows(rank, 0))
    with pytest.raises(ValueError, match=r"'up\.weight' is already sharded by a call on a module above"):
        fully_shard(model[1])
    assert type(model[1]) is FeedForward
    model(rows(rank, 0)).sum().backward()


def _raises(*args):
    raise KeyError("from the policy")


def _scalar(model, _):
    model.scalar_p = nn.Parameter(torch.tensor(1.0))
    return {}


FAULTS = {  # the arguments, of a new model and of a sharded one, and what the rank that gives them raises
    "scalar": (_scalar, ValueError, "Change scalar_p to a 1D tensor"),
    "policy": (lambda *_: {"orig_param_policy": _raises}, KeyError, "from the policy"),
    "placement": (lambda *_: {"shard_placement_fn": lambda p: Shard(9)}, AssertionError, "Shard dim 9"),
    "ignored": (lambda model, _: {"ignored_params": model.up.weight}, TypeError, "ignored_params.*Parameter"),
    "option": (lambda *_: {"reduction": "sum"}, ValueError, "reduction must be one of"),
    "memory": (lambda *_: {}, torch.OutOfMemoryError, "no memory for the shard"),
    "module": (lambda *_: {"module": "model"}, TypeError, "module must be"),
    "twice": (lambda _, sharded: {"module": [FeedForward(), sharded]}, AssertionError, "to a module once"),
}


@ragged_only
@pytest.mark.parametrize("failing", [(1,), (0, 1)])
@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
@spmd(4)
def test_what_one_rank_raises_alone(rank, failing, sizes):
    """It raises what it always did; the others of its mesh name it; no module is changed, and all go on."""
    mesh = rank.mesh(2, 2, names=("replicate", "shard"))
    mesh = mesh if len(sizes) == 2 else mesh["shard"]
    told = len(sizes) == 2 or rank.rank < 2  # the ranks of another row are no part of the call
    sharded = fully_shard(FeedForward().to(rank.device), mesh=mesh)
    for name, (arguments, kind, text) in FAULTS.items():
        model = FeedForward().to(rank.device)
        attributes, parameters = set(model.__dict__), dict(model.named_parameters())
        if rank.rank not in failing:
            if not told:
                fully_shard(model, mesh=mesh)
                continue
            with pytest.raises(RuntimeError, match=rf"rank [01] raised {kind.__name__}: (.|\n)*{text}"):
                fully_shard(model, mesh=mesh)
        else:
            options = {"module": model, **arguments(model, sharded)}
            fault = fsdp_inside.no_memory_for_shards() if name == "memory" else nullcontext()
            with pytest.raises(kind, match=text) as raised, fault:
                fully_shard(**options, mesh=mesh)
            assert kind is not KeyError or "'up.weight'" in raised.value.__notes__[0]
            if name == "scalar":
                del model.scalar_p
            if name == "twice":
                fresh = options["module"][0]
                assert type(fresh) is FeedForward and fully_shard.state(fresh) is None
        assert type(model) is FeedForward and set(model.__dict__) == attributes
        assert all(parameters[name] is p for name, p in model.named_parameters())
        fully_shard(model, mesh=mesh)
        assert model(rows(rank, 0)).shape == (3, DIM)


@ragged_only
@pytest.mark.parametrize("ranks", [[3, 2, 1, 0], [0, 2, 1, 3], [[0, 2], [3, 1]], [[2, 3], [0, 1]]])
@spmd(4)
def test_a_mesh_in_another_order_than_its_process_groups(rank, ranks):
    """Torch's groups sort their ranks: slots would be where collectives bring those of another rank.

    On some ranks the order is the same; they are told.
    """
    names = ("replicate", "shard") if isinstance(ranks[0], list) else ("shard",)
    mesh = DeviceMesh(rank.device, ranks, mesh_dim_names=names)
    for options in ({}, {"shard_placement_fn": lambda p: Shard(0)}):
        model = FeedForward().to(rank.device)
        with pytest.raises((ValueError, RuntimeError), match=r"along dim \d of the mesh .* ascending order"):
            fully_shard(model, mesh=mesh, **options)
        assert not is_sharded(model.parameters())
    in_order = mesh.get_coordinate() == tuple(mesh.get_group(dim).rank() for dim in range(mesh.ndim))
    refused = nullcontext() if in_order else pytest.raises(ValueError, match="ascending order")
    with refused:
        DBuffer.distribute({"w": torch.ones(8, device=rank.device)}, mesh)


@ragged_only
@spmd(4)
def test_larger_shards_of_a_group_in_another_order(rank):
    """The smaller groups would count their ranks in ascending order."""
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        pytest.skip("this torch sorts the ranks of every group")
    group = dist.new_group([3, 2, 1, 0], sort_ranks=False)
    mesh = DeviceMesh.from_group(group, torch.device(rank.device).type)
    model = FeedForward().to(rank.device)
    with pytest.raises(ValueError, match=r"reshard_after_forward as an int .* got \[3, 2, 1, 0\]"):
        fully_shard(model, mesh=mesh, reshard_after_forward=2)
