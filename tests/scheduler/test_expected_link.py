"""A link that was once measured counts until the real one is known."""

import math

import pytest

from prfaas.scheduler.monitor import TransferRates
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.profile import Link
from prfaas.scheduler.router import Outcome, Router, RouteRequest
from prfaas.scheduler.view import LocalView, PeerView

LINK = Link(bytes_per_s=100.0, rtt_s=0.5)


@pytest.mark.parametrize(
    ("changes", "expected_s"),
    [
        ({}, 10.5),
        ({"link_bytes_per_s": 1e4}, 2.5),
        ({"link_bytes_per_s": 50.0}, 20.5),
        ({"rtt_s": 0.0}, 10.0),
        ({"rtt_s": 2.0}, 12.0),
        ({"link_bytes_per_s": 1e4, "rtt_s": 2.0}, 4.0),
        ({"expected_link": None}, 2.0),
    ],
)
def test_what_is_known_takes_the_place_of_what_was_expected(changes, expected_s):
    view = PeerView(peer="p", **{"prefill_tokens_per_s": 100.0, "expected_link": LINK} | changes)
    assert view.ttft_s(num_tokens=200, num_kv_bytes=1000) == pytest.approx(expected_s)


def test_a_router_expects_it_of_every_peer():
    router = Router(peers=("a", "b"), options=SchedulerOptions(), expected_link=LINK)
    assert {router.peer(name).expected_link for name in ("a", "b")} == {LINK}
    router.heard("a", now_s=1.0, is_ready=True, prefill_tokens_per_s=10.0)
    assert router.peer("a").ttft_s(num_tokens=10, num_kv_bytes=500) == pytest.approx(5.5)
    assert router.peer("b").ttft_s(num_tokens=10, num_kv_bytes=500) is None


def learnt(
    *seen: tuple[float, bool], expected: Link | None = LINK, goodput: float | None = None
) -> PeerView:
    """The view after transfers that reached so many bytes/s, each waiting for the link or not."""
    router = Router(
        peers=("p",), options=SchedulerOptions(threshold_tokens=1), expected_link=expected
    )
    router.heard("p", now_s=0.0, is_ready=True, prefill_tokens_per_s=100.0)
    router.measured("p", rtt_s=None, goodput_bytes_per_s=goodput)
    request = RouteRequest(num_tokens=200, hit_tokens=0, num_kv_bytes=1000)
    for index, (rate, is_link_bound) in enumerate(seen):
        router.route(str(index), request, local=LocalView(), now_s=0.0)
        rates = TransferRates(
            prefill_tokens_per_s=None, link_bytes_per_s=rate, is_link_bound=is_link_bound
        )
        router.ended(str(index), "completed", now_s=0.0, rates=rates)
    return router.peer("p")


@pytest.mark.parametrize(
    ("seen", "expected", "byte_s"),
    [
        ([], LINK, 1 / 100),
        ([(10.0, False)], LINK, 1 / 100),  # paced by prefill: the link carries ten at least
        ([(400.0, False)], LINK, 1 / 400),  # and here more than was expected
        ([(400.0, False), (50.0, False)], LINK, 1 / 400),
        ([(400.0, False), (50.0, True)], LINK, 1 / 50),  # it has got worse
        ([(50.0, True), (10.0, False)], LINK, 1 / 50),
        ([(50.0, True), (80.0, False)], LINK, 1 / 80),
        ([(50.0, True), (150.0, True)], LINK, 1 / 80),  # an average
        ([(10.0, False)], None, 0.0),  # nothing has waited for it yet
        ([(50.0, True)], None, 1 / 50),
    ],
)
def test_only_a_transfer_that_waited_for_the_link_says_what_it_carries(seen, expected, byte_s):
    assert learnt(*seen, expected=expected).byte_s == pytest.approx(byte_s)


def test_goodput_that_idle_times_are_part_of_says_nothing_of_the_link():
    assert learnt((50.0, True), goodput=90.0).byte_s == pytest.approx(1 / 50)


