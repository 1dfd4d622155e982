"""A TCP relay that hurts what it carries: cuts, black holes, flipped bits, delays, at any place of any frame."""

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from typing import Literal

from prfaas.transport.seals import CHECKSUM_BYTES, MAC_BYTES
from prfaas.transport.wire import FrameType
from tests.accepting import accept_no_more
from tests.frame_scanner import FrameScanner, Part, Spot

STREAM_START = b"GET /kv/v1/stream"
READ_BYTES = 1 << 16
SLOW_BYTES = 32 << 10
"""What a slow stream lets pass in SLOW_S."""
SLOW_S = 0.01

Direction = Literal["down", "up"]
"""down: what the prefill node sends; up: what its asker does."""


@dataclass(frozen=True)
class Fault:
    """What happens to the bytes of streams, once."""

    after_bytes: int
    """Sent in that direction since the fault was set, on all streams together (or on `stream`)."""
    kind: str
    """cut: the stream ends there. gone: all streams end, and no new one gets through while the fault is
    set. black_hole: nothing passes on any stream any more, swallow: on this one. flip: one bit. half_close: the sender's half
    of the stream ends. twice: half of what is left of the frame comes twice. again: the whole frame does.
    delay: nothing passes on this stream for a while. hold: until nothing passes on any other. slow: little passes on
    this stream any more."""
    at: Spot | None = None
    """Strike there instead of after so many bytes."""
    stream: int | None = None
    """Only on the so-manieth stream since the fault was set; None is the first that comes so far."""
    direction: Direction = "down"
    seconds: float = 0.1
    """How long a delay is, and how long others must be quiet for a hold to end."""
    then: "Fault | None" = None
    """Set as soon as this one strikes."""


def tag_bytes(cluster_key: object | None) -> int:
    """Return how long the tags of frames are with a cluster key, or without."""
    return CHECKSUM_BYTES if cluster_key is None else MAC_BYTES


class _Lane:
    """One direction of one stream."""

    def __init__(
        self, number: int, direction: Direction, tag_bytes: int | None, writer: asyncio.StreamWriter
    ) -> None:
        self.number = number
        self.direction = direction
        self.scanner = FrameScanner(tag_bytes)
        self.writer = writer
        self.passed = 0
        """Bytes since the fault was set."""
        self.seen: dict[int, int] = {}
        """Frames of each kind that began since the fault was set."""
        self.is_slow = False
        self.num_slow = 0
        """Bytes that passed since the last pause."""
        self.copy: bytearray | None = None
        """Of a frame that must come again."""
        self.flips_next = False


