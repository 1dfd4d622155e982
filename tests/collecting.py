"""What an action leaves to the garbage collector."""

import gc
from collections.abc import Awaitable, Callable


async def num_left(act: Callable[[], Awaitable[None]]) -> int:
    """Return how many objects in cycles it leaves, but for what it makes the first time."""
    await act()
    gc.collect()
    gc.disable()
    try:
        await act()
        return gc.collect()
    finally:
        gc.enable()
