"""Made-up pages land in real ones, in turn, and are counted as they cross and as they decode."""

import pytest

from prfaas.bench.received_pages import ReceivedPages
from prfaas.errors import ProtocolError
from prfaas.transport.messages import TransferTotals
from prfaas.transport.wire import Codec, Frame, FrameHeader, FrameType


def header(block: int, length: int = 8) -> FrameHeader:
    return FrameHeader(FrameType.PAGE, Codec.RAW, block=block, num_tokens=1, length=length)


def test_pages_are_used_in_turn_and_counted():
    views = [memoryview(bytearray(8)) for _ in range(2)]
    pages = ReceivedPages(views)
    first = pages.resolve(header(0))
    assert first is views[0]
    assert pages.resolve(header(0)) is first  # sent again over another stream
    assert pages.resolve(header(1)) is views[1]
    pages.take(Frame(header(0)))
    assert pages.resolve(header(2, 3)) is views[0]
    pages.take(Frame(header(2, 3)))
    assert (pages.num_pages, pages.num_bytes, pages.num_wire_bytes) == (2, 16, 11)
    assert not pages.is_done
    pages.ended(TransferTotals(num_pages=2, num_page_bytes=11, tokens_computed=0))
    assert pages.is_done


def test_more_pages_at_once_than_there_are_is_the_peers_fault():
    pages = ReceivedPages([memoryview(bytearray(8))])
    pages.resolve(header(0))
    with pytest.raises(ProtocolError, match="1 pages at once"):
        pages.resolve(header(1))
