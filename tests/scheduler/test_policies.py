"""Each policy chooses as it says, and none chooses a cluster that cannot serve."""

from dataclasses import replace
from math import exp, inf, isfinite, nan, sqrt

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
from prfaas.scheduler.policies import (
    POLICIES,
    QUEUE_GAIN_PER_S,
    Predictive,
    Static,
    Threshold,
    as_policy,
    make_policy,
)
from tests.scheduler.planning import FAST, profile

PROFILES = Profiles(local=profile(), remote=profile(FAST, decodes=False))
LINK = LinkView(bytes_per_s=1e10)
SMALL_BUDGET = {"budget_limit_bytes": 7e9, "budget_bytes_per_s": 7e8}
BUDGET = {"budget_limit_bytes": 7e10, "budget_bytes_per_s": 7e9}


def view(
    *, local: PrefillView | None = None, queue_s: float = 0.0, link: LinkView = LINK
) -> ClustersView:
    prefill = PrefillView(
        num_instances=1, num_busy=int(queue_s > 0), residual_work_s=queue_s, taken_s=0.0
    )
    return ClustersView(
        local=local or PrefillView(num_instances=1),
        remotes=(RemoteView(name="r", prefill=prefill, link=link),),
    )


def make(name: str):
    return make_policy(as_policy(name), profiles=PROFILES, threshold_tokens=10_000)


@pytest.mark.parametrize(
    ("name", "tokens", "remote", "reason"),
    [
        ("local", 100_000, None, "policy"),
        ("always-remote", 100, 0, "policy"),
        ("static", 10_000, None, "short"),
        ("static", 10_001, 0, "long"),
        ("threshold", 10_000, None, "short"),
        ("threshold", 10_001, 0, "long"),
        ("predictive", 100, 0, "earlier"),
    ],
)
def test_a_decision_says_where_and_why(name, tokens, remote, reason):
    decision = make(name).decide(Prompt(num_tokens=tokens), view(), 0.0)
    assert (decision.remote, decision.reason) == (remote, reason)
    rate = PROFILES.local if remote is None else PROFILES.remote
    assert rate is not None
    assert decision.predicted_ttft_s == pytest.approx(rate.prefill_s(tokens), abs=0.3)


@settings(max_examples=60)
@given(
    name=st.sampled_from(POLICIES),
    tokens=st.integers(1, 200_000),
    num_local=st.sampled_from([0, 1, 5]),
    remotes=st.lists(
        st.tuples(st.sampled_from([0, 1, 5]), st.sampled_from([0.0, 1e9]), st.floats(0, 30)),
        max_size=3,
    ),
    budget=st.sampled_from([-1e9, 0.0, 1e9, inf]),
    now_s=st.floats(0, 100),
)
def test_no_policy_chooses_a_cluster_that_cannot_serve_while_another_can(
    name, tokens, num_local, remotes, budget, now_s
):
    views = tuple(
        RemoteView(
            name=str(index),
            prefill=PrefillView(num_instances=num, num_busy=num, residual_work_s=work_s),
            link=LinkView(bytes_per_s=rate, budget_bytes=budget, **BUDGET),
        )
        for index, (num, rate, work_s) in enumerate(remotes)
    )
    seen = ClustersView(local=PrefillView(num_instances=num_local), remotes=views)
    decision = make(name).decide(Prompt(num_tokens=tokens), seen, now_s)
    usable = any(each.is_usable for each in views)
    if decision.remote is None:
        assert num_local or not views
    else:
        assert views[decision.remote].is_usable or not (num_local or usable)
    assert decision.predicted_ttft_s >= 0


def test_a_wanted_cluster_that_is_gone_is_the_reason():
    gone = ClustersView(
        local=PrefillView(num_instances=1),
        remotes=(replace(view().remotes[0], link=LinkView(bytes_per_s=0)),),
    )
    assert make("static").decide(Prompt(num_tokens=50_000), gone, 0.0).reason == "no_remote"
    naive = view(local=PrefillView(num_instances=0))
    assert make("static").decide(Prompt(num_tokens=10), naive, 0.0).reason == "no_local"


def test_prediction_stays_where_the_wait_is_shorter_by_more_than_the_work():
    policy = Predictive(profiles=PROFILES)
    short, long = Prompt(num_tokens=1_000), Prompt(num_tokens=60_000)
    gains_s = [PROFILES.local.prefill_s(p.num_tokens) - FAST(p.num_tokens) for p in (short, long)]
    seen = view(queue_s=sum(gains_s) / 2)
    assert policy.decide(short, seen, 0.0).remote is None
    assert policy.decide(long, seen, 0.0).remote == 0


