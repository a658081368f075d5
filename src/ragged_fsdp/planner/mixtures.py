"""Which kinds the programme counts, which it chains, and which a proof may leave out."""

from collections.abc import Iterator

from ragged_fsdp.planner.mixing import Mix
from ragged_fsdp.planner.problem import Kind, Problem

__all__ = ["full_mixes", "relaxed_mix"]

_EXACT_WORK = 6_000_000
_MIX_WORK = 12_000_000
_PIECES = 4


def full_mixes(problem: Problem, shard: int) -> Iterator[Mix]:
    """Programmes over all tensors, best first; a single one where it is exact."""
    counts = problem.counts
    exact = Mix(tuple(counts.items()))
    if exact.work <= _EXACT_WORK:
        yield exact
        return
    by_count = sorted(counts, key=lambda kind: (-counts[kind], -kind[0], -kind[1]))
    for main in (2, 3, 1):
        counted = tuple((kind, counts[kind]) for kind in by_count[:main])
        chain = tuple(
            kind
            for kind in sorted(by_count[main:], key=lambda k: (-k[1], -k[0]))
            for _ in range(counts[kind])
        )
        for band in (None, 64, 16):
            mix = Mix(counted, chain, band)
            if mix.work <= _MIX_WORK:
                yield mix
                break


def relaxed_mix(problem: Problem, shard: int) -> Mix | None:
    """An exact programme over the tensors that matter most: what does not fit without the rest never fits."""
    counts = problem.counts
    weight = sorted(counts, key=lambda kind: (-kind[0] * counts[kind], -kind[1], -kind[0]))
    chosen: list[tuple[Kind, int]] = []
    for kind in weight:
        grown = Mix(tuple([*chosen, (kind, counts[kind])]))
        if grown.work <= _MIX_WORK:
            chosen.append((kind, counts[kind]))
    return Mix(tuple(chosen)) if chosen else None
