"""What the live policies decide: a table, hysteresis, and what holds for any view."""

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.scheduler.forecast import (
    ClustersView,
    LinkView,
    PrefillView,
    Profiles,
    Prompt,
    RemoteView,
)
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.policies import Decision, PolicyName, make_policy
from prfaas.scheduler.router import REASONS, Route, Router, RouteRequest, route
from prfaas.scheduler.sides import (
    BUDGET_BURST_S,
    MARGIN_FRACTION,
    RETURN_FRACTION,
    spent_bytes,
    spent_fraction,
    spent_with,
)
from prfaas.scheduler.view import LocalView, PeerState, PeerView, View
from tests.scheduler.planning import profile

NOW_S = 50.0
PREDICTIVE = SchedulerOptions()
ADAPTIVE = SchedulerOptions(policy="threshold", threshold_tokens=512)
LOCAL = LocalView(prefill_tokens_per_s=1000.0)
PEER = PeerView(peer="a:1", state="ready", heard_s=NOW_S, prefill_tokens_per_s=1000.0, rtt_s=0.02)
"""As fast as the node itself, and as idle."""


def asked(num_tokens: int = 4000, **changes: Any) -> RouteRequest:
    return RouteRequest(
        **({"num_tokens": num_tokens, "hit_tokens": 0, "num_kv_bytes": 10 * num_tokens} | changes)
    )


def decided(
    request: RouteRequest,
    options: SchedulerOptions = PREDICTIVE,
    local: LocalView = LOCAL,
    **peer: Any,
) -> tuple[str, str]:
    found = route(request, View(peers=(replace(PEER, **peer),), local=local), options, NOW_S)
    return found.name, found.reason


@pytest.mark.parametrize(
    ("num_tokens", "local", "peer", "expected"),
    [
        # Equal machines: the side of t.
        (4000, {}, {}, ("remote", "long")),
        (400, {}, {}, ("local", "short")),
        (512, {}, {}, ("local", "short")),
        (513, {}, {}, ("remote", "long")),
        # One rate is unknown, zero or no number: the side of t.
        (4000, {"prefill_tokens_per_s": None}, {}, ("remote", "long")),
        (4000, {"prefill_tokens_per_s": 0.0}, {}, ("remote", "long")),
        (4000, {"prefill_tokens_per_s": -1.0}, {}, ("remote", "long")),
        (4000, {"prefill_tokens_per_s": float("nan")}, {}, ("remote", "long")),
        (4000, {"prefill_tokens_per_s": 1e12}, {"prefill_tokens_per_s": None}, ("remote", "long")),
        (400, {"prefill_tokens_per_s": None}, {}, ("local", "short")),
        # The other side is earlier, by less and by more than the margin.
        (4000, {"prefill_tokens_per_s": 1300.0}, {}, ("remote", "long")),
        (4000, {"prefill_tokens_per_s": 1400.0}, {}, ("local", "earlier")),
        (400, {}, {"prefill_tokens_per_s": 1300.0, "rtt_s": 0.0}, ("local", "short")),
        (400, {}, {"prefill_tokens_per_s": 1400.0, "rtt_s": 0.0}, ("remote", "earlier")),
        # A round trip that takes longer than the prefill.
        (400, {}, {"prefill_tokens_per_s": 1e6, "rtt_s": 0.5}, ("local", "short")),
        # Queues on either side.
        (4000, {}, {"num_queue_tokens": 2000}, ("local", "earlier")),
        (4000, {"num_waiting_tokens": 2000}, {"num_queue_tokens": 2000}, ("remote", "long")),
        (400, {"num_waiting_tokens": 2000}, {}, ("remote", "earlier")),
        (400, {"num_waiting_tokens": -5}, {}, ("local", "short")),
        # A link that is slow, that is fast, and that is busy.
        (4000, {}, {"link_bytes_per_s": 1e3}, ("local", "earlier")),
        (4000, {}, {"link_bytes_per_s": 1e9}, ("remote", "long")),
        (4000, {}, {"link_bytes_per_s": 1e4, "num_inflight_bytes": 80_000}, ("local", "earlier")),
        # An egress budget that is spent makes bytes dear, whatever the link could carry in time.
        (4000, {}, {"link_bytes_per_s": 2e4, "spent_bytes": 0.0}, ("remote", "long")),
        (
            4000,
            {},
            {"link_bytes_per_s": 2e4, "spent_bytes": 1.4e5, "spent_at_s": NOW_S},
            ("local", "earlier"),
        ),
        (
            4000,
            {"prefill_tokens_per_s": 900.0},
            {"link_bytes_per_s": 2e4, "spent_bytes": 1.4e5, "spent_at_s": NOW_S},
            ("local", "egress_budget"),
        ),
        (
            4000,
            {},
            {"link_bytes_per_s": 2e4, "spent_bytes": 1.4e5, "spent_at_s": 0.0},
            ("remote", "long"),
        ),
    ],
)
def test_predictive_takes_the_side_of_t_unless_the_other_is_earlier_by_a_margin(
    num_tokens, local, peer, expected
):
    assert decided(asked(num_tokens), local=replace(LOCAL, **local), **peer) == expected


