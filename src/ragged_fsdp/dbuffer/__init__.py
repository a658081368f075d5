"""DBuffer: a group of tensors as one distributed buffer. See docs/dbuffer.md."""

from ragged_fsdp.dbuffer.buffer import DBuffer
from ragged_fsdp.dbuffer.storage import FlatStorage, debug_enabled

__all__ = ["DBuffer", "FlatStorage", "debug_enabled"]
