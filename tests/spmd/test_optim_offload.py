"""Optimizer state on the host: the bits of the optimizer without it, also after loading and late starts."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from optim_cases import SHAPES, full, gradients, plain_parameters, ragged_parameters, set_grads
from ragged_fsdp import fully_shard
from ragged_fsdp.optim import (
    AdamW8bit,
    FusedAdamW,
    FusedSGD,
    Muon,
    Shampoo,
    block_policy,
    offload_state,
)
from ragged_fsdp.optim.offload.part import StatePart
from rank_pool import DEVICE, spmd

PART_NUMEL = 3000
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "torch_foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True, amsgrad=True),
    "torch_sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "fused": lambda p: FusedAdamW(p, lr=1e-2),
    "fused_sgd": lambda p: FusedSGD(p, lr=1e-2, momentum=0.9),
    "8bit": lambda p: AdamW8bit(p, lr=1e-2, min_8bit_numel=512, stochastic_rounding=True),
    "shampoo": lambda p: Shampoo(
        p, lr=1e-2, block_shape=(32, 32), start_step=1, root_interval=2, min_numel=512
    ),
    "muon": lambda p: Muon(p, lr=1e-2, ns_dtype=torch.float32),
}


class Net(nn.Module):
    """Layers of two groups, one frozen matrix, and a head that the first steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
        self.second = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
        self.late = nn.Linear(64, 64)
        self.second[0].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, late: bool) -> torch.Tensor:
        x = self.second(self.first(x))
        return (self.late(x) if late else x).square().mean()


def sharded(rank, mesh) -> Net:
    torch.manual_seed(0)
    model, blocks = Net().to(rank.device), block_policy(min_numel=512)
    for module in (model.first, model.second, model.late, model):
        fully_shard(module, mesh=mesh, orig_param_policy=blocks)
    return model


def trained(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def assert_equal(ours, theirs) -> None:
    """Weights and state of two optimizers, to the bit, with keys in the same order, ours on the host."""
    for group, other in zip(ours.param_groups, theirs.param_groups):
        for left, right in zip(group["params"], other["params"]):
            assert torch.equal(full(left), full(right))
            assert list(ours.state.get(left, {})) == list(theirs.state.get(right, {}))
            for key, value in theirs.state.get(right, {}).items():
                held = ours.state[left][key]
                local = held.to_local() if hasattr(held, "to_local") else held
                assert local.device.type == "cpu" or not local.ndim, key
                wanted = value.to_local() if hasattr(value, "to_local") else value
                assert local.dtype == wanted.dtype
                assert torch.equal(local, wanted.to(local.device)), key


def train(model: Net, optimizer, steps: range, rank: int) -> None:
    for step in steps:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank)).to(DEVICE)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        model(x, late=step >= 2).backward()
        optimizer.step()
        optimizer.zero_grad()


