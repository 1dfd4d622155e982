"""The threshold is the shortest prompt that is sooner remote, whatever the model keeps per token."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.bench.threshold import (
    MAX_TOKENS,
    KvSize,
    LinkRates,
    break_even_tokens_per_s,
    kv_size,
    threshold_tokens,
)
from prfaas.cache.spec import CacheLayout, FullSpec, StateSpec, WindowSpec
from prfaas.server.parts import layout_text

BLOCK = 64
SIZES = st.builds(
    KvSize,
    bytes_per_token=st.integers(1, 100_000),
    windows=st.lists(st.tuples(st.integers(1, 4096), st.integers(1, 50_000)), max_size=2).map(
        tuple
    ),
    state_bytes=st.integers(0, 200_000_000),
)
RATES = st.builds(
    LinkRates,
    link_bytes_per_s=st.floats(1e5, 1e10),
    rtt_s=st.floats(1e-5, 0.3),
    peer_tokens_per_s=st.one_of(st.floats(10, 1e6), st.just(math.inf)),
)


@given(SIZES, RATES, st.floats(1, 1e5))
def test_the_threshold_is_where_remote_becomes_sooner(kv, rates, local):
    found = threshold_tokens(kv, rates, local, block_tokens=BLOCK)
    sooner = [
        tokens
        for tokens in (*range(BLOCK, 64 * BLOCK, BLOCK), 10_048, 100_032, MAX_TOKENS)
        if rates.remote_s(kv, tokens) < tokens / local
    ]
    if found is None:
        assert MAX_TOKENS not in sooner
    else:
        assert found % BLOCK == 0
        assert rates.remote_s(kv, found) < found / local
        assert not found > BLOCK or rates.remote_s(kv, found - BLOCK) >= (found - BLOCK) / local
        assert all(tokens >= found for tokens in sooner)


@given(SIZES, RATES, st.integers(1, 200_000))
def test_at_the_break_even_rate_both_take_as_long(kv, rates, num_tokens):
    local = break_even_tokens_per_s(kv, rates, num_tokens)
    assert num_tokens / local == pytest.approx(rates.remote_s(kv, num_tokens))


def test_an_example_by_hand():
    kv = KvSize(bytes_per_token=1000, state_bytes=500_000)
    rates = LinkRates(link_bytes_per_s=1e6, rtt_s=0.1, peer_tokens_per_s=2000)
    assert rates.remote_s(kv, 4000) == pytest.approx(0.1 + 4.0 + 0.5)  # the link is slower
    rates = LinkRates(link_bytes_per_s=1e7, rtt_s=0.1, peer_tokens_per_s=2000)
    assert rates.remote_s(kv, 4000) == pytest.approx(0.1 + 2.0 + 0.05)
    # 0.15 + l / 2000 < l / 1000 from 300 tokens on
    assert threshold_tokens(kv, rates, 1000.0, block_tokens=64) == 320
    assert threshold_tokens(kv, rates, 2000.0, block_tokens=64) is None


def test_the_size_of_a_layout_is_read_from_its_spelling():
    layout = CacheLayout(
        block_tokens=BLOCK,
        groups=(
            FullSpec(name="full", layers=(0, 4), page_bytes=6400),
            WindowSpec(name="window 512", layers=(1,), page_bytes=3200, window_tokens=512),
            StateSpec(name="state", layers=(2, 3), page_bytes=6400, state_bytes=10_000),
        ),
    )
    kv = kv_size(layout_text(layout), BLOCK)
    assert kv == KvSize(bytes_per_token=200, windows=((512, 50),), state_bytes=20_000)
    assert kv.of(100) == 100 * 250 + 20_000
    assert kv.tail_bytes(10_000) == 512 * 50 + 20_000


@pytest.mark.parametrize("text", ["", "scripted", "v2: full page x layers 1"])
def test_what_is_no_layout_has_no_size(text):
    with pytest.raises(ValueError, match="is not the layout"):
        kv_size(text, BLOCK)
