"""Turns bytes into verified frames: any bytes give frames or ProtocolError, in bounded memory.

No I/O happens here: a driver asks where the next bytes go (`buffers`), puts them there, says how many
came (`received`) and gets at most one frame. Pages go straight into the pool pages that `resolve`
names, those of a whole run at once.
"""

import hmac
from collections.abc import Sequence

from prfaas.errors import ProtocolError
from prfaas.transport.seals import CHECKSUM, FrameSeal
from prfaas.transport.wire import (
    FIELDS_BYTES,
    MAX_PAYLOAD_BYTES,
    UNTAGGED_BYTES,
    Codec,
    DamagedFrame,
    Frame,
    FrameHeader,
    FrameType,
    Resolve,
    decode_fields,
    decode_table,
    refuse_pages,
    table_bytes,
)

SCRATCH_BYTES = 64 << 10


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
        self._table: bytearray | None = None
        """Of PAGES, while it has not come whole."""
        self._pages: list[Frame] = []
        """Of PAGES, each where its table says, once that is here."""
        self._payload: bytearray | None = None
        """What is received beside its page, or has none."""
        self._target: memoryview | None = None
        """Of an encoded PAGE."""
        self._is_placing = False
        """The bytes of a page go to the place that was named for it."""
        self._parts: list[memoryview] = [memoryview(self._head)]
        """Where the next bytes go, in order; never empty, none of them either."""
        self._num_dropped = 0
        """Bytes of a redelivered PAGE that are still to come behind `_parts`."""

    def buffers(self) -> Sequence[memoryview]:
        """Return where the next bytes go, in order: not one is empty, none past the end of this frame's part."""
        if self._error is not None:
            raise self._error
        return self._parts

    def buffer(self) -> memoryview:
        """Return the first of `buffers`."""
        return self.buffers()[0]

    def received(self, num_bytes: int) -> Frame | None:
        """Take note that `num_bytes` (at least 1) were put into `buffers()`; return a whole frame."""
        if self._error is not None:
            raise self._error
        assert num_bytes > 0
        try:
            return self._advance(num_bytes)
        except ProtocolError as error:
            self._parts = []
            self._error = error
            raise

    def refuse_pages(self) -> bool:
        """Refuse every page from now on; False if one is half here, in the place that was named for it."""
        self._resolve = refuse_pages
        return not self._is_placing

    def ended(self) -> None:
        """Take note of the end of the stream; raise ProtocolError if it cuts a frame."""
        if self._error is not None:
            raise self._error
        if self._header is not None or len(self._parts[0]) < len(self._head):
            raise DamagedFrame("the stream ended inside a frame")

    def _advance(self, num_bytes: int) -> Frame | None:
        if self._header is not None:
            self._fill(num_bytes)
        elif num_bytes < len(self._parts[0]):
            self._parts[0] = self._parts[0][num_bytes:]
            return None
        else:
            assert num_bytes == len(self._parts[0]), "past the end"
            self._header = header = self._parse_header()
            self._parts = []
            self._begin_payload(header)
        if not self._parts and self._num_dropped:
            self._drop()
        if not self._parts and self._table is not None:
            self._begin_pages(self._table)
        return None if self._parts else self._finish()

    def _fill(self, num_bytes: int) -> None:
        """Take in what came while it is in the processor's caches."""
        parts, num_filled = self._parts, 0
        for part in parts:
            if num_bytes < len(part):
                break
            self._digest.update(part)
            num_bytes -= len(part)
            num_filled += 1
        del parts[:num_filled]
        if num_bytes:
            self._digest.update(parts[0][:num_bytes])
            parts[0] = parts[0][num_bytes:]

    def _drop(self) -> None:
        if not self._scratch:
            self._scratch = bytearray(SCRATCH_BYTES)
        num_bytes = min(self._num_dropped, SCRATCH_BYTES)
        self._num_dropped -= num_bytes
        self._parts = [memoryview(self._scratch)[:num_bytes]]

    # ------------------------------------------------------------ headers

    def _parse_header(self) -> FrameHeader:
        fields = bytes(self._head[:FIELDS_BYTES])
        header = decode_fields(self._head)
        self._digest = self._seal.begin(fields)
        self._tag = bytes(self._head[UNTAGGED_BYTES:])
        self._check_header(header)
        return header

    def _check_header(self, header: FrameHeader) -> None:
        if header.type not in self._allowed:
            raise ProtocolError(f"unexpected {header.type.name} frame")
        if header.type is FrameType.PAGE:
            if not header.length or not header.num_tokens:
                raise ProtocolError("empty PAGE frame")
            if header.codec not in self._codecs:
                raise ProtocolError(f"page in codec {header.codec.name}, which was not agreed on")
            return
        limit = MAX_PAYLOAD_BYTES[header.type]
        if header.length > limit:
            raise ProtocolError(
                f"{header.type.name} frame of {header.length} bytes, limit {limit} bytes"
            )
        has_index = header.index and header.type is not FrameType.PAGES
        if header.codec or header.group or has_index or header.block or header.num_tokens:
            raise ProtocolError(f"{header.type.name} frame with a page's span")

    # ------------------------------------------------------------ where its payload goes

    def _begin_payload(self, header: FrameHeader) -> None:
        if header.type is FrameType.PAGES:
            self._table = bytearray(table_bytes(header))
            self._parts = [memoryview(self._table)]
            return
        if header.type is not FrameType.PAGE:
            self._receive_beside(header)
            return
        target = self._resolve(header)
        if target is None:
            self._num_dropped = header.length
        elif header.codec is not Codec.RAW and header.length < target.nbytes:
            self._target = target.cast("B")
            self._is_placing = True
            self._receive_beside(header)
        elif header.codec is not Codec.RAW or target.nbytes != header.length:
            raise ProtocolError(f"page of {header.length} bytes, expected {target.nbytes} bytes")
        else:
            self._is_placing = True
            self._parts = [target.cast("B")]

    def _receive_beside(self, header: FrameHeader) -> None:
        self._payload = bytearray(header.length)
        self._parts = [memoryview(self._payload)] if header.length else []

    def _begin_pages(self, table: bytearray) -> None:
        """Name the places of all pages of a run; those that were redelivered go beside."""
        assert self._header is not None, "no frame"
        self._table = None
        for page in decode_table(table, self._header):
            target = self._resolve(page)
            if target is None:
                self._parts.append(memoryview(bytearray(page.length)))
            elif target.nbytes != page.length:
                raise ProtocolError(f"page of {page.length} bytes, expected {target.nbytes} bytes")
            else:
                self._is_placing = True
                self._parts.append(target if target.format == "B" else target.cast("B"))
            self._pages.append(Frame(page, is_placed=target is not None))

    def _finish(self) -> Frame:
        header = self._header
        assert header is not None, "no frame"
        if not hmac.compare_digest(self._digest.finish(), self._tag):
            raise DamagedFrame(f"{header.type.name} frame checksum or MAC mismatch")
        frame = Frame(
            header,
            payload=b"" if self._payload is None else bytes(self._payload),
            target=self._target,
            is_placed=self._is_placing,
            tag=int.from_bytes(self._tag[:8], "little"),
            pages=self._pages,
        )
        self._header = self._payload = self._target = None
        self._is_placing, self._pages = False, []
        self._parts = [memoryview(self._head)]
        return frame
