"""What goes with each frame to show that it is whole: a checksum, or a MAC that also says whose it is.

A checksum is xxh3-64 and detects accidents only; on a stream it covers the frame's number, too, so that
a frame that comes twice, or not, is one. A MAC is HMAC-SHA256, cut to 16 bytes, over the
frame's number within its stream and direction, its header and its payload: a frame that was changed,
repeated, left out, moved or sent back does not verify. Its key is of one transfer and one direction.
"""

from typing import Protocol

import xxhash

from prfaas.transport.cluster_key import ClusterKey

CHECKSUM_BYTES = 8
MAC_BYTES = 16


class FrameDigest(Protocol):
    """Takes in one frame's bytes, in order."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Take in the next bytes."""
        ...

    def finish(self) -> bytes:
        """Return the tag of all bytes taken in."""
        ...


class FrameSeal(Protocol):
    """Makes the tags of one direction of one stream, for its sender and its receiver alike."""

    tag_bytes: int

    def begin(self, fields: bytes) -> FrameDigest:
        """Return the digest of the stream's next frame, whose header is `fields`."""
        ...


class _ChecksumDigest:
    def __init__(self, fields: bytes, number: int) -> None:
        self._digest = xxhash.xxh3_64(fields, number)
        self.update = self._digest.update

    def finish(self) -> bytes:
        return self._digest.intdigest().to_bytes(CHECKSUM_BYTES, "little")


class ChecksumSeal:
    """Tags are checksums of frames that stand alone; keeps no state."""

    tag_bytes = CHECKSUM_BYTES

    def begin(self, fields: bytes) -> FrameDigest:
        """Return a digest that has taken in `fields`."""
        return _ChecksumDigest(fields, 0)


CHECKSUM = ChecksumSeal()


class NumberedChecksumSeal:
    """Tags are checksums; counts the frames, and a frame's number is the seed of its checksum."""

    tag_bytes = CHECKSUM_BYTES

    def __init__(self) -> None:
        self._num_frames = 0

    def begin(self, fields: bytes) -> FrameDigest:
        """Return the digest of the next frame."""
        digest = _ChecksumDigest(fields, self._num_frames)
        self._num_frames += 1
        return digest


class _MacDigest:
    def __init__(self, key: ClusterKey, number: int, fields: bytes) -> None:
        self._digest = key.hasher()
        self._digest.update(number.to_bytes(8, "little"))
        self._digest.update(fields)
        self.update = self._digest.update

    def finish(self) -> bytes:
        return self._digest.digest()[:MAC_BYTES]


class MacSeal:
    """Tags are MACs; counts the frames."""

    tag_bytes = MAC_BYTES

    def __init__(self, key: ClusterKey) -> None:
        self._key = key
        self._num_frames = 0

    def begin(self, fields: bytes) -> FrameDigest:
        """Return the digest of the next frame; its fields are of fixed length."""
        digest = _MacDigest(self._key, self._num_frames, fields)
        self._num_frames += 1
        return digest
