"""The rule as a table, and what decisions set in motion as properties."""

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prfaas.scheduler.monitor import TransferRates
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.router import (
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    REASONS,
    SLOW_BACKOFF_S,
    Route,
    Router,
    RouteRequest,
    route,
)
from prfaas.scheduler.view import STALE_AFTER_S, LocalView, PeerState, PeerView, View

OPTIONS = SchedulerOptions(threshold_tokens=512)
LOCAL = LocalView()
NOW_S = 50.0
READY = PeerView(peer="a:1", state="ready", heard_s=NOW_S)
HUGE = 10**12

OUTCOMES = [
    "completed",
    "cancelled",
    "pool_full",
    "prompt_refused",
    "peer_down",
    "peer_incompatible",
    "peer_overloaded",
    "peer_stuck",
    "transfer_failed",
    "slower_than_local",
    "peer_lacks_prefix",
]


def prompt(num_tokens: int = 4000, hit_tokens: int = 0, **changes: Any) -> RouteRequest:
    values = {"num_tokens": num_tokens, "hit_tokens": hit_tokens, "num_kv_bytes": 6144} | changes
    return RouteRequest(**values)


def view(*peers: PeerView, local: LocalView = LOCAL) -> View:
    return View(peers=peers, local=local)


@pytest.mark.parametrize(
    ("num_tokens", "hit_tokens", "threshold_tokens", "name", "reason"),
    [
        (0, 0, 512, "local", "short"),
        (1, 0, 512, "local", "short"),
        (511, 0, 512, "local", "short"),
        (512, 0, 512, "local", "short"),
        (513, 0, 512, "remote", "long"),
        (HUGE, 0, 512, "remote", "long"),
        (HUGE, HUGE, 512, "local", "short"),
        (4608, 4096, 512, "local", "short"),
        (4609, 4096, 512, "remote", "long"),
        (0, 0, 0, "local", "short"),
        (1, 0, 0, "remote", "long"),
        (1, 1, 0, "local", "short"),
        (0, 0, -1, "remote", "long"),
        (HUGE, 0, HUGE, "local", "short"),
        (HUGE + 1, 0, HUGE, "remote", "long"),
    ],
)
def test_uncached_length_against_the_threshold(
    num_tokens, hit_tokens, threshold_tokens, name, reason
):
    options = SchedulerOptions(threshold_tokens=threshold_tokens)
    decided = route(prompt(num_tokens, hit_tokens), view(READY), options, NOW_S)
    assert (decided.name, decided.reason) == (name, reason)
    assert decided.peer == ("a:1" if name == "remote" else None)


DOWN = replace(READY, state="down", retry_at_s=NOW_S + 1)
OVERLOADED = replace(READY, state="overloaded", retry_at_s=NOW_S + 1)
INCOMPATIBLE = replace(READY, state="incompatible")
READY_B = replace(READY, peer="b:1")


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        ((), ("local", "no_peer", None)),
        ((READY,), ("remote", "long", "a:1")),
        ((DOWN,), ("local", "peer_down", None)),
        ((OVERLOADED,), ("local", "peer_overloaded", None)),
        ((INCOMPATIBLE,), ("local", "peer_incompatible", None)),
        ((INCOMPATIBLE, DOWN), ("local", "peer_down", None)),
        ((INCOMPATIBLE, DOWN, OVERLOADED), ("local", "peer_overloaded", None)),
        ((DOWN, READY_B), ("remote", "long", "b:1")),
    ],
)
def test_a_long_prompt_goes_to_a_usable_peer_or_says_why_not(peers, expected):
    decided = route(prompt(), view(*peers), OPTIONS, NOW_S)
    assert (decided.name, decided.reason, decided.peer) == expected


@pytest.mark.parametrize("num_tokens", [1, 4000])
@pytest.mark.parametrize(
    ("force", "peers", "expected"),
    [
        ("local", (READY,), ("local", "forced")),
        ("local", (), ("local", "forced")),
        ("remote", (READY,), ("remote", "forced")),
        ("remote", (), ("local", "no_peer")),
        ("remote", (DOWN,), ("local", "peer_down")),
        ("remote", (INCOMPATIBLE,), ("local", "peer_incompatible")),
    ],
)
def test_force_overrides_the_threshold_but_no_peer_s_state(force, peers, expected, num_tokens):
    decided = route(prompt(num_tokens), view(*peers), OPTIONS, NOW_S, force)
    assert (decided.name, decided.reason) == expected


