"""Prompts that come together and begin alike: what they share is computed once."""

import pytest

from prfaas.cache.spec import missing_blocks
from prfaas.engine.model import Model
from prfaas.types import SamplingParams
from tests.engine.running import (
    Node,
    Recorder,
    block_of,
    plain_answer,
    prompt_of,
    tiny,
    tiny_hybrid,
)

GREEDY = SamplingParams(max_tokens=3, seed=0, temperature=0.0)


@pytest.fixture(params=["gemma3", "llama", "bamba"])
def model(request) -> Model:
    """One with windows, one of full attention alone, one with states."""
    return tiny_hybrid("bamba") if request.param == "bamba" else tiny(request.param, "float32")


def tail_of(model: Model, num_tokens: int) -> int:
    """Tokens that a prompt computes whose whole prefix is cached."""
    block_tokens = block_of(model)
    return num_tokens - (num_tokens - 1) // block_tokens * block_tokens


@pytest.mark.slow
@pytest.mark.parametrize("chunk_tokens", [64, 192, 4032])
@pytest.mark.parametrize("num_tokens", [150, 500])
def test_five_equal_prompts_at_once_are_computed_once(model, num_tokens, chunk_tokens):
    """However their lengths and the chunks fit each other; without a burst they would be, too."""
    node, prompt = Node(model, chunk_tokens=chunk_tokens), prompt_of(num_tokens)
    for index in range(5):
        node.submit(f"r{index}", prompt, GREEDY)
    results = node.run()
    assert all(r.tokens() == plain_answer(model, prompt, GREEDY) for r in results.values())
    computed = sum(result.num_computed for result in results.values())
    assert computed == num_tokens + 4 * tail_of(model, num_tokens)


def test_prompts_that_come_while_another_runs_wait_for_what_they_share(model):
    node, prompt = Node(model, chunk_tokens=64), prompt_of(500)
    node.submit("first", prompt, GREEDY)
    node.step()
    for index in range(2):
        node.submit(f"r{index}", prompt, GREEDY)
        node.step()
    results = node.run()
    assert sum(r.num_computed for r in results.values()) == 500 + 2 * tail_of(model, 500)


def test_prompts_of_a_burst_go_on_from_where_they_part(model):
    """Of a model with states, too: the one that runs keeps its state there."""
    shared = prompt_of(320)
    prompts = [(*shared, *prompt_of(100 + 40 * seed, seed=seed)) for seed in (1, 2, 3, 4)]
    node = Node(model, chunk_tokens=128)
    for index, prompt in enumerate(prompts):
        node.submit(f"r{index}", prompt, GREEDY)
    results = node.run()
    for index, prompt in enumerate(prompts):
        assert results[f"r{index}"].tokens() == plain_answer(model, prompt, GREEDY)
    assert sum(r.num_computed for r in results.values()) == 320 + sum(
        140 + 40 * i for i in range(4)
    )


def test_prompts_of_two_tenants_share_nothing(model):
    node, prompt = Node(model), prompt_of(200)
    for salt in (b"a", b"b"):
        node.submit(salt.decode(), prompt, GREEDY, salt=salt)
    assert [result.num_computed for result in node.run().values()] == [200, 200]


def test_who_waits_for_one_that_is_aborted_computes_it_itself(model):
    node, prompt = Node(model, chunk_tokens=64), prompt_of(400)
    node.submit("first", prompt, GREEDY)
    node.step()
    node.submit("second", prompt, GREEDY)
    node.step()
    node.runner.abort("first")
    results = node.run()
    assert results["second"].tokens() == plain_answer(model, prompt, GREEDY)
    assert 0 < results["second"].num_computed <= 400


def test_a_pool_without_room_for_pages_lets_everybody_compute_for_himself(model):
    layout = model.layout(block_of(model))
    node = Node(model, ram_bytes=layout.pages_per_block * layout.page_bytes)
    prompt = prompt_of(300)
    for index in range(3):
        node.submit(f"r{index}", prompt, GREEDY)
    results = node.run()
    assert all(r.tokens() == plain_answer(model, prompt, GREEDY) for r in results.values())


@pytest.mark.parametrize("num_tokens", [150, 192, 193])
def test_the_sink_of_a_prompt_that_waited_gets_all_its_pages_with_equal_bytes(model, num_tokens):
    """Those of the longer hit as well, of which the submission knew nothing."""
    node, prompt = Node(model, chunk_tokens=64), prompt_of(num_tokens)
    node.answer(prompt[:70], GREEDY)  # all have a hit to begin with
    sinks, known_tokens = [], 64
    for index in range(5):
        table = node.lookup(prompt)
        assert table.hit_tokens == known_tokens
        assert table.try_reserve(num_tokens)
        sinks.append(Recorder(node.cache, table))
        node.submit(f"r{index}", prompt, GREEDY, table=table, sink=sinks[-1], prefill_only=True)
    results = node.run()
    layout = node.cache.layout
    missing = {
        (group, index, block)
        for group, spec in enumerate(layout.groups)
        for block in missing_blocks(spec, num_tokens, known_tokens, layout.block_tokens)
        if block >= known_tokens // layout.block_tokens
        for index in range(spec.pages_per_block)
    }
    assert sinks[0].pages.keys() == missing
    assert all(sink.pages == sinks[0].pages for sink in sinks)
    first = plain_answer(model, prompt, GREEDY)[:1]
    assert all(results[f"r{index}"].tokens() == first for index in range(5))
    computed = sum(results[f"r{index}"].num_computed for index in range(5))
    assert computed == num_tokens - 64 + 4 * tail_of(model, num_tokens)


def test_prompts_that_part_where_the_cache_ends_do_not_wait_for_each_other():
    node = Node(tiny("llama", "float32"), chunk_tokens=4032)
    shared = prompt_of(160)
    node.answer(shared, GREEDY)
    for seed in (1, 2, 3):
        node.submit(f"r{seed}", (*shared, *prompt_of(100, seed=seed)), GREEDY)
    node.step()
    assert node.runner.load().num_waiting == 0
    node.run()
