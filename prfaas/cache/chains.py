"""Which blocks a prompt could be continued behind, kept up as blocks come and go. Pure.

A block is a *key* if its full-attention KV and that of every block before it is here, and a *place* if
the windows and states to go on behind it are here, too. So who is told a subset of the keys and places
never expects a longer hit than there is.
"""

from collections.abc import Iterator, Sequence

from prfaas.cache.pool import PageKey
from prfaas.cache.spec import CacheLayout, FullSpec, WindowSpec, held_blocks

MAX_BLOCKS = 1 << 20
"""Further blocks are not kept up, and so are neither key nor place."""


class Told:
    """A set of keys, and how it differs from what others were told of it."""

    def __init__(self) -> None:
        self.keys: dict[bytes, None] = {}
        self.added: dict[bytes, None] = {}
        self.removed: dict[bytes, None] = {}

    def add(self, key: bytes) -> None:
        """Put a key in that is not there."""
        self.keys[key] = None
        if key in self.removed:
            del self.removed[key]
        else:
            self.added[key] = None

    def remove(self, key: bytes) -> None:
        """Take a key out that is there."""
        del self.keys[key]
        if key in self.added:
            del self.added[key]
        else:
            self.removed[key] = None

    def take_added(self, most: int) -> tuple[bytes, ...]:
        """Return up to so many keys that others do not know of; from now on they do."""
        return _take(self.added, most)

    def take_removed(self, most: int) -> tuple[bytes, ...]:
        """Return up to so many keys that others think are there; from now on they do not."""
        return _take(self.removed, most)

    def take_all(self) -> tuple[bytes, ...]:
        """Return the whole set, which others know from now on."""
        self.added.clear()
        self.removed.clear()
        return tuple(self.keys)


def _take(waiting: dict[bytes, None], most: int) -> tuple[bytes, ...]:
    if len(waiting) <= most:
        taken = tuple(waiting)
        waiting.clear()
        return taken
    taken = tuple(key for key, _ in zip(waiting, range(most), strict=False))
    for key in taken:
        del waiting[key]
    return taken


class _Block:
    """A block of some prompt that is here, or comes before one that is."""

    __slots__ = (
        "after",
        "before",
        "depth",
        "first",
        "is_key",
        "is_place",
        "key",
        "on_disk",
        "parent",
        "ram",
    )

    def __init__(self, key: bytes, parent: "_Block | None") -> None:
        self.key = key
        self.parent = parent
        self.depth: int = 1 if parent is None else parent.depth + 1
        """Blocks from the prompt's beginning to this one."""
        self.ram = self.on_disk = 0
        """Bits of the groups that have it there; one that is in RAM need not say if it is on disk."""
        self.is_key = self.is_place = False
        self.first: _Block | None = None
        """Of its children, which `before` and `after` link."""
        self.before: _Block | None = None
        self.after: _Block | None = parent.first if parent is not None else None
        if self.after is not None:
            self.after.before = self
        if parent is not None:
            parent.first = self

    def children(self) -> "Iterator[_Block]":
        child = self.first
        while child is not None:
            yield child
            child = child.after

    def unlink(self) -> None:
        """Be the child of nobody."""
        if self.after is not None:
            self.after.before = self.before
        if self.before is not None:
            self.before.after = self.after
        elif self.parent is not None:
            self.parent.first = self.after


