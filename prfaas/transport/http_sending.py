"""Sends a transfer's frames as the chunked body of an HTTP answer: slower than a raw stream, and through proxies."""

import asyncio
from collections.abc import Callable

from aiohttp import web

from prfaas.transport.coding import PageEncoder
from prfaas.transport.flow import EgressBudget
from prfaas.transport.outgoing import OutgoingTransfer
from prfaas.transport.pieces import Item, PagePlace, Piece, SendingLane

CHUNK_BYTES = 128 << 10
"""Frames are put together until they are so much: each chunk costs both ends a turn."""


async def send_frames(
    response: web.StreamResponse,
    transfer: OutgoingTransfer,
    lane: SendingLane,
    *,
    budget: EgressBudget,
    count_sent: Callable[[int], None],
) -> None:
    """Write frames until the lane is over, or the transfer has ended otherwise."""
    news = asyncio.Event()
    transfer.on_news.add(news.set)
    transfer.enter()
    is_whole = False
    try:
        with PageEncoder(transfer.codec, transfer.numbers) as encoder:
            while not lane.is_over:
                news.clear()
                pieces = await _pieces(transfer, lane, encoder)
                if pieces is None:
                    return
                if pieces:
                    num_page_bytes = sum(piece.num_page_bytes for piece in pieces)
                    await _may_send(transfer, budget, num_page_bytes)
                    await _write(response, transfer, lane, pieces)
                    count_sent(num_page_bytes)
                elif lane.is_lost or transfer.outcome not in (None, "completed"):
                    return
                else:
                    await news.wait()
        is_whole = True
    finally:
        transfer.on_news.discard(news.set)
        if not is_whole:
            transfer.lose(lane)
        transfer.leave()


async def _pieces(
    transfer: OutgoingTransfer, lane: SendingLane, encoder: PageEncoder
) -> list[Piece] | None:
    """Return the frames that go next, as one chunk; None if the stream was lost meanwhile."""
    pieces: list[Piece] = []
    num_bytes = 0
    while num_bytes < CHUNK_BYTES:
        item = transfer.take(lane)
        if item is None:
            break
        piece = await _piece(transfer, lane, item, encoder)
        if piece is None:
            return None
        pieces.append(piece)
        num_bytes += piece.num_page_bytes
        if transfer.codec != "raw":
            break  # the next one takes its time
    return pieces


async def _piece(
    transfer: OutgoingTransfer, lane: SendingLane, item: Item, encoder: PageEncoder
) -> Piece | None:
    if transfer.codec == "raw" or not isinstance(item, PagePlace):
        return transfer.seal(lane, item)
    codec, payload = await encoder.encode(transfer.view(item), item.group)
    return transfer.seal(lane, item, codec, payload)


async def _may_send(transfer: OutgoingTransfer, budget: EgressBudget, num_bytes: int) -> None:
    loop = asyncio.get_running_loop()
    if num_bytes:
        while wait_s := budget.ask(  # noqa: ASYNC110  # it is told when
            transfer.transfer_id, num_bytes, now_s=loop.time(), deadline_s=transfer.deadline_s
        ):
            await asyncio.sleep(wait_s)


async def _write(
    response: web.StreamResponse, transfer: OutgoingTransfer, lane: SendingLane, pieces: list[Piece]
) -> None:
    parts = [part for piece in pieces for part in (piece.header, *piece.pages)]
    lane.is_blocked = True
    # A copy: the answer may hold it back, and a page may be let go by then.
    await response.write(b"".join(parts))
    lane.is_blocked = False
    transfer.progressed(asyncio.get_running_loop().time())
