"""The global KVCache directory: which node can continue a prompt after which of its blocks.

Soft state, told by the nodes. Each numbers what it says within an epoch, the life of its cache; what is
missing is noticed by its number, and a snapshot makes it good. Until then, and whenever a node is late
to say what left, a lookup promises too much or too little: it is a prediction, never a lease. What a node
is about to have can be entered before it says so, and is taken back unless it does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from prfaas.scheduler.key_index import Found, KeyIndex

MAX_NODES = 1024
MAX_KEYS_PER_NODE = 1 << 20
"""64 GiB of cache have so many blocks of 64 KiB."""
MAX_NAMED = 4096
"""Sets of nodes whose names are kept at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvent:
    """What changed in a node's cache since its event before; what left is taken away first."""

    node: str
    epoch: int
    """Grows each time the node's cache begins anew, empty."""
    sequence: int
    """1 is the first event of an epoch; each one after it is one more."""
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    """Blocks, by their keys."""
    places_added: tuple[bytes, ...] = ()
    places_removed: tuple[bytes, ...] = ()
    """Blocks after which it has the states and windows, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a node's cache had after an event."""

    node: str
    epoch: int
    sequence: int
    """Of the last event that it has; 0 if there was none."""
    keys: tuple[bytes, ...]
    places: tuple[bytes, ...] = ()


class _Expected(dict[bytes, bool]):
    """Keys that a node is credited with and has not told of -> whether it has said anything since."""

    def told(self, *keys: Sequence[bytes]) -> None:
        """Expect no more of keys of which the node has spoken."""
        if self:
            for key in chain(*keys):
                self.pop(key, None)

    def enter(self, node: int, keys: Sequence[bytes], index: KeyIndex) -> None:
        """Credit a node with keys, as far as it has not told of them."""
        self.update(dict.fromkeys(index.lacking(node, keys), False))
        index.add(node, keys)

    def settle(self, node: int, index: KeyIndex) -> None:
        """Take back what the node has passed over twice: what it said first may have been under way."""
        overdue = [key for key, is_old in self.items() if is_old]
        index.remove(node, overdue)
        self.told(overdue)
        self.update(dict.fromkeys(self, True))


@dataclass(slots=True)
class _Node:
    bit: int
    epoch: int
    sequence: int = 0
    is_whole: bool = True
    expected: _Expected = field(default_factory=_Expected)
    expected_places: _Expected = field(default_factory=_Expected)


