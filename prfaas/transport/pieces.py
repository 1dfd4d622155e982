"""What a transfer puts on its streams: places of pages, urgent words, the end; and what went over which."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

from prfaas.transport.messages import TransferTotals
from prfaas.transport.seals import FrameSeal
from prfaas.transport.wire import FrameType


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class PagePlace:
    """One page of one block, and how many tokens of the block it covers or counts in.

    Never changed, and not frozen: one is made for every page, and freezing triples what that costs.
    """

    group: int
    index: int
    """Of the page among those of its block."""
    block: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PageRun:
    """Pages that went out in one frame."""

    places: Sequence[PagePlace]


@dataclass(frozen=True, slots=True)
class Urgent:
    """A frame that overtakes pages."""

    type: FrameType
    payload: bytes


@dataclass(frozen=True, slots=True)
class Last:
    """END, or ERROR: nothing follows it on its stream."""


Item = PagePlace | PageRun | Urgent | Last
PageView = Callable[[PagePlace], memoryview]
"""The exact bytes of a page whose KV is whole; valid until the transfer is closed."""


def num_pages(item: Item) -> int:
    """Return how many pages go out with an item."""
    match item:
        case PagePlace():
            return 1
        case PageRun():
            return len(item.places)
        case Urgent() | Last():
            return 0


@dataclass(frozen=True, slots=True)
class Piece:
    """One frame to put on the wire."""

    header: bytes
    """All but pages."""
    pages: Sequence[memoryview | bytes] = ()
    """What of its pages goes behind the header, in order."""
    num_page_bytes: int = 0


@dataclass(slots=True)
class Sealed:
    """What one frame counts for in the totals of its transfer."""

    num_pages: int = 0
    num_bytes: int = 0
    """Of pages, on the wire."""
    num_kv_bytes: int = 0
    """Of pages, as they are decoded."""
    tag: int = 0
    """Of pages only."""
    num_answers: int = 0
    """First tokens and logits: what the end must wait for; progress may come late."""


@dataclass(slots=True)
class SentTotals:
    """The sum of what was sealed; what was lost and goes again counts once."""

    num_pages: int = 0
    num_bytes: int = 0
    num_answers: int = 0
    digest: int = 0

    def add(self, sealed: Sealed, sign: int = 1) -> None:
        """Count a frame, or with a `sign` of -1 take it back."""
        self.num_pages += sign * sealed.num_pages
        self.num_bytes += sign * sealed.num_bytes
        self.num_answers += sign * sealed.num_answers
        self.digest += sign * sealed.tag

    @classmethod
    def of(cls, sealed: Iterable[Sealed]) -> Self:
        """Return the sum of frames."""
        totals = cls()
        for frame in sealed:
            totals.add(frame)
        return totals

    def totals(self, *, tokens_computed: int, epoch: int, num_words: int) -> TransferTotals:
        """Return what END says of the transfer."""
        return TransferTotals(
            num_pages=self.num_pages,
            num_answers=self.num_answers,
            num_page_bytes=self.num_bytes,
            tokens_computed=tokens_computed,
            digest=self.digest % (1 << 64),
            epoch=epoch,
            num_words=num_words,
        )


@dataclass(slots=True, eq=False)
class SendingLane:
    """One stream of a transfer, and what was put on it."""

    stream: int
    seal: FrameSeal
    is_over: bool = False
    """END or ERROR was taken for it."""
    is_lost: bool = False
    is_blocked: bool = False
    """Its driver waits for the receiver to take what was sent."""
    num_words: int = 1
    """ATTACH frames that came over it."""
    is_told: bool = False
    """The receiver has said what of it arrived."""
    items: list[Item] = field(default_factory=list)
    sealed: list[Sealed] = field(default_factory=list)
    """Of the first of the items: those behind were taken and are being encoded."""
