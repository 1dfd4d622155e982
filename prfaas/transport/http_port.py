"""The frames of a transfer as the body of an HTTP answer, for links that let nothing but HTTP through.

To the stream above it is a port that takes one ATTACH and then brings frames; it carries one transfer.
"""

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp

from prfaas.errors import ProtocolError, TransferError
from prfaas.transport.ports import ByteSink

Fetch = Callable[[bytes], AbstractAsyncContextManager[aiohttp.ClientResponse]]
"""Asks for the frames with an ATTACH frame; raises TransferError if the peer refuses."""
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class HttpPort:
    """See StreamPort."""

    def __init__(self, fetch: Fetch, spawn: Spawn) -> None:
        self._fetch = fetch
        self._spawn = spawn
        self._attach: bytes | None = None
        self._sink: ByteSink | None = None
        self._task: asyncio.Task[None] | None = None
        self._may_give = asyncio.Event()

    @property
    def sock(self) -> socket.socket:
        """Raise OSError: the connection is the HTTP client's."""
        raise OSError("no socket of our own")

    async def receive(self, target: memoryview) -> int:
        """Raise OSError: frames come to a sink only."""
        raise OSError("nothing to receive")

    def start(self, sink: ByteSink) -> None:
        """See StreamPort."""
        self._sink = sink
        self._may_give.set()

    def stop(self) -> None:
        """See StreamPort."""
        self._sink = None
        self._may_give.set()

    def pause(self) -> None:
        """See StreamPort."""
        self._may_give.clear()

    def resume(self) -> None:
        """See StreamPort; the first time after ATTACH it asks for the frames."""
        self._may_give.set()
        if self._attach is not None and self._task is None:
            self._task = self._spawn(self._run(self._attach))

    def send_now(self, buffers: Sequence[memoryview | bytes]) -> int:
        """Take the ATTACH frame; raise OSError for anything after it."""
        if self._attach is not None:
            raise OSError("an HTTP answer takes nothing more")
        self._attach = b"".join(buffers)
        return len(self._attach)

    async def writable(self) -> None:
        """Return at once: nothing is ever sent twice."""

    def interrupt(self) -> None:
        """Do nothing: nobody waits."""

    def close(self) -> None:
        """See StreamPort."""
        self._sink = None
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._may_give.set()

    async def _run(self, attach: bytes) -> None:
        error: Exception | None = None
        try:
            async with self._fetch(attach) as response:
                async for data in response.content.iter_any():
                    await self._give(memoryview(data))
                    if self._sink is None:
                        return
        except (OSError, aiohttp.ClientError) as failure:
            error = TransferError(str(failure) or type(failure).__name__)
        except TransferError as failure:
            error = ProtocolError(str(failure))  # refused: it would be refused again
        if self._sink is not None:
            self._sink.ended(error)

    async def _give(self, data: memoryview) -> None:
        while data:
            await self._may_give.wait()
            if self._sink is None:
                return
            target = self._sink.buffer()
            num_bytes = min(len(target), len(data))
            target[:num_bytes] = data[:num_bytes]
            data = data[num_bytes:]
            self._sink.received(num_bytes)
