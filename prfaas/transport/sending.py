"""The sending end of a raw stream: carries one transfer after the other to the asker at its other end."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from prfaas.errors import ProtocolError, TransferError
from prfaas.transport.accepting import UNSENT_BYTES, set_unsent
from prfaas.transport.attach import Attach, parse_attach
from prfaas.transport.coding import PageEncoder
from prfaas.transport.decoder import FrameDecoder
from prfaas.transport.dialing import UPGRADE
from prfaas.transport.flow import EgressBudget
from prfaas.transport.outgoing import OutgoingTransfer
from prfaas.transport.pieces import PagePlace, Piece, SendingLane
from prfaas.transport.ports import StreamPort
from prfaas.transport.seals import CHECKSUM, FrameSeal
from prfaas.transport.tcpinfo import read_tcp_info
from prfaas.transport.wire import (
    FROM_RECEIVER,
    DamagedFrame,
    Frame,
    FrameType,
    encode_frame,
    refuse_pages,
)

BATCH_BYTES = 256 << 10
"""Pages that are taken for a stream at once: what is taken goes over this stream and no other."""
RUN_S = 0.01
"""Over a stream that was found fast, pages go out in runs of what it carries in this time: a run that is
lost goes again whole, and an urgent frame waits behind it."""
BATCH_PIECES = 64
TURN_BYTES = 1 << 20
"""A stream whose socket takes everything gives the loop to others this often."""
UNSENT_S = 0.05
"""Over a slow link, what it carries in this time: a first token waits behind what is unsent."""
MIN_UNSENT_BYTES = 64 << 10
LOOK_S = 0.25
"""How often is looked how fast a stream is that makes its sender wait."""
NEW_S = 60.0
"""A stream must carry a transfer within this: whoever opened it may be anybody."""
IDLE_S = 600.0
"""One that has carried a transfer must carry the next within this."""
REPLY_S = 5.0
"""Who has attached to nothing must read that within this."""
LEASE_LOOKS = 8
"""How often in a lease is looked whether it is over."""

SWITCHING = (
    f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n\r\n"
).encode("ascii")

FindTransfer = Callable[[Attach], Awaitable[OutgoingTransfer]]
"""Returns the transfer that an asker may attach to, waiting a while for one that is being opened.

