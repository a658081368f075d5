"""Hand-overs: receivers that join the ranks' shards, and what happens when one end fails."""

import multiprocessing
import socket
import threading
import time

import pytest
import torch
from torch import nn

from ragged_fsdp import fully_shard, weights
from ragged_fsdp.collectives import Comm
from ragged_fsdp.weights.pieces import _Opened
from ragged_fsdp.weights.streaming import Stream
from rank_pool import spmd
from weights_cases import Model, cut_experts, handed_over, stored


def _build(mesh):
    torch.manual_seed(0)
    model, reference = Model(), Model()
    reference.load_state_dict(model.state_dict())
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh), reference


@spmd(1, 3)
def test_receivers_have_the_bits_of_the_whole_model(rank):
    """Shards are joined; parts that are no runs, codes and buffers are gathered before. Two receivers."""
    model, reference = _build(rank.mesh())
    receives = rank.rank in (0, 2)
    gathers = []
    gather = Comm.gather
    cases = [({}, 0), ({"names": cut_experts, "dtype": torch.bfloat16}, 2), ({"snapshot": True}, 0)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "gather", lambda *args, **kwargs: (gathers.append(1), gather(*args, **kwargs))[1])
        for options, count in cases:
            stream = weights.stream(model, **options)
            for _ in range(2):
                gathers.clear()
                received = handed_over(stream, receives)
                assert len(gathers) == (count if rank.world_size > 1 else 0)
                if not receives:
                    continue
                expected = stored(reference, options.get("names", lambda name, tensor: name))
                assert received.keys() == expected.keys()
                for name, value in expected.items():
                    dtype = options.get("dtype") if value.is_floating_point() else None
                    assert torch.equal(received[name].cpu(), value.to(dtype or value.dtype)), name
    coded = weights.stream(model, codes="fp8")
    expected = {name: value.clone() for name, value in coded.tensors()}
    received = handed_over(coded, receives)
    for name, value in expected.items() if receives else ():
        assert torch.equal(received[name].view(torch.uint8), value.view(torch.uint8)), name


@spmd(4)
def test_replicas_hand_over_one_of_them(rank):
    model, reference = _build(rank.mesh(2, 2, names=("replica", "shard")))
    received = handed_over(weights.stream(model), rank.rank == 3)
    if rank.rank == 3:
        for name, value in stored(reference, lambda name, tensor: name).items():
            assert torch.equal(received[name].cpu(), value), name


@spmd(4)
@pytest.mark.parametrize("snapshot", [False, True])
def test_groups_of_other_ranks_are_joined_in_their_own_order(rank, snapshot):
    """Layers over rows of a mesh, over its columns and over all ranks; two receivers, then a failure."""
    torch.manual_seed(0)
    model, reference = Model(), Model()
    reference.load_state_dict(model.state_dict())
    mesh = rank.mesh(2, 2, names=("replica", "shard"))
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model.blocks[1], mesh=mesh["replica"])
    fully_shard(model, mesh=rank.mesh())
    stream = weights.stream(model, snapshot=snapshot)
    for _ in range(2):
        received = handed_over(stream, rank.rank in (1, 2))
        for name, value in stored(reference, lambda name, tensor: name).items() if received else ():
            assert torch.equal(received[name].cpu(), value), name
    ours, theirs = multiprocessing.Pipe()
    if rank.rank == 3:
        theirs.close()
    with pytest.raises((RuntimeError, OSError)):
        weights.hand_over(stream, ours if rank.rank == 3 else None, timeout_s=20)
    received = handed_over(stream, rank.rank == 3)
    assert (received is not None and len(received) == len(reference.state_dict()) - 1) == (rank.rank == 3)


def _no_copy(*_):
    raise RuntimeError("no copy")


def _receiver(theirs, how, errors, device):
    """Takes two buckets, then does what the case is for."""
    if how == "gone":
        theirs.close()
        return
    if how == "silent":
        theirs.recv()
        return
    try:
        for taken, _ in enumerate(weights.take_over(theirs, device=device)):
            if how == "raises" and taken == 1:
                raise KeyError("no such weight")
            if how == "stops" and taken == 1:
                break
    except Exception as error:
        errors.append(error)


@spmd(3)
@pytest.mark.parametrize(
    "how", ["raises", "stops", "cannot copy", "gone", "silent", "late", "rank fails", "0 fails", "no slots"]
)
def test_what_fails_on_one_end_ends_the_pass_on_all(rank, how):
    """A receiver or a rank; every rank raises, the receiver too, and the next pass is not disturbed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    for layer in model:
        fully_shard(layer, mesh=rank.mesh())
    stream = weights.stream(model)
    ours, theirs = multiprocessing.Pipe()
    errors = []
    if rank.rank == 0:
        thread = threading.Thread(target=_receiver, args=(theirs, how, errors, stream.device))
        thread.start()
    with pytest.MonkeyPatch.context() as patch:
        write = Stream.write_shard

        def failing(self, index, *args):
            if index == 2:
                raise OSError("no memory")
            return write(self, index, *args)

        copy_to = _Opened.copy_to

        def late(self, place):
            time.sleep(0.3)
            copy_to(self, place)

        if how == "late":
            patch.setattr(_Opened, "copy_to", late)
        if rank.rank == (how != "0 fails") and how in ("rank fails", "0 fails"):
            patch.setattr(Stream, "write_shard", failing)
        if how == "cannot copy":
            patch.setattr(_Opened, "copy_to", _no_copy)
        if rank.rank == 1 and how == "no slots":
            patch.setattr(torch, "from_file", lambda *args, **kwargs: 1 / 0)
            patch.setattr(torch.cuda, "Event", lambda *args, **kwargs: 1 / 0)
        own = {
            "raises": "the receiver failed: its loop ended before the last bucket",
            "stops": "the receiver failed: its loop ended before the last bucket",
            "cannot copy": "the receiver failed: RuntimeError: no copy",
            "gone": "closed the connection|Broken pipe",
            "silent": "the receiver was silent for 0.5 s",
            "late": "the receiver was silent for 0.5 s",
        }
        match = own.get(how, "") if rank.rank == 0 else ""
        with pytest.raises(Exception, match=match or "ended early|no memory|by zero|failed") as raised:
            weights.hand_over(
                stream, ours if rank.rank == 0 else None, timeout_s=0.5 if how in ("silent", "late") else 20
            )
        if rank.rank != 0 and how in own:
            assert isinstance(raised.value, RuntimeError)
        if rank.rank == 0:
            thread.join(20)
            assert not thread.is_alive()
            if how in ("late", "rank fails", "0 fails", "no slots"):
                assert "not whole" in str(errors[0])
    pipe = None if how in ("gone", "silent") else (ours, theirs)  # what was left in it does not count
    received = handed_over(stream, rank.rank == 0, pipe)
    assert rank.rank or (len(received) == 10 and not (pipe and ours.poll()))


@spmd(2)
def test_what_cannot_be_handed_over_is_refused(rank):
    model, _ = _build(rank.mesh())
    with pytest.raises(ValueError, match="the stream has delta=True"):
        weights.hand_over(weights.stream(model, delta=True), None)
    with pytest.raises(ValueError, match="the stream has to=1"):
        weights.hand_over(weights.stream(model, to=1), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"node{rank.rank}")
        with pytest.raises(ValueError, match="the ranks are on 'node0' and 'node1'"):
            weights.hand_over(weights.stream(model), None)
