"""Connections that came in as HTTP requests and become raw streams: what `dialing` is at the other end."""

import asyncio
import socket

from prfaas.transport.dialing import tune
from prfaas.transport.ports import SocketPort, StreamPort
from prfaas.transport.tcpinfo import set_congestion, set_pacing_rate
from prfaas.transport.transport_port import TransportPort

UNSENT_BYTES = 512 << 10
"""What the kernel may hold unsent of one stream: work goes to the emptiest, and first tokens overtake."""


def take_port(
    transport: asyncio.Transport,
    *,
    congestion: str | None = None,
    pacing_bytes_per_s: float | None = None,
) -> StreamPort:
    """Return the connection of an HTTP request as a port of our own.

    Congestion control and pacing are set on it where they are named and the kernel has them.

    The transport stops reading before the receiver hears that it may talk, or it would take the
    receiver's first bytes. Without TLS we go on with a socket of our own, and the 101 through it: a
    transport may hold it back (uvloop does, to the end of the loop's turn), and a frame would
    overtake it.
    """
    if congestion is not None:
        set_congestion(transport.get_extra_info("socket"), congestion)
    if pacing_bytes_per_s is not None:
        set_pacing_rate(transport.get_extra_info("socket"), pacing_bytes_per_s)
    if transport.get_extra_info("sslcontext") is not None:
        port = TransportPort(on_lost=transport.get_protocol())
        port.take(transport)
        set_unsent(port, UNSENT_BYTES)
        return port
    transport.pause_reading()
    sock: socket.socket = transport.get_extra_info("socket").dup()
    sock.setblocking(False)
    tune(sock)
    plain_port = SocketPort(sock)
    set_unsent(plain_port, UNSENT_BYTES)
    return plain_port


def set_unsent(port: StreamPort, num_bytes: int) -> None:
    """Let the kernel, where it can, and TLS each take no more of a stream while they hold so much unsent."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        port.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, num_bytes)
    if isinstance(port, TransportPort):
        port.limit_unsent(num_bytes)
