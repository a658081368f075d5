"""One comparison per ``fully_shard`` call: the ranks of its mesh go on together or raise together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ragged_fsdp.agreement import Disagreement, compare
from ragged_fsdp.collectives import explain_failure
from ragged_fsdp.fsdp.parts.mesh import ParallelMesh

__all__ = ["Agreement"]

logger = logging.getLogger("ragged_fsdp")
_MOST_CHARACTERS = 2000  # of an error that is told; some print a whole module


class Agreement:
    """Around all of a call that may fail before the ranks have compared what they are about to do.

    An exception that leaves the block before :meth:`reach` takes the place of this rank's statement in the
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
            self._compare(self.mesh, "", "", failure=failure)
        except Exception as other:  # this rank's own error is the one to see
            error.add_note(f"ragged_fsdp: the other ranks could not be told: {other}")

    def reach(self, statements: Sequence[tuple[ParallelMesh, str]], name: str) -> None:
        """Raise on every rank, naming the first difference or failure, unless all ranks state the same.

        There is a text for each mesh. This call's own is first: all its ranks learn of a difference or a
        failure there, and none goes on to the next. Where there are others it is also the last, so that all
        its ranks learn what some of them learnt in a mesh of fewer ranks.
        """
        self._is_open = False
        (own, text), *others = statements
        found = self._compare(own, name, text)
        if found is None:
            for mesh, text in others:
                found = self._compare(mesh, name, text, known=found)
        if found is None:
            return
        if found.failures:
            rank, failure = found.failures[0]
            raise RuntimeError(f"fully_shard: nothing was changed, because rank {rank} raised {failure}")
        raise ValueError(f"fully_shard: the ranks disagree; {found.difference}.")

    def _compare(
        self,
        mesh: ParallelMesh,
        name: str,
        text: str,
        *,
        failure: str | None = None,
        known: Disagreement | None = None,
    ) -> Disagreement | None:
        groups = (mesh.shard_group, mesh.replicate_group)
        with explain_failure("comparison of the plans", name, mesh.shard_group):
            return compare(text, groups, self.device, failure=failure, known=known)
