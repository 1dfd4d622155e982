"""Placements as operators meet them: load, prefixes, nodes that come and go."""

from collections import Counter
from dataclasses import replace
from math import inf, nan

import pytest

from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.placing import DECODE_REASONS, PLACEMENT_REASONS, NoNode, Placement
from prfaas.scheduler.standing import FleetLimits
from tests.scheduler.fleets import (
    beat,
    fleet_of,
    placed,
    prefill_beat,
    refused,
    spread,
    state,
    want,
)

FOUR = [beat(f"{name}:1") for name in "abcd"]
HUGE = 10**12


@pytest.mark.parametrize("num_tokens", [1, 16, 1000, 100_000])
def test_a_burst_of_eight_is_spread_over_four_nodes_before_any_heartbeat(num_tokens):
    fleet = fleet_of(*FOUR)
    assert set(spread(fleet, 8, want(num_tokens)).values()) == {2}
    fleet.check()


def test_a_burst_is_spread_over_nodes_of_which_nothing_is_known():
    unknown = [replace(each, prefill_tokens_per_s=None, decode_step_s=None) for each in FOUR]
    assert set(spread(fleet_of(*unknown), 8, want(100)).values()) == {2}


def test_requests_one_at_a_time_take_turns_at_idle_nodes():
    fleet, seen = fleet_of(*FOUR), []
    for i in range(8):
        seen.append(placed(fleet, f"r{i}", want(), 0.0).decode_at)
        fleet.ended(f"r{i}", "completed", 0.0, output_tokens=10)
    assert seen == ["a:1", "b:1", "c:1", "d:1"] * 2


def test_a_node_twice_as_fast_gets_twice_the_prompts():
    slow = beat("a:1", max_running=256)
    fast = beat("b:1", max_running=256, prefill_tokens_per_s=20_000.0)
    found = spread(fleet_of(slow, fast, options=SchedulerOptions(policy="local")), 30, want(4000))
    assert 1.6 < found["b:1"] / found["a:1"] < 2.4


def test_cold_prompts_go_to_the_idle_node_while_heavy_ones_are_at_the_other():
    fleet = fleet_of(beat("a:1"), beat("b:1"))
    for i in range(3):
        placed(fleet, f"h{i}", want(50_000, force="local", excluded=frozenset({"b:1"})))
    assert spread(fleet, 6, want(2000, force="local")) == {"b:1": 6}


def test_a_hit_is_followed_and_says_so():
    answer = placed(fleet_of(*FOUR), "r", want(4000, hits={"c:1": 3968, "b:1": 64}))
    assert (answer.decode_at, answer.decode_reason) == ("c:1", "prefix")
    assert answer.predicted_ttft_s == pytest.approx(32 / 10_000)


def test_a_hot_prefix_at_four_times_capacity_spills_over():
    fleet = fleet_of(*FOUR)
    hot = want(4000, hits={"a:1": 3968})
    found = spread(fleet, 4 * 8, hot)
    assert found["a:1"] == max(found.values())
    assert all(found[f"{name}:1"] >= 4 for name in "bcd"), found
    explained = fleet.explain(hot, 0.0).answer
    assert isinstance(explained, Placement)


def test_up_to_half_of_its_capacity_a_node_keeps_its_hot_prefix():
    found = spread(fleet_of(*FOUR), 4, want(8000, hits={"a:1": 7936}))
    assert found == {"a:1": 4}


def test_spilled_requests_fetch_the_prefix_from_the_node_that_has_it():
    fleet = fleet_of(*FOUR)
    hot = want(4000, hits={"a:1": 3968})
    answers = [placed(fleet, f"r{i}", hot) for i in range(32)]
    spilled = [answer for answer in answers if answer.decode_at != "a:1"]
    assert spilled
    assert {(each.prefix_from, each.prefix_tokens) for each in spilled} == {("a:1", 3968)}
    assert {each.decode_reason for each in spilled} == {"spilled"}


def test_an_idle_node_with_nearly_all_of_a_prompt_is_not_left_for_a_transfer():
    unknown = {"prefill_tokens_per_s": None}
    remote = prefill_beat("p:1", prefill_tokens_per_s=50_000.0)
    fleet = fleet_of(beat("a:1", **unknown), beat("b:1", **unknown), remote)
    hits = {"b:1": 4992, "p:1": 4992}
    answer = placed(fleet, "r", want(5000, hits=hits))
    assert (answer.decode_at, answer.decode_reason, answer.prefill_at) == ("b:1", "prefix", None)


