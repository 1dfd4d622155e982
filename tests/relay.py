"""A TCP relay that hurts what it carries: cuts, black holes, flipped bits, on raw streams."""

import asyncio
import contextlib
from dataclasses import dataclass

STREAM_START = b"GET /kv/v1/stream"


@dataclass
class Fault:
    """What happens to the bytes that the prefill node sends on all streams together, once."""

    after_bytes: int
    kind: str
    """cut: the stream ends there. gone: all streams end, and no new one gets through while the fault is
    set. black_hole: nothing passes on any stream any more, swallow: on this one. flip: one bit. half_close: the sender's half
    of the stream ends. twice: what follows comes twice."""


class Relay:
    """Forwards connections to a port; `fault` counts from when it is set."""

    def __init__(self) -> None:
        self.is_opaque = False
        """What it carries is encrypted: every connection made from now on counts as a stream."""
        self.target_port = 0
        self.port = 0
        self.is_black_hole = False
        """Nothing passes in either direction any more, on any connection; none is closed."""
        self.num_streams = 0
        self.stream_bytes = 0
        """Sent by the prefill node on streams behind the answer to the upgrade, passed or not."""
        self._fault: Fault | None = None
        self._passed = 0
        self._has_struck = False
        self._hurt = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def fault(self) -> Fault | None:
        return self._fault

    @fault.setter
    def fault(self, fault: Fault | None) -> None:
        self._fault, self._passed, self._has_struck = fault, 0, False

    async def start(self, target_port: int) -> None:
        self.target_port = target_port
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self.cut_all()
            await asyncio.sleep(0.05)  # transports close their sockets some turns later

    async def cut_all(self) -> None:
        """Close every connection."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cut_streams(self) -> None:
        """Close every stream."""
        for task in list(self._streams):
            task.cancel()

    async def hurt(self) -> None:
        """Return once a fault has struck."""
        await self._hurt.wait()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._forward(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        task = asyncio.current_task()
        assert task is not None
        try:
            first = await reader.read(1 << 16)
            is_stream = self.is_opaque or first.startswith(STREAM_START)
            if is_stream and self._is_gone():
                return
            if is_stream:
                self.num_streams += 1
                self._streams.add(task)
            up_writer.write(first)
            async with asyncio.TaskGroup() as tasks:
                back = self._pump_stream if is_stream else self._pump
                jobs = [
                    tasks.create_task(self._pump(reader, up_writer)),
                    tasks.create_task(back(up_reader, writer)),
                ]
                await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
                for job in jobs:
                    job.cancel()
        finally:
            self._streams.discard(task)
            up_writer.transport.abort()

    def _is_gone(self) -> bool:
        return self._fault is not None and self._fault.kind == "gone" and self._has_struck

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if self.is_black_hole:
                    await asyncio.Event().wait()
                writer.write(data)
                await writer.drain()

    async def _pump_stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if not self.is_opaque:
                writer.write(await reader.readuntil(b"\r\n\r\n"))
            while data := await reader.read(1 << 16):
                self.stream_bytes += len(data)
                fault, before = self._fault, self._passed
                self._passed += len(data)
                is_hole = fault is not None and fault.kind == "black_hole" and self._has_struck
                if self.is_black_hole or is_hole:
                    await asyncio.Event().wait()
                if fault is not None and not self._has_struck and self._passed > fault.after_bytes:
                    data = await self._strike(data, fault.after_bytes - before, fault, writer)
                writer.write(data)
                await writer.drain()

    async def _strike(
        self, data: bytes, index: int, fault: Fault, writer: asyncio.StreamWriter
    ) -> bytes:
        self._has_struck = True
        self._hurt.set()
        if fault.kind == "flip":
            return data[:index] + bytes([data[index] ^ 0x10]) + data[index + 1 :]
        if fault.kind == "twice":
            return data + data[index:]
        writer.write(data[:index])
        await writer.drain()
        if fault.kind in ("black_hole", "swallow"):
            await asyncio.Event().wait()
        if fault.kind == "half_close":
            writer.write_eof()
            await asyncio.Event().wait()
        if fault.kind == "gone":
            self.cut_streams()
        raise ConnectionResetError