def test_the_peer_with_the_earliest_first_token_is_taken():
    slow = replace(READY, peer="slow", prefill_tokens_per_s=100.0)
    fast = replace(READY, peer="fast", prefill_tokens_per_s=1000.0)
    busy = replace(READY, peer="busy", prefill_tokens_per_s=1000.0, num_inflight_tokens=90_000)
    assert route(prompt(), view(slow, busy, fast), OPTIONS, NOW_S).peer == "fast"
    assert route(prompt(), view(slow, busy), OPTIONS, NOW_S).peer == "slow"


def test_peers_of_unknown_rate_share_by_load_then_by_name():
    a, b = replace(READY, peer="a"), replace(READY, peer="b")
    assert route(prompt(), view(b, a), OPTIONS, NOW_S).peer == "a"
    assert route(prompt(), view(b, replace(a, num_inflight_tokens=1)), OPTIONS, NOW_S).peer == "b"


def test_predictions_count_what_each_side_has_to_compute():
    local = LocalView(num_waiting_tokens=100, prefill_tokens_per_s=100.0)
    fast = replace(READY, prefill_tokens_per_s=1000.0)
    short = route(prompt(700, 600), view(fast, local=local), OPTIONS, NOW_S)
    assert short.predicted_ttft_s == 2.0
    long = route(prompt(4000, 100, peer_hit_tokens={"a:1": 2000}), view(fast), OPTIONS, NOW_S)
    assert long.predicted_ttft_s == 2.0
    assert route(prompt(), view(READY), OPTIONS, NOW_S).predicted_ttft_s is None
    assert route(prompt(), view(DOWN), OPTIONS, NOW_S).predicted_ttft_s is None


@pytest.mark.parametrize(
    "values",
    [
        {"num_tokens": -1},
        {"hit_tokens": -1},
        {"num_tokens": 5, "hit_tokens": 6},
        {"num_tokens": 5, "peer_hit_tokens": {"a:1": 0, "b:1": 6}},
        {"peer_hit_tokens": {"a:1": -1}},
        {"num_kv_bytes": -1},
    ],
)
def test_counts_that_no_prompt_has_are_refused(values):
    with pytest.raises(ValueError, match=r"-1|6"):
        prompt(**values)


RATES = st.none() | st.floats(allow_nan=True, allow_infinity=True)
TIMES = st.none() | st.floats(0, 200)
PEERS = st.builds(
    PeerView,
    peer=st.sampled_from(["a:1", "b:1", "c:1"]),
    state=st.sampled_from(get_args(PeerState)),
    prefill_tokens_per_s=RATES,
    link_bytes_per_s=RATES,
    reported_tokens_per_s=RATES,
    num_queue_tokens=st.integers(-10, HUGE),
    heard_s=TIMES,
    num_failures=st.integers(0, 5),
    retry_at_s=TIMES,
    num_inflight=st.integers(0, 3),
    num_inflight_tokens=st.integers(0, HUGE),
)


@given(
    num_tokens=st.integers(0, 2000),
    hit_fraction=st.floats(0, 1),
    peers=st.lists(PEERS, max_size=3, unique_by=lambda p: p.peer),
    rate=RATES,
    threshold=st.integers(-1, 1500),
    force=st.sampled_from([None, "local", "remote"]),
)
def test_any_view_gives_one_route_and_never_to_a_peer_that_is_out(
    num_tokens, hit_fraction, peers, rate, threshold, force
):
    request = prompt(num_tokens, int(num_tokens * hit_fraction))
    options = SchedulerOptions(threshold_tokens=threshold)
    known = view(*peers, local=LocalView(prefill_tokens_per_s=rate))
    decided = route(request, known, options, NOW_S, force)
    assert decided == route(request, known, options, NOW_S, force)
    assert decided.reason in REASONS
    assert (decided.name == "remote") == (decided.peer is not None)
    assert decided.predicted_ttft_s is None or decided.predicted_ttft_s >= 0
    if decided.name == "remote":
        assert decided.reason == ("long" if force is None else "forced")
        (chosen,) = [p for p in peers if p.peer == decided.peer]
        assert chosen.state != "incompatible"
        assert chosen.state != "not_ready" or chosen.is_stale(NOW_S)
        if chosen.state in ("down", "overloaded") and chosen.retry_at_s is not None:
            assert chosen.retry_at_s <= NOW_S
        if chosen.state in ("down", "unknown"):
            assert chosen.num_inflight == 0
    elif decided.reason == "short":
        assert request.uncached_tokens <= threshold


