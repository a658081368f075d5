"""Which kinds the programme counts, which it chains, and which a proof may leave out."""

from collections.abc import Iterator

from ragged_fsdp.planner.mixing import Mix, Piece
from ragged_fsdp.planner.problem import Kind, Problem, align_up

__all__ = ["full_mixes", "joined_pieces", "relaxed_mix"]

_MOST_BYTES = 1 << 27
_SMALL = 16
_MOST_COUNTED = 6
_MOST_RELAXED = 24
_BANDS = (None, 64, 16)
_CHAIN_LENGTHS = (64, 32, 16, 8, 4, 1)


def full_mixes(problem: Problem, work: int) -> Iterator[Mix]:
    """Programmes over all tensors, best first; a single one where it is exact."""
    counts = problem.counts
    exact = Mix(tuple(counts.items()))
    if len(counts) <= _MOST_RELAXED and exact.work <= work:
        yield exact
        return
    free = [kind for kind in counts if problem.align % kind[1] == 0]
    coarse = sorted(
        (kind for kind in counts if kind not in free), key=lambda k: (-counts[k], -k[0] * counts[k], k)
    )
    for limit in (work, 2 * work):  # groups of thousands of tensors get fewer, dearer runs
        for counted in range(min(len(coarse), _MOST_COUNTED), 0, -1):
            mix = _mix(problem, coarse[:counted], coarse[counted:], free, limit)
            if mix is not None:
                yield mix
                return


def _mix(problem: Problem, counted: list[Kind], odd: list[Kind], free: list[Kind], work: int) -> Mix | None:
    """The widest affordable programme that counts ``counted`` and chains the rest, None if none is."""
    counts = problem.counts
    bars = tuple((kind, counts[kind]) for kind in counted)
    links = [
        Piece(kind, (kind,))
        for kind in sorted(odd, key=lambda k: (-k[1], -k[0]))
        for _ in range(counts[kind])
    ]
    for length in _CHAIN_LENGTHS:
        chain = (*links, *joined_pieces(problem, free, length))
        for band in _BANDS:
            mix = Mix(bars, chain, band)
            if mix.work <= work and mix.choice_bytes <= _MOST_BYTES:
                return mix
    return None


def joined_pieces(problem: Problem, free: list[Kind], most: int) -> list[Piece]:
    """Tensors that may be cut anywhere, joined to at most ``most`` pieces, longest first."""
    tensors = [kind for kind in free for _ in range(problem.counts[kind])]
    tensors.sort(key=lambda kind: (-kind[0], kind[1]))
    groups: list[list[Kind]] = [[kind] for kind in tensors[:most]]
    for place, kind in enumerate(tensors[most:]):
        groups[-1 - place % len(groups)].append(kind)
    pieces = []
    for group in groups:
        length = sum(align_up(numel, problem.align) for numel, _ in group)
        pieces.append(Piece((length, 1), tuple(group)))
    return sorted(pieces, key=lambda piece: (-piece.kind[0], piece.parts))


def relaxed_mix(problem: Problem, shard: int, work: int) -> Mix | None:
    """An exact programme over the tensors that matter most: what does not fit without the rest never fits.

    Tensors far smaller than a shard change little and multiply the states, so they are left out first.
    """
    counts = problem.counts
    weight = sorted(counts, key=lambda kind: (-kind[0] * counts[kind], -kind[1], -kind[0]))
    chosen: list[tuple[Kind, int]] = []
    for kind in weight[:_MOST_RELAXED]:
        grown = Mix((*chosen, (kind, counts[kind])))
        small = kind[0] * _SMALL < shard
        if grown.work <= (work // 8 if small else work):
            chosen.append((kind, counts[kind]))
    return Mix(tuple(chosen)) if chosen else None
