"""An explicit ``Shard(dim)`` from ``shard_placement_fn``: FSDP2's chunks, placements and training."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from collective_calls import count
from fsdp_cases import (
    DIM,
    FeedForward,
    Stack,
    Transformer,
    assert_same,
    average_gradients,
    backward_both,
    build,
    fsdp,
    full,
    fully_shard,
    linear_on_a_full_mesh,
    ragged_only,
    relative_error,
    rows,
    shard_blocks,
    tokens,
)
from rank_pool import spmd

HIDDEN = 24  # divides by every number of ranks used here


def _last_dim(parameter):
    return Shard(parameter.ndim - 1)


def _first_dim(parameter):
    return Shard(0)


def _mixed(parameter):
    """Some by columns, some by rows, the rest as the implementation likes."""
    if parameter.ndim == 1:
        return None
    return Shard(1) if parameter.shape[0] > parameter.shape[1] else Shard(0)


PLACEMENTS = {"first": _first_dim, "last": _last_dim, "mixed": _mixed}


def _steps(rank, model, reference, tolerance, batch=tokens):
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference))
    for step in range(3):
        loss, expected = (m(batch(rank, step)).float().sum() for m in (model, reference))
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        loss.backward()
        expected.backward()
        average_gradients(reference)
        assert_same(model, reference, tolerance=tolerance, grads=True)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        # the same gradients from here on: AdamW makes large steps of small differences
        with torch.no_grad():
            for q, p in zip(reference.parameters(), model.parameters()):
                q.copy_(full(p))


@pytest.mark.parametrize("kind", PLACEMENTS)
@spmd(1, 2, 3, 4)
def test_training_equals_unsharded(rank, kind):
    """33 rows of vocabulary and 23 hidden ones are uneven chunks; a rank may own nothing of a bias."""
    factory = Transformer if kind == "first" else _Even
    model, reference = build(factory, rank.device)
    shard_blocks(model, shard_placement_fn=PLACEMENTS[kind])
    for (name, p), q in zip(model.named_parameters(), reference.parameters()):
        wanted = PLACEMENTS[kind](p)
        if wanted is not None:
            assert p.placements == (wanted,), name
            local = distribute_tensor(q.detach(), p.device_mesh, (wanted,)).to_local()
            assert torch.equal(p.to_local(), local), name
            assert p.to_local().is_contiguous(), name
    _steps(rank, model, reference, tolerance=1e-5, batch=tokens if kind == "first" else rows)
    for p in model.parameters():
        assert p.to_local().is_contiguous()


class _Even(Stack):
    """Dims that divide by the ranks, as ``Shard(dim)`` needs for dims other than 0; one has three."""

    def __init__(self) -> None:
        super().__init__(hidden=HIDDEN)
        self.experts = nn.Parameter(torch.randn(3, DIM, HIDDEN) / DIM**0.5)

    def forward(self, x):
        return torch.einsum("bd,edh->bh", super().forward(x), self.experts)


@pytest.mark.parametrize("mode", ["mixed_precision", "offload", "accumulate", "frozen", "keep", "hsdp"])
@spmd(4)
def test_options(rank, mode):
    """What a group can do, it can do with chunks."""
    model, reference = build(_Even, rank.device)
    options, tolerance = {"shard_placement_fn": _last_dim}, 1e-6
    if mode == "mixed_precision":
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        tolerance = 2e-2
    elif mode == "offload":
        options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=False)
    elif mode == "keep":
        options["reshard_after_forward"] = False
    elif mode == "hsdp":
        options["mesh"] = rank.mesh(2, 2, names=("replicate", "shard"))
    elif mode == "frozen":
        for module in (model, reference):
            module.layers[0].up.weight.requires_grad_(False)
    shard_blocks(model, **options)
    for step in range(2):
        if mode == "accumulate":
            model.set_requires_gradient_sync(step == 1)
        for module in (model, reference):
            module(rows(rank, step)).square().sum().backward()
    average_gradients(reference)
    for (name, p), q in zip(model.named_parameters(), reference.named_parameters()):
        assert (p.grad is None) == (q[1].grad is None), name
        if p.grad is not None:
            assert p.grad.placements == p.placements and p.grad.to_local().device == p.to_local().device, name
            assert relative_error(full(p.grad.to(rank.device)), q[1].grad) < tolerance, name


@ragged_only
@spmd(3)
def test_gradients_by_all_to_all(rank):
    model, reference = build(_Even, rank.device)
    shard_blocks(model, shard_placement_fn=_last_dim, reduction="all_to_all")
    _steps(rank, model, reference, tolerance=1e-5, batch=rows)


@spmd(2)
def test_one_gather_and_one_reduction_for_the_group(rank):
    model, _ = build(lambda: FeedForward(hidden=HIDDEN), rank.device)
    fully_shard(model, shard_placement_fn=_last_dim)
    _, counts = count(lambda: model(rows(rank, 0)).sum().backward())
    assert counts["gather"] in (1, 2) and counts["reduce_scatter"] == 1, counts


@pytest.mark.parametrize("dim, hidden", [(0, HIDDEN), (0, 22), (1, HIDDEN)])
@spmd(4)
def test_beside_tensor_parallelism(rank, dim, hidden):
    """On the dim tensor parallelism cuts, the placement is strided; on the other it is a plain ``Shard``."""
    mesh = rank.mesh(2, 2, names=("dp", "tp"))
    model, reference = build(lambda: FeedForward(hidden=hidden), rank.device)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(dim) if p.ndim == 2 else None)
    for weight, cut in ((model.up.weight, 0), (model.down.weight, 1)):
        own, tensor_parallel = weight.placements
        assert tensor_parallel == Shard(cut) and own.dim == dim
        assert (own == Shard(dim)) == (cut != dim)
    for (name, p), q in zip(model.named_parameters(), reference.named_parameters()):
        assert torch.equal(full(p), q[1].detach()), name
    data = dataclasses.replace(rank, rank=mesh["dp"].get_local_rank())
    backward_both(model, reference, rows(data, 0), mesh["dp"].get_group())
    for (name, p), q in zip(model.named_parameters(), reference.named_parameters()):
        assert relative_error(full(p.grad), q[1].grad) < 1e-6, name


@pytest.mark.parametrize("dim", [0, 1])
@spmd(4)
def test_data_parallel_dims_of_a_full_mesh(rank, dim):
    model, reference, _ = linear_on_a_full_mesh(rank, shard_placement_fn=lambda p: Shard(dim))
    assert model.weight.placements[0].dim == dim and model.weight.placements[1] == Shard(0)
    assert torch.equal(full(model.weight), reference.weight.detach())


@spmd(3)
def test_state_dicts_cross(rank):
    """From chunks to the default layout, to an unsharded model, and back."""
    model, reference = build(_Even, rank.device, seed=1)
    chunked, _ = build(_Even, rank.device, seed=2)
    shard_blocks(model)
    shard_blocks(chunked, shard_placement_fn=_last_dim)
    chunked.load_state_dict(
        {
            name: distribute_tensor(full(value), chunked.get_parameter(name).device_mesh, [_last_dim(value)])
            for name, value in model.state_dict().items()
        }
    )
    assert_same(chunked, reference)
    assert all(p.placements == (_last_dim(p),) for p in chunked.parameters())
    backward_both(chunked, reference, rows(rank, 0))
    assert_same(chunked, reference, tolerance=1e-6, grads=True)


@spmd(2)
def test_meta_init(rank):
    with torch.device("meta"):
        model = FeedForward(hidden=HIDDEN)
    fully_shard(model, shard_placement_fn=_last_dim)
    model.to_empty(device=rank.device)
    for linear in (model.up, model.down):
        linear.reset_parameters()
    model(rows(rank, 0)).sum().backward()
    assert model.up.weight.placements == (Shard(1),) and full(model.up.weight).isfinite().all()


@ragged_only
@spmd(2)
def test_a_granularity_or_a_mesh_alone_stays_ragged(rank):
    """``Rows`` asks for a ragged layout, whatever else the user returned; so does no answer."""
    from ragged_fsdp import Rows
    from ragged_fsdp.dtensor import is_ragged

    model, reference = build(lambda: FeedForward(hidden=HIDDEN), rank.device)
    fully_shard(
        model,
        shard_placement_fn=_first_dim,
        orig_param_policy=lambda name, p: Rows(2) if name == "up.weight" else None,
    )
    assert is_ragged(model.up.weight) and not is_ragged(model.down.weight)
    assert_same(model, reference)


@ragged_only
@spmd(4)
def test_what_it_refuses(rank):
    for options, message in (
        ({"shard_placement_fn": _first_dim, "reshard_after_forward": 2}, r"up\.weight.*bool"),
        ({"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None, "mesh": None}, "uneven"),
    ):
        model = FeedForward(dim=6, hidden=23)
        with pytest.raises(NotImplementedError, match=message):
            fully_shard(model, **options)
        assert not isinstance(model.up.weight, DTensor)  # nothing was changed
    mesh = rank.mesh(2, 2, names=("dp", "tp"))
    model = nn.Linear(4, 5, bias=False, device=rank.device)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)]))
    with pytest.raises(NotImplementedError, match=r"weight.*\[2, 3\]"):
        fully_shard(model, mesh=mesh["dp"], shard_placement_fn=_first_dim)
    assert model.weight.placements == (Shard(0),)


@ragged_only
@spmd(2)
def test_ranks_that_disagree_on_the_dim_raise_everywhere(rank):
    model = nn.Linear(4, 4, bias=False, device=rank.device)
    with pytest.raises(ValueError, match=r"weight.*Shard\(0\).*weight.*Shard\(1\)"):
        fully_shard(model, shard_placement_fn=lambda p: Shard(rank.rank))


@spmd(2)
def test_replicas_keep_their_placement(rank):
    mesh = rank.mesh(1, 2, names=("replicate", "shard"))
    model, _ = build(lambda: nn.Linear(DIM, 4), rank.device)
    fully_shard(model, mesh=mesh, shard_placement_fn=_last_dim)
    assert model.weight.placements == (Replicate(), Shard(1))
