"""What came from a moment on, whatever had to be forgotten."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.arrivals import MAX_ARRIVALS, Arrival, Arrivals, Stretch

STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9)), max_size=40)


def played(steps: list[tuple[int, int, int]]) -> tuple[Arrivals, list[Arrival]]:
    kept, told, last = Arrivals(), [], Arrival(0.0, 0, 0)
    for seconds, ours, others in steps:
        last = Arrival(
            last.at_s + seconds, last.num_bytes + ours, last.num_link_bytes + ours + others
        )
        kept.add(last)
        told.append(last)
    return kept, told


@given(steps=STEPS, at_s=st.integers(-1, 130))
def test_what_came_behind_a_moment_is_counted_from_its_first_word(steps, at_s):
    kept, told = played(steps)
    assert bool(kept) == bool(told)
    behind = [arrival for arrival in told if arrival.at_s > at_s]
    if not behind:
        assert kept.behind(at_s) == Stretch(0, 0, 0, 0.0)
        return
    first, last = behind[0], behind[-1]
    assert kept.behind(at_s) == Stretch(
        len(behind),
        last.num_bytes - first.num_bytes,
        last.num_link_bytes - first.num_link_bytes,
        last.at_s - first.at_s,
    )


def test_very_many_words_are_thinned_out_and_their_rate_stays_right():
    num_words = 40 * MAX_ARRIVALS
    kept, told = played([(1, 10, 5)] * num_words)
    assert len(kept._kept) <= MAX_ARRIVALS
    whole = kept.behind(0.0)
    assert whole.seconds == num_words - 1
    assert (whole.num_bytes, whole.num_link_bytes) == (10 * whole.seconds, 15 * whole.seconds)
    late = kept.behind(told[-1].at_s * 0.75)
    assert 0.2 * num_words < late.seconds <= 0.25 * num_words
    assert (late.num_bytes, late.num_link_bytes) == (10 * late.seconds, 15 * late.seconds)
    assert late.num_words >= MAX_ARRIVALS / 8 - 1
