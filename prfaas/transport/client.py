"""The pd side of the KV channel: asks a prefill node for a prompt's KV and receives its frames.

Control requests are HTTP through aiohttp. The stream is a plain socket of our own: it asks for the
upgrade itself, so that no buffer stands between the kernel and the pool's pages. This side dials
and pulls; only the prefill node must be reachable.
"""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from prfaas.errors import (
    IncompatiblePeer,
    Overloaded,
    PromptRefused,
    ProtocolError,
    TransferError,
    TransferTimeout,
)
from prfaas.transport.handshake import Identity
from prfaas.transport.messages import (
    PeerStatus,
    TransferAccepted,
    TransferRequest,
    dump,
    encode_transfer_request,
    parse_accepted,
    parse_object,
    parse_status,
)
from prfaas.transport.options import TransportOptions
from prfaas.transport.wire import FROM_SENDER, Frame, FrameDecoder, FrameType, Resolve, encode_frame

UPGRADE = "prfaas-kv"
MAX_REPLY_BYTES = 1 << 20
MAX_HEAD_BYTES = 4096
MAX_RETRY_AFTER_S = 60.0
REFUSED_STATUSES = frozenset({413, 422})
"""Of prompts that are too long for the peer."""
YIELD_BYTES = 4 << 20
"""A stream that never runs dry gives the loop to others this often."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a prefill node listens."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(text: str) -> PeerAddress:
    """Return the address in "host:port" or "[v6]:port"; raise ValueError naming the text."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not host:port")
    return PeerAddress(host, int(port))


