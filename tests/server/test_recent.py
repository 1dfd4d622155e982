"""Quantiles and the balance of late are what their definitions say."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.server.recent import HALF_LIFE_S, Balance, RecentTimes


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0.01, 1))
def test_a_quantile_is_the_least_time_that_so_many_are_up_to(times_s, fraction):
    recent = RecentTimes()
    for time_s in times_s:
        recent.add(time_s)
    quantiles = recent.quantiles(fraction)
    assert quantiles is not None
    (found,) = quantiles
    needed = fraction * len(times_s)
    assert sum(each <= found for each in times_s) >= needed - 1e-9
    assert sum(each < found for each in times_s) < needed


def test_the_median_is_the_textbooks_lower_one_and_old_times_are_forgotten():
    recent = RecentTimes(num_kept=4)
    assert recent.quantiles(0.5) is None
    for time_s in (9.0, 9.0, 4.0, 1.0, 3.0, 2.0):
        recent.add(time_s)
    assert recent.quantiles(0.5) == (statistics.median_low([4.0, 1.0, 3.0, 2.0]),)


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=40))
def test_a_balance_weighs_each_event_by_its_age(steps):
    now_s = 0.0
    balance = Balance(lambda: now_s)
    events = []
    for pause_s, is_produced in steps:
        now_s += pause_s
        events.append((now_s, is_produced))
        (balance.produced if is_produced else balance.consumed)()
    weights = [(math.exp2(-(now_s - at_s) / HALF_LIFE_S), kind) for at_s, kind in events]
    produced = sum(weight for weight, kind in weights if kind)
    consumed = sum(weight for weight, kind in weights if not kind)
    if consumed:
        assert balance.ratio == pytest.approx(produced / consumed, rel=1e-6)
    else:
        assert balance.ratio is None
