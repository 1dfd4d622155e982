"""The choice of a decoder against an obvious one."""

from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.scheduler.placing import (
    ALIKE_FRACTION,
    ALIKE_S,
    MAX_TOKENS_AT_DECODER,
    MIN_FETCH_GAIN_S,
    TRANSFER_S,
    Choice,
    Elsewhere,
    Source,
    Wanted,
    choose,
    cost_s,
    local_s,
)
from prfaas.scheduler.standing import FleetLimits, Standing
from prfaas.scheduler.work import Assumed, Price
from tests.scheduler.fleets import TOKEN_BYTES, beat, want

GUESS = Assumed(token_s=1e-4, step_s=0.02, output_tokens=100.0)
BYTE_S = 1e-8


def elsewhere(wanted: Wanted, source_tokens: int = 0, there_s: float = inf) -> Elsewhere:
    source = Source("s:1", source_tokens) if source_tokens else None
    return Elsewhere(wanted, source=source, near_byte_s=BYTE_S, prefill_s=lambda _: there_s)


def price_of(token_s: float, queue_s: float = 0.0) -> Price:
    return Price(GUESS, token_s, queue_s, crowd_s=0.0, place_s=0.0, share=0.0, free_bytes=inf)


def standing(name: str = "a:1", **changes: Any) -> Standing:
    return Standing(beat(name, **changes), "n", FleetLimits(), 0.0)


NODE = st.fixed_dictionaries(
    {
        "num_running": st.integers(0, 12),
        "num_waiting_tokens": st.integers(0, 20_000),
        "prefill_tokens_per_s": st.sampled_from([None, 5000.0, 10_000.0, 20_000.0]),
        "mode": st.sampled_from(["both", "both", "decode"]),
        "cluster": st.sampled_from(["east", "west"]),
        "free_pages_fraction": st.sampled_from([1.0, 0.5, 0.0]),
        "free_kv_bytes": st.sampled_from([None, 0, 5_000_000, 1 << 40]),
    }
)


@settings(max_examples=60)
@given(
    num_tokens=st.sampled_from([1, 100, 129, 4000, 60_000]),
    nodes=st.lists(NODE, min_size=1, max_size=8),
    hits=st.lists(st.integers(0, 60_000), min_size=8, max_size=8),
    source=st.sampled_from([0, 64, 3968, 50_048]),
    there_s=st.sampled_from([0.01, 0.3, 5.0, inf]),
    answers=st.sampled_from([(1, None), (1, 1), (1, 10_000), (8, 50)]),
)
def test_the_choice_has_the_least_cost_and_of_those_alike_the_longest_hit(
    num_tokens, nodes, hits, source, there_s, answers
):
    standings = [standing(f"n{i}:1", **changes) for i, changes in enumerate(nodes)]
    wanted = want(
        num_tokens,
        hits={f"n{i}:1": hit for i, hit in enumerate(hits)},
        num_sequences=answers[0],
        max_tokens=answers[1],
    )
    rests = {
        "east": elsewhere(wanted, min(source, num_tokens - 1), there_s),
        "west": elsewhere(wanted, 0, inf),
    }
    costs = {
        node.name: cost_s(wanted, node, wanted.hit_of(node.name), rests[node.cluster], GUESS)
        for node in standings
    }
    least_s = min(costs.values())
    limit_s = least_s + max(ALIKE_FRACTION * least_s, ALIKE_S)
    alike = [node for node in standings if costs[node.name] <= limit_s]
    choice = choose(wanted, standings, rests, GUESS, 0.0)
    assert isinstance(choice, Choice)
    assert choice.node == min(
        alike,
        key=lambda node: (-wanted.hit_of(node.name), node.load.num_active / 8, node.name),
    )


