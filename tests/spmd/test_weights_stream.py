"""Weights out of sharded models: bits, order, memory, ends of passes, codes and deltas."""

import gc
import re
import threading
import time

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ragged_fsdp import MixedPrecisionPolicy, Rows, fully_shard, weights
from ragged_fsdp.collectives import Comm
from ragged_fsdp.weights.sources import GroupSource
from rank_pool import spmd
from weights_cases import Model, cut_experts, stored


class Trained(Model):
    """With a forward, for steps beside a pass."""

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.nn.functional.pad(block(x), (0, 17))
        return self.head(x)


def build(mesh, *, dtype=torch.float32, seed=0, shard_dim=None):
    torch.manual_seed(seed)
    model = Trained().to(dtype)
    reference = Trained().to(dtype)
    reference.load_state_dict(model.state_dict())
    for block in model.blocks:
        block.forward = block.proj.forward
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(torch.bfloat16),
            orig_param_policy=lambda n, p: Rows(4) if p.ndim == 3 else None,
            shard_placement_fn=None if shard_dim is None else lambda p: Shard(shard_dim % p.ndim),
        )
    fully_shard(model, mesh=mesh)
    return model, reference


def assert_streamed(received, reference, naming=lambda name, tensor: name, dtype=None):
    expected = stored(reference, naming)
    assert set(received) == set(expected)
    for name, value in expected.items():
        wanted = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        assert received[name].dtype == wanted.dtype and torch.equal(received[name], wanted), name


@spmd(1, 3)
def test_a_stream_has_the_bits_of_the_whole_model(rank):
    """Own names and parts, casts, tied and frozen weights once, buffers; passes can be repeated."""
    model, reference = build(rank.mesh())
    stream = weights.stream(model)
    for _ in range(2):
        received = dict(stream.tensors())
        assert_streamed(received, reference)
    described = [(r.name, r.dtype, r.shape) for r in stream.metadata()]
    assert described == [(name, value.dtype, tuple(value.shape)) for name, value in received.items()]
    assert [name for name, _, _ in described].count("embed.weight") == 1 and "head.weight" not in received
    cut = weights.stream(model, names=cut_experts, dtype=torch.bfloat16)
    received, starts = {}, set()
    for bucket in cut:
        for name, value in bucket.tensors():
            received[name] = value
            if ".gate" in name:
                starts.add(value.untyped_storage().data_ptr())
    assert_streamed(received, reference, cut_experts, torch.bfloat16)
    assert len(starts) == 2  # parts of one layer are views of its buffer
    assert [r.name for r in cut.metadata()] == list(received)

    def apart(name, tensor):  # fused on the inside: queries, keys and values, of other sizes
        if not name.endswith("proj.weight"):
            return name
        return {f"{name}.{part}": rows for part, rows in zip("qkv", tensor.split((4, 2, 1)))}

    for bucket in weights.stream(model, names=apart):
        fused = {name: value for name, value in bucket.tensors() if "proj.weight" in name}
        assert len(fused) in (0, 3)
        assert len({value.untyped_storage().data_ptr() for value in fused.values()}) == bool(fused)
        for name, value in fused.items():
            whole = dict(reference.named_parameters())[name[:-2]].detach()
            assert torch.equal(value, whole.split((4, 2, 1))["qkv".index(name[-1])]), name


@spmd(3)
def test_one_rank_gets_the_weights_and_the_others_hold_no_bucket(rank):
    """Plain, cast, cut and coded; sharded groups and what is gathered one by one; also over replicas."""
    model, reference = build(rank.mesh())
    for options in ({}, {"names": cut_experts, "dtype": torch.bfloat16}, {"snapshot": True}):
        stream = weights.stream(model, to=1, **options)
        made, numels = torch.empty, []

        def counting(*args, made=made, numels=numels, **kwargs):
            numels.append((tensor := made(*args, **kwargs)).numel())
            return tensor

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", counting)
            buckets = [(bucket, dict(bucket.tensors())) for bucket in stream]
        received = {name: value for _, tensors in buckets for name, value in tensors.items()}
        if rank.rank == 1:
            naming = options.get("names", lambda name, tensor: name)
            assert_streamed(received, reference, naming, options.get("dtype"))
        else:
            assert not received and all(bucket.data.numel() == 0 for bucket, _ in buckets)
            largest = max(p.numel() for p in reference.parameters())
            assert max(numels) < largest, "a rank that gets nothing has memory for it"
    coded = {name: value.clone() for name, value in weights.stream(model, to=1, codes="fp8").tensors()}
    everywhere = dict(weights.stream(model, codes="fp8").tensors())
    if rank.rank == 1:
        assert coded.keys() == everywhere.keys()
        for name, value in everywhere.items():
            assert torch.equal(coded[name].view(torch.uint8), value.view(torch.uint8)), name
    for wrong in (3, -1, True, "all"):
        with pytest.raises(ValueError, match="to must be a rank of the 3 there are"):
            weights.stream(model, to=wrong)
    with pytest.raises(ValueError, match="do not stream the same"):
        weights.stream(model, to=rank.rank)
    with pytest.raises(ValueError, match="to and delta cannot"):
        weights.stream(model, to=0, delta=True)


