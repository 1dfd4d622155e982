"""Finds a prompt's prefix in RAM and on disk without holding up the event loop.

Long prompts are hashed in one thread, records are read in others; the pool's lock is taken for a
moment only. What comes up from the disk is in RAM before the engine hears of the prompt.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

from prfaas.cache.block_table import BlockTable
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.tiers import GetMany, Promotion, Wanted
from prfaas.clock import Clock
from prfaas.log import get_logger
from prfaas.server.key_thread import KeyThread

MAX_PROMOTIONS = 3
"""Each but the first follows one in which a record could not be read."""
NUM_READERS = 2
"""Promotions read at once, and threads that share the reading of each."""
MIN_SHARED_RECORDS = 16
"""Fewer are read faster than a thread starts."""
AHEAD_BYTES = 128 << 20
"""Of RAM that a promotion finds ready, but not more than an eighth of the cache: about two hits of
8K tokens."""
DRAIN_TIMEOUT_S = 20.0
"""At the end, what waits to be written to disk gets this long."""
OPENING_SALT = b"opening"
"""Names a first block whatever its salt; no block is kept under it."""


class PrefixFinder:
    """Looks prompts up in one cache, for the loop's thread; `close` ends its threads and the store."""

    def __init__(self, cache: PrefixCache, *, clock: Clock) -> None:
        self._cache = cache
        self._clock = clock
        self._keys = KeyThread(cache.block_keys)
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="prfaas-promote")
        self._helpers = ThreadPoolExecutor(NUM_READERS - 1, thread_name_prefix="prfaas-share")
        self._is_closed = False
        self._prefault()

    async def find(self, tokens: Sequence[int], salt: bytes) -> BlockTable:
        """Return a table of the longest hit, all of it in RAM; the caller is its one holder."""
        keys = await self._keys.keys(tokens, salt)
        first_block = tokens[: self._cache.layout.block_tokens]
        opening = next(iter(self._cache.block_keys(first_block, OPENING_SALT)), None)
        promotion: Promotion | None = None
        try:
            for _ in range(MAX_PROMOTIONS):
                previous = promotion
                found = self._cache.find(
                    keys, len(tokens), salt=salt, opening=opening, after=previous
                )
                if isinstance(found, BlockTable):
                    return found
                promotion = found
                if previous is not None:
                    previous.release()
                await self._read(promotion)
            return self._cache.lookup(keys, len(tokens), salt=salt)
        finally:
            if promotion is not None:
                promotion.release()

    async def peek(self, tokens: Sequence[int], salt: bytes) -> int:
        """Return the length of the longest hit, without a hold on it."""
        return self._cache.peek(await self._keys.keys(tokens, salt), len(tokens))

    async def _read(self, promotion: Promotion) -> None:
        began_s = self._clock()
        loop = asyncio.get_running_loop()
        read = partial(
            promotion.read,
            num_shares=NUM_READERS if promotion.num_records >= MIN_SHARED_RECORDS else 1,
            read_shares=self._read_shares,
        )
        num_missing = await loop.run_in_executor(self._readers, read)
        get_logger().debug(
            "cache.promoted",
            num_records=promotion.num_records,
            num_missing=num_missing,
            read_s=self._clock() - began_s,
        )

        self._prefault()

    def _read_shares(
        self, get_many: GetMany, shares: Sequence[Sequence[Wanted]]
    ) -> list[list[bool]]:
        """Read one share on this thread, the others beside it; return when none is read any more."""
        first, *others = shares
        beside = [self._helpers.submit(get_many, share) for share in others]
        try:
            found = get_many(first)
        finally:
            wait(beside)
        return [found, *(future.result() for future in beside)]

    def _prefault(self) -> None:
        """Make RAM ready for the next promotion, on a thread that nothing waits for."""
        pool = self._cache.pool
        if self._cache.tier is not None and not self._is_closed:
            ahead_bytes = min(AHEAD_BYTES, len(pool.arena) // 8)
            self._readers.submit(pool.prefault, ahead_bytes)

    async def close(self) -> None:
        """End the threads; write what waits to be stored, as far as it can be. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with ThreadPoolExecutor(1, thread_name_prefix="prfaas-close") as closer:
            await asyncio.get_running_loop().run_in_executor(closer, self._shut)

    def _shut(self) -> None:
        self._keys.close()
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._helpers.shutdown(wait=True)
        if self._cache.tier is not None:
            self._cache.tier.store.close(timeout_s=DRAIN_TIMEOUT_S)
