"""Which nodes have a key: bits of nodes by key, and the keys of each node, within a limit."""

from collections.abc import Callable, Iterable, Sequence

Found = Callable[[int, int], None]
"""(bits of nodes, how many leading keys they have)."""


MAX_SETS = 1 << 16
"""Sets of nodes that are kept once for all their keys."""


class KeyIndex:
    """Keys -> bits of the nodes that have them; a node is its bit's place."""

    def __init__(self, *, max_keys_per_node: int) -> None:
        self._max_keys = max_keys_per_node
        self._bits: dict[bytes, int] = {}
        """Never 0."""
        self._sets: dict[int, int] = {}
        """One number for all keys of the same nodes: a million of them would each be a place in memory that
        no lookup has seen before."""
        self._keys: dict[int, dict[bytes, None]] = {}
        """Not sets: the garbage collector would walk through a million keys, and stop everything."""
        self.num_refused = 0
        """Keys that a full node was not credited with."""

    def __len__(self) -> int:
        """Return how many keys some node has."""
        return len(self._bits)

    def add(self, node: int, keys: Iterable[bytes]) -> None:
        """Credit a node with keys, as many as it may have."""
        bits, bit, held = self._bits, 1 << node, self._keys.setdefault(node, {})
        if len(self._sets) > MAX_SETS:
            self._sets.clear()
        shared = self._sets.setdefault
        for key in keys:
            if len(held) >= self._max_keys and key not in held:
                self.num_refused += 1
                continue
            held[key] = None
            nodes = bits.get(key, 0) | bit
            bits[key] = shared(nodes, nodes)

    def lacking(self, node: int, keys: Sequence[bytes]) -> list[bytes]:
        """Return those of the keys that a node is not credited with."""
        held = self._keys.get(node, {})
        return [key for key in keys if key not in held]

    def remove(self, node: int, keys: Iterable[bytes]) -> None:
        """Take keys from a node; those that it does not have are gone already."""
        bits, bit, held = self._bits, 1 << node, self._keys.get(node, {})
        for key in keys:
            if key not in held:
                continue
            del held[key]
            if bits[key] == bit:
                del bits[key]
            else:
                nodes = bits[key] ^ bit
                bits[key] = self._sets.setdefault(nodes, nodes)

    def replace(self, node: int, keys: Sequence[bytes]) -> None:
        """Let a node have these keys and no others."""
        kept = frozenset(keys)
        self.remove(node, [key for key in self._keys.get(node, ()) if key not in kept])
        self.add(node, keys)

    def clear(self, node: int) -> None:
        """Take all keys from a node."""
        self.remove(node, list(self._keys.get(node, ())))
        self._keys.pop(node, None)

    def bisect(self, keys: Sequence[bytes], found: Found) -> None:
        """Report the longest prefix of each node that has any.

        A node that has a key is taken to have those before it. Each stretch in which a prefix ends is
        halved until it is one key.
        """
        get, last = self._bits.get, len(keys) - 1
        begin = get(keys[0], 0)
        if not begin:
            return
        end = get(keys[last], 0) & begin
        if end:
            found(end, last + 1)
        stretches = [(0, begin, last, end)] if begin != end else []
        while stretches:
            low, has_low, high, has_high = stretches.pop()
            if high - low == 1:
                found(has_low & ~has_high, high)
                continue
            middle = (low + high) // 2
            has_middle = get(keys[middle], 0) & has_low | has_high
            if has_low != has_middle:
                stretches.append((low, has_low, middle, has_middle))
            if has_middle != has_high:
                stretches.append((middle, has_middle, high, has_high))

    def last(
        self, keys: Sequence[bytes], nodes: int, longest: int, shortest: int, found: Found
    ) -> int:
        """Report for each of `nodes` (bits) the last of the keys that it has; return those without.

        Looked at are the first `longest` keys, down to the one after the first `shortest`.
        """
        get = self._bits.get
        for length in range(longest, shortest, -1):
            if not nodes:
                return 0
            bits = get(keys[length - 1], 0) & nodes
            if bits:
                found(bits, length)
                nodes ^= bits
        return nodes

    def check(self) -> None:
        """Re-derive the bits from what each node has."""
        derived: dict[bytes, int] = {}
        for node, keys in self._keys.items():
            assert len(keys) <= self._max_keys
            for key in keys:
                derived[key] = derived.get(key, 0) | 1 << node
        assert derived == self._bits