@pytest.mark.parametrize(
    ("num_tokens", "local", "peer", "expected"),
    [
        (512, {}, {}, ("local", "short")),
        (513, {}, {}, ("remote", "long")),
        (600, {}, {"num_queue_tokens": 1000}, ("local", "short")),
        (600, {}, {"num_queue_tokens": 10**9}, ("local", "short")),
        (500, {"num_waiting_tokens": 1000}, {}, ("remote", "long")),
        (500, {"num_waiting_tokens": 1000}, {"num_queue_tokens": 1000}, ("local", "short")),
        (600, {}, {"link_bytes_per_s": 1e4, "goodput_bytes_per_s": 7e3}, ("remote", "long")),
        (600, {}, {"link_bytes_per_s": 1e4, "goodput_bytes_per_s": 1e4}, ("local", "short")),
        (600, {"prefill_tokens_per_s": None}, {"num_queue_tokens": 10**9}, ("remote", "long")),
    ],
)
def test_threshold_moves_t_with_queues_and_link(num_tokens, local, peer, expected):
    assert decided(asked(num_tokens), ADAPTIVE, replace(LOCAL, **local), **peer) == expected


@pytest.mark.parametrize(
    ("policy", "num_tokens", "expected"),
    [
        ("local", 10**9, ("local", "policy")),
        ("local", 0, ("local", "policy")),
        ("always-remote", 0, ("remote", "policy")),
        ("always-remote", 10**9, ("remote", "policy")),
        ("static", 512, ("local", "short")),
        ("static", 513, ("remote", "long")),
    ],
)
def test_policies_that_look_at_the_length_alone_ignore_queues_and_links(
    policy, num_tokens, expected
):
    busy: dict[str, Any] = {"num_queue_tokens": 10**6, "link_bytes_per_s": 1.0}
    assert decided(asked(num_tokens), SchedulerOptions(policy=policy)) == expected
    assert decided(asked(num_tokens), SchedulerOptions(policy=policy), **busy) == expected


@pytest.mark.parametrize("policy", ["local", "always-remote", "static"])
@given(num_tokens=st.integers(1, 2000), threshold=st.integers(0, 2000))
def test_they_decide_as_the_simulator_s_do(policy: PolicyName, num_tokens: int, threshold: int):
    profiles = Profiles(local=profile(), remote=profile())
    same = make_policy(policy, profiles=profiles, threshold_tokens=threshold)
    idle = PrefillView(num_instances=1, taken_s=NOW_S)
    clusters = ClustersView(
        local=idle, remotes=(RemoteView(name="r", prefill=idle, link=LinkView(bytes_per_s=1e9)),)
    )
    found: Decision = same.decide(Prompt(num_tokens=num_tokens), clusters, NOW_S)
    options = SchedulerOptions(policy=policy, threshold_tokens=threshold)
    expected = ("local" if found.remote is None else "remote", found.reason)
    assert decided(asked(num_tokens), options) == expected


@pytest.mark.parametrize("options", [PREDICTIVE, ADAPTIVE])
@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"state": "incompatible"}, "peer_incompatible"),
        ({"state": "down", "retry_at_s": NOW_S + 1}, "peer_down"),
        ({"state": "overloaded", "retry_at_s": NOW_S + 1}, "peer_overloaded"),
        ({"state": "not_ready"}, "peer_down"),
    ],
)
def test_no_policy_prefers_a_peer_that_is_out(options, state, reason):
    busy = replace(LOCAL, num_waiting_tokens=10**9)
    assert decided(asked(), options, busy, **state) == ("local", reason)
    assert decided(asked(400), options, busy, **state) == ("local", "short")


# ---------------------------------------------------------------- hysteresis


