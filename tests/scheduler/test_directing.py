"""Where the prompt is prefilled: in the decoder's cluster or at a PrfaaS node, with whose prefix."""

from typing import Any

import pytest

from prfaas.scheduler.heartbeat import LinkReport
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.placing import TRANSFER_S
from prfaas.scheduler.policies import POLICIES
from tests.scheduler.fleets import TOKEN_BYTES, beat, fleet_of, placed, prefill_beat, want

FAST = LinkReport(rtt_s=0.01, bytes_per_s=1e9)
SLOW = LinkReport(rtt_s=0.05, bytes_per_s=2e6)
LONG, SHORT = 40_000, 2000


def link_to(*names: str, report: LinkReport = FAST) -> dict[str, LinkReport]:
    return dict.fromkeys(names, report)


@pytest.mark.parametrize(
    ("num_tokens", "hit", "at", "reason"),
    [
        (4096, 0, None, "short"),
        (4097, 0, "p:1", "long"),
        (4098, 2, None, "short"),
        (LONG, LONG - 4096, None, "short"),
        (LONG, LONG - 4097, "p:1", "long"),
        (1, 0, None, "short"),
        (10**7, 0, "p:1", "long"),
    ],
)
def test_static_sends_what_is_longer_than_t_without_the_decoders_hit(num_tokens, hit, at, reason):
    answer = placed(
        fleet_of(beat("a:1"), prefill_beat("p:1")), "r", want(num_tokens, hits={"a:1": hit})
    )
    assert (answer.prefill_at, answer.reason) == (at, reason)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_is_the_routers_own(policy):
    expected = {
        "local": (None, None),
        "always-remote": ("p:1", "p:1"),
        "static": (None, "p:1"),
        "threshold": (None, "p:1"),
        "predictive": (None, "p:1"),
    }[policy]
    threshold = 4096 if policy in ("static", "threshold", "predictive") else None
    options = SchedulerOptions(policy=policy, threshold_tokens=threshold)
    alike = prefill_beat("p:1", prefill_tokens_per_s=10_000.0)
    fleet = fleet_of(beat("a:1", links=link_to("p:1")), alike, options=options)
    found = tuple(placed(fleet, f"r{n}", want(n)).prefill_at for n in (SHORT, LONG))
    assert found == expected


@pytest.mark.parametrize(
    ("force", "num_tokens", "at"),
    [("local", LONG, None), ("remote", SHORT, "p:1"), ("remote", 1, "p:1")],
)
def test_a_forced_side_is_taken(force, num_tokens, at):
    fleet = fleet_of(beat("a:1"), prefill_beat("p:1"))
    answer = placed(fleet, "r", want(num_tokens, force=force))
    assert (answer.prefill_at, answer.reason) == (at, "forced")


