"""How many collectives run, and how many elements they carry."""

import pytest
import torch
import torch.distributed as dist

from fsdp_cases import RAGGED, Transformer, build, count, fsdp, fully_shard, ragged_only, shard_blocks, tokens
from rank_pool import spmd

GROUPS = 3
_NAMES = ("all_gather_single", "reduce_scatter_single", "all_to_all_single")
if not hasattr(dist, _NAMES[0]):  # before torch 2.13
    _NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


def _collectives_of_a_step(model, rank, step=0):
    """By kind, in forward and in backward."""
    loss, forward = count(lambda: model(tokens(rank, step)))
    return forward, count(loss.backward)[1]


@pytest.mark.parametrize(
    ("reshard", "backward_gathers"),
    [(True, 3), (False, 0), (None, 2), (2, 3)],
    ids=["true", "false", "none", "int"],
)
@spmd(4)
def test_one_collective_per_group(rank, reshard, backward_gathers):
    model, _ = build(Transformer, rank.device)
    shard_blocks(model, reshard_after_forward=reshard)
    for step in range(2):
        forward, backward = _collectives_of_a_step(model, rank, step)
        assert forward == {"gather": GROUPS}
        # where the choice is ours, the two groups backward starts with stay gathered from the second step on
        spared = 2 if RAGGED and reshard is None and step else 0
        expected = {"gather": backward_gathers - spared, "reduce_scatter": GROUPS}
        assert backward == {k: n for k, n in expected.items() if n}


@spmd(4)
def test_hsdp_adds_one_all_reduce_per_group(rank):
    model, _ = build(Transformer, rank.device)
    shard_blocks(model, mesh=rank.mesh(2, 2, names=("r", "s")))
    forward, backward = _collectives_of_a_step(model, rank)
    assert forward == {"gather": GROUPS}
    assert backward == {"gather": GROUPS - 1, "reduce_scatter": GROUPS, "all_reduce": GROUPS}


@spmd(1)
def test_world_size_one_communicates_nothing(rank):
    model, _ = build(Transformer, rank.device)
    shard_blocks(model)
    forward, backward = _collectives_of_a_step(model, rank)
    assert forward == backward == {}


@spmd(2)
def test_shard_size_one_only_all_reduces(rank):
    model, _ = build(Transformer, rank.device)
    shard_blocks(model, mesh=rank.mesh(2, 1, names=("r", "s")))
    forward, backward = _collectives_of_a_step(model, rank)
    assert forward == {}
    assert backward == {"all_reduce": GROUPS}


@spmd(2)
def test_reshard_can_change_at_run_time(rank):
    model, _ = build(Transformer, rank.device)
    shard_blocks(model, reshard_after_forward=True)
    for reshard in (False, True):
        model.set_reshard_after_forward(reshard)
        model(tokens(rank, 0)).backward()
        loss = model(tokens(rank, 1))
        _, backward = count(loss.backward)
        assert backward.get("gather", 0) == (GROUPS if reshard else 0)


def _tensors(args, kwargs):
    """The output and input of a collective, by whichever name or position they came."""
    named = [kwargs[k] for k in ("output", "output_tensor", "input", "input_tensor") if k in kwargs]
    return (*args[:2], *named)[:2]


def _recorded(monkeypatch):
    """The numbers of elements that pass through the two collectives, by name."""
    sizes = {"gather": [], "scatter": []}
    for name, kind in (
        ("all_gather_single", "gather"),
        ("all_gather_into_tensor", "gather"),
        ("reduce_scatter_single", "scatter"),
        ("reduce_scatter_tensor", "scatter"),
    ):
        original = getattr(dist, name, None)
        if original is None:
            continue

        def spy(*args, _original=original, _kind=kind, **kwargs):
            output, source = _tensors(args, kwargs)
            sizes[_kind].append((output.numel(), source.numel(), output.dtype))
            return _original(*args, **kwargs)

        monkeypatch.setattr(dist, name, spy)
    return sizes


