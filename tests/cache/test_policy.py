"""Work saved per byte decides who leaves and who is stored; replayed beside plain LRU."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.policy import (
    COLD,
    MIN_HUSKS,
    EvictionOrder,
    Run,
    dense_worth,
    is_worth_disk,
    level_of,
    prompt_worth,
    worth_of,
)
from prfaas.cache.spec import CacheLayout, FullSpec, StateSpec, WindowSpec
from scripts.bench.cache_replay import ATTENTION, HYBRID, WINDOWED, hit_fraction, sample

MIB = 1 << 20
LAYOUT = CacheLayout(
    block_tokens=64,
    groups=(
        FullSpec(name="full", layers=(0, 1), page_bytes=64 * 512),
        WindowSpec(name="window", layers=(2,), page_bytes=64 * 256, window_tokens=129),
        StateSpec(name="state", layers=(3, 4), page_bytes=64 * 512, state_bytes=MIB),
    ),
)


def test_a_block_of_attention_saves_its_own_tokens_wherever_it_is():
    assert {worth_of(LAYOUT, 0, at, 0) for at in (64, 6400)} == {64 * MIB / (2 * 64 * 512)}


def test_a_snapshot_saves_what_lies_between_it_and_the_hit_before_it():
    assert worth_of(LAYOUT, 2, 6400, 0) == 6400 / 2
    assert worth_of(LAYOUT, 2, 6400, 6336) == 64 / 2
    assert worth_of(LAYOUT, 2, 6400, 6400) == 64 / 2
    assert worth_of(LAYOUT, 1, 6400, 0) == 6400 * MIB / (2 * 64 * 256)


def test_a_window_that_needs_no_block_is_worth_something():
    narrow = WindowSpec(name="narrow", layers=(0,), page_bytes=64 << 10, window_tokens=1)
    layout = CacheLayout(block_tokens=64, groups=(narrow,))
    assert worth_of(layout, 0, 640, 0) == 640 * 16


def test_deep_in_a_long_prompt_a_snapshot_outranks_its_bytes():
    assert worth_of(LAYOUT, 2, 64, 0) < worth_of(LAYOUT, 0, 64, 0) < worth_of(LAYOUT, 2, 8192, 0)


@dataclass(eq=False)
class Named:
    """An item that can wait."""

    name: str
    place: Run | None = None


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("use"),
            st.sets(st.integers(0, 9), max_size=4),
            st.sampled_from([-1, 0, 0, 4, 9]),
        ),
        st.tuples(st.just("pop"), st.just(set()), st.just(0)),
    ),
    max_size=60,
)


@given(STEPS)
def test_the_order_is_that_of_the_least_rank_and_then_of_use(steps):
    """Against a list of ranks; a level below 0 is cold."""
    order: EvictionOrder[Named] = EvictionOrder()
    items = [Named(str(n)) for n in range(10)]
    ranks: dict[Named, tuple[float, int, int]] = {}
    clock, num_uses = 0.0, 0
    for what, used, level in steps:
        if what == "use":
            order.use([items[n] for n in sorted(used)], COLD if level < 0 else level)
            for n in sorted(used):
                num_uses += 1
                rank = float("-inf") if level < 0 else clock + 2 ** (level / 4)
                ranks[items[n]] = (rank, level, num_uses)
        elif ranks:
            expected = min(ranks, key=lambda item: ranks[item])
            clock = max(clock, ranks.pop(expected)[0])
            assert order.pop() is expected
        order.check()
        assert len(order) == len(ranks)
        assert {item for item in items if item.place is not None} == ranks.keys()


def test_levels_are_a_fifth_apart():
    assert level_of(1.0) == 0
    assert level_of(2.0) == level_of(1.0) + 4
    assert {level_of(1.0 + n / 100) for n in range(19)} == {0, 1}


def test_what_is_worth_ten_times_as_much_outlives_ten_times_as_many():
    order: EvictionOrder[Named] = EvictionOrder()
    dear = Named("dear")
    order.use([dear], level_of(10.0))
    num_left = 1
    while True:
        order.use([Named(f"cheap {num_left}")], level_of(1.0))
        if order.pop() is dear:
            break
        num_left += 1
    assert 9 <= num_left <= 11


def test_cold_ones_leave_first_whatever_they_are_worth():
    order: EvictionOrder[Named] = EvictionOrder()
    warm, cold = Named("warm"), Named("cold")
    order.use([warm], level_of(1.0))
    order.use([cold], COLD)
    assert order.pop() is cold


@pytest.mark.parametrize("damage", ["empty", "uncount", "twice"])
def test_an_order_that_lost_or_doubled_an_item_is_noticed(damage):
    order: EvictionOrder[Named] = EvictionOrder()
    item = Named("item")
    order.use([item], 0)
    assert item.place is not None
    if damage == "empty":
        item.place.items.clear()
    elif damage == "uncount":
        item.place.num_waiting = 2
    else:
        item.place.items.append(item)
    with pytest.raises(AssertionError, match=r"would never leave|waits twice"):
        order.check()


def test_what_is_used_over_and_over_leaves_no_husks_behind():
    order: EvictionOrder[Named] = EvictionOrder()
    items = [Named(str(n)) for n in range(10)]
    order.use([Named("another") for _ in range(3)], 0)
    for number in range(5_000):
        order.use(items[number % 4 :], number % 7)
        order.use(items, 0)
    order.check()
    runs = {id(run): run for queue in order._queues.values() for run in queue}
    assert len(runs) <= 13
    assert sum(len(run.items) for run in runs.values()) <= 2 * 13 + 13 * MIN_HUSKS
    assert len(order) == 13


def test_a_chat_that_goes_on_is_worth_more_than_a_new_prompt():
    new, opening, turn = (prompt_worth(LAYOUT, hit, 1024) for hit in (0, 448, 512))
    assert new == opening == dense_worth(LAYOUT)
    assert turn == 2 * new
    assert prompt_worth(LAYOUT, 0, 0) == new


def test_the_disk_takes_what_saves_much_for_its_bytes_and_what_is_wanted_twice():
    dense = dense_worth(LAYOUT)
    assert dense == worth_of(LAYOUT, 0, 64, 0)
    assert is_worth_disk(dense, dense, is_second_sight=False)
    assert not is_worth_disk(worth_of(LAYOUT, 2, 64, 0), dense, is_second_sight=False)
    assert is_worth_disk(worth_of(LAYOUT, 2, 64, 0), dense, is_second_sight=True)
    assert is_worth_disk(worth_of(LAYOUT, 2, 4096, 0), dense, is_second_sight=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "num_pages"),
    [(ATTENTION, 800), (HYBRID, 800), (HYBRID, 2500), (WINDOWED, 800)],
    ids=["full", "state", "state-large", "window"],
)
def test_replayed_it_finds_more_than_lru_and_no_more_than_infinity(num_pages, layout):
    prompts = sample(700)
    ours, lru, plain = (
        hit_fraction(prompts, layout, num_pages, policy=policy)
        for policy in ("ours", "lru", "plain_lru")
    )
    infinite = hit_fraction(prompts, layout, 40_000 * layout.pages_per_block)
    assert 0 < ours <= infinite
    assert ours >= lru
    assert ours >= plain


def test_the_sample_has_the_statistics_of_the_trace():
    prompts = sample(3000)
    lengths = sorted(len(prompt.block_ids) for prompt in prompts)
    seen: set[int] = set()
    num_hits = 0
    for prompt in prompts:
        blocks = prompt.block_ids
        num_hits += next((n for n, b in enumerate(blocks) if b not in seen), len(blocks))
        seen.update(blocks)
    assert 10 <= lengths[1500] <= 20
    assert 18 <= sum(lengths) / 3000 <= 32
    assert 0.30 <= num_hits / sum(lengths) <= 0.6
