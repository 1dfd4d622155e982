"""Where a node listens, and what its failures are called."""

import contextlib
import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp

from prfaas.errors import TransferError, TransferTimeout

MAX_HOST_CHARS = 253
_HOST = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_V6 = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")
_PORT = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a node listens."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(text: str) -> PeerAddress:
    """Return the address in "host:port" or "[v6]:port"; raise ValueError naming the text.

    Nodes name one another: what is returned can be connected to, and be part of a URL, or fails as a
    connection does.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (_is_host(host) and _PORT.fullmatch(port) and 0 < int(port) < 65536):
        raise ValueError(f"{text!r} is not host:port")
    return PeerAddress(host, int(port))


def _is_host(text: str) -> bool:
    if ":" not in text:
        return len(text) <= MAX_HOST_CHARS and _HOST.fullmatch(text) is not None
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return _V6.fullmatch(text) is not None


@contextlib.contextmanager
def as_transfer_errors(address: PeerAddress, hint: str = "") -> Iterator[None]:
    """Map what sockets and aiohttp raise to TransferError, once, at the door.

    `hint` is said where the peer closed the connection instead of answering.
    """
    try:
        yield
    except TimeoutError as error:
        raise TransferTimeout(f"peer {address}: nothing verified within the deadline") from error
    except aiohttp.ServerDisconnectedError as error:
        raise TransferError(f"peer {address}: closed the connection{hint}") from error
    except (OSError, aiohttp.ClientError) as error:
        raise TransferError(f"peer {address}: {str(error) or type(error).__name__}") from error