def test_an_idle_node_with_a_prefix_may_still_be_the_slower_one():
    slow, fast = beat("a:1", prefill_tokens_per_s=100.0), beat("b:1")
    answer = placed(fleet_of(slow, fast), "r", want(4000, hits={"a:1": 2048}))
    assert (answer.decode_at, answer.decode_reason) == ("b:1", "sooner")


@pytest.mark.parametrize("outcome", ["completed", "cancelled", "refused", "failed"])
@pytest.mark.parametrize("has_first_token", [False, True])
@pytest.mark.parametrize("num_tokens", [100, 50_000])
def test_counts_return_to_zero_however_a_request_ends(outcome, has_first_token, num_tokens):
    fleet = fleet_of(*FOUR[:2], prefill_beat("p:1"))
    for i in range(6):
        placed(fleet, f"r{i}", want(num_tokens))
    fleet.check()
    for i in range(6):
        if has_first_token:
            fleet.first_token(f"r{i}", 0.5)
        fleet.ended(f"r{i}", outcome, 1.0, output_tokens=3)
        fleet.check()
    for member in fleet.members(1.0):
        assert (member.num_inflight, member.num_active, member.queue_tokens) == (0, 0, 0)


def test_a_request_counts_as_many_sequences_as_it_draws():
    fleet = fleet_of(beat("a:1"), beat("b:1"))
    placed(fleet, "several", want(100, num_sequences=4))
    assert Counter(member.num_active for member in fleet.members(0.0)) == {4: 1, 0: 1}
    found = spread(fleet, 4, want(100))
    assert sorted(found.values()) == [4], "until both have as many"
    fleet.check()
    fleet.ended("several", "completed", 1.0, output_tokens=40)
    fleet.check()


def test_what_a_heartbeat_counts_is_not_counted_twice():
    fleet = fleet_of(beat("a:1"))
    for i in range(4):
        placed(fleet, f"r{i}", want(1000), 0.0)
    (member,) = fleet.members(0.0)
    assert (member.num_active, member.queue_tokens) == (4, 4000)
    fleet.heard(beat("a:1", num_running=3, num_waiting=2, num_waiting_tokens=2500), 1.0)
    (member,) = fleet.members(1.0)
    assert (member.num_active, member.queue_tokens) == (5, 2500), "one of them is not ours"
    fleet.first_token("r0", 1.1)
    fleet.ended("r0", "completed", 1.2)
    (member,) = fleet.members(1.2)
    assert (member.num_active, member.queue_tokens) == (4, 1500)


def test_what_was_sent_just_before_a_heartbeat_still_counts():
    fleet = fleet_of(beat("a:1"))
    placed(fleet, "r", want(1000), 0.95)
    fleet.heard(beat("a:1"), 1.0)
    (member,) = fleet.members(1.0)
    assert (member.num_active, member.queue_tokens) == (1, 1000)


@pytest.mark.parametrize(
    ("age_s", "expected"),
    [(0.0, "ready"), (2.5, "ready"), (2.51, "late"), (4.99, "late"), (5.0, "dead"), (1e9, "dead")],
)
def test_a_node_that_is_not_heard_is_late_then_dead_and_back_when_heard(age_s, expected):
    fleet = fleet_of(beat("a:1"))
    assert state(fleet, "a:1", age_s) == expected
    if expected == "dead":
        assert refused(fleet, want(), age_s) == "dead"
    fleet.heard(beat("a:1"), age_s)
    assert placed(fleet, "r", want(), age_s).decode_at == "a:1"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_draining": True}, "draining"),
        ({"is_ready": False, "reason": "loading"}, "not_ready"),
        ({"mode": "prefill"}, "no_node"),
    ],
)
def test_a_node_leaves_by_its_own_word_and_returns_by_it(changes, reason):
    fleet = fleet_of(beat("a:1"))
    fleet.heard(beat("a:1", **changes), 1.0)
    assert refused(fleet, want(), 1.0) == reason
    fleet.heard(beat("a:1"), 2.0)
    assert placed(fleet, "r", want(), 2.0).decode_at == "a:1"