@pytest.mark.parametrize(
    "change",
    [
        {"is_ready": False},
        {"is_draining": True},
        {"left": True},
        {"unusable": True},
        {"late": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_prfaas_node_that_cannot_be_used_is_not(change):
    usable = {"p:1": False} if "unusable" in change else {}
    fleet = fleet_of(beat("a:1", peers_usable=usable), prefill_beat("p:1"), prefill_beat("q:1"))
    now_s = 0.0
    if "late" in change:
        now_s = 3.0
        fleet.heard(beat("a:1"), now_s)
        fleet.heard(prefill_beat("q:1"), now_s)
    elif "left" in change:
        fleet.left("p:1", 0.0)
    elif not usable:
        fleet.heard(prefill_beat("p:1", **change), 0.0)
    assert {placed(fleet, f"r{i}", want(LONG), now_s).prefill_at for i in range(4)} == {"q:1"}


def test_without_a_usable_prfaas_node_long_prompts_stay_and_say_why():
    fleet = fleet_of(beat("a:1"))
    assert placed(fleet, "r", want(LONG)).reason == "no_peer"
    fleet.heard(prefill_beat("p:1", is_draining=True), 0.0)
    assert placed(fleet, "s", want(LONG)).reason == "peer_down"
    fleet.heard(prefill_beat("p:1"), 0.1)
    assert placed(fleet, "t", want(LONG), 0.1).prefill_at == "p:1"


def test_a_prfaas_node_that_failed_a_transfer_is_avoided_for_a_while():
    fleet = fleet_of(beat("a:1"), prefill_beat("p:1"), prefill_beat("q:1"))
    first = placed(fleet, "r", want(LONG)).prefill_at
    fleet.ended("r", "completed", 0.2, route_outcome="transfer_failed", output_tokens=5)
    assert {placed(fleet, f"s{i}", want(LONG), 0.3).prefill_at for i in range(3)} == {
        "p:1",
        "q:1",
    } - {first}


def test_long_prompts_are_spread_over_prfaas_nodes_by_their_speed_and_prefix():
    fleet = fleet_of(
        beat("a:1", max_running=99),
        prefill_beat("p:1"),
        prefill_beat("q:1", prefill_tokens_per_s=20_000.0),
    )
    found = [placed(fleet, f"r{i}", want(LONG)).prefill_at for i in range(12)]
    assert found.count("p:1") == 8
    fleet = fleet_of(beat("a:1"), prefill_beat("p:1"), prefill_beat("q:1"))
    assert placed(fleet, "r", want(LONG, hits={"q:1": 30_000})).prefill_at == "q:1"


def test_what_two_clusters_send_to_a_prfaas_node_counts_for_both_at_once():
    east, west = beat("a:1"), beat("b:1", cluster="west")
    fleet = fleet_of(east, west, prefill_beat("p:1"), prefill_beat("q:1"))
    only = {"east": frozenset({"b:1"}), "west": frozenset({"a:1"})}
    assert placed(fleet, "r0", want(LONG, excluded=only["east"])).prefill_at == "p:1"
    assert placed(fleet, "r1", want(LONG, excluded=only["west"])).prefill_at == "q:1"
    assert placed(fleet, "r2", want(SHORT + LONG, excluded=only["west"])).prefill_at == "p:1"
    fleet.check()


@pytest.mark.parametrize(
    ("num_tokens", "hits", "at", "reason"),
    [
        (SHORT, {}, "b:1", "pd_prefill"),
        (LONG, {}, "p:1", "long"),
        (129, {}, "b:1", "pd_prefill"),
        (128, {}, None, "at_decoder"),
        (SHORT, {"d:1": SHORT - 128}, None, "at_decoder"),
        (SHORT, {"d:1": SHORT - 129}, "b:1", "pd_prefill"),
    ],
)
def test_a_node_that_only_decodes_has_a_pd_p_for_short_and_prfaas_for_long(
    num_tokens, hits, at, reason
):
    fleet = fleet_of(beat("d:1", mode="decode"), beat("b:1", mode="prefill"), prefill_beat("p:1"))
    answer = placed(fleet, "r", want(num_tokens, hits=hits))
    assert (answer.decode_at, answer.prefill_at, answer.reason) == ("d:1", at, reason)
    fleet.check()
    fleet.first_token("r", 0.1)
    fleet.ended("r", "completed", 0.2)
    fleet.check()


def test_a_node_that_only_decodes_prefills_itself_where_nobody_else_can():
    fleet = fleet_of(beat("d:1", mode="decode"), beat("b:1", mode="prefill", is_draining=True))
    assert placed(fleet, "r", want(SHORT)).prefill_at is None
    fleet = fleet_of(beat("d:1", mode="decode"), beat("b:1", mode="prefill", cluster="west"))
    assert placed(fleet, "r", want(SHORT)).prefill_at is None, "of another cluster"


def test_a_busy_node_that_does_both_hands_prefill_to_an_idle_pd_p():
    busy = beat("a:1", num_waiting_tokens=30_000)
    fleet = fleet_of(busy, beat("b:1", mode="prefill"))
    answer = placed(fleet, "r", want(SHORT))
    assert (answer.prefill_at, answer.reason) == ("b:1", "pd_prefill_earlier")
    assert answer.predicted_ttft_s == pytest.approx(0.2)
    fleet = fleet_of(beat("a:1"), beat("b:1", mode="prefill"))
    assert placed(fleet, "r", want(SHORT)).prefill_at is None


def test_pd_ps_share_the_prompts_of_a_cluster():
    fleet = fleet_of(
        beat("d:1", mode="decode", max_running=99),
        beat("b:1", mode="prefill"),
        beat("c:1", mode="prefill"),
    )
    found = [placed(fleet, f"r{i}", want(SHORT)).prefill_at for i in range(8)]
    assert (found.count("b:1"), found.count("c:1")) == (4, 4)


def test_a_prefix_of_the_cluster_is_fetched_where_that_is_sooner():
    wanted = want(SHORT, hits={"a:1": 1984}, excluded=frozenset({"a:1"}))
    fleet = fleet_of(beat("a:1"), beat("b:1"), beat("c:1", cluster="west"))
    answer = placed(fleet, "r", want(SHORT, hits={"a:1": 1984}, numerics="n", excluded=frozenset()))
    assert answer.prefix_from is None, "it is there"
    assert placed(fleet, "s", wanted).prefix_from is None, (
        "one that was tried and failed is not asked"
    )
    busy = beat("a:1", num_running=30)
    fleet = fleet_of(busy, beat("b:1"), beat("c:1", cluster="west"))
    answer = placed(fleet, "r", want(SHORT, hits={"a:1": 1984}))
    assert (answer.decode_at, answer.prefix_from, answer.prefix_tokens) == ("b:1", "a:1", 1984)
    assert answer.predicted_ttft_s == pytest.approx(
        TRANSFER_S + 1984 * TOKEN_BYTES / 125e6 + 16 / 10_000
    )


def test_a_prefix_is_not_fetched_over_a_link_that_takes_longer_than_its_prefill():
    fleet = fleet_of(beat("a:1", num_running=30), beat("b:1", links=link_to("a:1", report=SLOW)))
    answer = placed(fleet, "r", want(SHORT, hits={"a:1": 1984}))
    assert (answer.decode_at, answer.prefix_from) == ("b:1", None)


@pytest.mark.parametrize(("report", "source"), [(FAST, "p:1"), (SLOW, None), (LinkReport(), None)])
@pytest.mark.parametrize("holder", ["p:1", "x:1"])
def test_another_clusters_prefix_is_fetched_where_bandwidth_is_plentiful(holder, report, source):
    fleet = fleet_of(
        beat("a:1", links=link_to("p:1", "x:1", report=report)),
        beat("x:1", cluster="west", is_draining=False, num_running=50),
        prefill_beat("p:1"),
    )
    answer = placed(fleet, "r", want(SHORT, hits={holder: 1984}, force=None))
    assert answer.decode_at == "a:1"
    assert answer.prefix_from == (source and holder)
    if source:
        sent_s = TRANSFER_S + 1984 * TOKEN_BYTES / 1e9 + 0.01
        assert answer.predicted_ttft_s == pytest.approx(16 / 10_000 + sent_s)


def test_a_spent_budget_keeps_prefixes_of_other_clusters_away():
    options = SchedulerOptions(policy="predictive", threshold_tokens=4096)
    medium = LinkReport(rtt_s=0.0, bytes_per_s=2e7)
    nodes = [
        beat("a:1", links=link_to("p:1", report=medium), max_running=1000),
        prefill_beat("p:1", num_waiting_tokens=10**6),
    ]
    fleet = fleet_of(*nodes, options=options)
    wanted = want(4000, hits={"p:1": 3968})
    assert placed(fleet, "first", wanted).prefix_from == "p:1"
    for i in range(12):
        placed(fleet, f"r{i}", want(LONG, force="remote"))
        fleet.first_token(f"r{i}", 0.0)
    assert placed(fleet, "last", wanted).prefix_from is None


def test_over_a_slow_link_a_prefix_of_the_cluster_comes_before_the_rest():
    wanted = want(LONG, hits={"a:1": 30_016}, excluded=frozenset())
    for report, source in ((FAST, None), (LinkReport(rtt_s=0.01, bytes_per_s=3e7), "a:1")):
        fleet = fleet_of(
            beat("a:1", num_running=60),
            beat("b:1", links=link_to("p:1", report=report)),
            prefill_beat("p:1"),
        )
        answer = placed(fleet, "r", wanted)
        assert (answer.decode_at, answer.prefill_at, answer.prefix_from) == ("b:1", "p:1", source)


@pytest.mark.parametrize(
    "unknown", [{"prefill_tokens_per_s": None}, {"prefill_tokens_per_s": float("nan")}]
)
def test_what_is_not_known_is_not_predicted(unknown: dict[str, Any]):
    fleet = fleet_of(beat("a:1", **unknown), prefill_beat("p:1", **unknown))
    assert placed(fleet, "r", want(SHORT)).predicted_ttft_s is None
    assert placed(fleet, "s", want(LONG)).predicted_ttft_s is None


def test_a_full_batch_is_part_of_the_prediction():
    fleet = fleet_of(beat("a:1", num_running=8, max_running=8))
    predicted = placed(fleet, "r", want(SHORT)).predicted_ttft_s
    assert predicted == pytest.approx(0.2 + 128 * 0.02 / 8), "one of eight answers of 128 tokens"
    fleet = fleet_of(beat("a:1", num_running=8, max_running=8, decode_step_s=None))
    assert placed(fleet, "r", want(SHORT)).predicted_ttft_s is None
