"""Prompts of different lengths, side by side: what one shows of a peer is not taken for the other.

Both sides are simulated from the shipped profiles, one prompt after the other.
"""

import random
from pathlib import Path

import pytest

from prfaas.config.profiles import read_profile
from prfaas.scheduler.left_sides import RETRY_AFTER_S
from prfaas.scheduler.monitor import TransferRates
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.peer_states import FORGET_AFTER_S
from prfaas.scheduler.router import Route, Router, RouteRequest
from prfaas.scheduler.view import LocalView

PROFILES = Path(__file__).parents[2] / "configs" / "profiles"
H20_S = read_profile(PROFILES / "h20-internal-1t.toml").prefill_s
H200_S = read_profile(PROFILES / "h200-internal-1t.toml").prefill_s
PEER = "h200:1"
SHORT, LONG = 600, 30_000


class Pair:
    """An H20 node and an H200 peer of which it knows nothing, `trip_s` away."""

    def __init__(self, *, trip_s: float, noise: float = 0.0, reported: float | None = None) -> None:
        self.router = Router(peers=(PEER,), options=SchedulerOptions())
        self.router.set_threshold(2000)
        self.now_s = 0.0
        self._trip_s = trip_s
        self._reported = reported
        self._random = random.Random(7)
        self._noise = noise
        self._num_requests = 0
        self.slowness = 1.0
        self.hear()

    def hear(self) -> None:
        self.router.heard(
            PEER, now_s=self.now_s, is_ready=True, prefill_tokens_per_s=self._reported
        )

    def ask(self, num_tokens: int, *, pause_s: float = 1.0) -> Route:
        """Return where a prompt goes, once it has its first token there."""
        self._num_requests += 1
        name = f"r{self._num_requests}"
        local = LocalView(prefill_tokens_per_s=num_tokens / (H20_S(num_tokens) * self._noisy()))
        request = RouteRequest(num_tokens=num_tokens, hit_tokens=0, num_kv_bytes=num_tokens)
        route = self.router.route(name, request, local=local, now_s=self.now_s)
        if route.name == "remote":
            prefill_s = H200_S(num_tokens) * self._noisy() * self.slowness
            self.now_s += prefill_s + self._trip_s
            rates = TransferRates(
                prefill_tokens_per_s=num_tokens / prefill_s, link_bytes_per_s=None
            )
            self.router.ended(name, "completed", now_s=self.now_s, rates=rates)
        self.now_s += pause_s
        self.hear()
        return route

    def _noisy(self) -> float:
        return 1 + self._random.uniform(-self._noise, self._noise)


@pytest.mark.parametrize("first", [SHORT, LONG])
@pytest.mark.parametrize("reported", [None, 1200.0, 30_000.0])
def test_long_prompts_end_up_remote_and_short_ones_where_they_are_earlier(first, reported):
    far, near = (Pair(trip_s=trip_s, reported=reported) for trip_s in (0.9, 0.05))
    other = SHORT + LONG - first
    for pair in (far, near):
        for _ in range(6):
            pair.ask(first)
            pair.ask(other)
    # A short one takes 1.04 s here, 0.3 s at the peer; a long one 4.0 s and 1.7 s.
    assert [far.ask(SHORT).name for _ in range(3)] == ["local"] * 3
    assert [near.ask(SHORT).name for _ in range(3)] == ["remote"] * 3
    assert [pair.ask(LONG).name for pair in (far, near) for _ in range(3)] == ["remote"] * 6


def test_predictions_of_both_lengths_are_right_after_two_of_each():
    pair = Pair(trip_s=0.05)
    for _ in range(10):
        pair.ask(SHORT)
        pair.ask(LONG)
    for num_tokens in (SHORT, LONG):
        predicted_s = pair.ask(num_tokens).predicted_ttft_s
        assert predicted_s == pytest.approx(H200_S(num_tokens) + 0.05, rel=0.02)


def test_noise_of_a_tenth_changes_no_side():
    pair = Pair(trip_s=0.9, noise=0.1)
    for _ in range(6):
        pair.ask(SHORT)
        pair.ask(LONG)
    sides = {(length, pair.ask(length).name) for _ in range(200) for length in (SHORT, LONG)}
    assert sides == {(SHORT, "local"), (LONG, "remote")}


def test_a_peer_that_was_slow_once_is_tried_again():
    pair = Pair(trip_s=0.05)
    pair.slowness = 20.0
    for _ in range(4):
        pair.ask(LONG)
    assert pair.ask(LONG).name == "local"
    pair.slowness = 1.0
    names = [pair.ask(LONG).name for _ in range(int(8 * RETRY_AFTER_S))]
    assert names[0] == "local"
    assert names[-1] == "remote"


def test_a_peer_that_stays_slow_is_tried_rarely():
    pair = Pair(trip_s=0.05)
    pair.slowness = 20.0
    for _ in range(4):
        pair.ask(LONG)
    names = [pair.ask(LONG).name for _ in range(1000)]
    assert 1 <= names.count("remote") <= 6


def test_nothing_is_tried_where_others_wait():
    pair = Pair(trip_s=0.05)
    pair.slowness = 20.0
    for _ in range(4):
        pair.ask(LONG)
    pair.now_s += 2 * RETRY_AFTER_S
    pair.router.heard(PEER, now_s=pair.now_s, is_ready=True, num_queue_tokens=1)
    local = LocalView(prefill_tokens_per_s=LONG / H20_S(LONG))
    request = RouteRequest(num_tokens=LONG, hit_tokens=0, num_kv_bytes=0)
    assert pair.router.route("r", request, local=local, now_s=pair.now_s).name == "local"
    pair.hear()
    assert pair.router.route("s", request, local=local, now_s=pair.now_s).name == "remote"


def test_what_a_peer_showed_long_ago_gives_way_to_its_own_word():
    pair = Pair(trip_s=0.05, reported=10_000.0)
    pair.ask(LONG, pause_s=FORGET_AFTER_S - 1)
    assert pair.router.peer(PEER).prefills
    pair.now_s += 2.0
    pair.hear()
    peer = pair.router.peer(PEER)
    assert (peer.prefills, peer.pace, peer.tokens_per_s) == ((), None, 10_000.0)
