"""Which blocks a position needs, against a count token by token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.spec import (
    CacheLayout,
    FullSpec,
    GroupSpec,
    StateSpec,
    WindowSpec,
    bytes_of_page,
    held_blocks,
    missing_blocks,
    needed_blocks,
    replay_boundary,
)

BLOCK_TOKENS = st.integers(1, 9)
NUM_TOKENS = st.integers(0, 80)
SPECS = st.one_of(
    st.just(FullSpec(name="full", layers=(0,), page_bytes=2520)),
    st.integers(1, 40).map(
        lambda w: WindowSpec(name="window", layers=(0,), page_bytes=2520, window_tokens=w)
    ),
)
STATE = StateSpec(name="state", layers=(1, 4), page_bytes=64, state_bytes=150)


def seen_tokens(spec: GroupSpec, position: int) -> set[int]:
    """Return the earlier tokens that a query at `position` sees."""
    if isinstance(spec, FullSpec):
        return set(range(position))
    assert isinstance(spec, WindowSpec)
    return {j for j in range(position) if position - spec.window_tokens < j}


@given(spec=SPECS, num_tokens=NUM_TOKENS, block_tokens=BLOCK_TOKENS)
def test_a_hit_holds_every_token_that_the_next_query_sees(spec, num_tokens, block_tokens):
    num_blocks = num_tokens // block_tokens
    length = num_blocks * block_tokens
    expected = {j // block_tokens for j in seen_tokens(spec, length)}
    assert set(held_blocks(spec, length, block_tokens)) == expected


@given(spec=SPECS, num_tokens=st.integers(1, 80), block_tokens=BLOCK_TOKENS)
def test_needed_blocks_serve_the_end_and_the_boundary_before_it(spec, num_tokens, block_tokens):
    boundary = (num_tokens - 1) // block_tokens * block_tokens
    seen = seen_tokens(spec, num_tokens) | seen_tokens(spec, boundary)
    seen |= set(range(boundary, num_tokens))
    needed = needed_blocks(spec, num_tokens, block_tokens)
    assert set(needed) == {j // block_tokens for j in seen}


@given(
    spec=SPECS | st.just(STATE), num_tokens=NUM_TOKENS, have=NUM_TOKENS, block_tokens=BLOCK_TOKENS
)
def test_what_is_needed_is_counted_as_if_block_by_block(spec, num_tokens, have, block_tokens):
    layout = CacheLayout(block_tokens=block_tokens, groups=(spec,))
    missing = missing_blocks(spec, num_tokens, have, block_tokens)
    assert layout.pages_needed(num_tokens, have) == len(missing) * spec.pages_per_block
    assert layout.bytes_needed(num_tokens, have) == sum(
        bytes_of_page(
            spec, index, min(block_tokens, num_tokens - block * block_tokens), block_tokens
        )
        for block in missing
        for index in range(spec.pages_per_block)
    )


def test_an_empty_prompt_needs_nothing():
    spec = WindowSpec(name="window", layers=(0,), page_bytes=64, window_tokens=8)
    assert list(needed_blocks(spec, 0, 4)) == []
    assert list(held_blocks(spec, 0, 4)) == []


@pytest.mark.parametrize(
    ("num_tokens", "first", "stop"),
    [(1, 0, 1), (512, 0, 8), (575, 0, 9), (576, 0, 9), (577, 1, 10), (8192, 119, 128)],
)
def test_gemma_windows_of_512_in_blocks_of_64(num_tokens, first, stop):
    spec = WindowSpec(name="window", layers=(0,), page_bytes=131072, window_tokens=512)
    assert needed_blocks(spec, num_tokens, 64) == range(first, stop)


@given(spec=SPECS, num_tokens=NUM_TOKENS, hit_blocks=st.integers(0, 20), block_tokens=BLOCK_TOKENS)
def test_what_a_hit_pins_and_what_is_missing_make_up_what_is_needed(
    spec, num_tokens, hit_blocks, block_tokens
):
    have = hit_blocks * block_tokens
    missing = missing_blocks(spec, num_tokens, have, block_tokens)
    held = set(held_blocks(spec, have, block_tokens))
    needed = set(needed_blocks(spec, num_tokens, block_tokens))
    assert not held & set(missing)
    assert needed == set(missing) | (held & needed)


@pytest.mark.parametrize(
    ("num_tokens", "held", "needed"),
    [
        (0, [], []),
        (1, [0], [0]),
        (63, [0], [0]),
        (64, [0], [0]),
        (65, [1], [0, 1]),
        (128, [1], [0, 1]),
        (129, [2], [1, 2]),
    ],
)
def test_a_state_is_needed_at_the_end_and_at_the_boundary_before_it(num_tokens, held, needed):
    """A prompt of whole blocks is hit one block before its end, so one state is not enough."""
    assert list(held_blocks(STATE, num_tokens, 64)) == held
    assert list(needed_blocks(STATE, num_tokens, 64)) == needed
    boundary = replay_boundary(num_tokens, 64)
    assert list(held_blocks(STATE, boundary, 64)) == [b for b in needed if b * 64 < boundary]


@given(num_tokens=st.integers(1, 80), hit_blocks=st.integers(0, 20), block_tokens=BLOCK_TOKENS)
def test_of_states_a_hit_spares_that_at_its_end_alone(num_tokens, hit_blocks, block_tokens):
    have = min(hit_blocks, (num_tokens - 1) // block_tokens) * block_tokens
    missing = missing_blocks(STATE, num_tokens, have, block_tokens)
    needed = needed_blocks(STATE, num_tokens, block_tokens)
    assert missing == tuple(b for b in needed if (b + 1) * block_tokens != have)
    assert needed[-1] in missing


def test_a_state_is_cut_into_slices_layer_by_layer_whatever_the_tokens():
    assert (STATE.slices_per_layer, STATE.pages_per_block) == (3, 6)
    for num_tokens in (1, 64):
        sizes = [bytes_of_page(STATE, index, num_tokens, 64) for index in range(6)]
        assert sizes == [64, 64, 22] * 2
    for index in (-1, 6):
        with pytest.raises(ValueError, match="of 6 in state"):
            bytes_of_page(STATE, index, 64, 64)


def test_a_cut_block_takes_its_tokens_share_of_the_page():
    spec = FullSpec(name="full", layers=(0,), page_bytes=640)
    assert [bytes_of_page(spec, 0, n, 64) for n in (0, 1, 63, 64)] == [0, 10, 630, 640]
    for n in (-1, 65):
        with pytest.raises(ValueError, match=str(n)):
            bytes_of_page(spec, 0, n, 64)


def gemma_layout() -> CacheLayout:
    full = tuple(layer for layer in range(18) if layer % 6 == 5)
    window = tuple(layer for layer in range(18) if layer % 6 != 5)
    page_bytes = 64 * 2 * 256 * 4
    return CacheLayout(
        block_tokens=64,
        groups=(
            FullSpec(name="full", layers=full, page_bytes=page_bytes),
            WindowSpec(name="window", layers=window, page_bytes=page_bytes, window_tokens=512),
        ),
    )


def test_every_layer_has_one_place():
    layout = gemma_layout()
    for layer in range(18):
        ((group, index),) = layout.groups_of_layer(layer)
        assert layout.groups[group].layers[index] == layer
    assert layout.groups_of_layer(18) == ()


def test_the_pages_of_gemma_at_8192_tokens():
    layout = gemma_layout()
    assert layout.pages_per_block == 18
    assert layout.pages_needed(8192) == 3 * 128 + 15 * 9
    assert layout.pages_needed(8192, have_tokens=4096) == 3 * 64 + 15 * 9
    assert layout.pages_needed(8192, have_tokens=8128) == 3 + 15
    assert layout.bytes_needed(8192) == (3 * 128 + 15 * 9) * 131072
    assert layout.streamed_bytes(8192) == 3 * 128 * 131072
    assert layout.streamed_bytes(8190, have_tokens=8128) == 3 * 62 * 2048


@given(num_tokens=st.integers(0, 3000), have_blocks=st.integers(0, 50))
def test_bytes_needed_are_the_pages_less_what_the_last_block_lacks(num_tokens, have_blocks):
    layout = gemma_layout()
    have = min(have_blocks, max(0, num_tokens - 1) // 64) * 64
    lacking = -num_tokens % 64 * 2048 * 18
    expected = layout.pages_needed(num_tokens, have) * layout.page_bytes - lacking
    assert layout.bytes_needed(num_tokens, have) == expected


def hybrid_layout() -> CacheLayout:
    """Layer 1 attends and has a state, in parallel."""
    return CacheLayout(
        block_tokens=4,
        groups=(FullSpec(name="full", layers=(1, 3), page_bytes=80), STATE),
    )


def test_a_layer_may_have_kv_and_a_state():
    layout = hybrid_layout()
    assert layout.groups_of_layer(1) == ((0, 0), (1, 0))
    assert layout.groups_of_layer(3) == ((0, 1),)
    assert layout.groups_of_layer(4) == ((1, 1),)
    assert layout.groups_of_layer(0) == ()
    assert layout.has_states
    assert not gemma_layout().has_states
    assert layout.pages_per_block == 2 + 6


@given(num_tokens=st.integers(0, 60), have_blocks=st.integers(0, 14))
def test_pages_and_bytes_of_a_hybrid_are_those_of_its_pages_one_by_one(num_tokens, have_blocks):
    layout = hybrid_layout()
    have = min(have_blocks * 4, replay_boundary(num_tokens, 4))
    sizes = [
        bytes_of_page(spec, index, min(4, num_tokens - block * 4), 4)
        for spec in layout.groups
        for block in missing_blocks(spec, num_tokens, have, 4)
        for index in range(spec.pages_per_block)
    ]
    assert layout.pages_needed(num_tokens, have) == len(sizes)
    assert layout.bytes_needed(num_tokens, have) == sum(sizes)
    assert layout.streamed_bytes(num_tokens, have) == 40 * (num_tokens - have)


def test_the_largest_group_sets_the_page_size():
    layout = CacheLayout(
        block_tokens=4,
        groups=(
            FullSpec(name="a", layers=(0,), page_bytes=64),
            FullSpec(name="b", layers=(1,), page_bytes=96),
        ),
    )
    assert layout.page_bytes == 96


@pytest.mark.parametrize(
    ("block_tokens", "groups", "message"),
    [
        (0, (FullSpec(name="a", layers=(0,), page_bytes=64),), "0-token"),
        (4, (), "0 groups"),
        (4, (FullSpec(name="a", layers=(), page_bytes=64),), "0 layers"),
        (4, (FullSpec(name="a", layers=(0,), page_bytes=0),), "0 bytes"),
        (4, (FullSpec(name="a", layers=(0,), page_bytes=63),), "63 bytes"),
        (4, (FullSpec(name="a", layers=(0, 0), page_bytes=64),), "layer 0 is twice"),
        (4, (WindowSpec(name="a", layers=(0,), page_bytes=64, window_tokens=0),), "0 tokens"),
        (4, (StateSpec(name="a", layers=(0,), page_bytes=64, state_bytes=0),), "0 bytes"),
        (4, (StateSpec(name="a", layers=(0,), page_bytes=0, state_bytes=9),), "0 bytes"),
        (4, (STATE, STATE), "layer 1 is twice"),
        (4, (StateSpec(name="a", layers=(0,), page_bytes=1, state_bytes=65537),), "at most 65536"),
    ],
)
def test_a_layout_without_one_place_for_everything_is_refused(block_tokens, groups, message):
    with pytest.raises(ValueError, match=message):
        CacheLayout(block_tokens=block_tokens, groups=groups)
