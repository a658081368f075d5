"""A peer's state that has arrived, and one that has not."""

from types import SimpleNamespace

import pytest

from ragged_fsdp.replicas import HealingError
from ragged_fsdp.replicas.copies import MOST_FAILURES, Copies
from ragged_fsdp.replicas.transport import Received


def _copies() -> tuple[Copies, list[object]]:
    loaded: list[object] = []
    return Copies(SimpleNamespace(load=lambda header, runs: loaded.append(header))), loaded


def _fail(copies: Copies, cause: Exception) -> None:
    failure = HealingError("it did not come")
    failure.__cause__ = cause
    copies.failed(failure)
    copies.raise_if_hopeless()


def test_a_copy_that_failed_is_tried_again_unless_it_cannot_succeed() -> None:
    """The giver may have died; a state that does not fit will not fit next time either."""
    copies, _ = _copies()
    for _ in range(MOST_FAILURES - 1):
        _fail(copies, ConnectionError("the peer ended the connection"))
        copies.raise_if_hopeless()  # it has been judged
    with pytest.raises(HealingError):
        _fail(copies, TimeoutError("timed out"))
    with pytest.raises(HealingError):
        _fail(_copies()[0], ValueError("another shape"))


def test_failures_before_a_copy_that_succeeded_do_not_count() -> None:
    copies, loaded = _copies()
    for _ in range(MOST_FAILURES):
        _fail(copies, ConnectionError())
        copies.keep(Received({"step": 3}, [], 0, 0.0))
        copies.take_over()
    assert len(loaded) == MOST_FAILURES


def test_what_was_copied_is_told_only_of_a_copy_that_was_taken_over() -> None:
    """One that is dropped, since another rank has none, leaves nothing behind: neither figures nor memory."""
    copies, loaded = _copies()
    copies.keep(Received({}, [], 10, 1.0))
    assert copies.arrived and not copies.healed
    copies.drop()
    assert not copies.arrived and not loaded and (copies.nbytes, copies.seconds) == (0, 0.0)
    copies.keep(Received({"step": 3}, [], 20, 2.0))
    assert copies.take_over() == {"step": 3} and loaded == [{"step": 3}]
    assert copies.healed and not copies.arrived and (copies.nbytes, copies.seconds) == (20, 2.0)
    copies.begin()
    assert not copies.healed and (copies.nbytes, copies.seconds) == (0, 0.0)
