"""The frames of the KV channel: any bytes give frames or ProtocolError, in bounded memory.

A frame is a little-endian header, a tag and `length` bytes of payload:

    type u8 | codec u8 | group u16 | index u16 | zero u16 | block u32 | num_tokens u32 |
    length u32 | header_check u32 | tag

`header_check` is the low half of xxh3-64 over the 20 bytes before it, so that a damaged header is
found before a single byte of its payload lands anywhere. The tag is what the stream's seal makes of
the same 20 bytes and the payload: a checksum of 8 bytes, or a MAC of 16 (see seals).

No I/O happens here: a driver asks where the next bytes go (`buffer`), puts them there, says how many
came (`received`) and gets at most one frame. The payload of a PAGE goes straight into the pool page
that `resolve` names.
"""

import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from prfaas.errors import ProtocolError
from prfaas.transport.seals import CHECKSUM, CHECKSUM_BYTES, FrameSeal

UNTAGGED_BYTES = 24
HEADER_BYTES = UNTAGGED_BYTES + CHECKSUM_BYTES
"""Of a header and its tag where that is a checksum."""
SCRATCH_BYTES = 64 << 10

_FIELDS = struct.Struct("<BBHHHIII")
_HEADER_CHECK = struct.Struct("<I")
_PROGRESS = struct.Struct("<QQ")


class FrameType(IntEnum):
    """What a frame carries. ACK and ATTACH go to the sender of the pages, all others to their receiver."""

    PAGE = 1
    FIRST_TOKENS = 2
    LOGITS = 3
    PROGRESS = 4
    END = 5
    ERROR = 6
    ACK = 7
    ATTACH = 8


class Codec(IntEnum):
    """How a payload is encoded."""

    RAW = 0
    ZSTD = 1
    """zstd over shuffled bytes; the only one beside RAW that changes nothing."""
    FP16 = 2
    INT8 = 3
    """8-bit integers, a scale for each row."""
    FP8 = 4
    """E4M3, a scale for each row."""


FROM_RECEIVER = frozenset({FrameType.ACK, FrameType.ATTACH})
FROM_SENDER = frozenset(FrameType) - FROM_RECEIVER

MAX_PAYLOAD_BYTES: dict[FrameType, int] = {
    FrameType.FIRST_TOKENS: 1 << 20,
    FrameType.LOGITS: 8 << 20,
    FrameType.PROGRESS: _PROGRESS.size,
    FrameType.END: 4096,
    FrameType.ERROR: 4096,
    FrameType.ACK: 0,
    FrameType.ATTACH: 64 << 10,
}
"""Bounds that hold before anything is allocated; a PAGE is bounded by its page."""


@dataclass(slots=True)
class FrameHeader:
    """Everything a frame says before its payload; the span fields are zero unless it is a PAGE.

    Not frozen, like Frame: one of each is made for every frame, and freezing triples what that costs.
    """

    type: FrameType
    codec: Codec = Codec.RAW
    group: int = 0
    index: int = 0
    """Of the page among those of its block."""
    block: int = 0
    num_tokens: int = 0
    """Of the block, up to where the page is exact: block_tokens, or fewer for the last one."""
    length: int = 0


@dataclass(slots=True)
class Frame:
    """One verified frame. The payload of a PAGE is not here: it lies in its page.

    Unless it is encoded: then it is here, and `target` is where the driver must put what it decodes to.
    """

    header: FrameHeader
    payload: bytes = b""
    target: memoryview | None = None
    is_placed: bool = False
    """The payload of this PAGE was put where `resolve` said, or is to be put into `target`; False: it
    was redelivered, dropped."""
    tag: int = 0
    """The first 8 bytes of the checksum or MAC that it came with."""


class DamagedFrame(ProtocolError):
    """Bytes that were changed on the way, by accident or not: the stream is lost, what it brought is not."""


Resolve = Callable[[FrameHeader], memoryview | None]
"""Where a PAGE goes, as a writable view of all of its bytes, or None to drop a redelivery.

Raises ProtocolError for a page that nobody asked for.
"""