def flips(ratio: float, noise: float, seed: int) -> int:
    """Changes of side in a hundred decisions, the local side `ratio` times as slow as the peer."""
    random = Random(seed)
    router = Router(peers=("a:1",), options=PREDICTIVE)
    router.heard("a:1", now_s=NOW_S, is_ready=True, prefill_tokens_per_s=1000.0)
    names = []
    for index in range(100):
        seen = 1000.0 / ratio * (1 + random.uniform(-noise, noise))
        local = LocalView(prefill_tokens_per_s=seen)
        found = router.route(str(index), asked(), local=local, now_s=NOW_S)
        names.append(found.name)
        if found.peer is not None:
            router.ended(str(index), "cancelled", now_s=NOW_S)
    return sum(before != after for before, after in pairwise(names))


@pytest.mark.parametrize("ratio", [0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1, 2.0])
def test_a_tenth_of_noise_changes_the_side_once_at_most(ratio):
    assert max(flips(ratio, 0.1, seed) for seed in range(5)) <= 1


def test_a_side_that_was_left_is_taken_again_when_it_is_as_good():
    router = Router(peers=("a:1",), options=PREDICTIVE)
    router.heard("a:1", now_s=NOW_S, is_ready=True, prefill_tokens_per_s=1000.0)

    def name_at(rate: float, num_tokens: int = 4000) -> str:
        local = LocalView(prefill_tokens_per_s=rate)
        found = router.route("r", asked(num_tokens), local=local, now_s=NOW_S)
        if found.peer is not None:
            router.ended("r", "cancelled", now_s=NOW_S)
        return found.name

    assert RETURN_FRACTION < MARGIN_FRACTION
    assert name_at(1200.0) == "remote"
    assert name_at(1400.0) == "local"
    assert name_at(1200.0) == "local", "not yet as good"
    assert name_at(1200.0, num_tokens=40_000) == "remote", "of another magnitude"
    assert name_at(1000.0) == "remote"
    assert name_at(1200.0) == "remote"


# ---------------------------------------------------------------- the egress budget


@given(
    bytes_per_s=st.floats(1.0, 1e12),
    target=st.floats(1e-6, 1.0),
    spendings=st.lists(st.tuples(st.integers(0, 10**12), st.floats(0, 1e4)), max_size=6),
)
def test_a_budget_is_overdrawn_by_as_much_as_it_holds_and_comes_back(
    bytes_per_s, target, spendings
):
    peer, now_s = replace(PEER, link_bytes_per_s=bytes_per_s), 0.0
    burst_bytes = BUDGET_BURST_S * target * bytes_per_s
    for num_bytes, pause_s in spendings:
        now_s += pause_s
        spent, at_s = spent_with(peer, num_bytes, target, now_s)
        peer = replace(peer, spent_bytes=spent, spent_at_s=at_s)
        assert 0 <= spent_bytes(peer, target, now_s) <= 2 * burst_bytes * (1 + 1e-9)
        assert spent_fraction(peer, target, now_s) <= 2 + 1e-9
    assert spent_bytes(peer, target, now_s + 2 * BUDGET_BURST_S + 1) == 0


def test_a_link_of_unknown_rate_has_no_budget():
    assert spent_with(PEER, 10**9, 0.7, NOW_S) == (0.0, 0.0)
    assert spent_fraction(PEER, 0.7, NOW_S) == 0.0


def test_scarcity_is_what_is_spent_of_the_budget_for_policies_that_have_one():
    for options, expected in ((PREDICTIVE, 0.5), (SchedulerOptions(threshold_tokens=512), 0.0)):
        router = Router(peers=("a:1",), options=options)
        router.heard("a:1", now_s=0.0, is_ready=True, prefill_tokens_per_s=1000.0)
        router.measured("a:1", rtt_s=0.1, bytes_per_s=1000.0)
        request = asked(num_kv_bytes=3500)
        router.route("r", request, local=LocalView(), now_s=0.0)
        assert router.scarcity("a:1", 0.0) == pytest.approx(expected)
        assert router.scarcity("a:1", 6.0) == 0.0
        assert router.scarcity("nobody:1", 0.0) == 0.0
        router.ended("r", "completed", now_s=1.0)


# ---------------------------------------------------------------- what holds for any view

RATES = st.none() | st.floats(allow_nan=True, allow_infinity=True)
PEERS = st.builds(
    PeerView,
    peer=st.sampled_from(["a:1", "b:1", "c:1"]),
    state=st.sampled_from(get_args(PeerState)),
    prefill_tokens_per_s=RATES,
    link_bytes_per_s=RATES,
    goodput_bytes_per_s=RATES,
    rtt_s=st.none() | st.floats(0, 10),
    num_queue_tokens=st.integers(-10, 10**12),
    heard_s=st.none() | st.floats(0, 60),
    num_failures=st.integers(0, 2),
    retry_at_s=st.none() | st.floats(0, 100),
    num_inflight=st.integers(0, 3),
    num_inflight_tokens=st.integers(0, 10**12),
    num_inflight_bytes=st.integers(0, 10**15),
    spent_bytes=st.floats(0, 1e15),
    spent_at_s=st.floats(0, 60),
)