@spmd(3)
def test_a_rank_that_has_no_part_of_the_model_cannot_get_it(rank):
    meshes = [DeviceMesh(rank.device, ranks) for ranks in ([0, 1], [2])]
    model, _ = build(meshes[rank.rank // 2])
    wrong, holders = (2, "[0, 1]") if rank.rank < 2 else (0, "[2]")
    with pytest.raises(ValueError, match=rf"a rank of the model, one of {re.escape(holders)}, .*got {wrong}"):
        weights.stream(model, to=wrong)


@spmd(4)
def test_replicas_tensor_parallelism_and_explicit_shards(rank):
    model, reference = build(rank.mesh(2, 2, names=("replica", "shard")))
    assert_streamed(dict(weights.stream(model).tensors()), reference)
    received = dict(weights.stream(model, to=2).tensors())
    assert_streamed(received, reference) if rank.rank == 2 else None
    assert rank.rank == 2 or not received
    model, reference = build(rank.mesh(), shard_dim=0)
    assert_streamed(dict(weights.stream(model).tensors()), reference)
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))
    model.load_state_dict(plain.state_dict())
    mesh = rank.mesh(2, 2, names=("dp", "tp"))
    for index, dim in enumerate((0, 1)):
        weight = distribute_tensor(model[index].weight.detach(), mesh["tp"], [Shard(dim)])
        model[index].weight = nn.Parameter(weight)
        bias = distribute_tensor(model[index].bias.detach(), mesh["tp"])
        model[index].bias = nn.Parameter(bias)
    fully_shard(model, mesh=mesh["dp"])
    assert_streamed(dict(weights.stream(model).tensors()), plain)
    with pytest.raises(ValueError, match=r"snapshot=True, but '0.weight' is gathered over process groups"):
        weights.stream(model, snapshot=True)


@spmd(3)
def test_two_buckets_are_in_memory_at_a_time(rank):
    """Counted by their storages, in a loop over buckets and in one over tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    for layer in model:
        fully_shard(layer, mesh=rank.mesh())
    alive = []
    make = torch.empty

    def counting(*args, **kwargs):
        made = make(*args, **kwargs)
        if made.numel() > 200:
            alive.append(torch.multiprocessing.reductions.StorageWeakRef(made.untyped_storage()))
        return made

    def held():
        for _ in range(100):
            now = sum(not ref.expired() for ref in alive)
            if now <= 2:
                break
            time.sleep(0.01)  # gloo's thread lets go of a gather's memory a moment after it is done
        return now

    most = 0
    stream = weights.stream(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", counting)
        for bucket in stream:
            for _name, _tensor in bucket.tensors():
                most = max(most, held())
        assert len(alive) == 6 and most == 2
        del bucket, _tensor
        for _name, _tensor in stream.tensors():
            most = max(most, held())
    assert len(alive) == 12 and most == 2
    assert stream.largest_bytes < 2 * 16 * 17 * 4


@spmd(3)
def test_a_pass_that_ends_on_one_rank_ends_on_all(rank):
    """The consumer stops or raises on one rank, at any bucket; the next pass and training go on."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    for layer in model:
        fully_shard(layer, mesh=rank.mesh())
    stream = weights.stream(model)

    class Boom(Exception):
        pass

    for at in range(4):
        seen = 0
        if rank.rank == 1:
            with pytest.raises(Boom):
                for bucket in stream:
                    if seen == at:
                        raise Boom
                    seen += bucket.data.numel() > 0
        else:
            with pytest.raises(RuntimeError, match=r"ended before bucket \d of 5: its consumer has stopped"):
                for bucket in stream:
                    seen += bucket.data.numel() > 0
        assert len(list(stream)) == 5
    kept = None
    for bucket in stream:
        kept = bucket  # all ranks stop alike, and hold a bucket
        break
    assert kept.data.numel()
    unused = iter(stream)
    with pytest.raises(RuntimeError, match="is being iterated"):
        iter(stream)
    unused.close()
    first = next(iter(stream))  # on the last bucket nobody waits for anybody
    if rank.rank == 0:
        names = [name for name, _ in stream.tensors()]
        assert len(names) == 10
    else:
        with iter(stream) as buckets:
            for _ in range(5):
                last = next(buckets)
        assert last.records[0].name == "4.weight"
    del first
    model(torch.randn(2, 8)).sum().backward()