def refuse_pages(header: FrameHeader) -> memoryview | None:
    """Refuse every page: the `resolve` of a side that only sends them."""
    raise ProtocolError(f"page of group {header.group} block {header.block} was not asked for")


def encode_header(
    header: FrameHeader, payload: bytes | memoryview = b"", seal: FrameSeal = CHECKSUM
) -> bytes:
    """Return what goes before `payload`; `header.length` is taken from the payload."""
    fields = _FIELDS.pack(
        header.type,
        header.codec,
        header.group,
        header.index,
        0,
        header.block,
        header.num_tokens,
        len(payload),
    )
    digest = seal.begin(fields)
    digest.update(payload)
    return fields + _HEADER_CHECK.pack(_header_check(fields)) + digest.finish()


def tag_number(header: bytes) -> int:
    """Return the first 8 bytes of the tag in an encoded header, as `Frame.tag` has them."""
    return int.from_bytes(header[UNTAGGED_BYTES : UNTAGGED_BYTES + 8], "little")


def _header_check(fields: bytes) -> int:
    return xxhash.xxh3_64_intdigest(fields) & 0xFFFFFFFF


def encode_frame(frame_type: FrameType, payload: bytes = b"", seal: FrameSeal = CHECKSUM) -> bytes:
    """Return a whole frame of any type but PAGE."""
    return encode_header(FrameHeader(type=frame_type), payload, seal) + payload


def encode_progress(tokens_done: int, tokens_ahead: int) -> bytes:
    """Return the payload of PROGRESS: prompt tokens computed, and tokens queued before this prompt."""
    return _PROGRESS.pack(tokens_done, tokens_ahead)


def decode_progress(payload: bytes) -> tuple[int, int]:
    """Return (tokens done, tokens ahead) of a PROGRESS payload, or raise ProtocolError."""
    if len(payload) != _PROGRESS.size:
        raise ProtocolError(f"progress of {len(payload)} bytes, expected {_PROGRESS.size}")
    tokens_done, tokens_ahead = _PROGRESS.unpack(payload)
    return tokens_done, tokens_ahead


