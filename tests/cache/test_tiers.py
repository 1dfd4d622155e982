"""Pages go to disk behind the engine's back and come up again; no tenant meets another there."""

import pytest

from prfaas.cache.block_table import BlockTable
from prfaas.cache.tenants import narrowed, salt_of, tenant_of
from prfaas.cache.tiers import Promotion
from tests.cache.tiered import BLOCK_TOKENS, DictStore, assert_whole, cache_over, find, serve

TOKENS = list(range(13))
HIT = 12


def restarted(store: DictStore):
    store.write()
    return cache_over(store)


def test_what_was_published_is_found_after_a_restart():
    store = DictStore()
    assert serve(cache_over(store), TOKENS) == 0
    cache = restarted(store)
    assert serve(cache, TOKENS) == HIT
    assert serve(cache, TOKENS) == HIT
    lookups = cache.counts().lookups
    assert (lookups.num_disk_tokens, lookups.num_ram_tokens) == (HIT, HIT)


def test_pages_are_held_until_they_are_written_and_then_can_leave():
    store = DictStore()
    cache = cache_over(store)
    serve(cache, TOKENS)
    assert cache.counts().num_referenced == 6 * 7
    store.write()
    cache.check()
    assert cache.counts().num_referenced == 0
    assert cache.counts().num_cached == 6 * 7


def test_the_end_of_a_prompt_leaves_before_its_beginning_although_it_is_written_last():
    store = DictStore()
    cache = cache_over(store, num_pages=6 * 7)
    serve(cache, TOKENS, states=())
    store.write()
    keys = cache.block_keys(TOKENS, b"")
    lefts = set()
    for num_pages in range(6 * 7 + 1):
        with cache.pool.lock:
            (entry,) = cache.pool.try_take([num_pages], is_transfer=False) or (None,)
            assert entry is not None
            lefts.add(tuple(key in cache.pool.published(0) for key in keys))
            cache.pool.let_go(entry)
    assert lefts == {(True,) * n + (False,) * (6 - n) for n in range(7)}


@pytest.mark.parametrize("group", [0, 1, 2])
@pytest.mark.parametrize("block", range(6))
def test_a_record_that_cannot_be_read_only_makes_the_hit_shorter(group, block):
    store = DictStore()
    cache = cache_over(store)
    keys = cache.block_keys(TOKENS, b"")
    serve(cache, TOKENS)
    store.write()
    store.lost.add((group, keys[block]))
    cache = cache_over(store)
    needed = {0: True, 1: block >= 4, 2: block == 5}[group]
    table = find(cache, keys, len(TOKENS), b"")
    expected = HIT
    if needed:
        expected = {0: block, 1: block, 2: 5}[group] * BLOCK_TOKENS
    assert table.hit_tokens == expected
    table.release()
    assert serve(cache, TOKENS) == expected
    assert serve(cache, TOKENS) == HIT
    store.lost.clear()
    assert serve(restarted(store), TOKENS) == HIT


def test_a_promotion_that_is_given_up_while_it_reads_lets_go_when_the_read_ends():
    class SlowStore(DictStore):
        promotion: Promotion | None = None

        def get_many(self, wanted):
            assert self.promotion is not None
            self.promotion.release()
            assert cache.counts().num_referenced
            return super().get_many(wanted)

    store = SlowStore()
    serve(cache_over(store), TOKENS)
    cache = restarted(store)
    keys = cache.block_keys(TOKENS, b"")
    promotion = cache.find(keys, len(TOKENS))
    assert isinstance(promotion, Promotion)
    store.promotion = promotion
    promotion.read()
    cache.check()
    assert cache.counts().num_referenced == 0
    table = cache.find(keys, len(TOKENS))
    assert isinstance(table, BlockTable)
    assert table.hit_tokens == HIT
    table.release()


def test_a_promotion_that_is_given_up_before_it_reads_reads_nothing():
    store = DictStore()
    serve(cache_over(store), TOKENS)
    cache = restarted(store)
    promotion = cache.find(cache.block_keys(TOKENS, b""), len(TOKENS))
    assert isinstance(promotion, Promotion)
    promotion.release()
    cache.check()
    assert promotion.read() == promotion.num_records > 0
    assert cache.counts().num_free == cache.counts().num_pages


