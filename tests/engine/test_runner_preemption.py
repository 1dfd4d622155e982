"""Sequences that make room and come back, and histories with everything at once."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.engine.model import Model
from prfaas.errors import BadRequest, ConfigError, Overloaded
from tests.engine.running import (
    BLOCK,
    GREEDY,
    SEEDED,
    Node,
    Recorder,
    block_of,
    plain_answer,
    preempting_node,
    prefill_and_ship,
    prompt_of,
    tiny,
    tiny_hybrid,
)


@pytest.fixture
def gemma() -> Model:
    return tiny("gemma3", "float16")


# ---------------------------------------------------------------- preemption


@pytest.mark.slow
@pytest.mark.parametrize("has_pages", [True, False], ids=["pages", "few-pages"])
@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_a_preempted_sequence_gives_the_same_answer(family, has_pages):
    model = tiny(family, "float16")
    layout = model.layout(BLOCK)
    few_bytes = 5 * layout.pages_per_block * layout.page_bytes
    sampling = replace(SEEDED, max_tokens=120)
    node = preempting_node(
        model,
        num_sequences=1.7,
        num_tokens=170,
        ram_bytes=32 << 20 if has_pages else few_bytes,
    )
    prompts = [prompt_of(length, seed=length) for length in (50, 37)]
    for index, prompt in enumerate(prompts):
        node.submit(f"r{index}", prompt, sampling)
    lost_tokens = []
    while node.runner.has_work:
        before = node.runner.load()
        node.step()
        load = node.runner.load()
        if load.num_running < before.num_running and load.num_waiting > before.num_waiting:
            # One token to decode for each; the rest was computed before and is so again.
            lost_tokens.append(load.num_waiting_tokens - load.num_running - load.num_waiting)
    assert lost_tokens
    assert (max(lost_tokens) == 0) == has_pages
    node.assert_idle()
    for index, prompt in enumerate(prompts):
        assert node.results[f"r{index}"].tokens() == plain_answer(model, prompt, sampling)
        assert node.results[f"r{index}"].num_computed == len(prompt)


def test_a_preempted_prefill_with_a_sink_ships_the_same_pages(gemma):
    prompt = prompt_of(400)
    _, expected, _, landed = prefill_and_ship(gemma, prompt, GREEDY)
    landed.release()
    # An older answer outgrows its room while the prefill is half-way.
    node = preempting_node(gemma, num_sequences=1, num_tokens=520)
    node.submit("old", prompt_of(30, seed=1), replace(GREEDY, max_tokens=120))
    for _ in range(60):
        node.step()
    table = node.lookup(prompt)
    assert table.try_reserve(len(prompt))
    sink = Recorder(node.cache, table, may_repeat=True)
    node.submit("r", prompt, table=table, sink=sink, prefill_only=True)
    was_preempted = False
    while node.results["r"].ended is None:
        node.step()
        was_preempted |= node.runner.load().num_waiting > 0 and len(sink.progressed) > 0
    assert was_preempted
    assert sink.pages == expected.pages
    assert node.run()["r"].tokens() == plain_answer(gemma, prompt)[:1]


def test_the_context_is_what_memory_holds_and_an_answer_may_fill_it(gemma):
    node = preempting_node(gemma, num_sequences=1, num_tokens=100)
    limit = node.runner.max_context_tokens
    assert 100 < limit < gemma.config.max_context_tokens
    assert gemma.kv_capacity_bytes(limit - 1) < gemma.kv_capacity_bytes(limit)
    with pytest.raises(BadRequest, match=f"3000 tokens; the context takes {limit}"):
        node.submit("r", prompt_of(3000))
    node.assert_idle()
    node.submit("r", prompt_of(limit - 20), replace(GREEDY, max_tokens=1000))
    answer = node.run()["r"].choices[0]
    assert (len(answer.tokens), answer.finish_reason) == (20, "length")


def test_memory_for_not_even_one_token_is_a_config_error(gemma):
    with pytest.raises(ConfigError, match="kv_ram_bytes = 100 does not hold"):
        Node(gemma, kv_ram_bytes=100)


def test_an_answer_that_a_peer_has_begun_is_not_refused_for_a_full_queue(gemma):
    prompt = prompt_of(40)
    node = Node(gemma, max_batch_sequences=1, max_waiting_requests=1)
    node.submit("running", prompt_of(30, seed=1))
    node.step()
    node.submit("waiting", prompt_of(30, seed=2))
    with pytest.raises(Overloaded):
        node.submit("new", prompt)
    whole = plain_answer(gemma, prompt)
    node.submit("begun", prompt, forced=((whole[0],),))
    assert node.run()["begun"].tokens() == whole[1:]


# ---------------------------------------------------------------- any history


@dataclass(frozen=True)
class Script:
    """One request of a random history."""

    prompt_tokens: int
    prefix: int
    max_tokens: int
    num_choices: int
    num_forced: int
    is_greedy: bool
    arrival_step: int
    abort_step: int | None


scripts = st.builds(
    Script,
    prompt_tokens=st.integers(1, 120),
    prefix=st.integers(0, 1),
    max_tokens=st.sampled_from([1, 4, 4, 24]),
    num_choices=st.sampled_from([1, 1, 3]),
    num_forced=st.sampled_from([0, 0, 3]),
    is_greedy=st.booleans(),
    arrival_step=st.integers(0, 12),
    abort_step=st.none() | st.integers(0, 40),
)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "kimi_linear"])
@settings(max_examples=6)
@given(
    history=st.lists(scripts, min_size=1, max_size=5),
    max_batch=st.integers(1, 4),
    num_sequences=st.floats(1.0, 2.5),
    pool_blocks=st.sampled_from([3, 12, 500]),
)
def test_any_history_gives_the_plain_answers_and_leaves_nothing(
    family, history, max_batch, num_sequences, pool_blocks
):
    model = tiny("gemma3", "float32") if family == "gemma3" else tiny_hybrid(family)
    layout = model.layout(block_of(model))
    node = preempting_node(
        model,
        num_sequences=num_sequences,
        num_tokens=200,
        max_batch_sequences=max_batch,
        ram_bytes=pool_blocks * layout.pages_per_block * layout.page_bytes,
    )
    expected, sent = {}, {}
    for step in range(60):
        for index, script in enumerate(history):
            if script.arrival_step == step:
                prompt = prompt_of(script.prompt_tokens, seed=script.prefix)
                sampling = replace(
                    GREEDY if script.is_greedy else SEEDED, max_tokens=script.max_tokens
                )
                choices = range(script.num_choices)
                expected[index] = [plain_answer(model, prompt, sampling, c) for c in choices]
                sent[index] = tuple(tuple(t[: script.num_forced]) for t in expected[index])
                node.submit(
                    str(index),
                    prompt,
                    sampling,
                    num_choices=script.num_choices,
                    forced=sent[index],
                )
            if script.abort_step == step:
                node.runner.abort(str(index))
        node.step()
    node.run()
    for index, script in enumerate(history):
        result = node.results[str(index)]
        assert result.error is None
        for choice, forced in enumerate(sent[index]):
            tokens = [*forced, *result.tokens(choice)]
            whole = expected[index][choice]
            assert tokens == whole[: len(tokens)]
            assert tokens == whole or script.abort_step is not None
