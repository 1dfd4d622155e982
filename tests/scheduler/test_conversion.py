"""The long time scale: nodes take other modes slowly, one at a time, and a cluster can always decode."""

from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.scheduler.conversion import (
    JOINING_S,
    MAX_CONVERSION_S,
    Conversion,
    Converter,
    Observed,
)
from prfaas.scheduler.heartbeat import LinkReport, Mode
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.rebalancer import RebalanceOptions
from prfaas.scheduler.standing import FleetLimits, Standing
from prfaas.scheduler.work import Job
from tests.scheduler.fleets import beat, fleet_of, placed, prefill_beat, want

OPTIONS = RebalanceOptions(period_s=10.0, dwell_s=60.0, confirmations=3, num_prompts=100)
LIMITS = FleetLimits()
LINK = LinkReport(rtt_s=0.01, bytes_per_s=1e9)


def observed(**changes: Any) -> Observed:
    values: dict[str, Any] = {
        "prefill_tokens_per_s": 10_000.0,
        "decode_step_s": 0.02,
        "max_running": 8,
        "first_token_bytes": 1000.0,
        "long_bytes": 65_536_000.0,
    }
    return Observed(**(values | changes))


class Cluster:
    """Nodes that do what they are told, at once, and keep saying so."""

    def __init__(self, modes: str, options: RebalanceOptions = OPTIONS) -> None:
        names: dict[str, Mode] = {"p": "prefill", "d": "decode", "b": "both"}
        self.modes = {f"n{i}:1": names[mode] for i, mode in enumerate(modes)}
        self.nodes = {
            name: Standing(beat(name, mode=mode), "n", LIMITS, 0.0)
            for name, mode in self.modes.items()
        }
        self.converter = Converter(options)
        self.changes: list[tuple[float, Conversion]] = []

    def saw(self, num: int, tokens: int, outputs: int, seed: int = 0, noise: float = 0.0) -> None:
        random = Random(seed)
        for _ in range(num):
            factor = random.lognormvariate(0, noise)
            self.converter.saw(max(1, round(tokens * factor)), max(1, round(outputs / factor)))

    def look(self, now_s: float, seen: Observed | None = None, *, obeys: bool = True) -> None:
        for name, node in self.nodes.items():
            node.heard(beat(name, mode=self.modes[name]), "n", now_s)
        nodes = list(self.nodes.values())
        change = self.converter.look(nodes, seen or observed(), now_s)
        if change is not None:
            self.changes.append((now_s, change))
            self.nodes[change.node].want(change.mode)
            if obeys:
                self.modes[change.node] = change.mode

    def counts(self) -> tuple[int, int]:
        modes = [*self.modes.values()]
        return modes.count("prefill"), modes.count("decode")


# A prompt of 10,000 tokens is a second of prefill; an answer of 400 a second of a node that decodes 8 at once.
@pytest.mark.parametrize(
    ("modes", "tokens", "outputs", "expected"),
    [
        ("pppppd", 10_000, 400, (3, 3)),
        ("pddddd", 10_000, 400, (3, 3)),
        ("pddddd", 20_000, 400, (4, 2)),
        ("ppppdd", 1000, 2000, (1, 5)),
        ("pd", 100_000, 1, (1, 1)),
        ("pd", 1, 10_000, (1, 1)),
    ],
)
def test_modes_come_to_the_plan_one_at_a_time_with_dwell_between(modes, tokens, outputs, expected):
    cluster = Cluster(modes)
    cluster.saw(100, tokens, outputs)
    for second in range(600):
        cluster.look(float(second))
    assert cluster.counts() == expected
    assert all(
        late - early >= OPTIONS.dwell_s for (early, _), (late, _) in pairwise(cluster.changes)
    )
    assert not cluster.changes or cluster.changes[0][0] == 20.0, "the third look that wants it"


def test_noise_makes_nothing_flap():
    cluster = Cluster("pppddd")
    for second in range(0, 3600, 10):
        cluster.saw(5, 10_000, 400, seed=second, noise=0.3)
        rate = 10_000.0 * Random(second).uniform(0.9, 1.1)
        cluster.look(float(second), observed(prefill_tokens_per_s=rate))
    assert len(cluster.changes) <= 2, cluster.changes