@pytest.mark.parametrize("num_shares", [1, 2, 3, 50])
def test_a_promotion_is_read_in_shares_that_are_all_of_it_and_of_about_equal_bytes(num_shares):
    store = DictStore()
    serve(cache_over(store), TOKENS)
    cache = restarted(store)
    keys = cache.block_keys(TOKENS, b"")
    promotion = cache.find(keys, len(TOKENS))
    assert isinstance(promotion, Promotion)
    sizes: list[int] = []

    def read_shares(get_many, shares):
        sizes.extend(sum(part.nbytes for _, parts in share for part in parts) for share in shares)
        return [get_many(share) for share in reversed(shares)][::-1]

    assert promotion.read(num_shares=num_shares, read_shares=read_shares) == 0
    cache.check()
    # 6 blocks of 8 bytes, the last 2 of windows with 16, and one state of 24.
    assert sum(sizes) == 6 * 8 + 2 * 16 + 24
    assert len(sizes) == min(num_shares, 9)
    if num_shares <= 3:
        assert max(sizes) - min(sizes) <= 24
    promotion.release()
    table = cache.find(keys, len(TOKENS))
    assert isinstance(table, BlockTable)
    assert table.hit_tokens == HIT
    assert_whole(table, keys)
    table.release()


def test_two_that_read_the_same_end_with_one_copy():
    store = DictStore()
    serve(cache_over(store), TOKENS)
    cache = restarted(store)
    keys = cache.block_keys(TOKENS, b"")
    both = [cache.find(keys, len(TOKENS)) for _ in range(2)]
    for promotion in both:
        assert isinstance(promotion, Promotion)
        promotion.read()
        cache.check()
        promotion.release()
    table = cache.find(keys, len(TOKENS))
    assert isinstance(table, BlockTable)
    assert_whole(table, keys)
    table.release()
    assert cache.counts().num_cached == 6 + 2 * 2 + 4  # full, window, state: what a hit pins


def test_without_room_for_what_is_on_disk_the_hit_is_that_in_ram():
    store = DictStore()
    serve(cache_over(store), TOKENS)
    store.write()
    cache = cache_over(store, num_pages=8)
    assert serve(cache, TOKENS) == 0


def test_no_other_salts_records_are_asked_about_or_touched():
    store = DictStore()
    salts = [b"", salt_of(b"a", b""), salt_of(b"b", b""), salt_of(b"a", b"x"), salt_of(b"b", b"x")]
    for salt in salts:
        assert serve(cache_over(store), TOKENS, salt) == 0
        store.write()
    for salt in salts:
        cache = cache_over(store)
        own = {(g, key) for key in cache.block_keys(TOKENS, salt) for g in range(3)}
        store.asked.clear()
        assert serve(cache, TOKENS, salt) == HIT
        assert serve(cache, TOKENS, salt) == HIT
        assert store.asked
        assert store.asked <= own
        assert {store.tenants[key] for key in own & store.records.keys()} == {tenant_of(salt)}


def test_a_miss_says_why():
    store = DictStore()
    cache = cache_over(store, num_pages=6 * 7)

    def reasons() -> dict[str, int]:
        return {name: n for name, n in cache.counts().lookups.misses.items() if n}

    def look_up(tokens: list[int], salt: bytes = b"") -> None:
        keys, opening = cache.block_keys(tokens, salt), cache.block_keys(tokens, b"o")[0]
        table = cache.find(keys, len(tokens), salt=salt, opening=opening)
        assert isinstance(table, BlockTable)
        table.release()

    look_up(TOKENS)
    assert reasons() == {"no_prefix": 1}
    look_up(TOKENS, salt=b"other")
    assert reasons() == {"no_prefix": 1, "other_tenant": 1}
    serve(cache, TOKENS, states=())
    look_up(TOKENS)
    assert reasons() == {"no_prefix": 2, "other_tenant": 1, "no_snapshot": 1}
    store.write()
    store.records.clear()
    with cache.pool.lock:
        (entry,) = cache.pool.try_take([6 * 7], is_transfer=False) or (None,)
        assert entry is not None
        cache.pool.let_go(entry)
    look_up(TOKENS)
    assert reasons() == {"no_prefix": 2, "other_tenant": 1, "no_snapshot": 1, "evicted": 1}


def test_salts_of_different_keys_differ_and_a_clients_only_narrows():
    salts = [salt_of(key, client) for key in (None, b"a", b"b") for client in (b"", b"a", b"b")]
    assert len(set(salts)) == len(salts)
    assert salt_of(None, b"") == b""
    for key in (b"a", b"b"):
        assert tenant_of(salt_of(key, b"a")) == tenant_of(salt_of(key, b"")) != b""
        assert key not in salt_of(key, b"")
    assert tenant_of(salt_of(b"a", b"")) != tenant_of(salt_of(b"b", b""))
    salt = salt_of(b"a", b"")
    assert narrowed(narrowed(salt, b"x"), b"y") != narrowed(salt, b"xy")
