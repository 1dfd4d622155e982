"""The format of the KV channel's frames; decoder.py turns bytes into them. No I/O happens here.

A frame is a little-endian header, a tag and `length` bytes of payload:

    type u8 | codec u8 | group u16 | index u16 | zero u16 | block u32 | num_tokens u32 |
    length u32 | header_check u32 | tag

`header_check` is the low half of xxh3-64 over the 20 bytes before it, so that a damaged header is
found before a single byte of its payload lands anywhere. The tag is what the stream's seal makes of
the same 20 bytes and the payload: a checksum of 8 bytes, or a MAC of 16 (see seals).

A PAGE is one page. PAGES are a run of raw ones: `index` says how many, and before them the payload has
a table with its own check, again before any byte of a page lands:

    (group u16 | index u16 | block u32 | num_tokens u32 | length u32) of each | table_check u32

What one frame costs Python, each end pays once for all pages of a run.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import xxhash

from prfaas.errors import ProtocolError
from prfaas.transport.seals import CHECKSUM, CHECKSUM_BYTES, FrameSeal

UNTAGGED_BYTES = 24
HEADER_BYTES = UNTAGGED_BYTES + CHECKSUM_BYTES
"""Of a header and its tag where that is a checksum."""
MAX_RUN_PAGES = 64
MAX_RUN_BYTES = 1 << 20
"""Of the pages of one run; a larger page goes alone."""

_FIELDS = struct.Struct("<BBHHHIII")
FIELDS_BYTES = _FIELDS.size
"""Of a header, without its check."""
_CHECK = struct.Struct("<I")
_SPAN = struct.Struct("<HHIII")
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
    PAGES = 9


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
    FrameType.PAGES: MAX_RUN_PAGES * _SPAN.size + _CHECK.size + MAX_RUN_BYTES,
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
    """Of the page among those of its block; of PAGES, how many."""
    block: int = 0
    num_tokens: int = 0
    """Of the block, up to where the page is exact: block_tokens, or fewer for the last one."""
    length: int = 0


@dataclass(slots=True)
class Frame:
    """One verified frame. The payload of a PAGE is not here: it lies in its page, that of PAGES in theirs.

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
    pages: Sequence["Frame"] = ()
    """Of PAGES: each as a PAGE of its own, without a tag."""


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
    """Return what goes before `payload`: header and tag; `header.length` is taken from the payload."""
    fields = _fields(header, len(payload))
    digest = seal.begin(fields)
    digest.update(payload)
    return fields + _CHECK.pack(_check(fields)) + digest.finish()


class PageSpan(Protocol):
    """What a header says of a page, and a place of one: see FrameHeader."""

    @property
    def group(self) -> int: ...  # noqa: D102

    @property
    def index(self) -> int: ...  # noqa: D102

    @property
    def block(self) -> int: ...  # noqa: D102

    @property
    def num_tokens(self) -> int: ...  # noqa: D102


def encode_run(
    pages: Sequence[PageSpan], payloads: Sequence[memoryview], seal: FrameSeal = CHECKSUM
) -> bytes:
    """Return what goes before the payloads of so many raw pages: header, tag and table of a PAGES frame.

    Each page's length is taken from its payload.
    """
    num_bytes = sum(map(len, payloads))
    if not 0 < len(pages) <= MAX_RUN_PAGES or num_bytes > MAX_RUN_BYTES:
        raise ValueError(f"a run of {len(pages)} pages of {num_bytes} bytes")
    spans = b"".join(
        [
            _SPAN.pack(page.group, page.index, page.block, page.num_tokens, len(payload))
            for page, payload in zip(pages, payloads, strict=True)
        ]
    )
    table = spans + _CHECK.pack(_check(spans))
    fields = _fields(FrameHeader(FrameType.PAGES, index=len(pages)), len(table) + num_bytes)
    digest = seal.begin(fields)
    digest.update(table)
    for payload in payloads:
        digest.update(payload)
    return fields + _CHECK.pack(_check(fields)) + digest.finish() + table


def decode_fields(head: bytes | bytearray) -> FrameHeader:
    """Return the header whose fields and check are at the start of `head`.

    Raises DamagedFrame if its check does not fit, ProtocolError for a type or codec that there is not.
    """
    (check,) = _CHECK.unpack_from(head, _FIELDS.size)
    if check != _check(bytes(head[: _FIELDS.size])):
        raise DamagedFrame("header checksum mismatch")
    kind, codec, group, index, zero, block, num_tokens, length = _FIELDS.unpack_from(head)
    if zero:
        raise ProtocolError("reserved header bits are set")
    try:
        return FrameHeader(FrameType(kind), Codec(codec), group, index, block, num_tokens, length)
    except ValueError as error:
        raise ProtocolError(f"frame of unknown type {kind} or codec {codec}") from error


def table_bytes(header: FrameHeader) -> int:
    """Return how long the table of a PAGES frame is; ProtocolError if that is out of bounds."""
    num_bytes = header.index * _SPAN.size + _CHECK.size
    if not 0 < header.index <= MAX_RUN_PAGES or header.length <= num_bytes:
        raise ProtocolError(f"run of {header.index} pages in {header.length} bytes")
    return num_bytes


def decode_table(table: bytearray, header: FrameHeader) -> list[FrameHeader]:
    """Return what the table of a PAGES frame says of each page; none comes twice, none is empty.

    Raises DamagedFrame if its check does not fit, ProtocolError if its pages do not.
    """
    packed = memoryview(table)[: -_CHECK.size]
    (check,) = _CHECK.unpack_from(table, len(packed))
    if check != _check(packed):
        raise DamagedFrame("checksum mismatch in the table of a run")
    spans = list(_SPAN.iter_unpack(packed))
    num_bytes = sum([span[4] for span in spans])
    if num_bytes != header.length - len(table) or num_bytes > MAX_RUN_BYTES:
        raise ProtocolError(f"run of {num_bytes} bytes in a frame of {header.length}")
    if not all([span[3] and span[4] for span in spans]):  # noqa: C419  # half the time
        raise ProtocolError("empty page in a run")
    if len({span[:3] for span in spans}) < len(spans):
        raise ProtocolError("a run brings a page twice")
    return [FrameHeader(FrameType.PAGE, Codec.RAW, *span) for span in spans]


def tag_number(header: bytes) -> int:
    """Return the first 8 bytes of the tag in an encoded header, as `Frame.tag` has them."""
    return int.from_bytes(header[UNTAGGED_BYTES : UNTAGGED_BYTES + 8], "little")


def _fields(header: FrameHeader, length: int) -> bytes:
    return _FIELDS.pack(
        header.type,
        header.codec,
        header.group,
        header.index,
        0,
        header.block,
        header.num_tokens,
        length,
    )


def _check(fields: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(fields) & 0xFFFFFFFF


def encode_frame(frame_type: FrameType, payload: bytes = b"", seal: FrameSeal = CHECKSUM) -> bytes:
    """Return a whole frame of any type but PAGE and PAGES."""
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