@given(peer=PEERS, now_s=st.floats(0, 300))
def test_a_peer_that_is_clear_is_neither_refused_nor_on_trial(peer, now_s):
    if now_s <= peer.clear_until_s:
        assert peer.refusal(now_s) is None
        assert not peer.is_on_trial(now_s)


STALE = replace(READY, heard_s=NOW_S - STALE_AFTER_S - 1)


@pytest.mark.parametrize(
    ("peers", "chosen"),
    [
        ((replace(STALE, peer="s:1"), replace(READY, prefill_tokens_per_s=1.0)), "a:1"),
        ((replace(READY, heard_s=NOW_S - STALE_AFTER_S, peer="s:1"),), "s:1"),
        ((replace(STALE, peer="s:1"),), "s:1"),
        ((replace(STALE, peer="s:1"), replace(STALE, peer="t:1", prefill_tokens_per_s=9.0)), "s:1"),
        ((replace(STALE, peer="s:1", num_inflight=1), replace(STALE, peer="t:1")), "t:1"),
        ((replace(READY, heard_s=None, peer="s:1"),), "s:1"),
        ((replace(STALE, peer="s:1", num_inflight=1),), None),
    ],
)
def test_some_that_are_stale_give_way_and_all_that_are_stale_are_tried(peers, chosen):
    assert route(prompt(), view(*peers), OPTIONS, NOW_S).peer == chosen


def test_a_burst_spreads_over_stale_peers_one_each():
    router = make_router("a:1", "b:1", "c:1")
    late_s = STALE_AFTER_S + 1
    chosen = [decide(router, str(i), late_s).peer for i in range(5)]
    assert chosen == ["a:1", "b:1", "c:1", None, None]


def test_a_burst_spreads_over_alike_peers_at_once():
    router = make_router("a:1", "b:1", "c:1", "d:1")
    for peer in "abcd":
        router.heard(f"{peer}:1", now_s=0.0, is_ready=True, prefill_tokens_per_s=1000.0)
    chosen = [decide(router, str(i), 1.0).peer for i in range(8)]
    assert [chosen.count(f"{peer}:1") for peer in "abcd"] == [2, 2, 2, 2]


def test_a_hot_prefix_spills_over_when_its_peer_drowns():
    router = make_router("a:1", "b:1")
    for peer in ("a:1", "b:1"):
        router.heard(peer, now_s=0.0, is_ready=True, prefill_tokens_per_s=1000.0)
    asked = prompt(4000, peer_hit_tokens={"a:1": 3000})
    chosen = [router.route(str(i), asked, local=LOCAL, now_s=0.0).peer for i in range(8)]
    assert chosen[:3] == ["a:1"] * 3, "less work there than anywhere"
    assert chosen.count("b:1") >= 1
    router.check()


# ---------------------------------------------------------------- the state around it


def make_router(*peers: str) -> Router:
    router = Router(peers=peers or ("a:1",), options=OPTIONS)
    for peer in peers or ("a:1",):
        router.heard(peer, now_s=0.0, is_ready=True)
    return router


def decide(router: Router, request_id: str, now_s: float) -> Route:
    return router.route(request_id, prompt(), local=LOCAL, now_s=now_s)


def test_a_remote_route_counts_before_anything_is_sent():
    """E3: two requests decided in one moment do not both see an idle peer."""
    router = make_router("a:1", "b:1")
    assert [decide(router, f"r{i}", 0.0).peer for i in range(4)] == ["a:1", "b:1"] * 2
    router.check()
    for i in range(4):
        router.ended(f"r{i}", "completed", now_s=1.0)
    router.check()
    assert {router.peer(p).num_inflight_tokens for p in ("a:1", "b:1")} == {0}


