"""A link that was once measured counts until the real one is known."""

import pytest

from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.profile import Link
from prfaas.scheduler.router import Router
from prfaas.scheduler.view import PeerView

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
