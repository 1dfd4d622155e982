"""A replayed engine answers as a model would: the same tokens however they came about, other ones for a wrong byte."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.cache.spec import CacheLayout, StateSpec, bytes_of_page, held_blocks
from prfaas.engine.replay import SLICE_S
from prfaas.engine.replay_timing import ReplayTiming
from prfaas.types import SamplingParams
from tests.engine.replaying import (
    ATTENTION,
    BLOCK,
    HYBRID,
    LAYOUTS,
    TIMING,
    ReplayNode,
    TimedRecorder,
    model_of,
    plain_answer,
    prompt_of,
    ship,
)
from tests.engine.running import GREEDY, SEEDED, Recorder

LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, 200]


@pytest.fixture(params=list(LAYOUTS))
def layout(request) -> CacheLayout:
    return LAYOUTS[request.param]


# ---------------------------------------------------------------- equal tokens


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_an_answer_is_that_of_the_plain_loop(layout, num_tokens, sampling):
    prompt = prompt_of(num_tokens)
    assert ReplayNode(layout).answer(prompt, sampling).tokens() == plain_answer(
        layout, prompt, sampling
    )


@given(
    st.integers(1, 150),
    st.integers(1, 8).map(lambda blocks: blocks * BLOCK),
    st.sampled_from(list(LAYOUTS)),
)
@settings(max_examples=25)
def test_neither_chunks_nor_neighbours_change_tokens_or_pages(num_tokens, chunk_tokens, name):
    layout = LAYOUTS[name]
    prompt, pages = prompt_of(num_tokens), []
    for node in (ReplayNode(layout), ReplayNode(layout, chunk_tokens=chunk_tokens)):
        for neighbour in range(3):
            node.submit(f"n{neighbour}", prompt_of(40 + 30 * neighbour, seed=1 + neighbour))
        table = node.lookup(prompt)
        assert table.try_reserve(num_tokens)
        sink = Recorder(node.cache, table)
        node.submit("it", prompt, table=table, sink=sink, prefill_only=True)
        assert node.run()["it"].tokens() == plain_answer(layout, prompt)[:1]
        pages.append(sink.pages)
    assert pages[0] == pages[1]


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_a_cached_prefix_gives_the_same_tokens_and_less_work(layout, num_tokens):
    prompt = prompt_of(num_tokens)
    node = ReplayNode(layout)
    assert node.answer(prompt).num_computed == num_tokens
    again = node.answer(prompt)
    assert again.tokens() == plain_answer(layout, prompt)
    assert again.num_computed == num_tokens - (num_tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_pages_from_elsewhere_give_the_same_tokens_without_work(layout, num_tokens):
    prompt = prompt_of(num_tokens)
    first, _, receiver, landed = ship(prompt, layout)
    result = receiver.answer(prompt, table=landed, forced=(tuple(first.tokens()),))
    assert first.tokens() + result.tokens() == plain_answer(layout, prompt)
    assert result.num_computed == 0


def test_choices_differ_and_each_is_its_own_plain_answer(layout):
    prompt = prompt_of(45)
    result = ReplayNode(layout).answer(prompt, SEEDED, num_choices=4)
    answers = [result.tokens(choice) for choice in range(4)]
    assert answers == [plain_answer(layout, prompt, SEEDED, choice) for choice in range(4)]
    assert len({tuple(answer) for answer in answers}) == 4


def test_an_answer_goes_on_behind_tokens_that_were_sent(layout):
    prompt = prompt_of(45)
    expected = plain_answer(layout, prompt, SEEDED)
    result = ReplayNode(layout).answer(prompt, SEEDED, forced=(tuple(expected[:5]),))
    assert result.tokens() == expected[5:]


def test_a_preempted_answer_is_the_same(layout):
    prompts = [prompt_of(length, seed=length) for length in (300, 250, 200, 20, 30)]
    node = ReplayNode(layout, max_batch_sequences=2, timing=TIMING)
    for number, prompt in enumerate(prompts[:3]):
        node.submit(str(number), prompt)
    for _ in range(3):
        node.step()
    for number, prompt in enumerate(prompts[3:], start=3):
        node.submit(str(number), prompt)
    results = node.run()
    for number, prompt in enumerate(prompts):
        assert results[str(number)].tokens() == plain_answer(layout, prompt)


def test_another_seed_token_or_model_gives_other_tokens():
    prompt = prompt_of(50)
    answers = [
        plain_answer(HYBRID, prompt, SEEDED),
        plain_answer(HYBRID, prompt, replace(SEEDED, seed=12)),
        plain_answer(HYBRID, (prompt[0] ^ 1, *prompt[1:]), SEEDED),
        plain_answer(HYBRID, (*prompt[:-1], prompt[-1] ^ 1), SEEDED),
    ]
    assert len({tuple(answer) for answer in answers}) == 4
    kvs = [
        model_of(HYBRID, seed).new_kv(capacity_tokens=0, block_tokens=BLOCK)
        for seed in (b"a", b"b")
    ]
    assert kvs[0].digest(0) != kvs[1].digest(0)


def test_stop_tokens_lengths_and_logprobs_are_heeded():
    prompt = prompt_of(20)
    plain = plain_answer(HYBRID, prompt)
    node = ReplayNode()
    stopped = node.answer(prompt, replace(GREEDY, stop_token_ids=(plain[3],), num_logprobs=2))
    length = plain.index(plain[3]) + 1
    assert stopped.tokens() == plain[:length]
    assert stopped.choices[0].finish_reason == "stop"
    for event in stopped.choices[0].events:
        assert event.logprobs is not None
        assert event.logprobs.top[0] == (event.token_id, event.logprobs.logprob)
    assert node.answer(prompt, replace(GREEDY, max_tokens=3)).choices[0].finish_reason == "length"
    banned = replace(GREEDY, logit_bias=((plain[0], -100.0),))
    assert node.answer(prompt, banned).tokens()[0] != plain[0]


def test_answers_read_as_small_letters_and_spaces():
    tokens = plain_answer(HYBRID, prompt_of(9), SamplingParams(max_tokens=300, seed=5))
    assert set(bytes(tokens).decode()) <= set("abcdefghijklmnopqrstuvwxyz ")
    assert len(set(tokens)) > 20


# ---------------------------------------------------------------- a wrong byte


@st.composite
def wrong_bytes(draw):
    """A prompt, the place of a byte among the pages that its answer goes on from, and the damage."""
    layout = draw(st.sampled_from(list(LAYOUTS.values())))
    num_tokens = draw(st.integers(1, 80))
    group = draw(st.integers(0, len(layout.groups) - 1))
    spec = layout.groups[group]
    block = draw(st.sampled_from(held_blocks(spec, num_tokens, BLOCK)))
    index = draw(st.integers(0, spec.pages_per_block - 1))
    in_block = min(BLOCK, num_tokens - block * BLOCK)
    size = bytes_of_page(spec, index, in_block, BLOCK)
    return (
        layout,
        num_tokens,
        (group, block, index),
        draw(st.integers(0, size - 1)),
        draw(st.integers(1, 255)),
    )


@given(wrong_bytes())
@settings(max_examples=60)
def test_any_wrong_byte_of_any_group_gives_other_tokens(case):
    layout, num_tokens, (group, block, index), offset, damage = case
    prompt = prompt_of(num_tokens)
    sampling = replace(GREEDY, max_tokens=20)
    first, _, receiver, landed = ship(prompt, layout, sampling)
    pages = landed.pages(group, block)
    assert pages is not None
    landed.view(pages[index])[offset] ^= damage
    result = receiver.answer(prompt, sampling, table=landed, forced=(tuple(first.tokens()),))
    assert len(result.tokens()) == 19
    assert first.tokens() + result.tokens() != plain_answer(layout, prompt, sampling)


@pytest.mark.parametrize("group", range(len(HYBRID.groups)))
def test_a_cached_page_that_was_damaged_gives_other_tokens_and_other_pages(group):
    prompt = prompt_of(5 * BLOCK + 3)
    node = ReplayNode()
    node.answer(prompt)
    hit = node.lookup(prompt)
    block = held_blocks(HYBRID.groups[group], hit.hit_tokens, BLOCK)[0]
    pages = hit.pages(group, block)
    assert pages is not None
    hit.view(pages[0])[7] ^= 1
    longer = (*prompt, *prompt_of(2 * BLOCK, seed=3))
    table = node.lookup(longer)
    assert table.try_reserve(len(longer))
    sink = Recorder(node.cache, table)
    node.submit("damaged", longer, table=table, sink=sink, prefill_only=True, return_logits=True)
    while node.runner.has_work:
        node.step()
    hit.release()
    right, whole, _, landed = ship(longer, HYBRID)
    landed.release()
    written = {place: data for place, data in sink.pages.items() if place[2] > 5}
    assert written
    assert all(whole.pages[place] != data for place, data in written.items())
    assert right.logits is not None
    assert node.results["damaged"].logits not in {right.logits, None}


# ---------------------------------------------------------------- time


def finish_times(node: ReplayNode) -> dict[str, list[float]]:
    """Run; return when each token of each request came."""
    times: dict[str, list[float]] = {name: [] for name in node.results}
    while node.runner.has_work:
        before = {n: len(r.choices[0].tokens) if r.choices else 0 for n, r in node.results.items()}
        node.step()
        for name, result in node.results.items():
            new = len(result.tokens()) - before[name]
            times[name] += [node.now_s] * new
    return times


@pytest.mark.parametrize("num_tokens", [1, 64, 65, 500])
@pytest.mark.parametrize("speed", [1.0, 4.0])
def test_a_prefill_takes_what_the_profile_says(num_tokens, speed):
    node = ReplayNode(timing=replace(TIMING, speed=speed))
    node.submit("a", prompt_of(num_tokens), replace(GREEDY, max_tokens=1))
    (first_s,) = finish_times(node)["a"]
    assert first_s - 100.0 == pytest.approx((0.5 + 0.001 * num_tokens) / speed, abs=1e-6)


def test_a_hit_takes_only_what_its_uncached_tokens_take():
    node = ReplayNode(timing=TIMING)
    prompt = prompt_of(10 * BLOCK + 3)
    node.answer(prompt)
    began_s = node.now_s
    node.submit("again", prompt, replace(GREEDY, max_tokens=1))
    (first_s,) = finish_times(node)["again"]
    assert first_s - began_s == pytest.approx(0.5 + 0.001 * 3, abs=1e-6)


@pytest.mark.parametrize("batch", [1, 5])
def test_a_decode_step_takes_what_the_profile_says_of_its_batch(batch):
    node = ReplayNode(timing=TIMING)
    for number in range(batch):
        node.submit(str(number), prompt_of(3, seed=number), replace(GREEDY, max_tokens=10))
    times = finish_times(node)
    for name in times:
        gaps = [
            later - earlier for earlier, later in zip(times[name], times[name][1:], strict=False)
        ]
        assert gaps[-8:] == pytest.approx([0.02 + 0.001 * batch] * 8, abs=1e-6)


def test_pages_come_layer_by_layer_in_the_time_of_their_chunk():
    node = ReplayNode(timing=ReplayTiming(prefill_s=lambda n: 0.01 * n, decode_s=None))
    prompt = prompt_of(64)
    table = node.lookup(prompt)
    assert table.try_reserve(64)
    sink = TimedRecorder(node, table)
    node.answer(prompt, table=table, sink=sink, prefill_only=True)
    for group, index, seconds in sink.times:
        spec = HYBRID.groups[group]
        slices = spec.slices_per_layer if isinstance(spec, StateSpec) else 1
        layer = spec.layers[index // slices]
        assert seconds - 100.0 == pytest.approx(0.64 * (layer + 1) / 5, abs=1e-6)


def test_decoding_goes_on_while_a_long_prompt_is_prefilled():
    node = ReplayNode(timing=TIMING)
    node.submit("short", prompt_of(3), replace(GREEDY, max_tokens=30))
    node.submit("long", prompt_of(700, seed=1), replace(GREEDY, max_tokens=1))
    times = finish_times(node)
    assert sum(at < times["long"][0] for at in times["short"]) >= 10


# ---------------------------------------------------------------- who leaves


def test_an_abort_is_heard_within_a_slice_in_the_middle_of_a_forward(layout):
    node = ReplayNode(layout, timing=TIMING)
    node.submit("a", prompt_of(60))
    for _ in range(5):
        node.step()
    assert not node.results["a"].tokens()
    left_s = node.now_s
    node.runner.abort("a")
    node.step()
    assert node.results["a"].ended is not None
    assert node.now_s - left_s <= SLICE_S
    node.assert_idle()


def test_a_request_that_leaves_in_the_middle_writes_no_page_of_another():
    node = ReplayNode(ram_bytes=HYBRID.page_bytes * 60, timing=TIMING)
    prompts = [prompt_of(60, seed=seed) for seed in range(4)]
    for number in (0, 1):
        node.submit(str(number), prompts[number], replace(GREEDY, max_tokens=40))
    for _ in range(8):
        node.step()
    node.runner.abort("0")
    for number in (2, 3):
        node.submit(str(number), prompts[number])
    results = node.run()
    assert results["1"].tokens() == plain_answer(HYBRID, prompts[1], replace(GREEDY, max_tokens=40))
    for number in (1, 2, 3):  # whatever is cached of them is right
        answer = node.answer(prompts[number])
        assert answer.tokens() == plain_answer(HYBRID, prompts[number])


def test_a_stopped_choice_leaves_and_the_others_go_on():
    node = ReplayNode(ATTENTION, timing=TIMING)
    prompt, sampling = prompt_of(40), replace(SEEDED, max_tokens=40)
    node.submit("a", prompt, sampling, num_choices=3)
    while not node.results["a"].tokens():
        node.step()
    node.step()
    node.runner.stop_choice("a", 1)
    result = node.run()["a"]
    for choice in (0, 2):
        assert result.tokens(choice) == plain_answer(ATTENTION, prompt, sampling, choice)
    assert len(result.tokens(1)) < 40


def test_a_sink_that_fails_ends_its_request_alone():
    class Broken(Recorder):
        def page_ready(self, group, index, block, num_tokens, page):
            raise RuntimeError("no more")

    node = ReplayNode()
    prompt = prompt_of(40)
    table = node.lookup(prompt)
    assert table.try_reserve(40)
    node.submit("a", prompt, table=table, sink=Broken(node.cache, table), prefill_only=True)
    node.submit("b", prompt_of(30, seed=1))
    results = node.run()
    assert results["a"].error == "RuntimeError: no more"
    assert results["b"].tokens() == plain_answer(HYBRID, prompt_of(30, seed=1))


def test_the_heartbeat_counts_layers_and_an_idle_engine_forgets_the_time():
    node = ReplayNode(ATTENTION, timing=TIMING)
    node.answer(prompt_of(10), replace(GREEDY, max_tokens=4))
    assert node.runner.num_layers_run == 4 * 4  # a prefill and three steps, of four layers
    node.now_s += 1_000.0
    began_s = node.now_s
    node.submit("later", prompt_of(10, seed=1), replace(GREEDY, max_tokens=1))
    (first_s,) = finish_times(node)["later"]
    assert first_s - began_s == pytest.approx(0.51, abs=1e-6)


def test_the_next_turn_of_a_chat_starts_where_the_last_one_ended():
    node = ReplayNode(timing=TIMING)
    prompt = prompt_of(3 * BLOCK + 5)
    answer = node.answer(prompt, replace(GREEDY, max_tokens=40)).tokens()
    turn = (*prompt, *answer, *prompt_of(30, seed=2))
    num_cached = (len(prompt) + len(answer) - 1) // BLOCK * BLOCK
    result = node.answer(turn)
    assert result.num_computed == len(turn) - num_cached
    assert result.tokens() == plain_answer(HYBRID, turn)
