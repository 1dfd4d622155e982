"""What the kernel knows of a TCP connection, and what it can be told: pacing, congestion control.

Linux only; elsewhere there is nothing to read and nothing is set.
"""

import errno
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from prfaas.errors import ConfigError

_TCP_INFO = 11
_TCP_CONGESTION = 13
_SO_MAX_PACING_RATE = 47
_UNLIMITED = (1 << 64) - 1
_NO_RTT_US = 0xFFFFFFFF
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")

_STRUCT_TCP_INFO = struct.Struct("=8B24I4Q6I4Q2I2Q3I")
"""`struct tcp_info` of <linux/tcp.h> up to tcpi_rcv_ooopack, which Linux has since 5.4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpInfo:
    """One connection at one moment; counts are totals since it began."""

    rtt_s: float
    """Smoothed; 0 before the first sample."""
    rtt_var_s: float
    min_rtt_s: float | None
    """Least of the kernel's window (5 minutes); None before the first sample."""
    rto_s: float
    mss_bytes: int
    cwnd_bytes: int
    unacked_bytes: int
    """In flight: whole segments."""
    notsent_bytes: int
    """In the socket's send buffer, not yet sent once."""
    num_retransmits: int
    """Segments sent again."""
    reordering_segments: int
    """How far out of order segments may come before one counts as lost."""
    num_reordered: int
    """Times that the kernel saw reordering."""
    bytes_sent: int
    """Retransmits included."""
    bytes_acked: int
    bytes_received: int
    bytes_retrans: int
    delivery_rate_bytes_per_s: float
    """Of the most recent sample; see is_app_limited."""
    is_app_limited: bool
    """The delivery rate was limited by us: too little to send."""
    pacing_rate_bytes_per_s: float | None
    """None: not paced."""


def read_tcp_info(sock: socket.socket) -> TcpInfo | None:
    """Return what the kernel knows of a TCP socket; None where it cannot say, or it is closed."""
    if sys.platform != "linux" or sock.fileno() < 0:
        return None
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _STRUCT_TCP_INFO.size)
    except OSError:  # not a TCP socket, or a kernel that keeps it to itself
        return None
    return parse_tcp_info(raw)


def parse_tcp_info(raw: bytes) -> TcpInfo | None:
    """Return what a `struct tcp_info` says; None if an old kernel filled too little of it."""
    if len(raw) < _STRUCT_TCP_INFO.size:
        return None
    fields = _STRUCT_TCP_INFO.unpack_from(raw)
    flags = fields[7]
    (rto_us, _ato, mss, _rcv_mss, unacked, *_), words = fields[8:16], fields[8:32]
    rtt_us, rtt_var_us, _, cwnd, _, reordering, _, _, num_retransmits = words[15:24]
    pacing, _max_pacing, acked, received = fields[32:36]
    _segs_out, _segs_in, notsent, min_rtt_us, _data_in, _data_out = fields[36:42]
    delivery = fields[42]
    _delivered, _delivered_ce, bytes_sent, bytes_retrans, _dups, num_reordered, _ = fields[46:]
    return TcpInfo(
        rtt_s=rtt_us / 1e6,
        rtt_var_s=rtt_var_us / 1e6,
        min_rtt_s=None if min_rtt_us in {0, _NO_RTT_US} else min_rtt_us / 1e6,
        rto_s=rto_us / 1e6,
        mss_bytes=mss,
        cwnd_bytes=cwnd * mss,
        unacked_bytes=unacked * mss,
        notsent_bytes=notsent,
        num_retransmits=num_retransmits,
        reordering_segments=reordering,
        num_reordered=num_reordered,
        bytes_sent=bytes_sent,
        bytes_acked=acked,
        bytes_received=received,
        bytes_retrans=bytes_retrans,
        delivery_rate_bytes_per_s=float(delivery),
        is_app_limited=bool(flags & 1),
        pacing_rate_bytes_per_s=None if pacing == _UNLIMITED else float(pacing),
    )


def set_pacing_rate(sock: socket.socket, rate_bytes_per_s: float | None) -> bool:
    """Let the kernel space this socket's segments at up to a rate; return whether it does.

    None lifts the limit. The kernel paces by itself where the device has no `fq` queue.
    """
    if sys.platform != "linux":
        return False
    rate = _UNLIMITED if rate_bytes_per_s is None else max(1, round(rate_bytes_per_s))
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", rate))
    except OSError:
        return False
    return True


def available_congestion() -> tuple[str, ...]:
    """Return the congestion controls that this kernel has loaded; empty where it does not say."""
    try:
        return tuple(_AVAILABLE.read_text().split())
    except OSError:
        return ()


def set_congestion(sock: socket.socket, name: str) -> None:
    """Choose a TCP socket's congestion control, at any time of its life.

    Raises:
        ConfigError: this kernel has none of that name, or does not let this process use it.
    """
    if sys.platform != "linux":
        raise ConfigError(f"congestion control {name!r}: only Linux lets a socket choose it")
    try:
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, name.encode())
    except (OSError, UnicodeEncodeError) as error:
        raise ConfigError(_refusal(name, error)) from error


def read_congestion(sock: socket.socket) -> str:
    """Return the name of a TCP socket's congestion control; empty where nobody says."""
    if sys.platform != "linux" or sock.fileno() < 0:
        return ""
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, 16)
    except OSError:
        return ""
    return raw.rstrip(b"\0").decode("ascii", "replace")


def check_congestion(name: str) -> None:
    """Raise ConfigError unless sockets of this process can have this congestion control."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        set_congestion(sock, name)


def _refusal(name: str, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.EPERM:
        return (
            f"congestion control {name!r} is not open to this user; "
            "net.ipv4.tcp_allowed_congestion_control lists those that are"
        )
    names = ", ".join(available_congestion()) or "unknown"
    return f"this kernel has no congestion control {name!r}; available: {names}"
