"""A line through prefills of all lengths, and a careful one where there is only one length."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.pace import (
    LONG_TOKENS,
    NUM_PREFILLS,
    Prefill,
    mean_tokens_per_s,
    pace_of,
    with_prefill,
)

PREFILLS = st.lists(
    st.builds(Prefill, st.integers(1, 10**6), st.floats(1e-4, 1e4)), min_size=1, max_size=12
)


@given(
    fixed_s=st.floats(0, 10),
    token_s=st.floats(1e-6, 1e-2),
    lengths=st.lists(st.integers(1, 10**6), min_size=2, max_size=NUM_PREFILLS),
)
def test_prefills_on_a_line_give_that_line(fixed_s, token_s, lengths):
    seen = [Prefill(length, fixed_s + token_s * length) for length in lengths]
    pace = pace_of(seen)
    if max(lengths) >= 2 * min(lengths):
        for length in lengths:
            assert pace.seconds(length) == pytest.approx(fixed_s + token_s * length, rel=1e-4)
        assert pace.fixed_s == pytest.approx(fixed_s, rel=1e-4, abs=1e-4 * token_s * max(lengths))


@given(PREFILLS)
def test_no_fixed_part_is_below_zero_and_no_slope_is_not_above_it(seen):
    pace = pace_of(seen)
    assert 0 <= pace.fixed_s < math.inf
    assert 0 < pace.token_s < math.inf
    rate = mean_tokens_per_s(seen)
    rates = [prefill.num_tokens / prefill.seconds for prefill in seen]
    assert min(rates) * (1 - 1e-9) <= rate <= max(rates) * (1 + 1e-9)


def test_a_short_prefill_says_little_of_long_ones():
    pace = pace_of([Prefill(600, 0.24), Prefill(610, 0.24)])
    assert pace.seconds(600) == pytest.approx(0.24, rel=1e-3)
    assert pace.seconds(30_000) < 5 * 0.24
    assert pace_of([Prefill(LONG_TOKENS, 0.8)]) == pytest.approx((0.0, 0.8 / LONG_TOKENS))


@pytest.mark.parametrize("lengths", [(100, 50_000), (50_000, 100)])
def test_longer_prefills_that_were_no_slower_give_a_slope_all_the_same(lengths):
    pace = pace_of([Prefill(lengths[0], 1.0), Prefill(lengths[1], 1.0)])
    assert pace.token_s > 0


def test_many_of_one_length_do_not_make_us_forget_another():
    prefills: tuple[Prefill, ...] = (Prefill(30_000, 1.0),)
    for index in range(50):
        prefills = with_prefill(prefills, Prefill(600, 0.2 + index))
    assert len(prefills) == NUM_PREFILLS
    assert prefills[-1] == (30_000, 1.0)
    assert [each.seconds for each in prefills[:-1]] == [0.2 + i for i in range(49, 42, -1)]


def test_one_that_took_less_than_half_of_what_was_expected_stands_for_its_length():
    slow = (Prefill(30_000, 20.0), Prefill(600, 0.3), Prefill(29_000, 20.0))
    assert with_prefill(slow, Prefill(30_000, 9.0)) == (Prefill(30_000, 9.0), Prefill(600, 0.3))
    assert with_prefill(slow, Prefill(30_000, 11.0)) == (Prefill(30_000, 11.0), *slow)


def test_without_a_prefill_there_is_no_pace():
    for function in (pace_of, mean_tokens_per_s):
        with pytest.raises(ValueError, match="no prefill"):
            function([])
