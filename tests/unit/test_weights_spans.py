"""Which elements of a stored tensor a rank reads, against indexing; files that are not what they say."""

import json
import math
import os
import random
import resource
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from ragged_fsdp.checkpoint.safetensors_writer import TensorToWrite, write_safetensors
from ragged_fsdp.routes import flat_boxes
from ragged_fsdp.weights.files import read_header, safetensors_files
from ragged_fsdp.weights.names import parts_of
from ragged_fsdp.weights.reading import Files, read_jobs
from ragged_fsdp.weights.spans import GAP_BYTES, StoredPiece, Transfer, jobs_of, transfers


def _views(t):
    """Ways in which a stored tensor may lie in a model tensor of three dims."""
    yield "whole", t
    yield "flat", t.view(-1)
    yield "matrix", t.flatten(0, 1)
    yield "expert", t[2]
    yield "half", t[1, : t.shape[1] // 2]
    yield "columns", t[..., 1:3]
    yield "transposed", t.transpose(1, 2)
    yield "interleaved", t[:, 1::2]
    yield "scalar", t[1, 1, 1]


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
def test_transfers_equal_indexing(chunk_bytes):
    """Every kind of view, every flat interval of a rank: what is put in place is what slicing gives."""
    shape, rng = (4, 6, 5), random.Random(0)
    values = np.arange(math.prod(shape), dtype=np.int32)
    for name, view in _views(torch.from_numpy(values).view(shape)):
        stored = view.contiguous().view(-1).numpy()  # the file
        model = (view.storage_offset(), tuple(view.shape), view.stride())
        strides = view.contiguous().stride()
        inside = np.zeros(values.size, bool)
        inside[view.contiguous().view(-1).numpy()] = True
        for _ in range(30):
            start, stop = sorted(rng.sample(range(values.size + 1), 2))
            region = tuple(flat_boxes(shape, start, stop))
            local = np.full(stop - start, -1, np.int32)
            pieces = [StoredPiece("f", 0, 4, 0, 0, t) for t in transfers(shape, region, model, (0, strides))]
            for job in jobs_of(pieces, chunk_bytes):
                assert job.end - job.begin <= chunk_bytes
                for piece in job.pieces:
                    assert job.begin <= piece.begin < piece.end <= job.end
                    t = piece.transfer
                    source = np.lib.stride_tricks.as_strided(
                        stored[t.source_offset :], t.sizes, [4 * s for s in t.source_strides]
                    )
                    target = np.lib.stride_tricks.as_strided(
                        local[t.target_offset :], t.sizes, [4 * s for s in t.target_strides]
                    )
                    target[...] = source
            expected = np.where(inside[start:stop], values[start:stop], -1)
            assert np.array_equal(local, expected), (name, start, stop)


def _run(numel):
    return Transfer((numel,), 0, (1,), 0, (1,))


def test_short_gaps_are_read_and_long_ones_are_not():
    rows, columns = 8, GAP_BYTES  # of four bytes: half a row is a long gap
    half = (((0, 0), (rows, columns // 2)),)
    [transfer] = transfers((rows, columns), half, (0, (rows, columns), (columns, 1)), (0, (columns, 1)))
    jobs = jobs_of([StoredPiece("f", 0, 4, 0, 0, transfer)], 1 << 20)
    assert sum(job.end - job.begin for job in jobs) == rows * columns // 2 * 4
    small = [StoredPiece("f", 100 * i, 4, i, i, _run(10)) for i in range(5)]
    [job] = jobs_of(small, 1 << 20)
    assert (job.begin, job.end, len(job.pieces)) == (0, 440, 5)


def test_the_kernel_is_told_of_every_byte_before_it_is_read(tmp_path, monkeypatch):
    """In short pieces: of a long one it would fetch no more than its read-ahead."""
    content = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8)
    (tmp_path / "f").write_bytes(content.tobytes())
    advised, read = [], []
    preadv = os.preadv

    def advise(_, begin, length, kind):
        if kind == os.POSIX_FADV_WILLNEED:
            assert length <= 256 << 10
            advised.append((begin, begin + length))

    def reading(handle, buffers, at):
        ends = dict(advised)
        position = at
        while position in ends:
            position = ends[position]
        assert position >= at + len(buffers[0]), "not told of, or told in other pieces"
        read.append(at)
        return preadv(handle, buffers, at)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(os, "preadv", reading)
    target = torch.zeros(3 << 20, dtype=torch.uint8)
    chunk = 700 << 10  # not a multiple of what is told at a time
    jobs = jobs_of([StoredPiece("f", 0, 1, 0, 0, _run(len(content)))], chunk)
    done = read_jobs(tmp_path, jobs, [target], [torch.uint8], threads=2, progress=lambda read: None)
    assert done == 3 << 20 and len(read) == 5 and np.array_equal(target.numpy(), content)


def test_a_naming_tells_views_without_memory():
    def naming(name, tensor):
        return {f"{name}.{i}": half.contiguous() for i, half in enumerate(tensor.chunk(2, dim=1))}

    parts = parts_of(naming, "w", (4, 6), torch.bfloat16)
    assert [(p.stored, p.view.offset, p.view.strides) for p in parts] == [
        ("w.0", 0, (6, 1)),
        ("w.1", 3, (6, 1)),
    ]
    assert parts_of(lambda n, t: {n: t + 1}, "w", (4,), torch.bfloat16)[0].view is None
    with pytest.raises(TypeError, match="w: a naming returns"):
        parts_of(lambda n, t: 3, "w", (4,), torch.bfloat16)


def _write(path, header, data=b""):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_damaged_files_are_named(tmp_path):
    whole = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    _write(tmp_path / "good.safetensors", whole, bytes(8))
    assert read_header(tmp_path, "good.safetensors", None)["a"].shape == (2,)
    _write(tmp_path / "short.safetensors", whole, bytes(7))
    with pytest.raises(ValueError, match=r"short\.safetensors is truncated: \d+ bytes"):
        read_header(tmp_path, "short.safetensors", None)
    _write(
        tmp_path / "odd.safetensors", {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8)
    )
    with pytest.raises(ValueError, match=r"a has 8 bytes; torch.float32 of shape"):
        read_header(tmp_path, "odd.safetensors", None)
    _write(
        tmp_path / "type.safetensors", {"a": {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)
    )
    with pytest.raises(ValueError, match="a has the type X9"):
        read_header(tmp_path, "type.safetensors", None)
    (tmp_path / "noise.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="damaged or no safetensors"):
        read_header(tmp_path, "noise.safetensors", None)
    digits = b'{"a": {"dtype": "F32", "data_offsets": [0, 8], "shape": [' + b"9" * 5000 + b"]}}"
    for bad in (b'{"a":' * 100_000, digits, b'{"\xff": 1}', b"[]", b'{"a": 1}'):
        (tmp_path / "bad.safetensors").write_bytes(struct.pack("<Q", len(bad)) + bad)
        with pytest.raises(ValueError, match=r"bad\.safetensors: its header is damaged"):
            read_header(tmp_path, "bad.safetensors", None)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(ValueError, match=r"pipe\.safetensors is no file"):  # and nobody waits for a writer
        read_header(tmp_path, "pipe.safetensors", None)
    with pytest.raises(ValueError, match="no tensor 'b', which the index says"):
        read_header(tmp_path, "good.safetensors", ["b"])
    index = {"weight_map": {"a": "good.safetensors", "b": "gone.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lacks gone.safetensors"):
        safetensors_files(tmp_path)


def test_more_files_than_a_process_may_open(tmp_path):
    """A checkpoint of many ranks has them; threads read some while others are closed."""
    for number in range(300):
        (tmp_path / str(number)).write_bytes(number.to_bytes(2, "little"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, limits[1]))
    try:
        with Files(tmp_path) as files, ThreadPoolExecutor(8) as pool:
            found = pool.map(lambda number: files.read(str(number % 300), 0, 2), range(900))
            assert [int.from_bytes(text, "little") for text in found] == [*range(300)] * 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("names", [("a", "b", "a"), ("a", "__metadata__")])
def test_a_file_has_one_tensor_under_a_name(tmp_path, names):
    planned = [TensorToWrite(name, (2,), torch.float32) for name in names]
    with pytest.raises(ValueError, match=f"two tensors would have the name '{names[-1]}'"):
        write_safetensors(tmp_path, planned, iter(()), max_file_bytes=100)
    assert not list(tmp_path.iterdir())


def test_values_that_do_not_come_are_named(tmp_path):
    planned = [TensorToWrite(name, (2,), torch.float32) for name in "ab"]
    with pytest.raises(ValueError, match="b: it was to be written, and there are no more values"):
        write_safetensors(tmp_path, planned, iter([("a", torch.zeros(2))]), max_file_bytes=100)