@spmd(1, 2, 4)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_bits_of_the_optimizer_without_it(rank, kind):
    """Groups, replicas on 4 ranks, a frozen matrix, a late module, another load in between: equal bits.

    The memory between the host and an update is poisoned, so nothing is left there from step to step.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAGGED_FSDP_DEBUG", "1")
        check_bits(rank, kind, patch)


def check_bits(rank, kind: str, patch: pytest.MonkeyPatch) -> None:
    mesh = rank.mesh(2, 2, names=("replicate", "shard")) if rank.world_size == 4 else rank.mesh()
    models = [sharded(rank, mesh) for _ in range(2)]
    plain, ours = (OPTIMIZERS[kind](trained(model)) for model in models)
    assert offload_state(ours, part_numel=PART_NUMEL) is ours
    for part in (range(4), range(4, 6)):
        for model, optimizer in zip(models, (plain, ours)):
            train(model, optimizer, part, rank.rank)
        assert_equal(ours, plain)
        crossed = [copy.deepcopy(optimizer.state_dict()) for optimizer in (ours, plain)]
        for optimizer, state in zip((plain, ours), crossed):
            optimizer.load_state_dict(state)
        assert_equal(ours, plain)
    assert len(ours._offload.parts) == 1 if kind == "muon" else len(ours._offload.parts) > 2
    train(models[1], ours, range(6, 9), rank.rank)  # loaded state finds its places
    laid_out: list[StatePart] = []
    patch.setattr(StatePart, "lay_out", laid_out.append)
    train(models[1], ours, range(9, 10), rank.rank)
    assert not laid_out, "a steady step lays nothing out anew"


@spmd(4)
@pytest.mark.parametrize("kind", ["fused", "8bit", "torch_fused"])
def test_checkpoints_with_and_without_it_at_other_world_sizes(rank, kind):
    """Saved by four ranks with offload; continued by three and by two, with it and without, alike."""
    params = ragged_parameters(rank.mesh(), plain_parameters(rank.device))
    optimizer = offload_state(OPTIMIZERS[kind](params.items()), part_numel=PART_NUMEL)
    for step in range(2):
        set_grads(params, gradients(step, rank.device))
        optimizer.step()
    path = rank.shared_dir / "checkpoint"
    dcp.save({"model": dict(params), "optim": optimizer.state_dict()}, checkpoint_id=path)
    set_grads(params, gradients(5, rank.device))
    optimizer.step()
    wanted = [full(param) for param in params.values()]
    for count in (3, 2):
        mesh = DeviceMesh(rank.device, list(range(count)))  # made by all ranks, held by some
        for offloaded in (True, False) if rank.rank < count else ():
            resumed = ragged_parameters(mesh, plain_parameters(rank.device))
            other = OPTIMIZERS[kind](resumed.items())
            other = offload_state(other, part_numel=PART_NUMEL) if offloaded else other
            set_grads(resumed, gradients(9, rank.device))
            other.step()
            state = {"model": dict(resumed), "optim": other.state_dict()}
            dcp.load(state, checkpoint_id=path, process_group=mesh.get_group())
            other.load_state_dict(state["optim"])
            set_grads(resumed, gradients(5, rank.device))
            other.step()
            for name, value in zip(SHAPES, wanted):
                assert torch.equal(full(resumed[name]), value), (count, offloaded, name)
        dist.barrier()


@spmd(2)
def test_full_state_dicts(rank):
    """``get_optimizer_state_dict`` and back, whole and from rank 0: the next step has the same bits."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    models = [sharded(rank, rank.mesh()) for _ in range(2)]
    first, second = (offload_state(FusedAdamW(trained(m), lr=1e-2), part_numel=PART_NUMEL) for m in models)
    train(models[0], first, range(2, 4), rank.rank)
    models[1].load_state_dict(models[0].state_dict())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = copy.deepcopy(get_optimizer_state_dict(models[0], first, options=options))
    options.broadcast_from_rank0 = True
    set_optimizer_state_dict(models[1], second, state if rank.rank == 0 else {}, options=options)
    for model, optimizer in zip(models, (first, second)):
        train(model, optimizer, range(4, 6), rank.rank)
    assert_equal(first, second)


@spmd(4)
def test_parameters_over_several_meshes(rank):
    """Tensor parallelism beside ragged shards, experts on a mesh of their own, and a plain tensor."""
    grid = rank.mesh(2, 2, names=("shard", "tp"))
    whole = {"split": (64, 48), "expert": (32, 48), "ragged": (128, 96), "plain": (96,)}

    def made() -> dict[str, nn.Parameter]:
        plain = plain_parameters(rank.device, whole)
        ragged = ragged_parameters(rank.mesh(), {"wide": plain["ragged"]})["wide"]
        split = distribute_tensor(plain["split"].detach(), grid, [Shard(0), Shard(1)])
        expert = distribute_tensor(plain["expert"].detach(), grid["tp"], [Shard(0)])
        return {
            "split": nn.Parameter(split),
            "expert": nn.Parameter(expert),
            "ragged": ragged,
            "plain": plain["plain"],
        }

    for kind in ("fused", "torch_sgd"):
        sides = [made(), made()]
        optimizers = [OPTIMIZERS[kind]([{"params": [item]} for item in side.items()]) for side in sides]
        offload_state(optimizers[0], part_numel=PART_NUMEL)
        for step in range(3):
            for side, optimizer in zip(sides, optimizers):
                set_grads(side, gradients(step, rank.device, whole))
                optimizer.step()
        assert_equal(*optimizers)