class PeerClient:
    """Talks to one prefill node. Every failure is a TransferError or, when it is full, Overloaded."""

    def __init__(self, address: PeerAddress, options: TransportOptions) -> None:
        self.address = address
        self._options = options
        self._session = aiohttp.ClientSession(
            base_url=f"http://{address}",
            timeout=aiohttp.ClientTimeout(total=None, connect=options.connect_timeout_s),
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close the connections that are kept for control requests."""
        await self._session.close()

    async def handshake(self, ours: Identity) -> PeerStatus:
        """Return who the peer is and how busy; the caller compares the identities."""
        body = dump({"identity": ours.to_json()})
        return parse_status(await self._post("/kv/v1/handshake", body))

    async def open(self, asked: TransferRequest) -> TransferAccepted:
        """Ask for a transfer; return once the peer has reserved all pages and queued the prompt.

        Raises IncompatiblePeer, PromptRefused, Overloaded (with the peer's wish when to retry) or
        TransferError.
        """
        return parse_accepted(await self._post("/kv/v1/transfers", encode_transfer_request(asked)))

    async def cancel(self, transfer_id: str) -> None:
        """Tell the peer to drop a transfer whose stream was never opened; unknown ones are fine."""
        with _as_transfer_errors(self.address):
            async with (
                asyncio.timeout(self._options.connect_timeout_s),
                self._session.delete(f"/kv/v1/transfers/{transfer_id}"),
            ):
                pass

    @contextlib.asynccontextmanager
    async def stream(self, transfer_id: str, resolve: Resolve) -> AsyncIterator["FrameStream"]:
        """Open the stream of an accepted transfer; leaving the block closes it, and cancels it.

        Pages are received where `resolve` says.
        """
        with _as_transfer_errors(self.address):
            async with asyncio.timeout(self._options.connect_timeout_s):
                sock = await _connect(self.address)
        try:
            with _as_transfer_errors(self.address):
                async with asyncio.timeout(self._options.stall_timeout_s):
                    rest = await _upgrade(sock, self.address, transfer_id)
            yield FrameStream(sock, rest, resolve, self.address)
        finally:
            sock.close()

    async def _post(self, path: str, body: bytes) -> bytes:
        with _as_transfer_errors(self.address):
            async with (
                asyncio.timeout(self._options.stall_timeout_s),
                self._session.post(
                    path, data=body, headers={"Content-Type": "application/json"}
                ) as response,
            ):
                reply = await _read_bounded(response)
                if response.status < 300:
                    return reply
                raise _refusal(response, reply, self.address)


class FrameStream:
    """Verified frames from one peer, in order."""

    def __init__(
        self, sock: socket.socket, rest: bytes, resolve: Resolve, address: PeerAddress
    ) -> None:
        self._sock = sock
        self._rest = memoryview(rest)
        self._address = address
        self._decoder = FrameDecoder(allowed=FROM_SENDER, resolve=resolve)
        self._num_unyielded_bytes = 0

    async def next_frame(self, timeout_s: float) -> Frame | None:
        """Return the next verified frame, or None when the sender closed the stream between two.

        Raises TransferTimeout if no whole frame came within `timeout_s`, ProtocolError for a
        damaged or cut one, TransferError for a broken connection.
        """
        with _as_transfer_errors(self._address):
            return await self._receive(asyncio.get_running_loop().time() + timeout_s)

    async def acknowledge(self, timeout_s: float) -> None:
        """Tell the sender that everything is verified, so that it may let its pages go."""
        loop = asyncio.get_running_loop()
        with _as_transfer_errors(self._address):
            async with asyncio.timeout(timeout_s):
                await loop.sock_sendall(self._sock, encode_frame(FrameType.ACK))

    async def _receive(self, deadline_s: float) -> Frame | None:
        while True:
            target = self._decoder.buffer()
            num_bytes = self._take_rest(target) or await self._fill(target, deadline_s)
            if not num_bytes:
                self._decoder.ended()
                return None
            frame = self._decoder.received(num_bytes)
            if frame is not None:
                return frame

    def _take_rest(self, target: memoryview) -> int:
        """Move bytes that came with the upgrade's answer."""
        num_bytes = min(len(target), len(self._rest))
        target[:num_bytes] = self._rest[:num_bytes]
        self._rest = self._rest[num_bytes:]
        return num_bytes

    async def _fill(self, target: memoryview, deadline_s: float) -> int:
        """Receive something; a timer and the loop's turn cost only when there is nothing yet."""
        loop = asyncio.get_running_loop()
        if self._num_unyielded_bytes < YIELD_BYTES:
            with contextlib.suppress(BlockingIOError):
                num_bytes = self._sock.recv_into(target)
                self._num_unyielded_bytes += num_bytes
                return num_bytes
        self._num_unyielded_bytes = 0
        await asyncio.sleep(0)
        async with asyncio.timeout_at(deadline_s):
            return await loop.sock_recv_into(self._sock, target)


async def _candidates(address: PeerAddress) -> list[tuple[int, tuple[Any, ...]]]:
    """Return (family, socket address) pairs; a literal address needs no resolver and no thread."""
    with contextlib.suppress(ValueError):
        version = ipaddress.ip_address(address.host).version
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        return [(family, (address.host, address.port))]
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return [(family, target) for family, _, _, _, target in found]


async def _connect(address: PeerAddress) -> socket.socket:
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


async def _upgrade(sock: socket.socket, address: PeerAddress, transfer_id: str) -> bytes:
    """Ask for the raw stream; return what came behind the answer's head."""
    loop = asyncio.get_running_loop()
    request = (
        f"GET /kv/v1/transfers/{transfer_id}/stream HTTP/1.1\r\n"
        f"Host: {address}\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n\r\n"
    )
    await loop.sock_sendall(sock, request.encode("ascii"))
    head = bytearray()
    while b"\r\n\r\n" not in head:
        if len(head) > MAX_HEAD_BYTES:
            raise ProtocolError(f"answer to the upgrade is longer than {MAX_HEAD_BYTES} bytes")
        received = await loop.sock_recv(sock, MAX_HEAD_BYTES)
        if not received:
            raise ProtocolError("the peer closed the connection instead of upgrading it")
        head += received
    head_text, _, rest = bytes(head).partition(b"\r\n\r\n")
    status_line = head_text.partition(b"\r\n")[0]
    if not status_line.startswith(b"HTTP/1.1 101 "):
        raise TransferError(f"upgrade refused: {status_line[:64].decode('ascii', 'replace')!r}")
    return rest


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    reply = bytearray()
    async for chunk in response.content.iter_any():
        reply += chunk
        if len(reply) > MAX_REPLY_BYTES:
            raise ProtocolError(f"reply is longer than {MAX_REPLY_BYTES} bytes")
    return bytes(reply)


def _refusal(
    response: aiohttp.ClientResponse, reply: bytes, address: PeerAddress
) -> TransferError | Overloaded:
    try:
        message = str(parse_object(reply)["error"]["message"])[:512]
    except (ProtocolError, KeyError, TypeError):
        message = f"HTTP status {response.status}"
    message = f"peer {address}: {message}"
    if response.status == 503:
        try:
            retry_after_s = float(response.headers.get("Retry-After", "1"))
        except ValueError:
            retry_after_s = 1.0
        return Overloaded(message, retry_after_s=min(max(retry_after_s, 0.0), MAX_RETRY_AFTER_S))
    if response.status == 409:
        return IncompatiblePeer(message)
    if response.status in REFUSED_STATUSES:
        return PromptRefused(message)
    return TransferError(message)


@contextlib.contextmanager
def _as_transfer_errors(address: PeerAddress) -> Iterator[None]:
    """Map what sockets and aiohttp raise to TransferError, once, at the door."""
    try:
        yield
    except TimeoutError as error:
        raise TransferTimeout(f"peer {address}: nothing verified within the deadline") from error
    except (OSError, aiohttp.ClientError) as error:
        raise TransferError(f"peer {address}: {str(error) or type(error).__name__}") from error
