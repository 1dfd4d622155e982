"""Connections to a peer that become raw streams.

They are our own, not aiohttp's, so that no buffer stands between them and the pool's pages.
"""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Mapping
from typing import Any

from prfaas.errors import ProtocolError, TransferError
from prfaas.transport.address import PeerAddress
from prfaas.transport.ports import SocketPort, StreamPort
from prfaas.transport.tcpinfo import set_congestion
from prfaas.transport.transport_port import TransportPort

UPGRADE = "prfaas-kv"
MAX_HEAD_BYTES = 4096
KEEPALIVE_IDLE_S = 30
KEEPALIVE_INTERVAL_S = 10
KEEPALIVE_PROBES = 3


class UpgradeRefused(TransferError):
    """The peer, or a proxy before it, speaks HTTP and opens no raw stream.

    Attributes:
        status: of the answer.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def tune(sock: socket.socket) -> None:
    """Let small frames go at once, and let the kernel find out when an idle stream's other end is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _candidates(address: PeerAddress) -> list[tuple[int, tuple[Any, ...]]]:
    """Return (family, socket address) pairs; a literal address needs no resolver and no thread."""
    with contextlib.suppress(ValueError):
        version = ipaddress.ip_address(address.host).version
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        return [(family, (address.host, address.port))]
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return [(family, target) for family, _, _, _, target in found]


async def connect(
    address: PeerAddress, tls: ssl.SSLContext | None, congestion: str | None = None
) -> StreamPort:
    """Return a connection to the peer, by TLS if there is a context for it.

    `congestion` names the algorithm that the connection uses, None leaves the system's.
    """
    sock = await _connect_socket(address, congestion)
    if tls is None:
        return SocketPort(sock)
    loop = asyncio.get_running_loop()
    try:
        _, port = await loop.create_connection(
            TransportPort, sock=sock, ssl=tls, server_hostname=address.host
        )
    except BaseException:
        sock.close()
        raise
    return port


async def _connect_socket(address: PeerAddress, congestion: str | None) -> socket.socket:
    loop = asyncio.get_running_loop()
    failure: OSError | None = None
    for family, target in await _candidates(address):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            tune(sock)
            if congestion is not None:
                set_congestion(sock, congestion)
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
    port: StreamPort, address: PeerAddress, path: str, headers: Mapping[str, str]
) -> bytes:
    """Ask for the raw stream; return what came behind the answer's head.

    Raises UpgradeRefused for an answer of HTTP that is not 101.
    """
    lines = [f"GET {path} HTTP/1.1", f"Host: {address}", "Connection: Upgrade"]
    lines += [f"Upgrade: {UPGRADE}", *(f"{name}: {value}" for name, value in headers.items())]
    request = "\r\n".join([*lines, "", ""]).encode("ascii")
    if port.send_now([request]) < len(request):
        raise ProtocolError("a fresh connection takes no request")
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
        line = status_line[:64].decode("ascii", "replace")
        status = line[9:12]
        if not line.startswith("HTTP/1.") or not (status.isascii() and status.isdigit()):
            raise ProtocolError(f"no answer of HTTP to the upgrade: {line!r}")
        raise UpgradeRefused(f"upgrade refused: {line!r}", int(status))
    return rest
