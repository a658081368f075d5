"""The run-time methods of ``FSDPModule``."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from collective_calls import count
from fsdp_cases import (
    DIM,
    RAGGED,
    FeedForward,
    Transformer,
    assert_same,
    assert_steps_agree,
    average_gradients,
    backward_both,
    build,
    fsdp,
    fully_shard,
    is_sharded,
    ragged_only,
    rows,
    shard_blocks,
    tokens,
)
from rank_pool import spmd


@spmd(2)
def test_unshard_and_reshard_by_hand(rank):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    layer = model.layers[0]
    handle = layer.unshard(async_op=True)  # before any forward
    handle.wait()
    assert not is_sharded(layer.parameters())
    for p, q in zip(layer.parameters(), reference.layers[0].parameters()):
        assert torch.equal(p, q)
    layer.reshard()
    assert is_sharded(layer.parameters())
    assert layer.unshard() is None
    _, seen = count(lambda: model(tokens(rank, 0)))
    assert seen == {"gather": 2}  # the first layer is there already
    assert_steps_agree(model, reference, rank)


@spmd(1)
def test_unshard_of_a_module_without_parameters(rank):
    model = fully_shard(nn.Sequential(fully_shard(FeedForward())))
    handle = model.unshard(async_op=True)
    handle.wait()
    assert isinstance(handle, fsdp.UnshardHandle)


@spmd(2)
def test_modification_of_sharded_parameters_between_forward_and_backward(rank):
    """A manual reshard after forward: the backward gathers again."""
    model, reference = build(Transformer, rank.device)
    shard_blocks(model, reshard_after_forward=False)
    loss = model(tokens(rank, 0))
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()
    assert is_sharded(model.parameters())
    _, seen = count(loss.backward)
    assert seen == {"gather": 3, "reduce_scatter": 3}
    reference(tokens(rank, 0)).backward()
    average_gradients(reference)
    assert_same(model, reference, grads=True)


@pytest.mark.parametrize("wrong", [False, True])
@spmd(2)
def test_explicit_prefetch_even_if_wrong(rank, wrong):
    model, reference = build(lambda: Transformer(layers=3), rank.device)
    shard_blocks(model, reshard_after_forward=True)
    first, second, third = model.layers
    if wrong:  # prefetches what is not needed next, or was done already
        first.set_modules_to_forward_prefetch([third])
        third.set_modules_to_forward_prefetch([first])
        third.set_modules_to_backward_prefetch([first])
        first.set_modules_to_backward_prefetch([third])
    else:
        first.set_modules_to_forward_prefetch([second, third])
        third.set_modules_to_backward_prefetch([second, first])
    assert_steps_agree(model, reference, rank, steps=3)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("set_reduce_scatter_max_input_buffers", (2,)),
        ("set_reduce_scatter_max_input_buffers", (1,)),
        ("set_separate_reduce_scatter_group", (True,)),
        ("set_force_sum_reduction_for_comms", (True,)),
        ("set_unshard_in_backward", (True,)),
        ("set_post_optim_event", None),
        ("set_allocate_memory_from_process_group_for_comm", (False,)),
    ],
)
@spmd(2)
def test_setters_that_change_no_number(rank, method, arguments):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    if arguments is None:
        arguments = (torch.get_device_module(rank.device).current_stream().record_event(),)
    if not hasattr(model, method):
        pytest.skip(f"this torch has no {method}")
    getattr(model, method)(*arguments)
    assert_steps_agree(model, reference, rank)


@pytest.mark.parametrize("factor", [1.0, 6.0])
@spmd(2)
def test_gradient_divide_factor_of_one_module(rank, factor):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    for module in model.modules():  # gloo has no PREMUL_SUM: sum, then divide
        if isinstance(module, fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    layer = model.layers[1]
    (getattr(layer, "set_gradient_divide_factor", None) or layer.set_reduce_scatter_divide_factor)(factor)
    backward_both(model, reference, tokens(rank, 0))
    for parameter in reference.layers[1].parameters():
        parameter.grad.mul_(rank.world_size / factor)
    assert_same(model, reference, tolerance=1e-6, grads=True)


@spmd(2)
def test_all_reduce_hook_makes_hsdp_by_hand(rank):
    """The hook receives the reduced shard before it becomes the gradient."""
    model, reference = build(FeedForward, rank.device)
    fully_shard(model, mesh=rank.mesh(2, 1, names=("r", "s"))["s"])
    model.set_all_reduce_hook(lambda grads: dist.all_reduce(grads))
    model(rows(rank, 0)).square().sum().backward()
    reference(rows(rank, 0)).square().sum().backward()
    for parameter in reference.parameters():
        dist.all_reduce(parameter.grad)
    assert_same(model, reference, grads=True)


@spmd(2)
def test_skipping_the_gather_in_backward(rank):
    """An embedding does not need its weight in backward."""

    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(9, DIM), nn.Linear(DIM, 3)

        def forward(self, index):
            return self.out(self.embed(index))

    model, reference = build(Lookup, rank.device)
    fully_shard(model.embed, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    model.embed.set_unshard_in_backward(False)
    index = torch.arange(4, device=rank.device)
    loss = model(index).sum()
    _, seen = count(loss.backward)
    assert seen == {"gather": 1, "reduce_scatter": 2}
    reference(index).sum().backward()
    average_gradients(reference)
    assert_same(model, reference, grads=True)


@spmd(2)
def test_custom_forward_method(rank):
    class TwoWays(FeedForward):
        def encode(self, x):
            return self.up(x)

    model, reference = build(TwoWays, rank.device)
    fully_shard(model)
    fsdp.register_fsdp_forward_method(model, "encode")
    for module in (model, reference):
        module.encode(rows(rank, 0)).square().sum().backward()
    average_gradients(reference)
    assert_same(model, reference, grads=True)
    assert is_sharded(model.parameters())


@spmd(2)
def test_roots_that_share_streams(rank):
    stages = [build(FeedForward, rank.device, seed=i) for i in range(2)]
    for model, _ in stages:
        fully_shard(model)
    fsdp.share_comm_ctx([model for model, _ in stages])
    for side in (0, 1):
        x = rows(rank, 0)
        for stage in stages:
            x = stage[side](x)
        x.square().sum().backward()
    for model, reference in stages:
        average_gradients(reference)
        assert_same(model, reference, grads=True)


@spmd(2)
def test_replaced_communication_objects(rank):
    """``set_custom_all_gather`` and ``set_custom_reduce_scatter`` take torch's interfaces."""
    api = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_api")
    if not hasattr(api, "AllGather"):
        pytest.skip("this torch has no AllGather interface")
    calls = []

    class Gather(api.AllGather):
        def allocate(self, size, *, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            calls.append("gather")
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    class Scatter(api.ReduceScatter):
        def allocate(self, size, *, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            calls.append("scatter")
            return dist.reduce_scatter_tensor(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )

    model, reference = build(FeedForward, rank.device)
    fully_shard(model)
    model.set_custom_all_gather(Gather())
    model.set_custom_reduce_scatter(Scatter())
    for module in (model, reference):
        module(rows(rank, 0)).square().sum().backward()
    average_gradients(reference)
    assert_same(model, reference, grads=True)
    assert {"gather", "scatter"} <= set(calls)
    with pytest.raises(AssertionError):
        model.set_allocate_memory_from_process_group_for_comm(True)


@pytest.mark.skipif(not RAGGED, reason="stock has one way to reduce")
@spmd(2)
def test_a_custom_reduce_scatter_is_refused_where_none_would_be_called(rank):
    model = fully_shard(FeedForward(), reduction="all_to_all")
    with pytest.raises(ValueError, match=r"set_custom_reduce_scatter: the gradients of .* are exchanged"):
        model.set_custom_reduce_scatter(lambda **_: None)
    model.set_custom_reduce_scatter(None)
    model(rows(rank, 0)).square().sum().backward()  # nothing was changed


@spmd(2)
def test_every_public_method_of_torch_exists(rank):
    from torch.distributed.fsdp import FSDPModule as Stock

    names = {name for name in vars(Stock) if not name.startswith("_")}
    assert names <= set(dir(fsdp.FSDPModule))
    if RAGGED:
        assert issubclass(fsdp.FSDPModule, Stock)
        assert names <= set(vars(fsdp.FSDPModule)), "inherited from stock, so it would reach for its state"


@ragged_only
@spmd(2)
def test_an_explicit_prefetch_that_nobody_used_is_dropped(rank):
    """Else the next forward would compute with the weights of the last one."""
    model, _ = build(lambda: nn.Sequential(FeedForward(), FeedForward()), rank.device)
    first, second = (fully_shard(layer) for layer in model)
    fully_shard(model)
    x = rows(rank, 0)
    model(x)
    first.set_modules_to_forward_prefetch([second])
    with torch.no_grad():
        first(x)
        assert is_sharded(second.parameters())
        for parameter in second.parameters():
            parameter.zero_()
        assert not model(x).any()


@ragged_only
@spmd(2)
def test_a_prefetch_of_what_another_root_owns(rank):
    models = [build(lambda: Transformer(layers=1), rank.device) for _ in range(2)]
    (first, reference), (second, _) = models
    for model, _ in models:
        shard_blocks(model)
    first.layers[0].set_modules_to_forward_prefetch([second.layers[0]])
    with pytest.raises(RuntimeError, match="cannot be gathered before its root has run a forward"):
        first(tokens(rank, 0))
    second(tokens(rank, 0))
    assert_steps_agree(first, reference, rank)
