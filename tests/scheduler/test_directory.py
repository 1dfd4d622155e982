"""The directory knows what nodes said, notices what it missed, and finds the longest prefix of each."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prfaas.scheduler.directory import BlockEvent, Directory, Snapshot

KEYS = [bytes([i]) * 32 for i in range(40)]


def event(node: str, sequence: int, added=(), removed=(), epoch: int = 1) -> BlockEvent:
    return BlockEvent(
        node=node, epoch=epoch, sequence=sequence, added=tuple(added), removed=tuple(removed)
    )


def closed(**lengths: int) -> Directory:
    directory = Directory(block_tokens=1)
    for node, length in lengths.items():
        directory.apply(event(node, 1, KEYS[:length]))
    return directory


@settings(max_examples=30)
@given(
    lengths=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 40)),
    asked=st.integers(0, 40),
)
def test_a_lookup_is_the_longest_prefix_of_each_node(lengths, asked):
    expected = {node: min(length, asked) for node, length in lengths.items()}
    assert closed(**lengths).lookup(KEYS[:asked]) == {n: m for n, m in expected.items() if m}


@settings(max_examples=50)
@given(
    held=st.dictionaries(
        st.sampled_from("abcd"), st.tuples(st.integers(0, 40), st.sets(st.integers(1, 40)))
    ),
    asked=st.integers(0, 40),
)
def test_with_places_a_lookup_is_the_last_one_within_the_blocks(held, asked):
    directory = Directory(block_tokens=1, has_places=True)
    expected = {}
    for node, (length, places) in held.items():
        told = event(node, 1, KEYS[:length])
        directory.apply(replace(told, places_added=tuple(KEYS[i - 1] for i in places)))
        expected[node] = max((i for i in places if i <= min(length, asked)), default=0)
    assert directory.lookup(KEYS[:asked]) == {n: m for n, m in expected.items() if m}


def test_a_place_that_left_is_found_no_more():
    directory = Directory(block_tokens=1, has_places=True)
    directory.apply(replace(event("a", 1, KEYS[:9]), places_added=(KEYS[3], KEYS[7])))
    assert directory.lookup(KEYS) == {"a": 8}
    directory.apply(replace(event("a", 2), places_removed=(KEYS[7],)))
    assert directory.lookup(KEYS) == {"a": 4}
    directory.replace(
        Snapshot(node="a", epoch=1, sequence=2, keys=tuple(KEYS[:9]), places=(KEYS[0],))
    )
    assert directory.lookup(KEYS) == {"a": 1}
    directory.forget("a")
    assert directory.lookup(KEYS) == {}
    directory.check()


def test_a_length_is_in_tokens():
    directory = Directory(block_tokens=64)
    directory.apply(event("a", 1, KEYS[:3]))
    assert directory.lookup(KEYS) == {"a": 192}


def test_another_prompt_has_nothing_in_common():
    assert closed(a=3).lookup([b"x" * 32, KEYS[1]]) == {}
    assert closed(a=3).lookup([]) == {}
    assert Directory(block_tokens=1).lookup(KEYS) == {}


def test_a_repeated_event_tells_nothing():
    directory = closed(a=3)
    assert not directory.apply(event("a", 1, KEYS[:9]))
    assert directory.lookup(KEYS) == {"a": 3}


def test_a_gap_is_noticed_and_a_snapshot_makes_it_good():
    directory = closed(a=3)
    assert directory.apply(event("a", 3, KEYS[3:5]))
    assert directory.needs_snapshot("a")
    assert directory.lookup(KEYS) == {"a": 5}, "what was said counts all the same"
    assert not directory.replace(Snapshot(node="a", epoch=1, sequence=2, keys=()))
    assert directory.needs_snapshot("a"), "it is older than the event"
    assert directory.replace(Snapshot(node="a", epoch=1, sequence=3, keys=tuple(KEYS[:2])))
    assert not directory.needs_snapshot("a")
    assert directory.lookup(KEYS) == {"a": 2}
    assert directory.apply(event("a", 4, KEYS[2:4]))
    assert directory.lookup(KEYS) == {"a": 4}
    directory.check()


def test_a_node_that_is_joined_midway_needs_a_snapshot():
    directory = Directory(block_tokens=1)
    assert not directory.needs_snapshot("a")
    directory.apply(event("a", 7, KEYS[:1]))
    assert directory.needs_snapshot("a")


def test_a_new_epoch_begins_empty_and_the_old_one_is_over():
    directory = closed(a=9)
    assert directory.apply(event("a", 1, KEYS[:2], epoch=2))
    assert not directory.needs_snapshot("a")
    assert directory.lookup(KEYS) == {"a": 2}
    assert not directory.apply(event("a", 2, KEYS[:9], epoch=1))
    assert not directory.replace(Snapshot(node="a", epoch=1, sequence=99, keys=tuple(KEYS)))
    assert directory.lookup(KEYS) == {"a": 2}


def test_a_forgotten_node_leaves_nothing_and_its_place_is_used_again():
    directory = closed(a=9, b=4)
    directory.forget("a")
    directory.forget("nobody")
    assert directory.lookup(KEYS) == {"b": 4}
    assert directory.num_keys == 4
    directory.apply(event("c", 1, KEYS[:2]))
    assert directory.lookup(KEYS) == {"b": 4, "c": 2}
    directory.check()


@pytest.mark.parametrize(("limit", "credited"), [(0, 0), (1, 1), (4, 4), (5, 5), (6, 5)])
def test_a_node_is_credited_with_no_more_keys_than_the_limit(limit, credited):
    directory = Directory(block_tokens=1, max_keys_per_node=limit)
    directory.apply(event("a", 1, KEYS[:5]))
    assert (directory.num_keys, directory.num_refused) == (credited, 5 - credited)
    directory.apply(event("a", 2, KEYS[:credited]))
    assert directory.num_refused == 5 - credited, "what it has is not refused"
    directory.check()


def test_a_node_too_many_is_not_taken_until_one_leaves():
    directory = Directory(block_tokens=1, max_nodes=1)
    assert directory.apply(event("a", 1, KEYS[:1]))
    assert not directory.apply(event("b", 1, KEYS[:2]))
    assert not directory.replace(Snapshot(node="b", epoch=1, sequence=1, keys=tuple(KEYS)))
    directory.forget("a")
    assert directory.apply(event("b", 1, KEYS[:2]))
    assert directory.lookup(KEYS) == {"b": 2}


STEP = st.one_of(
    st.tuples(st.just("expect"), st.integers(0, 6)),
    st.tuples(st.just("add"), st.integers(0, 6)),
    st.tuples(st.just("remove"), st.integers(0, 6)),
    st.tuples(st.just("snapshot"), st.integers(0, 6)),
    st.tuples(st.just("settle"), st.just(0)),
)


def tell(directory: Directory, node: str, kind: str, keys: tuple[bytes, ...], number: int) -> None:
    if kind == "settle":
        directory.settle(node)
    elif kind == "snapshot":
        directory.replace(Snapshot(node=node, epoch=1, sequence=number, keys=keys, places=keys))
    else:
        added, removed = (keys, ()) if kind == "add" else ((), keys)
        told = event(node, number + 1, added, removed)
        directory.apply(replace(told, places_added=added, places_removed=removed))
    directory.check()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("ab"), STEP), max_size=12), st.booleans())
def test_what_was_expected_of_a_node_is_soon_what_it_has_said(steps, has_places):
    said, expecting = (Directory(block_tokens=1, has_places=has_places) for _ in range(2))
    sequences = {"a": 0, "b": 0}
    for node, (kind, length) in steps:
        keys = tuple(KEYS[:length])
        if kind == "expect":
            expecting.expect(node, keys)
            assert not length or not sequences[node] or expecting.lookup(keys)[node] == length
            continue
        for directory in (said, expecting):
            tell(directory, node, kind, keys, sequences[node])
        sequences[node] += kind in ("add", "remove")
    for _ in range(2):
        for node in "ab":
            expecting.settle(node)
    for length in range(7):
        assert expecting.lookup(KEYS[:length]) == said.lookup(KEYS[:length])


def test_what_is_expected_outlives_one_word_that_may_have_been_under_way():
    directory = closed(a=2)
    directory.expect("a", KEYS[:5])
    directory.settle("a")
    assert directory.lookup(KEYS) == {"a": 5}
    directory.apply(event("a", 2, KEYS[2:4]))
    directory.settle("a")
    assert directory.lookup(KEYS) == {"a": 4}


def test_a_node_that_has_said_nothing_is_expected_to_have_nothing():
    directory = closed()
    directory.expect("a", KEYS[:5])
    assert directory.lookup(KEYS) == {}


class DirectoryMachine(RuleBasedStateMachine):
    """Nodes whose events are lost, repeated and late; a model of what each one has said."""

    @initialize()
    def start(self):
        self.directory = Directory(block_tokens=1)
        self.caches: dict[str, tuple[int, int, set[bytes]]] = {node: (1, 0, set()) for node in "ab"}

    @rule(
        node=st.sampled_from("ab"),
        added=st.sets(st.sampled_from(KEYS[:6])),
        removed=st.sets(st.sampled_from(KEYS[:6])),
        copies=st.sampled_from([0, 1, 1, 1, 2]),
    )
    def change(self, node, added, removed, copies):
        epoch, sequence, keys = self.caches[node]
        self.caches[node] = (epoch, sequence + 1, (keys - removed) | added)
        for _ in range(copies):
            self.directory.apply(event(node, sequence + 1, added, removed, epoch))

    @rule(node=st.sampled_from("ab"))
    def restart(self, node):
        self.caches[node] = (self.caches[node][0] + 1, 0, set())

    @rule(node=st.sampled_from("ab"))
    def snapshot(self, node):
        epoch, sequence, keys = self.caches[node]
        taken = Snapshot(node=node, epoch=epoch, sequence=sequence, keys=tuple(keys))
        assert self.directory.replace(taken)
        for key in KEYS[:6]:
            assert (node in self.directory.lookup([key])) == (key in keys)

    @rule(node=st.sampled_from("ab"))
    def forget(self, node):
        self.directory.forget(node)
        assert node not in self.directory.lookup(KEYS[:6])

    @invariant()
    def the_index_is_what_nodes_have(self):
        self.directory.check()


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
