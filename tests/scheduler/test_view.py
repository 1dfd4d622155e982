"""When a peer may be used, and what it is predicted to take."""

import math

import pytest

from prfaas.scheduler.pace import Pace
from prfaas.scheduler.view import STALE_AFTER_S, LocalView, PeerView, known_rate

NOW_S = 100.0


def peer(**changes: object) -> PeerView:
    return PeerView(**({"peer": "p:1", "state": "ready", "heard_s": NOW_S} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({}, None),
        ({"num_inflight": 50}, None),
        ({"heard_s": NOW_S - STALE_AFTER_S}, None),
        ({"heard_s": NOW_S - STALE_AFTER_S - 1}, None),
        ({"heard_s": NOW_S - STALE_AFTER_S - 1, "num_inflight": 1}, "peer_down"),
        ({"state": "unknown", "heard_s": None}, None),
        ({"state": "unknown", "heard_s": None, "num_inflight": 1}, "peer_down"),
        ({"state": "incompatible"}, "peer_incompatible"),
        ({"state": "incompatible", "retry_at_s": NOW_S - 1}, "peer_incompatible"),
        ({"state": "down", "retry_at_s": NOW_S + 1e-6}, "peer_down"),
        ({"state": "down", "retry_at_s": NOW_S}, None),
        ({"state": "down", "retry_at_s": NOW_S, "num_inflight": 1}, "peer_down"),
        ({"state": "down"}, None),
        ({"state": "not_ready"}, "peer_down"),
        ({"state": "not_ready", "retry_at_s": NOW_S - 1}, "peer_down"),
        ({"state": "not_ready", "heard_s": NOW_S - STALE_AFTER_S - 1}, None),
        (
            {
                "state": "not_ready",
                "heard_s": NOW_S - STALE_AFTER_S - 1,
                "retry_at_s": NOW_S + 1e-6,
            },
            "peer_down",
        ),
        ({"state": "overloaded", "retry_at_s": NOW_S + 1e-6}, "peer_overloaded"),
        ({"state": "overloaded", "retry_at_s": NOW_S, "num_inflight": 15}, None),
        ({"num_failures": 1}, None),
        ({"num_failures": 1, "num_inflight": 1}, "peer_down"),
        ({"retry_at_s": NOW_S + 5}, None),
    ],
)
def test_a_peer_is_refused_exactly_when_its_state_says_so(changes, refusal):
    assert peer(**changes).refusal(NOW_S) == refusal


@pytest.mark.parametrize(
    ("rate", "known"),
    [
        (None, None),
        (0.0, None),
        (-1.0, None),
        (math.nan, None),
        (math.inf, None),
        (-math.inf, None),
        (5e-324, None),
        (1e-9, 1e-9),
        (1e12, 1e12),
    ],
)
def test_only_positive_finite_rates_are_known(rate, known):
    assert known_rate(rate) == known
    assert (LocalView(prefill_tokens_per_s=rate).ttft_s(num_tokens=1) is None) == (known is None)
    predicted_s = peer(prefill_tokens_per_s=rate).ttft_s(num_tokens=1, num_kv_bytes=1)
    assert (predicted_s is None) == (known is None)


def test_the_local_prediction_is_queue_and_prompt_over_the_rate():
    local = LocalView(num_waiting_tokens=300, prefill_tokens_per_s=100.0)
    assert local.ttft_s(num_tokens=200) == 5.0
    assert local.ttft_s(num_tokens=0) == 3.0
    mixed = LocalView(
        num_waiting_tokens=300, prefill_tokens_per_s=100.0, waiting_tokens_per_s=1000.0
    )
    assert mixed.ttft_s(num_tokens=200) == pytest.approx(2.3)
    odd = LocalView(num_waiting_tokens=-5, prefill_tokens_per_s=100.0)
    assert odd.ttft_s(num_tokens=100) == 1.0


@pytest.mark.parametrize(
    ("changes", "expected_s"),
    [
        ({}, 2.0),
        ({"num_queue_tokens": 500}, 7.0),
        ({"num_inflight_tokens": 500}, 7.0),
        ({"num_queue_tokens": 400, "num_inflight_tokens": 500}, 7.0),
        ({"num_queue_tokens": -400}, 2.0),
        ({"link_bytes_per_s": 1e4}, 2.0),
        ({"link_bytes_per_s": 1e2}, 10.0),
        ({"link_bytes_per_s": math.nan}, 2.0),
        ({"link_bytes_per_s": 1e2, "num_queue_tokens": 500}, 15.0),
        ({"reported_tokens_per_s": 1e9}, 2.0),
        ({"pace": Pace(0.5, 0.02)}, 4.5),
        ({"pace": Pace(0.5, 0.02), "num_inflight": 3, "num_inflight_tokens": 100}, 8.0),
        ({"pace": Pace(0.5, 0.02), "link_bytes_per_s": 1e2}, 10.0),
        ({"prefill_tokens_per_s": None, "reported_tokens_per_s": 200.0}, 1.0),
    ],
)
def test_a_peer_s_prediction_is_its_queue_and_the_slower_of_compute_and_link(changes, expected_s):
    view = peer(**({"prefill_tokens_per_s": 100.0} | changes))
    assert view.ttft_s(num_tokens=200, num_kv_bytes=1000) == pytest.approx(expected_s)
