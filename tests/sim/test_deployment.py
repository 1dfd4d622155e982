"""A deployment serves every request, by its policy, whatever fails."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.config.simulation_table import Failure, LinkChange, Rebalancing
from prfaas.config.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest
from prfaas.scheduler.policies import POLICIES
from prfaas.scheduler.profile import Link
from prfaas.scheduler.rebalancer import RebalanceOptions
from prfaas.sim.deployment import Deployment
from tests.scheduler.planning import FAST, KV, SLOW, model
from tests.sim.deployments import arriving, deployed, planned

ONE_TOKEN = 1


def ttfts(deployment: Deployment, requests: list[TraceRequest]) -> list[float]:
    """Run to the end; return TTFT in the order of first tokens."""
    deployment.start(requests)
    deployment.events.run()
    deployment.check()
    assert deployment.tally.num_done == len(requests)
    return deployment.tally.ttfts_s


def test_alone_a_first_token_takes_the_prefill_or_the_link_and_a_round_trip():
    long = [TraceRequest(0.0, 50_000, 8)]
    assert ttfts(deployed(planned("homogeneous")), long) == [pytest.approx(SLOW(50_000))]
    (there_s,) = ttfts(deployed(planned("naive"), pieces=1000), long)
    assert there_s == pytest.approx(FAST(50_000) + 0.02, abs=1e-3)
    (apart_s,) = ttfts(deployed(planned("naive"), pieces=1), long)
    assert apart_s == pytest.approx(FAST(50_000) + KV(50_000) / 12.5e9 + 0.02)
    thin = model(link=Link(bytes_per_s=1e7))
    (link_s,) = ttfts(deployed(planned("naive", of=thin), of=thin, pieces=1000), long)
    assert link_s == pytest.approx(KV(50_000) / 1e7, rel=0.001)


def test_a_sequence_decodes_the_rest_of_its_answer():
    deployment = deployed(planned("homogeneous"))
    (ttft_s,) = ttfts(deployment, [TraceRequest(0.0, 1000, 101)])
    assert deployment.tally.done_s == pytest.approx(ttft_s + 100 * 0.01)
    for num_tokens in (0, 1):
        deployment = deployed(planned("homogeneous"))
        (ttft_s,) = ttfts(deployment, [TraceRequest(0.0, 1000, num_tokens)])
        assert deployment.tally.done_s == ttft_s


def test_one_instance_predicts_its_own_queue_exactly():
    at = planned("homogeneous", num_local=2)
    assert at.shape.num_prefill == 1
    deployment = deployed(at)
    waits = ttfts(deployment, arriving(300, 0.3))
    assert max(waits) > 20
    assert max(map(abs, deployment.tally.errors_s)) < 1e-6


def test_static_routes_by_the_threshold_of_the_plan():
    at, requests = planned(), arriving(500, 0.2)
    deployment = deployed(at)
    ttfts(deployment, requests)
    assert at.threshold_tokens is not None
    assert deployment.tally.num_remote == sum(
        r.input_tokens > at.threshold_tokens for r in requests
    )


def test_the_bytes_on_the_link_are_those_of_the_remote_prompts():
    requests = arriving(200, 0.2)
    deployment = deployed(planned("naive"))
    ttfts(deployment, requests)
    assert deployment.egress_bytes == pytest.approx(sum(KV(r.input_tokens) for r in requests))


def test_a_hit_is_neither_computed_nor_sent_again():
    tokens = 8 * MOONCAKE_BLOCK_TOKENS
    requests = [TraceRequest(100.0 * turn, tokens, ONE_TOKEN, tuple(range(8))) for turn in range(3)]
    deployment = deployed(planned("naive"), local_cache_tokens=10**6, prfaas_cache_tokens=10**6)
    first_s, again_s, _ = ttfts(deployment, requests)
    assert again_s < first_s
    assert deployment.tally.hit_tokens == 2 * (tokens - 1)
    states = KV(0)
    assert deployment.egress_bytes == pytest.approx(KV(tokens) + 2 * states, rel=1e-3)
    without = deployed(planned("naive"))
    assert ttfts(without, requests) == [pytest.approx(first_s)] * 3


def test_an_outage_makes_stalled_prefills_local():
    out = LinkChange(at_s=0.0, bandwidth_fraction=0.0)
    deployment = deployed(planned(), link=(out, LinkChange(at_s=40.0)), policy="always-remote")
    requests = [TraceRequest(0.5, 50_000, 8), TraceRequest(60.0, 50_000, 8)]
    stalled_s, later_s = ttfts(deployment, requests)
    assert stalled_s > 5 + SLOW(50_000)
    assert later_s < 5
    assert (deployment.tally.num_fallbacks, deployment.tally.num_remote) == (1, 2)


def test_without_a_local_prefill_an_outage_is_waited_for():
    out = LinkChange(at_s=0.0, bandwidth_fraction=0.0)
    deployment = deployed(planned("naive"), link=(out, LinkChange(at_s=40.0)))
    (ttft_s,) = ttfts(deployment, [TraceRequest(0.5, 5_000, 8)])
    assert 39 < ttft_s < 60


def test_routing_follows_a_report_of_a_failure_once_it_is_there():
    failure = Failure(role="prfaas", at_s=1.0, for_s=100.0, instances=2)
    requests = [TraceRequest(at_s, 50_000, 8) for at_s in (0.5, 50.0, 200.0)]
    deployment = deployed(planned(), failures=(failure,))
    lost_s, away_s, back_s = ttfts(deployment, requests)
    assert deployment.tally.num_lost == 1
    assert lost_s == pytest.approx(0.5 + SLOW(50_000)), "a broken connection says so at once"
    assert away_s == pytest.approx(SLOW(50_000))
    assert back_s == pytest.approx(FAST(50_000), rel=0.05)
    assert deployment.tally.reasons["no_remote"] >= 1


def test_a_failure_is_of_the_cluster_that_it_names():
    failures = (
        Failure(role="prfaas", at_s=1.0, for_s=1.0, instances=9, cluster=1),
        Failure(role="prfaas", at_s=1.0, for_s=1.0, instances=9, cluster=7),
    )
    deployment = deployed(planned("naive"), clusters=2, failures=failures)
    requests = [TraceRequest(0.0, 50_000, 1)] * 2
    deployment.start(requests)
    deployment.events.run(until_s=1.5)
    assert [remote.station.num_servers for remote in deployment.remotes] == [1, 0]
    assert deployment.tally.num_lost == 1
    deployment.events.run()
    assert [remote.station.num_servers for remote in deployment.remotes] == [1, 1]
    assert deployment.tally.num_done == 2


def test_over_a_slow_link_prefills_go_on_here_from_what_has_come():
    slow = LinkChange(at_s=2.0, bandwidth_fraction=1e-4)
    deployment = deployed(planned(), link=(slow,), policy="always-remote", pieces=16)
    requests = [TraceRequest(0.0, 50_000, 1), TraceRequest(8.0, 50_000, 1)]
    slow_s, after_s = ttfts(deployment, requests)
    assert deployment.tally.num_fallbacks == 1
    kept = deployment.tally.prompt_tokens  # both prompts; the second one goes here at once
    assert after_s == pytest.approx(SLOW(50_000)), f"the breaker is open, of {kept} tokens none go"
    assert deployment.tally.reasons["no_remote"] == 2
    assert 4.0 + SLOW(10_000) < slow_s < 6.0 + SLOW(50_000), "some pieces came in the first 2 s"
    assert deployment.tally.hit_tokens == 0, "nothing was in a cache"


def test_after_an_outage_one_prefill_shows_that_the_cluster_works():
    """Six come at once when the breaker is half open: one goes there, and all once it is through."""
    changes = (LinkChange(at_s=0.0, bandwidth_fraction=0.0), LinkChange(at_s=10.0))
    deployment = deployed(planned(num_local=12), link=changes, policy="always-remote")
    requests = [TraceRequest(at_s, 50_000, 1) for at_s in (0.5, *[20.0] * 6, 40.0, 40.0)]
    ttfts(deployment, requests)
    assert deployment.tally.num_fallbacks == 1
    assert deployment.tally.num_remote == 1 + 1 + 2
    assert deployment.tally.reasons["no_remote"] == 1 + 5


def test_a_failed_decode_instance_has_its_sequences_prefilled_again():
    failure = Failure(role="decode", at_s=20.0, for_s=5.0, instances=9)
    deployment = deployed(planned("homogeneous"), failures=(failure,))
    (ttft_s,) = ttfts(deployment, [TraceRequest(0.0, 1000, 2000)])
    assert deployment.tally.num_lost == 1
    tokens_before = (20.0 - ttft_s) / 0.01
    again_s = max(20.0 + SLOW(1000 + tokens_before), 25.0)
    done_s = again_s + (2000 - tokens_before) * 0.01
    assert deployment.tally.done_s == pytest.approx(done_s, abs=0.05)


@pytest.mark.slow
def test_roles_follow_prompts_that_the_plan_did_not_expect():
    requests = [TraceRequest(0.8 * i, 1_000, 3_000) for i in range(4_000)]
    options = RebalanceOptions(period_s=20.0, dwell_s=60.0, num_prompts=100)
    rebalance = Rebalancing(options=options, conversion_s=10.0)
    at = planned(num_local=8)
    still, moving = deployed(at), deployed(at, rebalance=rebalance)
    for deployment in (still, moving):
        ttfts(deployment, requests)
    assert still.num_conversions == 0
    assert moving.num_conversions >= 1
    assert moving.decode.num_up == at.shape.num_decode + moving.num_conversions
    assert moving.prefill.num_servers == at.shape.num_prefill - moving.num_conversions
    assert moving.tally.done_s <= still.tally.done_s


def test_clusters_share_instances_and_link_and_work_side_by_side():
    deployment = deployed(planned("naive"), clusters=5)
    assert [remote.station.num_servers for remote in deployment.remotes] == [1, 1]
    rates = [remote.link.available_bytes_per_s for remote in deployment.remotes]
    assert rates == [6.25e9, 6.25e9]
    ttfts(deployment, [TraceRequest(0.0, 50_000, 8), TraceRequest(0.0, 50_000, 8)])
    assert [remote.link.sent_bytes > 0 for remote in deployment.remotes] == [True, True]


ROLES = st.sampled_from(["prfaas", "prefill", "decode"])
FAILURES = st.builds(
    Failure,
    role=ROLES,
    at_s=st.floats(0, 200),
    for_s=st.floats(1, 100),
    instances=st.integers(1, 5),
    cluster=st.integers(0, 2),
)
CHANGES = st.builds(
    LinkChange,
    at_s=st.floats(0, 200),
    bandwidth_fraction=st.sampled_from([0.0, 0.001, 1.0]),
    competing_flows=st.sampled_from([0, 40]),
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(["prfaas", "homogeneous", "naive"]),
    policy=st.sampled_from(POLICIES),
    failures=st.lists(FAILURES, max_size=3),
    changes=st.lists(CHANGES, max_size=4),
    rate=st.sampled_from([0.2, 3.0]),
    clusters=st.sampled_from([1, 2]),
    decode=st.sampled_from(["fluid", "stepped"]),
)
def test_every_request_is_done_whatever_fails_and_the_same_seed_does_the_same(
    kind, policy, failures, changes, rate, clusters, decode
):
    requests = arriving(40, rate, seed=1)
    seen = []
    for _ in range(2):
        deployment = deployed(
            planned(kind),
            policy=policy,
            failures=tuple(failures),
            link=(*sorted(changes, key=lambda c: c.at_s), LinkChange(at_s=400.0)),
            jitter_s=0.01,
            clusters=clusters,
            decode=decode,
            rebalance=Rebalancing(
                options=RebalanceOptions(period_s=5.0, dwell_s=5.0, num_prompts=8), conversion_s=2.0
            ),
        )
        deployment.start(requests)
        for _ in range(20):
            deployment.events.run(until_s=deployment.events.now_s + 10.0)
            deployment.check()
        deployment.events.run()
        deployment.check()
        assert deployment.tally.num_done == len(requests)
        seen.append((deployment.tally.ttfts_s, deployment.tally.done_s, deployment.events.num_run))
    assert seen[0] == seen[1]
