"""Whatever happens to a request on its way, its answer is that of a plain loop over the model."""

from dataclasses import replace

import numpy as np
import pytest

from prfaas.cache.spec import needed_blocks
from prfaas.engine.model import Model
from prfaas.errors import BadRequest, Overloaded
from prfaas.types import SamplingParams
from tests.engine.running import (
    BLOCK,
    GREEDY,
    LENGTHS,
    MODELS,
    SEEDED,
    Node,
    Recorder,
    plain_answer,
    preempting_node,
    prompt_of,
    tiny,
)


@pytest.fixture(params=MODELS, ids="-".join)
def model(request) -> Model:
    return tiny(*request.param)


@pytest.fixture
def gemma() -> Model:
    return tiny("gemma3", "float16")


# ---------------------------------------------------------------- the same answer every way


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_cold_and_with_a_hit_the_answer_is_the_plain_loops(model, sampling):
    node = Node(model)
    for length in LENGTHS:
        prompt = prompt_of(length, seed=length)
        expected = plain_answer(model, prompt, sampling)
        for expected_hit in (0, (length - 1) // BLOCK * BLOCK):
            result = node.answer(prompt, sampling)
            assert result.tokens() == expected
            assert result.num_computed == length - expected_hit


@pytest.mark.parametrize("chunk_tokens", [64, 128, 576])
@pytest.mark.parametrize("block_tokens", [16, 64])
def test_the_chunk_does_not_change_the_answer(model, chunk_tokens, block_tokens):
    node = Node(model, chunk_tokens=chunk_tokens, block_tokens=block_tokens)
    prompt = prompt_of(700)
    expected = plain_answer(model, prompt, SEEDED)
    assert node.answer(prompt, SEEDED).tokens() == expected
    assert node.answer(prompt, SEEDED).tokens() == expected


@pytest.mark.slow
def test_neighbours_do_not_change_the_answer(model):
    node = Node(model, max_batch_sequences=4)
    expected = {}
    for index, length in enumerate(LENGTHS * 2):
        sampling = replace(SEEDED if index % 2 else GREEDY, max_tokens=5 + index)
        prompt = prompt_of(length, seed=index)
        expected[f"r{index}"] = plain_answer(model, prompt, sampling)
        node.submit(f"r{index}", prompt, sampling)
        node.step()
    results = node.run()
    assert {name: result.tokens() for name, result in results.items()} == expected


def test_penalties_bias_and_logprobs_are_those_of_the_plain_loop(gemma):
    sampling = replace(
        SEEDED,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((5, 4.0),),
        num_logprobs=3,
    )
    prompt = prompt_of(40)
    answer = Node(gemma).answer(prompt, sampling, num_choices=2).choices
    for choice in range(2):
        assert answer[choice].tokens == plain_answer(gemma, prompt, sampling, choice)
        for event in answer[choice].events:
            assert event.logprobs is not None
            assert len(event.logprobs.top) == 3


def test_an_answers_blocks_serve_the_next_turn(gemma):
    node = Node(gemma)
    prompt = prompt_of(30)
    sampling = replace(GREEDY, max_tokens=60)
    turn = (*prompt, *node.answer(prompt, sampling).tokens(), *prompt_of(20, seed=1))
    result = node.answer(turn, sampling)
    assert result.tokens() == plain_answer(gemma, turn, sampling)
    # 89 tokens have KV (the last drawn one has none): five whole blocks.
    assert result.num_computed == len(turn) - 5 * BLOCK


def test_requests_of_different_salts_share_nothing(gemma):
    node = Node(gemma)
    prompt = prompt_of(100)
    node.answer(prompt, salt=b"a")
    assert node.answer(prompt, salt=b"b").num_computed == 100
    assert node.answer(prompt, salt=b"a").num_computed == 100 - 6 * BLOCK


# ---------------------------------------------------------------- choices


@pytest.mark.parametrize("max_batch", [1, 2, 8])
def test_each_choice_is_drawn_by_its_index(model, max_batch):
    node = Node(model, max_batch_sequences=max_batch)
    prompt = prompt_of(70)
    choices = node.answer(prompt, SEEDED, num_choices=3).choices
    for index in range(3):
        assert choices[index].tokens == plain_answer(model, prompt, SEEDED, index)
    assert len({tuple(answer.tokens) for answer in choices.values()}) == 3


def test_the_prompt_of_three_choices_is_computed_once(gemma):
    result = Node(gemma).answer(prompt_of(70), SEEDED, num_choices=3)
    assert result.num_computed == 70


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_stopped_choice_leaves_the_others_alone(gemma, num_steps):
    node = Node(gemma)
    prompt = prompt_of(100)
    node.submit("r", prompt, SEEDED, num_choices=3)
    for _ in range(num_steps):
        node.step()
    node.runner.stop_choice("r", 0)
    node.runner.stop_choice("r", 0)
    node.runner.stop_choice("r", 9)
    node.runner.stop_choice("unknown", 0)
    stopped_after = len(node.results["r"].tokens(0))
    result = node.run()["r"]
    assert len(result.tokens(0)) == stopped_after < SEEDED.max_tokens
    for index in (1, 2):
        assert result.tokens(index) == plain_answer(gemma, prompt, SEEDED, index)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_request_ends_with_its_last_stopped_choice(gemma, num_steps):
    node = Node(gemma)
    node.submit("r", prompt_of(100), SEEDED, num_choices=2)
    for _ in range(num_steps):
        node.step()
    for choice in (1, 0):
        node.runner.stop_choice("r", choice)
    assert node.run()["r"].error is None


# ---------------------------------------------------------------- ends


def test_a_stop_token_is_the_last_and_says_stop(gemma):
    prompt = prompt_of(25)
    expected = plain_answer(gemma, prompt, SEEDED)
    stop = expected[6]
    result = Node(gemma).answer(prompt, replace(SEEDED, stop_token_ids=(511, stop)))
    assert result.tokens() == expected[: expected.index(stop) + 1]
    assert result.choices[0].finish_reason == "stop"


def test_the_context_limit_ends_with_length(gemma):
    prompt = prompt_of(25)
    node = Node(gemma, max_context_tokens=30)
    result = node.answer(prompt, GREEDY)
    assert result.tokens() == plain_answer(gemma, prompt)[:5]
    assert result.choices[0].finish_reason == "length"


def test_requests_that_cannot_be_are_refused_and_take_no_hold(gemma):
    node = Node(gemma, max_context_tokens=30, max_waiting_requests=1)
    with pytest.raises(BadRequest, match="31 tokens; the context takes 30") as error:
        node.submit("long", prompt_of(31))
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(BadRequest, match="empty"):
        node.submit("empty", ())
    with pytest.raises(BadRequest, match=r"outside 0\.\.511"):
        node.submit("foreign", (3, 512))
    with pytest.raises(BadRequest, match=r"outside 0\.\.511"):
        node.submit("bias", (3,), replace(GREEDY, logit_bias=((512, 1.0),)))
    node.submit("a", prompt_of(3))
    with pytest.raises(BadRequest, match="already running"):
        node.submit("a", prompt_of(3))
    with pytest.raises(Overloaded):
        node.submit("b", prompt_of(3))
    assert node.run().keys() == {"a"}


PHASES = {"waiting": 0, "prefill": 2, "decode": 9}


@pytest.mark.parametrize("num_steps", PHASES.values(), ids=PHASES)
@pytest.mark.parametrize("num_choices", [1, 3])
def test_nothing_is_held_after_an_abort(gemma, num_steps, num_choices):
    node = Node(gemma)
    prompt = prompt_of(400)
    node.submit("other", prompt_of(10), replace(GREEDY, max_tokens=40))
    node.submit("r", prompt, SEEDED, num_choices=num_choices)
    for _ in range(num_steps):
        node.step()
    node.runner.abort("r")
    node.runner.abort("r")
    node.runner.abort("unknown")
    assert node.runner.has_work
    node.step()
    assert node.results["r"].ended is not None
    assert node.results["r"].error is None
    results = node.run()
    assert results["other"].tokens() == plain_answer(
        gemma, prompt_of(10), replace(GREEDY, max_tokens=40)
    )
    assert node.answer(prompt, SEEDED).tokens() == plain_answer(gemma, prompt, SEEDED)


def test_nothing_is_held_after_an_abort_of_a_preempted_request(gemma):
    node = preempting_node(gemma, num_sequences=1.5, num_tokens=200)
    sampling = replace(GREEDY, max_tokens=150)
    node.submit("old", prompt_of(20), sampling)
    node.submit("young", prompt_of(21), sampling)
    while node.runner.load().num_running < 2:
        node.step()
    while node.runner.load().num_running == 2:
        node.step()
    node.runner.abort("young")
    assert node.run()["old"].tokens() == plain_answer(gemma, prompt_of(20), sampling)


def test_nothing_is_held_after_an_abort_of_a_prefill_with_a_sink(gemma):
    node = Node(gemma)
    prompt = prompt_of(400)
    table = node.lookup(prompt)
    assert table.try_reserve(400)
    sink = Recorder(node.cache, table)
    node.submit("r", prompt, table=table, sink=sink, prefill_only=True)
    node.step()
    node.step()
    node.runner.abort("r")
    node.run()
    assert sink.progressed[-1] == 128


# ---------------------------------------------------------------- failures


class BrokenSink(Recorder):
    def __init__(self, *args, fail_in: str) -> None:
        super().__init__(*args)
        self.fail_in = fail_in

    def page_ready(self, *args) -> None:
        if self.fail_in == "page_ready" and args[1] == 1:
            raise OSError("no more")

    def progress(self, num_tokens: int) -> None:
        if self.fail_in == "progress":
            raise OSError("no more")


@pytest.mark.parametrize("fail_in", ["page_ready", "progress"])
def test_a_failing_sink_fails_its_request_alone(gemma, fail_in):
    node = Node(gemma)
    prompt = prompt_of(100)
    table = node.lookup(prompt)
    assert table.try_reserve(100)
    sink = BrokenSink(node.cache, table, fail_in=fail_in)
    node.submit("other", prompt_of(30))
    node.submit("r", prompt, table=table, sink=sink, prefill_only=True)
    results = node.run()
    assert results["r"].error == "OSError: no more"
    assert results["other"].error is None
    assert results["other"].tokens() == plain_answer(gemma, prompt_of(30))
    assert node.answer(prompt).tokens() == plain_answer(gemma, prompt)


def test_a_forward_that_fails_ends_those_in_it_and_the_engine_serves_on(gemma, monkeypatch):
    node = Node(gemma, max_batch_sequences=2)
    for index in range(3):
        node.submit(f"r{index}", prompt_of(10, seed=index))
    node.step()

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(gemma, "forward", fail)
        node.step()
    results = node.run()
    for name in ("r0", "r1"):
        assert results[name].error == "RuntimeError: out of memory"
    assert results["r2"].error is None
    assert results["r2"].tokens() == plain_answer(gemma, prompt_of(10, seed=2))


def test_logits_that_are_no_numbers_fail_their_request_alone(gemma, monkeypatch):
    node = Node(gemma)
    node.submit("bad", prompt_of(10, seed=1))
    node.submit("good", prompt_of(20, seed=2))
    forward = gemma.forward

    def poisoned(segments, **kwargs):
        logits = forward(segments, **kwargs)
        logits[[i for i, s in enumerate(segments) if len(s.tokens) == 10]] = np.nan
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(gemma, "forward", poisoned)
        node.step()
    results = node.run()
    assert results["bad"].error == "EngineError: the model's logits are not finite"
    assert results["good"].tokens() == plain_answer(gemma, prompt_of(20, seed=2))


def test_a_pool_full_of_held_pages_costs_only_the_caching(gemma):
    layout = gemma.layout(BLOCK)
    node = Node(gemma, ram_bytes=2 * layout.pages_per_block * layout.page_bytes)
    prompt = prompt_of(300)
    assert node.answer(prompt, SEEDED).tokens() == plain_answer(gemma, prompt, SEEDED)


def test_pages_that_slid_out_of_the_window_are_not_held(gemma):
    node = Node(gemma)
    prompt = prompt_of(400)
    node.submit("r", prompt)
    while not node.results["r"].choices:
        node.step()
    layout = gemma.layout(BLOCK)
    needed = sum(
        len(spec.layers) * len(needed_blocks(spec, len(prompt), BLOCK)) for spec in layout.groups
    )
    assert node.cache.counts().num_referenced == needed < 25 * layout.pages_per_block
    node.run()


# ---------------------------------------------------------------- load


def test_the_load_counts_sequences_tokens_and_bytes(gemma):
    node = Node(gemma, max_batch_sequences=1)
    idle = node.runner.load()
    assert idle.prefill_tokens_per_s == 0.0
    node.submit("a", prompt_of(200))
    node.submit("b", prompt_of(50))
    load = node.runner.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (0, 2, 250)
    node.step()
    load = node.runner.load()
    assert (load.num_running, load.num_waiting) == (1, 1)
    assert load.kv_used_bytes > 0
    assert load.step_count == 1
    assert load.prefill_tokens_per_s == 0.0, "one step of 64 tokens says little"
    node.step()
    load = node.runner.load()
    # The clock of the test moves half a second between the two looks of a step.
    assert load.prefill_tokens_per_s == 64 / 0.5
    assert node.runner.num_layers_run == 2 * len(gemma.layers)
    node.run()


def test_a_long_prompt_does_not_delay_a_short_one(gemma):
    node = Node(gemma)
    node.submit("long", prompt_of(2000), SamplingParams(max_tokens=2, seed=0))
    for _ in range(3):
        node.step()
    node.submit("short", prompt_of(20), SamplingParams(max_tokens=2, seed=0))
    node.step()
    node.step()
    assert node.results["short"].ended is not None
    assert node.results["long"].choices == {}
    node.run()