@settings(max_examples=60)
@given(
    num_tokens=st.integers(0, 2000),
    hit_fraction=st.floats(0, 1),
    peers=st.lists(PEERS, max_size=3, unique_by=lambda p: p.peer),
    rate=RATES,
    waiting=st.integers(-5, 10**9),
    policy=st.sampled_from(get_args(PolicyName)),
    target=st.floats(1e-9, 1),
    has_left=st.booleans(),
)
def test_any_view_gives_one_route_of_a_known_reason_to_no_peer_that_is_out(
    num_tokens, hit_fraction, peers, rate, waiting, policy, target, has_left
):
    request = asked(num_tokens, hit_tokens=int(num_tokens * hit_fraction))
    view = View(
        peers=tuple(peers),
        local=LocalView(num_waiting_tokens=waiting, prefill_tokens_per_s=rate),
    )
    options = SchedulerOptions(policy=policy, egress_target=target)

    def once() -> Route:
        return route(request, view, options, NOW_S, has_left=has_left)

    found = once()
    assert found == once()
    assert found.reason in REASONS
    assert (found.name == "remote") == (found.peer is not None)
    if found.peer is not None:
        (chosen,) = [peer for peer in peers if peer.peer == found.peer]
        assert chosen.refusal(NOW_S) is None
        assert policy != "local"


@given(among=st.sets(st.sampled_from(["a:1", "b:1"])), force=st.sampled_from([None, "remote"]))
def test_a_choice_among_some_peers_is_one_of_them_and_booked_as_any(among, force):
    router = Router(peers=("a:1", "b:1", "c:1"), options=SchedulerOptions(threshold_tokens=512))
    for name in router.peers:
        router.heard(name, now_s=0.0, is_ready=True, prefill_tokens_per_s=1000.0)
    views = [router.peer(name) for name in sorted(among)]
    before = router.view(LOCAL)
    wanted = router.decide(asked(), local=LOCAL, now_s=0.0, force=force, among=views)
    assert router.view(LOCAL) == before, "nothing comes of it"
    found = router.route("r", asked(), local=LOCAL, now_s=0.0, force=force, among=views)
    assert found == wanted
    assert found.peer in (among or {None})
    if found.peer is not None:
        assert router.peer(found.peer).num_inflight_bytes == 40_000
    router.check()


def test_a_peer_that_is_removed_may_still_end_what_is_in_flight_and_come_back():
    router = Router(peers=("a:1",), options=SchedulerOptions(threshold_tokens=512))
    router.heard("a:1", now_s=0.0, is_ready=True)
    for request_id in ("r", "s"):
        assert router.route(request_id, asked(), local=LOCAL, now_s=0.0).peer == "a:1"
    router.remove_peer("a:1")
    router.remove_peer("a:1")
    router.heard("a:1", now_s=0.0, is_ready=True)
    router.unreachable("a:1", now_s=0.0)
    router.incompatible("a:1", now_s=0.0)
    router.measured("a:1", rtt_s=1.0)
    assert router.peers == ()
    assert not router.is_usable("a:1", 0.0)
    assert router.route("t", asked(), local=LOCAL, now_s=0.0).reason == "no_peer"
    router.ended("r", "completed", now_s=1.0)
    router.add_peer("a:1")
    router.add_peer("a:1")
    assert router.peer("a:1").num_inflight == 1
    router.ended("s", "completed", now_s=1.0)
    assert router.peer("a:1").num_inflight == 0
    router.check()


@pytest.mark.parametrize("tokens", [-1.0, float("nan"), float("inf"), -float("inf")])
def test_a_threshold_that_is_no_length_is_refused(tokens):
    router = Router(peers=(), options=PREDICTIVE)
    with pytest.raises(ValueError, match="a threshold of"):
        router.set_threshold(tokens)
    assert router.threshold_tokens == 512


@pytest.mark.parametrize(
    ("tokens", "name"), [(0.0, "remote"), (1.0, "remote"), (4000.0, "local"), (1e300, "local")]
)
def test_a_threshold_that_was_set_is_what_counts(tokens, name):
    router = Router(peers=("a:1",), options=PREDICTIVE)
    router.heard("a:1", now_s=0.0, is_ready=True)
    router.set_threshold(tokens)
    assert router.decide(asked(), local=LocalView(), now_s=0.0).name == name
