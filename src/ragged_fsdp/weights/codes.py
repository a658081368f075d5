"""Weights as float8 codes with a scale for each block of 128 x 128: the format of DeepSeek-V3's checkpoints.

``x.weight`` becomes codes of the same shape, ``x.weight_scale_inv`` holds what a block's codes are multiplied
by, one fp32 per block, those at the edges being smaller. A block's scale depends on its own elements alone,
so what is gathered is coded as the whole weight would be, and no rank asks another.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from ragged_fsdp.block_codes import encode_matrices
from ragged_fsdp.layout import ALIGN_BYTES, align_up
from ragged_fsdp.weights.buckets import Bucket, Record

__all__ = ["BLOCK", "IsCoded", "block_fp8", "coded", "encoded_bucket", "encoded_records", "is_coded_record"]

IsCoded = Callable[[str, tuple[int, ...]], bool]
BLOCK = 128
"""Rows and columns of a block."""
# what DeepSeek-V3's own checkpoints, and transformers' converter, leave as it is, by any of its usual names
_KEPT = re.compile(
    r"(^|\.)(lm_head|output|score|classifier|\w*embed\w*|wte|wpe|\w*norm\w*|gate|router)\.weight$"
)


def coded(codes: str | IsCoded | None) -> IsCoded | None:
    """Which outside tensors are sent as codes: what ``codes=`` means."""
    if codes is None or callable(codes):
        return codes
    if codes != "fp8":
        raise ValueError(f"stream: codes must be 'fp8', a function or None, got {codes!r}.")
    return lambda name, shape: len(shape) == 2 and name.endswith(".weight") and not _KEPT.search(name)


def block_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight of two dims; the bits that FP8 training computes with."""
    return encode_matrices(weight)


def encoded_records(record: Record, is_coded: IsCoded) -> list[Record]:
    """What a tensor is sent as: itself, or codes and scales; offsets are left at 0."""
    if not is_coded_record(record, is_coded):
        return [record]
    rows, columns = record.shape
    scales = (-(-rows // BLOCK), -(-columns // BLOCK))
    return [
        Record(record.name, torch.float8_e4m3fn, record.shape, 0),
        Record(f"{record.name}_scale_inv", torch.float32, scales, 0),
    ]


def is_coded_record(record: Record, is_coded: IsCoded) -> bool:
    wanted = is_coded(record.name, record.shape)
    if wanted and (
        len(record.shape) != 2 or not record.dtype.is_floating_point or record.dtype.itemsize == 1
    ):
        raise ValueError(
            f"{record.name}: codes need a matrix of floating-point numbers, this is {record.dtype} of shape "
            f"{record.shape}"
        )
    return wanted


def encoded_bucket(bucket: Bucket, is_coded: IsCoded) -> Bucket:
    """A new bucket with codes in place of the tensors that are coded; neighbours of one width at a time."""
    records: list[Record] = []
    end = 0
    for record in bucket.records:
        for made in encoded_records(record, is_coded):
            records.append(Record(made.name, made.dtype, made.shape, end))
            end += align_up(made.nbytes, ALIGN_BYTES)
    source = bucket.data
    data = torch.empty(end, dtype=torch.uint8, device=source.device)
    places = iter(records)
    for run in _runs(bucket.records, is_coded):
        if not is_coded_record(run[0], is_coded):
            next(places).of(data).copy_(run[0].of(source))
            continue
        rows = sum(record.shape[0] for record in run)
        first = Record(run[0].name, run[0].dtype, (rows, run[0].shape[1]), run[0].offset)
        codes, scales = block_fp8(first.of(source))
        row = band = 0
        for record in run:
            height, bands = record.shape[0], -(-record.shape[0] // BLOCK)
            next(places).of(data).copy_(codes[row : row + height])
            next(places).of(data).copy_(scales[band : band + bands])
            row, band = row + height, band + bands
    return Bucket(bucket.label, data, records)


def _runs(records: tuple[Record, ...], is_coded: IsCoded) -> list[list[Record]]:
    """Coded tensors that follow each other without a gap, as wide as each other, in whole blocks: experts."""
    runs: list[list[Record]] = []
    for record in records:
        last = runs[-1][-1] if runs else None
        joins = (
            last is not None
            and is_coded_record(record, is_coded)
            and is_coded_record(last, is_coded)
            and (record.dtype, record.shape[1:]) == (last.dtype, last.shape[1:])
            and record.offset == last.offset + last.nbytes
            and last.shape[0] % BLOCK == 0
        )
        if joins:
            runs[-1].append(record)
        else:
            runs.append([record])
    return runs
