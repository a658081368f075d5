"""Sharded training over NCCL: equal to DDP and to stock FSDP2, flat in memory, free of stream races.

Run with ``RAGGED_FSDP_TEST_DEVICE=cuda``; several ranks may share one device.
"""

import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.nn.parallel import DistributedDataParallel

import fsdp_inside
from collective_calls import FUNCTIONS
from fsdp_cases import (
    Stack,
    Transformer,
    assert_same,
    build,
    fsdp,
    full,
    fully_shard,
    relative_error,
    rows,
    shard_blocks,
    tokens,
    train,
)
from ragged_fsdp import BlockCodes
from rank_pool import DEVICE, spmd

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs RAGGED_FSDP_TEST_DEVICE=cuda")

STEPS, WIDTH = 5, 1024
SLEEP_CYCLES = 20_000_000  # about 10 ms: long enough to expose a missing wait


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@spmd(2, 4)
def test_losses_and_parameters_equal_ddp(rank, moe):
    model, reference = build(lambda: Transformer(moe=moe), rank.device)
    shard_blocks(model)
    ddp = DistributedDataParallel(reference, device_ids=[torch.cuda.current_device()])
    ours = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), rank, range(STEPS))
    theirs = train(ddp, torch.optim.AdamW(reference.parameters(), lr=1e-3), rank, range(STEPS))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    assert_same(model, reference, tolerance=1e-4)


@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
@spmd(4)
def test_mixed_precision_equals_stock_fsdp2(rank, hsdp):
    mesh = rank.mesh(2, 2, names=("r", "s")) if hsdp else rank.mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, other = build(lambda: Transformer(moe=True), rank.device)
    shard_blocks(model, mesh=mesh, mp_policy=policy)
    for layer in other.layers:
        stock_fully_shard(layer, mesh=mesh, mp_policy=policy)
    stock_fully_shard(other, mesh=mesh, mp_policy=policy)
    ours = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), rank, range(STEPS))
    theirs = train(other, torch.optim.AdamW(other.parameters(), lr=1e-3), rank, range(STEPS))
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=0)
    for (name, p), q in zip(model.named_parameters(), other.parameters()):
        assert relative_error(full(p), full(q)) < 2e-2, name


class _Wide(Stack):
    """Layers of a few MiB, so that buffers are real allocations; returns a loss."""

    def __init__(self) -> None:
        super().__init__(layers=4, dim=WIDTH, hidden=WIDTH // 2)

    def forward(self, x):
        return super().forward(x).float().square().mean()


def _wide(rank, reshard, **options):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, _ = build(_Wide, rank.device)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=reshard, **options)
    return fully_shard(model, mp_policy=policy)


def _batch(rank, step):
    return rows(rank, step, dim=WIDTH, batch=64)


@pytest.mark.parametrize("reshard", [True, False])
@spmd(2)
def test_memory_is_flat_from_the_second_step(rank, reshard):
    gc.collect()  # what other tests left in cycles
    model = _wide(rank, reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    after, reserved = [], []
    for step in range(6):
        batch = _batch(rank, step)
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss, batch
        torch.cuda.synchronize()
        after.append(torch.cuda.memory_allocated())
        reserved.append(torch.cuda.memory_reserved())
    assert len(set(after[1:])) == 1, after
    assert len(set(reserved[1:])) == 1, reserved


@spmd(2)
def test_resharding_frees_the_gathered_layers(rank):
    """After a forward with resharding, less is held than without, by at least two of four layers."""
    gc.collect()
    held = {}
    for reshard in (True, False):
        model = _wide(rank, reshard)
        for step in range(2):
            model(_batch(rank, step)).backward()
            model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = model(_batch(rank, 2))
        torch.cuda.synchronize()
        held[reshard] = torch.cuda.memory_allocated() - before
        del model, loss
    layer_bytes = 2 * WIDTH * WIDTH
    assert held[False] - held[True] >= 2 * layer_bytes, held


def _slow(patch, where):
    """Delay the GPU before or after each collective, or in compute, to expose missing waits."""
    for name, kind in FUNCTIONS.items():
        if kind == "all_reduce":
            continue
        original = getattr(dist, name)

        def delayed(*args, _original=original, **kwargs):
            if where == "before":
                torch.cuda._sleep(SLEEP_CYCLES)
            work = _original(*args, **kwargs)
            if where == "after":
                torch.cuda._sleep(SLEEP_CYCLES)
            return work

        patch.setattr(dist, name, delayed)


CODES = {"gather_policy": lambda name, p: BlockCodes("int8", (64, 64)) if p.ndim == 2 else None}  # two groups
KINDS = {"resharded": {}, "kept": {"reshard": False}, "codes": CODES}
KINDS["exchange"] = {"reduction": "all_to_all"}
KINDS["levels"] = {"reduction": "two_level", "ranks_per_node": 2}
KINDS["codes-exchange"] = CODES | KINDS["exchange"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["before", "after", "compute"])
@spmd(4)
def test_delays_change_nothing(rank, where, kind):
    """The same losses, bit for bit, when communication or compute is late."""
    results = []
    for delay in (False, True):
        model = _wide(rank, **{"reshard": True, **KINDS[kind]})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        with pytest.MonkeyPatch.context() as patch:
            if delay and where != "compute":
                _slow(patch, where)
            if delay and where == "compute":
                for layer in model.layers:
                    layer.register_forward_pre_hook(lambda m, args: torch.cuda._sleep(SLEEP_CYCLES))
                    layer.register_full_backward_pre_hook(lambda m, grads: torch.cuda._sleep(SLEEP_CYCLES))
            losses = train(model, optimizer, rank, range(4), _batch)
        results.append((losses, [full(p) for p in model.parameters()]))
    (plain, plain_params), (late, late_params) = results
    assert torch.equal(plain, late), (plain, late)
    assert all(torch.equal(a, b) for a, b in zip(plain_params, late_params))


@pytest.mark.parametrize("pinned", [True, False])
@spmd(2)
def test_offload_to_pinned_memory(rank, pinned):
    model, reference = build(Transformer, rank.device)
    model.cpu()
    shard_blocks(model, offload_policy=fsdp.CPUOffloadPolicy(pin_memory=pinned))
    ddp = DistributedDataParallel(reference, device_ids=[torch.cuda.current_device()])
    ours = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), rank, range(STEPS))
    theirs = train(ddp, torch.optim.AdamW(reference.parameters(), lr=1e-3), rank, range(STEPS))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert all(p.to_local().is_pinned() == pinned for p in model.parameters() if p.to_local().numel())


@spmd(2)
def test_offloaded_weights_may_be_written_after_a_forward_without_gradients(rank):
    """Copies from pinned memory run when the device comes to them; the host must not be faster."""
    model, reference = build(Transformer, rank.device)
    model.cpu()
    shard_blocks(model, offload_policy=fsdp.CPUOffloadPolicy(pin_memory=True))
    with torch.no_grad():
        expected = reference(tokens(rank, 0))
        model(tokens(rank, 0))
        with torch.cuda.stream(fsdp_inside.gather_stream(model)):
            torch.cuda._sleep(SLEEP_CYCLES * 10)
        found = model(tokens(rank, 0))
        model.reshard()  # the root stays gathered after its forward
        for parameter in model.parameters():
            parameter.to_local().zero_()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
