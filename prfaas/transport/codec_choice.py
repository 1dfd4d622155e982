"""Which pages are worth encoding: pure, told what encoding and sending took.

A link that takes pages as fast as they come pushes back on nobody, and nothing is encoded. One that
does makes sending take time; once a page's time on the link is longer than encoding it and sending
what is left, pages are encoded. Both costs are running means, so the choice follows the link.
"""

from prfaas.transport.wire import Codec

WEIGHT = 0.1
"""Of the newest page in a running mean."""
UNTRIED_ENCODE_S_PER_BYTE = 1 / 200e6
UNTRIED_RATIO = 0.85
MARGIN = 1.03
"""Encoding must promise more than this much, so that noise alone does not start it."""
RETRY_PAGES = 256
"""After so many pages sent as they are, what was learned of encoding is half forgotten."""


class CodecChoice:
    """Chooses between sending pages as they are and one lossless codec."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._link_s_per_byte = 0.0
        self._encode_s_per_byte = UNTRIED_ENCODE_S_PER_BYTE
        self._ratio = UNTRIED_RATIO
        self._num_raw_pages = 0

    def choose(self) -> Codec:
        """Return how the next page is sent."""
        raw_s = self._link_s_per_byte
        encoded_s = self._encode_s_per_byte + raw_s * self._ratio
        if raw_s > encoded_s * MARGIN:
            return self._codec
        self._num_raw_pages += 1
        if self._num_raw_pages % RETRY_PAGES == 0:
            self._encode_s_per_byte = (self._encode_s_per_byte + UNTRIED_ENCODE_S_PER_BYTE) / 2
            self._ratio = (self._ratio + UNTRIED_RATIO) / 2
        return Codec.RAW

    def encoded(self, *, num_bytes: int, num_encoded_bytes: int, seconds: float) -> None:
        """Take note of a page that was encoded."""
        self._encode_s_per_byte = _mean(self._encode_s_per_byte, seconds / num_bytes)
        self._ratio = _mean(self._ratio, num_encoded_bytes / num_bytes)

    def sent(self, *, num_bytes: int, seconds: float) -> None:
        """Take note of bytes that the link took, and how long it made the sender wait."""
        self._link_s_per_byte = _mean(self._link_s_per_byte, seconds / num_bytes)


def _mean(before: float, newest: float) -> float:
    return before + WEIGHT * (newest - before)
