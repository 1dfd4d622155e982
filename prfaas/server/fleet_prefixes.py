"""Which node has which prefix: the fleet's KVCache directory, filled by heartbeats, asked for each prompt.

What takes long (the snapshot of a large cache, a node that is forgotten, the keys of a long prompt) runs
beside the event loop; who wants the directory meanwhile waits for it.
"""

import asyncio
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from prfaas.cache.changes import CacheSnapshot, Changes
from prfaas.cache.hashing import block_keys, root_key
from prfaas.cache.spec import CacheLayout, FullSpec, replay_boundary
from prfaas.scheduler.directory import BlockEvent, Directory, Snapshot
from prfaas.server.key_thread import INLINE_TOKENS
from prfaas.transport.handshake import Identity

Made = TypeVar("Made")

INLINE_KEYS = 4096
"""As many are taken into the directory in some milliseconds: no thread."""
MAX_ROOTS = 1024
"""Of tenants whose prompts came of late."""
MAX_NUMERICS = 8
"""Of so many fingerprints the keys of a prompt are made; nodes of others are taken to have nothing."""

PromptKeys = Mapping[str, Sequence[bytes]]
"""Numerics fingerprint -> the keys of a prompt's whole blocks on nodes of these numerics."""


class FleetPrefixes:
    """The directory of nodes that compute one model.

    Args:
        identity: of any of the nodes; they are alike in everything that matters but numerics.
        executor: runs what takes long.
    """

    def __init__(self, identity: Identity, layout: CacheLayout, executor: Executor) -> None:
        self._identity = identity
        self._layout = layout
        self._directory = Directory(
            block_tokens=layout.block_tokens,
            has_places=not all(isinstance(spec, FullSpec) for spec in layout.groups),
        )
        self._lives: dict[str, int] = {}
        """Node -> the life in which it has told us what its cache has."""
        self._lock = asyncio.Lock()
        self._executor = executor
        self._root = functools.lru_cache(MAX_ROOTS)(self._make_root)

    @property
    def num_keys(self) -> int:
        """Blocks that some node has."""
        return self._directory.num_keys

    async def told(
        self, node: str, life: int, changes: Changes | None, snapshot: CacheSnapshot | None
    ) -> bool:
        """Take in what a node says of its cache; return whether a snapshot of it is wanted."""
        async with self._lock:
            if self._lives.get(node, life) != life:
                del self._lives[node]
                await self._run(self._directory.forget, node)
            if snapshot is not None:
                self._lives[node] = life
                await self._replace(node, snapshot)
            is_repeated = False  # the reply to a word may be lost, and the word comes again
            if changes is not None:
                self._lives[node] = life
                is_repeated = not self._directory.apply(
                    BlockEvent(
                        node=node,
                        epoch=changes.epoch,
                        sequence=changes.sequence,
                        added=changes.added,
                        removed=changes.removed,
                        places_added=changes.places_added,
                        places_removed=changes.places_removed,
                    )
                )
            if not is_repeated:
                self._directory.settle(node)
            return node not in self._lives or self._directory.needs_snapshot(node)

    async def _replace(self, node: str, snapshot: CacheSnapshot) -> None:
        said = Snapshot(
            node=node,
            epoch=snapshot.epoch,
            sequence=snapshot.sequence,
            keys=snapshot.keys,
            places=snapshot.places,
        )
        if len(said.keys) + len(said.places) <= INLINE_KEYS:
            self._directory.replace(said)
        else:
            await self._run(self._directory.replace, said)

    async def expect(self, node: str, keys: Sequence[bytes], num_tokens: int) -> None:
        """Credit a node with a prompt that it has just computed or received; it says soon whether it kept it."""
        num_blocks = replay_boundary(num_tokens, self._layout.block_tokens)
        prefix = keys[: num_blocks // self._layout.block_tokens]
        async with self._lock:
            if len(prefix) <= INLINE_KEYS:
                self._directory.expect(node, prefix)
            else:
                await self._run(self._directory.expect, node, prefix)

    async def forget(self, node: str) -> None:
        """Drop a node that is gone, with all it had."""
        async with self._lock:
            self._lives.pop(node, None)
            await self._run(self._directory.forget, node)

    async def keys(
        self, tokens: Sequence[int], salt: bytes, numerics: Collection[str]
    ) -> PromptKeys:
        """Return a prompt's keys for nodes of these fingerprints."""
        names = sorted(numerics)[:MAX_NUMERICS]
        if len(tokens) * len(names) < INLINE_TOKENS:
            return self._keys(tokens, salt, names)
        return await self._run(self._keys, tokens, salt, names)

    def _keys(self, tokens: Sequence[int], salt: bytes, numerics: Sequence[str]) -> PromptKeys:
        keys = {}
        for name in numerics:
            keys[name] = block_keys(self._root(name, salt), tokens, self._layout.block_tokens)
        return keys

    def _make_root(self, numerics: str, salt: bytes) -> bytes:
        return root_key(
            model_fingerprint=self._identity.model_fingerprint,
            numerics_fingerprint=numerics,
            kv_dtype=self._identity.kv_dtype,
            layout=self._layout,
            salt=salt,
        )

    async def hits(self, keys: PromptKeys) -> dict[str, int]:
        """Return how many leading tokens of a prompt each node has; those with none are left out."""
        found: dict[str, int] = {}
        async with self._lock:
            for prompt_keys in keys.values():
                for node, num_tokens in self._directory.lookup(prompt_keys).items():
                    found[node] = max(num_tokens, found.get(node, 0))
        return found

    async def _run(self, work: Callable[..., Made], *args: object) -> Made:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)

    def check(self) -> None:
        """Re-derive the directory's counts."""
        self._directory.check()
