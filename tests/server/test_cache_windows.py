"""Windowed layers in a pool that is nearly full: every answer is that of a pool with room."""

import asyncio

import pytest

from tests.server.cached_nodes import (
    GREEDY,
    SEEDED,
    ask,
    ask_cold,
    at_rest,
    boundary,
    model_of,
    node_on,
    prompt,
)

__all__ = ["model_of"]
pytestmark = pytest.mark.slow

WINDOW = 32
BLOCK = 16
LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 1)
ANSWER_TOKENS = 2 * WINDOW + 5
"""The longest sequence goes five windows beyond its first token."""


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
async def test_prompts_around_a_window_with_long_answers_in_a_pool_nearly_full(family, model_of):
    """The pool holds the longest sequence and one block more: each answer evicts the one before."""
    model = model_of(family, sliding_window=WINDOW)
    prompts = [(prompt(n, seed=n), SEEDED if n % 2 else GREEDY) for n in LENGTHS]
    async with node_on(model, None, block_tokens=BLOCK) as node:
        expected = [
            (await ask_cold(node, tokens, how, max_tokens=ANSWER_TOKENS)).bits
            for tokens, how in prompts
        ]
        layout = node._cache.layout
    num_blocks = -(-(max(LENGTHS) + ANSWER_TOKENS) // BLOCK) + 1
    ram_bytes = num_blocks * layout.pages_per_block * layout.page_bytes
    async with node_on(model, None, block_tokens=BLOCK, ram_bytes=ram_bytes) as node:
        for (tokens, how), bits in zip(prompts, expected, strict=True):
            assert (await ask(node, tokens, how, max_tokens=ANSWER_TOKENS)).bits == bits
            await at_rest(node)
        async with asyncio.TaskGroup() as tasks:
            together = [
                tasks.create_task(ask(node, tokens, how, max_tokens=ANSWER_TOKENS))
                for tokens, how in prompts
            ]
        assert [task.result().bits for task in together] == expected
        await at_rest(node)
        assert node._cache.counts().num_evictions > 0
        for (tokens, how), (drawn, logits) in zip(prompts, expected, strict=True):
            answers = [await ask(node, tokens, how, max_tokens=1) for _ in range(2)]
            assert [answer.bits for answer in answers] == [(drawn[:1], logits)] * 2
            assert answers[1].reused == boundary(len(tokens), BLOCK), "the pool is free again"
        counts = node._cache.counts()
        assert counts.num_free + counts.num_cached == counts.num_pages
