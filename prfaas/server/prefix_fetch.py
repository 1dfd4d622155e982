"""Fetches a prefix that a peer has cached, and computes nothing for it on either side.

What arrives is published as it becomes whole, so that a fresh lookup afterwards finds it: all of it, or
what there was before the transfer ended early. No failure costs more than time. Whoever lacks a block that
is on its way already waits for that fetch.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from prfaas.cache.block_table import BlockTable
from prfaas.cache.spec import CacheLayout, replay_boundary
from prfaas.clock import Clock
from prfaas.errors import Overloaded, ProtocolError, TransferError, TransferTimeout
from prfaas.log import get_logger
from prfaas.scheduler.monitor import TransferMonitor
from prfaas.scheduler.router import Outcome
from prfaas.server.peer import Peer
from prfaas.server.places import blocks_of_prefix, bytes_of_places, places_of_prefix
from prfaas.server.pull import Pull, kv_numbers
from prfaas.server.transfer_metrics import TransferMetrics
from prfaas.server.transfer_outcome import PEER_IS_WELL, PoolFull, TooSlow, outcome_of
from prfaas.transport.handshake import Identity
from prfaas.transport.messages import (
    CAPABILITY_BYTES,
    TransferAccepted,
    TransferRequest,
    TransferTotals,
)
from prfaas.transport.options import TransportOptions
from prfaas.transport.pulling import Pulling
from prfaas.transport.wire import Frame, FrameHeader, FrameType
from prfaas.types import Request


@dataclass(slots=True, kw_only=True)
class PrefixFetch:
    """What one fetch is for and what became of it."""

    peer: Peer
    request: Request
    table: BlockTable
    """Of the hit that is here, under the salt of what comes; blocks behind the hit are published in it."""
    accept_approximate: bool
    """The peer's numerics may be others than ours: the table's salt names them."""
    local_estimate_s: float | None
    """Seconds that it would take to compute here what is expected; None is unknown."""
    is_accepted: bool = False
    num_tokens: int = 0
    """Length of the prefix that the peer sends."""
    num_page_bytes: int = 0
    """Verified, as they crossed the link."""
    outcome: Outcome = "cancelled"
    detail: str = ""
    """What the outcome alone does not say."""
    transfer_id: str = field(default_factory=lambda: secrets.token_hex(16))
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_failed(self) -> bool:
        """It was not left, and not everything came."""
        return self.outcome not in ("completed", "cancelled")


class PrefixFetcher:
    """Runs fetches, each at its own peer."""

    def __init__(
        self,
        *,
        identity: Identity,
        layout: CacheLayout,
        options: TransportOptions,
        metrics: TransferMetrics,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._identity = identity
        self._layout = layout
        self._options = options
        self._metrics = metrics
        self._clock = clock
        self._spawn = spawn
        self._under_way: dict[bytes, PrefixFetch] = {}
        """By the first block that is fetched; its key names all tokens up to its end."""

    def bringing(self, table: BlockTable) -> PrefixFetch | None:
        """Return the fetch under way that brings the first block that a table lacks."""
        return self._under_way.get(self._first_lacking(table))

    def _first_lacking(self, table: BlockTable) -> bytes:
        first = table.hit_tokens // self._layout.block_tokens
        return next(iter(table.keys[first : first + 1]), b"")

    async def run(self, fetch: PrefixFetch) -> None:
        """Receive into the fetch's table what the peer has beyond it.

        The outcome says how it went. Leaving early in any way cancels it at the peer. Nobody else is
        bringing the table's first block.
        """
        first = self._first_lacking(fetch.table)
        assert first not in self._under_way, "fetched twice"
        self._under_way[first] = fetch
        try:
            await self._run(fetch)
        except (TransferError, Overloaded) as error:
            fetch.outcome = outcome_of(error, is_accepted=fetch.is_accepted)
            fetch.detail = str(error)
            if fetch.outcome not in PEER_IS_WELL:
                fetch.peer.doubt()
        finally:
            del self._under_way[first]
            fetch.ended.set()
            self._metrics.transfer_finished("received", fetch.outcome)
            get_logger().info(
                "prefix.fetched",
                request_id=fetch.request.request_id,
                transfer_id=fetch.transfer_id,
                peer=fetch.peer.name,
                outcome=fetch.outcome,
                detail=fetch.detail,
                num_tokens=fetch.num_tokens,
                num_bytes=fetch.num_page_bytes,
            )

    async def _run(self, fetch: PrefixFetch) -> None:
        have_tokens = fetch.table.hit_tokens
        most_tokens = replay_boundary(len(fetch.request.prompt_tokens), self._layout.block_tokens)
        places = places_of_prefix(self._layout, most_tokens, have_tokens)
        asked = TransferRequest(
            transfer_id=fetch.transfer_id,
            identity=self._identity,
            accept_approximate=fetch.accept_approximate,
            request=fetch.request,
            have_tokens=have_tokens,
            codec=self._options.kv_codec,
            capability=secrets.token_hex(CAPABILITY_BYTES),
            credit_bytes=bytes_of_places(self._layout, places),
            deadline_s=fetch.local_estimate_s,
            cached_only=True,
        )
        reception = PrefixReception(fetch, self._layout)
        numbers = kv_numbers(self._layout, self._identity)
        try:
            async with fetch.peer.client.pull(asked, reception, numbers=numbers) as pulling:
                await self._receive(pulling, reception, fetch)
                if not pulling.acknowledge():
                    self._spawn(fetch.peer.acknowledge(asked))
        finally:
            if not reception.is_done:
                self._spawn(fetch.peer.cancel(fetch.transfer_id))

    async def _receive(
        self, pulling: Pulling, reception: "PrefixReception", fetch: PrefixFetch
    ) -> None:
        places = places_of_prefix(self._layout, fetch.num_tokens, fetch.table.hit_tokens)
        num_kv_bytes = bytes_of_places(self._layout, places)
        monitor = TransferMonitor(
            started_s=self._clock(),
            num_tokens=fetch.num_tokens,
            tokens_done=fetch.num_tokens,
            num_kv_bytes=num_kv_bytes,
            num_streamed_bytes=num_kv_bytes,
            local_estimate_s=fetch.local_estimate_s,
            stall_timeout_s=self._options.stall_timeout_s,
        )
        while not pulling.is_finished:
            num_before, num_kv_before = fetch.num_page_bytes, reception.num_kv_bytes
            await pulling.step()
            fetch.peer.num_kv_bytes += reception.num_kv_bytes - num_kv_before
            self._metrics.transfer_bytes("received", fetch.num_page_bytes - num_before)
            if fetch.num_page_bytes > num_before:
                self._judge(monitor, reception, fetch)
        fetch.outcome = "completed"

    def _judge(
        self, monitor: TransferMonitor, reception: "PrefixReception", fetch: PrefixFetch
    ) -> None:
        now_s = self._clock()
        monitor.progressed(
            now_s=now_s,
            num_bytes=reception.num_kv_bytes,
            tokens_done=fetch.num_tokens,
            tokens_ahead=0,
        )
        verdict = monitor.verdict(now_s)
        if verdict == "stuck":
            raise TransferTimeout(f"{fetch.num_page_bytes} bytes so far, nothing moves")
        if verdict == "slower_than_local":
            raise TooSlow(f"{monitor.time_left_s(now_s):.1f} s left, computing it is faster")


class PrefixReception:
    """Takes one fetch's frames: a FrameConsumer of pages alone.

    Raises ProtocolError for what was not asked for or is missing in the end, PoolFull where the peer has
    more than there is room for.
    """

    def __init__(self, fetch: PrefixFetch, layout: CacheLayout) -> None:
        self.is_done = False
        self._fetch = fetch
        self._layout = layout
        self._pull: Pull | None = None

    @property
    def num_kv_bytes(self) -> int:
        """What the verified pages decode to."""
        return 0 if self._pull is None else self._pull.num_kv_bytes

    def accepted(self, accepted: TransferAccepted) -> None:
        """See FrameConsumer: only now it is known how much comes."""
        fetch, num_tokens = self._fetch, accepted.hit_tokens
        fetch.is_accepted = True
        block_tokens = self._layout.block_tokens
        most_tokens = replay_boundary(len(fetch.request.prompt_tokens), block_tokens)
        if not fetch.table.hit_tokens < num_tokens <= most_tokens or num_tokens % block_tokens:
            raise ProtocolError(
                f"a prefix of {num_tokens} tokens for one behind {fetch.table.hit_tokens}, at most "
                f"{most_tokens}"
            )
        if not fetch.table.try_reserve(num_tokens):
            raise PoolFull(f"no free pages for a prefix of {num_tokens} tokens")
        fetch.num_tokens = num_tokens
        self._pull = Pull(
            layout=self._layout,
            table=fetch.table,
            num_tokens=num_tokens,
            have_tokens=fetch.table.hit_tokens,
            blocks=blocks_of_prefix,
        )

    def resolve(self, header: FrameHeader) -> memoryview | None:
        """See FrameConsumer."""
        return self._accepted_pull.resolve(header)

    def take(self, frame: Frame) -> None:
        """See FrameConsumer."""
        if frame.header.type is not FrameType.PAGE:
            raise ProtocolError(f"{frame.header.type.name} frame in a prefix")
        pull = self._accepted_pull
        pull.verified(frame)
        self._fetch.num_page_bytes = pull.num_page_bytes

    def ended(self, totals: TransferTotals) -> None:
        """See FrameConsumer."""
        self._accepted_pull.finish()
        self.is_done = True

    @property
    def _accepted_pull(self) -> Pull:
        assert self._pull is not None, "a frame before the peer's word"
        return self._pull
