"""Sends a transfer's frames as the chunked body of an HTTP answer: slower than a raw stream, and through proxies."""

import asyncio
from collections.abc import Callable

from aiohttp import web

from prfaas.transport.coding import PageEncoder
from prfaas.transport.flow import EgressBudget
from prfaas.transport.outgoing import Item, OutgoingTransfer, PagePlace, Piece, SendingLane


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
                item = transfer.take(lane)
                if item is not None:
                    piece = await _piece(transfer, lane, item, encoder)
                    if piece is None:
                        return
                    await _write(response, transfer, lane, piece, budget)
                    count_sent(len(piece.payload) if piece.is_page else 0)
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


async def _piece(
    transfer: OutgoingTransfer, lane: SendingLane, item: Item, encoder: PageEncoder
) -> Piece | None:
    if transfer.codec == "raw" or not isinstance(item, PagePlace):
        return transfer.seal(lane, item)
    codec, payload = await encoder.encode(transfer.view(item), item.group)
    return transfer.seal(lane, item, codec, payload)


async def _write(
    response: web.StreamResponse,
    transfer: OutgoingTransfer,
    lane: SendingLane,
    piece: Piece,
    budget: EgressBudget,
) -> None:
    loop = asyncio.get_running_loop()
    if piece.is_page:
        num_bytes = len(piece.payload)
        while wait_s := budget.ask(transfer.transfer_id, num_bytes, now_s=loop.time()):  # noqa: ASYNC110  # it is told when
            await asyncio.sleep(wait_s)
    lane.is_blocked = True
    # A copy: the answer may hold it back, and the page may be let go by then.
    await response.write(piece.header + bytes(piece.payload))
    lane.is_blocked = False
    transfer.progressed(loop.time())