class Chains:
    """The blocks of a cache, by the prompts that they are of. One thread at a time."""

    def __init__(self, layout: CacheLayout, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._full = self._state = 0
        """Bits of groups."""
        self._windows: dict[int, int] = {}
        """Bit -> blocks of the window that a place needs, far from the prompt's beginning."""
        for group, spec in enumerate(layout.groups):
            if isinstance(spec, FullSpec):
                self._full |= 1 << group
            elif isinstance(spec, WindowSpec):
                far = 2 * (spec.window_tokens + layout.block_tokens)
                far_tokens = far - far % layout.block_tokens
                reach = len(held_blocks(spec, far_tokens, layout.block_tokens))
                self._windows[1 << group] = reach
            else:
                self._state |= 1 << group
        self._needed = [bit for bit, reach in self._windows.items() if reach]
        self.has_places = bool(self._windows or self._state)
        """Whether it takes more than keys to continue a prompt; else there are no places."""
        self.keys = Told()
        self.places = Told()
        self._blocks: dict[bytes, _Block] = {}

    def __len__(self) -> int:
        """Return how many blocks are kept up."""
        return len(self._blocks)

    def came(self, group: int, keys: Sequence[bytes], block: int) -> None:
        """Note that a group's block of the prompt with these keys is in RAM."""
        found = self._blocks.get(keys[block]) or self._make(keys, block)
        if found is not None:
            had = (found.ram | found.on_disk) >> group & 1
            found.ram |= 1 << group
            if not had:
                self._gained(found, 1 << group)

    def left(self, group: int, key: bytes, *, is_on_disk: bool) -> None:
        """Note that a group's block is in RAM no more; a block that is not kept up is no loss."""
        block, bit = self._blocks.get(key), 1 << group
        if block is None:
            return
        block.ram &= ~bit
        block.on_disk = block.on_disk | bit if is_on_disk else block.on_disk & ~bit
        if not is_on_disk:
            self._lost(block, bit)

    def left_disk(self, group: int, key: bytes) -> None:
        """Note that a group's block is not on disk any more, if it was."""
        block, bit = self._blocks.get(key), 1 << group
        if block is not None and block.on_disk & bit:
            block.on_disk &= ~bit
            if not block.ram & bit:
                self._lost(block, bit)

    def on_disk(self) -> list[PageKey]:
        """Return what is thought to be on disk: at least all that only is there."""
        return [
            (group, block.key)
            for block in self._blocks.values()
            for group in range(block.on_disk.bit_length())
            if block.on_disk >> group & 1
        ]

    def _make(self, keys: Sequence[bytes], block: int) -> _Block | None:
        """Return the record of a block, made with those of all before it; None if they are too many."""
        at = block
        while at and keys[at - 1] not in self._blocks:
            at -= 1
        if len(self._blocks) + block + 1 - at > self._max_blocks:
            return None
        parent = self._blocks[keys[at - 1]] if at else None
        for key in keys[at : block + 1]:
            parent = self._blocks[key] = _Block(key, parent)
            if not self._full:
                self._settle(parent)
        return parent

    def _gained(self, block: _Block, bit: int) -> None:
        if bit & self._full:
            self._settle(block)
            return
        self._look_for_place(block)
        reach = self._windows.get(bit, 0)
        if reach > 1 and block.first is not None:
            for near in _descendants(block, reach - 1):
                self._look_for_place(near)

    def _lost(self, block: _Block, bit: int) -> None:
        if bit & self._full:
            self._settle(block)
        else:
            reach = self._windows.get(bit, 0)
            if block.is_place and (reach or bit & self._state):
                self._set_place(block, is_place=False)
            if reach > 1 and block.first is not None:
                for near in _descendants(block, reach - 1):
                    if near.is_place:
                        self._set_place(near, is_place=False)
        while block.first is None and not block.ram | block.on_disk:
            self._drop(block)
            if block.parent is None:
                break
            block = block.parent

    def _drop(self, block: _Block) -> None:
        if block.is_place:
            self._set_place(block, is_place=False)
        if block.is_key:
            self.keys.remove(block.key)
        block.unlink()
        del self._blocks[block.key]

    def _settle(self, block: _Block) -> None:
        """Let a block be a key or not, and those behind it that this decides."""
        changed = [block]
        while changed:
            block = changed.pop()
            is_whole = (block.ram | block.on_disk) & self._full == self._full
            is_key = is_whole and (block.parent is None or block.parent.is_key)
            if is_key == block.is_key:
                continue
            block.is_key = is_key
            if is_key:
                self.keys.add(block.key)
                self._look_for_place(block)
            else:
                if block.is_place:
                    self._set_place(block, is_place=False)
                self.keys.remove(block.key)
            if block.first is not None:
                changed += block.children()

    def _look_for_place(self, block: _Block) -> None:
        """Let a key be a place if all is here that it takes."""
        if not block.is_place and self.has_places and block.is_key and self._can_go_on(block):
            self._set_place(block, is_place=True)

    def _can_go_on(self, block: _Block) -> bool:
        if (block.ram | block.on_disk) & self._state != self._state:
            return False
        if block.parent is not None and block.parent.is_place:  # its windows lack this block alone
            return all((block.ram | block.on_disk) & bit for bit in self._needed)
        for bit, reach in self._windows.items():
            at: _Block | None = block
            for _ in range(reach):
                if at is None:
                    break  # the window begins with the prompt
                if not (at.ram | at.on_disk) & bit:
                    return False
                at = at.parent
        return True

    def _set_place(self, block: _Block, *, is_place: bool) -> None:
        block.is_place = is_place
        if is_place:
            self.places.add(block.key)
        else:
            self.places.remove(block.key)

    def check(self) -> None:
        """Re-derive keys and places from what each block has; AssertionError names what is wrong."""
        assert len(self._blocks) <= self._max_blocks
        for key, block in self._blocks.items():
            assert block.key == key
            assert block.ram | block.on_disk or block.first is not None, "a block that nobody needs"
            parent = block.parent
            assert parent is None or self._blocks[parent.key] is parent, "a parent is gone"
            assert block.depth == 1 + (0 if parent is None else parent.depth)
            assert parent is None or block in parent.children(), "a parent does not know its child"
            is_whole = (block.ram | block.on_disk) & self._full == self._full
            assert block.is_key == (is_whole and (parent is None or parent.is_key))
            can_go_on = self.has_places and block.is_key and self._can_go_on(block)
            assert block.is_place == can_go_on
        blocks = self._blocks.values()
        assert self.keys.keys.keys() == {block.key for block in blocks if block.is_key}
        assert self.places.keys.keys() == {block.key for block in blocks if block.is_place}
        for told in (self.keys, self.places):
            assert told.added.keys() <= told.keys.keys()
            assert not told.removed.keys() & told.keys.keys()


def _descendants(block: _Block, num_levels: int) -> Iterator[_Block]:
    """Yield the blocks up to so many levels behind one."""
    deepest = block.depth + num_levels
    waiting = list(block.children())
    while waiting:
        at: _Block | None = waiting.pop()
        while at is not None:  # mostly one child each
            yield at
            if at.depth == deepest or at.first is None:
                break
            if at.first.after is not None:
                waiting += at.children()
                break
            at = at.first
