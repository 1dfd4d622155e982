"""Raw streams to one peer that are open before they are needed."""

import asyncio
from collections.abc import Awaitable, Callable

from prfaas.errors import Overloaded, TransferError
from prfaas.transport.stream import RawStream

SETTLE_S = 5.0
"""A stream whose transfer is done must end it within this to be used again."""
SPARE_FACTOR = 2
"""Idle streams kept, at most so many times what one transfer takes: transfers overlap."""


class WarmStreams:
    """Keeps `num_idle` idle streams, as far as the peer lets us."""

    def __init__(self, dial: Callable[[], Awaitable[RawStream]], num_idle: int) -> None:
        self.num_idle = num_idle
        self._dial = dial
        self._idle: list[RawStream] = []
        self._settling: dict[RawStream, asyncio.TimerHandle] = {}
        self._wanted = asyncio.Event()
        self._is_closed = False

    @property
    def num_open(self) -> int:
        """Streams that are idle now."""
        return len(self._idle)

    def want(self) -> None:
        """Open what is missing now: the peer was heard of."""
        self._wanted.set()

    async def keep(self) -> None:
        """Open streams when some are wanted, until cancelled; what fails is tried at the next `want`."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while len(self._idle) < self.num_idle and not self._is_closed:
                try:
                    stream = await self._dial()
                except (TransferError, Overloaded):
                    break
                self.put(stream)

    def take(self, max_streams: int) -> list[RawStream]:
        """Return up to so many idle streams, which are the caller's."""
        self._idle, taken = self._idle[max_streams:], self._idle[:max_streams]
        for stream in taken:
            stream.on_closed = lambda stream: None
        if len(self._idle) < self.num_idle:
            self.want()
        return taken

    def put(self, stream: RawStream) -> None:
        """Take an idle stream; one too many is closed."""
        if not stream.is_open:
            return
        if self._is_closed or len(self._idle) >= SPARE_FACTOR * self.num_idle:
            stream.close()
            return
        stream.on_closed = self._lost
        self._idle.append(stream)

    def settle(self, stream: RawStream) -> None:
        """Hold a stream whose transfer is done, and close it if it does not end it soon."""
        stream.refuse_pages()
        if stream.is_open:
            loop = asyncio.get_running_loop()
            self._settling[stream] = loop.call_later(SETTLE_S, self._give_up, stream)

    def settled(self, stream: RawStream) -> None:
        """Take a stream that has ended its transfer, or has broken."""
        self._settling.pop(stream).cancel()
        if stream.is_open:
            stream.detach()
            self.put(stream)

    def _give_up(self, stream: RawStream) -> None:
        del self._settling[stream]
        stream.close()

    def _lost(self, stream: RawStream) -> None:
        self._idle.remove(stream)
        self.want()

    def close(self) -> None:
        """Close every idle stream. Idempotent."""
        self._is_closed = True
        for stream in self._idle:
            stream.close()
        self._idle.clear()
        for stream, timer in self._settling.items():
            timer.cancel()
            stream.close()
        self._settling.clear()
