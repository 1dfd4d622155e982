"""Keys and places are those that a look at every block gives, whatever comes and goes, in any order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.cache.chains import Chains, Told
from prfaas.cache.hashing import block_keys
from prfaas.cache.spec import CacheLayout, FullSpec, GroupSpec, StateSpec, WindowSpec, held_blocks

TOKENS = 2
FULL = FullSpec(name="full", layers=(0,), page_bytes=8)
OTHER = FullSpec(name="other", layers=(1,), page_bytes=16)
WINDOW = WindowSpec(name="window", layers=(2,), page_bytes=8, window_tokens=6)
ODD = WindowSpec(name="odd", layers=(3,), page_bytes=8, window_tokens=4)
NARROW = WindowSpec(name="narrow", layers=(5,), page_bytes=8, window_tokens=1)
STATE = StateSpec(name="state", layers=(4,), page_bytes=8, state_bytes=12)
LAYOUTS = {
    "dense": (FULL,),
    "two dense": (FULL, OTHER),
    "windows": (FULL, WINDOW, ODD, NARROW),
    "states": (FULL, STATE),
    "all": (OTHER, WINDOW, STATE, FULL),
    "windows alone": (WINDOW, ODD),
    "states alone": (STATE,),
}
PROMPTS = [[*prompt] for prompt in ("aabbccddee", "aabbccxxyyzz", "aabbxx", "ffgghhii")]
CHAINS = [block_keys(b"", [ord(letter) for letter in prompt], TOKENS) for prompt in PROMPTS]


def layout_of(groups: tuple[GroupSpec, ...]) -> CacheLayout:
    return CacheLayout(block_tokens=TOKENS, groups=groups)


def expected_places(layout: CacheLayout, there: set[tuple[int, bytes]]) -> set[bytes]:
    """The ends of all prompts that every group can go on behind."""
    return {
        chain[blocks - 1]
        for chain in CHAINS
        for blocks in range(1, len(chain) + 1)
        if all(
            (group, chain[block]) in there
            for group, spec in enumerate(layout.groups)
            for block in held_blocks(spec, blocks * TOKENS, TOKENS)
        )
    }


def expected_keys(layout: CacheLayout, there: set[tuple[int, bytes]]) -> set[bytes]:
    """Blocks whose full groups are there from the beginning; without such, those before any that is."""
    full = [g for g, spec in enumerate(layout.groups) if isinstance(spec, FullSpec)]
    found = set()
    for chain in CHAINS:
        for blocks in range(1, len(chain) + 1):
            if full:
                is_key = all((g, key) in there for g in full for key in chain[:blocks])
            else:
                ahead = chain[blocks - 1 :]
                is_key = any((g, key) in there for g in range(len(layout.groups)) for key in ahead)
            if is_key:
                found.add(chain[blocks - 1])
    return found


STEPS = st.lists(
    st.tuples(
        st.integers(0, len(CHAINS) - 1),
        st.integers(0, 5),
        st.integers(0, 3),
        st.sampled_from(["came", "came", "came", "left", "went to disk", "left disk"]),
    ),
    max_size=60,
)


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=list(LAYOUTS))
@settings(max_examples=40, deadline=None)
@given(steps=STEPS, is_in_order=st.booleans())
def test_keys_and_places_are_those_that_every_group_can_serve(groups, steps, is_in_order):
    layout = layout_of(groups)
    chains = Chains(layout)
    ram: set[tuple[int, bytes]] = set()
    disk: set[tuple[int, bytes]] = set()
    if is_in_order:  # what prefills of the first two leave
        came = [(chain, b, g, "came") for chain in (0, 1) for b in range(6) for g in range(4)]
        steps = [*came, *steps]
    for chain, block, number, what in steps:
        keys, group = CHAINS[chain], number % len(groups)
        if block >= len(keys):
            continue
        page = (group, keys[block])
        if what == "came":
            ram.add(page)
            chains.came(group, keys, block)
        elif what == "left disk":
            disk.discard(page)
            chains.left_disk(*page)
        elif page in ram:
            ram.remove(page)
            if what == "went to disk":
                disk.add(page)
            else:
                disk.discard(page)
            chains.left(*page, is_on_disk=what == "went to disk")
        chains.check()
        assert set(chains.keys.keys) == expected_keys(layout, ram | disk)
        if chains.has_places:
            assert set(chains.places.keys) == expected_places(layout, ram | disk)
        assert disk - ram <= set(chains.on_disk())
    for page in ram | disk:
        chains.left(*page, is_on_disk=False)
    assert (len(chains), len(chains.keys.keys), len(chains.places.keys)) == (0, 0, 0)


def test_full_attention_alone_has_no_places():
    chains = Chains(layout_of((FULL,)))
    chains.came(0, CHAINS[0], 0)
    assert not chains.has_places
    assert not chains.places.keys


def test_blocks_beyond_the_limit_are_neither_keys_nor_kept():
    chains = Chains(layout_of((FULL,)), max_blocks=4)
    for block in range(5):
        chains.came(0, CHAINS[0], block)
    assert set(chains.keys.keys) == set(CHAINS[0][:4])
    chains.left(0, CHAINS[0][4], is_on_disk=False)
    chains.left(0, CHAINS[0][3], is_on_disk=False)
    chains.came(0, CHAINS[1], 0)  # it is the first block of both
    chains.came(0, CHAINS[3], 0)
    assert len(chains) == 4
    chains.check()


# ---------------------------------------------------------------- what others know


@given(
    st.lists(st.tuples(st.sampled_from(["flip", "take", "all"]), st.integers(0, 7)), max_size=80)
)
def test_what_is_taken_leads_from_what_others_know_to_the_set(steps):
    told, known = Told(), set[bytes]()
    for what, number in steps:
        key = bytes([number])
        if what == "all":
            known = set(told.take_all())
        elif what == "take":
            removed, added = told.take_removed(number), told.take_added(number)
            assert len(removed) <= number
            assert len(added) <= number
            assert set(removed) <= known
            assert not set(added) & known
            known = known - set(removed) | set(added)
        elif key in told.keys:
            told.remove(key)
        else:
            told.add(key)
        assert known - set(told.removed) | set(told.added) == set(told.keys)
