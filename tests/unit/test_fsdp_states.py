"""The states of the runtime are two tables: each row is a move that is made, and any other raises.

And what streams wait for where several roots share a context.
"""

from itertools import product
from threading import Barrier, Thread

import pytest

import fsdp_inside
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


def test_roots_on_streams_of_their_own_wait_where_they_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = fsdp_inside.SharedContext(monkeypatch)
    shared.reduce()
    shared.computes_on("second")
    shared.finish()  # the first root will find nothing to wait for, and reads its gradients
    assert shared.waited_for("second") == ["reduce"]
    assert shared.waited_for("first") == ["reduce", "second"]  # it allocated what the second gave back
    shared.reduce()
    assert shared.waited_for("second") == ["reduce", "first"]  # which may still use what is lent now


def test_threads_do_not_record_each_other_s_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both record what they have launched before either lets the gather stream wait for it."""
    shared, both = fsdp_inside.SharedContext(monkeypatch), Barrier(2, timeout=30)
    recorded = fsdp_inside._Event.record

    def record(event: fsdp_inside._Event, stream: fsdp_inside._Stream) -> None:
        recorded(event, stream)
        both.wait()

    def launch(name: str) -> None:
        shared.computes_on(name)
        shared.on_gather_stream()

    monkeypatch.setattr(fsdp_inside._Event, "record", record)
    threads = [Thread(target=launch, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(shared.waited_for("gather")) == ["first", "second"]
