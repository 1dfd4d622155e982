"""One node's load and state."""

from itertools import pairwise
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.heartbeat import Heartbeat, Mode
from prfaas.scheduler.standing import (
    MAX_COUNT,
    MAX_REFUSAL_S,
    FleetLimits,
    Standing,
    assumed,
)
from prfaas.scheduler.work import FIRST_STEP_S, FIRST_TOKEN_S, Assumed, Job
from tests.scheduler.fleets import beat, prefill_beat

LIMITS = FleetLimits()
GUESS = Assumed(token_s=1e-4, step_s=0.02, output_tokens=100.0)


def cost_of(node: Standing, job: Job = Job(output_tokens=100.0)) -> float:  # noqa: B008
    return node.decode_s(GUESS, node.price(GUESS), job)


def standing(heartbeat: Heartbeat | None = None, **changes: Any) -> Standing:
    return Standing(heartbeat or beat(**changes), "n", LIMITS, 0.0)


@pytest.mark.parametrize(
    ("limits", "is_fine"),
    [
        ((2.5, 5.0, 60.0), True),
        ((5.0, 5.0, 5.0), True),
        ((0.0, 5.0, 60.0), False),
        ((-1.0, 5.0, 60.0), False),
        ((6.0, 5.0, 60.0), False),
        ((2.5, 61.0, 60.0), False),
        ((2.5, 5.0, inf), False),
        ((nan, 5.0, 60.0), False),
    ],
)
def test_limits_come_in_order(limits, is_fine):
    late, dead, forget = limits
    values = {"late_after_s": late, "dead_after_s": dead, "forget_after_s": forget}
    if is_fine:
        assert FleetLimits(**values).dead_after_s == dead
    else:
        with pytest.raises(ValueError, match="in this order"):
            FleetLimits(**values)


def test_a_fleet_has_room_for_a_node():
    with pytest.raises(ValueError, match="no node"):
        FleetLimits(max_nodes=0)


@given(
    ready=st.booleans(),
    draining=st.booleans(),
    failures=st.integers(0, 3),
    refusal_s=st.sampled_from([None, 0.0, 1.0, 4.0]),
    now_s=st.sampled_from([0.0, 0.5, 2.5, 2.6, 4.0, 5.0, 100.0]),
)
def test_a_node_is_refused_for_exactly_what_is_wrong_with_it(
    ready, draining, failures, refusal_s, now_s
):
    node = standing(is_ready=ready, is_draining=draining)
    for _ in range(failures):
        node.failed(0.0)
    if refusal_s is not None:
        node.refused(0.0, refusal_s)
    wrong = {
        "dead": now_s >= LIMITS.dead_after_s,
        "draining": draining,
        "not_ready": not ready,
        "suspected": failures > 0,
        "refusing": refusal_s is not None and now_s < refusal_s,
    }
    state = node.state(now_s)
    if any(wrong.values()):
        assert wrong[state]
        assert node.refusal(now_s) == state
    else:
        assert state == ("late" if now_s > LIMITS.late_after_s else "ready")
        assert node.refusal(now_s) is None
    node.check()


@pytest.mark.parametrize(
    ("asked_s", "waits_s"),
    [(0.0, 0.0), (-1.0, 0.0), (2.0, 2.0), (1e9, MAX_REFUSAL_S), (nan, 1.0), (inf, 1.0)],
)
def test_a_pause_is_as_long_as_asked_for_within_bounds(asked_s, waits_s):
    node = standing()
    node.refused(10.0, asked_s)
    assert node.retry_after_s(10.0) == waits_s


@pytest.mark.parametrize(
    ("role", "mode", "wanted", "decodes", "prefills", "only_decodes"),
    [
        ("pd", "both", None, True, False, False),
        ("pd", "decode", None, True, False, True),
        ("pd", "prefill", None, False, True, False),
        ("pd", "decode", "prefill", False, False, True),
        ("pd", "prefill", "decode", False, False, False),
        ("pd", "both", "decode", True, False, False),
        ("pd", "decode", "decode", True, False, True),
        ("prefill", "prefill", None, False, True, False),
    ],
)
def test_a_mode_says_what_a_node_does_and_one_that_changes_does_neither(
    role, mode, wanted, decodes, prefills, only_decodes
):
    node = standing(beat(mode=mode) if role == "pd" else prefill_beat())
    node.want(wanted)
    assert (node.can_decode, node.can_prefill, node.only_decodes) == (
        decodes,
        prefills,
        only_decodes,
    )
    node.check()


