"""The roll: who contributes to a step, and who is not like the others."""

import torch

from ragged_fsdp.replicas.roll import MOST_REPLICAS, Roll, Says, as_number, column


def _roll(*said: tuple[int, Says]) -> Roll:
    return Roll.of(sum((column(replica, says) for replica, says in said), column(0, Says(0, 0, 0)) * 0))


def test_all_say_the_same():
    says = Says(past=3, model=7, options=5)
    roll = _roll((4, says), (0, says), (MOST_REPLICAS - 1, says))
    assert roll.agree and roll.contributors == (0, 4, MOST_REPLICAS - 1) == tuple(roll.by)
    assert roll.kept == says


def test_the_larger_side_is_kept_and_of_equal_ones_that_with_the_lowest_number():
    one, other = Says(3, 7, 5), Says(9, 7, 5)
    even = _roll((1, one), (2, other))
    assert not even.agree and even.kept == one and even.by == [1]
    odd = _roll((1, one), (2, other), (3, other))
    assert odd.kept == other and odd.by == [2, 3] and odd.contributors == (1, 2, 3)


def test_a_number_that_is_there_twice_says_nothing():
    says = Says(3, 7, 5)
    roll = _roll((1, says), (2, says), (2, says))
    assert not roll.agree and roll.counts[2] == 2 and roll.by == [1] and roll.contributors == (1, 2)


def test_a_roll_without_anybody_has_nothing_to_keep():
    roll = _roll()
    assert roll.agree and roll.kept is None and roll.contributors == ()


def test_numbers_of_all_replicas_can_be_added():
    assert as_number("f" * 64) * MOST_REPLICAS < torch.iinfo(torch.int64).max
