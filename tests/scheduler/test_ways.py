"""Every way is offered with its TTFT and price; cache moves only where that can pay and be done."""

from dataclasses import replace
from math import inf

import pytest

from prfaas.scheduler.forecast import (
    ClustersView,
    LinkView,
    PrefillView,
    Profiles,
    Prompt,
    RemoteView,
)
from prfaas.scheduler.policies import Predictive
from prfaas.scheduler.ways import PRICE, Movement, behind, bytes_price_s, ways
from tests.scheduler.planning import FAST, KV, SLOW, profile

PROFILES = Profiles(local=profile(), remote=profile(FAST, decodes=False))
LINK = LinkView(bytes_per_s=1e10, rtt_s=0.02)
IDLE = PrefillView(num_instances=1)


def view(link: LinkView = LINK, *, queue_s: float = 0.0, moves_cache: bool = True) -> ClustersView:
    there = replace(IDLE, num_busy=int(queue_s > 0), residual_work_s=queue_s)
    remote = RemoteView(name="r", prefill=there, link=link)
    return ClustersView(local=IDLE, remotes=(remote,), moves_cache=moves_cache)


def prompt(here: int, there: int) -> Prompt:
    return Prompt(num_tokens=60_000, local_hit_tokens=here, remote_hit_tokens=(there,))


def found(asked: Prompt, seen: ClustersView):
    return ways(PROFILES, asked, seen, 0.0, concern=1.0)


@pytest.mark.parametrize(
    ("here", "there", "sources"),
    [
        (0, 0, []),
        (5_000, 5_000, []),
        (0, 50_000, [0]),
        (50_000, 0, [None]),
        (50_000, 49_999, [None]),
        (49_999, 50_000, [0]),
    ],
)
def test_the_longest_prefix_may_move_to_the_other_cluster(here, there, sources):
    offered = [way.movement for way in found(prompt(here, there), view())]
    assert [each.source for each in offered if each is not None] == sources
    assert not any(way.movement for way in found(prompt(here, there), view(moves_cache=False)))


def test_a_prefix_from_there_saves_prefill_here_for_its_bytes():
    (way,) = [way for way in found(prompt(0, 50_000), view()) if way.movement is not None]
    assert way.remote is None
    assert way.movement == Movement(0, 50_000, KV(50_000))
    assert way.ttft_s == pytest.approx(KV(50_000) / 1e10 + 0.02 + SLOW(10_000))


def test_a_prefix_from_here_saves_prefill_there():
    (way,) = [way for way in found(prompt(50_000, 1_000), view()) if way.movement is not None]
    assert way.remote == 0
    moved_s = (KV(50_000) - (KV(1_000) - KV(0))) / 1e10
    assert way.ttft_s == pytest.approx(moved_s + 0.01 + FAST(10_000) + 0.02)


@pytest.mark.parametrize("queue_s", [0.0, 0.05, 30.0])
def test_a_movement_has_to_be_worth_its_time_even_behind_a_queue(queue_s):
    """A block saves 25 ms, and with its states takes 190 ms."""
    seen = view(replace(LINK, bytes_per_s=1e9), queue_s=queue_s)
    offered = found(prompt(512, 0), seen)
    alone, moved = (way for way in offered if way.remote == 0)
    assert moved.movement is not None
    assert moved.cost_s > alone.cost_s


def test_what_moves_already_is_waited_for():
    busy = replace(LINK, outgoing_backlog_bytes=1e10)
    soon, late = (
        next(way for way in found(prompt(50_000, 0), view(link)) if way.movement is not None)
        for link in (LINK, busy)
    )
    assert late.ttft_s == pytest.approx(soon.ttft_s + 1.0)


def test_behind_its_prefix_a_prompt_has_that_hit_and_no_other():
    asked, moved = prompt(5_000, 1_000), Movement(None, 5_000, 1e8)
    assert behind(asked, moved, 0) == prompt(5_000, 5_000)
    assert behind(replace(asked, remote_hit_tokens=()), moved, 1).remote_hit_tokens == (0, 5_000)
    assert behind(asked, Movement(0, 9_000, 1e8), None) == prompt(9_000, 1_000)


def test_a_decision_to_move_says_so():
    busy = view(queue_s=60.0)
    decision = Predictive(profiles=PROFILES).decide(prompt(0, 50_000), busy, 0.0)
    assert (decision.remote, decision.reason) == (None, "moves_cache")
    assert decision.movement is not None
    assert decision.predicted_ttft_s < PROFILES.local_ttft_s(prompt(0, 50_000), busy, 0.0)
    alone = Predictive(profiles=PROFILES).decide(
        prompt(0, 50_000), replace(busy, moves_cache=False), 0.0
    )
    assert alone.movement is None


def test_where_bandwidth_is_scarce_each_cache_is_judged_alone():
    scarce = LinkView(
        bytes_per_s=1e9, budget_bytes=-1e9, budget_limit_bytes=1e9, budget_bytes_per_s=1e8
    )
    decision = Predictive(profiles=PROFILES).decide(
        prompt(0, 50_000), view(scarce, queue_s=60.0), 0.0
    )
    assert (decision.remote, decision.movement) == (None, None)


def test_a_cluster_that_cannot_be_reached_lends_nothing():
    offered = found(prompt(0, 50_000), view(replace(LINK, bytes_per_s=0.0)))
    assert [way.movement for way in offered] == [None]


@pytest.mark.parametrize(
    ("limit", "left", "price_s"),
    [
        (inf, inf, 0.0),
        (7e9, 7e9, 0.0),
        (7e9, 3.5e9, PRICE / 2),
        (7e9, 0.0, PRICE),
        (7e9, -7e9, 2 * PRICE),
        (0.0, 0.0, inf),
    ],
)
def test_bytes_cost_more_the_less_of_the_budget_is_left(limit, left, price_s):
    link = replace(LINK, budget_limit_bytes=limit, budget_bytes=left, budget_bytes_per_s=7e8)
    remote = RemoteView(name="r", prefill=IDLE, link=link)
    assert bytes_price_s(remote, 7e8) == pytest.approx(price_s)
