"""What verl, prime-rl, torchtune and others do with FSDP2's modules and tensors, in a few lines each.

``docs/fsdp2-users.md`` names who does what. All but the last hold for stock FSDP2 too (``FSDP_IMPL``).
FSDP2's own suite and the other tests of ``fully_shard`` have what is not here.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from fsdp_cases import (
    OPTIMIZERS,
    FeedForward,
    Stack,
    Transformer,
    assert_same,
    assert_steps_agree,
    average_gradients,
    backward_both,
    build,
    fully_shard,
    ragged_only,
    rows,
    shard_blocks,
    tokens,
)
from rank_pool import spmd


class _Scaled(Transformer):
    """Has a buffer that no state dict has, like the frequencies of rotary embeddings."""

    def __init__(self, tied=False):
        super().__init__(tied=tied)
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, batch):
        return super().forward(batch) * self.scale.sum()


class _Tiles(torch.autograd.Function):
    """An MLP tile by tile: its backward runs a backward per tile, and adds their gradients up itself."""

    @staticmethod
    def forward(ctx, x, layer, run):
        ctx.layer, ctx.run = layer, run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([run(tile) for tile in x.chunk(2)])

    @staticmethod
    def backward(ctx, grad):
        parameters = list(ctx.layer.parameters())
        sums = {p: torch.zeros_like(p) if p.grad is None else p.grad for p in parameters}
        for parameter in parameters:
            parameter.grad = None
        (x,), inputs = ctx.saved_tensors, []
        for number, (tile, part) in enumerate(zip(x.chunk(2), grad.chunk(2))):
            hooks = [p.register_hook(_adds_up(p, sums, is_last=number == 1)) for p in parameters]
            inputs.append(tile.detach().requires_grad_())
            with torch.enable_grad():
                output = ctx.run(inputs[-1])
            torch.autograd.backward(output, part)
            for hook in hooks:
                hook.remove()
        return torch.cat([tile.grad for tile in inputs]), None, None


def _adds_up(parameter, sums, *, is_last):
    def hook(grad):
        sums[parameter] = sums[parameter] + grad
        if not is_last:
            return None
        parameter.grad = None  # else the tiles before count twice
        return sums[parameter]

    return hook


class _InTiles(FeedForward):
    def forward(self, x):
        return _Tiles.apply(x, self, lambda tile: self.down(F.silu(self.up(tile))))


@pytest.mark.parametrize("buffers", [1, 2])
@spmd(2)
def test_an_mlp_in_tiles_while_gradients_accumulate(rank, buffers):
    """Gradients of the size that moves into the buffer as soon as it is there."""
    model, reference = build(lambda: Stack(dim=520, hidden=520), rank.device)
    for layer in model.layers:
        layer.__class__ = _InTiles
    shard_blocks(model)
    model.set_reduce_scatter_max_input_buffers(buffers)
    for microbatch in range(3):
        model.set_requires_gradient_sync(microbatch == 2)
        for module in (model, reference):
            module(rows(rank, microbatch, 520, 4).requires_grad_()).sum().backward()
    average_gradients(reference)
    assert_same(model, reference, tolerance=1e-5, grads=True)


@pytest.mark.parametrize("kind", ["plain", "tied", "offloaded"])
@spmd(3)
def test_a_policy_between_rollouts(rank, kind):
    """Weights from rank 0 alone; then steps, between which model and optimizer go to the host and back."""
    model, reference = _from_rank_0(rank, kind)
    optimizers = [OPTIMIZERS["adamw"](module.parameters()) for module in (model, reference)]
    for step in range(3):
        backward_both(model, reference, tokens(rank, step))
        assert_same(model, reference, tolerance=1e-5, grads=True)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():  # the root stays gathered
            torch.testing.assert_close(model.eval()(tokens(rank, 9)), reference(tokens(rank, 9)))
        model.train()
        if kind != "offloaded":
            _move(model, optimizers[0], "cpu")
        for name, parameter in model.state_dict().items():
            assert isinstance(parameter, DTensor)
            whole = parameter.to(rank.device, non_blocking=True).full_tensor()
            torch.testing.assert_close(whole, reference.state_dict()[name], rtol=1e-4, atol=1e-6)
        if kind != "offloaded":
            _move(model, optimizers[0], rank.device)


def _from_rank_0(rank, kind):
    """A sharded model with the weights, and buffers, of rank 0; the others have it on the meta device."""
    torch.manual_seed(0)
    reference = _Scaled(kind == "tied")
    with torch.device("meta") if rank.rank else torch.device("cpu"):
        model = _Scaled(kind == "tied")
    model = model if rank.rank else copy.deepcopy(reference)
    weights = {} if rank.rank else {name: value.clone() for name, value in model.state_dict().items()}
    offload = CPUOffloadPolicy(pin_memory=False) if kind == "offloaded" else None
    policy = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=True)
    shard_blocks(model, mp_policy=policy, offload_policy=offload, reshard_after_forward=True)
    model = model.to_empty(device=rank.device) if rank.rank else model.to(rank.device, non_blocking=True)
    if kind == "tied":
        model.head.weight = model.embed.weight
    options = StateDictOptions(full_state_dict=True, cpu_offload=bool(offload), broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    if offload:
        model.to("cpu", non_blocking=True)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(rank.device)
    return model, reference.to(rank.device)


def _move(model, optimizer, device):
    model.to(device, non_blocking=True)
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.to(device, non_blocking=True)


@spmd(3)
def test_weights_by_hand(rank):
    """Each way of writing and reading them that the projects have, one after the other."""
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    kept = {name: parameter.data.clone().cpu() for name, parameter in model.named_parameters()}
    pieces = {name: p._local_tensor.detach().cpu().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for (name, parameter), whole in zip(model.named_parameters(), reference.parameters()):
            parameter.data.mul_(3.0)
            parameter.data.copy_(kept[name].to(parameter.device))
            parameter._local_tensor.mul_(3.0)
            parameter._local_tensor.copy_(pieces[name])
            replicated = DTensor.from_local(2 * whole, parameter.device_mesh, [Replicate()], run_check=False)
            doubled = replicated.redistribute(placements=parameter.data.placements)
            parameter.data.to_local().copy_(doubled.to_local())
            whole.mul_(2)
            gathered = parameter.redistribute(placements=[Replicate()], async_op=True).to_local()
            assert torch.equal(gathered, whole)
            other = copy.copy(parameter.data.detach())
            other._local_tensor = torch.zeros_like(parameter._local_tensor)
            assert not other.full_tensor().any() and torch.equal(parameter.full_tensor(), whole)
        shadow, plain = build(Transformer, rank.device, seed=1)
        torch._foreach_lerp_(list(shard_blocks(shadow).parameters()), list(model.parameters()), 0.3)
        torch._foreach_lerp_(list(plain.parameters()), list(reference.parameters()), 0.3)
    assert_same(shadow, plain, tolerance=1e-6)
    assert_steps_agree(model, reference, rank)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    for parameter, whole in zip(model.parameters(), reference.parameters()):
        assert not isinstance(parameter, DTensor) and torch.equal(parameter, whole)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    with torch.device("meta"):
        late = shard_blocks(Transformer())
    placed = {
        name: nn.Parameter(distribute_tensor(whole, late.get_parameter(name).device_mesh, meta.placements))
        for (name, meta), whole in zip(late.state_dict().items(), reference.parameters())
    }
    late.load_state_dict(placed, strict=True, assign=True)
    with FullyShardedDataParallel.summon_full_params(late, writeback=True):  # FSDP1's does nothing
        assert all(isinstance(parameter, DTensor) for parameter in late.parameters())
    assert_steps_agree(late, reference, rank)


@spmd(4)
def test_several_models_in_a_process(rank):
    """A policy with replicas, its reference on the host, a critic, and a mesh for sequences."""
    mesh = rank.mesh(2, 2, names=("ddp", "fsdp"))
    policy, plain = build(Transformer, rank.device)
    shard_blocks(policy, mesh=mesh, offload_policy=None, reshard_after_forward=True)
    fixed, plain_fixed = build(lambda: Transformer().requires_grad_(False), rank.device, seed=1)
    shard_blocks(fixed, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)).eval()
    critic, plain_critic = build(Stack, rank.device)
    shard_blocks(critic, mesh=rank.mesh())
    sequence = rank.mesh(2, 2, names=("dp", "sp"))
    for step in range(2):
        for model, other in ((fixed, plain_fixed), (policy, plain)):
            with torch.no_grad():
                torch.testing.assert_close(model(tokens(rank, step)), other(tokens(rank, step)))
            model.reshard()
        dist.all_reduce(torch.ones(1, device=rank.device), group=sequence.get_group("sp"))
        backward_both(critic, plain_critic, rows(rank, step))
        backward_both(policy, plain, tokens(rank, step))
        assert_same(critic, plain_critic, tolerance=1e-6, grads=True)
        assert_same(policy, plain, tolerance=1e-6, grads=True)


@spmd(2)
def test_prefetch_by_hand_of_a_list(rank):
    """Norm and head are one group; each module names those before and after it, the last two at once."""
    model, reference = build(Transformer, rank.device)
    first, second = model.layers
    for module in (model.embed, first, second):
        fully_shard(module)
    fully_shard([model.norm, model.head], reshard_after_forward=False)
    fully_shard(model)
    model.embed.set_modules_to_forward_prefetch([first])
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_forward_prefetch([model.norm, model.head])
    model.head.set_modules_to_backward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    first.set_modules_to_backward_prefetch([model.embed])
    assert_steps_agree(model, reference, rank)


@spmd(1)
def test_the_precision_of_a_sharded_head_can_be_read(rank):
    head = fully_shard(nn.Linear(3, 2).to(rank.device), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    assert fully_shard.state(head)._mp_policy.param_dtype is torch.bfloat16


@ragged_only
@spmd(1)
def test_private_state_of_fsdp2_names_what_to_call(rank):
    state = fully_shard.state(fully_shard(nn.Linear(3, 2).to(rank.device)))
    for name, instead in {
        "_fsdp_param_group": "set_reshard_after_backward",
        "_state_ctx": "finalize_backward",
        "_training_state": "reset_iter_state",
        "_anything_else": "the methods of FSDPModule",
    }.items():
        with pytest.raises(AttributeError, match=f"{name}: the state of a module .*{instead}"):
            getattr(state, name)
    assert not hasattr(state, "_fsdp_param_group")
