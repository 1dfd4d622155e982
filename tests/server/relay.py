"""A TCP relay that hurts what it carries: cuts, black holes, flipped bits, on one kind of connection."""

import asyncio
import contextlib
from dataclasses import dataclass

STREAM_START = b"GET /kv/v1/transfers/"


@dataclass
class Fault:
    """What happens to the bytes that the prefill node sends on a stream connection."""

    after_bytes: int
    kind: str
    """cut, black_hole or flip"""


class Relay:
    """Forwards connections to a port; `fault` applies to streams that begin while it is set."""

    def __init__(self) -> None:
        self.target_port = 0
        self.port = 0
        self.fault: Fault | None = None
        self.is_black_hole = False
        """Nothing passes in either direction any more, on any connection; none is closed."""
        self.num_streams = 0
        self.stream_bytes = 0
        """Sent by the prefill node on streams, passed or not."""
        self._hurt = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, target_port: int) -> None:
        self.target_port = target_port
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self.cut_all()

    async def cut_all(self) -> None:
        """Close every connection."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

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
        try:
            first = await reader.read(1 << 16)
            is_stream = first.startswith(STREAM_START)
            self.num_streams += is_stream
            fault = self.fault if is_stream else None
            up_writer.write(first)
            async with asyncio.TaskGroup() as tasks:
                jobs = [
                    tasks.create_task(self._pump(reader, up_writer, None, is_stream=False)),
                    tasks.create_task(self._pump(up_reader, writer, fault, is_stream=is_stream)),
                ]
                await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
                for job in jobs:
                    job.cancel()
        finally:
            up_writer.transport.abort()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        fault: Fault | None,
        *,
        is_stream: bool,
    ) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if is_stream:
                    self.stream_bytes += len(data)
                if self.is_black_hole:
                    await asyncio.Event().wait()
                if fault is not None and passed + len(data) > fault.after_bytes:
                    data = await self._strike(data, fault.after_bytes - passed, fault, writer)
                    fault = None
                passed += len(data)
                writer.write(data)
                await writer.drain()

    async def _strike(
        self, data: bytes, index: int, fault: Fault, writer: asyncio.StreamWriter
    ) -> bytes:
        self._hurt.set()
        if fault.kind == "flip":
            return data[:index] + bytes([data[index] ^ 0x10]) + data[index + 1 :]
        writer.write(data[:index])
        await writer.drain()
        if fault.kind == "black_hole":
            await asyncio.Event().wait()
        raise ConnectionResetError
