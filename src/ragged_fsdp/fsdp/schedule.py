"""Streams, events and the order of groups: what the groups below one root share.

Everything is allocated and freed on the compute stream (the stream current when hooks run); the other
streams wait for it before they touch new memory, and it waits for their events before memory goes back.
So the allocator never sees a cross-stream lifetime and ``record_stream`` is not needed.
See docs/schedule.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ragged_fsdp.dbuffer import FlatStorage, debug_enabled
from ragged_fsdp.fsdp.arena import Arena
from ragged_fsdp.fsdp.debug import OrderCheck
from ragged_fsdp.fsdp.watch import CollectiveWatch
