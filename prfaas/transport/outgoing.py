"""What one transfer still has to send, and what went over which of its streams. Pure: no clock, no I/O.

Every stream takes the next piece when it can: urgent frames (first tokens, progress) before pages, pages
in their order. A page is named by its place and read when its turn comes, so that a backlog costs no
memory; what a stream took is remembered by place too, so that what was lost with it can go again.
"""

from collections import deque
from collections.abc import Callable
from itertools import islice

from prfaas.errors import ProtocolError, TransferError
from prfaas.transport.attach import Attach
from prfaas.transport.flow import CreditAccount
from prfaas.transport.kv_numbers import KvNumbers
from prfaas.transport.messages import CodecName, encode_totals
from prfaas.transport.pieces import (
    Item,
    Last,
    PagePlace,
    PageRun,
    PageView,
    Piece,
    Sealed,
    SendingLane,
    SentTotals,
    Urgent,
    num_pages,
)
from prfaas.transport.seals import FrameSeal
from prfaas.transport.wire import (
    MAX_PAYLOAD_BYTES,
    MAX_RUN_BYTES,
    MAX_RUN_PAGES,
    Codec,
    FrameHeader,
    FrameType,
    encode_frame,
    encode_header,
    encode_run,
    tag_number,
)

ABSENCE_FRACTION = 0.25
"""Of the lease: an asker without any stream has this long to come back."""


