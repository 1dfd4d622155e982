"""Prompts are as long as asked for, and share exactly what a trace says that they share."""

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from prfaas.bench.load_prompts import FIRST_ID, NUM_IDS, LoadPrompts, planned_requests
from prfaas.config.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest

PROMPTS = LoadPrompts("a key")


def ids(
    num_tokens: int, index: int = 0, blocks: tuple[int, ...] = (), prompts=PROMPTS
) -> list[int]:
    found = json.loads(b"[" + prompts.text(TraceRequest(0.0, num_tokens, 1, blocks), index) + b"]")
    assert isinstance(found, list)
    return found


def num_shared(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@given(st.integers(1, 3000), st.lists(st.integers(0, 50), max_size=8).map(tuple))
def test_a_prompt_has_its_length_whatever_its_blocks(num_tokens, blocks):
    found = ids(num_tokens, blocks=blocks)
    assert len(found) == num_tokens
    assert all(FIRST_ID <= each < FIRST_ID + NUM_IDS for each in found)


@given(st.data())
def test_two_prompts_share_the_blocks_that_they_begin_with_and_no_token_more(data):
    num_shared_blocks = data.draw(st.integers(0, 4))
    common = tuple(range(num_shared_blocks))
    one = common + tuple(100 + i for i in range(data.draw(st.integers(1, 3))))
    other = common + tuple(200 + i for i in range(data.draw(st.integers(1, 3))))
    rest = data.draw(st.integers(1, MOONCAKE_BLOCK_TOKENS))
    lengths = [(len(blocks) - 1) * MOONCAKE_BLOCK_TOKENS + rest for blocks in (one, other)]
    found = num_shared(ids(lengths[0], 0, one), ids(lengths[1], 1, other))
    at_least = num_shared_blocks * MOONCAKE_BLOCK_TOKENS
    assert at_least <= found <= at_least + 8  # of 64 ids, the first ones may be alike


def test_a_partial_last_block_is_the_beginning_of_the_whole_one():
    whole, cut = ids(1024, 0, (1, 2)), ids(700, 1, (1, 2))
    assert cut == whole[:700]


def test_without_blocks_prompts_have_nothing_in_common():
    assert num_shared(ids(500, 0), ids(500, 1)) < 8
    assert num_shared(ids(500, 0), ids(500, 0, prompts=LoadPrompts("another"))) < 8
    assert ids(500, 0) == ids(500, 0)


def test_ids_are_drawn_evenly():
    counts = Counter(ids(64_000))
    assert len(counts) == NUM_IDS
    assert all(800 < count < 1200 for count in counts.values())


def test_a_request_is_asked_for_as_the_trace_has_it_and_answers_at_least_a_token():
    requests = [TraceRequest(1.5, 600, 7, (3, 4)), TraceRequest(2.0, 5, 0)]
    first, second = planned_requests(requests, PROMPTS, 'tiny "model"')
    assert (first.due_s, first.prompt_tokens) == (1.5, 600)
    body = json.loads(first.body())
    assert body["prompt"] == ids(600, 0, (3, 4))
    assert (body["model"], body["max_tokens"], body["stream"]) == ('tiny "model"', 7, True)
    assert json.loads(second.body())["max_tokens"] == 1