@spmd(2)
def test_refusals(rank):
    model, _ = build(rank.mesh())
    with pytest.raises(TypeError, match="dtype must be a floating-point dtype"):
        weights.stream(model, dtype=torch.int8)
    with pytest.raises(ValueError, match="codes must be 'fp8'"):
        weights.stream(model, codes="int3")
    with pytest.raises(ValueError, match=r"gives two tensors the name 'x'|cannot stream"):
        weights.stream(model, names=lambda name, tensor: "x")
    with pytest.raises(ValueError, match=r"do not stream the same: rank 0 has 'embed.weight"):
        weights.stream(model, names={"embed.weight": "e"} if rank.rank else None)
    with pytest.raises(ValueError, match=r"two tensors the name 'embed.weight'|rank 1 cannot stream"):
        weights.stream(model, names={"blocks.0.frozen": "embed.weight"} if rank.rank else None)
    with pytest.raises(ValueError, match="that is for load"):
        weights.stream(model, names=lambda n, t: {weights.Stored("all", 0): t})
    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    fully_shard(empty, mesh=rank.mesh())
    with pytest.raises(ValueError, match="'weight' is on the meta device"):
        weights.stream(empty)
    delta = weights.stream(model, delta=True)
    with pytest.raises(ValueError, match="iterate over the stream"):
        next(delta.tensors())


@spmd(2)
def test_a_snapshot_is_streamed_beside_training(rank):
    """What a thread receives are the weights of the step at which it was taken."""
    model, reference = build(rank.mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    stream = weights.stream(model, snapshot=True)
    received = {}
    thread = threading.Thread(target=lambda: received.update(stream.tensors()))
    thread.start()
    for _ in range(3):
        model(torch.randn(4, 24)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    thread.join()
    assert_streamed(received, reference)
    now = {name: value.clone() for name, value in weights.stream(model).tensors()}
    assert not torch.equal(now["embed.weight"], received["embed.weight"])
    stream.refresh()
    again = dict(stream.tensors())
    assert all(torch.equal(again[name], value) for name, value in now.items())


@spmd(3)
def test_codes_are_those_of_the_whole_weight(rank):
    """Whole blocks and edges, experts coded together, what is not coded as it is."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"fc": nn.Linear(200, 300), "lm_head": nn.Linear(130, 7), "norm": nn.LayerNorm(9), "moe": nn.Module()}
    )
    model["moe"].experts = nn.Parameter(torch.randn(3, 256, 140))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(list(model.values()), mesh=rank.mesh())

    def names(name, tensor):
        if "experts" not in name:
            return name
        return {f"moe.{i}.{k}.weight": tensor[i, 128 * k :][:128] for i in range(3) for k in range(2)}

    stream = weights.stream(model, names=names, codes="fp8", dtype=torch.bfloat16)
    received = dict(stream.tensors())
    assert [r.name for r in stream.metadata()] == list(received)
    expected = {
        f"moe.{i}.{k}.weight": whole["moe.experts"][i, 128 * k :][:128] for i in range(3) for k in (0, 1)
    }
    expected["fc.weight"] = whole["fc.weight"]
    for name, value in expected.items():
        codes, scales = weights.block_fp8(value.bfloat16())
        assert torch.equal(received[name].view(torch.uint8), codes.view(torch.uint8)), name
        assert torch.equal(received[f"{name}_scale_inv"], scales), name
        full = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: value.shape[0], : value.shape[1]]
        assert (received[name].float() * full - value).abs().max() <= full.max() * 448 / 16
    for name in ("lm_head.weight", "norm.weight", "fc.bias"):
        assert torch.equal(received[name], whole[name].bfloat16())
    with pytest.raises(ValueError, match=r"fc.bias: codes need a matrix"):
        weights.stream(model, codes=lambda name, shape: name == "fc.bias")


@spmd(3)
def test_codes_are_made_by_the_ranks_that_hold_whole_blocks(rank):
    """Bands of 128 rows, or whole experts, on each rank: a byte per element travels; equal bits."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"fc": nn.Linear(130, 900), "norm": nn.LayerNorm(33), "odd": nn.Linear(200, 300, bias=False)}
    )
    model["moe"] = nn.Module()
    model["moe"].experts = nn.Parameter(torch.randn(5, 256, 40))
    whole = {name: value.clone() for name, value in model.state_dict().items()}

    def policy(name, parameter):
        return {(5, 256, 40): Rows(128), (300, 200): Rows(300), (896, 130): Rows(128)}.get(
            tuple(parameter.shape)
        )

    def names(name, tensor):
        if "experts" not in name:
            return name
        return {f"moe.{i}.{k}.weight": tensor[i, 128 * k :][:128] for i in range(5) for k in range(2)}

    with torch.no_grad():
        model["fc"].weight = nn.Parameter(whole["fc.weight"][:896].clone())  # whole bands
        whole["fc.weight"] = whole["fc.weight"][:896]
    fully_shard(list(model.values()), mesh=rank.mesh(), orig_param_policy=policy)
    gathered, gather = [], Comm.gather

    def counting(self, out, *args, **options):
        gathered.append(out.nbytes)
        return gather(self, out, *args, **options)

    for snapshot in (False, True):
        stream = weights.stream(model, names=names, codes="fp8", dtype=torch.bfloat16, snapshot=snapshot)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Comm, "gather", counting)
            received = {name: value.clone() for name, value in stream.tensors()}
        assert [r.name for r in stream.metadata()] == list(received)
        expected = {n: v for n, v in whole.items() if n in ("fc.weight", "odd.weight")}
        expected.update(names("experts", whole["moe.experts"]))
        for name, value in expected.items():
            codes, scales = weights.block_fp8(value.bfloat16())
            assert torch.equal(received[name].view(torch.uint8), codes.view(torch.uint8)), name
            assert torch.equal(received[f"{name}_scale_inv"], scales), name
        for name in ("norm.weight", "norm.bias", "fc.bias"):
            assert torch.equal(received[name], whole[name].bfloat16())
    coded = sum(value.numel() for value in expected.values())
    assert len(gathered) == 2 and coded < gathered[0] < 1.6 * coded  # padding; two bytes each would be 2.0


