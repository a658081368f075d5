"""What ranks tell each other of an average, in stores whose hosts may die or stand still."""

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from ragged_fsdp.replicas.attempts import ASK_S, Attempts, Told, tell


@pytest.fixture
def attempts() -> Iterator[Callable[..., Attempts]]:
    """Makes those of a rank, of one replica and in one meeting unless it says otherwise."""
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in "ab"]
    meeting = dist.HashStore()

    def make(replica: int = 0, met: object = meeting) -> Attempts:
        made = Attempts(stores[replica], SimpleNamespace(store=met))
        made.begin()
        return made

    yield make


def _hears(one: Attempts) -> bool:
    one.given_up()
    time.sleep(4 * ASK_S)
    return one.given_up()


def _gone(*_: object) -> None:
    raise dist.DistNetworkError("the host of the store died")


def test_who_gives_an_average_up_tells_its_replica_and_its_meeting(attempts: Callable) -> None:
    """One may see that a peer is gone and another not."""
    sees, same_replica, same_meeting = attempts(), attempts(met=None), attempts(replica=1)
    stranger = attempts(replica=1, met=dist.HashStore())
    for one in (sees, same_replica, same_meeting, stranger):
        assert not _hears(one)
    sees.give_up()
    assert _hears(same_replica) and _hears(same_meeting) and not _hears(stranger)
    same_replica.begin()
    assert not _hears(same_replica)  # nobody has given up the next one


def test_a_store_that_is_gone_is_an_average_given_up(attempts: Callable) -> None:
    """Its host died, and a replica with it."""
    one = attempts(met=SimpleNamespace(check=_gone, set=_gone))
    assert _hears(one)
    one.give_up()


def test_a_store_that_stands_still_holds_nobody(attempts: Callable) -> None:
    """Nor does what another one says go unheard."""
    stuck = SimpleNamespace(check=lambda _: time.sleep(3), set=lambda *_: time.sleep(3))
    one, began = attempts(replica=1, met=stuck), time.monotonic()
    assert not _hears(one)
    one.give_up()
    assert _hears(one), "this rank has told its own replica"
    own_is_stuck, meeting = Attempts(stuck, SimpleNamespace(store=(met := dist.HashStore()))), met
    assert not _hears(own_is_stuck)
    tell(meeting, "given up")
    assert _hears(own_is_stuck)
    assert time.monotonic() - began < 3


def test_nothing_is_asked_for_ever() -> None:
    """A thread for each average that took long would be left behind."""
    asked: list[object] = []
    told = Told(SimpleNamespace(check=asked.append), "key")
    time.sleep(2 * ASK_S)
    told.rest()
    time.sleep(2 * ASK_S)
    count = len(asked)
    time.sleep(3 * ASK_S)
    assert 0 < count == len(asked) and told.value is None and not told.gone
