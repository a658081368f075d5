"""Weights in and out of a sharded model: :func:`load` from files, :func:`stream` to inference."""

from ragged_fsdp.weights.loading import LoadReport, load
from ragged_fsdp.weights.names import Stored

__all__ = ["LoadReport", "Stored", "load"]