class Relay:
    """Forwards connections to a port; `fault` counts from when it is set.

    Args:
        tag_bytes: of the frames that it carries.
    """

    def __init__(self, tag_bytes: int = CHECKSUM_BYTES) -> None:
        self.is_opaque = False
        """What it carries is encrypted: every connection made from now on counts as a stream."""
        self.target_port = 0
        self.port = 0
        self.is_black_hole = False
        """Nothing passes in either direction any more, on any connection; none is closed."""
        self.receive_buffer_bytes: int | None = None
        """Of connections that are made from now on: how soon a sender notices that a stream is slow."""
        self.num_streams = 0
        self.stream_bytes = 0
        """Sent by the prefill node on streams behind the answer to the upgrade, passed or not."""
        self.delivered: dict[int, int] = {}
        """Bytes of each kind of frame, headers included, that the asker was given."""
        self.num_struck = 0
        self._tag_bytes = tag_bytes
        self._fault: Fault | None = None
        self._passed = 0
        self._has_struck = False
        self._hurt = asyncio.Event()
        self._quiet_since_s: dict[int, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: set[asyncio.Task[None]] = set()
        self._lanes: set[_Lane] = set()
        self._server: asyncio.Server | None = None

    @property
    def fault(self) -> Fault | None:
        return self._fault

    @fault.setter
    def fault(self, fault: Fault | None) -> None:
        self._fault, self._passed, self._has_struck = fault, 0, False
        self._hurt.clear()
        for lane in self._lanes:
            lane.passed, lane.seen, lane.is_slow, lane.num_slow = 0, {}, False, 0

    @property
    def page_bytes(self) -> int:
        """Bytes of PAGE and PAGES frames that the asker was given."""
        return sum(self.delivered.get(kind, 0) for kind in (FrameType.PAGE, FrameType.PAGES))

    async def start(self, target_port: int) -> None:
        self.target_port = target_port
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            await accept_no_more(self._server)
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
        """Return once a fault has struck, and those that were to follow it."""
        await self._hurt.wait()

    # ------------------------------------------------------------ connections

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
        up_reader, up_writer = await self._connect()
        task = asyncio.current_task()
        assert task is not None
        lanes: list[_Lane] = []
        try:
            first = b"" if self.is_opaque else await reader.read(READ_BYTES)
            is_stream = self.is_opaque or first.startswith(STREAM_START)
            if is_stream and self._is_gone():
                return
            up_writer.write(first)
            if is_stream:
                tag_bytes = None if self.is_opaque else self._tag_bytes
                lanes = [
                    _Lane(self.num_streams, "down", tag_bytes, writer),
                    _Lane(self.num_streams, "up", tag_bytes, up_writer),
                ]
                self.num_streams += 1
                self._streams.add(task)
                self._lanes.update(lanes)
                pumps = (
                    self._pump_stream(up_reader, lanes[0]),
                    self._pump_stream(reader, lanes[1]),
                )
            else:
                pumps = (self._pump(up_reader, writer), self._pump(reader, up_writer))
            async with asyncio.TaskGroup() as tasks:
                jobs = [tasks.create_task(pump) for pump in pumps]
                await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
                for job in jobs:
                    job.cancel()
        finally:
            self._streams.discard(task)
            self._lanes.difference_update(lanes)
            up_writer.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = socket.socket()
        try:
            if self.receive_buffer_bytes is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_buffer_bytes)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.target_port))
            limit = self.receive_buffer_bytes or READ_BYTES
            return await asyncio.open_connection(sock=sock, limit=limit)
        except BaseException:
            sock.close()
            raise

    def _is_gone(self) -> bool:
        return self._fault is not None and self._fault.kind == "gone" and self._has_struck

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                if self.is_black_hole:
                    await asyncio.Event().wait()
                writer.write(data)
                await writer.drain()

    # ------------------------------------------------------------ streams

    async def _pump_stream(self, reader: asyncio.StreamReader, lane: _Lane) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if lane.direction == "down" and not lane.scanner.is_tls:
                lane.writer.write(await reader.readuntil(b"\r\n\r\n"))
            while data := await reader.read(READ_BYTES):
                if lane.direction == "down":
                    self.stream_bytes += len(data)
                for part in lane.scanner.feed(data):
                    await self._pass(part, lane)
                await lane.writer.drain()

    async def _pass(self, part: Part, lane: _Lane) -> None:
        fault = self._fault
        is_hole = fault is not None and fault.kind == "black_hole" and self._has_struck
        if self.is_black_hole or is_hole:
            await asyncio.Event().wait()
        index = self._strikes_at(part, lane)
        if index is None or fault is None:
            await self._write(part, part.data, lane)
        else:
            await self._strike(part, index, fault, lane)

    def _strikes_at(self, part: Part, lane: _Lane) -> int | None:
        """Return at which byte of the part the fault strikes, None if not in it; count what has passed."""
        fault, num_bytes = self._fault, len(part.data)
        number = lane.seen.get(part.kind, 0)
        if part.end == part.frame_bytes:
            lane.seen[part.kind] = number + 1
        if fault is None or lane.direction != fault.direction:
            return None
        before = self._passed if fault.stream is None else lane.passed
        self._passed += num_bytes
        lane.passed += num_bytes
        if self._has_struck or fault.stream not in (None, lane.number):
            return None
        if fault.at is None:
            return fault.after_bytes - before if before + num_bytes > fault.after_bytes else None
        if part.kind != fault.at.kind or number != fault.at.skip:
            return None
        offset = fault.at.offset(part.header_bytes, part.frame_bytes)
        is_here = part.start <= offset < part.end or offset == part.end == part.frame_bytes
        return offset - part.start if is_here else None

    async def _write(self, part: Part, data: bytes, lane: _Lane) -> None:
        if lane.flips_next:
            lane.flips_next, data = False, _flipped(data, 0)
        if lane.copy is not None:
            lane.copy += data
            if part.end == part.frame_bytes:
                data, lane.copy = data + bytes(lane.copy), None
        self._quiet_since_s[lane.number] = asyncio.get_running_loop().time()
        if lane.direction == "down":
            self.delivered[part.kind] = self.delivered.get(part.kind, 0) + len(data)
        lane.writer.write(data)
        lane.num_slow += len(data) if lane.is_slow else 0
        if lane.num_slow > SLOW_BYTES:
            lane.num_slow -= SLOW_BYTES
            await asyncio.sleep(SLOW_S)

    async def _strike(self, part: Part, index: int, fault: Fault, lane: _Lane) -> None:
        self.num_struck += 1
        if fault.then is None:
            self._has_struck = True
            self._hurt.set()
        else:
            self.fault = fault.then
        head, rest = part.data[:index], part.data[index:]
        match fault.kind:
            case "flip" if rest:
                await self._write(part, _flipped(part.data, index), lane)
            case "flip":
                lane.flips_next = True
                await self._write(part, part.data, lane)
            case "twice":
                await self._write(part, head + rest[: (len(rest) + 1) // 2] + rest, lane)
            case "again":
                lane.copy = bytearray()
                await self._write(part, part.data, lane)
            case "slow":
                lane.is_slow = True
                await self._write(part, part.data, lane)
            case "delay" | "hold":
                await self._write(part, head, lane)
                await lane.writer.drain()
                await asyncio.sleep(fault.seconds)
                while fault.kind == "hold" and self._is_busy_beside(lane, fault.seconds):  # noqa: ASYNC110
                    await asyncio.sleep(fault.seconds / 4)
                await self._write(part, rest, lane)
            case _:
                await self._write(part, head, lane)
                await lane.writer.drain()
                await self._end(fault.kind, lane)

    def _is_busy_beside(self, lane: _Lane, seconds: float) -> bool:
        now_s = asyncio.get_running_loop().time()
        return any(
            now_s - since_s < seconds
            for number, since_s in self._quiet_since_s.items()
            if number != lane.number
        )

    async def _end(self, kind: str, lane: _Lane) -> None:
        if kind in ("black_hole", "swallow"):
            await asyncio.Event().wait()
        if kind == "half_close":
            if lane.writer.can_write_eof():
                lane.writer.write_eof()
            await asyncio.Event().wait()
        if kind == "gone":
            self.cut_streams()
        assert kind in ("cut", "half_close", "gone"), kind
        raise ConnectionResetError


def _flipped(data: bytes, index: int) -> bytes:
    return data[:index] + bytes([data[index] ^ 0x10]) + data[index + 1 :]
