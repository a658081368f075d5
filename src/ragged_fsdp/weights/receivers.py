"""A stream in the forms that receivers take: a process group, CUDA IPC, vLLM, SGLang, checkpoint-engine.

All trainer ranks iterate over the stream; the functions here are called on all of them too, with None for the
channel on ranks that have no receiver. What fails on a channel ends the pass on all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from ragged_fsdp.layout import align_up
from ragged_fsdp.weights.buckets import Bucket, Delta, Record
from ragged_fsdp.weights.streaming import Stream

__all__ = [
    "open_shared",
    "receive",
    "send",
    "serve_checkpoint_engine",
    "sglang_bucket",
    "share",
    "vllm_source",
]

_END, _FAILED = 0, -1
_ALIGN_BYTES = 256


# -- a process group ---------------------------------------------------------------------------------


def send(stream: Stream, group: dist.ProcessGroup | None, *, src: int = 0) -> None:
    """Broadcast a pass to the ranks of an outside process group, where this trainer rank is rank ``src``.

    Args:
        group: any ``ProcessGroup`` (gloo, NCCL), of this rank and the receivers; None on trainer ranks that
            are in none.
    """
    sending = False
    try:
        with iter(stream) as buckets:
            for bucket in buckets:
                if group is not None:
                    text, data = _message(bucket, stream.device)
                    sending = True
                    _tell(group, src, [text.numel(), data.numel()], stream.device)
                    for part in (text, data):
                        if part.numel():
                            _broadcast(group, src, part)
                    sending = False
    except BaseException:
        if group is not None and not sending:  # else it is the group that failed, and nobody would hear it
            _tell(group, src, [_FAILED, 0], stream.device)
        raise
    if group is not None:
        _tell(group, src, [_END, 0], stream.device)


def _message(bucket: Bucket | Delta, device: torch.device) -> tuple[Tensor, Tensor]:
    """The head of a bucket, as JSON, and its bytes."""
    records = [[r.name, str(r.dtype).removeprefix("torch."), r.shape, r.offset] for r in bucket.records]
    head: dict[str, Any] = {"label": bucket.label, "records": records}
    if isinstance(bucket, Delta):
        head["blocks"] = list(bucket.values.shape)
        head["dtype"] = str(bucket.values.dtype).removeprefix("torch.")
        head["shard_numel"] = bucket.shard_numel
        parts = [bucket.starts.to(torch.int32 if bucket.fits_int32 else torch.int64), bucket.values]
        head["starts"] = str(parts[0].dtype).removeprefix("torch.")
        data = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
    else:
        data = bucket.data
    text = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8).to(device)
    return text, data


def receive(
    group: dist.ProcessGroup, *, src: int = 0, device: torch.device | str = "cpu"
) -> Iterator[Bucket | Delta]:
    """What :func:`send` broadcasts, on a receiver; ``RuntimeError`` if the trainer ended the pass early."""
    device = torch.device(device)
    while True:
        sizes = _tell(group, src, [0, 0], device)
        if sizes[0] == _FAILED:
            raise RuntimeError("the trainer ended the pass early; the weights received so far are not whole")
        if sizes[0] == _END:
            return
        text, data = (torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
        _broadcast(group, src, text)
        if data.numel():
            _broadcast(group, src, data)
        yield _received(json.loads(bytes(text.tolist())), data)


def _received(head: dict[str, Any], data: Tensor) -> Bucket | Delta:
    records = [Record(n, getattr(torch, d), tuple(shape), offset) for n, d, shape, offset in head["records"]]
    if "blocks" not in head:
        return Bucket(head["label"], data, records)
    count, kind = head["blocks"][0], getattr(torch, head["starts"])
    starts = data[: count * kind.itemsize].clone().view(kind).to(torch.int64)
    values = data[count * kind.itemsize :].clone().view(getattr(torch, head["dtype"])).view(head["blocks"])
    return Delta(head["label"], starts, values, tuple(records), head["shard_numel"])


def _tell(group: dist.ProcessGroup, src: int, sizes: list[int], device: torch.device) -> list[int]:
    told = torch.tensor(sizes, dtype=torch.int64, device=device)
    _broadcast(group, src, told)
    return told.tolist()


def _broadcast(group: dist.ProcessGroup, src: int, tensor: Tensor) -> None:
    """By the group's own method: the receivers may be in no default process group."""
    options = dist.BroadcastOptions()
    options.rootRank = src
    options.rootTensor = 0
    group.broadcast([tensor], options).wait()


# -- memory of a device, to another process on it ----------------------------------------------------


def share(bucket: Bucket) -> dict[str, Any]:
    """A message, for any channel that pickles, with which another process opens the bucket's CUDA memory.

    Keep the bucket until the receiver has said that it is done.
    """
    data = bucket.data
    if data.device.type != "cuda":
        raise ValueError(f"share: CUDA memory can be shared, this bucket is on {data.device}; use send()")
    torch.cuda.current_stream(data.device).synchronize()  # the receiver knows nothing of our streams
    return {"label": bucket.label, "records": bucket.records, "handle": reduce_tensor(data)}


def open_shared(message: dict[str, Any]) -> Bucket:
    """The bucket of a message from :func:`share`; its tensors are the trainer's memory, not a copy."""
    rebuild, arguments = message["handle"]
    return Bucket(message["label"], rebuild(*arguments), message["records"])


# -- engines -----------------------------------------------------------------------------------------


