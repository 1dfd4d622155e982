"""Where the pages of a measurement land: real pages, used in turn, as a pool's are."""

from collections import deque
from collections.abc import Iterable

from prfaas.errors import ProtocolError
from prfaas.transport.messages import TransferAccepted, TransferTotals
from prfaas.transport.wire import Frame, FrameHeader


class ReceivedPages:
    """A FrameConsumer that counts what comes. Memory takes part: pages are used in turn.

    Args:
        views: pages of equal size; more are in flight at most if the sender breaks the protocol.
    """

    def __init__(self, views: Iterable[memoryview]) -> None:
        self.num_pages = 0
        self.num_wire_bytes = 0
        """Of pages, as they crossed the link."""
        self.num_bytes = 0
        """Of pages, as they are decoded."""
        self.is_done = False
        self._free = deque(views)
        self._taken: dict[int, memoryview] = {}

    def accepted(self, accepted: TransferAccepted) -> None:
        """See FrameConsumer."""

    def resolve(self, header: FrameHeader) -> memoryview:
        """See FrameConsumer."""
        if header.block not in self._taken:
            if not self._free:
                raise ProtocolError(f"{len(self._taken)} pages at once, limit is as many")
            self._taken[header.block] = self._free.popleft()
        return self._taken[header.block]

    def take(self, frame: Frame) -> None:
        """See FrameConsumer."""
        page = self._taken.pop(frame.header.block)
        self.num_pages += 1
        self.num_wire_bytes += frame.header.length
        self.num_bytes += len(page)
        self._free.append(page)

    def ended(self, totals: TransferTotals) -> None:
        """See FrameConsumer."""
        self.is_done = True