@pytest.mark.parametrize(
    ("seen", "limit", "wire_fraction", "byte_s"),
    [
        ([], None, 1.0, 0.0),
        ([], 40.0, 1.0, 1 / 40),
        ([(50.0, True)], 40.0, 1.0, 1 / 40),
        ([(30.0, True)], 40.0, 1.0, 1 / 30),
        ([(900.0, False)], 40.0, 1.0, 1 / 40),
        ([(100.0, True)], 40.0, 0.5, 1 / 80),  # half of the bytes cross the link
        ([(100.0, True)], 40.0, 0.0, 1 / 40),
        ([(30.0, True)], math.nan, 1.0, 1 / 30),
        ([(30.0, True)], 0.0, 1.0, 1 / 30),
    ],
)
def test_a_link_carries_no_more_than_its_sender_s_limit(seen, limit, wire_fraction, byte_s):
    router = Router(peers=("p",), options=SchedulerOptions())
    router.heard("p", now_s=0.0, is_ready=True, egress_limit_bytes_per_s=limit)
    request = RouteRequest(num_tokens=200, hit_tokens=0, num_kv_bytes=1000)
    for rate, is_link_bound in seen:
        router.route("r", request, local=LocalView(), now_s=0.0, force="remote")
        rates = TransferRates(
            prefill_tokens_per_s=None,
            link_bytes_per_s=rate,
            is_link_bound=is_link_bound,
            wire_fraction=wire_fraction,
        )
        router.ended("r", "completed", now_s=0.0, rates=rates)
    assert router.peer("p").byte_s == pytest.approx(byte_s)
    router.heard("p", now_s=1.0, is_ready=True)
    assert router.peer("p").egress_limit_bytes_per_s is None


def test_an_expected_link_is_capped_by_its_sender_s_limit():
    view = PeerView(peer="p", expected_link=LINK, egress_limit_bytes_per_s=LINK.bytes_per_s / 4)
    assert view.byte_s == pytest.approx(4 / LINK.bytes_per_s)


def test_what_is_made_with_the_last_token_comes_after_it():
    view = PeerView(peer="p", prefill_tokens_per_s=100.0, link_bytes_per_s=1000.0, rtt_s=0.5)
    asked = {"num_tokens": 200, "num_kv_bytes": 1500}
    assert view.ttft_s(**asked) == pytest.approx(2.5)
    assert view.ttft_s(**asked, num_tail_bytes=500) == pytest.approx(3.0)
    assert view.ttft_s(**asked, num_tail_bytes=1500) == pytest.approx(4.0)


def test_bytes_wait_for_those_that_are_under_way():
    view = PeerView(
        peer="p", prefill_tokens_per_s=100.0, link_bytes_per_s=1000.0, num_inflight_bytes=5000
    )
    assert view.ttft_s(num_tokens=200, num_kv_bytes=1500) == pytest.approx(6.5)


def test_what_every_prefill_takes_longer_than_is_explained_is_expected_of_the_next():
    router = Router(peers=("p",), options=SchedulerOptions(threshold_tokens=1))
    request = RouteRequest(num_tokens=200, hit_tokens=0, num_kv_bytes=0)

    def predicted_after(taken_s: float, outcome: Outcome = "completed") -> float | None:
        router.heard("p", now_s=0.0, is_ready=True, prefill_tokens_per_s=100.0)
        router.route("r", request, local=LocalView(), now_s=0.0)
        router.ended("r", outcome, now_s=taken_s)
        return router.peer("p").ttft_s(num_tokens=200, num_kv_bytes=0)

    assert predicted_after(2.0) == pytest.approx(2.0)
    assert predicted_after(9.0) == pytest.approx(2.0), "a long one alone says nothing of others"
    for _ in range(6):
        assert predicted_after(2.5) == pytest.approx(2.0)
    assert predicted_after(2.5) == pytest.approx(2.5), "none of the last eight was quicker"
    assert predicted_after(9.0, "cancelled") == pytest.approx(2.5)
    assert predicted_after(2.2) == pytest.approx(2.2)
    assert predicted_after(1.0) == pytest.approx(2.0), "never less than is explained"
