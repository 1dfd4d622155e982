"""Measuring a link: what an asker may ask for, made-up pages, and what the sender's sockets saw.

A measurement is a transfer like any other, over the same streams, with the same seals and codecs,
within the same egress budget; only its pages are numbers that nobody computed. One at a time is
served, bounded in bytes, pages and seconds.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from prfaas.errors import BadRequest, Overloaded
from prfaas.transport.fields import count_of, dump, name_of, number_of, parse_object
from prfaas.transport.kv_numbers import KvNumbers
from prfaas.transport.messages import CodecName, capability_of, codec_of
from prfaas.transport.outgoing import OutgoingTransfer
from prfaas.transport.pieces import PagePlace
from prfaas.transport.tcpinfo import TcpInfo

MAX_BYTES = 4 << 30
MAX_PAGES = 1 << 14
MIN_PAGE_BYTES = 4 << 10
MAX_PAGE_BYTES = 1 << 20
"""Of one measurement, each a multiple of the least page."""
QUEUED_AT_ONCE = 1024
"""Pages; then others have their turn on the loop."""
MAX_S = 30.0
"""A measurement that is not over by then is cut."""
BUFFER_BYTES = 1 << 20
"""Made-up numbers that a node holds while it is measured; pages repeat."""
ROW_ITEMS = 128
"""Numbers of a made-up row, which share a scale in codecs that have scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRequest:
    """What an asker wants sent."""

    transfer_id: str
    capability: str
    """As of a TransferRequest."""
    num_bytes: int
    """As they are decoded; whole pages, the last one included."""
    page_bytes: int
    codec: CodecName = "raw"

    @property
    def num_pages(self) -> int:
        """Pages that are sent."""
        return -(-self.num_bytes // self.page_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderReport:
    """What the sender's sockets saw of a measurement; zeros where its kernel does not say."""

    num_retransmits: int
    """Segments sent again."""
    bytes_sent: int
    """By TCP, headers of HTTP and frames and retransmits included."""
    bytes_retrans: int
    min_rtt_s: float
    congestion: str
    """Congestion control of its sockets; empty where unknown."""
    cpu_s: float
    """Of the sender's process, whatever it did meanwhile."""


def encode_measure_request(asked: MeasureRequest) -> bytes:
    """Return the body of POST /kv/v1/measure."""
    return dump(asdict(asked))


def parse_measure_request(data: bytes) -> MeasureRequest:
    """Return the request in `data`; ProtocolError names the field at fault, a bound included."""
    value = parse_object(data)
    return MeasureRequest(
        transfer_id=name_of(value, "transfer_id", 32),
        capability=capability_of(value),
        num_bytes=count_of(value, "num_bytes", 1, MAX_BYTES),
        page_bytes=count_of(value, "page_bytes", MIN_PAGE_BYTES, MAX_PAGE_BYTES),
        codec=codec_of(value),
    )


def encode_sender_report(report: SenderReport) -> bytes:
    """Return the answer to a question for the report."""
    return dump(asdict(report))


def parse_sender_report(data: bytes) -> SenderReport:
    """Return the report in `data`, or raise ProtocolError."""
    value = parse_object(data)
    limit = 1 << 62
    return SenderReport(
        num_retransmits=count_of(value, "num_retransmits", 0, limit),
        bytes_sent=count_of(value, "bytes_sent", 0, limit),
        bytes_retrans=count_of(value, "bytes_retrans", 0, limit),
        min_rtt_s=number_of(value, "min_rtt_s", 0),
        congestion=str(value.get("congestion", ""))[:32],
        cpu_s=number_of(value, "cpu_s", 0),
    )


def measured_numbers(kv_dtype: str) -> KvNumbers:
    """Return what is in made-up pages of a node whose KV is of this type; equal on both sides."""
    return KvNumbers(dtype=kv_dtype, row_items=[ROW_ITEMS])


class PageSource(Protocol):
    """Where the pages of a measurement come from."""

    def view(self, number: int, num_bytes: int) -> memoryview:
        """Return the bytes of page `number`; the same for the same number."""
        ...


class MadeUpPages:
    """Normally distributed numbers of a type, as many as fit a small buffer; unknown types are bytes.

    Their exponents compress about as those of keys and values do, their mantissas not at all.
    """

    def __init__(self, kv_dtype: str, num_bytes: int = BUFFER_BYTES) -> None:
        rng = np.random.default_rng(0)
        words: Any
        match kv_dtype:
            case "float32":
                words = rng.standard_normal(num_bytes // 4, np.float32)
            case "float16":
                words = rng.standard_normal(num_bytes // 2, np.float32).astype(np.float16)
            case "bfloat16":
                numbers = rng.standard_normal(num_bytes // 2, np.float32)
                words = (numbers.view(np.uint32) >> 16).astype(np.uint16)
            case _:
                words = rng.integers(0, 256, num_bytes, np.uint8)
        self._bytes = memoryview(words).cast("B").toreadonly()

    def view(self, number: int, num_bytes: int) -> memoryview:
        """See PageSource."""
        start = number % (len(self._bytes) // num_bytes) * num_bytes
        return self._bytes[start : start + num_bytes]


class Measurements:
    """Serves measurements, one at a time. Its calls come from the loop.

    Args:
        kv_dtype: of the made-up numbers.
        source: of the pages; None makes numbers up, which are held while they are measured.
        on_ended: is told of each measurement that has ended, by its id.
    """

    def __init__(
        self,
        kv_dtype: str,
        source: PageSource | None = None,
        *,
        on_ended: Callable[[str], None] = lambda transfer_id: None,
    ) -> None:
        self._kv_dtype = kv_dtype
        self._given = source
        self._on_ended = on_ended
        self._transfer: OutgoingTransfer | None = None
        self._timer: asyncio.TimerHandle | None = None

    def open(self, asked: MeasureRequest) -> None:
        """Begin to queue what is asked for; streams may be attached from now on.

        Raises BadRequest for what is out of bounds, Overloaded while another measurement runs.
        """
        if asked.page_bytes % MIN_PAGE_BYTES or asked.num_pages > MAX_PAGES:
            raise BadRequest(
                f"{asked.num_pages} pages of {asked.page_bytes} bytes: at most {MAX_PAGES}, each a "
                f"multiple of {MIN_PAGE_BYTES} bytes"
            )
        if self._transfer is not None and not self._transfer.is_released:
            raise Overloaded("another measurement of this node is under way")
        source = self._given or MadeUpPages(self._kv_dtype)
        page_bytes = asked.page_bytes
        transfer = OutgoingTransfer(
            transfer_id=asked.transfer_id,
            page_view=lambda place: source.view(place.block, page_bytes),
            capability=asked.capability,
            credit_bytes=asked.num_pages * page_bytes,
            codec=asked.codec,
            numbers=measured_numbers(self._kv_dtype),
        )
        transfer.on_end.add(self._forget)
        self._transfer = transfer
        self._timer = asyncio.get_running_loop().call_later(MAX_S, transfer.close, "expired")
        self._queue(transfer, 0, asked.num_pages)

    def _queue(self, transfer: OutgoingTransfer, first: int, num_pages: int) -> None:
        """Queue the pages from `first` on, some now and the others in later turns of the loop."""
        if transfer.outcome is not None:
            return
        last = min(first + QUEUED_AT_ONCE, num_pages)
        for number in range(first, last):
            transfer.put_page(PagePlace(group=0, index=0, block=number, num_tokens=1))
        if last == num_pages:
            transfer.finish(tokens_computed=0)
        else:
            asyncio.get_running_loop().call_soon(self._queue, transfer, last, num_pages)

    def _forget(self) -> None:
        """Let the pages go once nobody reads them."""
        if self._transfer is not None and self._transfer.is_released:
            self._on_ended(self._transfer.transfer_id)
            self._transfer = None
            if self._timer is not None:
                self._timer.cancel()

    @property
    def is_idle(self) -> bool:
        """None is under way."""
        return self._transfer is None

    def transfer(self, transfer_id: str) -> OutgoingTransfer | None:
        """Return the measurement under way, if it is the one of this id."""
        transfer = self._transfer
        return transfer if transfer is not None and transfer.transfer_id == transfer_id else None

    def cancel(self, transfer_id: str) -> bool:
        """End a measurement; False if there is none of this id."""
        transfer = self.transfer(transfer_id)
        if transfer is None:
            return False
        transfer.close("cancelled")
        return True

    def close(self) -> None:
        """End the measurement under way, if there is one."""
        if self._transfer is not None:
            self._transfer.close("stopped")


def sender_report(
    before: Collection[TcpInfo | None],
    after: Collection[TcpInfo | None],
    *,
    congestion: str,
    cpu_s: float,
) -> SenderReport:
    """Return what happened between two looks at the same connections, or more of them later."""
    first = [info for info in before if info is not None]
    last = [info for info in after if info is not None]

    def grown(name: str) -> int:
        growth: int = sum(getattr(i, name) for i in last) - sum(getattr(i, name) for i in first)
        return max(
            0, growth
        )  # a connection that was closed meanwhile is missing in the second look

    rtts = [info.min_rtt_s for info in last if info.min_rtt_s is not None]
    return SenderReport(
        num_retransmits=grown("num_retransmits"),
        bytes_sent=grown("bytes_sent"),
        bytes_retrans=grown("bytes_retrans"),
        min_rtt_s=min(rtts, default=0.0),
        congestion=congestion,
        cpu_s=cpu_s,
    )
