"""What a transfer sends, in order, and how it ends."""

import asyncio

import pytest

from prfaas.errors import ProtocolError
from prfaas.transport.messages import parse_totals
from prfaas.transport.outgoing import OutgoingTransfer, PagePlace, Piece
from prfaas.transport.wire import (
    FROM_SENDER,
    Frame,
    FrameDecoder,
    FrameType,
    encode_progress,
)


def page_view(place: PagePlace) -> memoryview:
    return memoryview(bytes([place.block]) * 8 * place.num_tokens)


def make_transfer() -> OutgoingTransfer:
    return OutgoingTransfer(transfer_id="t", page_view=page_view)


def place(block: int) -> PagePlace:
    return PagePlace(group=0, index=1, block=block, num_tokens=4)


def decode(piece: Piece) -> Frame:
    decoder = FrameDecoder(allowed=FROM_SENDER, resolve=lambda h: memoryview(bytearray(h.length)))
    data = piece.header + bytes(piece.payload)
    while True:
        target = decoder.buffer()
        target[:], data = data[: len(target)], data[len(target) :]
        frame = decoder.received(len(target))
        if frame is not None:
            assert not data
            return frame


async def take_all(transfer: OutgoingTransfer) -> list[Frame]:
    frames = []
    while (piece := await transfer.next_piece()) is not None:
        frames.append(decode(piece))
    return frames


async def test_urgent_frames_overtake_pages_and_the_end_comes_last():
    transfer = make_transfer()
    transfer.put_page(place(0))
    transfer.put_page(place(1))
    first = await transfer.next_piece()
    assert first is not None
    assert first.is_page
    transfer.finish(tokens_computed=7)
    transfer.put_urgent(FrameType.PROGRESS, encode_progress(3, 0))
    frames = await take_all(transfer)
    assert [f.header.type for f in frames] == [FrameType.PROGRESS, FrameType.PAGE, FrameType.END]
    totals = parse_totals(frames[-1].payload)
    assert (totals.num_pages, totals.num_page_bytes, totals.tokens_computed) == (2, 64, 7)


async def test_a_failure_drops_the_backlog_and_tells_why():
    transfer = make_transfer()
    transfer.put_page(place(0))
    transfer.fail("the engine burned down " + "x" * 9000)
    (frame,) = await take_all(transfer)
    assert frame.header.type is FrameType.ERROR
    assert frame.payload.startswith(b"the engine burned down")
    transfer.close("cancelled")
    assert transfer.outcome == "failed"


async def test_a_piece_is_waited_for():
    transfer = make_transfer()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(transfer.next_piece())
        await asyncio.sleep(0)
        assert not waiting.done()
        transfer.put_urgent(FrameType.ERROR, b"x")
    assert decode(waiting.result() or Piece(header=b"")).payload == b"x"


async def test_the_first_outcome_wins_and_wakes_whoever_waits():
    transfer = make_transfer()
    async with asyncio.TaskGroup() as tasks:
        for wait in (transfer.attached, transfer.closed, transfer.detached):
            tasks.create_task(wait())
        await asyncio.sleep(0)
        transfer.close("expired")
        transfer.close("completed")
    assert transfer.outcome == "expired"
    assert not transfer.try_attach()


async def test_there_is_one_stream_in_a_transfers_life_and_pages_stay_while_it_reads():
    transfer = make_transfer()
    assert transfer.try_attach()
    assert not transfer.try_attach()
    transfer.close("cancelled")
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(transfer.detached())
        await asyncio.sleep(0)
        assert not waiting.done()
        transfer.detach()
    assert transfer.outcome == "cancelled"


async def test_an_ack_before_the_end_is_a_protocol_error():
    early, late = make_transfer(), make_transfer()
    early.acknowledge()
    assert early.outcome == "protocol_error"
    late.finish(tokens_computed=0)
    await take_all(late)
    late.acknowledge()
    assert late.outcome == "completed"


async def test_a_damaged_piece_would_be_noticed():
    transfer = make_transfer()
    transfer.put_page(place(3))
    piece = await transfer.next_piece()
    assert piece is not None
    with pytest.raises(ProtocolError):
        decode(Piece(header=piece.header, payload=bytes(len(piece.payload))))
