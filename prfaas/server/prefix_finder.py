"""Finds a prompt's prefix in RAM and on disk without holding up the event loop.

Long prompts are hashed in one thread, records are read in others; the pool's lock is taken for a
moment only. What comes up from the disk is in RAM before the engine hears of the prompt.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from prfaas.cache.block_table import BlockTable
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.tiers import Promotion
from prfaas.clock import Clock
from prfaas.log import get_logger
from prfaas.server.key_thread import KeyThread

MAX_PROMOTIONS = 3
"""Each but the first follows one in which a record could not be read."""
NUM_READERS = 2
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
        self._is_closed = False

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

    async def _read(self, promotion: Promotion) -> None:
        began_s = self._clock()
        loop = asyncio.get_running_loop()
        num_missing = await loop.run_in_executor(self._readers, promotion.read)
        get_logger().debug(
            "cache.promoted",
            num_records=promotion.num_records,
            num_missing=num_missing,
            read_s=self._clock() - began_s,
        )

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
        if self._cache.tier is not None:
            self._cache.tier.store.close(timeout_s=DRAIN_TIMEOUT_S)
