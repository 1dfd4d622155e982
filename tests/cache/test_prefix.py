"""Hits, sharing, windows and tenants, through public calls only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.block_table import BlockTable
from prfaas.cache.hashing import root_key
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import CacheLayout, FullSpec, WindowSpec, held_blocks, needed_blocks
from prfaas.errors import ConfigError

BLOCK_TOKENS = 4
WINDOW_TOKENS = 10
PAGE_BYTES = 8
LAYOUT = CacheLayout(
    block_tokens=BLOCK_TOKENS,
    groups=(
        FullSpec(name="full", layers=(1,), page_bytes=PAGE_BYTES),
        WindowSpec(
            name="window", layers=(0, 2), page_bytes=PAGE_BYTES, window_tokens=WINDOW_TOKENS
        ),
    ),
)
FULL, WINDOW = 0, 1


def make_cache(num_pages: int = 200) -> PrefixCache:
    def root(salt: bytes) -> bytes:
        return root_key(
            model_fingerprint="m",
            numerics_fingerprint="n",
            kv_dtype="float32",
            layout=LAYOUT,
            salt=salt,
        )

    return PrefixCache(layout=LAYOUT, ram_bytes=num_pages * PAGE_BYTES, root=root)


def content(key: bytes, group: int, index: int) -> bytes:
    """Return what the page of a layer holds for a block: any function of the key will do."""
    return key[: PAGE_BYTES - 2] + bytes([group, index])


def fill(table: BlockTable, keys: tuple[bytes, ...], group: int, block: int) -> bool:
    """Compute one block as an engine would; False if the pool is full."""
    pages = table.try_allocate(group, block)
    if pages is None:
        return False
    if not table.is_committed(group, block):
        for index, page in enumerate(pages):
            table.view(page)[:] = content(keys[block], group, index)
    table.commit(group, block)
    return True


def prefill(cache: PrefixCache, tokens: list[int], salt: bytes = b"") -> int:
    """Look up, verify the hit, compute the other blocks and release. Returns the hit length."""
    keys = cache.block_keys(tokens, salt)
    table = cache.lookup(keys, len(tokens))
    for group, spec in enumerate(LAYOUT.groups):
        for block in held_blocks(spec, table.hit_tokens, BLOCK_TOKENS):
            pages = table.pages(group, block)
            assert pages is not None
            for index, page in enumerate(pages):
                assert table.view(page) == content(keys[block], group, index)
    for block in range(table.hit_tokens // BLOCK_TOKENS, len(keys)):
        for group in (FULL, WINDOW):
            fill(table, keys, group, block)
        table.slide((block + 1) * BLOCK_TOKENS)
    table.slide(len(tokens))
    cache.check()
    table.release()
    cache.check()
    return table.hit_tokens


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 5, 7, 8, 9, 39, 40, 41])
def test_a_hit_never_covers_the_whole_prompt(num_tokens):
    """C6: one token is left to compute and no whole block is lost, however often it is resent."""
    cache = make_cache()
    tokens = list(range(num_tokens))
    assert prefill(cache, tokens) == 0
    for _ in range(3):
        assert prefill(cache, tokens) == max(0, num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    cache.close()


def test_a_longer_prompt_hits_up_to_where_it_parts():
    cache = make_cache()
    assert prefill(cache, list(range(20))) == 0
    assert prefill(cache, [*range(20), 99, 98]) == 20
    assert prefill(cache, [*range(18), 99, 98, 97]) == 16
    cache.close()


def test_full_attention_without_its_window_is_no_hit():
    """C1: the hit is what all groups can serve, not what one of them has."""
    cache = make_cache()
    tokens = list(range(40))
    keys = cache.block_keys(tokens, b"")
    table = cache.lookup(keys, 40)
    for block in range(10):
        assert fill(table, keys, FULL, block)
        if block not in (5, 9):
            assert fill(table, keys, WINDOW, block)
    table.release()
    # Windows of 10 tokens look back into three blocks: 0-4 and 6-8 are here.
    again = cache.lookup(keys, 41)
    assert again.hit_tokens == 9 * BLOCK_TOKENS
    assert [again.pages(WINDOW, b) is not None for b in range(10)] == [False] * 6 + [True] * 3 + [
        False
    ]
    assert all(again.pages(FULL, b) for b in range(9))
    again.release()
    shorter = cache.lookup(keys, 8 * BLOCK_TOKENS)
    assert shorter.hit_tokens == 5 * BLOCK_TOKENS
    shorter.release()
    cache.close()


@pytest.mark.parametrize("num_tokens", [9, 10, 11, 31])
def test_a_nearly_full_pool_keeps_the_live_window_through_a_long_decode(num_tokens):
    """C8: nothing inside the window is evicted, and every page comes back."""
    final_tokens = num_tokens + 60
    needed = LAYOUT.pages_needed(final_tokens) + 2
    cache = make_cache(needed)
    prefill(cache, list(range(500, 540)))  # something to evict
    tokens = list(range(final_tokens))
    table = cache.lookup(cache.block_keys(tokens[:num_tokens], b""), num_tokens)
    keys = cache.block_keys(tokens[:num_tokens], b"")
    for length in range(1, final_tokens + 1):
        if length > num_tokens and length % BLOCK_TOKENS == 0:
            block_tokens = tokens[length - BLOCK_TOKENS : length]
            (key,) = cache.block_keys(block_tokens, b"", after=keys[-1])
            table.extend_keys([key])
            keys = (*keys, key)
        if length % BLOCK_TOKENS == 0:
            for group in (FULL, WINDOW):
                assert fill(table, keys, group, length // BLOCK_TOKENS - 1)
        table.slide(length)
        for group, spec in enumerate(LAYOUT.groups):
            for block in needed_blocks(spec, length, BLOCK_TOKENS):
                if block < length // BLOCK_TOKENS:
                    pages = table.pages(group, block)
                    assert pages is not None
                    assert table.view(pages[0]) == content(keys[block], group, 0)
        cache.check()
    assert keys == cache.block_keys(tokens, b"")
    table.release()
    cache.check()
    assert cache.counts().num_referenced == 0
    assert prefill(cache, tokens) == (final_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    cache.close()


def test_tenants_of_different_salts_share_nothing():
    cache = make_cache()
    tokens = list(range(20))
    assert prefill(cache, tokens, b"a") == 0
    assert prefill(cache, tokens, b"b") == 0
    assert prefill(cache, tokens) == 0
    assert prefill(cache, tokens, b"a") == 16
    assert not set(cache.block_keys(tokens, b"a")) & set(cache.block_keys(tokens, b"b"))
    cache.close()


def test_pages_are_invisible_until_committed():
    cache = make_cache()
    tokens = list(range(9))
    keys = cache.block_keys(tokens, b"")
    table = cache.lookup(keys, 9)
    for group in (FULL, WINDOW):
        table.try_allocate(group, 0)
    table.commit(FULL, 0)
    early = cache.lookup(keys, 9)
    assert early.hit_tokens == 0
    table.commit(WINDOW, 0)
    late = cache.lookup(keys, 9)
    assert late.hit_tokens == 4
    for t in (table, early, late):
        t.release()
    cache.check()
    cache.close()


def test_a_second_commit_of_a_key_takes_the_first_pages_and_frees_its_own():
    cache = make_cache()
    tokens = list(range(4))
    keys = cache.block_keys(tokens, b"")
    first, second = cache.lookup(keys, 4), cache.lookup(keys, 4)
    assert fill(first, keys, WINDOW, 0)
    assert fill(second, keys, WINDOW, 0)
    assert second.pages(WINDOW, 0) == first.pages(WINDOW, 0)
    assert cache.counts().num_referenced == 2
    cache.check()
    first.release()
    _, page = second.pages(WINDOW, 0) or ()
    assert second.view(page) == content(keys[0], WINDOW, 1)
    second.release()
    assert cache.counts().num_cached == 2
    cache.check()
    cache.close()


def test_superseded_pages_stay_readable_for_a_second_holder():
    cache = make_cache()
    keys = cache.block_keys(list(range(4)), b"")
    first, second = cache.lookup(keys, 4), cache.lookup(keys, 4)
    assert fill(first, keys, FULL, 0)
    second.retain()
    (ours,) = second.try_allocate(FULL, 0) or ()
    second.view(ours)[:] = content(keys[0], FULL, 0)
    second.commit(FULL, 0)
    assert second.pages(FULL, 0) == first.pages(FULL, 0) != (ours,)
    second.release()
    assert second.view(ours) == content(keys[0], FULL, 0)
    cache.check()
    second.release()
    first.release()
    cache.check()
    assert cache.counts().num_cached == 1
    cache.close()


def test_a_reservation_is_all_or_nothing():
    cache = make_cache(LAYOUT.pages_needed(21))
    keys = cache.block_keys(list(range(100)), b"")
    table = cache.lookup(keys, 100)
    assert not table.try_reserve(100)
    assert cache.counts().num_referenced == cache.counts().num_transfer == 0
    assert table.try_reserve(21)
    assert cache.counts().num_transfer == LAYOUT.pages_needed(21) == cache.counts().num_referenced
    assert table.try_reserve(21), "what is held already costs nothing"
    assert table.try_allocate(WINDOW, 0) is None
    cache.check()
    table.commit(FULL, 0)
    assert cache.counts().num_transfer == LAYOUT.pages_needed(21) - 1
    table.release()
    assert (cache.counts().num_free, cache.counts().num_cached) == (cache.pool.num_pages - 1, 1)
    cache.check()
    cache.close()


@given(num_tokens=st.integers(1, 60), hit_blocks=st.integers(0, 10))
def test_pages_needed_is_what_a_reservation_takes(num_tokens, hit_blocks):
    cache = make_cache()
    hit_tokens = min(hit_blocks, (num_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
    prefill(cache, list(range(hit_tokens)))
    table = cache.lookup(cache.block_keys(list(range(num_tokens)), b""), num_tokens)
    assert table.hit_tokens == hit_tokens
    assert table.try_reserve(num_tokens)
    assert cache.counts().num_transfer == LAYOUT.pages_needed(num_tokens, hit_tokens)
    table.release()
    cache.check()
    cache.close()


def test_a_transfer_lands_as_a_prefix_and_its_cut_block_stays_private():
    cache = make_cache()
    tokens = list(range(18))
    keys = cache.block_keys(tokens, b"")
    table = cache.lookup(keys, 18)
    assert table.try_reserve(18)
    for group, spec in enumerate(LAYOUT.groups):
        for block in needed_blocks(spec, 18, BLOCK_TOKENS):
            pages = table.pages(group, block)
            assert pages is not None
            for index, page in enumerate(pages):
                if block < len(keys):
                    table.view(page)[:] = content(keys[block], group, index)
            table.commit(group, block)
    table.set_num_tokens(18)
    assert (table.num_tokens, table.hit_tokens) == (18, 0)
    assert table.is_committed(FULL, 3)
    assert not table.is_committed(FULL, 4)
    assert cache.counts().num_transfer == 3
    cache.check()
    table.release()
    assert cache.counts().num_transfer == cache.counts().num_referenced == 0
    assert prefill(cache, tokens) == 16
    cache.close()


def test_a_table_cannot_claim_tokens_whose_pages_it_lacks():
    cache = make_cache()
    table = cache.lookup((), 9)
    table.try_allocate(FULL, 0)
    with pytest.raises(AssertionError, match="window block 0"):
        table.set_num_tokens(4)
    table.release()
    cache.close()


def test_blocks_without_keys_are_never_shared():
    cache = make_cache()
    keys = cache.block_keys(list(range(8)), b"")
    table = cache.lookup((), 8)
    table.try_allocate(FULL, 0)
    table.commit(FULL, 0)
    assert not table.is_committed(FULL, 0)
    table.extend_keys(keys)
    table.commit(FULL, 0)
    assert table.is_committed(FULL, 0)
    assert table.num_keys == 2
    table.release()
    cache.close()


def test_the_end_of_a_prompt_is_evicted_before_its_start():
    cache = make_cache(15)
    prefill(cache, list(range(12)))
    hog = cache.lookup((), 0)
    hits = []
    for block in range(15):
        assert hog.try_allocate(FULL, block)
        probe = cache.lookup(cache.block_keys(list(range(12)), b""), 13)
        hits.append(probe.hit_tokens)
        probe.release()
    assert hits == sorted(hits, reverse=True)
    assert set(hits) == {12, 8, 4, 0}
    hog.release()
    cache.check()
    cache.close()


def test_slid_blocks_are_the_first_to_go_unless_they_were_a_hit():
    cache = make_cache(45)
    shared = list(range(12))
    prefill(cache, [*shared, *range(100, 120)])  # the window slides past `shared`
    assert prefill(cache, [*shared, *range(200, 220)]) == 12  # and again, after a hit there
    hog = cache.lookup((), 0)
    for block in range(6 + 4):  # the free pages, then the windows slid past and never hit
        assert hog.try_allocate(FULL, block)
    assert cache.counts().num_evictions == 2
    probe = cache.lookup(cache.block_keys([*shared, 8], b""), 13)
    assert probe.hit_tokens == 12
    probe.release()
    hog.release()
    cache.check()
    cache.close()


def test_counts_tell_hits_by_query_and_token():
    cache = make_cache()
    prefill(cache, list(range(9)))
    prefill(cache, list(range(9)))
    counts = cache.counts()
    lookups = counts.lookups
    assert (lookups.num_queries, lookups.num_hits) == (2, 1)
    assert (lookups.num_query_tokens, lookups.num_hit_tokens) == (18, 8)
    assert counts.num_tables == 0
    assert counts.num_evictions == 0
    cache.close()


def test_a_table_is_released_once_for_each_holder():
    cache = make_cache()
    table = cache.lookup((), 5)
    table.retain()
    table.release()
    assert cache.counts().num_tables == 1
    table.release()
    assert cache.counts().num_tables == 0
    with pytest.raises(AssertionError, match="released more often"):
        table.release()
    with pytest.raises(AssertionError, match="after the last release"):
        table.retain()
    cache.close()


def test_a_pool_without_room_for_one_block_names_both_sizes():
    with pytest.raises(ConfigError, match=r"ram_bytes = 16 .* 24"):
        make_cache(2)


def test_check_notices_a_reference_that_no_table_holds():
    cache = make_cache()
    prefill(cache, list(range(5)))
    keys = cache.block_keys(list(range(5)), b"")
    with cache.pool.lock:
        cache.pool.hold([cache.pool.published(FULL)[keys[0]]])
    with pytest.raises(AssertionError, match="holders differ"):
        cache.check()
    cache.close()