Raises TransferError, whose words are told to the asker.
"""


async def outlive(transfer: OutgoingTransfer, lease_s: float) -> None:
    """Return once the transfer has ended and nobody reads its pages; ends it when its lease is over."""
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    transfer.on_end.add(changed.set)
    try:
        while not transfer.is_released:
            changed.clear()
            transfer.check_lease(loop.time(), lease_s)
            try:
                async with asyncio.timeout(lease_s / LEASE_LOOKS):
                    await changed.wait()
            except TimeoutError:
                continue
    finally:
        transfer.on_end.discard(changed.set)


class _Gone(Exception):
    """The connection must be closed: the asker left, or a frame was cut short."""


class SendingStream:
    """One raw stream at its sender.

    `run` serves it until the asker leaves, lets it idle for too long, or `close` is called.
    """

    def __init__(
        self,
        port: StreamPort,
        *,
        find: FindTransfer,
        budget: EgressBudget,
        count_sent: Callable[[int], None],
        our_seal: FrameSeal = CHECKSUM,
        asker_seal: FrameSeal = CHECKSUM,
    ) -> None:
        self.port = port
        self.asker = ""
        """Host at the other end."""
        self._loop = asyncio.get_running_loop()
        """Kept: to ask for it costs a system call."""
        self._turn_bytes = 0
        """Sent since others had their turn."""
        self._unsent_bytes = UNSENT_BYTES
        self._run_bytes = 0
        """Of a run of pages, at most; 0 as long as it is not known how fast the stream is."""
        self._looked_s = self._loop.time()
        self._idle_until_s = self._loop.time() + NEW_S
        rate = budget.rate_bytes_per_s
        self._budget_bytes = BATCH_BYTES if rate is None else max(1, round(RUN_S * rate))
        """What is taken at once waits for the budget together, and first tokens behind it."""
        self._find = find
        self._budget = budget
        self._count_sent = count_sent
        self._seal = our_seal
        self._decoder = FrameDecoder(allowed=FROM_RECEIVER, resolve=refuse_pages, seal=asker_seal)
        self._news = asyncio.Event()
        self._pending: Attach | None = None
        self._transfer: OutgoingTransfer | None = None
        """Attached last; an ACK is its."""
        self._lane: SendingLane | None = None
        self._left = False

    @property
    def is_idle(self) -> bool:
        """No transfer needs it."""
        transfer, lane = self._transfer, self._lane
        is_done = lane is None or lane.is_over or (transfer is not None and transfer.is_released)
        return self._pending is None and is_done

    def close(self) -> None:
        """End at once."""
        self._left = True
        self.port.stop()
        self._wake()

    def _has_left(self) -> bool:
        return self._left

    def _wake(self) -> None:
        self._news.set()
        transfer = self._transfer
        if self._has_left() or (transfer is not None and transfer.outcome is not None):
            self.port.interrupt()

    # ------------------------------------------------------------ what the asker says

    def buffers(self) -> Sequence[memoryview]:
        """See ByteSink."""
        return self._decoder.buffers()

    def buffer(self) -> memoryview:
        """See ByteSink."""
        return self._decoder.buffer()

    def received(self, num_bytes: int) -> None:
        """See ByteSink."""
        try:
            frame = self._decoder.received(num_bytes)
            if frame is not None:
                self._take(frame)
        except DamagedFrame:
            self.close()  # the asker says over another stream what arrived over this one
        except ProtocolError:
            if self._transfer is not None:
                self._transfer.close("protocol_error")
            self.close()

    def ended(self, error: Exception | None) -> None:
        """See ByteSink."""
        self.close()

    def _take(self, frame: Frame) -> None:
        transfer, lane = self._transfer, self._lane
        if frame.header.type is FrameType.ACK:
            if transfer is None:
                raise ProtocolError("ACK without a transfer")
            transfer.acknowledge()
            return
        attach = parse_attach(frame.payload)
        if (
            transfer is not None
            and lane is not None
            and transfer.outcome is None
            and attach.transfer_id == transfer.transfer_id
        ):
            transfer.attach_again(lane, attach)
        elif self.is_idle:
            self._pending = attach
        else:
            raise ProtocolError("ATTACH while another transfer is under way")
        self._news.set()

    # ------------------------------------------------------------ serving

    async def run(self) -> None:
        """Answer the upgrade and serve transfers; leaves the port open."""
        try:
            self.port.send_now([SWITCHING])
            self.port.start(self)
            while not self._has_left():
                if self._pending is not None:
                    await self._serve(self._pending)
                else:
                    async with asyncio.timeout_at(self._idle_until_s):
                        await self._wait()
        except (OSError, TimeoutError, _Gone):
            return
        finally:
            self.port.stop()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def _serve(self, attach: Attach) -> None:
        try:
            transfer = await self._find(attach)
            self._pending = None
            if self._has_left():
                raise _Gone
            lane = transfer.attach(attach, self._seal)
        except TransferError as error:
            self._pending = None
            async with asyncio.timeout(REPLY_S):
                await self._put(
                    [encode_frame(FrameType.ERROR, str(error).encode(), self._seal)], None
                )
            return
        self._transfer, self._lane = transfer, lane
        self._looked_s = self._loop.time()
        transfer.on_news.add(self._wake)
        try:
            with PageEncoder(transfer.codec, transfer.numbers) as encoder:
                while not self._has_left() and not self._is_done(transfer, lane):
                    if lane.is_over:
                        await self._wait()
                    else:
                        await self._send(transfer, lane, encoder)
        finally:
            transfer.on_news.discard(self._wake)
            self._idle_until_s = self._loop.time() + IDLE_S
            if self._has_left() or not lane.is_over:
                transfer.lose(lane)
                self._left = True

    def _is_done(self, transfer: OutgoingTransfer, lane: SendingLane) -> bool:
        """Return whether the stream is free for the next transfer."""
        return lane.is_over and (transfer.outcome is not None or self._pending is not None)

    async def _send(
        self, transfer: OutgoingTransfer, lane: SendingLane, encoder: PageEncoder
    ) -> None:
        """Send what there is until the lane is over."""
        transfer.enter()
        try:
            while not lane.is_over:
                pieces = await self._pieces(transfer, lane, encoder)
                if pieces:
                    await self._put_pieces(pieces, transfer, lane, encoder)
                elif self._has_left() or lane.is_lost or self._is_vain:
                    raise _Gone
                else:
                    await self._wait()
        finally:
            transfer.leave()

    async def _pieces(
        self, transfer: OutgoingTransfer, lane: SendingLane, encoder: PageEncoder
    ) -> list[Piece]:
        """Return the frames that go next: a run, some pages, or one where pages are encoded."""
        if encoder.is_raw and (run := transfer.take_run(lane, self._run_bytes)) is not None:
            encoder.passed_over(len(run.pages))
            return [run]
        pieces: list[Piece] = []
        num_bytes = 0
        batch_bytes = min(BATCH_BYTES, self._unsent_bytes, self._budget_bytes)
        while num_bytes < batch_bytes and len(pieces) < BATCH_PIECES:
            item = transfer.take(lane)
            if item is None:
                break
            if transfer.codec == "raw" or not isinstance(item, PagePlace):
                piece = transfer.seal(lane, item)
            else:
                codec, payload = await encoder.encode(transfer.view(item), item.group)
                piece = transfer.seal(lane, item, codec, payload)
            if piece is None:
                raise _Gone
            pieces.append(piece)
            num_bytes += piece.num_page_bytes
            if transfer.codec != "raw":
                break
        return pieces

    async def _put_pieces(
        self,
        pieces: list[Piece],
        transfer: OutgoingTransfer,
        lane: SendingLane,
        encoder: PageEncoder,
    ) -> None:
        buffers: list[memoryview | bytes] = []
        num_page_bytes = 0
        for piece in pieces:
            buffers.append(piece.header)
            buffers.extend(piece.pages)
            num_page_bytes += piece.num_page_bytes
        if num_page_bytes:
            await self._may_send(transfer, num_page_bytes)
        started_s = self._loop.time()
        await self._put(buffers, lane)
        now_s = self._loop.time()
        transfer.progressed(now_s)
        self._look(now_s)
        if num_page_bytes:
            encoder.sent(num_page_bytes, now_s - started_s)
            self._count_sent(num_page_bytes)
        self._turn_bytes += num_page_bytes
        if self._turn_bytes >= TURN_BYTES or not num_page_bytes:
            self._turn_bytes = 0
            await asyncio.sleep(0)

    def _look(self, now_s: float) -> None:
        """Let less wait in the kernel where the link is slow, and pages go in longer runs where it is fast."""
        if now_s - self._looked_s < LOOK_S or self._has_left():
            return
        self._looked_s = now_s
        info = read_tcp_info(self.port.sock)
        if info is not None:
            rate = info.delivery_rate_bytes_per_s
            self._unsent_bytes = max(MIN_UNSENT_BYTES, min(round(UNSENT_S * rate), UNSENT_BYTES))
            set_unsent(self.port, self._unsent_bytes)
            if self._budget.rate_bytes_per_s is not None:
                rate = min(rate, self._budget.rate_bytes_per_s)
            self._run_bytes = round(RUN_S * rate)

    async def _may_send(self, transfer: OutgoingTransfer, num_bytes: int) -> None:
        """Return once the egress budget has room for the bytes."""
        while wait_s := self._budget.ask(
            transfer.transfer_id,
            num_bytes,
            now_s=self._loop.time(),
            deadline_s=transfer.deadline_s,
        ):
            await asyncio.sleep(wait_s)
            if self._has_left() or self._is_vain:
                raise _Gone

    @property
    def _is_vain(self) -> bool:
        """The transfer has ended, and not well."""
        return self._transfer is not None and self._transfer.outcome not in (None, "completed")

    async def _put(self, buffers: Sequence[memoryview | bytes], lane: SendingLane | None) -> None:
        """Send all of the buffers, or raise _Gone when that is no use any more."""
        while True:
            num_sent = self.port.send_now(buffers)
            buffers = _behind(buffers, num_sent)
            if not buffers:
                return
            if num_sent and self._transfer is not None:
                self._transfer.progressed(self._loop.time())
            if lane is not None:
                lane.is_blocked = True
            await self.port.writable()
            self._turn_bytes = 0
            self._look(self._loop.time())
            if lane is not None:
                lane.is_blocked = False
            if self._has_left() or self._is_vain or (lane is not None and lane.is_lost):
                raise _Gone


def _behind(buffers: Sequence[memoryview | bytes], num_sent: int) -> Sequence[memoryview | bytes]:
    """Return what is left of the buffers behind their first bytes."""
    for index, data in enumerate(buffers):
        if num_sent < len(data):
            return [memoryview(data)[num_sent:], *buffers[index + 1 :]]
        num_sent -= len(data)
    return ()
