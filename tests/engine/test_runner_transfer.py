"""Pages and tokens from elsewhere: an answer goes on as if it had begun here."""

import itertools
from dataclasses import replace

import pytest

from prfaas.cache.spec import needed_blocks
from prfaas.engine.model import Model
from tests.engine.running import (
    BLOCK,
    GREEDY,
    LENGTHS,
    MODELS,
    SEEDED,
    Node,
    Recorder,
    plain_answer,
    plain_rows,
    prefill_and_ship,
    prompt_of,
    tiny,
)


@pytest.fixture(params=MODELS, ids="-".join)
def model(request) -> Model:
    return tiny(*request.param)


@pytest.fixture
def gemma() -> Model:
    return tiny("gemma3", "float16")


# ---------------------------------------------------------------- tokens that were drawn before


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_an_answer_continues_behind_tokens_that_were_sent(model, sampling):
    prompt = prompt_of(45)
    expected = plain_answer(model, prompt, sampling)
    for num_sent in (1, 2, 5, 11):
        node = Node(model)
        result = node.answer(prompt, sampling, forced=(tuple(expected[:num_sent]),))
        assert result.tokens() == expected[num_sent:]
        assert result.choices[0].finish_reason == "length"


def test_choices_continue_from_where_each_was(gemma):
    prompt = prompt_of(45)
    expected = [plain_answer(gemma, prompt, SEEDED, index) for index in range(4)]
    forced = (tuple(expected[0][:3]), (), tuple(expected[2]), tuple(expected[3][:10]))
    result = Node(gemma).answer(prompt, SEEDED, num_choices=4, forced=forced)
    assert 2 not in result.choices
    for index in (0, 1, 3):
        assert result.tokens(index) == expected[index][len(forced[index]) :]


def test_forced_tokens_count_in_the_penalties(gemma):
    sampling = replace(SEEDED, frequency_penalty=1.5, repetition_penalty=1.3)
    prompt = prompt_of(33)
    expected = plain_answer(gemma, prompt, sampling)
    result = Node(gemma).answer(prompt, sampling, forced=(tuple(expected[:7]),))
    assert result.tokens() == expected[7:]


def test_an_answer_that_forced_tokens_end_needs_no_work(gemma):
    node = Node(gemma)
    prompt = prompt_of(20)
    stopping = replace(GREEDY, stop_token_ids=(7,))
    assert node.answer(prompt, stopping, forced=((5, 7),)).choices == {}
    assert node.answer(prompt, replace(GREEDY, max_tokens=2), forced=((5, 6),)).choices == {}
    assert node.runner.num_layers_run == 0


# ---------------------------------------------------------------- a remote prefill in miniature


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_shipped_pages_give_the_same_continuation_without_any_prefill(model, sampling):
    for length in LENGTHS:
        prompt = prompt_of(length, seed=length)
        first, _, receiver, table = prefill_and_ship(model, prompt, sampling)
        forced = (tuple(first.tokens()),)
        result = receiver.answer(prompt, sampling, table=table, forced=forced)
        assert first.tokens() + result.tokens() == plain_answer(model, prompt, sampling)
        assert result.num_computed == 0
        again = receiver.answer(prompt, sampling)  # the shipped blocks are a prefix hit
        assert again.tokens() == plain_answer(model, prompt, sampling)
        assert again.num_computed == length - (length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("max_batch", [1, 8])
def test_shipped_pages_serve_several_choices(gemma, max_batch):
    prompt = prompt_of(75)
    first, _, receiver, table = prefill_and_ship(
        gemma, prompt, SEEDED, num_choices=3, max_batch=max_batch
    )
    forced = tuple(tuple(first.tokens(index)) for index in range(3))
    result = receiver.answer(prompt, SEEDED, num_choices=3, table=table, forced=forced)
    for index in range(3):
        expected = plain_answer(gemma, prompt, SEEDED, index)
        assert first.tokens(index) + result.tokens(index) == expected


def test_shipped_pages_without_a_first_token_cost_one_token(model):
    for length in LENGTHS:
        prompt = prompt_of(length, seed=length)
        _, _, receiver, table = prefill_and_ship(model, prompt, SEEDED)
        result = receiver.answer(prompt, SEEDED, table=table)
        assert result.tokens() == plain_answer(model, prompt, SEEDED)
        assert result.num_computed == 1


def test_a_sink_gets_every_needed_page_once_and_layer_by_layer(model):
    for length, chunk_tokens in itertools.product((1, 16, 53, 400), (64, 576)):
        prompt = prompt_of(length)
        _, sink, receiver, table = prefill_and_ship(
            model, prompt, GREEDY, chunk_tokens=chunk_tokens
        )
        table.release()
        layout = receiver.cache.layout
        needed = {
            (group, index, block)
            for group, spec in enumerate(layout.groups)
            for index in range(spec.pages_per_block)
            for block in needed_blocks(spec, length, BLOCK)
        }
        assert set(sink.pages) == needed
        layers = [layout.groups[group].layers[index] for group, index, _ in sink.pages]
        num_falls = sum(b < a for a, b in itertools.pairwise(layers))
        assert num_falls < len(sink.progressed)  # within a forward the layers only rise
        assert sink.progressed == sorted(sink.progressed)
        assert sink.progressed[-1] == length


def test_a_sink_gets_only_what_its_hit_lacks(gemma):
    node = Node(gemma)
    prompt = prompt_of(200)
    node.answer(prompt)
    table = node.lookup(prompt)
    assert table.hit_tokens == 192
    assert table.try_reserve(200)
    sink = Recorder(node.cache, table)
    node.answer(prompt, table=table, sink=sink, prefill_only=True)
    assert {block for _, _, block in sink.pages} == {12}


def test_a_prefill_gives_the_first_tokens_their_logits_and_nothing_more(model):
    prompt = prompt_of(90)
    result, *_ = prefill_and_ship(model, prompt, SEEDED, num_choices=2)
    row = next(plain_rows(model, prompt))
    assert result.logits == row.astype("<f4").tobytes()
    for index in range(2):
        assert result.tokens(index) == plain_answer(model, prompt, SEEDED, index)[:1]
        assert result.choices[index].finish_reason is None


def test_a_first_token_that_ends_the_answer_says_so(gemma):
    node = Node(gemma)
    prompt = prompt_of(20)
    one = replace(GREEDY, max_tokens=1)
    assert node.answer(prompt, one, prefill_only=True).choices[0].finish_reason == "length"
    stop = replace(GREEDY, stop_token_ids=(plain_answer(gemma, prompt)[0],))
    assert node.answer(prompt, stop, prefill_only=True).choices[0].finish_reason == "stop"


def test_first_logits_come_with_a_whole_answer_too(gemma):
    prompt = prompt_of(50)
    expected = plain_answer(gemma, prompt)
    row = next(plain_rows(gemma, prompt)).astype("<f4").tobytes()
    for forced in ((), (tuple(expected[:4]),)):
        result = Node(gemma).answer(prompt, forced=forced, return_logits=True)
        assert result.logits == row
        assert result.tokens() == (expected[4:] if forced else expected)
