"""Muon on sharded parameters equals Muon in one process, whatever the placement and the world size."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.debug import CommDebugMode

import muon_cases as cases
from ragged_fsdp.dtensor import RaggedShard
from ragged_fsdp.optim.muon import Muon
from ragged_fsdp.optim.muon.newton_schulz import orthogonalize, per_iteration
from ragged_fsdp.optim.muon.reference import reference_update
from rank_pool import spmd

OPTIONS = {
    "lr": 0.02,
    "weight_decay": 0.1,
    "adamw_lr": 0.01,
    "adjust_lr_fn": "spectral",
    "split": cases.split,
    "ns_dtype": torch.float32,
    "bucket_numel": 700,
}


def train(place, steps: int = 3, **options):
    """Parameters after some steps from the same values and gradients, and the optimizer."""
    named = {n: torch.nn.Parameter(place(v)) for n, v in cases.full_tensors(0).items()}
    optimizer = Muon(named.items(), **{**OPTIONS, **options})
    for step in range(steps):
        for name, gradient in cases.full_tensors(100 + step).items():
            named[name].grad = place(gradient)
        optimizer.step()
    return named, optimizer


def assert_equal(rank, named, expected, what: str, **tolerance) -> None:
    """Bit by bit on the CPU, where the order of arithmetic does not depend on the batch."""
    for name, parameter in named.items():
        found, wanted = cases.whole(parameter.detach()), cases.whole(expected[name].detach())
        if rank.device == "cpu" and not tolerance:
            assert torch.equal(found, wanted), f"{what}, {name}: {(found - wanted).abs().max()}"
        else:
            torch.testing.assert_close(found, wanted, **(tolerance or {"rtol": 1e-4, "atol": 1e-5}))


@spmd(1, 2, 3, 4)
def test_one_mesh_dim(rank):
    """Uneven and empty ragged shards, Shard(0) (empty for small parameters), Shard(-1), replicas."""
    mesh = rank.mesh()
    expected, _ = train(lambda t: t.to(rank.device))
    for in_flight, kind in (
        (3, "ragged"),
        (2, "ragged_rows"),
        (1, "shard0"),
        (3, "shard_last"),
        (2, "replicate"),
    ):
        named, optimizer = train(lambda t, kind=kind: cases.place(t, mesh, kind), buckets_in_flight=in_flight)
        assert_equal(rank, named, expected, kind)
        for name, parameter in named.items():
            for value in optimizer.state[parameter].values():
                assert value.ndim == 0 or value.placements == parameter.placements, name


@pytest.mark.parametrize("kind", ["hsdp_shard0", "hsdp_ragged", "ragged_tp", "ragged_ep", "strided_ep"])
@spmd(4)
def test_two_mesh_dims(rank, kind):
    """Replicas share the work; tensor-parallel matrices are put together; experts stay with their ranks."""
    mesh = rank.mesh(2, 2, names=("outer", "inner"))
    named, _ = train(lambda t: cases.place(t, mesh, kind))
    expected, _ = train(lambda t: t.to(rank.device))
    assert_equal(rank, named, expected, kind)


@spmd(2, 3)
def test_reference_of_the_algorithm(rank):
    """The packed exchange equals one redistribute per tensor, for any root."""
    mesh, momentum, lr, decay = rank.mesh(), 0.9, 0.1, 0.01
    coefficients = per_iteration((3.4445, -4.775, 2.0315), 5)
    shapes = {"layers.0.a": (12, 20), "layers.0.b": (20, 12), "layers.0.c": (9, 9)}

    def place(full, index):
        units = cases.uneven_units(full.numel(), mesh.size(), 1)
        return cases.distribute_tensor(
            full.to(rank.device), mesh, [RaggedShard((0, 1), units[index:] + units[:index])]
        )

    fast = {
        n: torch.nn.Parameter(place(v, i)) for i, (n, v) in enumerate(cases.full_tensors(0, shapes).items())
    }
    slow = {n: p.detach().clone() for n, p in fast.items()}
    buffers = {n: torch.zeros_like(p) for n, p in slow.items()}
    options = {"lr": lr, "momentum": momentum, "weight_decay": decay, "adjust_lr_fn": "none"}
    optimizer = Muon(fast.items(), ns_dtype=torch.float32, bucket_numel=300, **options)
    for step in range(2):
        for i, (name, full) in enumerate(cases.full_tensors(10 + step, shapes).items()):
            fast[name].grad = place(full, i)
            reference_update(
                slow[name],
                fast[name].grad,
                buffers[name],
                root=(i + step) % mesh.size(),
                orthogonalize=lambda x: orthogonalize(x, coefficients, 1e-7),
                momentum=momentum,
                nesterov=True,
                lr=lr,
                scale=1.0,
                weight_decay=decay,
                dtype=torch.float32,
            )
        optimizer.step()
    assert_equal(rank, fast, slow, "reference")


@spmd(3)
def test_bfloat16_iteration(rank):
    """In bf16 the update is that of one process up to the rounding of the iteration."""
    mesh = rank.mesh()
    named, _ = train(lambda t: cases.place(t, mesh, "ragged"), steps=1, ns_dtype=torch.bfloat16)
    expected, _ = train(lambda t: t.to(rank.device), steps=1, ns_dtype=torch.bfloat16)
    exact, _ = train(lambda t: t.to(rank.device), steps=1)
    start = cases.full_tensors(0)
    assert_equal(
        rank, named, expected, "bf16", **({} if rank.device == "cpu" else {"rtol": 0.0, "atol": 2e-3})
    )
    for name, parameter in named.items():
        change = (exact[name].detach() - start[name].to(rank.device)).norm()
        error = (cases.whole(parameter.detach()) - exact[name].detach()).norm()
        assert error < 0.05 * change, name


@spmd(2, 4)
def test_whole_experts_need_no_communication(rank):
    """Experts that lie whole on their ranks stay there; a bucket that moves costs two all-to-alls."""
    mesh = rank.mesh()
    experts = torch.nn.Parameter(cases.place(torch.randn(8, 6, 10), mesh, "shard0"))
    optimizer = Muon([("layers.0.experts", experts)], ns_dtype=torch.float32)
    experts.grad = cases.place(torch.randn(8, 6, 10), mesh, "shard0")
    optimizer.step()  # the plans are compared once, here
    with CommDebugMode() as communication:
        optimizer.step()
    assert communication.get_total_counts() == 0
    assert optimizer.describe().endswith(f"on ranks {', '.join(str(r) for r in range(rank.world_size))}")
    _, optimizer = train(lambda t: cases.place(t, mesh, "ragged"))
    (exchange,) = optimizer._latest
    moving = [program for program in exchange.programs if program.moves]
    assert moving and count_all_to_alls(optimizer) == 2 * len(moving)


def count_all_to_alls(optimizer: Muon) -> int:
    import torch.distributed as dist

    calls, original = [], dist.all_to_all_single

    def counting(*args, **kwargs):
        calls.append(kwargs["async_op"])
        return original(*args, **kwargs)

    dist.all_to_all_single = counting
    try:
        optimizer.step()
    finally:
        dist.all_to_all_single = original
    assert all(calls), "transfers must not block"
    return len(calls)


@spmd(3)
def test_missing_gradients(rank):
    """Frozen and unused parameters do not change; a gradient that one rank lacks does not hang the others."""
    mesh = rank.mesh()
    named = {n: torch.nn.Parameter(cases.place(v, mesh, "ragged")) for n, v in cases.full_tensors(0).items()}
    frozen, unused, partly = "layers.0.up.weight", "layers.0.qkv.weight", "layers.0.down.weight"
    named[frozen].requires_grad_(False)
    optimizer = Muon(named.items(), **OPTIONS)
    for name, gradient in cases.full_tensors(1).items():
        if name not in (frozen, unused) and (name != partly or rank.rank != 1):
            named[name].grad = cases.place(gradient, mesh, "ragged")
    optimizer.step()
    before = cases.full_tensors(0)
    for name, parameter in named.items():
        same = torch.equal(cases.whole(parameter.detach()).cpu(), before[name])
        assert same == (name in (frozen, unused)), name
    assert unused not in [n for n, p in named.items() if p in optimizer.state]
    named[unused].grad = cases.place(cases.full_tensors(2)[unused], mesh, "ragged")
    optimizer.step()
    assert not torch.equal(cases.whole(named[unused].detach()).cpu(), before[unused])


@spmd(2)
def test_local_gradients_may_differ_between_ranks(rank):
    """Beside sharded parameters, a plain one has a gradient on one rank only: no plan is made anew."""
    mesh = rank.mesh()
    name = "layers.0.up.weight"
    sharded = torch.nn.Parameter(cases.place(cases.full_tensors(0)[name], mesh, "ragged"))
    own = torch.nn.Parameter(torch.ones(4, 6, device=rank.device))
    optimizer = Muon([(name, sharded), ("layers.0.own.weight", own)], **OPTIONS)
    for step in range(3):
        sharded.grad = cases.place(cases.full_tensors(1 + step)[name], mesh, "ragged")
        own.grad = torch.ones_like(own) if (rank.rank + step) % 2 else None
        before, sharded_before = own.detach().clone(), cases.whole(sharded.detach())
        with CommDebugMode() as communication:
            optimizer.step()
        assert not step or communication.get_total_counts() == 2, "two all-to-alls and nothing else"
        assert torch.equal(own, before) == (own.grad is None)
        assert not torch.equal(cases.whole(sharded.detach()), sharded_before)


@spmd(2)
def test_disagreement_raises_everywhere(rank):
    """Another order of parameters on one rank is an error on all of them, before any transfer."""
    mesh = rank.mesh()
    names = ["layers.0.up.weight", "layers.0.down.weight"]
    full = cases.full_tensors(0)
    named = {n: torch.nn.Parameter(cases.place(full[n], mesh, "shard0")) for n in names[:: 1 - 2 * rank.rank]}
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(RuntimeError, match="different Muon plans"):
        Muon(named.items()).step()
    for option in ({"ns_dtype": torch.float32}, {"buckets_in_flight": 1}, {"bucket_numel": 10}):
        with pytest.raises(RuntimeError, match="different Muon plans"):
            Muon([(names[0], named[names[0]])], **(option if rank.rank else {})).step()
    parameter = named[names[0]]
    optimizer = Muon([(names[0], parameter)])
    parameter.grad = cases.place(full[names[0]], mesh, "replicate")
    with pytest.raises(RuntimeError, match="differ from the parameter's"):
        optimizer.step()
    assert torch.equal(cases.whole(parameter.detach()).cpu(), full[names[0]]) and not optimizer.state
    partial = DTensor.from_local(torch.ones(4, 6, device=rank.device), mesh, [Partial()], run_check=False)
    optimizer = Muon([("layers.0.partial", torch.nn.Parameter(partial))])
    with pytest.raises(ValueError, match=r"layers\.0\.partial: placement Partial.* has no whole elements"):
        optimizer.step()


def wrong_grad(optimizer: Muon, named, mesh) -> None:
    parameter = named["layers.0.down.weight"]
    parameter.grad = DTensor.from_local(
        torch.ones_like(cases.local(parameter)), mesh, [Replicate()], run_check=False
    )


def wrong_state(optimizer: Muon, named, mesh) -> None:
    optimizer.state[named["layers.0.norm.weight"]]["step"] = torch.zeros(())


def wrong_option(optimizer: Muon, named, mesh) -> None:
    optimizer.param_groups[0]["adjust_lr_fn"] = "unknown"


def wrong_number(optimizer: Muon, named, mesh) -> None:
    optimizer.param_groups[1]["lr"] = "fast"


def wrong_plain(optimizer: Muon, named, mesh) -> None:
    parameter = named["layers.0.own.weight"]
    parameter.grad = DTensor.from_local(parameter.grad, mesh, [Replicate()], run_check=False)


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (wrong_grad, RuntimeError, "layers.0.down.weight: the gradient's placements"),
        (wrong_state, RuntimeError, "layers.0.norm.weight: state ['exp_avg', 'exp_avg_sq'] is missing"),
        (wrong_option, ValueError, "adjust_lr_fn must be one of"),
        (wrong_number, ValueError, "lr must be a number, got 'fast'"),
        (wrong_plain, RuntimeError, "layers.0.own.weight: the gradient's placements"),
    ],
)
@spmd(2, 3)
def test_what_one_rank_cannot_prepare_is_told_to_all(rank, spoil, error, text):
    """In the first step, before anything changes; the others do not wait, and a mended step is the first."""
    mesh = rank.mesh()
    full = {f"layers.0.{kind}.weight": torch.ones(6, 4) for kind in ("up", "down", "own")}
    full["layers.0.norm.weight"] = torch.ones(6)
    named = {}
    for name, value in full.items():
        placed = value.to(rank.device) if "own" in name else cases.place(value, mesh, "ragged")
        named[name] = torch.nn.Parameter(placed)
        named[name].grad = torch.ones_like(named[name])
    optimizer = Muon(named.items(), **OPTIONS)
    last = rank.world_size - 1
    if rank.rank == last:
        spoil(optimizer, named, mesh)
    before = {n: cases.local(p.detach()).clone() for n, p in named.items()}
    entries = {p: dict(state) for p, state in optimizer.state.items()}
    with pytest.raises(error if rank.rank == last else ValueError) as caught:
        optimizer.step()
    told = f"Muon cannot plan its exchange; by rank: {{{last}: " in str(caught.value)
    assert told == (rank.rank != last) and text in str(caught.value).replace("\\'", "'")
    assert all(torch.equal(cases.local(p.detach()), before[n]) for n, p in named.items())
    assert {p: dict(state) for p, state in optimizer.state.items()} == entries
    assert not optimizer.describe().count("on ranks")
