"""Samples of streams become rates of the link: nothing counts twice, nothing is lost."""

import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.transport.link_state import BEST_HALF_LIFE_S, MEMORY_S, LinkState
from prfaas.transport.tcpinfo import TcpInfo

if TYPE_CHECKING:
    from collections.abc import Hashable


def info(**values) -> TcpInfo:
    known = dict.fromkeys(TcpInfo.__dataclass_fields__, 0) | {"is_app_limited": False}
    return TcpInfo(**(known | {"min_rtt_s": None, "pacing_rate_bytes_per_s": None} | values))


def sampled(rate: float, *, until_s: float = 60.0, limit: float | None = None, **more) -> LinkState:
    link = LinkState(limit)
    for tick in range(int(until_s) + 1):
        done = int(rate * tick)
        link.add({"a": info(bytes_acked=done, bytes_sent=done, **more)}, now_s=float(tick))
    return link


@given(st.floats(1e3, 1e10))
def test_a_steady_rate_is_the_goodput(rate):
    view = sampled(rate, until_s=10).view()
    assert view.goodput_bytes_per_s == pytest.approx(rate, rel=1e-2)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=8))
def test_streams_add_up_in_both_directions(rates):
    link = LinkState()
    for tick in (0, 1, 2):
        samples: dict[Hashable, TcpInfo] = {
            n: info(bytes_acked=r * tick, bytes_sent=r * tick) for n, r in enumerate(rates)
        }
        samples[-1] = info(bytes_received=1_000 * tick)
        link.add(samples, now_s=float(tick))
    assert link.view().goodput_bytes_per_s == pytest.approx(sum(rates) + 1_000)
    assert link.view().num_streams == len(rates) + 1


def test_nothing_is_known_before_two_samples():
    link = LinkState(1e6)
    assert link.sampled_s is None
    for view in (link.view(), sampled(5.0, until_s=0).view()):
        assert view.goodput_bytes_per_s == view.utilisation_fraction == view.loss_fraction == 0
        assert view.busy_goodput_bytes_per_s is None
        assert view.queueing_s == 0
        assert view.rtt_s is None


def test_a_stream_opened_between_samples_counts_whole_and_a_reopened_one_too():
    link = LinkState()
    link.add({"a": info(bytes_acked=500, bytes_sent=500)}, now_s=0.0)
    link.add(
        {"a": info(bytes_acked=30, bytes_sent=30), "b": info(bytes_acked=70, bytes_sent=70)},
        now_s=1.0,
    )
    assert link.view().goodput_bytes_per_s == pytest.approx(100)


def test_what_was_sent_before_the_first_sample_is_no_goodput():
    link = LinkState()
    link.add({"a": info(bytes_acked=10**9, bytes_sent=10**9)}, now_s=0.0)
    link.add({"a": info(bytes_acked=10**9 + 8, bytes_sent=10**9 + 8)}, now_s=1.0)
    assert link.view().goodput_bytes_per_s == pytest.approx(8)


def test_utilisation_is_of_the_egress_limit_where_there_is_one():
    assert sampled(250.0, limit=1_000.0).view().utilisation_fraction == pytest.approx(0.25)
    assert sampled(2_000.0, limit=1_000.0).view().utilisation_fraction == 1.0


def test_utilisation_without_a_limit_is_of_the_best_goodput_and_that_is_forgotten():
    link = sampled(1_000.0, until_s=60)
    assert link.view().utilisation_fraction == pytest.approx(1.0)
    link.add({"a": info(bytes_acked=60_000, bytes_sent=60_000)}, now_s=60 + MEMORY_S)
    after = link.view()
    assert after.goodput_bytes_per_s < 1_000 * (1 - 1 / math.e)
    assert after.utilisation_fraction == pytest.approx(
        after.goodput_bytes_per_s / (1_000 * 0.5 ** (MEMORY_S / BEST_HALF_LIFE_S)), rel=1e-3
    )


def test_loss_is_the_part_sent_again():
    link = LinkState()
    for tick in range(20):
        link.add(
            {"a": info(bytes_acked=900 * tick, bytes_sent=1_000 * tick, bytes_retrans=100 * tick)},
            now_s=float(tick),
        )
    assert link.view().loss_fraction == pytest.approx(0.1)


def test_queueing_is_what_a_round_trip_takes_beyond_the_shortest():
    link = LinkState()
    link.add(
        {"a": info(rtt_s=0.05, min_rtt_s=0.02), "b": info(rtt_s=0.07, min_rtt_s=0.03)}, now_s=0.0
    )
    view = link.view()
    assert view.rtt_s == pytest.approx(0.06)
    assert view.min_rtt_s == 0.02
    assert view.queueing_s == pytest.approx(0.04)


def test_what_the_link_can_do_is_measured_only_while_bytes_wait():
    link = LinkState()
    done = 0
    for tick in range(60):
        is_busy = tick % 10 == 1
        done += 5_000 if is_busy else 0
        waiting = 10 if is_busy else 0
        link.add({"a": info(bytes_acked=done, bytes_sent=done, notsent_bytes=waiting)}, now_s=tick)
    view = link.view()
    assert view.busy_goodput_bytes_per_s == pytest.approx(5_000)
    assert view.goodput_bytes_per_s < 2_500
