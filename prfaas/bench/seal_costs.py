"""What guarding a page costs one core: a checksum, a MAC, TLS. Measured in memory, without a link."""

import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.clock import Clock
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.seals import CHECKSUM, FrameSeal, MacSeal
from prfaas.transport.wire import FrameHeader, FrameType, encode_header

PAGE_BYTES = 128 << 10
_GIB = 1 << 30
_CIPHERS = "ADH-AES256-GCM-SHA384:@SECLEVEL=0"
"""The cipher of TLS 1.3's first suite; anonymous, because nobody is at the other end here."""
_FFDHE2048 = """\
-----BEGIN DH PARAMETERS-----
MIIBCAKCAQEA//////////+t+FRYortKmq/cViAnPTzx2LnFg84tNpWp4TZBFGQz
+8yTnc4kmz75fS/jY2MMddj2gbICrsRhetPfHtXV/WVhJDP1H18GbtCFY2VVPe0a
87VXE15/V8k1mE8McODmi3fipona8+/och3xWKE2rec1MKzKT0g6eXq8CrGCsyT7
YdEIqUuyyOP7uWrat2DX9GgdT0Kj3jlN9K5W7edjcrsZCwenyO4KbXCeAvzhzffi
7MA0BM0oNC9hkXL+nOmFg/+OTxIy7vKBg8P+OxtMb61zO7X8vC7CIAXFjvGDfRaD
ssbzSibBsu/6iGtCOGEoXJf//////////wIBAg==
-----END DH PARAMETERS-----
"""
"""The group of RFC 7919, which an anonymous handshake needs and Python's ssl does not name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardCost:
    """Seconds of one core for each GiB, at each end of the link."""

    name: str
    s_per_gib: float


def guard_costs(clock: Clock, seconds: float = 0.25) -> list[GuardCost]:
    """Return what each kind of guard costs here, each measured for about `seconds`."""
    page = bytes(range(256)) * (PAGE_BYTES // 256)
    mac = MacSeal(ClusterKey(b"a key for measuring only"))
    guards: dict[str, Callable[[], None]] = {
        "checksum": lambda: _seal(page, CHECKSUM),
        "mac": lambda: _seal(page, mac),
    }
    tls = _TlsPair.try_make()
    if tls is not None:
        guards["tls"] = lambda: tls.encrypt(page)
    return [
        GuardCost(name=name, s_per_gib=_s_per_page(guard, clock, seconds) / PAGE_BYTES * _GIB)
        for name, guard in guards.items()
    ]


def _s_per_page(guard: Callable[[], None], clock: Clock, seconds: float) -> float:
    guard()
    num_pages, began_s = 0, clock()
    while (spent_s := clock() - began_s) < seconds or not num_pages:
        guard()
        num_pages += 1
    return spent_s / num_pages


def _seal(page: bytes, seal: FrameSeal) -> None:
    encode_header(FrameHeader(FrameType.PAGE, num_tokens=1), page, seal)


class _TlsPair:
    """Both ends of a TLS connection in memory. Only the sender's half of the work is measured."""

    def __init__(self, sender: ssl.SSLObject, sent: ssl.MemoryBIO) -> None:
        self._sender = sender
        self._sent = sent

    @classmethod
    def try_make(cls) -> "_TlsPair | None":
        """Return a connected pair; None where OpenSSL was built without the cipher."""
        to_peer, to_asker = ssl.MemoryBIO(), ssl.MemoryBIO()
        try:
            sender_context = _context(ssl.PROTOCOL_TLS_SERVER)
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
                file.write(_FFDHE2048)
                file.flush()
                sender_context.load_dh_params(file.name)
            sender = sender_context.wrap_bio(to_peer, to_asker, server_side=True)
            asker = _context(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(to_asker, to_peer)
            for end in (asker, sender, asker, sender):
                _shake(end)
        except ssl.SSLError:
            return None
        return cls(sender, to_asker)

    def encrypt(self, page: bytes) -> None:
        self._sender.write(page)
        self._sent.read()


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing secret passes, and no network
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # 1.3 has no anonymous ciphers
    context.set_ciphers(_CIPHERS)
    return context


def _shake(end: ssl.SSLObject) -> None:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return
