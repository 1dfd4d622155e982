"""Nodes with a cache on disk: the same answers, whatever tier the prefix comes from."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prfaas.cache.spec import StateSpec
from prfaas.cache.store import Store
from prfaas.server.pd import PdNode, load_pd_node
from prfaas.types import Request, RequestRecord, SamplingParams
from tests.server.fleet import CountedTransfers, until
from tests.server.real_nodes import config, no_progress
from tests.tiny_configs import Family
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow
BLOCK = 64
FAMILIES: tuple[Family, ...] = ("kimi_linear", "qwen3_next", "minimax", "lfm2", "gemma3")


@pytest.fixture
def model_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Family], Path]:
    monkeypatch.setenv("PRFAAS_MODELS_DIR", str(tmp_path / "models"))
    return lambda family: write_tiny_model(tmp_path / family, family)


@contextlib.asynccontextmanager
async def node_on(
    model: Path, directory: Path | None, *, ram_bytes: int = 64 << 20, **cache: Any
) -> AsyncIterator[PdNode]:
    """A pd node that keeps its cache in `directory`; checked and closed at the end."""
    settings = config(model, dtype="float32", block_tokens=BLOCK, max_context_tokens=900)
    options = replace(
        settings.cache,
        ram_bytes=ram_bytes,
        dir=None if directory is None else str(directory),
        **cache,
    )
    node = load_pd_node(replace(settings, cache=options), CountedTransfers(), no_progress)
    async with asyncio.TaskGroup() as tasks:
        await node.start(tasks)
        try:
            async with asyncio.timeout(120):
                yield node
                await until(lambda: not node._cache.counts().num_tables)
                flush(node)
                node._cache.check()
        finally:
            await node.close()


def flush(node: PdNode) -> None:
    if node._cache.tier is not None:
        store = node._cache.tier.store
        assert isinstance(store, Store)
        store.flush()


async def ask(
    node: PdNode, tokens: list[int], salt: bytes = b"", max_tokens: int = 6
) -> tuple[list[int], bytes, RequestRecord]:
    """The answer, the first logits, the story."""
    request = Request(
        request_id=f"r{id(tokens)}",
        prompt_tokens=tuple(tokens),
        sampling=SamplingParams(max_tokens=max_tokens, seed=3, temperature=1.0),
        cache_salt=salt,
    )
    async with node.generate(request, return_logits=True) as generation:
        drawn = [event.token_id async for event in generation]
    assert generation.first_logits is not None
    await until(lambda: not node._cache.counts().num_tables)
    return drawn, generation.first_logits, generation.record


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return [4 + (seed * 7919 + i * i * 31 + i * 17) % 500 for i in range(num_tokens)]


@pytest.mark.parametrize("family", FAMILIES)
async def test_cold_ram_and_disk_hits_give_the_same_bits_around_a_boundary(
    family, model_of, tmp_path
):
    model, lengths = model_of(family), (1, 127, 128, 129, 200)
    expected = {}
    async with node_on(model, None) as node:
        for length in lengths:
            expected[length] = (await ask(node, prompt(length, seed=length)))[:2]
    async with node_on(model, tmp_path / "cache") as node:
        for is_ram_hit in (False, True):
            for length in lengths:
                drawn, logits, record = await ask(node, prompt(length, seed=length))
                assert (drawn, logits) == expected[length]
                assert record.tokens_reused == is_ram_hit * ((length - 1) // BLOCK * BLOCK)
        assert node._cache.counts().lookups.num_disk_tokens == 0
    async with node_on(model, tmp_path / "cache") as node:
        for length in lengths:
            drawn, logits, record = await ask(node, prompt(length, seed=length))
            assert (drawn, logits) == expected[length]
            assert record.tokens_reused == (length - 1) // BLOCK * BLOCK
        lookups = node._cache.counts().lookups
        assert lookups.num_disk_tokens == sum((n - 1) // BLOCK * BLOCK for n in lengths)
        assert lookups.num_ram_tokens == 0


@pytest.mark.parametrize("family", ["kimi_linear", "gemma3"])
async def test_a_chat_of_ten_turns_that_restarts_in_the_middle_answers_as_without_a_cache(
    family, model_of, tmp_path
):
    model = model_of(family)
    turns = [prompt(70 * (turn + 1)) for turn in range(10)]
    async with node_on(model, None) as node:
        cold = [(await ask(node, turn, bytes([n])))[:2] for n, turn in enumerate(turns)]
    for part in (range(5), range(5, 10)):
        async with node_on(model, tmp_path / "cache") as node:
            for number in part:
                drawn, logits, record = await ask(node, turns[number])
                assert (drawn, logits) == cold[number]
                expected = (len(turns[number - 1]) - 1) // BLOCK * BLOCK if number else 0
                assert record.tokens_reused >= expected


async def test_sessions_under_a_tiny_ram_tier_never_see_each_others_secret(model_of, tmp_path):
    """All share a beginning; each has a secret of its own and a salt of its own."""
    model = model_of("lfm2")
    sessions = [prompt(70) + prompt(65, seed=100 + n) for n in range(20)]
    async with node_on(model, None) as node:
        cold = [(await ask(node, tokens, bytes([n])))[:2] for n, tokens in enumerate(sessions)]
    async with node_on(model, tmp_path / "cache", ram_bytes=1 << 20) as node:
        for is_again in (False, True):
            for number, tokens in enumerate(sessions):
                drawn, logits, record = await ask(node, tokens, bytes([number]) * 32)
                assert (drawn, logits) == cold[number]
                assert record.tokens_reused == is_again * 128
                flush(node)


async def test_a_state_that_is_gone_from_the_disk_makes_the_hit_end_at_the_one_before(
    model_of, tmp_path
):
    model, tokens = model_of("kimi_linear"), prompt(200)
    async with node_on(model, tmp_path / "cache") as node:
        await ask(node, tokens[:130])
        expected = (await ask(node, tokens))[:2]
    async with node_on(model, tmp_path / "cache") as node:
        cache = node._cache
        keys = cache.block_keys(tokens, b"")
        assert cache.tier is not None
        store = cache.tier.store
        assert isinstance(store, Store)
        states = [g for g, spec in enumerate(cache.layout.groups) if isinstance(spec, StateSpec)]
        for group in states:
            store._records._where.pop((group, keys[2]))
        drawn, logits, record = await ask(node, tokens)
        assert (drawn, logits) == expected
        assert record.tokens_reused == 128
