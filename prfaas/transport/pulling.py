"""Drives one transfer at its receiver: attaches streams, replaces those that break, ends it.

Frames are taken by calls from the loop, straight from the sockets; whoever runs the transfer waits in
`step` and is woken when something has come.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from prfaas.errors import ProtocolError, TransferError, TransferTimeout
from prfaas.transport.attach import Attach, encode_attach
from prfaas.transport.coding import CODECS
from prfaas.transport.incoming import FrameConsumer, IncomingTransfer
from prfaas.transport.kv_numbers import KvNumbers
from prfaas.transport.messages import CodecName, TransferAccepted
from prfaas.transport.stream import RawStream
from prfaas.transport.warm_streams import WarmStreams
from prfaas.transport.wire import DamagedFrame, Frame, FrameType

MAX_FUTILE_LOSSES = 8
"""Streams lost one after the other without a frame between."""
REDIAL_S = 2.0
"""How long is tried to reach a peer again, at most; a local prefill is faster than much patience."""
FIRST_PAUSE_S = 0.02
TICK_FRACTION = 0.125
"""Of the stall timeout: how often is looked whether something stalls."""
SILENT_FRACTION = 0.5
"""Of the stall timeout: a stream is given up that owes the last pages and is silent this long."""


class Pulled(Protocol):
    """What a transfer's streams must know of the request for it."""

    @property
    def transfer_id(self) -> str:
        """Chosen by the asker."""
        ...

    @property
    def capability(self) -> str:
        """Shown by every stream."""
        ...

    @property
    def codec(self) -> CodecName:
        """How pages may come."""
        ...