def test_what_a_user_does_to_an_optimizer():
    """Closures, schedulers, a grad scaler, hooks, groups that are added, state that is cleared, copies."""
    sides = [plain_parameters("cpu"), plain_parameters("cpu")]
    optimizers = [torch.optim.AdamW(list(side.values())[:4], lr=1e-2, fused=True) for side in sides]
    offload_state(optimizers[1], part_numel=PART_NUMEL)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in sides]
    calls = [[], []]
    for optimizer, seen in zip(optimizers, calls):
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs, seen=seen: seen.append(optimizer))

    def each(step: int) -> None:
        for index, (side, optimizer) in enumerate(zip(sides, optimizers)):
            grads = gradients(step, "cpu")
            set_grads(side, {name: grad * 8 for name, grad in grads.items()})
            if step == 1:  # nothing is changed by a step whose gradients are not finite
                side["wide"].grad[0, 0] = torch.inf
            scalers[index].scale(torch.ones(()))
            scalers[index].step(optimizer)
            scalers[index].update(8.0)
            side["wide"].grad[0, 0] = 0.5
            schedulers[index].step()
            assert optimizer.step(lambda: 5.0) == 5.0

    each(0)
    each(1)
    for side, optimizer in zip(sides, optimizers):
        optimizer.add_param_group({"params": list(side.values())[4:], "lr": 1e-3})
    each(2)
    for side, optimizer in zip(sides, optimizers):
        optimizer.state[side["wide"]].clear()
    each(3)
    assert_equal(optimizers[1], optimizers[0])
    assert [len(seen) for seen in calls] == [8, 8]
    assert all(optimizer is optimizers[1] for optimizer in calls[1])
    assert isinstance(optimizers[1], torch.optim.AdamW)
    twin = copy.deepcopy(optimizers[1])
    for group, other in zip(twin.param_groups, optimizers[1].param_groups):
        for left, right in zip(group["params"], other["params"]):
            left.grad = right.grad.clone()
    twin.step()
    optimizers[1].step()
    for group, other in zip(twin.param_groups, optimizers[1].param_groups):
        assert all(map(torch.equal, group["params"], other["params"]))


@pytest.mark.parametrize("kind", ["torch_fused", "fused", "8bit", "muon"])
def test_hooks_on_loading_and_pickles(kind):
    """A hook may adapt what is loaded, as torch's for other orders of parameters do, or read it after."""
    params = plain_parameters("cpu")
    optimizer = offload_state(OPTIMIZERS[kind](params.items()), part_numel=PART_NUMEL)
    set_grads(params, gradients(0, "cpu"))
    optimizer.step()
    sevens, seen = copy.deepcopy(optimizer.state_dict()), []
    for entries in sevens["state"].values():
        entries["step"] = torch.tensor(7.0)
    optimizer.register_load_state_dict_pre_hook(lambda _, loaded: {**loaded, "state": sevens["state"]})
    optimizer.register_load_state_dict_post_hook(
        lambda loaded: seen.extend(float(entries["step"]) for entries in loaded.state.values())
    )
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [7.0] * len(params)
    twin = pickle.loads(pickle.dumps(optimizer))
    assert type(twin) is type(optimizer)
    groups = twin.param_groups
    theirs = {name: param for group in groups for name, param in zip(group["param_names"], group["params"])}
    for side, stepped in ((params, optimizer), (theirs, twin)):
        set_grads(side, gradients(1, "cpu"))
        stepped.step()
    assert_equal(twin, optimizer)


class Counted(torch.optim.SGD):
    """An optimizer of a user, with state that belongs to no parameter."""

    def step(self, closure=None):
        shared = self.state["shared"]
        shared["calls"] = shared.get("calls", 0) + 1
        return super().step(closure)


def test_groups_that_are_empty_at_first():
    optimizer = offload_state(Muon([{"params": []}], lr=1e-2, ns_dtype=torch.float32))
    optimizer.step()
    late = nn.Parameter(torch.ones(8, 8))
    optimizer.add_param_group({"params": [late], "algorithm": "muon"})
    late.grad = torch.ones(8, 8)
    optimizer.step()
    assert not torch.equal(late, torch.ones(8, 8)) and len(optimizer.state) == 1


def test_state_of_no_parameter_stays():
    params = plain_parameters("cpu")
    optimizer = Counted(params.values(), lr=1e-2, momentum=0.9)
    for step in range(4):
        set_grads(params, gradients(step, "cpu"))
        optimizer.step()
        if step == 0:
            offload_state(optimizer)
        if step == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert optimizer.state["shared"]["calls"] == step + 1


@pytest.mark.parametrize("kind", ["fused", "torch_sgd", "muon"])
def test_a_step_does_not_wait_for_the_last_one(kind):
    """An optimizer may read its state in a step; only who reads it between steps waits."""
    params, waited = plain_parameters("cpu"), []
    arrival = SimpleNamespace(synchronize=lambda: waited.append(kind))
    optimizer = offload_state(OPTIMIZERS[kind](params.items()), part_numel=PART_NUMEL)
    for step in range(2):
        set_grads(params, gradients(step, "cpu"))
        optimizer.step()
        optimizer._offload._pending = [arrival]
    assert not waited
    assert optimizer.state and waited == [kind]


