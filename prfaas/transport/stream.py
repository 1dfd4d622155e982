"""The receiving end of a transfer's stream: dials, asks for the upgrade, and takes verified frames.

The connection is our own, not aiohttp's, so that no buffer stands between it and the pool's pages.
"""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Mapping
from typing import Any

from prfaas.errors import ProtocolError, TransferError
from prfaas.transport.address import PeerAddress, as_transfer_errors
from prfaas.transport.coding import PageDecoder
from prfaas.transport.kv_numbers import KvNumbers
from prfaas.transport.ports import SocketPort, StreamPort, TransportPort
from prfaas.transport.seals import CHECKSUM, FrameSeal
from prfaas.transport.wire import (
    FROM_SENDER,
    Codec,
    Frame,
    FrameDecoder,
    FrameType,
    Resolve,
    encode_frame,
)

UPGRADE = "prfaas-kv"
MAX_HEAD_BYTES = 4096
YIELD_BYTES = 4 << 20
"""A stream that never runs dry gives the loop to others this often."""


class FrameStream:
    """Verified frames from one peer, in order."""

    def __init__(
        self,
        port: StreamPort,
        rest: bytes,
        resolve: Resolve,
        address: PeerAddress,
        *,
        peer_seal: FrameSeal = CHECKSUM,
        our_seal: FrameSeal = CHECKSUM,
        codecs: frozenset[Codec] = frozenset({Codec.RAW}),
        numbers: KvNumbers | None = None,
    ) -> None:
        self._port = port
        self._rest = memoryview(rest)
        self._address = address
        self._our_seal = our_seal
        self._decoder = FrameDecoder(
            allowed=FROM_SENDER, resolve=resolve, seal=peer_seal, codecs=codecs
        )
        self._pages = PageDecoder(numbers or KvNumbers())
        self._num_unyielded_bytes = 0

    def close(self) -> None:
        """Close the connection and end the thread that decodes, if there is one. Idempotent."""
        self._port.close()
        self._pages.close()

    async def next_frame(self, timeout_s: float) -> Frame | None:
        """Return the next verified frame, or None when the sender closed the stream between two.

        Raises TransferTimeout if no whole frame came within `timeout_s`, ProtocolError for a
        damaged or cut one, TransferError for a broken connection.
        """
        with as_transfer_errors(self._address):
            return await self._receive(asyncio.get_running_loop().time() + timeout_s)

    async def acknowledge(self, timeout_s: float) -> None:
        """Tell the sender that everything is verified, so that it may let its pages go."""
        frame = encode_frame(FrameType.ACK, seal=self._our_seal)
        with as_transfer_errors(self._address):
            await self._port.send(frame, b"", timeout_s)

    async def _receive(self, deadline_s: float) -> Frame | None:
        while True:
            target = self._decoder.buffer()
            num_bytes = self._take_rest(target) or await self._fill(target, deadline_s)
            if not num_bytes:
                self._decoder.ended()
                return None
            frame = self._decoder.received(num_bytes)
            if frame is not None:
                if frame.target is not None:
                    await self._pages.place(frame)
                return frame

    def _take_rest(self, target: memoryview) -> int:
        """Move bytes that came with the upgrade's answer."""
        num_bytes = min(len(target), len(self._rest))
        target[:num_bytes] = self._rest[:num_bytes]
        self._rest = self._rest[num_bytes:]
        return num_bytes

    async def _fill(self, target: memoryview, deadline_s: float) -> int:
        """Receive something; a timer and the loop's turn cost only when there is nothing yet."""
        if self._num_unyielded_bytes < YIELD_BYTES:
            num_bytes = self._port.receive_now(target)
            if num_bytes is not None:
                self._num_unyielded_bytes += num_bytes
                return num_bytes
        self._num_unyielded_bytes = 0
        await asyncio.sleep(0)
        async with asyncio.timeout_at(deadline_s):
            return await self._port.receive(target)


async def _candidates(address: PeerAddress) -> list[tuple[int, tuple[Any, ...]]]:
    """Return (family, socket address) pairs; a literal address needs no resolver and no thread."""
    with contextlib.suppress(ValueError):
        version = ipaddress.ip_address(address.host).version
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        return [(family, (address.host, address.port))]
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return [(family, target) for family, _, _, _, target in found]


async def connect(address: PeerAddress, tls: ssl.SSLContext | None) -> StreamPort:
    """Return a connection to the peer, by TLS if there is a context for it."""
    if tls is None:
        return SocketPort(await _connect_socket(address))
    sock = await _connect_socket(address)
    loop = asyncio.get_running_loop()
    try:
        _, port = await loop.create_connection(
            TransportPort, sock=sock, ssl=tls, server_hostname=address.host
        )
    except BaseException:
        sock.close()
        raise
    return port


async def _connect_socket(address: PeerAddress) -> socket.socket:
    loop = asyncio.get_running_loop()
    failure: OSError | None = None
    for family, target in await _candidates(address):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, target)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure or OSError(f"{address} has no address")


async def upgrade(
    port: StreamPort, address: PeerAddress, path: str, headers: Mapping[str, str], timeout_s: float
) -> bytes:
    """Ask for the raw stream; return what came behind the answer's head."""
    lines = [f"GET {path} HTTP/1.1", f"Host: {address}", "Connection: Upgrade"]
    lines += [f"Upgrade: {UPGRADE}", *(f"{name}: {value}" for name, value in headers.items())]
    await port.send("\r\n".join([*lines, "", ""]).encode("ascii"), b"", timeout_s)
    head = bytearray()
    part = memoryview(bytearray(MAX_HEAD_BYTES))
    while b"\r\n\r\n" not in head:
        if len(head) > MAX_HEAD_BYTES:
            raise ProtocolError(f"answer to the upgrade is longer than {MAX_HEAD_BYTES} bytes")
        num_bytes = await port.receive(part)
        if not num_bytes:
            raise ProtocolError("the peer closed the connection instead of upgrading it")
        head += part[:num_bytes]
    head_text, _, rest = bytes(head).partition(b"\r\n\r\n")
    status_line = head_text.partition(b"\r\n")[0]
    if not status_line.startswith(b"HTTP/1.1 101 "):
        raise TransferError(f"upgrade refused: {status_line[:64].decode('ascii', 'replace')!r}")
    return rest
