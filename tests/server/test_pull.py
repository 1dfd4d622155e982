"""A page is published only when its whole block is verified; what is published stays."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.block_table import BlockTable
from prfaas.cache.prefix import PrefixCache
from prfaas.errors import ProtocolError
from prfaas.server.places import places_to_send
from prfaas.server.pull import Pull
from prfaas.transport.pieces import PagePlace
from prfaas.transport.wire import Frame, FrameHeader, FrameType
from tests.server.fleet import make_cache, prompt
from tests.server.scripted_engine import BLOCK_TOKENS, DENSE, HYBRID, STATES, page_bytes

NUM_TOKENS = 100


def header(place: PagePlace, length: int = 1) -> FrameHeader:
    return FrameHeader(
        type=FrameType.PAGE,
        group=place.group,
        index=place.index,
        block=place.block,
        num_tokens=place.num_tokens,
        length=length,
    )


def begin(cache: PrefixCache, num_tokens: int = NUM_TOKENS) -> tuple[Pull, BlockTable]:
    table = cache.lookup(cache.block_keys(prompt(num_tokens), b""), num_tokens)
    assert table.try_reserve(num_tokens)
    pull = Pull(
        layout=cache.layout, table=table, num_tokens=num_tokens, have_tokens=table.hit_tokens
    )
    return pull, table


def deliver(pull: Pull, place: PagePlace, data: bytes) -> bool:
    target = pull.resolve(header(place))
    if target is not None:
        assert len(target) == len(data)
        target[:] = data
    pull.verified(Frame(header=header(place, len(data)), is_placed=target is not None))
    return target is not None


def data_of(cache: PrefixCache, place: PagePlace) -> bytes:
    return page_bytes(cache.layout, place.group, place.index, place.block, prompt(NUM_TOKENS))


@given(
    layout=st.sampled_from([DENSE, HYBRID, STATES]),
    seed=st.integers(0, 10**6),
    fraction=st.floats(0, 1),
)
def test_in_any_order_and_cut_anywhere_only_whole_blocks_can_be_hit(layout, seed, fraction):
    cache = make_cache(layout)
    pull, table = begin(cache)
    places = places_to_send(layout, NUM_TOKENS, 0)
    random.Random(seed).shuffle(places)
    arrived = places[: round(len(places) * fraction)]
    for place in arrived:
        assert deliver(pull, place, data_of(cache, place))
    whole = [
        all(place in arrived for place in places if place.block == block)
        for block in range(NUM_TOKENS // BLOCK_TOKENS)
    ]
    table.release()
    cache.check()
    again = cache.lookup(cache.block_keys(prompt(NUM_TOKENS), b""), NUM_TOKENS)
    if layout is DENSE:
        assert again.hit_tokens == (*whole, False).index(False) * BLOCK_TOKENS
    if layout is STATES:
        # KV alone is worth nothing: what counts is the state at the last block's start.
        boundary = NUM_TOKENS // BLOCK_TOKENS
        has_state = all(p in arrived for p in places if (p.group, p.block) == (1, boundary - 1))
        has_kv = all(p in arrived for p in places if p.group == 0 and p.block < boundary)
        assert again.hit_tokens == (boundary * BLOCK_TOKENS if has_state and has_kv else 0)
    assert again.hit_tokens == 0 or len(arrived) > 0
    for place in places:
        if place.block * BLOCK_TOKENS < again.hit_tokens:
            pages = again.pages(place.group, place.block)
            if pages is not None:
                data = data_of(cache, place)
                assert again.view(pages[place.index])[: len(data)] == data
    again.release()
    assert cache.counts().num_referenced == 0
    cache.close()


@pytest.mark.parametrize("layout", [DENSE, HYBRID, STATES], ids=["dense", "hybrid", "states"])
def test_a_whole_transfer_is_exact_at_the_prompts_end(layout):
    cache = make_cache(layout)
    pull, table = begin(cache)
    for place in places_to_send(layout, NUM_TOKENS, 0):
        assert not pull.is_complete
        deliver(pull, place, data_of(cache, place))
    assert pull.is_complete
    pull.finish()
    assert table.num_tokens == NUM_TOKENS
    assert pull.num_page_bytes == layout.bytes_needed(NUM_TOKENS)
    table.release()
    cache.close()


def test_redelivered_pages_never_touch_what_was_verified():
    cache = make_cache(DENSE)
    pull, table = begin(cache)
    first, second = places_to_send(DENSE, NUM_TOKENS, 0)[:2]
    assert deliver(pull, first, data_of(cache, first))
    assert not deliver(pull, first, b"x" * len(data_of(cache, first)))
    deliver(pull, second, data_of(cache, second))
    third = places_to_send(DENSE, NUM_TOKENS, 0)[2]
    deliver(pull, third, data_of(cache, third))
    assert table.is_committed(0, 0)
    assert not deliver(pull, second, b"x" * len(data_of(cache, second)))
    pages = table.pages(0, 0)
    assert pages is not None
    assert table.view(pages[0])[:] == data_of(cache, first)
    table.release()
    cache.close()


@pytest.mark.parametrize(
    "place",
    [
        PagePlace(group=9, index=0, block=0, num_tokens=BLOCK_TOKENS),
        PagePlace(group=0, index=3, block=0, num_tokens=BLOCK_TOKENS),
        PagePlace(group=0, index=0, block=13, num_tokens=BLOCK_TOKENS),
        PagePlace(group=0, index=0, block=0, num_tokens=BLOCK_TOKENS - 1),
        PagePlace(group=0, index=0, block=12, num_tokens=BLOCK_TOKENS),
        PagePlace(group=0, index=0, block=2**32 - 1, num_tokens=1),
    ],
)
def test_a_page_that_was_not_asked_for_has_no_place(place):
    cache = make_cache(DENSE)
    pull, table = begin(cache)
    with pytest.raises(ProtocolError):
        pull.resolve(header(place))
    table.release()
    cache.close()


def test_an_end_without_every_page_is_refused():
    cache = make_cache(DENSE)
    pull, table = begin(cache)
    for place in places_to_send(DENSE, NUM_TOKENS, 0)[:-1]:
        deliver(pull, place, data_of(cache, place))
    with pytest.raises(ProtocolError, match="without 1 blocks"):
        pull.finish()
    assert table.num_tokens == 0
    table.release()
    cache.close()
