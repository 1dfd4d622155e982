"""Verdicts on transfers that are played at a known pace."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.monitor import (
    GRACE_S,
    IDLE_FACTOR,
    MIN_STRETCH_S,
    TransferMonitor,
    TransferRates,
)

STALL_S = 2.0


def make(**changes: object) -> TransferMonitor:
    values: dict[str, object] = {
        "started_s": 100.0,
        "num_tokens": 1000,
        "tokens_done": 0,
        "num_kv_bytes": 10_000,
        "num_streamed_bytes": 10_000,
        "local_estimate_s": 4.0,
        "stall_timeout_s": STALL_S,
    }
    return TransferMonitor(**(values | changes))  # type: ignore[arg-type]


def feed(
    monitor: TransferMonitor, now_s: float, tokens: int, num_bytes: int, ahead: int = 0
) -> None:
    monitor.progressed(now_s=now_s, num_bytes=num_bytes, tokens_done=tokens, tokens_ahead=ahead)


def test_no_verified_frame_for_the_stall_timeout_is_stuck():
    monitor = make()
    assert monitor.verdict(101.99) == "wait"
    assert monitor.verdict(102.0) == "stuck"
    feed(monitor, 101.9, 0, 64)
    assert monitor.verdict(103.8) == "wait"
    assert monitor.verdict(103.9) == "stuck"


def test_a_peer_that_lives_but_moves_nothing_is_stuck_in_the_end():
    monitor = make(local_estimate_s=None)
    limit_s = 100.0 + IDLE_FACTOR * STALL_S
    now_s = 100.0
    while now_s < limit_s - 1:
        now_s += 1
        feed(monitor, now_s, 0, 0)
        assert monitor.verdict(now_s) == "wait"
    feed(monitor, limit_s, 0, 0)
    assert monitor.verdict(limit_s) == "stuck"


def test_a_waiting_room_that_empties_is_movement():
    monitor = make(local_estimate_s=None)
    for i in range(60):
        feed(monitor, 101.0 + i, 0, 0, ahead=60_000 - 1000 * i)
        assert monitor.verdict(101.0 + i) == "wait"


@pytest.mark.parametrize(
    ("tokens_per_s", "verdict"),
    [
        (1000.0, "wait"),
        (250.0, "wait"),
        (120.0, "wait"),
        (100.0, "slower_than_local"),
        (1.0, "slower_than_local"),
    ],
)
def test_the_peer_s_pace_is_judged_against_the_local_estimate(tokens_per_s, verdict):
    """Local 4 s allow 7 s to be left after the first 2.1 s."""
    monitor = make()
    now_s = 102.1
    done = min(1000, int(tokens_per_s * 2.1))
    feed(monitor, now_s, done, done * 10)
    assert monitor.verdict(now_s) == verdict


def test_nothing_is_judged_in_the_first_seconds():
    monitor = make(local_estimate_s=0.0)
    feed(monitor, 101.0, 1, 10)
    assert monitor.verdict(100.0 + GRACE_S - 0.01) == "wait"
    assert monitor.verdict(100.0 + GRACE_S) == "slower_than_local"


@pytest.mark.parametrize("estimate_s", [None, math.nan, math.inf, -1.0])
def test_without_a_local_estimate_only_silence_counts(estimate_s):
    monitor = make(local_estimate_s=estimate_s)
    feed(monitor, 110.0, 1, 10)
    assert monitor.verdict(110.0) == "wait"
    assert monitor.verdict(112.0) == "stuck"


def test_the_local_estimate_can_change_on_the_way():
    monitor = make(local_estimate_s=100.0)
    feed(monitor, 110.0, 100, 1000)
    assert monitor.verdict(110.0) == "wait"
    monitor.local_estimate_s = 1.0
    assert monitor.verdict(110.0) == "slower_than_local"


def test_tokens_ahead_of_ours_are_part_of_the_time_left():
    monitor = make(local_estimate_s=1000.0)
    feed(monitor, 100.0, 0, 0, ahead=3000)
    feed(monitor, 110.0, 0, 0, ahead=2000)
    assert monitor.time_left_s(110.0) == pytest.approx(30.0)
    feed(monitor, 130.0, 0, 0, ahead=0)
    feed(monitor, 135.0, 500, 5000)
    assert monitor.time_left_s(135.0) == pytest.approx(5.0)


def test_where_nothing_has_moved_as_much_time_is_expected_as_has_passed():
    monitor = make(local_estimate_s=4.0)
    feed(monitor, 106.9, 0, 0, ahead=0)
    assert monitor.time_left_s(106.9) == pytest.approx(6.9)
    assert monitor.verdict(106.9) == "wait"
    feed(monitor, 107.1, 0, 0, ahead=0)
    assert monitor.verdict(107.1) == "slower_than_local"


def test_the_peer_s_own_hit_is_not_work():
    monitor = make(num_tokens=1000, tokens_done=900)
    feed(monitor, 110.0, 950, 5000)
    assert monitor.time_left_s(110.0) == pytest.approx(10.0)


def test_a_link_that_lags_behind_the_peer_is_judged_by_its_own_pace():
    monitor = make()
    feed(monitor, 101.0, 1000, 0)
    for tenth in range(1, 31):
        feed(monitor, 101.0 + tenth / 10, 1000, 20 * tenth)  # 200 bytes a second
    assert monitor.time_left_s(104.0) == pytest.approx((10_000 - 600) / 200)
    assert monitor.verdict(104.0) == "slower_than_local"


def test_a_lag_is_judged_from_its_own_start_and_forgotten_when_caught_up():
    monitor = make()
    feed(monitor, 110.0, 1000, 0)
    feed(monitor, 111.9, 1000, 10)
    assert monitor.time_left_s(111.9) == 0.0
    assert monitor.time_left_s(112.0) == pytest.approx(9990 * 2.0 / 10)
    halfway = make()
    feed(halfway, 110.0, 500, 0)
    feed(halfway, 111.0, 500, 5000)
    feed(halfway, 120.0, 1000, 5000)
    feed(halfway, 120.5, 1000, 5010)
    assert halfway.time_left_s(121.9) == 0.0


def test_windows_that_come_at_the_end_do_not_look_like_a_slow_link():
    """Most of a short prompt's bytes are windows: sent last, at the link's speed."""
    monitor = make(num_streamed_bytes=1000, local_estimate_s=12.0)
    now_s = 100.0
    for step in range(1, 11):
        now_s = 100.0 + step
        feed(monitor, now_s, 100 * step, 100 * step)
        assert monitor.verdict(now_s) == "wait"
    assert monitor.time_left_s(now_s) == 0.0
    for step in range(1, 10):
        feed(monitor, now_s + step / 10, 1000, 1000 + 1000 * step)
        assert monitor.verdict(now_s + step / 10) == "wait"


def test_a_transfer_that_has_arrived_is_never_slow():
    monitor = make(local_estimate_s=0.0)
    feed(monitor, 150.0, 1000, 10_000)
    assert monitor.time_left_s(150.0) == 0.0
    assert monitor.verdict(150.0) == "wait"


def test_rates_leave_the_waiting_out():
    monitor = make()
    assert monitor.rates(101.0) == TransferRates(prefill_tokens_per_s=None, link_bytes_per_s=None)
    feed(monitor, 105.0, 0, 0, ahead=500)
    feed(monitor, 110.0, 0, 0, ahead=0)
    feed(monitor, 112.0, 400, 1000)
    feed(monitor, 114.0, 1000, 5000)
    feed(monitor, 116.0, 1000, 9000)
    rates = monitor.rates(200.0)
    assert rates.prefill_tokens_per_s == pytest.approx(250.0)
    assert rates.link_bytes_per_s == pytest.approx(2000.0)


@given(
    steps=st.lists(
        st.tuples(
            st.floats(0, 3), st.integers(0, 300), st.integers(0, 3000), st.integers(-5, 2000)
        ),
        max_size=6,  # in all less than the time after which no movement is stuck
    ),
    hit=st.integers(0, 1000),
    streamed=st.integers(0, 10_000),
    estimate=st.none() | st.floats(allow_nan=True),
)
def test_any_course_gives_a_verdict_and_a_finite_time(steps, hit, streamed, estimate):
    monitor = make(tokens_done=hit, num_streamed_bytes=streamed, local_estimate_s=estimate)
    now_s, tokens, num_bytes = 100.0, hit, 0
    for seconds, more_tokens, more_bytes, ahead in steps:
        now_s += seconds
        tokens, num_bytes = min(1000, tokens + more_tokens), min(10_000, num_bytes + more_bytes)
        feed(monitor, now_s, tokens, num_bytes, ahead)
        assert monitor.verdict(now_s) in ("wait", "slower_than_local")
        assert 0 <= monitor.time_left_s(now_s) < math.inf
        assert monitor.verdict(now_s + STALL_S + 0.01) == "stuck"


def played(
    *, link_bytes_per_s: float, tail_bytes: int = 0, tokens_per_s: float = 100.0
) -> TransferRates:
    """Rates of a transfer whose bytes follow its tokens as far as the link lets them."""
    monitor = make(num_kv_bytes=10_000 + tail_bytes, local_estimate_s=None)
    now_s, sent = 100.0, 0.0
    while sent < 10_000 + tail_bytes:
        now_s += 0.05
        tokens = min(1000, int((now_s - 100.0) * tokens_per_s) // 50 * 50)
        made_bytes = 10 * tokens + (tail_bytes if tokens == 1000 else 0)
        sent = min(float(made_bytes), sent + 0.05 * link_bytes_per_s)
        feed(monitor, now_s, tokens, int(sent))
    return monitor.rates(now_s)


@pytest.mark.parametrize(
    ("link_bytes_per_s", "tail_bytes", "is_link_bound"),
    [(200.0, 0, True), (800.0, 0, True), (5_000.0, 0, False), (1e9, 0, False), (1e9, 900, False)],
)
def test_a_rate_is_the_link_s_only_if_bytes_waited_for_it(
    link_bytes_per_s, tail_bytes, is_link_bound
):
    rates = played(link_bytes_per_s=link_bytes_per_s, tail_bytes=tail_bytes)
    assert rates.is_link_bound == is_link_bound
    assert rates.link_bytes_per_s is not None
    if is_link_bound:
        assert rates.link_bytes_per_s == pytest.approx(link_bytes_per_s, rel=0.1)
    else:
        assert rates.link_bytes_per_s < 2_000, "as fast as they were made"


def late(
    *, late_bytes: int, num_words: int, late_s: float, streamed_bytes: int = 10_000
) -> TransferRates:
    """Rates of a transfer that kept up for a second, and of whose bytes some came after all was computed."""
    monitor = make(num_kv_bytes=streamed_bytes + late_bytes, local_estimate_s=None)
    for step in range(1, 11):
        feed(monitor, 100.0 + step / 10, 100 * step, streamed_bytes * step // 10)
    for word in range(1, num_words + 1):
        now_s = 101.0 + late_s * word / num_words
        feed(monitor, now_s, 1000, streamed_bytes + late_bytes * word // num_words)
    monitor.computed(began_s=100.0, ended_s=101.0, num_tokens=1000)
    return monitor.rates(101.0 + late_s)


@pytest.mark.parametrize(
    ("late_bytes", "num_words", "late_s", "is_link_bound"),
    [
        (5_000, 10, 0.1, True),
        (3_700, 4, 0.1, True),
        (3_200, 4, 0.1, False),
        (9_000, 2, 0.1, False),
        (5_000, 10, 0.01, False),
    ],
    ids=["a third", "a fifth", "less than a fifth", "two words", "an instant"],
)
def test_bytes_after_the_prefill_s_end_give_the_link_s_rate(
    late_bytes, num_words, late_s, is_link_bound
):
    """What the first word behind it brought may have lain somewhere: it counts for nothing."""
    rates = late(late_bytes=late_bytes, num_words=num_words, late_s=late_s)
    assert rates.is_link_bound == is_link_bound
    assert rates.prefill_tokens_per_s == pytest.approx(1000.0)
    if is_link_bound:
        assert rates.link_bytes_per_s == pytest.approx(late_bytes / late_s)
    else:
        assert rates.link_bytes_per_s == pytest.approx((9_000 + late_bytes) / (0.9 + late_s))


@pytest.mark.parametrize("prefill_s", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("num_words", [20, 100, 5_000])
def test_a_short_prefill_s_end_tells_a_slow_link_from_a_slow_peer(prefill_s, num_words):
    """Nothing is heard of tokens on the way; the peer's word comes with the last bytes."""
    monitor = make(num_kv_bytes=100_000, local_estimate_s=None)
    for word in range(1, num_words + 1):
        now_s = 100.02 + word / num_words
        feed(monitor, now_s, 1000 if word == num_words else 0, 100_000 * word // num_words)
    monitor.computed(began_s=100.01, ended_s=100.01 + prefill_s, num_tokens=1000)
    rates = monitor.rates(102.0)
    assert rates.is_link_bound
    assert rates.link_bytes_per_s == pytest.approx(100_000, rel=0.02)
    assert rates.prefill_tokens_per_s == pytest.approx(1000 / prefill_s)


def test_transfers_that_share_a_link_each_see_all_that_it_carries():
    ours, others = make(local_estimate_s=None), make(num_kv_bytes=20_000, local_estimate_s=None)
    for word in range(1, 11):
        now_s, done = 100.0 + word / 10, 1000 if word == 10 else 0
        for monitor, share in ((ours, 1000), (others, 2000)):
            monitor.progressed(
                now_s=now_s,
                num_bytes=share * word,
                tokens_done=done,
                tokens_ahead=0,
                num_link_bytes=70_000 + 3000 * word,
            )
    for monitor in (ours, others):
        monitor.computed(began_s=100.0, ended_s=100.05, num_tokens=1000)
        rates = monitor.rates(102.0)
        assert rates.is_link_bound
        assert rates.link_bytes_per_s == pytest.approx(30_000)


def test_a_burst_says_nothing_of_a_link():
    monitor = make(local_estimate_s=None)
    for word in range(1, 11):
        feed(monitor, 100.5 + MIN_STRETCH_S * word / 20, 1000, 1000 * word)
    assert monitor.rates(101.0).link_bytes_per_s is None
    monitor.computed(began_s=100.0, ended_s=100.1, num_tokens=1000)
    assert monitor.rates(101.0).link_bytes_per_s is None


def test_a_prompt_that_took_no_time_shows_no_rate_of_a_prefill():
    monitor = make(tokens_done=1000, local_estimate_s=None)
    for word in range(1, 11):
        feed(monitor, 100.0 + word / 10, 1000, 1000 * word)
    monitor.computed(began_s=100.0, ended_s=100.0, num_tokens=0)
    rates = monitor.rates(101.0)
    assert rates.prefill_tokens_per_s is None
    assert rates.is_link_bound
    assert rates.link_bytes_per_s == pytest.approx(10_000)


@given(
    words=st.lists(
        st.tuples(
            st.sampled_from([0.0, 1e-9, 0.001, 0.02, 0.5]),
            st.sampled_from([0, 1, 500, 1000]),
            st.sampled_from([0, 1, 100, 9_000]),
            st.sampled_from([0, 0, 7]),
            st.sampled_from([0, 0, 50_000]),
        ),
        max_size=12,
    ),
    num_kv_bytes=st.sampled_from([0, 1, 3, 10_000]),
    told=st.none()
    | st.tuples(st.floats(99, 103), st.sampled_from([0.0, 1e-9, 0.1, 1e9]), st.integers(0, 10**6)),
)
def test_rates_are_absent_or_positive_and_an_instant_never_gives_one(words, num_kv_bytes, told):
    monitor = make(num_kv_bytes=num_kv_bytes, num_streamed_bytes=num_kv_bytes)
    now_s, tokens, num_bytes, num_others = 100.0, 0, 0, 0
    for seconds, more_tokens, more_bytes, ahead, more_others in words:
        now_s += seconds
        tokens = min(1000, tokens + more_tokens)
        num_bytes = min(num_kv_bytes, num_bytes + more_bytes)
        num_others += more_others
        monitor.progressed(
            now_s=now_s,
            num_bytes=num_bytes,
            tokens_done=tokens,
            tokens_ahead=ahead,
            num_link_bytes=num_bytes + num_others,
        )
        if told is not None:
            began_s, took_s, num_tokens = told
            monitor.computed(began_s=began_s, ended_s=began_s + took_s, num_tokens=num_tokens)
        rates = monitor.rates(now_s)
        for rate in (rates.prefill_tokens_per_s, rates.link_bytes_per_s):
            assert rate is None or 0 < rate < math.inf
        if now_s - 100.0 < MIN_STRETCH_S:
            assert rates.link_bytes_per_s is None
