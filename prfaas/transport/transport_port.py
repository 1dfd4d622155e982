"""A stream's bytes in and out over an asyncio transport, which TLS needs: it decrypts into pool pages and encrypts from them."""

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from typing import cast

from prfaas.transport.ports import ByteSink

SLICE_BYTES = 256 << 10
SPILL_BYTES = 512 << 10


class TransportPort(asyncio.BufferedProtocol):
    """The protocol of an asyncio transport, which reads only while somebody receives."""

    def __init__(self, *, on_lost: asyncio.BaseProtocol | None = None) -> None:
        self._transport: asyncio.Transport | None = None
        self._sock: socket.socket | None = None
        """Kept: a TLS transport that is closed cannot be asked for it."""
        self._on_lost = on_lost
        """The protocol that the transport had before, which must hear of its end."""
        self._sink: ByteSink | None = None
        self._is_paused = False
        self._target: memoryview | None = None
        """Where the sink or `receive` wants the next bytes."""
        self._received: asyncio.Future[int] | None = None
        self._spill = bytearray()
        self._spilled = memoryview(b"")
        """Bytes that came while nobody received: a transport may deliver some after it was paused."""
        self._is_ended = False
        self._error: Exception | None = None
        self._slice_bytes = SLICE_BYTES
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
        self._sock = cast("socket.socket", transport.get_extra_info("socket"))
        self.limit_unsent(2 * SLICE_BYTES)
        self._transport.pause_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where bytes go."""
        if self._sink is not None and not self._is_paused:
            self._target = self._sink.buffer()
        if self._target is not None:
            return self._target
        if not self._spill:
            self._spill = bytearray(SPILL_BYTES)
        return memoryview(self._spill)[len(self._spilled) :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take note of bytes that came."""
        if self._target is None:
            self._spilled = memoryview(self._spill)[: len(self._spilled) + nbytes]
        elif self._sink is not None:
            self._target = None
            self._sink.received(nbytes)
        else:
            self._finish_receiving(nbytes)

    def eof_received(self) -> bool:
        """Take note of the stream's end; the transport stays open for what we send where it can."""
        self._end(None)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake whoever waits."""
        self._end(exc)
        self._may_write.set()
        if self._on_lost is not None:
            self._on_lost.connection_lost(exc)

    def pause_writing(self) -> None:
        """Let senders wait."""
        self._may_write.clear()

    def resume_writing(self) -> None:
        """Let senders go on."""
        self._may_write.set()

    def _end(self, error: Exception | None) -> None:
        if not self._is_ended:
            self._is_ended, self._error = True, error
            self._finish_receiving(0)
            self._tell_end()

    def _open_sink(self) -> ByteSink | None:
        return None if self._is_paused else self._sink

    def _tell_end(self) -> None:
        if self._is_ended and self._sink is not None and not self._is_paused and not self._spilled:
            sink, self._sink = self._sink, None
            sink.ended(self._error)

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

    @property
    def sock(self) -> socket.socket:
        """See StreamPort."""
        assert self._sock is not None, "not connected"
        return self._sock

    async def receive(self, target: memoryview) -> int:
        """See StreamPort."""
        if self._spilled:
            return self._unspill(target)
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
            self._pause_transport()

    def _unspill(self, target: memoryview) -> int:
        num_bytes = min(len(target), len(self._spilled))
        target[:num_bytes] = self._spilled[:num_bytes]
        rest = bytes(self._spilled[num_bytes:])
        self._spill[: len(rest)] = rest
        self._spilled = memoryview(self._spill)[: len(rest)]
        return num_bytes

    def _pause_transport(self) -> None:
        with contextlib.suppress(RuntimeError):  # a closed transport of some loops
            self._open_transport.pause_reading()

    def start(self, sink: ByteSink) -> None:
        """See StreamPort."""
        self._sink, self._is_paused = sink, True
        self.resume()

    def stop(self) -> None:
        """See StreamPort."""
        if self._sink is not None:
            self._sink = self._target = None
            self._pause_transport()

    def pause(self) -> None:
        """See StreamPort."""
        self._is_paused, self._target = True, None
        self._pause_transport()

    def resume(self) -> None:
        """See StreamPort."""
        if not self._is_paused or self._sink is None:
            return
        self._is_paused = False
        while self._spilled and (sink := self._open_sink()) is not None:
            sink.received(self._unspill(sink.buffer()))
        self._tell_end()
        if self._open_sink() is not None:
            with contextlib.suppress(RuntimeError):
                self._open_transport.resume_reading()

    def send_now(self, buffers: Sequence[memoryview | bytes]) -> int:
        """See StreamPort."""
        if self._open_transport.is_closing():
            raise ConnectionResetError("the connection is closed")
        num_bytes = 0
        for data in buffers:
            for start in range(0, len(data), self._slice_bytes):
                if not self._may_write.is_set():
                    return num_bytes
                part = data[start : start + self._slice_bytes]
                self._open_transport.write(part)
                num_bytes += len(part)
        return num_bytes

    def limit_unsent(self, num_bytes: int) -> None:
        """Take nothing more while more than so many bytes wait in memory; at most half as many at once."""
        self._slice_bytes = num_bytes // 2
        self._open_transport.set_write_buffer_limits(high=num_bytes)

    async def writable(self) -> None:
        """See StreamPort."""
        await self._may_write.wait()

    def interrupt(self) -> None:
        """See StreamPort."""
        self._may_write.set()

    def close(self) -> None:
        """See StreamPort."""
        self._sink = self._target = None
        self._open_transport.abort()
