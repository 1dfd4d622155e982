"""What a cache tells others about the blocks that it can serve.

A *key* says that the full-attention KV of that block is here, in RAM or on disk. A *place* says that
the windows and states to go on behind that block are here, too. Both are the block's key.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What became of the cache since the changes before these; nothing is in two of the lists."""

    epoch: int
    """Of the cache's life: one that began later has a greater one."""
    sequence: int
    """1 is the first of an epoch; each one after it is one more."""
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    places_added: tuple[bytes, ...] = ()
    places_removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSnapshot:
    """All that the cache had after the changes of that sequence."""

    epoch: int
    sequence: int
    """0: before the first."""
    keys: tuple[bytes, ...] = ()
    places: tuple[bytes, ...] = ()
