"""Finds frames of the KV channel, or TLS records, in the bytes that pass a relay."""

from collections.abc import Iterator
from dataclasses import dataclass

from prfaas.transport.wire import UNTAGGED_BYTES, FrameType

TLS_HEADER_BYTES = 5
TLS_DATA = 23
"""Type of the records that carry application data."""
_LENGTH_AT = UNTAGGED_BYTES - 8


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one frame, as far as they have come."""

    data: bytes
    kind: int
    """A FrameType, or the type of a TLS record."""
    number: int
    """Of the frame among those of its kind on this stream and direction, from 0."""
    start: int
    """Of `data` within the frame."""
    header_bytes: int
    frame_bytes: int

    @property
    def end(self) -> int:
        return self.start + len(self.data)


class FrameScanner:
    """Cuts one direction of one stream into parts of frames; a header comes out whole.

    Args:
        tag_bytes: of the frames' tags; None: these are TLS records.
    """

    def __init__(self, tag_bytes: int | None) -> None:
        self.is_tls = tag_bytes is None
        self._header_bytes = TLS_HEADER_BYTES if tag_bytes is None else UNTAGGED_BYTES + tag_bytes
        self._head = b""
        self._counts: dict[int, int] = {}
        self._frame: tuple[int, int, int] | None = None
        """(kind, number, bytes) of the frame whose header has come."""
        self._at = 0

    def feed(self, data: bytes) -> Iterator[Part]:
        """Return the parts that are complete with these bytes."""
        while data:
            if self._frame is None:
                missing = self._header_bytes - len(self._head)
                self._head, data = self._head + data[:missing], data[missing:]
                if len(self._head) < self._header_bytes:
                    return
                data, self._head = self._head + data, b""
                self._begin(data)
            assert self._frame is not None
            kind, number, frame_bytes = self._frame
            piece, data = data[: frame_bytes - self._at], data[frame_bytes - self._at :]
            part = Part(piece, kind, number, self._at, self._header_bytes, frame_bytes)
            self._at += len(piece)
            if self._at == frame_bytes:
                self._frame, self._at = None, 0
            yield part

    def _begin(self, head: bytes) -> None:
        if self.is_tls:
            kind, length = head[0], int.from_bytes(head[3:5], "big")
        else:
            kind, length = head[0], int.from_bytes(head[_LENGTH_AT : _LENGTH_AT + 4], "little")
        number = self._counts.get(kind, 0)
        self._counts[kind] = number + 1
        self._frame = (kind, number, self._header_bytes + length)


@dataclass(frozen=True)
class Spot:
    """A place at or in a frame that is still to come."""

    kind: FrameType | int
    """TLS_DATA where only records are seen."""
    where: str
    """before, in_header, behind_header, in_payload or behind."""
    skip: int = 0
    """How many frames of the kind pass first."""

    def offset(self, header_bytes: int, frame_bytes: int) -> int:
        """Return where in a frame that is."""
        payload_bytes = frame_bytes - header_bytes
        return {
            "before": 0,
            "in_header": header_bytes // 2,
            "behind_header": header_bytes,
            "in_payload": header_bytes + payload_bytes // 2,
            "behind": frame_bytes,
        }[self.where]

    def __str__(self) -> str:
        name = "TLS" if self.kind == TLS_DATA else FrameType(self.kind).name
        return f"{self.where}-{name}"