def vllm_source(stream: Stream) -> Any:
    """The stream as vLLM's ``WeightSource``: metadata, and a pass of ``(name, tensor)`` per iteration.

    Layer by layer, where vLLM says what a layer is: tensors of a later one that a bucket brings are kept.
    """
    from vllm.distributed.weight_transfer import base

    records = {record.name: record for record in stream.metadata()}
    order = list(records)
    if hasattr(base, "layerwise_groups"):  # not in every release
        order = [name for group in base.layerwise_groups(order) for name in group]

    class Source(base.WeightSource):  # type: ignore[misc]
        """Weights of a sharded model, gathered a group at a time."""

        def metadata(self) -> list[Any]:
            return [base.ParamMeta(name, records[name].dtype, records[name].shape) for name in order]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return in_order(stream, order)

    return Source()


def in_order(stream: Stream, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """A pass with its tensors in the order of ``names``; what comes early is kept, and its bucket with it."""
    early: dict[str, Tensor] = {}
    with closing(stream.tensors()) as passing:
        for name in names:
            while name not in early:
                count = len(early)
                early.update(islice(passing, 1))  # not by a variable, which would keep a third bucket
                if len(early) == count:
                    return  # another rank gets the weights
            yield name, early.pop(name)


def sglang_bucket(bucket: Bucket) -> Any:
    """The bucket as SGLang's ``FlattenedTensorBucket``, over the same memory."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata

    metadata = [
        FlattenedTensorMetadata(r.name, torch.Size(r.shape), r.dtype, r.offset, r.offset + r.nbytes, r.nbytes)
        for r in bucket.records
    ]
    return FlattenedTensorBucket(flattened_tensor=bucket.data, metadata=metadata)


def serve_checkpoint_engine(
    stream: Stream,
    socket: Any,
    *,
    buffer_bytes: int | None = None,
    timeout_s: float = 600.0,
    handle_of: Any = reduce_tensor,
) -> None:
    """A pass to a worker of checkpoint-engine that runs ``update_weights_from_ipc``.

    The worker opens one buffer and reads every bucket from there, so each is copied into it once.

    Args:
        socket: a bound ``zmq.REQ`` socket whose address the worker connects to; None on trainer ranks
            without a worker on their device.
        buffer_bytes: of the buffer; default holds the largest bucket. It must hold the largest tensor.
        timeout_s: how long to wait for the worker to take a bucket.
    """
    if stream.delta:
        raise ValueError("serve_checkpoint_engine: its workers take whole tensors; the stream has delta=True")
    channel = _Worker(socket, timeout_s) if socket is not None else None
    buffer: Tensor | None = None
    try:
        with iter(stream) as buckets:  # from here on what fails on this rank ends the pass on all
            if channel is not None:
                nbytes = stream.largest_bytes if buffer_bytes is None else buffer_bytes
                buffer = torch.empty(nbytes, dtype=torch.uint8, device=stream.device)
                channel.ask(handle_of(buffer))
            for bucket in buckets:
                if channel is not None and buffer is not None:
                    for message in _into(buffer, bucket):
                        channel.ask(message)
    except BaseException as error:
        if channel is not None:
            channel.give_up(error)
        raise
    if channel is not None:
        channel.ask(None)  # the worker lets go of the buffer,
        channel.ask(None)  # then ends its update


def _into(buffer: Tensor, bucket: Bucket) -> Iterator[list[dict[str, Any]]]:
    """Copy a bucket into the buffer, at once or a few tensors at a time, and describe what is there."""
    data = bucket.data
    if data.numel() <= buffer.numel():
        buffer[: data.numel()].copy_(data)
        _done(buffer)
        yield [_described(record, record.offset) for record in bucket.records]
        return
    held: list[dict[str, Any]] = []
    end = 0
    for record in bucket.records:
        if record.nbytes > buffer.numel():
            raise ValueError(
                f"{record.name} has {record.nbytes} bytes, buffer_bytes are {buffer.numel()}; none is cut"
            )
        if end + record.nbytes > buffer.numel():
            _done(buffer)
            yield held
            held, end = [], 0
        buffer[end : end + record.nbytes].copy_(data[record.offset : record.offset + record.nbytes])
        held.append(_described(record, end))
        end += align_up(record.nbytes, _ALIGN_BYTES)
    _done(buffer)
    yield held


def _described(record: Record, offset: int) -> dict[str, Any]:
    return {"name": record.name, "shape": torch.Size(record.shape), "dtype": record.dtype, "offset": offset}


def _done(buffer: Tensor) -> None:
    """Wait for the copies: another process reads the buffer, and knows nothing of our streams."""
    if buffer.device.type != "cpu":
        torch.get_device_module(buffer.device).current_stream(buffer.device).synchronize()


class _Worker:
    """The other end of a request socket: an empty answer is good, a text is what went wrong there."""

    def __init__(self, socket: Any, timeout_s: float) -> None:
        import zmq

        self._zmq, self._socket, self._timeout_ms = zmq, socket, int(timeout_s * 1000)

    def ask(self, message: Any) -> None:
        ready = self._socket.poll(
            self._timeout_ms, self._zmq.POLLOUT
        )  # a send would wait for a peer for ever
        if ready:
            self._socket.send_pyobj(message)
        if not ready or not self._socket.poll(self._timeout_ms):
            raise TimeoutError(f"the checkpoint-engine worker is silent for {self._timeout_ms / 1e3} s")
        answer = self._socket.recv()
        if answer:
            raise RuntimeError(f"the checkpoint-engine worker failed: {answer.decode()}")

    def give_up(self, error: BaseException) -> None:
        """Let the worker raise too, if it still listens."""
        try:
            self._socket.send_pyobj(RuntimeError(f"the trainer gave up: {error!r}"), flags=self._zmq.NOBLOCK)
        except Exception:  # after a time-out the socket may not send; there is nobody left to tell
            return
