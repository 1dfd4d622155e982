"""Where a prefill node listens, and what its failures are called."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp

from prfaas.errors import TransferError, TransferTimeout


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
