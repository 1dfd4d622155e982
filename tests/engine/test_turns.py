"""The end of an answer becomes a place to go on from, with the bits of a prefill, while nobody waits."""

from dataclasses import replace

import pytest
import structlog

from prfaas.cache.spec import StateSpec
from prfaas.engine import turns
from prfaas.engine.model import Model, Segment
from prfaas.engine.submission import TurnCounts
from prfaas.types import SamplingParams, TokenEvent
from tests.engine.running import STATE_BLOCK, Node, plain_answer, prompt_of, tiny, tiny_hybrid

SEEDED = SamplingParams(max_tokens=30, seed=11, temperature=1.0, num_logprobs=2)


@pytest.fixture(params=["bamba", "kimi_linear"])
def model(request) -> Model:
    return tiny_hybrid(request.param)


def lines(events: list[TokenEvent]) -> list[tuple[int, object]]:
    return [(event.token_id, event.logprobs) for event in events]


def last_block(num_tokens: int) -> int:
    return num_tokens // STATE_BLOCK * STATE_BLOCK


def end_answer(node: Node, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """Answer with so many tokens, most of them drawn elsewhere; return prompt and answer.

    The snapshot of the turn's end is still to be made.
    """
    name = f"request-{len(node.results)}"
    sent = prompt_of(num_tokens - 1, seed=num_tokens)
    node.submit(name, prompt, replace(SEEDED, max_tokens=num_tokens), forced=(sent,))
    while node.results[name].ended is None:
        node.step()
    return (*prompt, *sent, *node.results[name].tokens())


@pytest.mark.slow
def test_each_turn_of_a_chat_starts_at_the_end_of_the_last(model):
    """And answers as if nothing had been cached, to the last bit."""
    node, cold = Node(model), Node(model, ram_bytes=16 << 20)
    history: tuple[int, ...] = ()
    hits, num_made = [], 0
    for turn in range(10):
        prompt = (*history, *prompt_of(25, seed=turn))
        result = node.answer(prompt, replace(SEEDED, max_tokens=30, seed=turn))
        expected = cold.answer(
            prompt, replace(SEEDED, max_tokens=30, seed=turn), salt=bytes([turn])
        )
        assert expected.num_computed == len(prompt)
        assert lines(result.choices[0].events) == lines(expected.choices[0].events)
        hits.append(len(prompt) - result.num_computed)
        assert hits[-1] == last_block(len(history))
        history = (*prompt, *result.tokens())
        num_made += last_block(len(history)) >= len(prompt)
    assert hits == sorted(hits)
    assert hits[-1] > 400
    assert num_made >= 3  # other answers end in the block in which they began
    assert node.runner.load().turns == TurnCounts(num_made=num_made)


def test_what_is_published_of_a_turn_are_the_bytes_of_a_prefill(model):
    node = Node(model)
    prompt = prompt_of(100)
    turn = end_answer(node, prompt, 200)
    node.run()
    end = last_block(len(turn))
    kv = model.new_kv(capacity_tokens=end)
    model.forward([Segment(kv=kv, tokens=turn[:end], num_logits=0)])
    table = node.lookup((*turn, 1))
    assert table.hit_tokens == end
    for group, spec in enumerate(node.cache.layout.groups):
        is_state = isinstance(spec, StateSpec)
        for block in [end // STATE_BLOCK - 1] if is_state else range(end // STATE_BLOCK):
            pages = table.pages(group, block)
            assert pages is not None
            for index, page in enumerate(pages):
                out = bytearray(spec.page_bytes)
                if isinstance(spec, StateSpec):
                    layer, part = divmod(index, spec.slices_per_layer)
                    size = min(spec.page_bytes, spec.state_bytes - part * spec.page_bytes)
                    out = bytearray(size)
                    state = kv.state_of(spec.layers[layer])
                    state.write_to(end, memoryview(out), part * spec.page_bytes)
                else:
                    kv.export_block(spec.layers[index], block, STATE_BLOCK, memoryview(out))
                assert bytes(table.view(page)[: len(out)]) == out
    table.release()


def test_a_turn_is_computed_from_the_state_in_its_prompt_and_in_small_steps(model):
    node = Node(model)
    end_answer(node, prompt_of(500), 170)
    num_layers, num_steps = node.runner.num_layers_run, 0
    while node.runner.has_work:
        node.step()
        num_steps += 1
    assert num_steps == 2  # tokens 448 to 640 in steps of 128
    assert node.runner.num_layers_run - num_layers == 2 * len(model.layers)
    node.assert_idle()


def test_a_request_takes_the_engine_within_a_step_and_what_was_done_is_not_lost(model):
    node = Node(model)
    turn = end_answer(node, prompt_of(60), 400)
    assert last_block(len(turn)) == 448
    node.step()
    node.step()  # 256 of 448 tokens
    other = prompt_of(30, seed=1)
    name = "other"
    node.submit(name, other, SEEDED)
    assert node.runner.load().kv_used_bytes == 0
    before = node.runner.num_layers_run
    node.step()
    assert node.results[name].tokens() != []  # its own forward, and no other's
    assert node.runner.num_layers_run - before == len(model.layers)
    while node.results[name].ended is None:
        node.step()
    assert node.results[name].tokens() == plain_answer(model, other, SEEDED)
    before = node.runner.num_layers_run
    node.run()
    assert (node.runner.num_layers_run - before) // len(model.layers) == 2  # the other 192 tokens
    result = node.answer((*turn, *prompt_of(10, seed=2)), SEEDED)
    assert result.num_computed == len(turn) + 10 - 448


def test_the_next_turn_makes_the_snapshot_of_the_last_needless(model):
    node = Node(model)
    turn = end_answer(node, prompt_of(60), 200)
    node.step()
    end_answer(node, (*turn, *prompt_of(10, seed=2)), 1)
    assert node.runner.load().turns == TurnCounts(num_overtaken=1)
    assert not node.runner.has_work
    node.assert_idle()


def test_another_tenants_prompt_overtakes_no_turn(model):
    node = Node(model)
    turn = end_answer(node, prompt_of(60), 100)
    node.answer((*turn, 5), replace(SEEDED, max_tokens=1), salt=b"other")
    assert node.runner.load().turns == TurnCounts(num_made=1)


def test_too_many_turns_that_wait_are_dropped_oldest_first(model, monkeypatch):
    monkeypatch.setattr(turns, "MAX_TURNS", 2)
    node = Node(model)
    sampling = replace(SEEDED, max_tokens=10)
    for seed in range(4):
        node.submit(f"r{seed}", prompt_of(120, seed=seed), sampling)
    results = node.run()
    assert node.runner.load().turns == TurnCounts(num_made=2, num_dropped=2)
    hits = []
    for seed in range(4):
        turn = (*prompt_of(120, seed=seed), *results[f"r{seed}"].tokens(), 1)
        table = node.lookup(turn)
        hits.append(table.hit_tokens)
        table.release()
    assert sorted(hits) == [64, 64, 128, 128]


def test_a_turn_longer_than_all_that_may_wait_is_dropped(model, monkeypatch):
    monkeypatch.setattr(turns, "MAX_TURN_TOKENS", 100)
    node = Node(model)
    end_answer(node, prompt_of(60), 100)
    assert node.runner.load().turns == TurnCounts(num_dropped=1)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_node_that_drains_makes_no_more(model, num_steps):
    node = Node(model)
    end_answer(node, prompt_of(60), 300)
    for _ in range(num_steps):
        node.step()
    node.runner.drain()
    assert not node.runner.has_work
    end_answer(node, prompt_of(60, seed=1), 100)
    assert node.runner.load().turns == TurnCounts(num_dropped=1)
    node.assert_idle()


def test_a_turn_that_fails_hurts_nobody(model, monkeypatch):
    node = Node(model)
    end_answer(node, prompt_of(60), 100)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(model, "forward", fail)
        node.run()
    assert [entry["event"] for entry in logs] == ["turn.failed"]
    assert node.runner.load().turns == TurnCounts(num_dropped=1)
    prompt = prompt_of(70, seed=1)
    assert node.answer(prompt, SEEDED).tokens() == plain_answer(model, prompt, SEEDED)


def test_a_pool_without_room_for_a_turn_only_costs_the_hit(model):
    layout = model.layout(STATE_BLOCK)
    node = Node(model, ram_bytes=layout.pages_per_block * layout.page_bytes)
    prompt = prompt_of(100)
    turn = end_answer(node, prompt, 200)
    node.run()
    next_turn = (*turn, *prompt_of(10, seed=1))
    result = node.answer(next_turn, SEEDED)
    assert result.tokens() == plain_answer(model, next_turn, SEEDED)


def test_where_decode_is_exact_nothing_is_made():
    """What it made is published already."""
    for model in (tiny("llama", "float32"), tiny_hybrid("bamba", "strict")):
        node = Node(model)
        end_answer(node, prompt_of(60), 100)
        assert not node.runner.has_work


def test_several_answers_a_prefill_and_an_aborted_answer_leave_no_turn(model):
    node = Node(model)
    sampling = replace(SEEDED, max_tokens=10)
    node.answer(prompt_of(60), sampling, num_choices=2)
    node.answer(prompt_of(63, seed=1), sampling, prefill_only=True)
    node.submit("left", prompt_of(60, seed=2), sampling)
    for _ in range(8):
        node.step()
    node.runner.abort("left")
    node.run()
    assert node.runner.load().turns == TurnCounts()


def test_an_answer_that_a_stop_string_ended_is_a_turn(model):
    node = Node(model)
    prompt = prompt_of(120)
    node.submit("r", prompt, replace(SEEDED, max_tokens=100))
    for _ in range(15):
        node.step()
    node.runner.stop_choice("r", 0)
    node.run()
    assert node.runner.load().turns == TurnCounts(num_made=1)
    table = node.lookup((*prompt, *node.results["r"].tokens()))
    assert table.hit_tokens == 128
    table.release()