@spmd(1, 3)
def test_groups_of_several_dtypes_are_gathered_whole(rank):
    """Planned for what is sent, or sent as they are: one gather and no copy; else one by one."""
    torch.manual_seed(0)

    def build(policy):
        model = nn.Sequential(nn.Linear(13, 40), nn.Linear(40, 9)).bfloat16()
        model[1].float()
        model.requires_grad_(False)
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        return fully_shard(model, mesh=rank.mesh(), mp_policy=policy), whole

    for policy, dtype, calls in (
        (MixedPrecisionPolicy(torch.bfloat16), torch.bfloat16, 1),
        (MixedPrecisionPolicy(), None, 1),
        (MixedPrecisionPolicy(), torch.bfloat16, 0),
    ):
        model, whole = build(policy)
        stream = weights.stream(model, dtype=dtype)
        count = sum(isinstance(source, GroupSource) for source in stream._sources)
        assert count == calls
        for name, value in stream.tensors():
            assert torch.equal(value, whole[name] if dtype is None else whole[name].to(dtype)), name


@spmd(1, 3)
def test_a_delta_has_what_changed_and_little_more(rank):
    """Passes applied one after the other leave the receiver with the weights; a stopped one is sent again."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 97) if i % 2 else nn.Linear(97, 96) for i in range(4)))
    for layer in model:
        fully_shard(layer, mesh=rank.mesh())
    stream = weights.stream(model, dtype=torch.bfloat16, delta=True)
    receiver = {r.name: torch.zeros(r.shape, dtype=r.dtype) for r in stream.metadata()}
    for bucket in stream:
        assert isinstance(bucket, weights.Bucket)
        bucket.apply(receiver)

    def check():
        for name, value in model.state_dict().items():
            assert torch.equal(receiver[name], value.full_tensor().bfloat16()), name

    check()
    assert sum(d.nbytes for d in stream) == 0
    with torch.no_grad():
        for local in (model[0].weight.to_local(), model[2].bias.to_local()):
            local.view(-1)[: min(40, local.numel())].add_(1.0)
        local = model[3].weight.to_local().view(-1)
        local[-300:] = float("nan")
        local[-10:] = -0.0
    deltas = list(stream)
    changed = sum(d.values.nbytes for d in deltas)
    for d in deltas:
        assert isinstance(d, weights.Delta)
        d.apply(receiver)
    for name, value in model.state_dict().items():
        bits = value.full_tensor().bfloat16().view(torch.int16)
        assert torch.equal(receiver[name].view(torch.int16), bits), name
    assert changed > 0 and sum(d.nbytes for d in deltas) <= 1.01 * changed
    assert len(deltas[1].starts) == 0

    with torch.no_grad():
        model[0].weight.mul_(2)
    next(passing := iter(stream)).apply(receiver)
    passing.close()
    assert all(isinstance(bucket, weights.Bucket) for bucket in stream)
    gc.collect()


@spmd(1, 3)
@pytest.mark.parametrize("left_at", [1, 2, 3])
def test_a_delta_that_one_rank_left_is_sent_again_by_all(rank, left_at):
    """Also where the others had every bucket, or where it was left with the last in hand."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mesh=rank.mesh())
    stream = weights.stream(model, delta=True)
    receiver = {r.name: torch.zeros(r.shape) for r in stream.metadata()}
    for bucket in stream:
        bucket.apply(receiver)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    try:
        with iter(stream) as buckets:
            for index, bucket in enumerate(buckets):
                if rank.rank == 0 and index == left_at:
                    break
                bucket.apply(receiver)
    except RuntimeError as error:
        assert "its consumer has stopped" in str(error)
    for sent in (weights.Bucket, weights.Delta):
        for bucket in stream:
            assert isinstance(bucket, sent)
            bucket.apply(receiver)
        for name, value in model.state_dict().items():
            assert torch.equal(receiver[name], value.full_tensor()), name


