"""The account of pages, and the arena under them."""

import ctypes
import mmap

import numpy as np
import pytest
import torch

from prfaas.cache.pool import PagePool
from prfaas.errors import ConfigError


def test_a_new_pool_is_free_and_gives_each_page_once():
    pool = PagePool(10 * 32 + 31, 32)
    with pool.lock:
        assert pool.num_free == pool.num_pages == 10
        entries = pool.try_take([3, 3, 4], is_transfer=False)
        assert entries is not None
        assert [entry.pages for entry in entries] == [(0, 1, 2), (3, 4, 5), (6, 7, 8, 9)]
        assert pool.try_take([1], is_transfer=False) is None
        pool.check()
    pool.close()


def test_a_pool_smaller_than_a_page_names_both_sizes():
    with pytest.raises(ConfigError, match=r"31 .*32"):
        PagePool(31, 32)


@pytest.mark.parametrize("ram_bytes", [1 << 60, 1 << 70])
def test_more_memory_than_there_is_is_a_config_error(ram_bytes):
    with pytest.raises(ConfigError, match=f"does not give {ram_bytes} bytes"):
        PagePool(ram_bytes, 1 << 40)


def test_taking_more_than_there_is_changes_nothing():
    pool = PagePool(4 * 32, 32)
    with pool.lock:
        (entry,) = pool.try_take([2], is_transfer=False) or []
        pool.publish(entry, (0, b"key"))
        pool.let_go(entry)
        assert pool.try_take([3, 2], is_transfer=True) is None
        assert b"key" in pool.published(0)
        assert (pool.num_free, pool.num_cached, pool.num_transfer) == (2, 2, 0)
        assert pool.num_evictions == 0
        pool.check()
    pool.close()


def test_cold_entries_go_first_then_the_least_recently_let_go():
    pool = PagePool(4, 1)
    with pool.lock:
        entries = pool.try_take([1, 1, 1, 1], is_transfer=False)
        assert entries is not None
        for name, entry in zip(b"abcd", entries, strict=True):
            pool.publish(entry, (0, bytes([name])))
        for name, is_cold in zip((0, 1, 2, 3), (False, True, False, True), strict=True):
            pool.let_go(entries[name], is_cold=is_cold)
        pool.hold([entries[0]])
        pool.let_go(entries[0])  # used again: now the most recent
        gone = []
        for _ in range(4):
            assert pool.try_take([1], is_transfer=False) is not None
            gone += [n for n in b"abcd" if bytes([n]) not in pool.published(0) and n not in gone]
        assert bytes(gone) == b"bdca"
        assert pool.num_evictions == 4
        pool.check()
    pool.close()


def test_an_entry_that_is_held_is_not_evicted():
    pool = PagePool(2, 1)
    with pool.lock:
        (first, second) = pool.try_take([1, 1], is_transfer=False) or []
        pool.publish(first, (0, b"a"))
        pool.publish(second, (0, b"b"))
        pool.let_go(first)
        pool.hold([first])
        assert pool.try_take([1], is_transfer=False) is None
        pool.check()
    pool.close()


def test_an_unpublished_entry_frees_its_pages_at_once():
    pool = PagePool(2, 1)
    with pool.lock:
        (entry,) = pool.try_take([2], is_transfer=True) or []
        assert pool.num_transfer == 2
        pool.let_go(entry)
        assert (pool.num_free, pool.num_transfer) == (2, 0)
        pool.check()
        with pytest.raises(AssertionError, match="more often"):
            pool.let_go(entry)
    pool.close()


def test_a_view_of_a_free_or_idle_page_is_refused():
    pool = PagePool(2, 1)
    with pytest.raises(AssertionError, match="page 0 is free"):
        pool.view(0)
    with pool.lock:
        (entry,) = pool.try_take([1], is_transfer=False) or []
        pool.publish(entry, (0, b"a"))
        pool.let_go(entry)
    with pytest.raises(AssertionError, match="held by nobody"):
        pool.view(0)
    pool.close()


def test_pages_are_windows_of_one_arena_that_torch_can_write():
    pool = PagePool(3 * 16, 16)
    with pool.lock:
        assert pool.try_take([3], is_transfer=False)
    whole = torch.frombuffer(pool.arena, dtype=torch.float32)
    torch.frombuffer(pool.view(1), dtype=torch.float32).fill_(2.5)
    assert whole.tolist() == [0.0] * 4 + [2.5] * 4 + [0.0] * 4
    pool.view(2)[:4] = torch.tensor([7.0]).numpy().tobytes()
    assert whole[8] == 7.0
    assert [len(pool.view(page)) for page in range(3)] == [16, 16, 16]


def test_bytes_that_someone_still_looks_at_outlive_the_pool():
    pool = PagePool(16, 16)
    with pool.lock:
        assert pool.try_take([1], is_transfer=False)
    tensor = torch.frombuffer(pool.view(0), dtype=torch.uint8)
    tensor.fill_(3)
    pool.close()
    assert tensor.tolist() == [3] * 16
    with pytest.raises(ValueError, match="released"):
        pool.arena[0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.append(0),
        lambda pool: pool._free.pop(),
        lambda pool: pool._index.clear(),
        lambda pool: next(iter(pool._order._queues.values())).clear(),
        lambda pool: setattr(pool, "_num_cached", 2),
        lambda pool: setattr(pool, "_num_transfer", 1),
    ],
)
def test_check_notices_a_damaged_account(damage):
    pool = PagePool(4, 1)
    with pool.lock:
        (entry,) = pool.try_take([1], is_transfer=False) or []
        pool.publish(entry, (0, b"a"))
        pool.let_go(entry)
        pool.check()
        damage(pool)
        with pytest.raises(AssertionError):
            pool.check()
    pool.close()


def test_memory_ahead_is_that_of_pages_nobody_took_and_changes_no_byte():
    num_pages, page_bytes = 16, 1 << 20
    pool = PagePool(num_pages * page_bytes, page_bytes)
    with pool.lock:
        (entry, _) = pool.try_take([2, 3], is_transfer=False) or []
    pool.view(entry.pages[0])[:] = b"a" * page_bytes
    with pool.lock:
        pool.let_go(entry)  # free again, and no longer fresh
    resident = [resident_pages(pool, page) for page in range(num_pages)]
    assert [share > 0 for share in resident] == [True] + [False] * 15
    pool.prefault(4 * page_bytes)
    expected = [True] + [False] * 4 + [True] * 4 + [False] * 7
    assert [resident_pages(pool, page) == 1 for page in range(num_pages)] == expected
    pool.prefault(100 * page_bytes)
    assert all(resident_pages(pool, page) == 1 for page in range(5, num_pages))
    assert bytes(pool.arena[:page_bytes]) == b"a" * page_bytes
    assert not any(pool.arena[page_bytes:])
    with pool.lock:
        pool.check()
    pool.close()


def resident_pages(pool: PagePool, page: int) -> float:
    """The part of one pool page that there is memory behind."""
    array = np.frombuffer(pool.arena[:], dtype=np.uint8)
    present = (ctypes.c_ubyte * (pool.page_bytes // mmap.PAGESIZE))()
    start = ctypes.c_void_p(array.ctypes.data + page * pool.page_bytes)
    assert ctypes.CDLL(None).mincore(start, ctypes.c_size_t(pool.page_bytes), present) == 0
    return sum(byte & 1 for byte in present) / len(present)
