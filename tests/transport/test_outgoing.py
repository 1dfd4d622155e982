"""What a transfer sends over which stream, what goes again, and how it ends."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ProtocolError
from prfaas.transport.attach import Attach
from prfaas.transport.decoder import FrameDecoder
from prfaas.transport.incoming import IncomingTransfer
from prfaas.transport.messages import parse_totals
from prfaas.transport.outgoing import OutgoingTransfer
from prfaas.transport.pieces import PagePlace, Piece, SendingLane
from prfaas.transport.seals import CHECKSUM
from prfaas.transport.wire import (
    FROM_SENDER,
    MAX_RUN_PAGES,
    Frame,
    FrameType,
    encode_progress,
)
from tests.transport.channels import Pages

CAPABILITY = "c" * 32
PAGE_BYTES = 32


def page_view(place: PagePlace) -> memoryview:
    return memoryview(bytes([place.block]) * PAGE_BYTES)


def make_transfer(credit_bytes: int = 1 << 30) -> OutgoingTransfer:
    return OutgoingTransfer(
        transfer_id="t" * 32,
        page_view=page_view,
        capability=CAPABILITY,
        credit_bytes=credit_bytes,
    )


def attach(stream: int, *resumes: tuple[int, int]) -> Attach:
    return Attach(
        transfer_id="t" * 32, capability=CAPABILITY, stream=stream, resumes=tuple(resumes)
    )


def place(block: int) -> PagePlace:
    return PagePlace(group=0, index=1, block=block, num_tokens=4)


def decode(piece: Piece, pages: Pages | None = None) -> Frame:
    pages = pages or Pages(PAGE_BYTES)
    decoder = FrameDecoder(allowed=FROM_SENDER, resolve=pages.resolve)
    data = b"".join((piece.header, *piece.pages))
    while True:
        target = decoder.buffer()
        target[:], data = data[: len(target)], data[len(target) :]
        frame = decoder.received(len(target))
        if frame is not None:
            assert not data
            return frame


def next_piece(transfer: OutgoingTransfer, lane: SendingLane) -> Piece | None:
    item = transfer.take(lane)
    return None if item is None else transfer.seal(lane, item)


def take_all(transfer: OutgoingTransfer, lane: SendingLane) -> list[Frame]:
    frames = []
    while (piece := next_piece(transfer, lane)) is not None:
        frames.append(decode(piece))
        transfer.check()
    return frames


def test_urgent_frames_overtake_pages_and_the_end_comes_last():
    transfer = make_transfer()
    lane = transfer.attach(attach(0), CHECKSUM)
    transfer.put_page(place(0))
    transfer.put_page(place(1))
    first = next_piece(transfer, lane)
    assert first is not None
    assert first.num_page_bytes == PAGE_BYTES
    transfer.finish(tokens_computed=7)
    transfer.put_urgent(FrameType.PROGRESS, encode_progress(3, 0))
    frames = take_all(transfer, lane)
    assert [f.header.type for f in frames] == [FrameType.PROGRESS, FrameType.PAGE, FrameType.END]
    totals = parse_totals(frames[-1].payload)
    assert (totals.num_pages, totals.num_page_bytes, totals.tokens_computed) == (2, 64, 7)


def test_every_stream_takes_other_pages_and_ends():
    transfer = make_transfer()
    lanes = [transfer.attach(attach(number), CHECKSUM) for number in range(3)]
    for block in range(6):
        transfer.put_page(place(block))
    transfer.finish(tokens_computed=0)
    blocks = []
    for _ in range(2):
        for lane in lanes:
            piece = next_piece(transfer, lane)
            assert piece is not None
            blocks.append(decode(piece).header.block)
    assert blocks == list(range(6))
    for lane in lanes:
        (end,) = take_all(transfer, lane)
        assert end.header.type is FrameType.END


def test_a_run_takes_what_is_ready_and_fits_and_never_waits_for_more():
    transfer = make_transfer()
    lane = transfer.attach(attach(0), CHECKSUM)
    assert transfer.take_run(lane, 1 << 20) is None
    transfer.put_page(place(0))
    assert transfer.take_run(lane, 1 << 20) is None
    for block in range(1, 5):
        transfer.put_page(place(block))
    assert transfer.take_run(lane, 2 * PAGE_BYTES - 1) is None
    held, pieces = Pages(PAGE_BYTES), []
    for max_bytes in (3 * PAGE_BYTES, 1 << 20):
        piece = transfer.take_run(lane, max_bytes)
        assert piece is not None
        pieces.append([page.header.block for page in decode(piece, held).pages])
        transfer.check()
    assert pieces == [[0, 1, 2], [3, 4]]
    assert all(page == bytes([block]) * PAGE_BYTES for block, page in held.pages.items())


def test_runs_are_bounded_whatever_is_allowed():
    transfer = make_transfer()
    lane = transfer.attach(attach(0), CHECKSUM)
    for block in range(2 * MAX_RUN_PAGES):
        transfer.put_page(place(block % 256))
    piece = transfer.take_run(lane, 1 << 40)
    assert piece is not None
    assert len(piece.pages) == MAX_RUN_PAGES


@pytest.mark.parametrize("what", ["urgent", "failed", "completed", "over", "lost", "credit"])
def test_there_is_no_run_where_something_else_is_next(what):
    transfer = make_transfer(credit_bytes=2 * PAGE_BYTES - 1 if what == "credit" else 1 << 30)
    lane = transfer.attach(attach(0), CHECKSUM)
    if what == "over":
        transfer.finish(tokens_computed=0)
        take_all(transfer, lane)
    for block in range(3):
        transfer.put_page(place(block))
    if what == "urgent":
        transfer.put_urgent(FrameType.FIRST_TOKENS, b"x")
    elif what == "failed":
        transfer.fail("no more pages")
    elif what == "completed":
        transfer.close("completed")
    elif what == "lost":
        transfer.lose(lane)
    assert transfer.take_run(lane, 1 << 20) is None
    transfer.check()


def test_a_run_that_was_lost_goes_again_page_by_page_in_its_order():
    transfer = make_transfer(credit_bytes=5 * PAGE_BYTES)
    lane = transfer.attach(attach(0), CHECKSUM)
    for block in range(5):
        transfer.put_page(place(block))
    for _ in range(2):
        assert transfer.take_run(lane, 2 * PAGE_BYTES) is not None
    second = transfer.attach(attach(1, (0, 1)), CHECKSUM)
    transfer.check()
    assert transfer.num_pages_sent == 2
    assert [frame.header.block for frame in take_all(transfer, second)] == [2, 3, 4]
    assert (transfer.num_pages_sent, transfer.num_page_bytes_sent) == (5, 5 * PAGE_BYTES)


def test_streams_that_found_nothing_more_are_told_when_a_run_was_the_last():
    transfer = make_transfer()
    lane = transfer.attach(attach(0), CHECKSUM)
    for block in range(2):
        transfer.put_page(place(block))
    transfer.finish(tokens_computed=0)
    told: list[bool] = []
    transfer.on_news.add(lambda: told.append(True))
    assert transfer.take_run(lane, 1 << 20) is not None
    assert told


def test_a_failure_drops_the_backlog_and_tells_why():
    transfer = make_transfer()
    lane = transfer.attach(attach(0), CHECKSUM)
    transfer.put_page(place(0))
    transfer.fail("the engine burned down " + "x" * 9000)
    (frame,) = take_all(transfer, lane)
    assert frame.header.type is FrameType.ERROR
    assert frame.payload.startswith(b"the engine burned down")
    transfer.close("cancelled")
    assert transfer.outcome == "failed"


def test_the_end_waits_for_pages_that_another_stream_is_encoding():
    transfer = make_transfer()
    slow, fast = (transfer.attach(attach(number), CHECKSUM) for number in range(2))
    transfer.put_page(place(0))
    transfer.finish(tokens_computed=0)
    item = transfer.take(slow)
    assert item is not None
    assert transfer.take(fast) is None
    told = []
    transfer.on_news.add(lambda: told.append(True))
    assert transfer.seal(slow, item) is not None
    assert told
    (end,) = take_all(transfer, fast)
    assert parse_totals(end.payload).num_pages == 1


def test_pages_beyond_the_credit_wait_for_what_was_lost_to_come_back():
    transfer = make_transfer(2 * PAGE_BYTES)
    lane = transfer.attach(attach(0), CHECKSUM)
    for block in range(3):
        transfer.put_page(place(block))
    assert len(take_all(transfer, lane)) == 2
    second = transfer.attach(attach(1, (0, 1)), CHECKSUM)
    (frame,) = take_all(transfer, second)
    assert frame.header.block == 1


def test_the_first_outcome_wins_and_is_told():
    transfer = make_transfer()
    told = []
    transfer.on_end.add(lambda: told.append(transfer.outcome))
    transfer.enter()
    transfer.close("expired")
    transfer.close("completed")
    assert (transfer.outcome, transfer.is_released, told) == ("expired", False, ["expired"])
    transfer.leave()
    assert transfer.is_released


def test_an_ack_before_the_end_is_a_protocol_error():
    early, late = make_transfer(), make_transfer()
    early.attach(attach(0), CHECKSUM)
    early.acknowledge()
    assert early.outcome == "protocol_error"
    lane = late.attach(attach(0), CHECKSUM)
    late.finish(tokens_computed=0)
    take_all(late, lane)
    late.acknowledge()
    assert late.outcome == "completed"


@pytest.mark.parametrize(
    "word",
    [
        attach(0),
        attach(2, (0, 4)),
        attach(2, (7, 1)),
        attach(2, (0, 1), (0, 1)),
        attach(2, (1, 0), (1, 0)),
    ],
)
def test_a_word_that_cannot_be_changes_nothing(word):
    transfer = make_transfer()
    lane = transfer.attach(attach(0), CHECKSUM)
    transfer.attach(attach(1), CHECKSUM)
    for block in range(3):
        transfer.put_page(place(block))
    take_all(transfer, lane)
    with pytest.raises(ProtocolError):
        transfer.attach(word, CHECKSUM)
    transfer.check()
    assert transfer.num_pages_sent == 3
    assert not lane.is_lost


def test_a_stream_that_was_lost_before_it_attached_cannot_attach_any_more():
    transfer = make_transfer()
    transfer.attach(attach(1, (0, 0)), CHECKSUM)
    with pytest.raises(ProtocolError, match="attached before"):
        transfer.attach(attach(0), CHECKSUM)


def test_what_was_lost_may_be_told_again_but_not_otherwise():
    """The word of a loss may be lost itself, with the stream that carried it."""
    transfer = make_transfer()
    lane = transfer.attach(attach(0), CHECKSUM)
    for block in range(3):
        transfer.put_page(place(block))
    take_all(transfer, lane)
    transfer.attach(attach(1, (0, 2)), CHECKSUM)
    transfer.attach(attach(2, (0, 2), (1, 0)), CHECKSUM)
    assert transfer.num_pages_sent == 2
    transfer.check()
    for frames in (1, 3):
        with pytest.raises(ProtocolError):
            transfer.attach(attach(3, (0, frames)), CHECKSUM)


LEASE_S = 8.0


@pytest.mark.parametrize(
    ("state", "limit_s"),
    [("nobody", LEASE_S), ("lost", LEASE_S / 4), ("blocked", LEASE_S), ("ended", LEASE_S)],
)
def test_a_receiver_that_owes_something_has_so_long(state, limit_s):
    transfer = make_transfer()
    transfer.check_lease(0.0, LEASE_S)
    if state != "nobody":
        lane = transfer.attach(attach(0), CHECKSUM)
        transfer.check_lease(1000.0, LEASE_S)
        if state == "lost":
            transfer.lose(lane)
        elif state == "blocked":
            lane.is_blocked = True
        else:
            transfer.finish(tokens_computed=0)
            take_all(transfer, lane)
        transfer.progressed(1000.0)
    start_s = 0.0 if state == "nobody" else 1000.0
    transfer.check_lease(start_s + limit_s - 0.1, LEASE_S)
    assert transfer.outcome is None
    transfer.check_lease(start_s + limit_s + 0.1, LEASE_S)
    assert transfer.outcome == "expired"


def test_a_transfer_whose_credit_is_used_up_falls_to_its_lease():
    transfer = make_transfer(credit_bytes=2 * PAGE_BYTES)
    lane = transfer.attach(attach(0), CHECKSUM)
    for block in range(2):
        transfer.put_page(place(block))
    assert len(take_all(transfer, lane)) == 2
    transfer.check_lease(0.0, LEASE_S)
    transfer.check_lease(1000.0, LEASE_S)
    transfer.put_page(place(2))
    assert transfer.take(lane) is None
    transfer.check_lease(1000.0 + LEASE_S - 0.1, LEASE_S)
    assert transfer.outcome is None
    transfer.check_lease(1000.0 + LEASE_S + 0.1, LEASE_S)
    assert transfer.outcome == "expired"


def test_a_receiver_that_owes_nothing_has_all_the_time():
    transfer = make_transfer()
    transfer.attach(attach(0), CHECKSUM)
    for now_s in range(0, 1000, 100):
        transfer.check_lease(float(now_s), LEASE_S)
    assert transfer.outcome is None


@given(seed=st.integers(0, 10**9), num_pages=st.integers(0, 30), is_late=st.booleans())
def test_whatever_streams_break_every_page_arrives_once_and_the_digest_fits(  # noqa: C901  # one draw of many
    seed, num_pages, is_late
):
    """Sender and receiver against each other: streams break at any frame, also behind the end."""
    draw = random.Random(seed)
    transfer, held = make_transfer(), Pages(PAGE_BYTES)
    incoming = IncomingTransfer(held)
    wires: dict[int, tuple[SendingLane, list[Piece]]] = {}

    def begin() -> None:
        number = incoming.new_stream()
        word = attach(number, *incoming.tell_losses(number))
        wires[number] = (transfer.attach(word, CHECKSUM), [])

    begin()
    transfer.put_urgent(FrameType.FIRST_TOKENS, b"x")
    for block in range(num_pages):
        transfer.put_page(place(block))
    if not is_late:
        transfer.finish(tokens_computed=0)
    num_breaks = 0
    while not incoming.is_finished:
        number = draw.choice(sorted(wires)) if wires else -1
        match draw.choice(["send", "send", "send", "receive", "receive", "break", "begin"]):
            case "send" if wires:
                lane, wire = wires[number]
                run = transfer.take_run(lane, draw.choice([0, 3, 99]) * PAGE_BYTES)
                piece = run or next_piece(transfer, lane)
                if piece is not None:
                    wire.append(piece)
                elif is_late:
                    transfer.finish(tokens_computed=0)
            case "receive" if wires and wires[number][1]:
                incoming.take(number, decode(wires[number][1].pop(0), held))
            case "break" if wires and num_breaks < 20:
                num_breaks += 1
                lane, _ = wires.pop(number)
                incoming.lose(number)
                if draw.random() < 0.5:
                    transfer.lose(lane)
                if wires and draw.random() < 0.5:
                    carrier = draw.choice(sorted(wires))
                    resumes = incoming.tell_losses(carrier)
                    transfer.attach_again(wires[carrier][0], attach(carrier, *resumes))
            case "begin" if len(wires) < 4:
                begin()
            case _:
                continue
        transfer.check()
    held.check(num_pages)
    assert held.kinds.count(FrameType.FIRST_TOKENS) == 1
    transfer.acknowledge()
    assert transfer.outcome == "completed"


def test_a_damaged_piece_would_be_noticed():
    transfer = make_transfer()
    lane = transfer.attach(attach(0), CHECKSUM)
    transfer.put_page(place(3))
    piece = next_piece(transfer, lane)
    assert piece is not None
    with pytest.raises(ProtocolError):
        decode(Piece(header=piece.header, pages=[bytes(PAGE_BYTES)]))