def test_a_failed_request_goes_elsewhere_and_its_node_is_out_until_it_is_heard():
    fleet = fleet_of(beat("a:1"), beat("b:1"))
    assert placed(fleet, "r", want()).decode_at == "a:1"
    fleet.ended("r", "failed", 0.1)
    assert state(fleet, "a:1", 0.1) == "suspected"
    again = placed(fleet, "r", want(excluded=frozenset({"a:1"})), 0.1)
    assert again.decode_at == "b:1"
    assert spread(fleet, 6, want(), 0.2, first=10) == {"b:1": 6}
    fleet.heard(beat("a:1"), 1.0)
    assert state(fleet, "a:1", 1.0) == "ready"


def test_a_node_that_fails_again_and_again_stays_out_for_longer_until_it_works():
    fleet, now_s, outs = fleet_of(beat("a:1"), beat("b:1")), 0.0, []
    for _ in range(7):
        now_s += 1.0
        fleet.heard(beat("b:1"), now_s)
        placed(fleet, "r", want(excluded=frozenset({"b:1"})), now_s)
        fleet.ended("r", "failed", now_s)
        failed_s = now_s
        while state(fleet, "a:1", now_s) != "ready":
            now_s += 1.0
            fleet.heard(beat("a:1"), now_s)
        outs.append(now_s - failed_s)
    assert outs == [1, 1, 2, 4, 8, 16, 30]
    placed(fleet, "r", want(excluded=frozenset({"b:1"})), now_s)
    fleet.ended("r", "completed", now_s)
    placed(fleet, "r", want(excluded=frozenset({"b:1"})), now_s)
    fleet.ended("r", "failed", now_s)
    fleet.heard(beat("a:1"), now_s + 0.5)
    assert state(fleet, "a:1", now_s + 0.5) == "ready"


def test_requests_that_fail_together_are_one_failure():
    fleet = fleet_of(beat("a:1"))
    for i in range(8):
        placed(fleet, f"r{i}", want(), 0.0)
    for i in range(8):
        fleet.ended(f"r{i}", "failed", 1.0)
    fleet.heard(beat("a:1"), 1.5)
    assert state(fleet, "a:1", 1.5) == "ready"


def test_a_node_back_from_a_failure_shows_with_one_request_that_it_works():
    fleet = fleet_of(beat("a:1"), beat("b:1"))
    fleet.failed("a:1", 0.0)
    for node in ("a:1", "b:1"):
        fleet.heard(beat(node), 1.0)
    found = [placed(fleet, f"r{i}", want(), 1.0).decode_at for i in range(6)]
    assert sorted(found) == ["a:1", *["b:1"] * 5]
    fleet.first_token(f"r{found.index('a:1')}", 1.1)
    assert spread(fleet, 4, want(), 1.1, first=6)["a:1"] == 4


def test_the_only_node_is_tried_even_while_it_is_on_trial():
    fleet = fleet_of(beat("a:1"))
    fleet.failed("a:1", 0.0)
    fleet.heard(beat("a:1"), 1.0)
    assert spread(fleet, 3, want(), 1.0) == {"a:1": 3}


def test_a_node_without_room_is_left_alone_as_long_as_it_asks_for():
    fleet = fleet_of(beat("a:1"), beat("b:1"))
    placed(fleet, "r", want(excluded=frozenset({"b:1"})))
    fleet.ended("r", "refused", 0.0, retry_after_s=3.0)
    for now_s in (0.0, 1.0, 2.9):
        for node in ("a:1", "b:1"):
            fleet.heard(beat(node), now_s)
        assert state(fleet, "a:1", now_s) == "refusing"
        assert spread(fleet, 2, want(), now_s, first=int(10 * now_s) + 100) == {"b:1": 2}
    for node in ("a:1", "b:1"):
        fleet.heard(beat(node), 3.0)
    assert placed(fleet, "s", want(), 3.0).decode_at == "a:1"


@pytest.mark.parametrize(
    ("asked_s", "waits_s"), [(-1.0, 1.0), (nan, 1.0), (inf, 1.0), (5.0, 5.0), (1e9, 30.0)]
)
def test_all_nodes_without_room_say_when_to_come_again(asked_s, waits_s):
    fleet = fleet_of(beat("a:1"))
    placed(fleet, "r", want())
    fleet.ended("r", "refused", 0.0, retry_after_s=asked_s)
    answer = fleet.place("s", want(), 0.0)
    if asked_s == -1.0:
        assert isinstance(answer, Placement)
    else:
        assert answer == NoNode(reason="refusing", retry_after_s=waits_s)


