"""The receiving end of a raw stream: idle, or carrying one transfer after the other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from prfaas.errors import ProtocolError, TransferError
from prfaas.transport.attach import Attach, encode_attach
from prfaas.transport.coding import PageDecoder
from prfaas.transport.decoder import FrameDecoder
from prfaas.transport.kv_numbers import KvNumbers
from prfaas.transport.seals import CHECKSUM, FrameSeal
from prfaas.transport.wire import (
    FROM_SENDER,
    Codec,
    Frame,
    FrameType,
    Resolve,
    encode_frame,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prfaas.transport.ports import StreamPort


class FrameTaker(Protocol):
    """Who takes what a stream brings, until `detach`."""

    def take(self, stream: RawStream, frame: Frame) -> None:
        """Take a verified frame; must not raise."""
        ...

    def broken(self, stream: RawStream, error: Exception) -> None:
        """Take note that the stream brings nothing more: a TransferError, or what the port raised."""
        ...


class RawStream:
    """One connection to a peer. While idle it watches for its own end.

    `on_closed` is called once, when it can carry nothing more; not by `close`.
    """

    def __init__(
        self,
        port: StreamPort,
        rest: bytes = b"",
        *,
        peer_seal: FrameSeal = CHECKSUM,
        our_seal: FrameSeal = CHECKSUM,
    ) -> None:
        self.port = port
        self.on_closed: Callable[[RawStream], None] = lambda stream: None
        self.is_open = True
        self.num_bytes = 0
        """Received in all."""
        self._peer_seal = peer_seal
        self._our_seal = our_seal
        self._taker: FrameTaker | None = None
        self._decoder: FrameDecoder | None = None
        self._pages: PageDecoder | None = None
        self._is_decoding = False
        self._nothing = (memoryview(bytearray(1)),)
        if rest:
            self._break(ProtocolError("the peer sent frames before any transfer was attached"))
        else:
            port.start(self)

    # ------------------------------------------------------------ what the transfer asks

    def attach(
        self,
        attach: Attach,
        taker: FrameTaker,
        resolve: Resolve,
        *,
        codecs: frozenset[Codec] = frozenset({Codec.RAW}),
        numbers: KvNumbers | None = None,
    ) -> None:
        """Ask the peer to send a transfer over this stream; frames wait for `begin`.

        A stream that breaks by this says so to the taker.
        """
        self._taker = taker
        self._decoder = FrameDecoder(
            allowed=FROM_SENDER, resolve=resolve, seal=self._peer_seal, codecs=codecs
        )
        self._pages = PageDecoder(numbers or KvNumbers())
        self.port.pause()
        self.say(FrameType.ATTACH, encode_attach(attach))

    def begin(self) -> None:
        """Give the frames to the taker from now on."""
        if self.is_open:
            self.port.resume()

    def say(self, frame_type: FrameType, payload: bytes = b"") -> bool:
        """Send ATTACH or ACK; False if the stream broke by it, or before."""
        if not self.is_open:
            return False
        frame = encode_frame(frame_type, payload, self._our_seal)
        try:
            if self.port.send_now([frame]) == len(frame):
                return True
            error: Exception = TransferError("the peer does not read what we send")
        except OSError as failure:
            error = failure
        self._break(error)
        return False

    def refuse_pages(self) -> None:
        """Bring no page any more: the transfer is done, and its pages may be somebody else's soon.

        A stream that is in the middle of one is closed.
        """
        if self._decoder is not None and (not self._decoder.refuse_pages() or self._is_decoding):
            self.close()

    def detach(self) -> None:
        """Become idle: the transfer's last frame has come."""
        self._taker = self._decoder = None
        if self._pages is not None:
            self._pages.close()
            self._pages = None
        self.port.resume()

    def close(self) -> None:
        """Close the connection; nobody is told. Idempotent."""
        self.is_open = False
        self._taker = self._decoder = None
        self.port.close()
        if self._pages is not None:
            self._pages.close()
            self._pages = None

    def _break(self, error: Exception) -> None:
        if self.is_open:
            taker = self._taker
            self.close()
            self.on_closed(self)
            if taker is not None:
                taker.broken(self, error)

    # ------------------------------------------------------------ what the port says

    def buffer(self) -> memoryview:
        """See ByteSink."""
        return self.buffers()[0]

    def buffers(self) -> Sequence[memoryview]:
        """See ByteSink."""
        return self._nothing if self._decoder is None else self._decoder.buffers()

    def received(self, num_bytes: int) -> None:
        """See ByteSink."""
        self.num_bytes += num_bytes
        if self._decoder is None:
            self._break(ProtocolError("the peer sent something over an idle stream"))
            return
        try:
            frame = self._decoder.received(num_bytes)
            if frame is not None:
                if frame.target is None:
                    self._give(frame)
                else:
                    self._decode(frame)
        except ProtocolError as error:
            self._break(error)

    def ended(self, error: Exception | None) -> None:
        """See ByteSink."""
        self._break(error or TransferError("the peer closed the stream"))

    def _give(self, frame: Frame) -> None:
        if self._taker is not None:
            self._taker.take(self, frame)

    def _decode(self, frame: Frame) -> None:
        """Put an encoded page where it belongs; the stream waits for it, others do not."""
        assert self._pages is not None, "no transfer"
        decoded = self._pages.decode(frame)
        if not isinstance(decoded, asyncio.Future):
            self._place(frame, decoded)
            return
        self.port.pause()
        taker = self._taker
        self._is_decoding = True

        def place(done: asyncio.Future[bytes | memoryview]) -> None:
            self._is_decoding = False
            if done.cancelled():
                return
            error = done.exception()
            if self._taker is not taker or not self.is_open:
                return  # the page may belong to somebody else by now
            if isinstance(error, Exception):
                self._break(error)
                return
            self._place(frame, done.result())
            if self.is_open:
                self.port.resume()

        decoded.add_done_callback(place)

    def _place(self, frame: Frame, data: bytes | memoryview) -> None:
        assert frame.target is not None, "not encoded"
        frame.target[:] = data
        self._give(frame)
