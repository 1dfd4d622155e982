"""The end of an answer is a place to go on from, with the bits of a cold prefill."""

from dataclasses import replace

import pytest
import structlog

from prfaas.cache.spec import StateSpec
from prfaas.engine.model import Model, Segment
from prfaas.types import SamplingParams, TokenEvent
from tests.engine.running import STATE_BLOCK, Node, plain_answer, prompt_of, tiny_hybrid
from tests.tiny_configs import FAMILIES

SEEDED = SamplingParams(max_tokens=30, seed=11, temperature=1.0, num_logprobs=2)
LINEAR = [f for f in FAMILIES if any(layer.states for layer in tiny_hybrid(f).config.layers)]


@pytest.fixture(params=["bamba", "kimi_linear"])
def model(request) -> Model:
    return tiny_hybrid(request.param)


def lines(events: list[TokenEvent]) -> list[tuple[int, object]]:
    return [(event.token_id, event.logprobs) for event in events]


def last_block(num_tokens: int) -> int:
    return num_tokens // STATE_BLOCK * STATE_BLOCK


def hit_of(node: Node, tokens: tuple[int, ...]) -> int:
    """How many tokens of a prompt that goes on with any next token are cached."""
    table = node.lookup((*tokens, 1))
    table.release()
    return table.hit_tokens


@pytest.mark.slow
@pytest.mark.parametrize("family", LINEAR)
def test_each_turn_of_a_chat_starts_at_the_end_of_the_last(family):
    """At once, and it answers as if nothing had been cached, to the last bit."""
    model = tiny_hybrid(family)
    node, cold = Node(model), Node(model, ram_bytes=16 << 20)
    history: tuple[int, ...] = ()
    hits = []
    for turn in range(6):
        prompt = (*history, *prompt_of(25, seed=turn))
        sampling = replace(SEEDED, max_tokens=40, seed=turn)
        result = node.answer(prompt, sampling)
        expected = cold.answer(prompt, sampling, salt=bytes([turn]))
        assert expected.num_computed == len(prompt)
        assert lines(result.choices[0].events) == lines(expected.choices[0].events)
        hits.append(len(prompt) - result.num_computed)
        assert hits[-1] == last_block(max(0, len(history) - 1))
        history = (*prompt, *result.tokens())
    assert hits == sorted(hits)
    assert hits[-1] >= 256


@pytest.mark.parametrize("family", LINEAR)
def test_what_is_cached_of_an_answer_are_the_bytes_of_a_cold_prefill(family):
    model = tiny_hybrid(family)
    node, prompt = Node(model), prompt_of(60)
    answer = node.answer(prompt, replace(SEEDED, max_tokens=150)).tokens()
    turn = (*prompt, *answer)
    end = last_block(len(turn) - 1)
    assert end >= len(prompt) + 2 * STATE_BLOCK
    kv = model.new_kv(capacity_tokens=end)
    model.forward([Segment(kv=kv, tokens=turn[:end], num_logits=0)])
    table = node.lookup((*turn, 1))
    assert table.hit_tokens == end
    for group, spec in enumerate(node.cache.layout.groups):
        if not isinstance(spec, StateSpec):
            continue
        pages = table.pages(group, end // STATE_BLOCK - 1)
        assert pages is not None
        for index, page in enumerate(pages):
            layer, part = divmod(index, spec.slices_per_layer)
            out = bytearray(min(spec.page_bytes, spec.state_bytes - part * spec.page_bytes))
            state = kv.state_of(spec.layers[layer])
            state.write_to(end, memoryview(out), part * spec.page_bytes)
            assert bytes(table.view(page)[: len(out)]) == out
    table.release()
    node.assert_idle()


def test_an_answer_within_its_prompts_block_adds_nothing(model):
    node, prompt = Node(model), prompt_of(70)
    tokens = (*prompt, *node.answer(prompt, replace(SEEDED, max_tokens=20)).tokens())
    assert hit_of(node, tokens) == 64
    node.assert_idle()


def test_an_answer_that_a_stop_string_ended_is_a_place_to_go_on_from(model):
    node, prompt = Node(model), prompt_of(120)
    node.submit("r", prompt, replace(SEEDED, max_tokens=100))
    for _ in range(15):
        node.step()
    node.runner.stop_choice("r", 0)
    node.run()
    assert hit_of(node, (*prompt, *node.results["r"].tokens())) == 128


def test_several_answers_and_an_aborted_one_leave_no_end(model):
    node, prompts = Node(model), [prompt_of(60, seed=seed) for seed in range(2)]
    sampling = replace(SEEDED, max_tokens=30)
    node.answer(prompts[0], sampling, num_choices=2)
    node.submit("left", prompts[1], sampling)
    for _ in range(12):
        node.step()
    node.runner.abort("left")
    node.run()
    several = node.results["request-0"].tokens()
    assert hit_of(node, (*prompts[0], *several)) == 0
    assert hit_of(node, (*prompts[1], *node.results["left"].tokens())) == 0


def test_a_pool_without_room_for_an_end_only_costs_the_hit(model):
    layout = model.layout(STATE_BLOCK)
    node = Node(model, ram_bytes=layout.pages_per_block * layout.page_bytes)
    prompt = prompt_of(100)
    answer = node.answer(prompt, replace(SEEDED, max_tokens=100)).tokens()
    next_turn = (*prompt, *answer, *prompt_of(10, seed=1))
    result = node.answer(next_turn, SEEDED)
    assert result.tokens() == plain_answer(model, next_turn, SEEDED)
    node.assert_idle()


def test_an_end_that_cannot_be_cached_costs_the_answer_nothing(model, monkeypatch):
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("prfaas.engine.working_copies.save_end", fail)
    node, prompt = Node(model), prompt_of(100)
    with structlog.testing.capture_logs() as logs:
        result = node.answer(prompt, replace(SEEDED, max_tokens=100))
    assert result.error is None
    assert result.tokens() == plain_answer(model, prompt, replace(SEEDED, max_tokens=100))
    assert "answer.end_not_cached" in [entry["event"] for entry in logs]
    node.assert_idle()


def test_a_preempted_answer_leaves_its_end_all_the_same(model):
    sampling = replace(SEEDED, max_tokens=100)
    prompts = [prompt_of(length, seed=length) for length in (90, 110)]
    budget = model.kv_capacity_bytes(190) + model.kv_capacity_bytes(200) - 1
    node = Node(model, kv_ram_bytes=budget)
    for index, prompt in enumerate(prompts):
        node.submit(f"r{index}", prompt, sampling)
    results = node.run()
    for index, prompt in enumerate(prompts):
        tokens = (*prompt, *results[f"r{index}"].tokens())
        assert hit_of(node, tokens) >= 128
    node.assert_idle()