class _Counting(nn.Module):
    """A forward that puts another buffer in the place of the last one."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(3, 5)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen = self.seen + 1
        return self.proj(x)


@spmd(1, 3)
@pytest.mark.parametrize("snapshot", [False, True])
def test_tensors_that_were_replaced_are_streamed(rank, snapshot):
    """By a forward and by a state dict that is assigned; the stream was made before."""
    model = fully_shard(_Counting(), mesh=rank.mesh(), reshard_after_forward=False)
    stream = weights.stream(model, snapshot=snapshot)
    for step in (1, 2):
        model(torch.ones(1, 3, device=rank.device))
        if step == 2:
            state = {name: torch.full_like(value, 7) for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
        if snapshot:
            stream.refresh()
        received = dict(stream.tensors())
        assert received.keys() == {"proj.weight", "proj.bias", "seen"}
        for name, value in model.state_dict().items():
            whole = value if name == "seen" else value.full_tensor()
            assert torch.equal(received[name], whole), (name, step)
    model.seen = torch.zeros(3)
    with pytest.raises(ValueError, match=r"seen had the shape \(2,\).* now it has \(3,\)"):
        stream.refresh() if snapshot else dict(stream.tensors())


@spmd(3)
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_tensor_that_one_rank_alone_has_replaced_is_refused_by_all(rank, snapshot):
    """The others once waited for that rank; and a refused refresh leaves the snapshot as it was."""
    model = fully_shard(_Counting(), mesh=rank.mesh())
    stream = weights.stream(model, snapshot=snapshot)
    before, model.seen = model.seen, torch.zeros(3 if rank.rank == 1 else 2)
    message = r"seen had the shape" if snapshot or rank.rank == 1 else "its consumer has stopped or failed"
    with pytest.raises((ValueError, RuntimeError), match=message):
        stream.refresh() if snapshot else dict(stream.tensors())
    if not snapshot:
        model.seen = before
    model.seen += 1  # of a snapshot nobody sees it
    assert torch.equal(dict(stream.tensors())["seen"].cpu(), torch.full((2,), 0.0 if snapshot else 1.0))


@spmd(2)
def test_a_snapshot_is_not_replaced_below_a_pass(rank):
    """The rest of the pass would have the weights of another step; a rank that has no pass hears of it."""
    model = fully_shard(nn.Linear(3, 5), mesh=rank.mesh())
    stream = weights.stream(model, snapshot=True)
    if rank.rank == 0:
        passing = iter(stream)
    with pytest.raises((ValueError, RuntimeError), match="is being iterated"):
        stream.refresh()
    if rank.rank:
        passing = iter(stream)
    assert len(list(passing)) == 1
    stream.refresh()
