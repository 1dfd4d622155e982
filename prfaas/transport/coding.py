"""Codecs beside the event loop: a thread for each stream that encodes or decodes, made when first needed.

What a thread works on is its own copy: a page may be let go while it works.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from prfaas.transport.codec import decode_page, encode_page
from prfaas.transport.codec_choice import CodecChoice
from prfaas.transport.messages import CodecName
from prfaas.transport.wire import Codec, Frame

INLINE_BYTES = 32 << 10
"""Up to here a thread costs more than it spares the loop."""


class _CodecThread:
    """Ends its thread when it is left, after the page in hand: a few ms at most."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _thread(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="prfaas-codec")
        return self._executor


class PageEncoder(_CodecThread):
    """Encodes what one stream sends, as its receiver asked for."""

    def __init__(self, name: CodecName, item_bytes: int) -> None:
        super().__init__()
        self._name = name
        self._item_bytes = item_bytes
        self._choice = CodecChoice(Codec.ZSTD)

    def sent(self, num_bytes: int, seconds: float) -> None:
        """Take note of how long the link took for a page."""
        self._choice.sent(num_bytes=num_bytes, seconds=seconds)

    async def encode(self, page: memoryview) -> tuple[Codec, memoryview | bytes]:
        """Return how the page goes out; one that does not shrink goes as it is."""
        codec = Codec.RAW
        if self._name != "raw":
            codec = Codec.ZSTD if self._name == "zstd" else self._choice.choose()
        if codec is Codec.RAW:
            return codec, page
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        if len(page) <= INLINE_BYTES:
            encoded = encode_page(codec, page, self._item_bytes)
        else:
            encoded = await loop.run_in_executor(
                self._thread(), encode_page, codec, bytes(page), self._item_bytes
            )
        self._choice.encoded(
            num_bytes=len(page), num_encoded_bytes=len(encoded), seconds=loop.time() - started_s
        )
        return (codec, encoded) if len(encoded) < len(page) else (Codec.RAW, page)


class PageDecoder(_CodecThread):
    """Puts what one stream received encoded into its pages."""

    def __init__(self, item_bytes: int) -> None:
        super().__init__()
        self._item_bytes = item_bytes

    async def place(self, frame: Frame) -> None:
        """Put an encoded page where it belongs; ProtocolError, and nothing put, if it is damaged."""
        target = frame.target
        assert target is not None, "not encoded"
        arguments = (frame.header.codec, frame.payload, len(target), self._item_bytes)
        if len(target) <= INLINE_BYTES:
            target[:] = decode_page(*arguments)
            return
        loop = asyncio.get_running_loop()
        target[:] = await loop.run_in_executor(self._thread(), decode_page, *arguments)
