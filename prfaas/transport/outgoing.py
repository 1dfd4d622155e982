"""What one transfer still has to send, in order; lives on the event loop, does no I/O.

Urgent frames (first tokens, progress) overtake pages. A page is named by its place and read when
its turn comes, so that a backlog costs no memory.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from prfaas.transport.kv_numbers import KvNumbers
from prfaas.transport.messages import CodecName, TransferTotals, encode_totals
from prfaas.transport.seals import CHECKSUM, FrameSeal
from prfaas.transport.wire import (
    MAX_PAYLOAD_BYTES,
    Codec,
    FrameHeader,
    FrameType,
    encode_frame,
    encode_header,
)

CAPABILITY_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlace:
    """One page of one block, and how many tokens of the block it covers or counts in."""

    group: int
    index: int
    """Of the page among those of its block."""
    block: int
    num_tokens: int


PageView = Callable[[PagePlace], memoryview]
"""The exact bytes of a page whose KV is whole; valid until the transfer is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One frame to put on the wire."""

    header: bytes
    payload: memoryview | bytes = b""
    is_page: bool = False


Encode = Callable[[memoryview, int], Awaitable[tuple[Codec, memoryview | bytes]]]
"""How a page of a group goes out: the codec, and the bytes in it."""


async def as_it_is(page: memoryview, group: int) -> tuple[Codec, memoryview | bytes]:
    """Return the page's own bytes."""
    return Codec.RAW, page


class OutgoingTransfer:
    """One transfer as its sender sees it, from the first page to the receiver's word.

    Ends exactly once, by `close`; the first outcome wins.
    """

    def __init__(
        self,
        *,
        transfer_id: str,
        page_view: PageView,
        capability: str | None = None,
        codec: CodecName = "raw",
        numbers: KvNumbers | None = None,
    ) -> None:
        self.transfer_id = transfer_id
        self.codec = codec
        """What the receiver asked for."""
        self.numbers = numbers or KvNumbers()
        """What is in the pages."""
        self.capability = capability or secrets.token_hex(CAPABILITY_BYTES)
        """Whoever shows this may open the stream; only the asker is told."""
        self.outcome: str | None = None
        """None while it runs; then "completed" or what ended it."""
        self.tokens_computed = 0
        self.num_pages_sent = 0
        self.num_page_bytes_sent = 0
        self._page_view = page_view
        self._seal: FrameSeal = CHECKSUM
        self._urgent: deque[tuple[FrameType, bytes]] = deque()
        self._pages: deque[PagePlace] = deque()
        self._is_finished = False
        self._is_ended = False
        self._error: str | None = None
        self._has_news = asyncio.Event()
        self._closed = asyncio.Event()
        self._attached = asyncio.Event()
        self._detached = asyncio.Event()
        self._detached.set()

    def try_attach(self, seal: FrameSeal = CHECKSUM) -> bool:
        """Take note that the receiver opens the stream; False if it ended or has one already.

        Frames are sealed with `seal` as they are taken.
        """
        if self.outcome is not None or self._attached.is_set():
            return False
        self._seal = seal
        self._attached.set()
        self._detached.clear()
        return True

    def detach(self) -> None:
        """Take note that nobody reads pages for the stream any more; ends the transfer."""
        self.close("broken")
        self._detached.set()

    async def attached(self) -> None:
        """Return once the stream was opened or the transfer has ended."""
        await self._attached.wait()

    def put_page(self, place: PagePlace) -> None:
        """Queue a page whose KV is whole."""
        self._pages.append(place)
        self._has_news.set()

    def put_urgent(self, frame_type: FrameType, payload: bytes = b"") -> None:
        """Queue a frame before all pages that are not yet on the wire."""
        self._urgent.append((frame_type, payload))
        self._has_news.set()

    def finish(self, *, tokens_computed: int) -> None:
        """Say that nothing more will be queued: END goes out behind the last page."""
        self.tokens_computed = tokens_computed
        self._is_finished = True
        self._has_news.set()

    def fail(self, message: str) -> None:
        """Drop what is queued and tell the receiver why."""
        self._error = message
        self._has_news.set()

    def close(self, outcome: str) -> None:
        """End the transfer: its pages may be let go. Idempotent."""
        if self.outcome is None:
            self.outcome = outcome if self._error is None else "failed"
            self._closed.set()
            self._attached.set()

    def acknowledge(self) -> None:
        """Take note that the receiver has verified everything; too early is a protocol error."""
        self.close("completed" if self._is_ended else "protocol_error")

    async def closed(self) -> None:
        """Return once the transfer has ended."""
        await self._closed.wait()

    async def detached(self) -> None:
        """Return once the transfer has ended and no stream reads its pages."""
        await self._closed.wait()
        await self._detached.wait()

    async def next_piece(self, encode: Encode = as_it_is) -> Piece | None:
        """Return the next frame to send, waiting for one; None after END or ERROR was returned."""
        while True:
            piece = self._take()
            if piece is not None:
                return piece if isinstance(piece, Piece) else await self._piece_of(piece, encode)
            if self._is_ended:
                return None
            self._has_news.clear()
            await self._has_news.wait()

    def _take(self) -> Piece | PagePlace | None:
        if self._is_ended:
            return None
        if self._error is not None:
            self._is_ended = True
            message = self._error.encode()[: MAX_PAYLOAD_BYTES[FrameType.ERROR]]
            return Piece(header=encode_frame(FrameType.ERROR, message, self._seal))
        if self._urgent:
            return Piece(header=encode_frame(*self._urgent.popleft(), self._seal))
        if self._pages:
            return self._pages.popleft()
        if self._is_finished:
            self._is_ended = True
            totals = TransferTotals(
                num_pages=self.num_pages_sent,
                num_page_bytes=self.num_page_bytes_sent,
                tokens_computed=self.tokens_computed,
            )
            return Piece(header=encode_frame(FrameType.END, encode_totals(totals), self._seal))
        return None

    async def _piece_of(self, place: PagePlace, encode: Encode) -> Piece:
        codec, payload = await encode(self._page_view(place), place.group)
        header = FrameHeader(
            type=FrameType.PAGE,
            codec=codec,
            group=place.group,
            index=place.index,
            block=place.block,
            num_tokens=place.num_tokens,
        )
        self.num_pages_sent += 1
        self.num_page_bytes_sent += len(payload)
        return Piece(
            header=encode_header(header, payload, self._seal), payload=payload, is_page=True
        )
