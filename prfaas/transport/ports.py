"""What a stream's bytes go in and out by, and the bare socket that does it without TLS.

It receives straight into pool pages, many at once, and sends from them. Whoever takes the bytes is told by
calls, not by futures: no page costs a turn of the loop.
"""

import asyncio
import socket
from collections.abc import Sequence
from typing import Protocol

READ_BYTES = 2 << 20
"""A stream that never runs dry gives the loop to others this often."""
AHEAD_BYTES = 64 << 10
"""Read past the end of a small page, to be copied to where it goes: cheaper than a call for each."""
SMALL_BYTES = 16 << 10
HEADER_AHEAD_BYTES = 1152
"""Read past the end of large pages: the next header, and the table of a run."""


class ByteSink(Protocol):
    """Who takes what comes in. Calls come from the loop."""

    def buffers(self) -> Sequence[memoryview]:
        """Return where the next bytes go, in order; never empty, none of them either."""
        ...

    def buffer(self) -> memoryview:
        """Return the first of `buffers`."""
        ...

    def received(self, num_bytes: int) -> None:
        """Take note that bytes were put there; must not raise."""
        ...

    def ended(self, error: Exception | None) -> None:
        """Take note that nothing more comes; None is the other side's orderly end."""
        ...


class StreamPort(Protocol):
    """What both kinds can do. Raises OSError for a broken connection."""

    @property
    def sock(self) -> socket.socket:
        """The socket, for what the kernel knows of it and can be told."""
        ...

    async def receive(self, target: memoryview) -> int:
        """Put at least one byte into `target` and return how many, 0 at the stream's end."""
        ...

    def start(self, sink: ByteSink) -> None:
        """Give everything that comes to `sink` until `stop`."""
        ...

    def stop(self) -> None:
        """Give nothing more to anybody. Idempotent."""
        ...

    def pause(self) -> None:
        """Leave the sink alone until `resume`; to be called from within the sink."""
        ...

    def resume(self) -> None:
        """Go on; ignored if nobody is served or nothing was paused."""
        ...

    def send_now(self, buffers: Sequence[memoryview | bytes]) -> int:
        """Send as much of the buffers as is taken at once, and return how many bytes."""
        ...

    async def writable(self) -> None:
        """Return when something may be taken again, or after `interrupt`."""
        ...

    def interrupt(self) -> None:
        """Let `writable` return."""
        ...

    def close(self) -> None:
        """Close at once; what was not sent is lost. Idempotent."""
        ...


class SocketPort:
    """A non-blocking socket of our own."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.sock = sock
        self._loop = loop or asyncio.get_running_loop()
        self._sink: ByteSink | None = None
        self._is_paused = False
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._ahead_bytes = AHEAD_BYTES
        self._rest = memoryview(b"")
        """Read ahead and not given to the sink yet."""
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False

    async def receive(self, target: memoryview) -> int:
        """See StreamPort."""
        return await self._loop.sock_recv_into(self.sock, target)

    def start(self, sink: ByteSink) -> None:
        """See StreamPort."""
        self._sink, self._is_paused = sink, False
        self._give_rest()
        self._watch()

    def stop(self) -> None:
        """See StreamPort."""
        if self._sink is not None:
            self._sink = None
            self._loop.remove_reader(self.sock)

    def pause(self) -> None:
        """See StreamPort."""
        if not self._is_paused:
            self._is_paused = True
            self._loop.remove_reader(self.sock)

    def resume(self) -> None:
        """See StreamPort."""
        if self._is_paused and self._sink is not None:
            self._is_paused = False
            self._give_rest()
            self._watch()

    def _watch(self) -> None:
        if self._sink is not None and not self._is_paused:
            self._loop.add_reader(self.sock, self._on_readable)

    def _give_rest(self) -> None:
        """Copy what was read ahead to where it goes, as far as somebody takes it."""
        while self._rest and self._sink is not None and not self._is_paused:
            target = self._sink.buffer()
            num_bytes = min(len(target), len(self._rest))
            target[:num_bytes] = self._rest[:num_bytes]
            self._rest = self._rest[num_bytes:]
            self._sink.received(num_bytes)

    def _on_readable(self) -> None:
        budget = READ_BYTES
        while budget > 0 and self._sink is not None and not self._is_paused:
            sink, targets = self._sink, self._sink.buffers()
            num_target = sum(map(len, targets))
            if num_target > HEADER_AHEAD_BYTES:
                is_small = num_target <= SMALL_BYTES
                self._ahead_bytes = AHEAD_BYTES if is_small else HEADER_AHEAD_BYTES
            try:
                ahead = self._ahead[: self._ahead_bytes]
                num_bytes = self.sock.recvmsg_into((*targets, ahead))[0]
            except BlockingIOError:
                return
            except OSError as error:
                self.stop()
                sink.ended(error)
                return
            if not num_bytes:
                self.stop()
                sink.ended(None)
                return
            budget -= num_bytes
            if num_bytes <= num_target:
                sink.received(num_bytes)
            else:
                self._rest = self._ahead[: num_bytes - num_target]
                sink.received(num_target)
                self._give_rest()

    def send_now(self, buffers: Sequence[memoryview | bytes]) -> int:
        """See StreamPort."""
        try:
            return self.sock.sendmsg(buffers)
        except BlockingIOError:
            return 0

    async def writable(self) -> None:
        """See StreamPort."""
        self._waiter = self._loop.create_future()
        self._loop.add_writer(self.sock, self.interrupt)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if not self._is_closed:
                self._loop.remove_writer(self.sock)

    def interrupt(self) -> None:
        """See StreamPort."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """See StreamPort."""
        if not self._is_closed:
            self.stop()
            self._loop.remove_writer(self.sock)
            self._is_closed = True
            self.sock.close()
            self.interrupt()
