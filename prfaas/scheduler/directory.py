"""The global KVCache directory: which node can continue a prompt after which of its blocks.

Soft state, told by the nodes. Each numbers what it says within an epoch, the life of its cache; what is
missing is noticed by its number, and a snapshot makes it good. Until then, and whenever a node is late
to say what left, a lookup promises too much or too little: it is a prediction, never a lease.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MAX_NODES = 1024
MAX_KEYS_PER_NODE = 1 << 20
"""64 GiB of cache have so many blocks of 64 KiB."""


MAX_NAMED = 4096
"""Sets of nodes whose names are kept at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvent:
    """What changed in a node's cache since its event before."""

    node: str
    epoch: int
    """Grows each time the node's cache begins anew, empty."""
    sequence: int
    """1 is the first event of an epoch; each one after it is one more."""
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    """Applied before `added`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a node's cache had after an event."""

    node: str
    epoch: int
    sequence: int
    """Of the last event that it has; 0 if there was none."""
    keys: tuple[bytes, ...]


@dataclass(slots=True)
class _Node:
    name: str
    bit: int
    epoch: int
    sequence: int = 0
    is_whole: bool = True
    keys: set[bytes] = field(default_factory=set)


class Directory:
    """Block keys -> nodes, for lookups of the longest prefix that each node has.

    A key names all tokens up to its block's end. A node that has said it can continue a prompt there.
    `is_closed` promises that it can then continue it at each block before, too: so it is with full
    attention, whose pages leave a chain from its end; a lookup then takes a few steps instead of one for
    each block. States and windows serve only their own places.
    """

    def __init__(
        self,
        *,
        block_tokens: int,
        is_closed: bool,
        max_nodes: int = MAX_NODES,
        max_keys_per_node: int = MAX_KEYS_PER_NODE,
    ) -> None:
        self._block_tokens = block_tokens
        self._is_closed = is_closed
        self._max_nodes = max_nodes
        self._max_keys = max_keys_per_node
        self._nodes: dict[str, _Node] = {}
        self._names: list[str | None] = []
        """By bit; None is free."""
        self._index: dict[bytes, int] = {}
        """Key -> bits of the nodes that have it, never 0."""
        self._names_of: dict[int, tuple[str, ...]] = {}
        """Of bits that lookups have met, as long as their nodes stay the same."""
        self.num_refused = 0
        """Keys that a full node was not credited with."""

    @property
    def num_keys(self) -> int:
        """Return how many keys some node has."""
        return len(self._index)

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
        self._remove(node, event.removed)
        self._add(node, event.added)
        return True

    def replace(self, snapshot: Snapshot) -> bool:
        """Take a snapshot for all that a node has; return False for one that is older than its events."""
        node = self._at(snapshot.node, snapshot.epoch)
        if node is None or snapshot.sequence < node.sequence:
            return False
        keys = set(snapshot.keys)
        self._remove(node, list(node.keys - keys))
        self._add(node, snapshot.keys)
        node.sequence, node.is_whole = snapshot.sequence, True
        return True

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
        if not keys or not self._index:
            return found
        return self._bisect(keys, found) if self._is_closed else self._scan(keys, found)

    def check(self) -> None:
        """Re-derive the index from what each node has."""
        derived: dict[bytes, int] = {}
        for name, node in self._nodes.items():
            assert self._names[node.bit] == name
            assert len(node.keys) <= self._max_keys
            for key in node.keys:
                derived[key] = derived.get(key, 0) | 1 << node.bit
        assert derived == self._index
        assert sum(name is not None for name in self._names) == len(self._nodes)

    def _scan(self, keys: Sequence[bytes], found: dict[str, int]) -> dict[str, int]:
        """Look from the end: the first key that a node has is the one it can continue at."""
        seen, everyone = 0, (1 << len(self._names)) - 1
        length = len(keys)
        for mask in map(self._index.get, reversed(keys)):
            if mask is not None:
                self._found(mask & ~seen, length, found)
                seen |= mask
                if seen == everyone:
                    break
            length -= 1
        return found

    def _bisect(self, keys: Sequence[bytes], found: dict[str, int]) -> dict[str, int]:
        """Halve each stretch of blocks in which a node's prefix ends, until it is one block."""
        get, last = self._index.get, len(keys) - 1
        begin = get(keys[0], 0)
        end = get(keys[last], 0) & begin
        self._found(end, last + 1, found)
        stretches = [(0, begin, last, end)] if begin != end else []
        while stretches:
            low, has_low, high, has_high = stretches.pop()
            if high - low == 1:
                self._found(has_low & ~has_high, high, found)
                continue
            middle = (low + high) // 2
            has_middle = get(keys[middle], 0) & has_low | has_high
            if has_low != has_middle:
                stretches.append((low, has_low, middle, has_middle))
            if has_middle != has_high:
                stretches.append((middle, has_middle, high, has_high))
        return found

    def _found(self, mask: int, num_blocks: int, found: dict[str, int]) -> None:
        names = self._names_of.get(mask)
        if names is None:
            names = self._named(mask)
        num_tokens = num_blocks * self._block_tokens
        for name in names:
            found[name] = num_tokens

    def _named(self, mask: int) -> tuple[str, ...]:
        if len(self._names_of) >= MAX_NAMED:
            self._names_of.clear()
        names = tuple(
            name for bit, name in enumerate(self._names) if name is not None and mask >> bit & 1
        )
        self._names_of[mask] = names
        return names

    def _at(self, name: str, epoch: int) -> _Node | None:
        """Return the node in that epoch, emptied if it is a new one; None if it is over."""
        node = self._nodes.get(name)
        if node is None:
            if len(self._nodes) >= self._max_nodes:
                return None
            node = _Node(name, self._free_bit(), epoch)
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
        self._remove(node, list(node.keys))

    def _add(self, node: _Node, keys: Iterable[bytes]) -> None:
        index, bit = self._index, 1 << node.bit
        for key in keys:
            if len(node.keys) >= self._max_keys and key not in node.keys:
                self.num_refused += 1
                continue
            node.keys.add(key)
            index[key] = index.get(key, 0) | bit

    def _remove(self, node: _Node, keys: Iterable[bytes]) -> None:
        index, bit = self._index, 1 << node.bit
        for key in keys:
            if key not in node.keys:
                continue
            node.keys.remove(key)
            if index[key] == bit:
                del index[key]
            else:
                index[key] ^= bit
