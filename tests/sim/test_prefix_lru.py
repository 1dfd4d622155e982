"""A simulated cluster's cache: leading blocks hit, the longest unused leave."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.config.traces import MOONCAKE_BLOCK_TOKENS as BLOCK
from prfaas.sim.prefix_lru import PrefixLru


def test_only_leading_blocks_hit_and_one_token_is_left():
    cache = PrefixLru(capacity_tokens=10 * BLOCK)
    cache.add((1, 2, 3))
    assert cache.hit_tokens((1, 2, 9, 3), 4 * BLOCK) == 2 * BLOCK
    assert cache.hit_tokens((9, 1, 2), 3 * BLOCK) == 0
    assert cache.hit_tokens((1, 2, 3), 3 * BLOCK) == 3 * BLOCK - 1
    assert cache.hit_tokens((1,), 100) == 99, "a last block may be partial"


def test_a_prompts_end_leaves_before_its_beginning_and_old_prompts_before_new_ones():
    cache = PrefixLru(capacity_tokens=4 * BLOCK)
    cache.add((1, 2, 3))
    cache.add((1, 7, 8))
    assert cache.hit_tokens((1, 2, 3), 9 * BLOCK) == 2 * BLOCK
    assert cache.hit_tokens((1, 7, 8), 9 * BLOCK) == 3 * BLOCK


@given(st.integers(0, 6), st.lists(st.lists(st.integers(0, 9), unique=True, max_size=8)))
def test_it_never_holds_more_than_it_may(num_blocks, prompts):
    cache = PrefixLru(capacity_tokens=num_blocks * BLOCK + 5)
    for prompt in prompts:
        cache.add(prompt)
        assert cache.num_blocks <= num_blocks
        length = len(prompt) * BLOCK
        if prompt:
            expected = min(len(prompt), num_blocks) * BLOCK
            assert cache.hit_tokens(prompt, length + 1) == expected
