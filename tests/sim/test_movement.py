"""A prefix moves ahead of a prefill, counts until it is there, and costs time only where it is not."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.config.simulation_table import Failure, LinkChange, SimulationOptions
from prfaas.config.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest
from prfaas.sim.chrome_trace import Recorder
from prfaas.sim.deployment import Deployment
from tests.scheduler.planning import FAST, KV, SLOW
from tests.sim.deployments import MODEL, planned

NUM_BLOCKS = 100
HELD = NUM_BLOCKS * MOONCAKE_BLOCK_TOKENS
ASKED = HELD + 600
BLOCKS = tuple(range(NUM_BLOCKS + 2))
AT_S = 10.0
MOVED_S = KV(HELD) / 12.5e9
"""Neither end but the sender has anything of it."""


def moving(recorder: Recorder | None = None, **options) -> Deployment:
    caches = {"local_cache_tokens": 10**7, "prfaas_cache_tokens": 10**7}
    return Deployment(
        MODEL,
        planned(num_local=2 + 2),
        policy="predictive",
        options=SimulationOptions(**({"moves_cache": True, "pieces": 1000} | caches | options)),
        seed=0,
        recorder=recorder,
    )


def held_here(recorder: Recorder | None = None, **options) -> Deployment:
    """Return one whose local cluster has the prefix: the fast instances are worth moving it to."""
    deployment = moving(recorder, **options)
    deployment.cache.add(BLOCKS[:NUM_BLOCKS])
    return deployment


def held_there(**options) -> Deployment:
    """Return one whose PrfaaS cluster has the prefix, and long work to do first."""
    deployment = moving(**options)
    (remote,) = deployment.remotes
    remote.cache.add(BLOCKS[:NUM_BLOCKS])
    for _ in range(remote.station.num_servers):
        remote.station.submit(300.0, lambda: None)
    remote.changed()
    return deployment


def ttft_s(deployment: Deployment) -> float:
    """Let the prompt come at AT_S and all of it end; return TTFT."""
    deployment.start([TraceRequest(AT_S, ASKED, 1, BLOCKS)])
    deployment.events.run(until_s=AT_S + 0.04)
    deployment.check()
    deployment.events.run()
    deployment.check()
    (found_s,) = deployment.tally.ttfts_s
    return found_s


def test_a_prefill_there_begins_behind_the_prefix_that_came_from_here():
    deployment = held_here()
    assert ttft_s(deployment) == pytest.approx(MOVED_S + 0.02 + FAST(600), rel=0.02)
    assert deployment.tally.num_moved == deployment.tally.num_remote == 1
    assert deployment.tally.moved_bytes == KV(HELD)
    assert deployment.tally.hit_tokens == HELD
    assert deployment.egress_bytes == pytest.approx(KV(ASKED) - (KV(HELD) - KV(0)))
    assert deployment.remotes[0].link_there.sent_bytes == KV(HELD)
    assert abs(deployment.tally.errors_s[0]) < 0.02


def test_a_prefill_here_begins_behind_the_prefix_that_came_from_there():
    deployment = held_there()
    assert ttft_s(deployment) == pytest.approx(MOVED_S + 0.02 + SLOW(600), rel=0.02)
    assert (deployment.tally.num_moved, deployment.tally.num_remote) == (1, 0)
    assert deployment.tally.hit_tokens == HELD
    assert deployment.egress_bytes == KV(HELD)
    assert deployment.cache.hit_tokens(BLOCKS, ASKED) > HELD
    assert abs(deployment.tally.errors_s[0]) < 0.02


def test_the_destination_has_the_prefix_from_its_arrival_on():
    deployment = held_here()
    deployment.start([TraceRequest(AT_S, ASKED, 1, BLOCKS)])
    cache = deployment.remotes[0].cache
    deployment.events.run(until_s=AT_S + MOVED_S)
    assert cache.hit_tokens(BLOCKS, ASKED) == 0
    deployment.events.run(until_s=AT_S + MOVED_S + 0.02)
    assert cache.hit_tokens(BLOCKS, ASKED) == HELD


def test_without_leave_nothing_moves():
    for deployment in (held_here(moves_cache=False), held_there(moves_cache=False)):
        ttft_s(deployment)
        assert deployment.tally.num_movements == 0


@pytest.mark.parametrize("held", [held_here, held_there])
@pytest.mark.parametrize(
    "trouble",
    [
        {"link": (LinkChange(at_s=AT_S + 0.03, bandwidth_fraction=0.0), LinkChange(at_s=60.0))},
        {"link": (LinkChange(at_s=AT_S + 0.03, bandwidth_fraction=1e-4), LinkChange(at_s=60.0))},
        {"failures": (Failure(role="prfaas", at_s=AT_S + 0.03, for_s=9.0, instances=9),)},
    ],
    ids=["outage", "slow", "lost"],
)
def test_a_movement_that_fails_costs_time_only(held, trouble):
    deployment = held(**trouble)
    found_s = ttft_s(deployment)
    assert (deployment.tally.num_moved, deployment.tally.num_moves_given_up) == (0, 1)
    assert deployment.tally.num_done == 1
    least_s = 1.0 if "failures" in trouble else 3.0
    assert least_s < found_s < 30.0


def test_a_prompt_whose_prefix_stalls_is_prefilled_whole():
    stalled = LinkChange(at_s=AT_S + 0.03, bandwidth_fraction=0.0)
    deployment = held_there(link=(stalled, LinkChange(at_s=60.0)))
    assert ttft_s(deployment) == pytest.approx(0.03 + 5.0 + SLOW(ASKED), abs=0.05)
    assert deployment.tally.hit_tokens == 0


def test_movements_share_the_link_with_what_else_comes():
    alone, beside = held_there(), held_there()
    beside.remotes[0].link.send(50e9, lambda: None)
    assert ttft_s(beside) == ttft_s(alone)  # all of it was through before
    beside = held_there()
    beside.events.at(AT_S, lambda: beside.remotes[0].link.send(50e9, lambda: None))
    assert ttft_s(beside) == pytest.approx(ttft_s(held_there()) + MOVED_S, abs=0.01)


def test_a_recording_shows_the_movement_on_its_own_direction():
    recorder = Recorder(1)
    ttft_s(held_here(recorder))
    (span,) = [span for span in recorder.spans if span.name == "movement"]
    assert (span.process, span.outcome) == ("prfaas-0 link there", "completed")
    assert (span.start_s, span.end_s) == pytest.approx((AT_S, AT_S + MOVED_S + 0.01))


CHANGES = st.builds(
    LinkChange,
    at_s=st.floats(0, 60),
    bandwidth_fraction=st.sampled_from([0.0, 0.002, 1.0]),
    competing_flows=st.sampled_from([0, 40]),
)
FAILURES = st.builds(
    Failure,
    role=st.sampled_from(["prfaas", "prefill"]),
    at_s=st.floats(0, 60),
    for_s=st.floats(1, 30),
    instances=st.integers(1, 3),
)


def conversations(num: int, rate_rps: float) -> list[TraceRequest]:
    """Return turns of ten conversations, each longer than the one before."""
    random, now_s, lengths = Random(3), 0.0, [0] * 10
    found = []
    for _ in range(num):
        now_s += random.expovariate(rate_rps)
        which = random.randrange(10)
        lengths[which] += random.randint(4, 40)
        blocks = tuple(range(1000 * which, 1000 * which + lengths[which]))
        found.append(TraceRequest(now_s, lengths[which] * MOONCAKE_BLOCK_TOKENS, 20, blocks))
    return found


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    changes=st.lists(CHANGES, max_size=3),
    failures=st.lists(FAILURES, max_size=2),
    here=st.sampled_from([0, 10**5, 10**7]),
    there=st.sampled_from([0, 10**7]),
    clusters=st.sampled_from([1, 2]),
    slo_s=st.sampled_from([1.0, 1e6]),
)
def test_no_request_and_no_movement_is_lost_and_the_same_seed_does_the_same(
    changes, failures, here, there, clusters, slo_s
):
    seen = []
    for _ in range(2):
        deployment = moving(
            local_cache_tokens=here,
            prfaas_cache_tokens=there,
            clusters=clusters,
            ttft_slo_s=slo_s,
            pieces=4,
            jitter_s=0.01,
            link=(*sorted(changes, key=lambda change: change.at_s), LinkChange(at_s=100.0)),
            failures=tuple(failures),
        )
        deployment.start(conversations(60, 2.0))
        while deployment.events.num_pending:
            deployment.events.run(max_actions=50)
            deployment.check()
        assert deployment.tally.num_done == 60
        seen.append((deployment.tally, deployment.events.num_run))
    assert seen[0] == seen[1]


def test_conversations_move_between_clusters_without_any_trouble():
    deployment = moving(clusters=2)
    deployment.start(conversations(60, 2.0))
    deployment.events.run()
    deployment.check()
    tally = deployment.tally
    assert tally.num_movements == tally.num_moved > 5
