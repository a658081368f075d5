"""The states of the runtime are two tables: each row is a move that is made, and any other raises."""

from itertools import product

import pytest

from fsdp_inside import PHASE_MOVES, PHASES, RESIDENCE_MOVES, RESIDENCES, phase_after, residence_after


@pytest.mark.parametrize(("start", "end"), list(product(PHASES, PHASES)))
def test_a_phase_is_entered_from_where_the_table_says(start: str, end: str) -> None:
    if start == end or (start, end) in PHASE_MOVES:
        assert phase_after(start, end) == end
        return
    with pytest.raises(RuntimeError, match=f"no transition from {start} to {end}; this is a bug"):
        phase_after(start, end)


@pytest.mark.parametrize(("start", "end"), list(product(RESIDENCES, RESIDENCES)))
def test_a_residence_is_entered_from_where_the_table_says(start: str, end: str) -> None:
    if (start, end) in RESIDENCE_MOVES:
        assert residence_after(start, end) == end
        return
    with pytest.raises(RuntimeError, match=f"no transition from {start} to {end}; this is a bug"):
        residence_after(start, end)


def test_every_row_says_when() -> None:
    assert all(when for when in (*PHASE_MOVES.values(), *RESIDENCE_MOVES.values()))