def priced(tokens: int, budget_fraction: float, *, queue_s: float = 0.0):
    """Decide with so much of the budget left, and a queue here."""
    link = LinkView(bytes_per_s=1e9, budget_bytes=budget_fraction * 7e9, **SMALL_BUDGET)
    here = PrefillView(num_instances=1, num_busy=int(queue_s > 0), residual_work_s=queue_s)
    seen = view(link=link, local=here)
    return Predictive(profiles=PROFILES).decide(Prompt(num_tokens=tokens), seen, 0.0)


def test_as_the_budget_empties_the_prompts_that_save_least_for_a_byte_stay_first():
    assert [priced(tokens, 1.0).remote for tokens in (1_000, 100_000)] == [0, 0]
    spent = [priced(tokens, -0.5) for tokens in (1_000, 100_000)]
    assert [d.remote for d in spent] == [None, 0]
    assert spent[0].reason == "egress_budget"


def test_a_long_queue_here_is_worth_overdrawing_the_budget():
    assert priced(1_000, -1.0).remote is None
    assert priced(1_000, -1.0, queue_s=30.0).remote == 0


def test_a_prompt_stays_to_spare_those_who_wait_there():
    prefill = PrefillView(num_instances=4, num_busy=4, num_waiting=40, residual_work_s=0.4)
    there = RemoteView(name="r", prefill=prefill, link=LINK)
    seen = ClustersView(local=PrefillView(num_instances=1), remotes=(there,))
    decision = Predictive(profiles=PROFILES).decide(Prompt(num_tokens=1_000), seen, 0.0)
    assert (decision.remote, decision.reason) == (None, "spares_others")
    selfish = Predictive(profiles=PROFILES, concern=0.0)
    assert selfish.decide(Prompt(num_tokens=1_000), seen, 0.0).remote == 0


def test_the_nearest_cluster_is_chosen_by_prediction():
    busy, idle = view(queue_s=20.0).remotes[0], view().remotes[0]
    seen = ClustersView(local=PrefillView(num_instances=1), remotes=(busy, idle))
    for name in ("always-remote", "static", "threshold", "predictive"):
        assert make(name).decide(Prompt(num_tokens=50_000), seen, 0.0).remote == 1


def adapted(seen: ClustersView, **options) -> float:
    return Threshold(profiles=PROFILES, threshold_tokens=1000.0, **options).adapted(seen, 0.0)


def test_the_threshold_rises_with_queue_and_link_there_and_falls_with_the_queue_here():
    here = PrefillView(num_instances=1, num_busy=1, residual_work_s=2.0)
    assert adapted(view(queue_s=2.0)) == pytest.approx(1000 * exp(2 * QUEUE_GAIN_PER_S))
    assert adapted(view(local=here)) == pytest.approx(1000 * exp(-2 * QUEUE_GAIN_PER_S))
    behind = LinkView(bytes_per_s=1e9, backlog_bytes=2e9)
    assert adapted(view(link=behind)) == adapted(view(queue_s=2.0))


@pytest.mark.parametrize(
    ("use", "factor"), [(0.0, 1.0), (0.7, 1.0), (0.85, sqrt(2)), (1.0, 2.0), (3.0, 2.0)]
)
def test_beyond_the_allowed_share_of_the_link_the_threshold_goes_up_to_twice_itself(use, factor):
    link = LinkView(bytes_per_s=1e10, egress_bytes_per_s=use * 1e10)
    assert adapted(view(link=link)) == pytest.approx(1000 * factor)


def test_the_threshold_keeps_its_bounds_and_is_the_given_one_without_a_choice():
    assert adapted(view(queue_s=1e6), range_factor=2.0) == pytest.approx(2000)
    here = PrefillView(num_instances=1, num_busy=1, residual_work_s=1e6)
    assert adapted(view(local=here), range_factor=2.0) == pytest.approx(500)
    assert adapted(view(link=LinkView(bytes_per_s=0.0))) == 1000
    assert adapted(view(local=PrefillView(num_instances=0))) == 1000


@pytest.mark.parametrize("threshold", [0.0, 1.0, -5.0, 1e18, inf, -inf])
def test_a_threshold_at_the_edge_is_one_side_for_all(threshold):
    policy = Static(profiles=PROFILES, threshold_tokens=threshold)
    decision = policy.decide(Prompt(num_tokens=2), view(), 0.0)
    assert decision.remote == (None if threshold > 2 else 0)


SLO_S = 10.0


