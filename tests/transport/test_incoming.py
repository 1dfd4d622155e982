"""What the receiver of a transfer takes for its end, and what it refuses."""

from dataclasses import replace

import pytest

from prfaas.errors import ProtocolError, TransferError
from prfaas.transport.incoming import IncomingTransfer
from prfaas.transport.messages import TransferTotals, encode_totals
from prfaas.transport.wire import Frame, FrameHeader, FrameType
from tests.transport.channels import Pages

PAGE = Frame(header=FrameHeader(type=FrameType.PAGE, length=10), is_placed=True, tag=5)
TOTALS = TransferTotals(num_pages=2, num_page_bytes=20, tokens_computed=1, digest=10)


def is_finished(incoming: IncomingTransfer) -> bool:
    return incoming.is_finished


def is_over(incoming: IncomingTransfer) -> bool:
    return incoming.is_over(0)


def end(totals: TransferTotals = TOTALS) -> Frame:
    return Frame(header=FrameHeader(type=FrameType.END), payload=encode_totals(totals))


def two_streams() -> tuple[IncomingTransfer, Pages]:
    held = Pages()
    incoming = IncomingTransfer(held)
    for number in range(2):
        assert incoming.new_stream() == number
        assert incoming.tell_losses(number) == ()
    return incoming, held


def test_the_end_may_come_before_the_last_page_of_another_stream():
    incoming, held = two_streams()
    incoming.take(0, PAGE)
    incoming.take(0, end())
    assert (incoming.is_ending, incoming.is_finished, incoming.is_over(0)) == (True, False, True)
    incoming.take(1, PAGE)
    assert incoming.is_finished
    assert held.totals == TOTALS


def test_a_run_counts_each_of_its_pages_and_one_tag():
    incoming, held = two_streams()
    incoming.take(0, end())
    pages = [replace(PAGE, tag=0) for _ in range(2)]
    incoming.take(1, Frame(header=FrameHeader(type=FrameType.PAGES), tag=10, pages=pages))
    assert held.frames == pages
    assert held.totals == TOTALS
    incoming.lose(1)
    assert not incoming.has_losses


def test_the_end_waits_for_an_answer_that_another_stream_carries():
    incoming, held = two_streams()
    incoming.take(
        0, end(TransferTotals(num_pages=0, num_page_bytes=0, tokens_computed=0, num_answers=1))
    )
    assert held.totals is None
    incoming.take(1, Frame(header=FrameHeader(type=FrameType.PROGRESS)))
    assert held.totals is None
    incoming.take(1, Frame(header=FrameHeader(type=FrameType.FIRST_TOKENS)))
    assert incoming.is_finished


def test_a_frame_behind_the_end_of_its_stream_is_refused():
    incoming, _ = two_streams()
    incoming.take(0, end())
    with pytest.raises(ProtocolError, match="behind the end"):
        incoming.take(0, PAGE)


@pytest.mark.parametrize(
    "totals",
    [
        replace(TOTALS, digest=11),
        replace(TOTALS, num_page_bytes=21),
        replace(TOTALS, num_pages=1),
        replace(TOTALS, epoch=1),
    ],
)
def test_an_end_that_does_not_fit_what_came_is_refused(totals):
    incoming, held = two_streams()
    incoming.take(0, PAGE)
    incoming.take(1, PAGE)
    with pytest.raises(ProtocolError):
        incoming.take(0, end(totals))
    assert held.totals is None


def test_two_streams_that_end_differently_are_refused():
    incoming, _ = two_streams()
    incoming.take(0, end())
    with pytest.raises(ProtocolError, match="different totals"):
        incoming.take(1, end(replace(TOTALS, num_pages=3)))


def test_an_end_of_before_a_loss_does_not_count():
    incoming, _ = two_streams()
    incoming.take(0, PAGE)
    incoming.take(0, PAGE)
    incoming.lose(1)
    assert incoming.tell_losses(0) == ((1, 0),)
    assert not incoming.has_losses
    incoming.take(0, end())  # it was under way when the word of the loss was
    assert not is_finished(incoming)
    assert not is_over(incoming)
    incoming.take(0, end(replace(TOTALS, epoch=1, num_words=2)))
    assert is_finished(incoming)
    assert is_over(incoming)


def test_what_the_peer_says_of_its_failure_is_raised():
    incoming, _ = two_streams()
    with pytest.raises(TransferError, match="no more pages"):
        incoming.take(0, Frame(header=FrameHeader(type=FrameType.ERROR), payload=b"no more pages"))