def test_nodes_that_do_both_are_left_alone():
    cluster = Cluster("bbbb")
    cluster.saw(100, 50_000, 10)
    for second in range(600):
        cluster.look(float(second))
    assert cluster.changes == []


@pytest.mark.parametrize(
    "seen",
    [
        observed(prefill_tokens_per_s=None),
        observed(decode_step_s=None),
        observed(num_prfaas=1),
    ],
)
def test_nothing_is_converted_by_what_nobody_has_observed(seen):
    cluster = Cluster("pddddd")
    cluster.saw(100, 50_000, 10)
    for second in range(100):
        cluster.look(float(second), seen)
    assert cluster.changes == []
    assert cluster.converter.threshold_tokens is None


def test_too_few_prompts_change_nothing():
    cluster = Cluster("pddddd")
    cluster.saw(24, 50_000, 10)
    for second in range(100):
        cluster.look(float(second))
    assert cluster.changes == []


def test_with_prfaas_nodes_t_is_solved_for_the_roles_as_they_are():
    seen = observed(num_prfaas=2, prfaas_tokens_per_s=40_000.0, link_bytes_per_s=1e9)
    cluster = Cluster("pd")
    for tokens in range(100, 20_100, 200):
        cluster.converter.saw(tokens, 100)
    cluster.look(0.0, seen)
    threshold = cluster.converter.threshold_tokens
    assert threshold is not None
    # Both sides take equally long (eq. 7): sum of lengths below t / 10k = sum above / 80k.
    assert pytest.approx(threshold, rel=0.05) == 20_000 * (1 / 9) ** 0.5
    cluster.look(10.0, observed(num_prfaas=2, prfaas_tokens_per_s=40_000.0, link_bytes_per_s=5e6))
    slower = cluster.converter.threshold_tokens
    assert slower is not None
    assert slower > 1.3 * threshold, "half of a link, longer prompts over it"


def test_a_link_that_no_transfer_has_waited_for_is_no_limit():
    cluster, unknown = Cluster("pd"), Cluster("pd")
    for tokens in range(100, 20_100, 200):
        cluster.converter.saw(tokens, 100)
        unknown.converter.saw(tokens, 100)
    cluster.look(0.0, observed(num_prfaas=2, prfaas_tokens_per_s=40_000.0, link_bytes_per_s=1e12))
    unknown.look(0.0, observed(num_prfaas=2, prfaas_tokens_per_s=40_000.0, link_bytes_per_s=None))
    assert unknown.converter.threshold_tokens is not None
    assert unknown.converter.threshold_tokens == cluster.converter.threshold_tokens


def test_the_next_change_waits_for_the_node_or_gives_it_up():
    cluster = Cluster(
        "pddddd", RebalanceOptions(period_s=1.0, dwell_s=0.0, confirmations=1, num_prompts=100)
    )
    cluster.saw(100, 50_000, 10)
    for second in range(int(MAX_CONVERSION_S) + 1):
        cluster.look(float(second), obeys=False)
    (first_s, first), (second_s, _) = cluster.changes
    assert (first_s, second_s) == (0.0, MAX_CONVERSION_S)
    assert first.mode == "prefill"


def test_the_node_with_the_least_to_finish_is_converted():
    cluster = Cluster("pddd")
    cluster.saw(100, 50_000, 10)
    for name, num in (("n1:1", 3), ("n2:1", 1), ("n3:1", 2)):
        for i in range(num):
            cluster.nodes[name].load.sent(f"{name}-{i}", Job(100), 1e9)
    for second in range(30):
        cluster.look(float(second))
    assert [change for _, change in cluster.changes] == [Conversion("n2:1", "prefill")]


def test_decoders_that_are_still_starting_are_waited_for_and_those_that_never_come_are_not():
    cluster = Cluster("pp")
    for second in range(int(JOINING_S)):
        cluster.look(float(second))
    assert cluster.changes == []
    cluster.look(JOINING_S)
    assert cluster.changes == [(JOINING_S, Conversion("n0:1", "decode"))]


