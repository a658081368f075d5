"""Weights in and out of a sharded model: :func:`load` and :func:`save` files, :func:`stream` to inference."""

from ragged_fsdp.weights.buckets import Bucket, Delta, Record
from ragged_fsdp.weights.codes import block_fp8
from ragged_fsdp.weights.loading import LoadReport, load
from ragged_fsdp.weights.names import Stored
from ragged_fsdp.weights.pieces import hand_over, take_over
from ragged_fsdp.weights.receivers import (
    open_shared,
    receive,
    send,
    serve_checkpoint_engine,
    sglang_bucket,
    share,
    vllm_source,
)
from ragged_fsdp.weights.saving import save
from ragged_fsdp.weights.streaming import Stream, stream

__all__ = [
    "Bucket",
    "Delta",
    "LoadReport",
    "Record",
    "Stored",
    "Stream",
    "block_fp8",
    "hand_over",
    "load",
    "open_shared",
    "receive",
    "save",
    "send",
    "serve_checkpoint_engine",
    "sglang_bucket",
    "share",
    "stream",
    "take_over",
    "vllm_source",
]
