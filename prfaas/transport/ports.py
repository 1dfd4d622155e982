"""A stream's bytes in and out, over a bare socket or over an asyncio transport, which TLS needs.

A bare socket receives straight into pool pages and sends from them. A transport decrypts straight
into them; what it sends is encrypted from them.
"""

import asyncio
import contextlib
import socket
from typing import Protocol, cast

SLICE_BYTES = 256 << 10
"""The receiver renews the lease at least once per this many bytes."""
SPILL_BYTES = 64 << 10


class StreamPort(Protocol):
    """What both kinds can do. Raises OSError for a broken connection."""

    def receive_now(self, target: memoryview) -> int | None:
        """Put bytes that are here already into `target`; None if none are, 0 at the stream's end."""
        ...

    async def receive(self, target: memoryview) -> int:
        """Put at least one byte into `target` and return how many, 0 at the stream's end."""
        ...

    async def send(self, header: bytes, payload: memoryview | bytes, timeout_s: float) -> None:
        """Send both; TimeoutError if the other side takes no part of them for `timeout_s`."""
        ...

    def close(self) -> None:
        """Close at once; what was not sent is lost. Idempotent."""
        ...


class SocketPort:
    """A non-blocking socket of our own."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def receive_now(self, target: memoryview) -> int | None:
        """See StreamPort."""
        try:
            return self._socket.recv_into(target)
        except BlockingIOError:
            return None

    async def receive(self, target: memoryview) -> int:
        """See StreamPort."""
        return await asyncio.get_running_loop().sock_recv_into(self._socket, target)

    async def send(self, header: bytes, payload: memoryview | bytes, timeout_s: float) -> None:
        """See StreamPort."""
        try:
            num_sent = self._socket.sendmsg([header, payload])
        except BlockingIOError:
            num_sent = 0
        # What the socket does not take at once, which is most of it on a slow link, waits with a timer.
        for part in (memoryview(header), memoryview(payload)):
            rest = part[num_sent:]
            num_sent = max(0, num_sent - len(part))
            for start in range(0, len(rest), SLICE_BYTES):
                async with asyncio.timeout(timeout_s):
                    await asyncio.get_running_loop().sock_sendall(
                        self._socket, rest[start : start + SLICE_BYTES]
                    )

    def close(self) -> None:
        """See StreamPort."""
        self._socket.close()


class TransportPort(asyncio.BufferedProtocol):
    """The protocol of an asyncio transport, which reads only while somebody receives."""

    def __init__(self, *, on_lost: asyncio.BaseProtocol | None = None) -> None:
        self._transport: asyncio.Transport | None = None
        self._on_lost = on_lost
        """The protocol that the transport had before, which must hear of its end."""
        self._target: memoryview | None = None
        self._received: asyncio.Future[int] | None = None
        self._spill = bytearray(SPILL_BYTES)
        self._spilled = memoryview(b"")
        """Bytes that came while nobody received: a transport may deliver some after it was paused."""
        self._is_ended = False
        self._error: BaseException | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()

    def take(self, transport: asyncio.Transport) -> None:
        """Become the protocol of a transport that has one."""
        transport.pause_reading()
        transport.set_protocol(self)
        self.connection_made(transport)

    # ------------------------------------------------------------ what the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stop reading until somebody receives."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are of no such class
        self._transport.set_write_buffer_limits(high=2 * SLICE_BYTES)
        self._transport.pause_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where bytes go."""
        if self._target is not None:
            return self._target
        return memoryview(self._spill)[len(self._spilled) :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take note of bytes that came."""
        if self._target is None:
            self._spilled = memoryview(self._spill)[: len(self._spilled) + nbytes]
            return
        self._finish_receiving(nbytes)

    def eof_received(self) -> bool:
        """Take note of the stream's end; the transport stays open for what we send where it can."""
        self._is_ended = True
        self._finish_receiving(0)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake whoever waits."""
        self._is_ended = True
        self._error = exc
        self._finish_receiving(0)
        self._may_write.set()
        if self._on_lost is not None:
            self._on_lost.connection_lost(exc)

    def pause_writing(self) -> None:
        """Let senders wait."""
        self._may_write.clear()

    def resume_writing(self) -> None:
        """Let senders go on."""
        self._may_write.set()

    def _finish_receiving(self, num_bytes: int) -> None:
        self._target = None
        if self._received is not None and not self._received.done():
            self._received.set_result(num_bytes)
            self._open_transport.pause_reading()

    @property
    def _open_transport(self) -> asyncio.Transport:
        assert self._transport is not None, "not connected"
        return self._transport

    # ------------------------------------------------------------ what the stream asks

    def receive_now(self, target: memoryview) -> int | None:
        """See StreamPort."""
        if not self._spilled:
            return None
        num_bytes = min(len(target), len(self._spilled))
        target[:num_bytes] = self._spilled[:num_bytes]
        rest = bytes(self._spilled[num_bytes:])
        self._spill[: len(rest)] = rest
        self._spilled = memoryview(self._spill)[: len(rest)]
        return num_bytes

    async def receive(self, target: memoryview) -> int:
        """See StreamPort."""
        if (num_bytes := self.receive_now(target)) is not None:
            return num_bytes
        if self._error is not None:
            raise ConnectionResetError(str(self._error)) from self._error
        if self._is_ended:
            return 0
        self._received = asyncio.get_running_loop().create_future()
        self._target = target
        self._open_transport.resume_reading()
        try:
            return await self._received
        finally:
            self._received, self._target = None, None
            with contextlib.suppress(RuntimeError):  # a closed transport of some loops
                self._open_transport.pause_reading()

    async def send(self, header: bytes, payload: memoryview | bytes, timeout_s: float) -> None:
        """See StreamPort."""
        await self._send_slice(header, timeout_s)
        for start in range(0, len(payload), SLICE_BYTES):
            await self._send_slice(payload[start : start + SLICE_BYTES], timeout_s)

    async def _send_slice(self, data: memoryview | bytes, timeout_s: float) -> None:
        if self._open_transport.is_closing():
            raise ConnectionResetError("the connection is closed")
        self._open_transport.write(data)
        if not self._may_write.is_set():
            async with asyncio.timeout(timeout_s):
                await self._may_write.wait()

    def close(self) -> None:
        """See StreamPort."""
        self._open_transport.abort()
