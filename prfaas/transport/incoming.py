"""One transfer as its receiver sees it, over however many streams. Pure: no clock, no I/O.

Frames of one stream come in order, those of different streams in any. A stream that is lost is told of
with the number of frames that came whole; what was behind them comes again over another.
"""

from dataclasses import dataclass, replace
from typing import Protocol

from prfaas.errors import ProtocolError, TransferError
from prfaas.transport.attach import MAX_STREAMS
from prfaas.transport.fields import shown
from prfaas.transport.messages import TransferAccepted, TransferTotals, parse_totals
from prfaas.transport.wire import Frame, FrameHeader, FrameType


class FrameConsumer(Protocol):
    """Who asked for the transfer."""

    def accepted(self, accepted: TransferAccepted) -> None:
        """Take note that the peer has taken the request; comes before any frame."""
        ...

    def resolve(self, header: FrameHeader) -> memoryview | None:
        """Return where a page goes; see wire.Resolve."""
        ...

    def take(self, frame: Frame) -> None:
        """Take a verified frame, in any order but its stream's; END and ERROR never come here.

        Of PAGES each page comes as a PAGE.
        """
        ...

    def ended(self, totals: TransferTotals) -> None:
        """Take note that every page the sender sent has come; raise ProtocolError if one is missing."""
        ...


@dataclass(slots=True)
class _Lane:
    num_frames: int = 0
    is_over: bool = False
    """END came, and nothing was asked of the stream since."""
    num_words: int = 0
    """ATTACH frames that were sent over it: an END that knows fewer was under way already."""
    is_lost: bool = False
    is_told: bool = False
    told_over: int | None = None
    """The stream that carried the word of its loss, which is lost with that stream."""


class IncomingTransfer:
    """Puts together what the streams of one transfer bring."""

    def __init__(self, consumer: FrameConsumer) -> None:
        self.consumer = consumer
        self.num_pages = 0
        self.num_page_bytes = 0
        """Verified, as they crossed the link."""
        self.is_finished = False
        """Everything is here and verified."""
        self._lanes: list[_Lane] = []
        self._num_answers = 0
        self._digest = 0
        self._epoch = 0
        self._totals: TransferTotals | None = None

    def new_stream(self) -> int:
        """Return the number of a stream that is about to be attached."""
        if len(self._lanes) >= MAX_STREAMS:
            raise TransferError(f"{MAX_STREAMS} streams were used up")
        self._lanes.append(_Lane())
        return len(self._lanes) - 1

    def take(self, stream: int, frame: Frame) -> None:
        """Take the next verified frame of a stream.

        Raises TransferError for an ERROR, ProtocolError for what does not fit.
        """
        lane = self._lanes[stream]
        if lane.is_over:
            raise ProtocolError(f"{frame.header.type.name} frame behind the end of its stream")
        lane.num_frames += 1
        match frame.header.type:
            case FrameType.PAGE:
                self.num_pages += 1
                self.num_page_bytes += frame.header.length
                self._digest += frame.tag
                self.consumer.take(frame)
            case FrameType.PAGES:
                self._digest += frame.tag
                for page in frame.pages:
                    self.num_pages += 1
                    self.num_page_bytes += page.header.length
                    self.consumer.take(page)
            case FrameType.END:
                self._take_end(lane, parse_totals(frame.payload))
            case FrameType.ERROR:
                lane.is_over = True
                message = shown(frame.payload.decode("utf-8", "replace"))
                raise TransferError(f"the peer failed: {message}")
            case _:
                self._num_answers += frame.header.type is not FrameType.PROGRESS
                self.consumer.take(frame)
        if self._totals is not None and not self.is_finished:
            self._compare(self._totals)

    def _take_end(self, lane: _Lane, totals: TransferTotals) -> None:
        if totals.epoch > self._epoch:
            raise ProtocolError(f"END of epoch {totals.epoch}, {self._epoch} were begun")
        if totals.num_words > max(1, lane.num_words):
            raise ProtocolError(f"END behind {totals.num_words} words, {lane.num_words} were sent")
        lane.is_over = totals.num_words >= lane.num_words
        totals = replace(totals, num_words=1)
        if totals.epoch < self._epoch:
            return  # of before the last loss: another END follows
        if self._totals is not None and totals != self._totals:
            raise ProtocolError("two streams end with different totals")
        self._totals = totals

    def _compare(self, totals: TransferTotals) -> None:
        if self.num_pages < totals.num_pages or self._num_answers < totals.num_answers:
            return
        digest = self._digest % (1 << 64)
        ours = (self.num_pages, self.num_page_bytes, digest, self._num_answers)
        theirs = (totals.num_pages, totals.num_page_bytes, totals.digest, totals.num_answers)
        if ours != theirs:
            raise ProtocolError(
                "{} pages of {} bytes came, digest {:016x}, {} answers; the sender says {} pages of {} "
                "bytes, digest {:016x}, {} answers".format(*ours, *theirs)
            )
        self.consumer.ended(totals)
        self.is_finished = True

    # ------------------------------------------------------------ streams that break

    def lose(self, stream: int) -> None:
        """Take note that a stream broke: nothing more of it counts, and what it was to tell is told again."""
        self._lanes[stream].is_lost = True
        for lane in self._lanes:
            if lane.told_over == stream:
                lane.is_told = False

    def is_over(self, stream: int) -> bool:
        """Return whether nothing more of the transfer comes over a stream."""
        return self._lanes[stream].is_over

    @property
    def has_losses(self) -> bool:
        """Streams were lost that the sender has not been told of."""
        return not self.is_finished and any(self._untold(lane) for lane in self._lanes)

    @property
    def is_ending(self) -> bool:
        """The end was announced, and pages are missing that are still under way."""
        return self._totals is not None and not self.is_finished

    def tell_losses(self, carrier: int) -> tuple[tuple[int, int], ...]:
        """Return the resumes that must go out over `carrier` now, in one ATTACH frame."""
        self._lanes[carrier].num_words += 1
        told = [(n, lane) for n, lane in enumerate(self._lanes) if self._untold(lane)]
        for _, lane in told:
            self._epoch += lane.told_over is None
            lane.is_told, lane.told_over = True, carrier
        if told:
            self._totals = None
            self._lanes[carrier].is_over = False
        return tuple((stream, lane.num_frames) for stream, lane in told)

    @staticmethod
    def _untold(lane: _Lane) -> bool:
        return lane.is_lost and not lane.is_told
