"""Work saved per byte decides who leaves and who is stored; replayed beside plain LRU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.policy import EvictionOrder, dense_worth, is_worth_disk, worth_of
from prfaas.cache.spec import CacheLayout, FullSpec, StateSpec, WindowSpec
from scripts.bench.cache_replay import ATTENTION, HYBRID, hit_fraction, sample

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


def test_deep_in_a_long_prompt_a_snapshot_outranks_its_bytes():
    assert worth_of(LAYOUT, 2, 64, 0) < worth_of(LAYOUT, 0, 64, 0) < worth_of(LAYOUT, 2, 8192, 0)


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["use", "leave"]))))
def test_equal_worth_is_plain_lru(steps):
    order: EvictionOrder[int] = EvictionOrder()
    lru: list[int] = []
    for item, what in steps:
        if what == "use":
            order.add(item, order.rank(5.0))
            lru = [*(other for other in lru if other != item), item]
        elif lru:
            assert order.pop() == lru.pop(0)
        order.check()
        assert len(order) == len(lru)


def test_what_is_worth_ten_times_as_much_outlives_ten_times_as_many():
    order: EvictionOrder[str] = EvictionOrder()
    order.add("dear", order.rank(10.0))
    left = []
    for number in range(20):
        order.add(f"cheap {number}", order.rank(1.0))
        left.append(order.pop())
        if left[-1] == "dear":
            break
    assert len(left) == 10


def test_cold_ones_leave_first_whatever_they_are_worth():
    order: EvictionOrder[str] = EvictionOrder()
    order.add("warm", order.rank(1.0))
    order.add("cold", order.rank(100.0, is_cold=True))
    assert order.pop() == "cold"


def test_an_order_that_lost_an_item_is_noticed():
    order: EvictionOrder[str] = EvictionOrder()
    order.add("item", order.rank(1.0))
    order._heap.clear()
    with pytest.raises(AssertionError, match="would never leave"):
        order.check()


def test_the_heap_stays_as_small_as_what_waits():
    order: EvictionOrder[int] = EvictionOrder()
    for number in range(10_000):
        order.add(number % 10, order.rank(float(number % 7)))
    assert len(order._heap) <= 2 * 10 + 65


def test_the_disk_takes_what_saves_much_for_its_bytes_and_what_is_wanted_twice():
    dense = dense_worth(LAYOUT)
    assert dense == worth_of(LAYOUT, 0, 64, 0)
    assert is_worth_disk(dense, dense, is_second_sight=False)
    assert not is_worth_disk(worth_of(LAYOUT, 2, 64, 0), dense, is_second_sight=False)
    assert is_worth_disk(worth_of(LAYOUT, 2, 64, 0), dense, is_second_sight=True)
    assert is_worth_disk(worth_of(LAYOUT, 2, 4096, 0), dense, is_second_sight=False)


@pytest.mark.slow
@pytest.mark.parametrize("num_pages", [800, 2500])
def test_replayed_it_finds_no_less_than_lru_and_no_more_than_infinity(num_pages):
    prompts = sample(800)
    for layout in (ATTENTION, HYBRID):
        ours = hit_fraction(prompts, layout, num_pages)
        lru = hit_fraction(prompts, layout, num_pages, is_lru=True)
        infinite = hit_fraction(prompts, layout, 40_000)
        assert lru <= ours <= infinite
        assert ours > 0


def test_the_sample_has_the_statistics_of_the_trace():
    prompts = sample(3000)
    lengths = sorted(len(prompt) for prompt in prompts)
    seen: set[int] = set()
    num_hits = 0
    for prompt in prompts:
        num_hits += next((n for n, b in enumerate(prompt) if b not in seen), len(prompt))
        seen.update(prompt)
    assert 10 <= lengths[1500] <= 20
    assert 18 <= sum(lengths) / 3000 <= 32
    assert 0.30 <= num_hits / sum(lengths) <= 0.6