def test_slots_are_given_back_if_one_of_them_does_not_fit():
    params = plain_parameters("cpu")
    optimizer = offload_state(FusedAdamW(params.items(), lr=1e-2), part_numel=PART_NUMEL)
    for _ in range(2):
        set_grads(params, gradients(0, "cpu"))
        optimizer.step()
    slots = list(dict.fromkeys(part.slot for part in optimizer._offload.parts))
    before = copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots[-1].memory, "materialize", lambda: torch.empty(1 << 60))
        with pytest.raises(RuntimeError, match="memory"):
            optimizer.step()
    assert not [slot for slot in slots if slot.memory.untyped.nbytes()]
    for index, entries in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[index][key]) for key, value in entries.items())
    optimizer.step()


def test_no_state_is_kept_on_the_device():
    """What an optimizer makes for a part is free after the part's step, not when the collector comes."""
    params = plain_parameters("cpu")
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            made: list[weakref.ref] = []
            lay_out = StatePart.lay_out

            def noted(part: StatePart) -> None:
                made.extend(weakref.ref(value) for _, _, value in part._movable())
                chains = [chain for members in part.stepped._members for chain in members.chains]
                made.extend(weakref.ref(flat) for chain in chains for flat in chain.state.values())
                lay_out(part)

            optimizer = offload_state(FusedAdamW(params.items(), lr=1e-2), part_numel=PART_NUMEL)
            set_grads(params, gradients(0, "cpu"))
            optimizer._offloaded()
            patch.setattr(StatePart, "lay_out", noted)
            optimizer.step()
            assert len(made) > 2 * len(params)
            assert not [ref for ref in made if ref() is not None]
            for part in optimizer._offload.parts:
                assert part.slot.memory.untyped.nbytes() == 0
    finally:
        gc.enable()


def test_a_failed_load_changes_nothing():
    params = plain_parameters("cpu")
    optimizer = offload_state(FusedAdamW(params.items(), lr=1e-2), part_numel=PART_NUMEL)
    set_grads(params, gradients(0, "cpu"))
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    wrong["state"][5]["exp_avg"] = torch.zeros(3)
    wrong["param_groups"][0]["lr"] = 7.0
    with pytest.raises(RuntimeError, match=r"lopsided: state exp_avg must be a plain tensor of shape"):
        optimizer.load_state_dict(wrong)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            assert torch.equal(value, before["state"][index][key])
    optimizer.step()


def test_what_is_refused():
    params = [nn.Parameter(torch.zeros(4))]
    with pytest.raises(TypeError, match="expected an optimizer, got list"):
        offload_state(params)
    wrapper = torch.optim.Optimizer.__new__(torch.optim.Optimizer)
    with pytest.raises(TypeError, match="no state of its own; give the optimizer that it wraps"):
        offload_state(wrapper)
    with pytest.raises(ValueError, match="LBFGS"):
        offload_state(torch.optim.LBFGS(params))
    with pytest.raises(ValueError, match="differentiable=False"):
        offload_state(torch.optim.Adam(params, differentiable=True))
    with pytest.raises(ValueError, match="part_numel: expected at least 1, got 0"):
        offload_state(torch.optim.Adam(params), part_numel=0)
    optimizer = torch.optim.Adam(params)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.raises(ValueError, match="replaced the step"):
        offload_state(optimizer)
    with pytest.raises(ValueError, match="on the host already"):
        offload_state(offload_state(torch.optim.Adam(params)))


@pytest.mark.parametrize("kind", ["fused", "8bit", "torch_foreach", "muon"])
def test_an_optimizer_that_has_stepped(kind):
    """State that there is moves, and the optimizer keeps none of it."""
    sides = [plain_parameters("cpu"), plain_parameters("cpu")]
    optimizers = [OPTIMIZERS[kind](side.items()) for side in sides]
    for step in range(3):
        for side, optimizer in zip(sides, optimizers):
            set_grads(side, gradients(step, "cpu"))
            optimizer.step()
        if step == 0:
            before = [weakref.ref(v) for e in optimizers[1].state.values() for v in e.values() if v.ndim]
            offload_state(optimizers[1], part_numel=PART_NUMEL)
    assert before
    assert not [ref for ref in before if ref() is not None]
    assert_equal(optimizers[1], optimizers[0])
