"""Hit length against trying every length."""

from collections.abc import Callable

from hypothesis import example, given
from hypothesis import strategies as st

from prfaas.cache.groups import longest_hit, pinned_blocks, shared_blocks
from prfaas.cache.spec import CacheLayout, FullSpec, GroupSpec, StateSpec, WindowSpec

BLOCK_TOKENS = 4
FULL = FullSpec(name="full", layers=(0,), page_bytes=64)
STATE = StateSpec(name="state", layers=(2, 3), page_bytes=64, state_bytes=100)
NUM_BLOCKS = 14


class Asked:
    """A presence that notes what it is asked."""

    def __init__(self, is_present: Callable[[int, int], bool], num_blocks: int) -> None:
        self._is_present = is_present
        self._num_blocks = num_blocks
        self.asked: list[tuple[int, int]] = []

    def leading(self, group: int) -> int:
        absent = (b for b in range(self._num_blocks) if not self._is_present(group, b))
        return next(absent, self._num_blocks)

    def has(self, group: int, block: int) -> bool:
        self.asked.append((group, block))
        return self._is_present(group, block)


def window(window_tokens: int) -> WindowSpec:
    return WindowSpec(name="window", layers=(1,), page_bytes=64, window_tokens=window_tokens)


GROUPS = st.lists(
    st.one_of(st.just(FULL), st.just(STATE), st.integers(1, 40).map(window)), min_size=1, max_size=4
)
PRESENT = st.lists(
    st.lists(st.sampled_from([True, True, True, False]), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS),
    min_size=4,
    max_size=4,
)


def serves(spec: GroupSpec, present: list[bool], num_blocks: int) -> bool:
    """Return whether all that position `num_blocks * BLOCK_TOKENS` looks back at is present."""
    if isinstance(spec, StateSpec):
        return num_blocks == 0 or present[num_blocks - 1]
    position = num_blocks * BLOCK_TOKENS
    width = position if isinstance(spec, FullSpec) else spec.window_tokens - 1
    return all(present[j // BLOCK_TOKENS] for j in range(max(0, position - width), position))


@given(groups=GROUPS, present=PRESENT, limit=st.integers(0, NUM_BLOCKS))
@example(
    groups=[window(5), window(9)], present=[[True, False] * 7, [False, True] * 7] * 2, limit=14
)
def test_the_hit_is_the_longest_length_that_every_group_serves(
    groups: list[GroupSpec], present: list[list[bool]], limit: int
) -> None:
    presence = Asked(lambda group, block: present[group][block], limit)
    expected = max(
        n
        for n in range(limit + 1)
        if all(serves(spec, present[g], n) for g, spec in enumerate(groups))
    )
    assert longest_hit(groups, BLOCK_TOKENS, limit, presence) == expected
    assert len(presence.asked) == len(set(presence.asked)), "a block was asked for twice"
    assert all(block < limit for _, block in presence.asked)
    assert not any(isinstance(groups[group], FullSpec) for group, _ in presence.asked)


def test_full_attention_alone_is_not_a_hit_when_its_windows_are_gone():
    """The state or window of a hit must be there with the KV, or it is no hit at all."""
    for other in (window(9), STATE):
        kv_only = Asked(lambda group, block: group == 0, 10)
        assert longest_hit([FULL, other], BLOCK_TOKENS, 10, kv_only) == 0
        assert shared_blocks([FULL, other], 10, kv_only) == 10


def test_states_of_two_groups_serve_where_both_were_kept():
    there = {(1, 3), (1, 5), (1, 8), (2, 3), (2, 6), (2, 7)}
    hit = longest_hit(
        [FULL, STATE, STATE],
        BLOCK_TOKENS,
        10,
        Asked(lambda group, block: group == 0 or (group, block) in there, 10),
    )
    assert hit == 4


def test_a_state_beyond_the_kv_is_no_hit():
    """Nor is KV beyond the state: both end at one position."""
    state_at = {2, 7}
    for num_kv_blocks, expected in ((9, 8), (8, 8), (7, 3), (3, 3), (2, 0)):

        def is_present(group: int, block: int, num_kv_blocks: int = num_kv_blocks) -> bool:
            return block < num_kv_blocks if group == 0 else block in state_at

        presence = Asked(is_present, 10)
        assert longest_hit([FULL, STATE], BLOCK_TOKENS, 10, presence) == expected


def test_a_window_found_further_back_is_the_hit():
    there = {(1, 3), (1, 4)}
    hit = longest_hit(
        [FULL, window(9)],
        BLOCK_TOKENS,
        10,
        Asked(lambda group, block: group == 0 or (group, block) in there, 10),
    )
    assert hit == 5


def test_a_long_prompt_asks_for_its_last_window_only():
    presence = Asked(lambda group, block: True, 2048)
    assert longest_hit([window(512)], 64, 2048, presence) == 2048
    assert presence.asked == [(0, block) for block in range(2047, 2039, -1)]


def test_a_hit_pins_all_kv_the_last_window_and_one_state():
    layout = CacheLayout(block_tokens=BLOCK_TOKENS, groups=(FULL, window(6), STATE))
    assert pinned_blocks(layout, 10) == [range(10), range(8, 10), range(9, 10)]
    assert pinned_blocks(layout, 0) == [range(0), range(0), range(0)]
