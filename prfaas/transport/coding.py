"""Codecs beside the event loop: a thread for each stream that encodes or decodes, made when first needed.

What a thread works on is its own copy: a page may be let go while it works.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from prfaas.transport.codec import LOSSLESS, decode_page, encode_page
from prfaas.transport.codec_choice import CodecChoice
from prfaas.transport.kv_numbers import KvNumbers
from prfaas.transport.messages import CodecName
from prfaas.transport.wire import Codec, Frame

CODECS: dict[CodecName, frozenset[Codec]] = {
    "raw": frozenset({Codec.RAW}),
    "zstd": LOSSLESS,
    "auto": LOSSLESS,
    "fp16": LOSSLESS | {Codec.FP16},
    "int8": LOSSLESS | {Codec.INT8},
    "fp8": LOSSLESS | {Codec.FP8},
    "auto-lossy": LOSSLESS | {Codec.INT8},
}
"""What may cross the link where each was asked for."""


def may_lose(name: CodecName) -> bool:
    """Return whether pages may arrive a little different where this was asked for."""
    return not CODECS[name] <= LOSSLESS


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

    def __init__(self, name: CodecName, numbers: KvNumbers) -> None:
        super().__init__()
        self._numbers = numbers
        self._choice = CodecChoice(name)

    def sent(self, num_bytes: int, seconds: float) -> None:
        """Take note of how long the link took for a page."""
        self._choice.sent(num_bytes=num_bytes, seconds=seconds)

    @property
    def is_raw(self) -> bool:
        """Pages of every group go out as they are now."""
        return self._choice.is_raw

    def passed_over(self, num_pages: int) -> None:
        """Take note that so many pages went out as they are and were not given to `encode`."""
        self._choice.passed_over(num_pages)

    async def encode(self, page: memoryview, group: int) -> tuple[Codec, memoryview | bytes]:
        """Return how a page of a group goes out; one that does not shrink goes as it is."""
        numbers = self._numbers.of(group)
        codec = self._choice.choose(may_lose=numbers.row_items is not None)
        if codec is Codec.RAW:
            return codec, page
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        if len(page) <= INLINE_BYTES:
            used, encoded = encode_page(codec, page, numbers)
        else:
            used, encoded = await loop.run_in_executor(
                self._thread(), encode_page, codec, bytes(page), numbers
            )
        self._choice.encoded(
            codec,
            num_bytes=len(page),
            num_encoded_bytes=len(encoded),
            seconds=loop.time() - started_s,
        )
        return used, encoded if used is not Codec.RAW else page


class PageDecoder(_CodecThread):
    """Puts what one stream received encoded into its pages."""

    def __init__(self, numbers: KvNumbers) -> None:
        super().__init__()
        self._numbers = numbers

    def decode(self, frame: Frame) -> bytes | memoryview | asyncio.Future[bytes | memoryview]:
        """Return what goes into an encoded page, or a future of it where the page is large.

        Raises ProtocolError, at once or from the future, if it is damaged.
        """
        assert frame.target is not None, "not encoded"
        num_bytes = len(frame.target)
        numbers = self._numbers.of(frame.header.group)
        arguments = (frame.header.codec, frame.payload, num_bytes, numbers)
        if num_bytes <= INLINE_BYTES:
            return decode_page(*arguments)
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._thread(), decode_page, *arguments)
