"""Hits of models with states, and what another tenant's pages leave behind."""

import pytest

from prfaas.cache.block_table import BlockTable
from prfaas.cache.spec import held_blocks
from tests.cache.tiered import (
    BLOCK_TOKENS,
    LAYOUT,
    PAGE_BYTES,
    DictStore,
    assert_whole,
    cache_over,
    compute,
    content,
    find,
    serve,
    size_of,
)

FULL, WINDOW, STATE = range(3)


def serve_turn(cache, tokens: list[int]) -> int:
    """Keep the state where the prompt ends, as an engine does."""
    last = (len(tokens) - 1) // BLOCK_TOKENS - 1
    return serve(cache, tokens, states=[last])


def test_a_chat_whose_last_turn_changed_goes_on_from_the_nearest_earlier_snapshot():
    """C5: one mismatch costs what lies behind it, and no earlier snapshot."""
    cache = cache_over(None)
    turns = [list(range(5)), list(range(9)), list(range(13))]
    assert [serve_turn(cache, turn) for turn in turns] == [0, 4, 8]
    rewritten = [*range(8), *range(50, 57)]  # the last assistant turn in other words
    assert serve_turn(cache, rewritten) == 8
    assert serve_turn(cache, [*range(7), 60, 61, 62]) == 4
    assert serve_turn(cache, [*range(3), 70, 71]) == 0
    assert serve_turn(cache, [*range(12), 80, 81]) == 12, "the old turns are all still there"
    cache.close()


@pytest.mark.parametrize("group", [WINDOW, STATE])
def test_without_its_snapshot_kv_is_no_hit_beyond_the_one_before(group):
    """C1: a hit is the least that all groups have; C3: KV and state end at one length."""
    cache = cache_over(None)
    tokens = list(range(13))
    keys = cache.block_keys(tokens, b"")
    table = cache.lookup(keys, len(tokens))
    for block in range(6):
        for other in (FULL, WINDOW, STATE):
            if (other, block) != (group, 5):
                assert table.try_allocate(other, block)
                table.commit(other, block)
    table.release()
    table = cache.lookup(keys, len(tokens))
    assert table.hit_tokens == 10
    for other, spec in enumerate(LAYOUT.groups):
        for block in held_blocks(spec, 10, BLOCK_TOKENS):
            assert table.is_committed(other, block)
        assert table.pages(other, 5) is None
    table.release()
    cache.check()
    cache.close()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 8, 9])
def test_a_prompt_sent_again_leaves_one_token_at_least_and_one_block_at_most(num_tokens):
    """C6, with states."""
    cache = cache_over(None)
    tokens = list(range(num_tokens))
    hits = [serve(cache, tokens) for _ in range(4)]
    assert hits == [0, *[(num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS] * 3]
    cache.close()


def test_another_salts_lookups_leave_an_entry_as_it_was_in_ram_too():
    """No reference, mark or place in the order of leaving tells that another tenant asked."""
    cache = cache_over(DictStore())
    tokens = list(range(13))
    serve(cache, tokens, b"a" * 32)

    def traces() -> list[tuple[object, ...]]:
        return [
            (key, entry.pages, entry.was_hit, entry.num_refs, entry.place, entry.worth)
            for group in (FULL, WINDOW, STATE)
            for key in cache.block_keys(tokens, b"a" * 32)
            if (entry := cache.pool.published(group).get(key)) is not None
        ]

    before = traces()
    assert before
    for salt in (b"", b"b" * 32, b"a" * 31):
        assert serve(cache, tokens, salt) == 0, "nothing is shared"
        assert serve(cache, tokens, salt) == 12
        assert traces() == before, "nothing is touched"
    cache.close()


def test_pages_that_another_tenant_wrote_are_seen_by_nobody_before_they_are_written_again():
    """RAM is not zeroed when pages change hands: a page is visible only once its bytes are whole.

    A page's end that no byte of a block is written to is no part of any record or frame.
    """
    store = DictStore()
    cache = cache_over(store, num_pages=6 * 7)
    tokens, own, others = list(range(13)), b"b" * 32, b"a" * 32
    secret = b"\xa5" * PAGE_BYTES
    table = cache.lookup(cache.block_keys(tokens, others), len(tokens))
    for block in range(6):
        for group in (FULL, WINDOW, STATE):
            for page in table.try_allocate(group, block) or ():
                table.view(page)[:] = secret
    table.release()  # private to the end: nothing was committed

    keys = cache.block_keys(tokens, own)
    writer = cache.lookup(keys, len(tokens), salt=own)
    assert writer.try_reserve(len(tokens))
    stale = [page for group in (FULL, WINDOW, STATE) for page in writer.pages(group, 5) or ()]
    assert all(writer.view(page) == secret for page in stale), "the very pages, not zeroed"
    reader = find(cache, keys, len(tokens), own)
    assert reader.hit_tokens == 0
    assert all(reader.pages(group, block) is None for group in range(3) for block in range(6))
    reader.release()
    with pytest.raises(AssertionError, match=r"is free|held by nobody"):
        cache.pool.view(next(p for p in range(6 * 7) if p not in held_pages(writer)))

    for group in (FULL, WINDOW, STATE):
        for block in range(6):
            for index, page in enumerate(writer.pages(group, block) or ()):
                size = size_of(group, index)
                writer.view(page)[:size] = content(keys[block], group, index)[:size]
            if writer.pages(group, block):
                writer.commit(group, block)
    writer.release()
    store.write()
    reader = find(cache, keys, len(tokens), own)
    assert reader.hit_tokens == 12
    assert_whole(reader, keys)
    reader.release()
    assert store.records
    assert not any(secret[:2] in record for record in store.records.values())
    cache.check()
    cache.close()


def held_pages(table: BlockTable) -> set[int]:
    return {
        page for group in range(3) for block in range(7) for page in table.pages(group, block) or ()
    }


def test_evicted_pages_are_the_next_ones_and_hits_are_only_whats_theirs():
    cache = cache_over(None, num_pages=6 * 7)
    tokens = list(range(13))
    for number in range(6):
        salt = bytes([number]) * 32
        keys = cache.block_keys(tokens, salt)
        table = cache.lookup(keys, len(tokens))
        assert table.hit_tokens == 0
        compute(table, keys)
        assert_whole(table, keys)
        table.release()
        again = cache.lookup(keys, len(tokens))
        assert again.hit_tokens == 12
        assert_whole(again, keys)
        again.release()
    assert cache.counts().num_evictions > 0
    cache.close()