def slo_decision(
    tokens: int, *, here_s: float, there_s: float, waited_s: float = 0.0, **link: float
):
    """Decide with an SLO, behind so many seconds on both sides."""
    here = PrefillView(num_instances=1, num_busy=int(here_s > 0), residual_work_s=here_s)
    seen = view(local=here, queue_s=there_s, link=replace(LINK, **link))
    policy = Predictive(profiles=PROFILES, ttft_slo_s=SLO_S)
    return policy.decide(Prompt(num_tokens=tokens, arrived_s=-waited_s), seen, 0.0)


@pytest.mark.parametrize(
    ("tokens", "here_s", "there_s", "waited_s", "remote", "reason"),
    [
        (1_000, 0.0, 0.0, 0.0, 0, "earlier"),
        (1_000, 7.9, 30.0, 0.0, None, "earlier"),
        (1_000, 8.1, 30.0, 0.0, None, "held"),
        (1_000, 30.0, 30.0, 0.0, None, "held"),
        (1_000, 30.0, 8.0, 0.0, 0, "earlier"),
        (1_000, 30.0, 8.0, 1.0, None, "held"),
        (1_000, 30.0, 0.0, 8.9, 0, "late"),
        (1_000, 0.0, 30.0, 99.0, None, "late"),
        (120_000, 0.0, 30.0, 0.0, None, "late"),
        (120_000, 5.0, 30.0, 0.0, None, "held"),
    ],
)
def test_with_an_slo_a_prompt_goes_where_it_is_in_time_or_where_nobody_waits(
    tokens, here_s, there_s, waited_s, remote, reason
):
    decision = slo_decision(tokens, here_s=here_s, there_s=there_s, waited_s=waited_s)
    assert (decision.remote, decision.reason) == (remote, reason)
    assert decision.is_held == (reason == "held")


def test_a_cheaper_cluster_that_is_too_late_gives_way():
    waiting = PrefillView(num_instances=1, num_busy=1, num_waiting=20, residual_work_s=5.0)
    policy = Predictive(profiles=PROFILES, ttft_slo_s=SLO_S)
    asked = Prompt(num_tokens=1_000, arrived_s=0.0)
    decision = policy.decide(asked, view(local=waiting, queue_s=9.0), 0.0)
    assert (decision.remote, decision.reason) == (None, "within_slo")


def test_a_late_prompt_waits_for_the_link_too():
    full = {"bytes_per_s": 1e8, "backlog_bytes": 1e9}
    assert slo_decision(90_000, here_s=30.0, there_s=0.0, waited_s=9.0, **full).is_held
    assert slo_decision(90_000, here_s=30.0, there_s=0.0, waited_s=9.0).reason == "late"


def test_what_has_to_go_is_not_held():
    seen = view(local=PrefillView(num_instances=1, num_busy=1, residual_work_s=99), queue_s=99.0)
    decision = Predictive(profiles=PROFILES, ttft_slo_s=SLO_S).decide(
        Prompt(num_tokens=1_000), seen, 0.0
    )
    assert not decision.is_held


@pytest.mark.parametrize(
    ("slo_s", "reason"),
    [(None, "earlier"), (1e18, "earlier"), (inf, "earlier"), (32.0, "held"), (1e-9, "held")],
)
def test_an_slo_at_the_edge_holds_all_or_none(slo_s, reason):
    policy = make_policy("predictive", profiles=PROFILES, threshold_tokens=1.0, ttft_slo_s=slo_s)
    seen = view(local=PrefillView(num_instances=1, num_busy=1, residual_work_s=30), queue_s=30.0)
    decision = policy.decide(Prompt(num_tokens=10_000, arrived_s=0.0), seen, 0.0)
    assert decision.reason == reason


@pytest.mark.parametrize("slo_s", [0.0, -1.0, nan])
def test_an_slo_that_nothing_keeps_is_refused(slo_s):
    with pytest.raises(ValueError, match="an SLO of"):
        make_policy("predictive", profiles=PROFILES, threshold_tokens=1.0, ttft_slo_s=slo_s)


@pytest.mark.parametrize("name", POLICIES)
def test_a_threshold_that_is_no_number_is_refused(name):
    with pytest.raises(ValueError, match="no number"):
        make_policy(name, profiles=PROFILES, threshold_tokens=nan)


@pytest.mark.parametrize("bad", [0.0, -1.0, nan])
@pytest.mark.parametrize("name", POLICIES)
def test_a_link_without_a_rate_is_an_outage(name, bad):
    decision = make(name).decide(
        Prompt(num_tokens=50_000), view(link=LinkView(bytes_per_s=bad)), 0.0
    )
    assert decision.remote is None
    assert isfinite(decision.predicted_ttft_s)


def test_an_unknown_policy_is_named():
    with pytest.raises(ValueError, match="no policy 'best'; there are local, always-remote"):
        as_policy("best")
