"""``RAGGED_FSDP_DEBUG=1``: find ranks that launch different collectives before they hang or mix data.

Before each collective of a group its ranks compare a running hash of everything they launched so far on
that process group, with one 16-byte all-reduce. The first difference raises on every rank and names the
first rank that differs, with what each was about to do. Storage is filled with NaN bytes
when it is released and when it is allocated (:mod:`ragged_fsdp.dbuffer.storage`). Gathered weights belong to
the stream that waited for them: use and release on another one raise.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ragged_fsdp.collectives import same_on_all_ranks

if TYPE_CHECKING:
    from ragged_fsdp.fsdp.param_group import ParamGroup

__all__ = ["OrderCheck", "StreamOwners"]


class OrderCheck:
    """The collectives launched so far on each process group."""

    def __init__(self) -> None:
        self._history: dict[Any, tuple[int, int]] = {}

    def note(self, kind: str, group: ParamGroup) -> None:
        """Compare ``kind`` of ``group`` with what the other ranks are about to launch."""
        pg = group.mesh.replicate_group if kind == "all_reduce" else group.mesh.shard_group
        if pg is None or pg.size() == 1:
            return
        count, past = self._history.get(pg, (0, 0))
        now = f"collective {count} on this process group: {kind} of group '{group.label}'"
        value = int.from_bytes(hashlib.sha256(f"{past} {now}".encode()).digest()[:8], "big") >> 2
        self._history[pg] = (count + 1, value)
        if same_on_all_ranks(value, pg, group.device):
            return
        texts: list[str] = [""] * pg.size()
        dist.all_gather_object(texts, now, group=pg)
        ranks = dist.get_process_group_ranks(pg)
        odd = next((i for i, text in enumerate(texts) if text != texts[0]), 0)
        raise RuntimeError(
            "the ranks launch different collectives: "
            f"rank {ranks[0]}: {texts[0]}; rank {ranks[odd]}: {texts[odd]}."
        )


class StreamOwners:
    """Which stream the gathered weights of each group belong to: the one that waited for them last."""

    def __init__(self, current_stream: Callable[[], Any]) -> None:
        self._current_stream = current_stream
        self._owner: weakref.WeakKeyDictionary[ParamGroup, Any] = weakref.WeakKeyDictionary()

    def hand_over(self, group: ParamGroup) -> None:
        """To the current stream, which has waited for the last one."""
        self._owner[group] = self._current_stream()

    def check(self, group: ParamGroup, done: str) -> None:
        """Raise unless the weights belong to the current stream."""
        now = self._current_stream()
        owner = self._owner.get(group, now)
        if owner != now:
            raise RuntimeError(
                f"the weights of group '{group.label}' were waited for on stream {owner} and are {done} on "
                f"stream {now}. Let the second wait for the first, then call unshard() on it."
            )
