"""How ranks find out that they are about to do different things: every one of them raises, and none waits.

Ranks that agree pay for one all-reduce of 16 bytes per process group. Only where their hashes differ do they
gather what each had to say::

    compare     same text everywhere    None, on every rank
                another text on one     a Disagreement, the same on every rank
                a failure on one        a Disagreement that names the rank and its error

:func:`done_alike` raises what a comparison of this kind finds. :func:`together` is for ranks that must hear
what each of them made of a task, not just that it was the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ragged_fsdp.torch_internals import unset_fake_temporarily

__all__ = ["Disagreement", "compare", "done_alike", "largest", "together"]

T = TypeVar("T")


@dataclass(frozen=True)
class Disagreement:
    """What every rank learns of ranks that do not say the same."""

    failures: tuple[tuple[int, str], ...]
    """Global ranks that could not say anything, each with its error."""
    difference: str
    """The first line in which two ranks differ; of ranks that failed nothing is compared."""


def compare(
    text: str,
    groups: Iterable[dist.ProcessGroup | None],
    device: torch.device,
    *,
    failure: str | None = None,
    known: Disagreement | None = None,
    history: str = "",
) -> Disagreement | None:
    """What the ranks of all ``groups`` should raise, if anything; None if all of them say ``text``.

    A rank that learns of a difference in one group takes part in the comparison of the next and passes it on:
    the ranks of a mesh are not all in the group that differs.

    Args:
        text: what this rank is about to do, one statement a line.
        groups: process groups of this rank, in an order that is the same on all; None is skipped.
        device: where a tensor of the groups' backend must lie.
        failure: takes the place of the text on a rank that cannot go on.
        known: what this rank has learnt in an earlier comparison and passes on.
        history: must be the same on all ranks too, but is not told.
    """
    heard = known
    for group in groups:
        if group is None or group.size() == 1:
            continue
        if _same(f"{history}\n{heard or failure or text}", group, device):
            continue
        said: list[Any] = [None] * group.size()
        dist.all_gather_object(said, (heard, failure, text), group=group)
        heard = _disagreement(said, dist.get_process_group_ranks(group))
    return heard


def _same(text: str, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks of ``group`` passed the same text: one 16-byte all-reduce."""
    value = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2
    high, low = largest([value, -value], group, device)
    return high == -low


def largest(values: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """The largest of each value over the ranks of ``group``, with one all-reduce."""
    with unset_fake_temporarily():  # memory is estimated with tensors that have no values
        found = torch.tensor(values, dtype=torch.int64, device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        return found.tolist()


def _disagreement(
    said: Sequence[tuple[Disagreement | None, str | None, str]], ranks: Sequence[int]
) -> Disagreement:
    known = next((heard for heard, _, _ in said if heard is not None), None)
    if known is not None:
        return known
    failures = tuple((rank, failure) for rank, (_, failure, _) in zip(ranks, said) if failure is not None)
    texts = [(rank, text.splitlines()) for rank, (_, failure, text) in zip(ranks, said) if failure is None]
    return Disagreement(failures, _first_difference(texts))


def _first_difference(texts: Sequence[tuple[int, Sequence[str]]]) -> str:
    for rank, lines in texts[1:]:
        first, expected = texts[0]
        for ours, theirs in zip_longest(expected, lines, fillvalue="nothing"):
            if ours != theirs:
                return f"rank {first} has '{ours}', rank {rank} has '{theirs}'"
    return "no line differs"


def done_alike(
    verb: str,
    action: Callable[[], T],
    describe: Callable[[T], str],
    groups: Iterable[dist.ProcessGroup | None],
    device: torch.device,
    *,
    refusal: type[ValueError] | None = None,
) -> T:
    """What ``action`` returned on this rank, once it has succeeded on all and is described alike.

    A rank whose action failed raises what it raised; the others a ``ValueError`` that names it, or what
    differs, and says with ``verb`` what the ranks were about to do. With a class for ``refusal`` that is what
    they raise, and only errors of it are told: any other ends its rank at once, with its own traceback.
    """
    result: Any = None
    text, failure, told = "", None, None
    shared: type[Exception] = refusal or Exception
    try:
        result = action()
        text = describe(result)
    except shared as error:
        failure, told = error, str(error) if refusal else f"{type(error).__name__}: {error}"
    found = compare(text, groups, device, failure=told)
    if failure is not None:
        raise failure
    if found is not None and found.failures:
        rank, told = found.failures[0]
        raise (refusal or ValueError)(f"rank {rank} cannot {verb}: {told}")
    if found is not None:
        raise (refusal or ValueError)(f"the ranks do not {verb} the same: {found.difference}")
    return result


def together(action: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """What ``action`` returns on each rank; what it raises on one is raised on every one, and none waits."""
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    told = f"{type(failure).__name__}: {failure}" if failure is not None else None
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (result, told), group=group)
    if failure is not None:
        raise failure
    for rank, (_, text) in zip(dist.get_process_group_ranks(group), said):
        if text is not None:
            raise RuntimeError(f"rank {rank} failed: {text}")
    return [result for result, _ in said]
