"""A side that was left is tried again, more and more rarely."""

from itertools import pairwise

from prfaas.scheduler.left_sides import MAX_RETRY_AFTER_S, RETRY_AFTER_S, LeftSides


def test_a_side_is_left_by_lengths_alike_and_taken_again_by_them():
    sides = LeftSides()
    sides.left(600, 0.0)
    assert 1000 in sides
    assert 2000 not in sides
    sides.stayed(700)
    assert 600 not in sides
    assert not sides.is_due(600, 1e9)


def test_it_is_due_a_while_after_it_was_left_and_not_later_for_prompts_between():
    sides = LeftSides()
    for second in range(int(RETRY_AFTER_S)):
        sides.left(600, float(second))
        assert not sides.is_due(600, float(second))
    assert sides.is_due(600, RETRY_AFTER_S)


def test_every_try_that_changes_nothing_doubles_the_wait_up_to_a_limit():
    sides, now_s, waits = LeftSides(), 0.0, []
    sides.left(600, now_s)
    for _ in range(8):
        before_s = now_s
        while not sides.is_due(600, now_s):
            now_s += 1.0
        waits.append(now_s - before_s)
        sides.tried(600, now_s)
    assert waits[0] == RETRY_AFTER_S
    assert all(later == min(2 * wait, MAX_RETRY_AFTER_S) for wait, later in pairwise(waits))
    assert 600 in sides
