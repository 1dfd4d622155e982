"""The blocks of one group that a block table holds."""

from collections.abc import Iterator, MutableMapping, Sequence

from prfaas.cache.pool import Entry


class HeldBlocks(MutableMapping[int, Entry]):
    """Block -> entry. A long hit's entries are taken over as they are: a list is made in no time."""

    def __init__(self, hit: range, entries: Sequence[Entry]) -> None:
        """Hold the blocks of a hit, with their entries in the same order."""
        assert len(hit) == len(entries), f"{len(entries)} entries of {len(hit)} blocks"
        self._first = hit.start
        self._run: list[Entry | None] = list(entries)
        self._num_in_run = len(entries)
        self._others: dict[int, Entry] = {}

    def __getitem__(self, block: int) -> Entry:
        """Return the block's entry; raises KeyError if it is not held."""
        entry = self.get(block)
        if entry is None:
            raise KeyError(block)
        return entry

    def get(self, block: int, default: None = None) -> Entry | None:  # type: ignore[override]
        """Return the block's entry, or None."""
        at = block - self._first
        if 0 <= at < len(self._run):
            return self._run[at]
        return self._others.get(block)

    def __contains__(self, block: object) -> bool:
        """Return whether the block is held."""
        return isinstance(block, int) and self.get(block) is not None

    def __setitem__(self, block: int, entry: Entry) -> None:
        """Hold a block, or another entry of it."""
        at = block - self._first
        if 0 <= at < len(self._run):
            self._num_in_run += self._run[at] is None
            self._run[at] = entry
        else:
            self._others[block] = entry

    def __delitem__(self, block: int) -> None:
        """Hold a block no more."""
        if block in self._others:
            del self._others[block]
            return
        if block not in self:
            raise KeyError(block)
        self._run[block - self._first] = None
        self._num_in_run -= 1

    def __iter__(self) -> Iterator[int]:
        """Yield each block, in no order."""
        yield from (at for at, entry in enumerate(self._run, self._first) if entry is not None)
        yield from self._others

    def __len__(self) -> int:
        """Return how many are held."""
        return self._num_in_run + len(self._others)

    def from_the_end(self) -> list[Entry]:
        """Return all entries, the last block's first."""
        others = [self._others[block] for block in sorted(self._others, reverse=True)]
        run = self._run[::-1]
        if self._num_in_run < len(run):
            run = [entry for entry in run if entry is not None]
        return [*others, *run]  # type: ignore[list-item]

    def clear(self) -> None:
        """Hold nothing more."""
        self._run = []
        self._num_in_run = 0
        self._others.clear()