@ragged_only
@pytest.mark.parametrize("moe", [False, True])
@spmd(3)
def test_collectives_carry_the_padded_group_once(rank, moe):
    """The gather moves exactly ranks x shard elements, padding below a unit of 128 per rank."""
    model, _ = build(lambda: Transformer(moe=moe), rank.device)
    group_numels = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
    root_numel = sum(p.numel() for p in model.parameters()) - sum(group_numels)
    shard_blocks(
        model, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )
    with pytest.MonkeyPatch.context() as patch:
        sizes = _recorded(patch)
        model(tokens(rank, 0)).backward()
    for gathered, numel in zip(sizes["gather"], [root_numel, *group_numels]):
        total, shard, dtype = gathered
        assert dtype == torch.bfloat16
        assert total == rank.world_size * shard
        assert numel <= total < numel + rank.world_size * 128
    scattered = [numel for _, numel, _ in sizes["scatter"]]
    gathered = [numel for numel, _, _ in sizes["gather"][:GROUPS]]
    assert sorted(scattered) == sorted(gathered)
    assert all(dtype == torch.float32 for *_, dtype in sizes["scatter"])


@ragged_only
@spmd(2)
def test_the_gather_is_in_place(rank):
    """The input of the all-gather is the rank's own slot of its output: no copy-in, no copy-out."""
    model, _ = build(Transformer, rank.device)
    shard_blocks(model)
    seen = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    original = getattr(dist, name)

    def spy(*args, **kwargs):
        output, shard = _tensors(args, kwargs)
        seen.append(shard.data_ptr() - output.data_ptr() == rank.rank * shard.numel() * shard.element_size())
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, name, spy)
        model(tokens(rank, 0))
    assert seen == [True] * GROUPS
    weight = model.norm.weight  # the root stays unsharded
    assert weight.untyped_storage().data_ptr() == model.head.weight.untyped_storage().data_ptr()


@spmd(2)
def test_a_single_group_for_a_list_of_modules(rank):
    model, _ = build(Transformer, rank.device)
    fully_shard(list(model.layers))
    fully_shard(model)
    _, forward = count(lambda: model(tokens(rank, 0)))
    assert forward == {"gather": 2}


def _noting(calls, name):
    """torch's function of that name, which notes that it was called."""
    original = getattr(dist, name)

    def noted(*args, **kwargs):
        calls.append(name)
        return original(*args, **kwargs)

    return noted


@ragged_only
@pytest.mark.parametrize("async_op", [False, True])
@spmd(2, 3)
def test_a_collective_is_the_same_whether_it_is_intercepted_or_not(rank, async_op):
    """Without an interceptor torch's functions are passed by; dtypes that no backend knows go as bytes."""
    from ragged_fsdp import collectives

    ranks, group = rank.world_size, dist.group.WORLD
    average = collectives.reduce_op(dist.get_backend() == "nccl")  # gloo has no mean

    def ran(dtype):
        made = torch.arange(4 * ranks, device=rank.device).add(rank.rank * 100)
        full, sent = made.to(dtype), made.to(dtype)
        shard, received = torch.zeros(4, device=rank.device), torch.empty_like(sent)
        works = [
            collectives.all_gather_(full, full[rank.rank * 4 :][:4], group, async_op=async_op),
            collectives.all_to_all(received, sent, group, async_op=async_op),
            collectives.reduce_scatter(shard, made.float(), group, op=average, async_op=async_op),
        ]
        assert all((work is not None) == async_op for work in works)
        for work in works:
            if work is not None:
                work.wait()
        return full, received, shard

    for dtype in (torch.float32, torch.complex64):
        direct = ran(dtype)
        assert direct[0].real[-1] == 4 * ranks - 1 + 100 * (ranks - 1)
        assert direct[1].real[-1] == rank.rank * 4 + 3 + 100 * (ranks - 1)
        calls = []
        with pytest.MonkeyPatch.context() as patch:
            for name in _NAMES:
                patch.setattr(dist, name, _noting(calls, name))
            intercepted = ran(dtype)
        assert sorted(calls) == sorted(_NAMES)
        assert all(torch.equal(one, other) for one, other in zip(direct, intercepted))
