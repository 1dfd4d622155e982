"""Blocks that a table holds, against a dictionary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.held import HeldBlocks
from prfaas.cache.pool import Entry

BLOCKS = st.integers(0, 9)
STEPS = st.lists(st.tuples(st.sampled_from(["hold", "drop"]), BLOCKS))


def entry() -> Entry:
    return Entry(pages=(0,))


@given(start=BLOCKS, num_hits=st.integers(0, 6), steps=STEPS)
def test_they_are_held_as_in_a_dictionary(start, num_hits, steps):
    hit = range(start, start + num_hits)
    entries = [entry() for _ in hit]
    held, plain = HeldBlocks(hit, entries), dict(zip(hit, entries, strict=True))
    for what, block in steps:
        if what == "hold":
            held[block] = plain[block] = entry()
        elif block in plain:
            assert held.pop(block) is plain.pop(block)
        else:
            with pytest.raises(KeyError):
                del held[block]
            with pytest.raises(KeyError):
                held[block]
        assert dict(held) == plain
        assert len(held) == len(plain)
        assert [b in held for b in range(20)] == [b in plain for b in range(20)]
        assert [held.get(b) for b in range(20)] == [plain.get(b) for b in range(20)]
        assert set(held.from_the_end()) == set(plain.values())
    held.clear()
    assert not held
    assert held.from_the_end() == []
    assert list(held) == []


def test_the_end_comes_first():
    entries = [entry() for _ in range(5)]
    held = HeldBlocks(range(2), entries[:2])
    for block in (3, 4, 2):
        held[block] = entries[block]
    assert held.from_the_end() == entries[::-1]
    del held[0]
    assert held.from_the_end() == entries[:0:-1]