def test_a_cluster_whose_decoders_are_dead_gets_another_one_at_once():
    fleet = fleet_of(
        beat("a:1", mode="prefill"), beat("b:1", mode="prefill"), beat("d:1", mode="decode")
    )
    placed(fleet, "r", want(5000))
    assert fleet.conversions(0.0) == ()
    for now_s in (2.0, 4.0, 6.0):
        fleet.heard(beat("a:1", mode="prefill", num_running=1), now_s)
        fleet.heard(beat("b:1", mode="prefill"), now_s)
        expected = (Conversion("b:1", "decode"),) if now_s == 6.0 else ()
        assert fleet.conversions(now_s) == expected
    assert fleet.wanted_mode("b:1") == "decode"
    assert fleet.conversions(6.1) == ()
    fleet.heard(beat("b:1", mode="decode"), 7.0)
    assert fleet.wanted_mode("b:1") is None
    assert placed(fleet, "s", want(5000), 7.0).decode_at == "b:1"
    fleet.heard(beat("d:1", mode="decode"), 8.0)
    assert fleet.conversions(8.0) == ()


@pytest.mark.parametrize("changes", [{"is_draining": True}, {"is_ready": False}])
def test_a_decoder_that_will_be_back_is_not_replaced(changes):
    fleet = fleet_of(beat("a:1", mode="prefill"), beat("d:1", mode="decode", **changes))
    assert fleet.conversions(0.0) == ()


def test_a_node_about_to_prefill_gets_nothing_new_and_prefills_once_it_says_so():
    options = RebalanceOptions(period_s=0.5, dwell_s=0.0, confirmations=1, num_prompts=20)
    fleet = fleet_of(
        beat("a:1", mode="prefill"),
        beat("b:1", mode="decode"),
        beat("c:1", mode="decode"),
        rebalance=options,
    )
    for i in range(20):
        placed(fleet, f"r{i}", want(50_000), 0.0)
        fleet.first_token(f"r{i}", 0.0)
        fleet.ended(f"r{i}", "completed", 0.0, output_tokens=2)
    ((node, mode),) = fleet.conversions(1.0)
    assert mode == "prefill"
    other = ({"b:1", "c:1"} - {node}).pop()
    for i in range(4):
        answer = placed(fleet, f"s{i}", want(2000), 1.0)
        assert (answer.decode_at, answer.prefill_at) == (other, "a:1")
    fleet.heard(beat(node, mode="prefill"), 1.5)
    assert {placed(fleet, f"t{i}", want(20_000), 1.5).prefill_at for i in range(4)} == {"a:1", node}
    fleet.check()


def test_t_follows_what_is_seen_if_it_was_left_to_the_fleet():
    for options, moves in (
        (SchedulerOptions(), True),
        (SchedulerOptions(threshold_tokens=512), False),
    ):
        fleet = fleet_of(
            beat("a:1", mode="prefill"),
            beat("d:1", mode="decode"),
            prefill_beat("p:1"),
            options=options,
            rebalance=RebalanceOptions(num_prompts=20),
        )
        before = fleet.threshold_tokens("east")
        for i in range(20):
            placed(fleet, f"r{i}", want(1000 * (i + 1)), 0.0)
            fleet.ended(f"r{i}", "completed", 0.0, output_tokens=10)
        fleet.heard(beat("d:1", mode="decode", links={"p:1": LINK}), 0.5)
        fleet.conversions(1.0)
        assert (fleet.threshold_tokens("east") != before) == moves


@settings(max_examples=30)
@given(
    modes=st.text("pdb", min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    script=st.lists(
        st.tuples(st.integers(1, 60_000), st.integers(1, 3000), st.floats(0.1, 30.0)), max_size=30
    ),
)
def test_a_cluster_that_can_decode_always_can(modes, seed, script):
    options = RebalanceOptions(period_s=1.0, dwell_s=0.0, confirmations=1, num_prompts=4)
    cluster, now_s, could = Cluster(modes, options), 0.0, False
    random = Random(seed)
    for tokens, outputs, wait_s in script:
        cluster.saw(4, tokens, outputs)
        cluster.look(now_s, obeys=random.random() < 0.7)
        looked_s, now_s = now_s, now_s + wait_s
        can = any(node.can_decode for node in cluster.nodes.values())
        assert can or not could
        is_wanted = any(node.wanted_mode == "decode" for node in cluster.nodes.values())
        assert can or is_wanted or looked_s < JOINING_S
        could = can
        for node in cluster.nodes.values():
            node.check()
