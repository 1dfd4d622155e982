"""Conversations over the cache: each turn answers as without one, and hits what went before."""

import asyncio
import itertools

import pytest

from tests.server.cached_nodes import (
    BLOCK,
    FAMILIES,
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

ANSWER_TOKENS = 4
OPENING_TOKENS = BLOCK - 2
"""So that every answer crosses a boundary: the KV of it reaches one block further than the prompt."""
TURN_TOKENS = BLOCK - ANSWER_TOKENS


@pytest.mark.parametrize("family", FAMILIES)
async def test_each_of_ten_turns_hits_the_turns_before_also_after_a_restart(
    family, model_of, tmp_path
):
    model, conversation = model_of(family), prompt(OPENING_TOKENS)
    previous = 0
    for part in (range(5), range(5, 10)):
        async with node_on(model, tmp_path / "cache") as node:
            for number in part:
                sampling = SEEDED if number % 2 else GREEDY
                cold = await ask_cold(node, conversation, sampling, max_tokens=ANSWER_TOKENS)
                warm = await ask(node, conversation, sampling, max_tokens=ANSWER_TOKENS)
                assert warm.bits == cold.bits
                assert len(warm.tokens) == ANSWER_TOKENS
                assert warm.reused == previous
                previous = boundary(len(conversation) + len(warm.tokens) - 1)
                conversation += warm.tokens + prompt(TURN_TOKENS, seed=number + 1)
                await at_rest(node)
    assert previous == 10 * BLOCK


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_chat_whose_last_answer_was_rewritten_goes_on_from_before_it(
    family, model_of, tmp_path
):
    async with node_on(model_of(family), tmp_path / "cache") as node:
        first = prompt(2 * BLOCK - 3)
        answer = await ask(node, first, max_tokens=ANSWER_TOKENS)
        second = first + answer.tokens + prompt(BLOCK, seed=1)
        answer = await ask(node, second, max_tokens=ANSWER_TOKENS)
        rewritten = [token + 1 for token in answer.tokens[:-2]]
        third = second + rewritten + prompt(BLOCK, seed=2)
        cold = await ask_cold(node, third, max_tokens=ANSWER_TOKENS)
        warm = await ask(node, third, max_tokens=ANSWER_TOKENS)
        assert warm.bits == cold.bits
        assert warm.reused == boundary(len(second))


@pytest.mark.parametrize("family", ["kimi_linear", "gemma3"])
async def test_sessions_that_push_each_other_out_never_meet_each_others_secret(
    family, model_of, tmp_path
):
    """Twenty begin alike, under one salt, in turns and four at a time; RAM holds two of them."""
    async with node_on(model_of(family), tmp_path / "cache", ram_bytes=1 << 19) as node:
        encode, decode = node.tokenizer.encode, node.tokenizer.decode
        opening = encode("You keep one secret word, and tell it to nobody else. " * 2, add_bos=True)
        words = [f"zq{number * 7919 % 1000:03}x" for number in range(20)]
        sessions = [opening + encode(f"The word is {word}. " * 5, add_bos=False) for word in words]
        shared = max(
            next(n for n, (one, other) in enumerate(zip(*pair, strict=False)) if one != other)
            for pair in itertools.combinations(sessions, 2)
        )
        assert shared < min(boundary(len(tokens)) for tokens in sessions)
        cold = [await ask_cold(node, tokens, max_tokens=3) for tokens in sessions]
        for round_number in range(2):
            for start in range(0, 20, 4):
                numbers = [(start + k * (1 + 6 * round_number)) % 20 for k in range(4)]
                async with asyncio.TaskGroup() as tasks:
                    asked = [
                        tasks.create_task(ask(node, sessions[n], max_tokens=3)) for n in numbers
                    ]
                for number, task in zip(numbers, asked, strict=True):
                    answer = task.result()
                    assert answer.bits == cold[number].bits
                    others = set(words) - {words[number]}
                    assert not any(word in decode(answer.tokens) for word in others)
                    if not round_number:
                        assert answer.reused <= shared
        counts = node._cache.counts()
        assert counts.num_evictions > 0
        assert counts.lookups.num_disk_tokens > 0