class Directory:
    """Block keys -> nodes, for lookups of the longest prefix that each node can continue.

    A key names all tokens up to its block's end, and a node that has a block is taken to have those
    before it: pages leave a chain from its end. With `has_places`, of models with states or
    windows, a prompt is continued only at places that the node has named.
    """

    def __init__(
        self,
        *,
        block_tokens: int,
        has_places: bool = False,
        max_nodes: int = MAX_NODES,
        max_keys_per_node: int = MAX_KEYS_PER_NODE,
    ) -> None:
        self._block_tokens = block_tokens
        self._max_nodes = max_nodes
        self._blocks = KeyIndex(max_keys_per_node=max_keys_per_node)
        self._places = KeyIndex(max_keys_per_node=max_keys_per_node) if has_places else None
        self._nodes: dict[str, _Node] = {}
        self._names: list[str | None] = []
        """By bit; None is free."""
        self._names_of: dict[int, tuple[str, ...]] = {}
        """Of bits that lookups have met, as long as their nodes stay the same."""

    @property
    def num_keys(self) -> int:
        """Return how many blocks some node has."""
        return len(self._blocks)

    @property
    def num_refused(self) -> int:
        """Return the blocks and places that full nodes were not credited with."""
        return self._blocks.num_refused + (self._places.num_refused if self._places else 0)

    def apply(self, event: BlockEvent) -> bool:
        """Take note of an event; return whether it told anything: it is not a repetition.

        After a gap it still counts, and the node needs a snapshot. Events of a node that would be one
        too many are not taken.
        """
        node = self._at(event.node, event.epoch)
        if node is None or event.sequence <= node.sequence:
            return False
        if event.sequence != node.sequence + 1:
            node.is_whole = False
        node.sequence = event.sequence
        node.expected.told(event.removed, event.added)
        node.expected_places.told(event.places_removed, event.places_added)
        self._blocks.remove(node.bit, event.removed)
        self._blocks.add(node.bit, event.added)
        if self._places is not None:
            self._places.remove(node.bit, event.places_removed)
            self._places.add(node.bit, event.places_added)
        return True

    def replace(self, snapshot: Snapshot) -> bool:
        """Take a snapshot for all that a node has; return False for one that is older than its events."""
        node = self._at(snapshot.node, snapshot.epoch)
        if node is None or snapshot.sequence < node.sequence:
            return False
        self._blocks.replace(node.bit, snapshot.keys)
        if self._places is not None:
            self._places.replace(node.bit, snapshot.places)
        node.sequence, node.is_whole = snapshot.sequence, True
        node.expected.clear()
        node.expected_places.clear()
        return True

    def expect(self, name: str, keys: Sequence[bytes]) -> None:
        """Credit a node with a prefix that it is about to tell of; of one that has said nothing, do not.

        `keys` are the prefix's, in order, and it can be continued behind the last one.
        """
        node = self._nodes.get(name)
        if node is not None and keys:
            node.expected.enter(node.bit, keys, self._blocks)
            if self._places is not None:
                node.expected_places.enter(node.bit, keys[-1:], self._places)

    def settle(self, name: str) -> None:
        """Take back what a node was credited with that it has not told of; to be called with each word of it."""
        node = self._nodes.get(name)
        if node is not None:
            node.expected.settle(node.bit, self._blocks)
            if self._places is not None:
                node.expected_places.settle(node.bit, self._places)

    def needs_snapshot(self, name: str) -> bool:
        """Return whether something that the node said is missing; a node unknown here has said nothing."""
        return name in self._nodes and not self._nodes[name].is_whole

    def forget(self, name: str) -> None:
        """Drop a node that is gone, with all it had; unknown ones are gone already."""
        node = self._nodes.pop(name, None)
        if node is not None:
            self._clear(node)
            self._names[node.bit] = None
            self._names_of.clear()

    def lookup(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Return how many leading tokens of a prompt each node has; those with none are left out.

        `keys` are the prompt's, in order, one for each whole block.
        """
        found: dict[str, int] = {}
        if not keys:
            return found

        def note(bits: int, num_blocks: int) -> None:
            names = self._names_of.get(bits)
            if names is None:
                names = self._named(bits)
            num_tokens = num_blocks * self._block_tokens
            for name in names:
                found[name] = num_tokens

        if self._places is None:
            self._blocks.bisect(keys, note)
        else:
            self._find_places(self._places, keys, note)
        return found

    def check(self) -> None:
        """Re-derive the indices from what each node has, and the names from the nodes."""
        self._blocks.check()
        if self._places is not None:
            self._places.check()
        assert {node.bit: name for name, node in self._nodes.items()} == {
            bit: name for bit, name in enumerate(self._names) if name is not None
        }

    def _find_places(self, places: KeyIndex, keys: Sequence[bytes], note: Found) -> None:
        """Look for places from the end of what each node has of the prompt."""
        ends: dict[int, int] = {}

        def end(bits: int, num_blocks: int) -> None:
            ends[num_blocks] = ends.get(num_blocks, 0) | bits

        self._blocks.bisect(keys, end)
        nodes = 0
        lengths = [*sorted(ends, reverse=True), 0]
        for length, shorter in pairwise(lengths):
            nodes = places.last(keys, ends[length] | nodes, length, shorter, note)

    def _named(self, bits: int) -> tuple[str, ...]:
        if len(self._names_of) >= MAX_NAMED:
            self._names_of.clear()
        names = tuple(
            name for bit, name in enumerate(self._names) if name is not None and bits >> bit & 1
        )
        self._names_of[bits] = names
        return names

    def _at(self, name: str, epoch: int) -> _Node | None:
        """Return the node in that epoch, emptied if it is a new one; None if it is over."""
        node = self._nodes.get(name)
        if node is None:
            if len(self._nodes) >= self._max_nodes:
                return None
            node = _Node(self._free_bit(), epoch)
            self._nodes[name] = node
            self._names[node.bit] = name
            self._names_of.clear()
        elif epoch < node.epoch:
            return None
        elif epoch > node.epoch:
            self._clear(node)
            node.epoch, node.sequence, node.is_whole = epoch, 0, True
        return node

    def _free_bit(self) -> int:
        if None in self._names:
            return self._names.index(None)
        self._names.append(None)
        return len(self._names) - 1

    def _clear(self, node: _Node) -> None:
        node.expected.clear()
        node.expected_places.clear()
        self._blocks.clear(node.bit)
        if self._places is not None:
            self._places.clear(node.bit)