class OutgoingTransfer:
    """One transfer as its sender sees it, from the first page to the receiver's word.

    Ends exactly once, by `close`; the first outcome wins. `on_news` are called when there may be
    something to take, `on_end` when the transfer has ended or a reader of its pages has left.
    """

    def __init__(
        self,
        *,
        transfer_id: str,
        page_view: PageView,
        capability: str,
        credit_bytes: int,
        codec: CodecName = "raw",
        numbers: KvNumbers | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self.transfer_id = transfer_id
        self.codec = codec
        """What the receiver asked for."""
        self.numbers = numbers or KvNumbers()
        """What is in the pages."""
        self.deadline_s = deadline_s
        """When it should have ended, on the loop's clock; None is no haste."""
        self.capability = capability
        """Whoever shows this may attach streams; only the asker knows it."""
        self.outcome: str | None = None
        """None while it runs; then "completed" or what ended it."""
        self.on_news: set[Callable[[], None]] = set()
        self.on_end: set[Callable[[], None]] = set()
        self._credit = CreditAccount(credit_bytes)
        self._page_view = page_view
        self._lanes: dict[int, SendingLane] = {}
        self._dead_streams: set[int] = set()
        """Lost before they were attached."""
        self._urgent: deque[Urgent] = deque()
        self._pages: deque[PagePlace] = deque()
        self._tokens_computed: int | None = None
        self._sent = SentTotals()
        self._epoch = 0
        self._num_unsealed = 0
        self._num_readers = 0
        self._error: str | None = None
        self._progress_s: float | None = None

    @property
    def num_pages_sent(self) -> int:
        """What was lost and goes again counts once."""
        return self._sent.num_pages

    @property
    def num_page_bytes_sent(self) -> int:
        """Of those pages, as they cross the link."""
        return self._sent.num_bytes

    # ------------------------------------------------------------ what is to be sent

    def put_page(self, place: PagePlace) -> None:
        """Queue a page whose KV is whole."""
        self._pages.append(place)
        if len(self._pages) == 1:  # whoever found nothing to take heard of the first
            self._tell(self.on_news)

    def put_urgent(self, frame_type: FrameType, payload: bytes = b"") -> None:
        """Queue a frame before all pages that are not yet on the wire."""
        self._urgent.append(Urgent(frame_type, payload))
        self._tell(self.on_news)

    def finish(self, *, tokens_computed: int) -> None:
        """Say that nothing more will be queued: END goes out behind the last page."""
        self._tokens_computed = tokens_computed
        self._tell(self.on_news)

    def fail(self, message: str) -> None:
        """Drop what is queued and tell the receiver why."""
        self._error = message
        self._tell(self.on_news)

    def close(self, outcome: str) -> None:
        """End the transfer: its pages may be let go. Idempotent."""
        if self.outcome is None:
            self.outcome = outcome if self._error is None else "failed"
            self._tell(self.on_news)
            self._tell(self.on_end)

    def acknowledge(self) -> None:
        """Take note that the receiver has verified everything; too early is a protocol error."""
        has_ended = self._error is None and any(lane.is_over for lane in self._lanes.values())
        self.close("completed" if has_ended else "protocol_error")

    def _tell(self, listeners: set[Callable[[], None]]) -> None:
        for listener in tuple(listeners):
            listener()

    # ------------------------------------------------------------ who reads its pages

    @property
    def is_released(self) -> bool:
        """It has ended and no stream reads its pages any more."""
        return self.outcome is not None and not self._num_readers

    def enter(self) -> None:
        """Take note that a driver is about to read pages."""
        self._num_readers += 1

    def leave(self) -> None:
        """Take note that a driver reads none any more."""
        self._num_readers -= 1
        self._tell(self.on_end)

    # ------------------------------------------------------------ streams come and go

    def attach(self, attach: Attach, seal: FrameSeal) -> SendingLane:
        """Return the lane of a stream that carries the transfer from now on.

        Raises ProtocolError for a stream that was attached before, or a word of losses that cannot be;
        TransferError where there is nothing more to say over it.
        """
        if self.outcome not in (None, "completed") and self._error is None:
            raise TransferError(f"the transfer has ended: {self.outcome}")
        if attach.stream in self._lanes or attach.stream in self._dead_streams:
            raise ProtocolError(f"stream {attach.stream} was attached before")
        self._take_back(attach.resumes)
        lane = self._lanes[attach.stream] = SendingLane(attach.stream, seal)
        self._tell(self.on_news)
        return lane

    def attach_again(self, lane: SendingLane, attach: Attach) -> None:
        """Take the word of losses that came over `lane`, which goes on with what was lost."""
        if attach.stream != lane.stream:
            raise ProtocolError(f"stream {lane.stream} says that it is stream {attach.stream}")
        self._take_back(attach.resumes)
        lane.num_words += 1
        lane.is_over = False
        self._tell(self.on_news)

    def lose(self, lane: SendingLane) -> None:
        """Take note that a stream broke; what of it arrived, the receiver will say."""
        lane.is_lost = True
        lane.is_blocked = False
        self._tell(self.on_end)

    def _take_back(self, resumes: tuple[tuple[int, int], ...]) -> None:
        for stream, num_frames in resumes:
            lost = self._lanes.get(stream)
            if lost is None and num_frames:
                raise ProtocolError(f"stream {stream} was never attached, nothing came of it")
            if lost is not None and not self._may_be(lost, num_frames):
                raise ProtocolError(
                    f"{num_frames} frames of stream {stream} arrived, {len(lost.sealed)} were sent"
                )
        if len({stream for stream, _ in resumes}) < len(resumes):
            raise ProtocolError("a stream was lost twice")
        for stream, num_frames in reversed(resumes):
            lost = self._lanes.get(stream)
            if lost is None:
                self._dead_streams.add(stream)
            elif not lost.is_told:
                lost.is_lost = lost.is_told = True
                lost.is_blocked = False
                self._requeue(lost, num_frames)
        told = sum(lane.is_told for lane in self._lanes.values())
        self._epoch = len(self._dead_streams) + told

    @staticmethod
    def _may_be(lane: SendingLane, num_frames: int) -> bool:
        """Return whether so many frames of a lost stream can have come; what was told once may be told again."""
        return num_frames == len(lane.sealed) if lane.is_told else num_frames <= len(lane.sealed)

    def _requeue(self, lane: SendingLane, num_frames: int) -> None:
        for sealed in lane.sealed[num_frames:]:
            self._sent.add(sealed, -1)
            self._credit.returned(sealed.num_kv_bytes)
        for item in reversed(lane.items[num_frames:]):
            match item:
                case PagePlace():
                    self._pages.appendleft(item)
                case PageRun():
                    self._pages.extendleft(reversed(item.places))
                case Urgent():
                    self._urgent.appendleft(item)
                case Last():
                    continue
        for item in lane.items[len(lane.sealed) :]:  # taken, and being encoded
            if isinstance(item, PagePlace):
                self._credit.returned(self.view(item).nbytes)
        self._num_unsealed -= len(lane.items) - len(lane.sealed)
        del lane.items[num_frames:], lane.sealed[num_frames:]

    # ------------------------------------------------------------ what a stream takes

    def take(self, lane: SendingLane) -> Item | None:
        """Return what goes next over a stream, which must `seal` it; None if there is nothing now."""
        if lane.is_over or lane.is_lost:
            return None
        item = self._next_item()
        if item is not None:
            lane.items.append(item)
            self._num_unsealed += 1
            lane.is_over = isinstance(item, Last)
        return item

    def _next_item(self) -> Item | None:
        if self._error is not None or self.outcome is not None:
            return Last() if self._error is not None or self.outcome == "completed" else None
        if self._urgent:
            return self._urgent.popleft()
        if self._pages:
            has_credit = self._credit.try_spend(self.view(self._pages[0]).nbytes)
            return self._pages.popleft() if has_credit else None
        # A page that another stream is still encoding is not in the totals yet.
        if self._tokens_computed is not None and not self._num_unsealed:
            return Last()
        return None

    def view(self, place: PagePlace) -> memoryview:
        """Return the bytes of a page."""
        return self._page_view(place)

    def take_run(self, lane: SendingLane, max_bytes: int) -> Piece | None:
        """Take as many raw pages as are ready, at least two of at most `max_bytes`, and return their frame.

        None if they are not next; `take` has what is.
        """
        has_ended = self._error is not None or self.outcome is not None
        if len(self._pages) < 2 or self._urgent or has_ended or lane.is_over or lane.is_lost:
            return None
        places, views, num_bytes = [], [], 0
        limit = min(max_bytes, MAX_RUN_BYTES, self._credit.free_bytes)
        for place in islice(self._pages, MAX_RUN_PAGES):
            view = self._page_view(place)
            if num_bytes + len(view) > limit:
                break
            num_bytes += len(view)
            places.append(place)
            views.append(view)
        if len(places) < 2 or not self._credit.try_spend(num_bytes):
            return None
        for _ in places:
            self._pages.popleft()
        header = encode_run(places, views, lane.seal)
        lane.items.append(PageRun(places))
        self._count(lane, Sealed(len(places), num_bytes, num_bytes, tag_number(header)))
        self._tell_if_last()
        return Piece(header, views, num_bytes)

    def seal(
        self,
        lane: SendingLane,
        item: Item,
        codec: Codec = Codec.RAW,
        payload: memoryview | bytes | None = None,
    ) -> Piece | None:
        """Return the frame of what was taken last; None if the stream was lost meanwhile.

        A page's `payload` is what `codec` made of its bytes, None stands for the bytes themselves.
        """
        if lane.is_lost:
            return None
        self._num_unsealed -= 1
        match item:
            case PagePlace():
                return self._seal_page(lane, item, codec, payload)
            case Urgent():
                is_answer = item.type is not FrameType.PROGRESS
                self._count(lane, Sealed(num_answers=int(is_answer)))
                return Piece(encode_frame(item.type, item.payload, lane.seal))
            case _:
                self._count(lane, Sealed())
                return Piece(self._last_frame(lane))

    def _seal_page(
        self,
        lane: SendingLane,
        place: PagePlace,
        codec: Codec,
        payload: memoryview | bytes | None,
    ) -> Piece:
        view = self.view(place)
        payload = view if payload is None else payload
        header = encode_header(
            FrameHeader(
                FrameType.PAGE, codec, place.group, place.index, place.block, place.num_tokens
            ),
            payload,
            lane.seal,
        )
        self._count(lane, Sealed(1, len(payload), view.nbytes, tag_number(header)))
        self._tell_if_last()
        return Piece(header, (payload,), len(payload))

    def _count(self, lane: SendingLane, sealed: Sealed) -> None:
        lane.sealed.append(sealed)
        self._sent.add(sealed)

    def _tell_if_last(self) -> None:
        """Let streams end that found nothing more to take, once the last page is in the totals."""
        if self._tokens_computed is not None and not (self._pages or self._num_unsealed):
            self._tell(self.on_news)

    def _last_frame(self, lane: SendingLane) -> bytes:
        if self._error is not None:
            message = self._error.encode()[: MAX_PAYLOAD_BYTES[FrameType.ERROR]]
            return encode_frame(FrameType.ERROR, message, lane.seal)
        totals = self._sent.totals(
            tokens_computed=self._tokens_computed or 0,
            epoch=self._epoch,
            num_words=lane.num_words,
        )
        return encode_frame(FrameType.END, encode_totals(totals), lane.seal)

    # ------------------------------------------------------------ the lease

    def progressed(self, now_s: float) -> None:
        """Take note that the receiver's side took bytes."""
        self._progress_s = now_s

    def check_lease(self, now_s: float, lease_s: float) -> None:
        """End the transfer if its receiver has owed something for too long.

        It owes to attach streams, to read what was sent, to acknowledge the end, to say what of a lost
        stream arrived, and credit for the next page. While it owes nothing the lease stands still.
        """
        if self._progress_s is None or not self._is_owed:
            self._progress_s = now_s
        limit_s = lease_s
        if self._lanes and all(lane.is_lost for lane in self._lanes.values()):
            limit_s *= ABSENCE_FRACTION
        if now_s - self._progress_s > limit_s:
            self.close("expired")

    @property
    def _is_owed(self) -> bool:
        lanes = self._lanes.values()
        return (
            not any(not lane.is_lost for lane in lanes)
            or any(lane.is_blocked or lane.is_over for lane in lanes)
            or any(lane.is_lost and not lane.is_told for lane in lanes)
            or (bool(self._pages) and self.view(self._pages[0]).nbytes > self._credit.free_bytes)
        )

    def check(self) -> None:
        """Re-derive the counters; AssertionError names what is wrong."""
        sealed = [entry for lane in self._lanes.values() for entry in lane.sealed]
        assert self._sent == SentTotals.of(sealed), "totals"
        sent = [item for lane in self._lanes.values() for item in lane.items[: len(lane.sealed)]]
        assert self._sent.num_pages == sum(map(num_pages, sent)), "pages sent"
        unsealed = [len(lane.items) - len(lane.sealed) for lane in self._lanes.values()]
        assert self._num_unsealed == sum(unsealed), "unsealed"
        taken = [i for lane in self._lanes.values() for i in lane.items[len(lane.sealed) :]]
        num_taken = sum(self.view(i).nbytes for i in taken if isinstance(i, PagePlace))
        num_spent = sum(entry.num_kv_bytes for entry in sealed) + num_taken
        assert self._credit.in_flight_bytes == num_spent, "credit"
        for lane in self._lanes.values():
            assert sum(isinstance(item, Last) for item in lane.items) <= lane.num_words, "last"