def test_a_local_route_has_nothing_to_end():
    router = make_router()
    assert router.route("r", prompt(5), local=LOCAL, now_s=0.0).name == "local"
    with pytest.raises(KeyError):
        router.ended("r", "completed", now_s=0.0)


def test_a_request_has_one_route_and_one_end():
    router = make_router()
    decide(router, "r", 0.0)
    with pytest.raises(AssertionError, match="r has a route"):
        decide(router, "r", 0.0)
    router.ended("r", "cancelled", now_s=0.0)
    with pytest.raises(KeyError):
        router.ended("r", "cancelled", now_s=0.0)


def test_a_failed_peer_is_probed_by_one_request_at_a_time_and_comes_back():
    router = make_router()
    decide(router, "r0", 0.0)
    router.ended("r0", "peer_stuck", now_s=2.0)
    assert decide(router, "r1", 2.0).reason == "peer_down"
    assert decide(router, "r1", 2.0 + FIRST_BACKOFF_S - 0.01).reason == "peer_down"
    probe_s = 2.0 + FIRST_BACKOFF_S
    assert decide(router, "probe", probe_s).peer == "a:1"
    assert decide(router, "r2", probe_s).reason == "peer_down"
    router.ended("probe", "completed", now_s=probe_s + 1)
    assert [decide(router, f"s{i}", probe_s + 1).name for i in range(3)] == ["remote"] * 3


def test_the_backoff_doubles_with_each_failed_probe_up_to_its_limit():
    router = make_router()
    now_s, waits = 0.0, []
    for i in range(8):
        assert decide(router, f"r{i}", now_s).name == "remote"
        router.ended(f"r{i}", "transfer_failed", now_s=now_s)
        retry_at_s = router.peer("a:1").retry_at_s
        assert retry_at_s is not None
        waits.append(retry_at_s - now_s)
        assert not router.is_usable("a:1", retry_at_s - 0.001)
        now_s = retry_at_s
    assert waits == [1, 2, 4, 8, 16, MAX_BACKOFF_S, MAX_BACKOFF_S, MAX_BACKOFF_S]


def test_transfers_that_fail_together_count_as_one_failure():
    router = make_router()
    for i in range(5):
        decide(router, f"r{i}", 0.0)
    for i in range(5):
        router.ended(f"r{i}", "peer_down", now_s=1.0 + i / 10)
    assert router.peer("a:1").num_failures == 1
    router.heard("a:1", now_s=1.5, is_ready=True)
    assert router.is_usable("a:1", 1.5), "a restarted peer is back with its first handshake"


def test_a_peer_that_shakes_hands_but_fails_transfers_stays_out():
    router = make_router()
    decide(router, "r0", 0.0)
    router.ended("r0", "peer_stuck", now_s=2.0)
    router.heard("a:1", now_s=2.1, is_ready=True)
    assert decide(router, "r1", 2.1).name == "remote"
    assert decide(router, "r2", 2.1).reason == "peer_down"
    router.ended("r1", "peer_stuck", now_s=4.1)
    router.heard("a:1", now_s=4.2, is_ready=True)
    assert not router.is_usable("a:1", 4.2)
    router.heard("a:1", now_s=6.0, is_ready=True)
    assert router.is_usable("a:1", 6.1), "handshakes do not push the backoff off"


def test_a_silent_or_loading_peer_is_out_until_it_is_heard_ready():
    router = make_router()
    router.unreachable("a:1", now_s=1.0)
    assert decide(router, "r", 1.0).reason == "peer_down"
    router.heard("a:1", now_s=1.5, is_ready=False)
    assert decide(router, "r", 1.5).reason == "peer_down"
    router.heard("a:1", now_s=1.6, is_ready=True)
    assert decide(router, "r", 1.6).name == "remote"


@pytest.mark.parametrize("late_s", [1.1, 5.0, STALE_AFTER_S])
def test_a_draining_peer_gets_nothing_however_late_the_next_handshake_is(late_s):
    router = make_router()
    decide(router, "old", 0.0)
    router.heard("a:1", now_s=0.5, is_ready=False)
    router.ended("old", "completed", now_s=0.5)
    assert decide(router, "r", 0.5 + late_s).reason == "peer_down"
    router.heard("a:1", now_s=20.0, is_ready=True)
    assert decide(router, "s", 20.0).name == "remote"


