"""Streams to receivers: an outside process group, and the classes of engines where they are installed."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ragged_fsdp import fully_shard, weights
from ragged_fsdp.weights.receivers import in_order
from rank_pool import spmd


def _model(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return model, whole


@spmd(3)
def test_broadcast_to_an_outside_group(rank):
    """Two trainers, a receiver: whole passes, deltas, and a pass that a trainer ends early."""
    trainers = DeviceMesh("cpu", [0, 1])
    outside = dist.new_group([0, 2])
    if rank.rank == 2:
        shapes = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4))).state_dict()
        received = {name: torch.zeros(value.shape) for name, value in shapes.items()}
        for turn in range(3):
            for bucket in weights.receive(outside):
                assert isinstance(bucket, weights.Delta if turn else weights.Bucket)
                bucket.apply(received)
            whole = torch.load(rank.shared_dir / f"turn-{turn}.pt")
            assert all(torch.equal(received[name], value) for name, value in whole.items()), turn
        with pytest.raises(RuntimeError, match="not whole"):
            for _ in weights.receive(outside):
                pass
        dist.barrier()
        return
    model, _ = _model(trainers)
    stream = weights.stream(model, delta=True)
    for turn in range(3):
        state = {name: value.full_tensor() for name, value in model.state_dict().items()}
        if rank.rank == 0:
            torch.save(state, rank.shared_dir / f"turn-{turn}.pt")
        weights.send(stream, outside if rank.rank == 0 else None)
        with torch.no_grad():
            model[turn].weight.add_(1.0)
    stream = weights.stream(model)
    if rank.rank == 1:
        for _ in stream:
            break
    else:
        with pytest.raises(RuntimeError, match="stopped or failed on another rank"):
            weights.send(stream, outside)
    dist.barrier()


@spmd(1)
def test_vllm_weight_source(rank):
    base = pytest.importorskip("vllm.distributed.weight_transfer.base")
    model, whole = _model(rank.mesh())
    source = weights.vllm_source(weights.stream(model, dtype=torch.bfloat16))
    assert isinstance(source, base.WeightSource)
    for _ in range(2):  # re-iterable
        got = list(source)
        described = [(m.name, m.dtype, m.shape) for m in source.metadata()]
        assert described == [(name, value.dtype, tuple(value.shape)) for name, value in got]
        assert all(torch.equal(value, whole[name].bfloat16()) for name, value in got)
    if hasattr(source, "iter_groups"):  # not in every release
        groups = list(source.iter_groups())
        assert [names for names, _ in groups] == source.groups() and len(groups) == 4
        for index, layer in enumerate(model):  # plain tensors of all layers come in one bucket
            layer.register_buffer("correction", torch.full((3,), float(index)))
        source = weights.vllm_source(weights.stream(model))
        for (names, tensors), index in zip(source.iter_groups(), range(4)):
            assert set(names) == {f"{index}.{own}" for own in ("weight", "bias", "correction")}
            assert tensors[names.index(f"{index}.correction")].tolist() == [index] * 3


@spmd(1, 2)
def test_a_pass_in_another_order(rank):
    """What comes early is kept; ranks beside the one of `to` see nothing; early ends are clean."""
    model, whole = _model(rank.mesh())
    stream = weights.stream(model)
    for names in (list(whole), list(whole)[::-1]):
        got = list(in_order(stream, names))
        assert [name for name, _ in got] == names
        assert all(torch.equal(value, whole[name]) for name, value in got)
    to_last = weights.stream(model, to=rank.world_size - 1)
    assert len(list(in_order(to_last, list(whole)))) == (8 if rank.rank == rank.world_size - 1 else 0)
    for _ in in_order(stream, list(whole)):
        break
    assert len(dict(stream.tensors())) == 8


@spmd(1)
def test_sglang_flattened_bucket(rank):
    module = pytest.importorskip("sglang.srt.weight_sync.tensor_bucket")
    model, whole = _model(rank.mesh())
    seen = {}
    for bucket in weights.stream(model):
        made = weights.sglang_bucket(bucket)
        assert isinstance(made, module.FlattenedTensorBucket)
        again = module.FlattenedTensorBucket(
            flattened_tensor=made.get_flattened_tensor(), metadata=made.get_metadata()
        )
        seen.update(again.reconstruct_tensors())
        assert made.get_flattened_tensor().data_ptr() == bucket.data.data_ptr()
    assert all(torch.equal(seen[name], value) for name, value in whole.items())


@spmd(1)
@pytest.mark.parametrize("case", ["whole", "small buffer", "worker fails", "no worker"])
def test_checkpoint_engine_worker(rank, case):
    """The worker's own update function in a thread, with memory of the host in place of a device's."""
    zmq = pytest.importorskip("zmq")
    worker = pytest.importorskip("checkpoint_engine.worker")
    model, whole = _model(rank.mesh())
    stream = weights.stream(model)
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.linger = 0
    address = f"inproc://weights-{case.replace(' ', '-')}"
    socket.bind(address)
    received, failures = {}, []
    buffers = []

    def handle_of(buffer):
        buffers.append(buffer)
        return (_opened, (len(buffers) - 1, *range(6)))

    class NoDevice:
        device_module = type("Module", (), {n: staticmethod(lambda: None) for n in _DEVICE_CALLS})

    def run(tensors):
        if case == "worker fails":
            raise KeyError("no such weight")
        received.update({name: value.clone() for name, value in tensors})

    def update():
        try:
            worker.update_weights_from_ipc(context, address, 0, run=run)
        except BaseException as error:
            failures.append(error)

    _OPEN[:] = [buffers]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "DeviceManager", NoDevice)
        thread = threading.Thread(target=update)
        options = {"handle_of": handle_of, "timeout_s": 20.0}
        if case == "no worker":
            with pytest.raises(TimeoutError, match="is silent"):
                weights.serve_checkpoint_engine(stream, socket, **{**options, "timeout_s": 0.2})
            assert len(list(stream)) == 4  # and the next pass is not disturbed
            return
        thread.start()
        if case == "worker fails":
            with pytest.raises(RuntimeError, match="no such weight"):
                weights.serve_checkpoint_engine(stream, socket, **options)
            thread.join(20)
            assert "gave up" in str(failures[0])
            return
        small = {"buffer_bytes": 40 * 40 * 4} if case == "small buffer" else {}
        weights.serve_checkpoint_engine(stream, socket, **options, **small)
        thread.join(20)
    assert not failures
    assert all(torch.equal(received[name], value) for name, value in whole.items())


_DEVICE_CALLS = ("synchronize", "ipc_collect", "empty_cache")
_OPEN = []


def _opened(index, *_):
    return _OPEN[0][index]


@spmd(1)
def test_only_device_memory_is_shared(rank):
    model, _ = _model(rank.mesh())
    if rank.device == "cpu":
        with pytest.raises(ValueError, match=r"this bucket is on cpu; use send"):
            weights.share(next(iter(weights.stream(model))))