def test_a_late_node_gets_nothing_while_another_was_heard():
    fleet = fleet_of(beat("a:1"), beat("b:1"))
    fleet.heard(beat("b:1", num_running=7, num_waiting=9, num_waiting_tokens=10**6), 3.0)
    assert spread(fleet, 20, want(), 3.0) == {"b:1": 20}


def test_where_all_are_late_all_are_used():
    assert set(spread(fleet_of(*FOUR), 8, want(), 4.0).values()) == {2}


def test_nothing_herds_on_a_view_that_is_seconds_old():
    busy = [replace(each, num_running=4, num_waiting_tokens=8000) for each in FOUR[1:]]
    fleet = fleet_of(FOUR[0], *busy)
    found = spread(fleet, 40, want(1000), 2.4)
    assert max(found.values()) <= 16, found


def test_a_heartbeat_of_a_life_that_is_over_is_not_taken():
    fleet = fleet_of(beat("a:1", epoch=5))
    assert not fleet.heard(beat("a:1", epoch=4, num_running=3), 1.0)
    assert fleet.heard(beat("a:1", epoch=6), 1.0)
    assert not fleet.heard(beat("a:1", epoch=5), 1.0)


def test_a_new_life_has_failed_at_nothing_and_may_have_another_role():
    fleet = fleet_of(beat("a:1"), prefill_beat("p:1"))
    for _ in range(5):
        fleet.failed("a:1", 0.0)
    assert fleet.heard(beat("a:1", epoch=2), 0.1)
    assert state(fleet, "a:1", 0.1) == "ready"
    assert fleet.heard(prefill_beat("a:1", epoch=3), 0.2)
    assert refused(fleet, want(), 0.2) == "no_node"
    assert not fleet.heard(beat("a:1", epoch=3), 0.3)
    fleet.check()


def test_a_node_that_left_is_forgotten_while_its_requests_end():
    fleet = fleet_of(beat("a:1"), beat("b:1"), prefill_beat("p:1"))
    answer = placed(fleet, "r", want(50_000))
    assert answer.prefill_at == "p:1"
    fleet.left("p:1", 0.1)
    fleet.left(answer.decode_at, 0.1)
    fleet.left("unknown:1", 0.1)
    assert "p:1" not in {member.node for member in fleet.members(0.0)}
    assert placed(fleet, "s", want(50_000), 0.2).prefill_at is None
    fleet.first_token("r", 0.3)
    fleet.ended("r", "completed", 0.4)
    fleet.ended("s", "completed", 0.4)
    fleet.check()


def test_dead_nodes_are_forgotten_once_nothing_is_in_flight_there():
    limits = FleetLimits(late_after_s=1.0, dead_after_s=2.0, forget_after_s=10.0)
    fleet = fleet_of(beat("a:1"), beat("b:1"), limits=limits)
    placed(fleet, "r", want(excluded=frozenset({"b:1"})))
    assert fleet.expire(9.9) == ()
    assert fleet.expire(10.0) == ("b:1",)
    fleet.ended("r", "failed", 10.0)
    assert fleet.expire(10.0) == ("a:1",)
    assert fleet.members(10.0) == ()
    assert refused(fleet, want(), 10.0) == "no_node"


def test_a_fleet_has_no_more_nodes_than_it_may_have():
    fleet = fleet_of(beat("a:1"), limits=FleetLimits(max_nodes=1))
    assert not fleet.heard(beat("b:1"), 0.0)
    assert fleet.heard(beat("a:1"), 1.0)


def test_a_continued_answer_stays_with_the_numerics_it_began_in():
    fleet = fleet_of(beat("a:1"), beat("b:1"))
    fleet.heard(beat("c:1"), 0.0, numerics="other")
    fleet.heard(prefill_beat("p:1"), 0.0, numerics="other")
    answer = placed(fleet, "r", want(50_000, numerics="other", hits={"a:1": 49_000}))
    assert (answer.decode_at, answer.prefix_from) == ("c:1", None)
    answer = placed(fleet, "s", want(50_000, numerics="n"))
    assert (answer.decode_at, answer.prefill_at) == ("a:1", None)
    assert refused(fleet, want(numerics="third")) == "numerics"
    assert placed(fleet, "t", want(50_000)).prefill_at == "p:1"