def test_a_peer_that_was_not_ready_and_fell_silent_is_tried():
    router = make_router()
    router.heard("a:1", now_s=0.5, is_ready=False)
    assert decide(router, "r", 0.6 + STALE_AFTER_S).name == "remote"
    assert decide(router, "s", 0.6 + STALE_AFTER_S).reason == "peer_down"


@pytest.mark.parametrize("outcome", ["peer_overloaded", "transfer_failed", "slower_than_local"])
def test_no_end_of_a_transfer_makes_a_draining_peer_ready(outcome):
    router = make_router()
    decide(router, "old", 0.0)
    router.heard("a:1", now_s=0.5, is_ready=False)
    router.ended("old", outcome, now_s=0.5, retry_after_s=0.0)
    assert decide(router, "r", 5.0).reason == "peer_down"


def test_silences_in_a_row_make_request_probes_rare():
    router = make_router()
    for i in range(10):
        router.unreachable("a:1", now_s=float(i))
    assert not router.is_usable("a:1", 9.0 + MAX_BACKOFF_S - 0.01)
    assert router.is_usable("a:1", 9.0 + MAX_BACKOFF_S)
    router.heard("a:1", now_s=50.0, is_ready=True)
    router.unreachable("a:1", now_s=50.0)
    assert router.is_usable("a:1", 50.0 + FIRST_BACKOFF_S), "hearing it starts the count anew"


def test_an_overloaded_peer_gets_the_wait_it_asked_for():
    router = make_router()
    decide(router, "r0", 0.0)
    decide(router, "r1", 0.0)
    router.ended("r0", "peer_overloaded", now_s=1.0, retry_after_s=3.0)
    router.heard("a:1", now_s=2.0, is_ready=True)
    assert decide(router, "r2", 3.9).reason == "peer_overloaded"
    assert decide(router, "r2", 4.0).name == "remote"
    router.ended("r2", "peer_overloaded", now_s=5.0, retry_after_s=1e9)
    assert not router.is_usable("a:1", 5.0 + MAX_BACKOFF_S - 0.01)
    router.heard("a:1", now_s=5.0 + MAX_BACKOFF_S, is_ready=True)
    assert router.is_usable("a:1", 5.0 + MAX_BACKOFF_S)
    decide(router, "r3", 36.0)
    router.ended("r3", "peer_overloaded", now_s=36.0, retry_after_s=20.0)
    router.ended("r1", "completed", now_s=37.0)
    assert router.is_usable("a:1", 37.0), "a finished transfer made room"


def test_a_late_overload_does_not_shorten_a_backoff():
    router = make_router()
    decide(router, "r0", 0.0)
    decide(router, "r1", 0.0)
    router.ended("r0", "peer_down", now_s=1.0)
    before = router.peer("a:1")
    router.ended("r1", "peer_overloaded", now_s=1.0, retry_after_s=0.0)
    assert router.peer("a:1") == replace(
        before, num_inflight=0, num_inflight_tokens=0, num_inflight_bytes=0
    )
    assert decide(router, "r2", 1.5).reason == "peer_down"


def test_a_peer_slower_than_we_are_gets_a_pause():
    router = make_router()
    decide(router, "r0", 0.0)
    router.ended("r0", "slower_than_local", now_s=5.0)
    assert decide(router, "r1", 5.0 + SLOW_BACKOFF_S - 0.01).reason == "peer_overloaded"
    assert router.is_usable("a:1", 5.0 + SLOW_BACKOFF_S)
    assert router.peer("a:1").num_failures == 0


def test_an_incompatible_peer_stays_out_until_it_is_heard_again():
    router = make_router()
    decide(router, "r0", 0.0)
    decide(router, "r1", 0.0)
    router.ended("r0", "peer_incompatible", now_s=1.0)
    router.ended("r1", "transfer_failed", now_s=1.5)
    assert decide(router, "r2", 1000.0).reason == "peer_incompatible"
    router.heard("a:1", now_s=1000.0, is_ready=True)
    assert decide(router, "r2", 1000.0).name == "remote"
    router.incompatible("a:1", now_s=1001.0)
    assert not router.is_usable("a:1", 2000.0)


