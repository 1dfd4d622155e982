"""What a table keeps along its prompt, and what it finds when it looks a second time."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.block_table import BlockTable
from prfaas.cache.hashing import root_key
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import (
    CacheLayout,
    FullSpec,
    GroupSpec,
    StateSpec,
    WindowSpec,
    held_blocks,
    snapshot_blocks,
    snapshot_of_block,
)

BLOCK = 4
PAGE_BYTES = 8
FULL = FullSpec(name="full", layers=(1,), page_bytes=PAGE_BYTES)
WINDOW = WindowSpec(name="window", layers=(0, 2), page_bytes=PAGE_BYTES, window_tokens=10)
STATE = StateSpec(name="state", layers=(3,), page_bytes=PAGE_BYTES, state_bytes=12)
LAYOUTS = [(FULL,), (FULL, WINDOW), (FULL, STATE), (FULL, WINDOW, STATE), (WINDOW, STATE)]
TOKENS = tuple(range(60))


def make_cache(groups: tuple[GroupSpec, ...], num_pages: int = 300) -> PrefixCache:
    layout = CacheLayout(block_tokens=BLOCK, groups=groups)
    return PrefixCache(
        layout=layout,
        ram_bytes=num_pages * PAGE_BYTES,
        root=lambda salt: root_key(
            model_fingerprint="m",
            numerics_fingerprint="n",
            kv_dtype="float32",
            layout=layout,
            salt=salt,
        ),
    )


def look_up(cache: PrefixCache, tokens: tuple[int, ...]) -> BlockTable:
    return cache.lookup(cache.block_keys(tokens, b""), len(tokens))


def publish(table: BlockTable, group: int, block: int) -> None:
    assert table.try_allocate(group, block) is not None
    table.commit(group, block)


@st.composite
def places(draw: st.DrawFn, num_groups: int) -> list[tuple[int, int]]:
    """(group, block) of some of the prompt's blocks, mostly of those that begin it."""
    most = [draw(st.integers(0, len(TOKENS) // BLOCK)) for _ in range(num_groups)]
    gaps = draw(st.sets(st.tuples(st.integers(0, num_groups - 1), st.integers(0, 14)), max_size=5))
    return [(g, b) for g in range(num_groups) for b in range(most[g]) if (g, b) not in gaps]


@given(data=st.data(), groups=st.sampled_from(LAYOUTS), num_tokens=st.integers(1, 60))
def test_a_table_that_looks_again_finds_what_a_new_lookup_would(data, groups, num_tokens):
    """Whatever was published before it looked first, between, and whatever it had reserved."""
    cache = make_cache(groups)
    prompt = TOKENS[:num_tokens]
    other = look_up(cache, TOKENS)
    for place in data.draw(places(len(groups))):
        publish(other, *place)
    table = look_up(cache, prompt)
    before = table.hit_tokens
    if data.draw(st.booleans()):
        assert table.try_reserve(num_tokens)
    for place in data.draw(places(len(groups))):
        publish(other, *place)
    fresh = look_up(cache, prompt)
    expected = max(before, fresh.hit_tokens)
    assert table.look_again(num_tokens) == table.hit_tokens == table.num_tokens == expected
    cache.check()
    for group, spec in enumerate(groups):
        for block in held_blocks(spec, expected, BLOCK):
            assert table.is_committed(group, block)
            if expected > before:
                assert table.pages(group, block) == other.pages(group, block)
    if expected > before and fresh.junction_tokens:
        assert fresh.junction_tokens in table.landmarks
    for held in (table, fresh, other):
        held.release()
    cache.check()
    assert cache.counts().num_referenced == 0
    cache.close()


@given(
    spec=st.sampled_from([FULL, WINDOW, STATE]),
    every_blocks=st.integers(0, 6),
    num_tokens=st.integers(0, 60),
    after_tokens=st.integers(0, 60),
)
def test_a_block_is_part_of_the_first_snapshot_that_needs_it(
    spec, every_blocks, num_tokens, after_tokens
):
    every = every_blocks * BLOCK
    for block in range(16):
        expected = 0
        for at in range(every, num_tokens + 1, every) if every else ():
            if at > after_tokens and block in snapshot_blocks(spec, at, BLOCK):
                expected = at
                break
        found = snapshot_of_block(
            spec,
            block,
            every_tokens=every,
            num_tokens=num_tokens,
            block_tokens=BLOCK,
            after_tokens=after_tokens,
        )
        assert found == expected


def pass_by(cache: PrefixCache, *, every_tokens: int, is_held: bool) -> BlockTable:
    """Prefill TOKENS block by block, with snapshots; return the table, at its end."""
    table = look_up(cache, TOKENS)
    table.keep_snapshots(every_tokens, len(TOKENS), is_held=is_held)
    for block in range(len(TOKENS) // BLOCK):
        for group, spec in enumerate(cache.layout.groups):
            end = (block + 1) * BLOCK
            if not isinstance(spec, StateSpec) or end % every_tokens == 0:
                publish(table, group, block)
        table.slide((block + 1) * BLOCK)
    return table


def hits(cache: PrefixCache) -> Iterator[int]:
    """Yield the hit of each prompt that parts from TOKENS after a block."""
    for block in range(1, len(TOKENS) // BLOCK):
        table = look_up(cache, (*TOKENS[: block * BLOCK], 99))
        yield table.hit_tokens
        table.release()


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (FULL, STATE), (FULL, WINDOW, STATE)])
def test_snapshots_outlive_the_windows_that_were_passed_by(groups):
    cache = make_cache(groups)
    pass_by(cache, every_tokens=20, is_held=False).release()
    hog = cache.lookup((), 0)
    num_windows = sum(isinstance(spec, WindowSpec) for spec in groups)
    num_free = cache.counts().num_free
    passed_by = 5  # blocks 0, 1, 5, 6 and 10 are in the last 9 tokens before no multiple of 20
    for block in range(num_free + passed_by * 2 * num_windows):
        assert hog.try_allocate(0, block) is not None
    for block, hit in enumerate(hits(cache), 1):
        assert hit >= block * BLOCK // 20 * 20
    hog.release()
    cache.close()


def test_held_snapshots_are_no_hit_of_the_pool_to_lose():
    """Nothing evicts them while the table lives; dropped ones go like all others."""
    cache = make_cache((FULL, WINDOW), num_pages=60)
    table = pass_by(cache, every_tokens=20, is_held=True)
    at_20, at_40 = ([(1, b) for b in snapshot_blocks(WINDOW, at, BLOCK)] for at in (20, 40))
    assert all(table.pages(*place) is not None for place in at_20 + at_40)
    table.drop_snapshots(20)
    table.slide(len(TOKENS))
    assert all(table.pages(*place) is None for place in at_20)
    assert all(table.pages(*place) is not None for place in at_40)
    table.release()
    cache.check()
    cache.close()


def test_prompts_share_the_blocks_that_their_keys_share():
    cache = make_cache((FULL,))
    table = look_up(cache, TOKENS)
    for shared in range(61):
        other = look_up(cache, (*TOKENS[:shared], *(t + 100 for t in TOKENS[shared:])))
        assert table.num_shared_blocks(other.keys) == shared // BLOCK
        other.release()
    table.release()
    cache.close()