class Pulling:
    """One transfer, from the first ATTACH to the ACK; `close` ends it in any state."""

    def __init__(
        self,
        *,
        asked: Pulled,
        consumer: FrameConsumer,
        streams: WarmStreams,
        dial: Callable[[], Awaitable[RawStream]],
        stall_timeout_s: float,
        numbers: KvNumbers,
    ) -> None:
        self._asked = asked
        self._streams = streams
        self._dial = dial
        self._stall_timeout_s = stall_timeout_s
        self._numbers = numbers
        self._incoming = IncomingTransfer(consumer)
        self._carriers: dict[RawStream, int] = {}
        """Streams that carry the transfer, with their numbers."""
        self._failure: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._heard_s = self._loop.time()
        self._seen: dict[RawStream, tuple[int, float]] = {}
        """Bytes of each stream when they were last more, and when that was."""
        self._has_heard = False
        """A frame was verified since the last look."""
        self._num_futile = 0
        self._num_lost = 0
        self._ticker: asyncio.TimerHandle | None = None

    @property
    def is_finished(self) -> bool:
        """Everything has come and is verified."""
        return self._incoming.is_finished

    @property
    def num_streams_lost(self) -> int:
        """Streams that broke and were replaced, so far."""
        return self._num_lost

    # ------------------------------------------------------------ streams

    def attach_warm(self) -> None:
        """Attach as many open streams as there are; costs no round trip."""
        for stream in self._streams.take(self._streams.num_idle):
            self._attach(stream)

    async def begin(self, accepted: TransferAccepted) -> None:
        """Let frames in: the peer has taken the request. Without a stream, one is opened first."""
        self._incoming.consumer.accepted(accepted)
        self._heard_s = self._loop.time()
        self._tick()
        if not self._carriers and not self._incoming.has_losses:
            self._attach(await self._dial())
        for stream in tuple(self._carriers):
            stream.begin()

    def _attach(self, stream: RawStream) -> None:
        number = self._incoming.new_stream()
        self._carriers[stream] = number
        asked = self._asked
        attach = Attach(
            transfer_id=asked.transfer_id,
            capability=asked.capability,
            stream=number,
            resumes=self._incoming.tell_losses(number),
        )
        stream.attach(
            attach,
            self,
            self._incoming.consumer.resolve,
            codecs=CODECS[asked.codec],
            numbers=self._numbers,
        )

    def _attach_again(self, stream: RawStream) -> None:
        number = self._carriers[stream]
        asked = self._asked
        attach = Attach(
            transfer_id=asked.transfer_id,
            capability=asked.capability,
            stream=number,
            resumes=self._incoming.tell_losses(number),
        )
        stream.say(FrameType.ATTACH, encode_attach(attach))

    async def _recover(self) -> None:
        """Tell the peer what was lost: over a spare stream, one that still works, or a new one."""
        deadline_s = self._heard_s + min(self._stall_timeout_s, REDIAL_S)
        pause_s = FIRST_PAUSE_S
        while self._incoming.has_losses and self._failure is None:
            if self._num_futile > MAX_FUTILE_LOSSES:
                raise TransferError(f"{self._num_futile} streams broke and nothing came over them")
            if spare := self._streams.take(1):
                self._attach(spare[0])
                spare[0].begin()
            elif self._carriers:
                self._attach_again(next(iter(self._carriers)))
            else:
                await self._redial(deadline_s, pause_s)
                pause_s *= 2

    async def _redial(self, deadline_s: float, pause_s: float) -> None:
        try:
            stream = await self._dial()
        except TransferError as error:
            is_gone = isinstance(error.__cause__, ConnectionRefusedError)
            if is_gone or self._loop.time() + pause_s > deadline_s:
                raise
            await asyncio.sleep(pause_s)
            return
        self._attach(stream)
        stream.begin()

    # ------------------------------------------------------------ what streams say

    def take(self, stream: RawStream, frame: Frame) -> None:
        """See FrameTaker."""
        number = self._carriers.get(stream)
        if number is None:  # its transfer is done: only its end is waited for
            if frame.header.type in (FrameType.END, FrameType.ERROR):
                self._streams.settled(stream)
            return
        self._num_futile = 0
        self._has_heard = True
        self._news.set()
        if self._failure is None:
            try:
                self._incoming.take(number, frame)
            except Exception as error:  # noqa: BLE001  # raised again where the transfer is run
                self._failure = error

    def broken(self, stream: RawStream, error: Exception) -> None:
        """See FrameTaker."""
        number = self._carriers.pop(stream, None)
        if number is None:
            self._streams.settled(stream)
            return
        self._seen.pop(stream, None)
        self._news.set()
        if self._incoming.is_over(number):
            return  # all that it had to bring is here
        self._incoming.lose(number)
        self._num_lost += 1
        self._num_futile += 1
        if isinstance(error, ProtocolError) and not isinstance(error, DamagedFrame):
            self._failure = self._failure or error  # it would come again

    # ------------------------------------------------------------ whoever runs it

    async def step(self) -> None:
        """Return when frames have come or time has passed; look at `is_finished` then.

        Raises what ended the transfer: TransferTimeout if nothing was verified for the stall timeout,
        ProtocolError for what does not fit, TransferError for what the peer said or no way to it.
        """
        await self._news.wait()
        self._news.clear()
        if self._failure is not None:
            raise self._failure
        if self._incoming.has_losses:
            await self._recover()
        self._judge_silence()

    def _judge_silence(self) -> None:
        now_s = self._loop.time()
        if self._has_heard:
            self._has_heard, self._heard_s = False, now_s
        for stream in tuple(self._carriers):
            num_bytes, since_s = self._seen.get(stream, (-1, now_s))
            if stream.num_bytes > num_bytes:
                self._seen[stream] = (stream.num_bytes, now_s)
            elif (
                self._incoming.is_ending
                and not self._incoming.is_over(self._carriers[stream])
                and now_s - since_s > SILENT_FRACTION * self._stall_timeout_s
            ):
                stream.close()
                self.broken(stream, TransferTimeout("silent while pages were missing"))
        if now_s - self._heard_s > self._stall_timeout_s and not self.is_finished:
            raise TransferTimeout(
                f"{self._incoming.num_page_bytes} bytes so far, nothing for {self._stall_timeout_s} s"
            )

    def _tick(self) -> None:
        self._news.set()
        self._ticker = self._loop.call_later(TICK_FRACTION * self._stall_timeout_s, self._tick)

    def acknowledge(self) -> bool:
        """Tell the peer that everything is verified; False if no stream of the transfer works any more.

        Over all that have ended, as the word may be damaged on its way.
        """
        has_said = [stream.say(FrameType.ACK) for stream in self._ended()]
        return any(has_said)

    def _ended(self) -> list[RawStream]:
        return [s for s, number in self._carriers.items() if self._incoming.is_over(number)]

    def close(self) -> None:
        """Give back streams that can be used again, close the others. Idempotent."""
        if self._ticker is not None:
            self._ticker.cancel()
        ended = self._ended()
        for stream in tuple(self._carriers):
            del self._carriers[stream]
            if stream in ended:
                stream.detach()
                self._streams.put(stream)
            elif self.is_finished:
                self._streams.settle(stream)
            else:
                stream.close()
        self._seen.clear()