class FrameDecoder:
    """Turns bytes into verified frames, one at a time, without a copy of any page.

    After a ProtocolError the decoder is closed: the position of the next frame is unknown.
    """

    def __init__(
        self,
        *,
        allowed: frozenset[FrameType],
        resolve: Resolve,
        seal: FrameSeal = CHECKSUM,
        codecs: frozenset[Codec] = frozenset({Codec.RAW}),
    ) -> None:
        self._allowed = allowed
        self._codecs = codecs
        self._resolve = resolve
        self._seal = seal
        self._head = bytearray(UNTAGGED_BYTES + seal.tag_bytes)
        self._scratch = bytearray()
        self._error: ProtocolError | None = None
        self._header: FrameHeader | None = None
        self._target: memoryview | None = None
        self._page: memoryview | None = None
        """Of an encoded PAGE, which is received beside it."""
        self._filled = 0

    def buffer(self) -> memoryview:
        """Return where the next bytes go: never empty, never past the end of this frame's part."""
        if self._error is not None:
            raise self._error
        if self._header is None:
            return memoryview(self._head)[self._filled :]
        if self._target is not None:
            return self._target[self._filled :]
        return memoryview(self._scratch)[: self._header.length - self._filled]

    def received(self, num_bytes: int) -> Frame | None:
        """Take note that `num_bytes` (at least 1) were put into `buffer()`; return a whole frame."""
        if self._error is not None:
            raise self._error
        assert 0 < num_bytes <= len(self.buffer())
        try:
            return self._advance(num_bytes)
        except ProtocolError as error:
            self._target = None
            self._error = error
            raise

    def refuse_pages(self) -> bool:
        """Refuse every page from now on; False if one is half here, in the place that was named for it."""
        self._resolve = refuse_pages
        header = self._header
        return header is None or header.type is not FrameType.PAGE or self._target is None

    def ended(self) -> None:
        """Take note of the end of the stream; raise ProtocolError if it cuts a frame."""
        if self._error is not None:
            raise self._error
        if self._header is not None or self._filled:
            raise DamagedFrame("the stream ended inside a frame")

    def _await_header(self) -> None:
        self._header = None
        self._target = None
        self._page = None
        self._filled = 0

    def _advance(self, num_bytes: int) -> Frame | None:
        header = self._header
        if header is None:
            self._filled += num_bytes
            if self._filled < len(self._head):
                return None
            header = self._parse_header()
            self._begin_payload(header)
        else:
            if self._target is None:
                self._digest.update(memoryview(self._scratch)[:num_bytes])
            self._filled += num_bytes
        if self._filled < header.length:
            return None
        return self._finish(header)

    def _parse_header(self) -> FrameHeader:
        fields = bytes(self._head[: _FIELDS.size])
        (header_check,) = _HEADER_CHECK.unpack_from(self._head, _FIELDS.size)
        if header_check != _header_check(fields):
            raise DamagedFrame("header checksum mismatch")
        self._digest = self._seal.begin(fields)
        self._tag = bytes(self._head[UNTAGGED_BYTES:])
        kind, codec, group, index, zero, block, num_tokens, length = _FIELDS.unpack(fields)
        try:
            header = FrameHeader(
                type=FrameType(kind),
                codec=Codec(codec),
                group=group,
                index=index,
                block=block,
                num_tokens=num_tokens,
                length=length,
            )
        except ValueError as error:
            raise ProtocolError(f"frame of unknown type {kind} or codec {codec}") from error
        self._check_header(header, zero)
        return header

    def _check_header(self, header: FrameHeader, zero: int) -> None:
        if header.type not in self._allowed:
            raise ProtocolError(f"unexpected {header.type.name} frame")
        if zero:
            raise ProtocolError("reserved header bits are set")
        if header.type is FrameType.PAGE:
            if not header.length or not header.num_tokens:
                raise ProtocolError("empty PAGE frame")
            if header.codec not in self._codecs:
                raise ProtocolError(f"page in codec {header.codec.name}, which was not agreed on")
            return
        if header.codec or header.group or header.index or header.block or header.num_tokens:
            raise ProtocolError(f"{header.type.name} frame with a page's span")
        limit = MAX_PAYLOAD_BYTES[header.type]
        if header.length > limit:
            raise ProtocolError(
                f"{header.type.name} frame of {header.length} bytes, limit {limit} bytes"
            )

    def _begin_payload(self, header: FrameHeader) -> None:
        self._filled = 0
        self._header = header
        if header.type is not FrameType.PAGE:
            self._target = memoryview(bytearray(header.length))
            return
        target = self._resolve(header)
        if target is None:
            if not self._scratch:
                self._scratch = bytearray(SCRATCH_BYTES)
            return
        if header.codec is not Codec.RAW and header.length < target.nbytes:
            self._page = target.cast("B")
            self._target = memoryview(bytearray(header.length))
            return
        if header.codec is not Codec.RAW or target.nbytes != header.length:
            raise ProtocolError(f"page of {header.length} bytes, expected {target.nbytes} bytes")
        self._target = target.cast("B")

    def _finish(self, header: FrameHeader) -> Frame:
        target = self._target
        if target is not None:
            self._digest.update(target)
        if not hmac.compare_digest(self._digest.finish(), self._tag):
            raise DamagedFrame(f"{header.type.name} frame checksum or MAC mismatch")
        is_page = header.type is FrameType.PAGE
        page = self._page
        is_here = target is not None and (page is not None or not is_page)
        payload = bytes(target) if is_here and target is not None else b""
        self._await_header()
        return Frame(
            header=header,
            payload=payload,
            target=page,
            is_placed=is_page and target is not None,
            tag=int.from_bytes(self._tag[:8], "little"),
        )
