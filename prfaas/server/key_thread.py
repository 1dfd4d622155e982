"""Block keys without holding up the event loop: long prompts are hashed in a thread of their own."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

INLINE_TOKENS = 16_384
"""Below this many tokens, hashing takes under a millisecond: no thread."""


class KeyThread:
    """Makes block keys; `close` ends its thread."""

    def __init__(self, block_keys: Callable[[Sequence[int], bytes], tuple[bytes, ...]]) -> None:
        self._block_keys = block_keys
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="keys")

    async def keys(self, tokens: Sequence[int], salt: bytes) -> tuple[bytes, ...]:
        """Return the keys of the whole blocks of `tokens`."""
        if len(tokens) < INLINE_TOKENS:
            return self._block_keys(tokens, salt)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._block_keys, tokens, salt)

    def close(self) -> None:
        """End the thread once it is idle."""
        self._executor.shutdown(wait=True, cancel_futures=True)
