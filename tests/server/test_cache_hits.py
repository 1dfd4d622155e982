"""Whatever tier a prefix comes from, and however much of it is there: the cold answer's bits."""

import pytest

from tests.server.cached_nodes import (
    BLOCK,
    FAMILIES,
    GREEDY,
    SEEDED,
    LossyStore,
    ask,
    ask_cold,
    boundary,
    drop_from_ram,
    flush,
    has_states,
    model_of,
    node_on,
    prompt,
    store_of,
    supported_groups,
)

__all__ = ["model_of"]
pytestmark = pytest.mark.slow

LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1)
families = pytest.mark.parametrize("family", FAMILIES)


def sampling_at(length: int):
    """Greedy for even lengths: both kinds stand on each side of a boundary."""
    return SEEDED if length % 2 else GREEDY


@families
async def test_a_prompt_resent_around_a_boundary_hits_all_but_its_last_token_in_ram_and_on_disk(
    family, model_of, tmp_path
):
    model, expected = model_of(family), {}
    hits = sum(boundary(length) for length in LENGTHS)
    async with node_on(model, tmp_path / "cache") as node:
        for length in LENGTHS:
            tokens, sampling = prompt(length, seed=length), sampling_at(length)
            answers = [await ask(node, tokens, sampling) for _ in range(3)]
            assert [answer.reused for answer in answers] == [0] + [boundary(length)] * 2
            assert answers[1].bits == answers[2].bits == answers[0].bits
            expected[length] = answers[0].bits
        lookups = node._cache.counts().lookups
        assert (lookups.num_ram_tokens, lookups.num_disk_tokens) == (2 * hits, 0)
        assert lookups.misses["no_prefix"] == sum(boundary(length) > 0 for length in LENGTHS)
        assert lookups.num_queries == 3 * len(LENGTHS)
    async with node_on(model, tmp_path / "cache") as node:
        for length in LENGTHS:
            answer = await ask(node, prompt(length, seed=length), sampling_at(length))
            assert answer.reused == boundary(length)
            assert answer.bits == expected[length]
        lookups = node._cache.counts().lookups
        assert (lookups.num_ram_tokens, lookups.num_disk_tokens) == (0, hits)
        assert sum(lookups.misses.values()) == 0
        again = await ask(node, prompt(129, seed=129), sampling_at(129))
        assert (again.bits, again.reused) == (expected[129], 128)
        assert node._cache.counts().lookups.num_ram_tokens == 128, "what came up stays in RAM"


@families
async def test_a_prompt_that_parts_from_a_cached_one_hits_what_both_share(
    family, model_of, tmp_path
):
    """Where a state is needed at the parting, it is kept at the second sight of it."""
    shared = prompt(2 * BLOCK + 20)
    prompts = [shared + prompt(50 + 20 * number, seed=9 + number) for number in range(4)]
    async with node_on(model_of(family), tmp_path / "cache") as node:
        expected = [await ask_cold(node, tokens) for tokens in prompts]
        answers = [await ask(node, tokens) for tokens in prompts]
        assert [a.bits for a in answers] == [e.bits for e in expected]
        at_second_sight = 0 if has_states(node._cache) else 2 * BLOCK
        assert [a.reused for a in answers] == [0, at_second_sight, 2 * BLOCK, 2 * BLOCK]
        assert node._cache.counts().lookups.misses["no_snapshot"] == has_states(node._cache)


@families
async def test_a_lost_snapshot_shortens_the_hit_to_the_one_before_and_changes_no_bit(
    family, model_of, tmp_path
):
    """Only the state or window entry is lost; all of full attention's KV is there."""
    model, tokens = model_of(family), prompt(3 * BLOCK + 8)
    async with node_on(model, tmp_path / "cache") as node:
        cache = node._cache
        expected = await ask_cold(node, tokens)
        await ask(node, tokens[: 2 * BLOCK + 2])
        whole = await ask(node, tokens)
        assert (whole.bits, whole.reused) == (expected.bits, 2 * BLOCK)
        flush(node)
        keys = cache.block_keys(tokens, b"")
        (group,) = supported_groups(cache)
        lost = {(group, keys[2])}
        assert cache.tier is not None
        cache.tier.store = LossyStore(store_of(node), lost, is_known=False)
        drop_from_ram(cache, group, keys[2])
        hurt = await ask(node, tokens)
        assert (hurt.bits, hurt.reused) == (expected.bits, 2 * BLOCK)
        assert sum(cache.counts().lookups.misses[r] for r in ("evicted", "no_snapshot")) == 1
        mended = await ask(node, tokens)
        assert (mended.bits, mended.reused) == (expected.bits, 3 * BLOCK), "it was made anew"
        cache.tier.store = cache.tier.store._store
    for is_known in (False, True):
        async with node_on(model, tmp_path / "cache") as node:
            tier = node._cache.tier
            assert tier is not None
            tier.store = LossyStore(store_of(node), lost, is_known=is_known)
            hurt = await ask(node, tokens)
            assert (hurt.bits, hurt.reused) == (expected.bits, 2 * BLOCK)
            misses = node._cache.counts().lookups.misses
            assert misses["no_snapshot"] == 1, "the KV is there, and nothing to go on from"
            tier.store = tier.store._store