@pytest.mark.parametrize(
    ("source_tokens", "hit", "expected_s", "fetch_s"),
    [
        (0, 0, 0.4, 0.0),
        (0, 3000, 0.1, 0.0),
        (3000, 0, 0.1 + TRANSFER_S + 0.03, TRANSFER_S + 0.03),
        (1000, 0, 0.4 - 0.1 + TRANSFER_S + 0.01, TRANSFER_S + 0.01),
        (500, 0, 0.4, 0.0),
        (3000, 3000, 0.1, 0.0),
        (3000, 3500, 0.05, 0.0),
        (100, 0, 0.4, 0.0),
    ],
)
def test_a_prefix_is_fetched_exactly_where_it_saves_more_than_it_takes(
    source_tokens, hit, expected_s, fetch_s
):
    wanted = want(4000)
    price = price_of(1e-4)
    found = local_s(wanted, hit, price, elsewhere(wanted, source_tokens))
    assert found == pytest.approx((expected_s, fetch_s))


def test_a_fetch_goes_on_while_the_prompt_waits_in_the_queue():
    wanted = want(4000)
    price = price_of(1e-4, 2.0)
    seconds, _ = local_s(wanted, 0, price, elsewhere(wanted, 3000))
    assert seconds == pytest.approx(2.0 + 0.1)


@pytest.mark.parametrize("gain_s", [0.99 * MIN_FETCH_GAIN_S, 1.01 * MIN_FETCH_GAIN_S])
def test_a_prefix_that_saves_next_to_nothing_is_left_where_it_is(gain_s):
    wanted = want(100_000, kv_bytes=lambda _, __: 0)
    price = price_of(1e-6)
    _, fetch_s = local_s(wanted, 0, price, elsewhere(wanted, round((TRANSFER_S + gain_s) / 1e-6)))
    assert (fetch_s > 0) == (gain_s > MIN_FETCH_GAIN_S)


@pytest.mark.parametrize("num_tokens", [MAX_TOKENS_AT_DECODER, MAX_TOKENS_AT_DECODER + 1])
def test_a_node_that_only_decodes_costs_what_its_pd_p_takes(num_tokens):
    wanted, node = want(num_tokens), standing(mode="decode", num_waiting_tokens=50_000)
    seconds = cost_s(wanted, node, 0, elsewhere(wanted, 0, 3.0), GUESS)
    assert seconds == pytest.approx(3.0 + TRANSFER_S)
    idle = standing(mode="decode")
    seconds = cost_s(wanted, idle, 0, elsewhere(wanted, 0, 3.0), GUESS)
    assert (seconds < 3.0) == (num_tokens <= MAX_TOKENS_AT_DECODER)


def test_nodes_of_which_nothing_is_known_are_taken_for_the_mean():
    fast, unknown = (
        standing("a:1", prefill_tokens_per_s=1e5),
        standing("b:1", prefill_tokens_per_s=None),
    )
    assert unknown.price(GUESS).token_s == GUESS.token_s
    assert fast.price(GUESS).token_s == pytest.approx(1e-5)


def test_long_answers_weigh_more_than_short_ones_and_several_more_than_one():
    """A busy node with half of the prompt against an idle one without: what is to be drawn decides."""
    busy, idle = standing("a:1", num_running=7), standing("b:1")
    rests = {"east": elsewhere(want())}

    def chosen(**answer: Any) -> str:
        wanted = want(2000, hits={"a:1": 1000}, **answer)
        choice = choose(wanted, [busy, idle], rests, GUESS, 0.0)
        assert isinstance(choice, Choice)
        return choice.node.name

    assert chosen(max_tokens=1) == "a:1"
    assert chosen(max_tokens=None) == "b:1"
    assert chosen(max_tokens=10_000) == chosen(max_tokens=None), "as long as answers are"
    assert chosen(max_tokens=1, num_sequences=8) == "b:1", "there is a place for one"


def test_a_prompt_goes_where_there_is_room_for_its_kv():
    wanted = want(4000, hits={"a:1": 3900})
    need = wanted.job(GUESS).num_bytes
    assert need == TOKEN_BYTES * (4000 + 100)
    rests = {"east": elsewhere(wanted)}
    for free_bytes, name in ((need, "a:1"), (need // 8, "b:1"), (None, "a:1")):
        nodes = [standing("a:1", free_kv_bytes=free_bytes), standing("b:1", free_kv_bytes=need)]
        choice = choose(wanted, nodes, rests, GUESS, 0.0)
        assert isinstance(choice, Choice)
        assert choice.node.name == name
