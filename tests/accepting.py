"""Servers that stop while somebody connects."""

import asyncio


async def accept_no_more(server: asyncio.AbstractServer | None) -> None:
    """Let what was accepted get its transport before the server closes.

    asyncio of Python 3.11 leaves a connection open that it accepted in the instant before.
    """
    if isinstance(server, asyncio.Server):
        loop = asyncio.get_running_loop()
        for listener in server.sockets:
            loop.remove_reader(listener.fileno())
        for _ in range(3):
            await asyncio.sleep(0)
