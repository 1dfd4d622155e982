"""What of a prompt is in RAM and on disk, against asking block by block."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prfaas.cache import presence as presence_module
from prfaas.cache.pool import PageKey, PagePool
from prfaas.cache.presence import InRam, InRamOrOnDisk, absent_blocks

NUM_BLOCKS = 8
KEYS = [bytes([n]) * 32 for n in range(NUM_BLOCKS)]
PLACES = st.sets(st.tuples(st.integers(0, 1), st.integers(0, NUM_BLOCKS - 1)))


class Noting:
    """A store that knows some records, and notes what it is asked about."""

    def __init__(self, places: set[tuple[int, int]]) -> None:
        self._known = {(group, KEYS[block]) for group, block in places}
        self.asked: list[PageKey] = []

    def known(self, key: PageKey) -> bool:
        self.asked.append(key)
        return key in self._known

    def num_known(self, group: int, keys: Sequence[bytes]) -> int:
        self.asked += [(group, key) for key in keys]
        return next((n for n, k in enumerate(keys) if (group, k) not in self._known), len(keys))


@pytest.mark.parametrize("stretch", [1, 3, 256])
@given(in_ram=PLACES, on_disk=PLACES)
def test_it_says_of_each_block_where_it_is(stretch, in_ram, on_disk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presence_module, "STRETCH", stretch)
        check_presence(in_ram, on_disk)


def check_presence(in_ram: set[tuple[int, int]], on_disk: set[tuple[int, int]]) -> None:
    pool = PagePool(100, 1)
    store = Noting(on_disk)
    with pool.lock:
        for group, block in in_ram:
            entries = pool.try_take([1], is_transfer=False)
            assert entries is not None
            pool.publish(entries[0], (group, KEYS[block]))
        ram = InRam(pool, KEYS)
        both = InRamOrOnDisk(ram, store)
        for presence, places in ((ram, in_ram), (both, in_ram | on_disk)):
            for group in (0, 1):
                blocks = range(NUM_BLOCKS)
                assert [presence.has(group, b) for b in blocks] == [
                    (group, b) in places for b in blocks
                ]
                leading = next((b for b in blocks if (group, b) not in places), NUM_BLOCKS)
                assert presence.leading(group) == leading
        for group in (0, 1):
            some = ram.some(group, range(2, 6))
            assert [entry is not None for entry in some] == [
                (group, b) in in_ram for b in range(2, 6)
            ]
            absent = absent_blocks(range(2, 6), some)
            assert list(absent) == [b for b in range(2, 6) if (group, b) not in in_ram]
        asked = {(group, KEYS.index(key)) for group, key in store.asked}
        assert not asked & in_ram, "the disk was asked for what RAM has"
    pool.close()


def test_what_was_asked_of_the_disk_is_not_asked_again():
    pool = PagePool(1, 1)
    store = Noting({(0, 0), (0, 1)})
    with pool.lock:
        both = InRamOrOnDisk(InRam(pool, KEYS), store)
        assert both.leading(0) == both.leading(0) == 2
    assert len(store.asked) == NUM_BLOCKS
    pool.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, NUM_BLOCKS - 1)), max_size=40))
@example([(True, 0), (True, 1), (False, 0), (True, 0)])
@example([(True, 0), (True, 1), (True, 2), (False, 1), (True, 1)])
def test_a_prompt_is_walked_whatever_came_and_left_in_whatever_order(steps):
    """Blocks lead as far as each is there, also where one came before or after its neighbours."""
    pool = PagePool(NUM_BLOCKS, 1)
    there: set[int] = set()
    with pool.lock:
        for is_coming, block in steps:
            if is_coming and block not in there:
                taken = pool.try_take([1], is_transfer=False)
                assert taken is not None
                before = KEYS[block - 1] if block else None
                pool.let_go(pool.publish(taken[0], (0, KEYS[block]), before=before))
                there.add(block)
            elif not is_coming and block in there:
                leave(pool, KEYS[block])
                there.remove(block)
            ram = InRam(pool, KEYS)
            leading = next((b for b in range(NUM_BLOCKS) if b not in there), NUM_BLOCKS)
            assert ram.leading(0) == leading
            entries = ram.some(0, range(leading))
            assert entries == [pool.published(0)[key] for key in KEYS[:leading]]
        pool.check()
    pool.close()


def leave(pool: PagePool, key: bytes) -> None:
    """Have one entry evicted: it becomes the first to go, and all pages but one are asked for."""
    pool.chill((0, key))
    taken = pool.try_take([1] * (pool.num_free + 1), is_transfer=False)
    assert taken is not None
    for entry in taken:
        pool.let_go(entry)
    assert key not in pool.published(0)