@pytest.mark.parametrize("outcome", ["cancelled", "pool_full", "prompt_refused"])
def test_what_is_not_the_peer_s_doing_leaves_its_state(outcome):
    router = make_router()
    before = router.peer("a:1")
    decide(router, "r0", 0.0)
    router.ended("r0", outcome, now_s=1.0)
    assert router.peer("a:1") == before


def test_rates_are_learnt_from_transfers_and_move_slowly():
    router = make_router()
    router.heard("a:1", now_s=0.0, is_ready=True, prefill_tokens_per_s=50.0)
    assert decide(router, "r", 0.0).predicted_ttft_s == 80.0
    router.ended(
        "r",
        "completed",
        now_s=1.0,
        rates=TransferRates(prefill_tokens_per_s=100.0, link_bytes_per_s=None),
    )
    assert decide(router, "s", 1.0).predicted_ttft_s == 40.0
    router.ended(
        "s",
        "completed",
        now_s=1.0,
        rates=TransferRates(prefill_tokens_per_s=200.0, link_bytes_per_s=1e6),
    )
    assert router.peer("a:1").prefill_tokens_per_s == pytest.approx(1.7 / (0.7 / 100 + 1 / 200))
    assert router.peer("a:1").link_bytes_per_s == 1e6


class RouterMachine(RuleBasedStateMachine):
    """Any order of decisions, ends and news."""

    @initialize()
    def start(self):
        self.router = Router(peers=("a:1", "b:1"), options=OPTIONS)
        self.now_s = 0.0
        self.inflight: dict[str, str] = {}
        self.num_requests = 0

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds):
        self.now_s += seconds

    @rule(num_tokens=st.integers(0, 2000), force=st.sampled_from([None, "local", "remote"]))
    def decide(self, num_tokens, force):
        self.num_requests += 1
        name = f"r{self.num_requests}"
        before = {p.peer: p for p in self.router.view(LOCAL).peers}
        decided = self.router.route(
            name, prompt(num_tokens), local=LOCAL, now_s=self.now_s, force=force
        )
        if decided.peer is not None:
            assert before[decided.peer].refusal(self.now_s) is None
            assert self.router.peer(decided.peer).num_inflight == (
                before[decided.peer].num_inflight + 1
            )
            self.inflight[name] = decided.peer

    @rule(data=st.data(), outcome=st.sampled_from(OUTCOMES), retry_after_s=st.floats(-1, 100))
    def end(self, data, outcome, retry_after_s):
        if self.inflight:
            name = data.draw(st.sampled_from(sorted(self.inflight)))
            del self.inflight[name]
            self.router.ended(name, outcome, now_s=self.now_s, retry_after_s=retry_after_s)

    @rule(
        peer=st.sampled_from(["a:1", "b:1"]), kind=st.sampled_from(["ready", "loading", "x", "i"])
    )
    def news(self, peer, kind):
        match kind:
            case "x":
                self.router.unreachable(peer, now_s=self.now_s)
            case "i":
                self.router.incompatible(peer, now_s=self.now_s)
            case _:
                self.router.heard(peer, now_s=self.now_s, is_ready=kind == "ready")

    @invariant()
    def in_flight_is_exact_and_every_backoff_ends(self):
        self.router.check()
        peers = self.router.view(LOCAL).peers
        assert sum(p.num_inflight for p in peers) == len(self.inflight)
        for p in peers:
            if p.num_inflight == 0 and p.state != "incompatible":
                assert p.refusal(self.now_s + MAX_BACKOFF_S) is None

    def teardown(self):
        for name in self.inflight:
            self.router.ended(name, "cancelled", now_s=self.now_s)
        self.router.check()
        assert all(p.num_inflight_tokens == 0 for p in self.router.view(LOCAL).peers)


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_check_notices_a_count_that_no_route_explains():
    router = make_router()
    decide(router, "r", 0.0)
    router._inflight.clear()
    with pytest.raises(AssertionError, match="in flight"):
        router.check()