@pytest.mark.parametrize(
    ("nodes", "wanted", "reason", "may_pass"),
    [
        ([], want(), "no_node", False),
        ([prefill_beat("p:1")], want(), "no_node", False),
        ([beat("a:1", mode="prefill")], want(), "no_node", True),
        ([beat("a:1")], want(excluded=frozenset({"a:1"})), "excluded", False),
        ([beat("a:1")], want(numerics="other"), "numerics", False),
        ([beat("a:1"), beat("b:1", is_draining=True)], want(excluded=frozenset({"a:1"})), "draining", False),
        ([beat("a:1", is_draining=True), beat("b:1", is_ready=False)], want(), "not_ready", True),
    ],
)  # fmt: skip
def test_no_node_says_why_by_the_one_that_is_nearest_to_being_of_use_and_whether_one_may_be(
    nodes, wanted, reason, may_pass
):
    fleet = fleet_of(*nodes)
    assert refused(fleet, wanted) == reason
    nobody = NoNode(reason=reason, retry_after_s=1.0, may_pass=may_pass)
    assert fleet.explain(wanted, 0.0).answer == nobody


@pytest.mark.parametrize("value", [0, -1, HUGE**3, nan, inf, -inf])
def test_whatever_numbers_a_node_says_it_is_placed_by_and_nothing_breaks(value):
    odd = beat(
        "odd:1",
        num_running=value,
        num_waiting=value,
        max_running=value,
        num_waiting_tokens=value,
        prefill_tokens_per_s=value,
        decode_step_s=value,
        free_pages_fraction=value,
    )
    fleet = fleet_of(
        odd, beat("a:1"), prefill_beat("p:1", prefill_tokens_per_s=value, num_waiting_tokens=value)
    )
    found = spread(fleet, 8, want(1000)) + spread(fleet, 4, want(100_000), first=8)
    assert found["a:1"] > 0
    fleet.conversions(0.0)
    fleet.explain(want(), 0.0)
    fleet.check()


def test_an_empty_prompt_is_no_prompt():
    with pytest.raises(ValueError, match="0 tokens"):
        want(0)


@pytest.mark.parametrize("hit", [-5, 0, 999, 1000, HUGE])
def test_a_hit_leaves_a_token_to_compute(hit):
    fleet = fleet_of(beat("a:1"))
    placed(fleet, "r", want(1000, hits={"a:1": hit}))
    (member,) = fleet.members(0.0)
    assert member.queue_tokens == 1000 - min(max(hit, 0), 999)


def test_an_explanation_names_each_node_and_changes_nothing():
    fleet = fleet_of(
        beat("a:1"),
        beat("b:1", is_draining=True),
        beat("c:1", prefill_tokens_per_s=None),
        prefill_beat("p:1"),
        prefill_beat("q:1", is_ready=False),
    )
    wanted = want(50_000, hits={"a:1": 4096})
    explained = fleet.explain(wanted, 0.0)
    assert explained == fleet.explain(wanted, 0.0)
    by_name = {each.node: each for each in explained.candidates}
    assert list(by_name) == ["a:1", "b:1", "c:1", "p:1", "q:1"]
    assert {name: each.refusal for name, each in by_name.items()} == {
        "a:1": None,
        "b:1": "draining",
        "c:1": None,
        "p:1": None,
        "q:1": "not_ready",
    }
    assert by_name["a:1"].hit_tokens == 4096
    assert by_name["a:1"].predicted_ttft_s == pytest.approx((50_000 - 4096) / 10_000)
    assert by_name["c:1"].predicted_ttft_s is None
    assert by_name["p:1"].predicted_ttft_s == pytest.approx(50_000 / 40_000)
    answer = placed(fleet, "r", wanted)
    assert explained.answer == answer
    assert {name for name, each in by_name.items() if each.is_chosen} == {
        answer.decode_at,
        answer.prefill_at,
    }
    assert answer.reason in PLACEMENT_REASONS
    assert answer.decode_reason in DECODE_REASONS


def test_a_node_is_told_whom_to_pull_from():
    fleet = fleet_of(
        beat("a:1"), beat("b:1", mode="prefill"), beat("c:1", cluster="west"), prefill_beat("p:1")
    )
    assert fleet.peers_of("a:1", 0.0) == ("b:1", "p:1")
    assert fleet.peers_of("c:1", 0.0) == ("p:1",)
    assert fleet.peers_of("p:1", 0.0) == ()
    assert fleet.peers_of("unknown:1", 0.0) == ()
    assert fleet.peers_of("a:1", 5.0) == (), "they are dead by then"
