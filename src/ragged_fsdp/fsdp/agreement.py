"""One comparison per ``fully_shard`` call: the ranks of its mesh go on together or raise together."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ragged_fsdp.collectives import explain_failure, same_on_all_ranks
from ragged_fsdp.dtensor.differences import first_difference
from ragged_fsdp.fsdp.mesh import ParallelMesh

__all__ = ["Agreement"]

logger = logging.getLogger("ragged_fsdp")
_MOST_CHARACTERS = 2000  # of an error that is told; some print a whole module


class Agreement:
    """Around all of a call that may fail before the ranks have compared what they are about to do.

    An exception that leaves the block before :meth:`reach` takes the place of this rank's words in the
    comparison, in which the other ranks wait: they raise an error that names this rank. Where every rank
    fails each raises its own exception, as it would alone.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        self._is_open = True

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if not self._is_open or not isinstance(error, Exception):  # an interrupt waits for nobody
            return
        notes = getattr(error, "__notes__", ())
        failure = " ".join([f"{type(error).__name__}: {error}", *notes])[:_MOST_CHARACTERS]
        if max(self.mesh.shard_size, self.mesh.replicate_size) > 1:  # seen even if no other rank ever comes
            logger.warning("fully_shard failed on rank %d, telling the others: %s", dist.get_rank(), failure)
        try:
            self._compare(self.mesh, "", "", failure)
        except Exception as other:  # this rank's own error is the one to see
            error.add_note(f"ragged_fsdp: the other ranks could not be told: {other}")

    def reach(self, said: Sequence[tuple[ParallelMesh, str]], name: str) -> None:
        """Raise on every rank, naming the first difference or failure, unless all ranks say the same.

        ``said`` has a text for each mesh. This call's own is first: all its ranks hear of a difference or a
        failure there, and none goes on to the next. Where there are others it is also the last, so that all
        its ranks hear what some of them heard in a mesh of fewer ranks.
        """
        self._is_open = False
        (own, text), *others = said
        heard = self._compare(own, name, text)
        if heard is None:
            for mesh, text in others:
                heard = self._compare(mesh, name, text, heard=heard)
        if heard is not None:
            raise heard

    def _compare(
        self,
        mesh: ParallelMesh,
        name: str,
        text: str,
        failure: str | None = None,
        heard: Exception | None = None,
    ) -> Exception | None:
        """What all ranks of ``mesh`` should raise, if anything; ``heard`` is what this rank knows of already.

        A rank that learns of a difference in one process group still takes part in the comparison of the
        next, and passes it on: with replicas not all ranks are in the group that differs.
        """
        for group in (mesh.shard_group, mesh.replicate_group):
            if group is None:
                continue
            words = str(heard or failure or text)
            digest = hashlib.sha256(words.encode()).digest()
            with explain_failure("comparison of the plans", name, group):
                if same_on_all_ranks(int.from_bytes(digest[:8], "big") >> 2, group, self.device):
                    continue
                said: list[Any] = [None] * group.size()
                dist.all_gather_object(said, (heard, failure, text), group=group)
            heard = _what_to_raise(said, dist.get_process_group_ranks(group))
        return heard


def _what_to_raise(
    said: Sequence[tuple[Exception | None, str | None, str]], ranks: Sequence[int]
) -> Exception:
    for heard, _, _ in said:
        if heard is not None:
            return heard
    for rank, (_, failure, _) in zip(ranks, said):
        if failure is not None:
            return RuntimeError(f"fully_shard: nothing was changed, because rank {rank} raised {failure}")
    difference = first_difference([text.splitlines() for _, _, text in said], ranks)
    return ValueError(f"fully_shard: the ranks disagree; {difference}.")