def test_a_wish_is_over_when_the_node_has_the_mode_or_begins_anew():
    node = standing(mode="decode")
    node.want("prefill")
    script: list[tuple[Mode, int, Mode | None]] = [
        ("decode", 1, None),
        ("prefill", 1, "decode"),
        ("prefill", 2, None),
    ]
    wishes: list[Mode | None] = []
    for mode, epoch, wish in script:
        node.heard(beat(mode=mode, epoch=epoch), "n", float(len(wishes)))
        wishes.append(node.wanted_mode)
        node.want(wish or node.wanted_mode)
    assert wishes == ["prefill", None, None]


@pytest.mark.parametrize("value", [0, -1, nan, inf, -inf, MAX_COUNT * 10])
def test_counts_are_bounded_whatever_a_node_says(value):
    node = standing(
        num_running=value,
        num_waiting=value,
        num_waiting_tokens=value,
        max_running=value,
        free_pages_fraction=value,
        free_kv_bytes=value,
    )
    assert 0 <= node.load.num_active <= 2 * MAX_COUNT
    assert 0 <= node.load.queue_tokens <= MAX_COUNT
    assert 1 <= node.max_running <= MAX_COUNT
    assert 0 <= node.pages_used <= 1
    assert 0 <= cost_of(node) < inf


def test_more_requests_never_cost_less():
    costs = []
    for num in range(40):
        node = standing(num_running=num, max_running=16)
        costs.append(cost_of(node))
    assert all(low < high for low, high in pairwise(costs))
    # The 33rd of 16 at once waits for 17 of them to end: one answer of 2 s and a sixteenth.
    assert standing(num_running=32, max_running=16).slot_wait_s(GUESS) == pytest.approx(2 * 17 / 16)


def test_what_is_sent_to_a_node_takes_room_until_it_ends_or_is_reported():
    node = standing(free_kv_bytes=1000)
    big = Job(num_sequences=3, num_bytes=800)
    node.load.sent("r", big, 0.0)
    assert (node.load.free_bytes, node.load.num_active) == (200, 3)
    assert cost_of(node, Job(num_bytes=200)) < cost_of(node, Job(num_bytes=201))
    node.heard(beat(free_kv_bytes=300, num_running=3), "n", 1.0)
    assert (node.load.free_bytes, node.load.num_active) == (300, 3)
    node.load.ended("r")
    assert node.load.num_active == 0


def test_places_are_waited_for_as_long_as_the_answers_there_are_expected_to_take():
    """One place is free, by then an answer of the mean ends each eighth of 2 s."""
    node = standing(num_running=0, max_running=8)
    node.load.sent("r", Job(num_sequences=8, output_tokens=800.0), 0.0)
    waits_s = node.slot_wait_s(GUESS)
    node.load.ended("r")
    node.load.sent("r", Job(num_sequences=8, output_tokens=8.0), 0.0)
    assert waits_s == pytest.approx(2.0 / 8)
    assert node.slot_wait_s(GUESS) == pytest.approx(waits_s / 100)


def test_a_node_without_free_pages_is_as_good_as_full():
    full, empty = standing(free_pages_fraction=0.0), standing(free_pages_fraction=1.0)
    assert cost_of(full) > cost_of(empty) + 1.0


def test_a_price_is_worked_out_anew_when_anything_has_changed():
    node = standing(num_waiting_tokens=1000)
    first = node.price(GUESS)
    assert node.price(GUESS) is first
    node.load.sent("r", Job(1000), 0.0)
    assert node.price(GUESS).queue_s == pytest.approx(2 * first.queue_s)
    node.heard(beat(prefill_tokens_per_s=20_000.0), "n", 1.0)
    assert node.price(GUESS).token_s == pytest.approx(first.token_s / 2)
    other = Assumed(token_s=1e-4, step_s=0.02, output_tokens=1000.0)
    assert node.price(other).guess is other


def test_what_nobody_has_shown_is_assumed_and_else_the_mean():
    nothing = [standing(prefill_tokens_per_s=None, decode_step_s=None)]
    assert assumed(nothing, 0.0) == Assumed(
        token_s=FIRST_TOKEN_S, step_s=FIRST_STEP_S, output_tokens=1.0
    )
    two = [
        standing(prefill_tokens_per_s=1000.0, decode_step_s=0.01),
        standing(prefill_tokens_per_s=500.0, decode_step_s=0.03),
    ]
    found = assumed([*nothing, *two], 7.0)
    assert (found.token_s, found.step_s, found.output_tokens) == pytest.approx((0.0015, 0.02, 7.0))
    assert found.is_like(Assumed(token_s=0.00152, step_s=0.0201, output_tokens=7.1))
    assert not found.is_like(Assumed(token_s=0.0017, step_s=0.02, output_tokens=7.0))
