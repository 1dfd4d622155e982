"""What was decided counts at once, and is taken back when it ends."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.scheduler.dispatch import BUDGET_BURST_S, Dispatcher
from prfaas.scheduler.forecast import LinkView, PrefillView, Profiles, Prompt, RemoteView
from prfaas.scheduler.policies import AlwaysRemote, Decision, Local, Predictive
from prfaas.scheduler.ways import Movement
from tests.scheduler.planning import FAST, KV, profile

PROFILES = Profiles(local=profile(), remote=profile(FAST, decodes=False))
LOCAL = PrefillView(num_instances=1)


def cluster(taken_s: float = 0.0, **prefill) -> RemoteView:
    return RemoteView(
        name="r",
        prefill=PrefillView(**({"num_instances": 2, "taken_s": taken_s} | prefill)),
        link=LinkView(bytes_per_s=1e9),
    )


def dispatcher() -> Dispatcher:
    return Dispatcher(
        AlwaysRemote(profiles=PROFILES), PROFILES, remotes=(cluster(),), max_egress_fraction=0.5
    )


def test_a_decision_is_in_the_next_view_until_a_report_has_it():
    router, prompt = dispatcher(), Prompt(num_tokens=8000)
    router.decide(prompt, local=LOCAL, now_s=1.0)
    router.decide(prompt, local=LOCAL, now_s=2.0)
    (seen,) = router.view(LOCAL, 2.0).remotes
    assert (seen.prefill.num_sent, seen.prefill.sent_work_s) == (2, 2 * FAST(8000))
    assert seen.link.backlog_bytes == 2 * KV(8000)
    router.saw(0, cluster(taken_s=1.5, num_busy=1))
    (seen,) = router.view(LOCAL, 2.0).remotes
    assert (seen.prefill.num_sent, seen.prefill.num_busy) == (1, 1)
    assert seen.link.backlog_bytes == 2 * KV(8000), "a report says nothing of what arrived"
    router.ended(0, prompt)
    router.ended(0, prompt)
    assert router.view(LOCAL, 2.0).remotes[0].link.backlog_bytes == 0


def test_the_budget_is_spent_by_decisions_and_comes_back_with_time():
    router, prompt = dispatcher(), Prompt(num_tokens=8000)
    limit = BUDGET_BURST_S * 0.5e9
    assert router.view(LOCAL, 0.0).remotes[0].link.budget_bytes == limit
    for _ in range(20):
        router.decide(prompt, local=LOCAL, now_s=0.0)
    spent = router.view(LOCAL, 0.0).remotes[0].link.budget_bytes
    assert spent == pytest.approx(limit - 20 * KV(8000))
    assert spent < 0
    assert router.view(LOCAL, 2.0).remotes[0].link.budget_bytes == pytest.approx(spent + 1e9)
    for _ in range(100):
        router.decide(prompt, local=LOCAL, now_s=2.0)
    assert router.view(LOCAL, 2.0).remotes[0].link.budget_bytes == -limit
    assert router.view(LOCAL, 1e6).remotes[0].link.budget_bytes == limit


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 100_000), st.booleans()), max_size=20))
def test_when_nothing_is_in_flight_nothing_is_counted(steps):
    router, flying = dispatcher(), []
    for tokens, ends in steps:
        prompt = Prompt(num_tokens=tokens)
        router.decide(prompt, local=LOCAL, now_s=0.0)
        flying.append(prompt)
        if ends:
            router.ended(0, flying.pop(0))
        assert router.num_inflight == len(flying)
    for prompt in flying:
        router.ended(0, prompt)
    router.saw(0, cluster(taken_s=1.0))
    (seen,) = router.view(LOCAL, 1.0).remotes
    assert (seen.link.backlog_bytes, seen.prefill.num_sent) == (0, 0)
    assert seen.prefill.sent_work_s == pytest.approx(0, abs=1e-6)


def test_a_new_policy_decides_and_keeps_what_is_in_flight():
    router = dispatcher()
    router.decide(Prompt(num_tokens=10), local=LOCAL, now_s=0.0)
    router.follow(Local(profiles=PROFILES))
    assert router.decide(Prompt(num_tokens=10), local=LOCAL, now_s=0.0).remote is None
    assert router.num_inflight == 1


@pytest.mark.parametrize("fraction", [-0.1, 1.1, math.nan, math.inf])
def test_a_share_of_the_links_that_is_none_is_refused(fraction):
    with pytest.raises(ValueError, match="of a link"):
        Dispatcher(Local(profiles=PROFILES), PROFILES, max_egress_fraction=fraction)


@pytest.mark.parametrize(("fraction", "remote"), [(0.0, None), (1e-9, None), (0.7, 0), (1.0, 0)])
def test_the_share_of_the_links_says_whether_bytes_may_be_spent(fraction, remote):
    policy = Predictive(profiles=PROFILES)
    router = Dispatcher(policy, PROFILES, remotes=(cluster(),), max_egress_fraction=fraction)
    router.decide(Prompt(num_tokens=1_000), local=LOCAL, now_s=0.0)
    assert router.decide(Prompt(num_tokens=90_000), local=LOCAL, now_s=0.0).remote == remote


@pytest.mark.parametrize("taken_s", [0.0, -100.0])
def test_a_burst_on_one_late_view_spreads_over_the_clusters(taken_s):
    seen = tuple(cluster(taken_s=taken_s, num_instances=1) for _ in range(3))
    router = Dispatcher(AlwaysRemote(profiles=PROFILES), PROFILES, remotes=seen)
    went = [router.decide(Prompt(num_tokens=9_000), local=LOCAL, now_s=0.0) for _ in range(9)]
    assert [[d.remote for d in went].count(index) for index in range(3)] == [3, 3, 3]


@dataclass(frozen=True)
class Fixed:
    """Always the same decision."""

    decision: Decision

    def decide(self, prompt, view, now_s):
        return self.decision


def test_a_prefix_that_moves_here_counts_until_it_is_here():
    movement = Movement(0, 5_000, 1e8)
    decision = Decision(remote=None, reason="moves_cache", predicted_ttft_s=1.0, movement=movement)
    router = Dispatcher(Fixed(decision), PROFILES, remotes=(cluster(),))
    before, asked = router.view(LOCAL, 0.0).remotes[0].link, Prompt(num_tokens=9_000)
    router.decide(asked, local=LOCAL, now_s=0.0)
    link = router.view(LOCAL, 0.0).remotes[0].link
    assert (link.backlog_bytes, router.num_inflight) == (1e8, 1)
    assert link.budget_bytes == before.budget_bytes - 1e8
    router.moved(asked, decision, now_s=1.0)
    assert router.view(LOCAL, 0.0).remotes[0].link.backlog_bytes == 0
    assert router.num_inflight == 0


def test_a_prefix_that_moves_there_leaves_less_to_compute_there():
    movement = Movement(None, 5_000, 1e8)
    decision = Decision(remote=0, reason="moves_cache", predicted_ttft_s=1.0, movement=movement)
    router = Dispatcher(Fixed(decision), PROFILES, remotes=(cluster(),))
    asked = Prompt(num_tokens=9_000, local_hit_tokens=5_000)
    router.decide(asked, local=LOCAL, now_s=0.0)
    assert router.view(LOCAL, 0.0).remotes[0].prefill.sent_work_s == FAST(4_000)


def test_a_prefill_behind_a_prefix_is_not_there_before_the_prefix_is():
    """A report taken while the prefix moves cannot have the prefill, whenever that was decided."""
    movement = Movement(None, 5_000, 1e8)
    decision = Decision(remote=0, reason="moves_cache", predicted_ttft_s=1.0, movement=movement)
    router = Dispatcher(Fixed(decision), PROFILES, remotes=(cluster(),))
    asked = Prompt(num_tokens=9_000, local_hit_tokens=5_000)
    router.decide(asked, local=LOCAL, now_s=0.0)
    router.saw(0, cluster(taken_s=3.0))
    (seen,) = router.view(LOCAL, 3.0).remotes
    assert (seen.prefill.num_sent, seen.prefill.sent_work_s) == (1, FAST(4_000))
    assert seen.link.outgoing_backlog_bytes == 1e8
    router.moved(asked, decision, now_s=4.0)
    (seen,) = router.view(LOCAL, 4.0).remotes
    assert (seen.prefill.num_sent, seen.link.outgoing_backlog_bytes) == (1, 0)
    assert router.num_inflight == 1
    router.saw(0, cluster(taken_s=5.0, num_busy=1))
    assert router.view(LOCAL, 5.0).remotes[0].prefill.num_sent == 0


def test_only_a_driver_that_can_move_cache_is_offered_to():
    for moves_cache in (False, True):
        router = Dispatcher(Local(profiles=PROFILES), PROFILES, moves_cache=moves_cache)
        assert router.view(LOCAL, 0.0).moves_cache == moves_cache


def test_a_held_prompt_counts_nowhere():
    held = Decision(remote=None, reason="held", predicted_ttft_s=1.0, is_held=True)
    router = Dispatcher(Fixed(held), PROFILES, remotes=(cluster(),))
    router.decide(Prompt(num_tokens=9_000, arrived_s=0.0), local=LOCAL, now_s=0.0)
    (seen,) = router.view(LOCAL, 0.0).remotes
    assert (router.num_inflight, seen.prefill.num_sent, seen.link.backlog_bytes) == (0, 0, 0)
