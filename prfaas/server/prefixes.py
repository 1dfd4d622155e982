"""Looks prompts up under every salt that their KV can be kept under, as it is ours or came from a peer."""

from collections.abc import Iterable
from dataclasses import dataclass

from prfaas.cache.block_table import BlockTable
from prfaas.cache.tenants import narrowed
from prfaas.server.peer import Peer
from prfaas.server.prefix_finder import PrefixFinder
from prfaas.transport.coding import may_lose
from prfaas.transport.messages import CodecName
from prfaas.types import Request


class TableHold:
    """One hold on a table, let go at the end of the `with` unless it was handed over."""

    def __init__(self) -> None:
        self._table: BlockTable | None = None

    def __enter__(self) -> "TableHold":
        return self

    def __exit__(self, *_: object) -> None:
        if self._table is not None:
            self._table.release()

    @property
    def table(self) -> BlockTable:
        """The table that is held."""
        assert self._table is not None, "nothing is held"
        return self._table

    def take(self, table: BlockTable) -> None:
        """Hold `table` and let go of the one before."""
        previous, self._table = self._table, table
        if previous is not None:
            previous.release()

    def hand_over(self) -> BlockTable:
        """Return the table; its hold is the caller's."""
        table, self._table = self.table, None
        return table


def approximate_salt(salt: bytes, numerics_fingerprint: str) -> bytes:
    """Return the salt under which KV of other numerics is kept: no exact key ever matches it."""
    return narrowed(salt, b"approximate\0" + numerics_fingerprint.encode())


def lossy_salt(salt: bytes, codec: CodecName) -> bytes:
    """Return the salt under which KV is kept that a lossy codec may have changed.

    All that is received with the setting is kept there, page by page lossy or not: which pages a
    codec left alone is nothing that anybody could rely on later.
    """
    return narrowed(salt, b"codec\0" + codec.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where KV comes from, as far as its bits depend on it."""

    salt: bytes
    """Of its keys."""
    is_exact: bool
    """It has this node's own bits."""
    accept_approximate: bool
    """The salt names the peer's numerics, which may be others than ours."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix hit, and where its KV comes from."""

    table: BlockTable
    origin: Origin


def received_from(peer: Peer, request: Request, codec: CodecName) -> Origin:
    """Return the origin of what a peer sends for a request."""
    salt, is_lossy = request.cache_salt, may_lose(codec)
    if not peer.is_exact:
        salt = approximate_salt(salt, peer.numerics_fingerprint)
    if is_lossy:
        salt = lossy_salt(salt, codec)
    return Origin(
        salt=salt,
        is_exact=peer.is_exact and not is_lossy,
        accept_approximate=not peer.is_exact,
    )


class PrefixLookup:
    """Finds the longest hit among a node's own KV and what it received."""

    def __init__(self, finder: PrefixFinder, codec: CodecName) -> None:
        self._finder = finder
        self._codec = codec

    async def longest(self, request: Request, peers: Iterable[Peer]) -> Prefix:
        """Return the longest hit in this node's own KV and in what came from one of `peers`.

        The caller holds its table. Of equal lengths the node's own is taken.
        """
        own = Origin(salt=request.cache_salt, is_exact=True, accept_approximate=False)
        with TableHold() as hold:
            best = await self.under(request, own)
            hold.take(best.table)
            received = [received_from(peer, request, self._codec) for peer in peers]
            for origin in dict.fromkeys(o for o in received if o.salt != own.salt):
                other = await self.under(request, origin)
                if other.table.hit_tokens > best.table.hit_tokens:
                    best = other
                    hold.take(best.table)
                else:
                    other.table.release()
            hold.hand_over()
        return best

    async def peek(self, request: Request, peers: Iterable[Peer]) -> int:
        """Return the length of what `longest` would return, without a hold on it."""
        salts = [received_from(peer, request, self._codec).salt for peer in peers]
        hits = [
            await self._finder.peek(request.prompt_tokens, salt)
            for salt in dict.fromkeys((request.cache_salt, *salts))
        ]
        return max(hits)

    async def under(self, request: Request, origin: Origin) -> Prefix:
        """Return the hit in KV of one origin; the caller holds its table."""
        return Prefix(await self._finder.find(request.prompt_tokens, origin.salt), origin)
