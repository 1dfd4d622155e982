"""Which codec a page goes out in: pure, told what encoding and sending took.

Named codecs are used always. `auto` and `auto-lossy` compare: a link that takes pages as fast as they
come pushes back on nobody, and nothing is encoded. One that does makes sending take time; once a page's time
on the link is longer than encoding it and sending what is left, pages are encoded. Both costs are
running means, so the choice follows the link.
"""

from typing import assert_never

from prfaas.transport.messages import CodecName
from prfaas.transport.wire import Codec

WEIGHT = 0.1
"""Of the newest page in a running mean."""
MARGIN = 1.03
"""Encoding must promise more than this much, so that noise alone does not start it."""
RETRY_PAGES = 256
"""After so many pages not sent in a codec, what was learned of it is half forgotten."""
UNTRIED: dict[Codec, tuple[float, float]] = {
    Codec.ZSTD: (1 / 400e6, 0.85),
    Codec.INT8: (1 / 1e9, 0.27),
}
"""Seconds that encoding takes a byte, and bytes that are left of it, before it was tried: hopeful,
because what is not tried is not learned."""


class _Measured:
    """What one codec costs, as far as it is known."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.encode_s_per_byte, self.ratio = UNTRIED[codec]
        self._num_passed_over = 0

    def s_per_byte(self, link_s_per_byte: float) -> float:
        """Seconds until a byte of a page is encoded and sent."""
        return self.encode_s_per_byte + link_s_per_byte * self.ratio

    def measured(self, *, encode_s_per_byte: float, ratio: float) -> None:
        self._num_passed_over = 0
        self.encode_s_per_byte = _mean(self.encode_s_per_byte, encode_s_per_byte, WEIGHT)
        self.ratio = _mean(self.ratio, ratio, WEIGHT)

    def passed_over(self, num_pages: int) -> None:
        self._num_passed_over += num_pages
        if self._num_passed_over >= RETRY_PAGES:
            self._num_passed_over -= RETRY_PAGES
            encode_s_per_byte, ratio = UNTRIED[self.codec]
            self.encode_s_per_byte = _mean(self.encode_s_per_byte, encode_s_per_byte, 0.5)
            self.ratio = _mean(self.ratio, ratio, 0.5)


class CodecChoice:
    """Chooses among the codecs that the receiver's choice of a name leaves open."""

    def __init__(self, name: CodecName) -> None:
        self._fixed: Codec | None = None
        self._candidates: list[_Measured] = []
        match name:
            case "raw":
                self._fixed = Codec.RAW
            case "zstd":
                self._fixed = Codec.ZSTD
            case "fp16":
                self._fixed = Codec.FP16
            case "int8":
                self._fixed = Codec.INT8
            case "fp8":
                self._fixed = Codec.FP8
            case "auto":
                self._candidates = [_Measured(Codec.ZSTD)]
            case "auto-lossy":
                # Of those that lose something int8 alone: nothing is smaller, and fp8 is less exact.
                self._candidates = [_Measured(Codec.ZSTD), _Measured(Codec.INT8)]
            case _:
                assert_never(name)
        self._link_s_per_byte = 0.0

    def choose(self, *, may_lose: bool) -> Codec:
        """Return how the next page is sent; one that may lose nothing goes RAW or in ZSTD."""
        if self._fixed is not None:
            is_possible = may_lose or self._fixed is Codec.RAW
            return self._fixed if is_possible else Codec.ZSTD
        chosen = self._best(may_lose=may_lose)
        for candidate in self._candidates:
            if candidate.codec is not chosen:
                candidate.passed_over(1)
        return chosen

    def _best(self, *, may_lose: bool) -> Codec:
        chosen, best_s = Codec.RAW, self._link_s_per_byte
        # Without loss first, so that a lossy codec has to be better by the margin.
        for candidate in self._candidates:
            candidate_s = candidate.s_per_byte(self._link_s_per_byte)
            is_possible = may_lose or candidate.codec is Codec.ZSTD
            if is_possible and best_s > candidate_s * MARGIN:
                chosen, best_s = candidate.codec, candidate_s
        return chosen

    @property
    def is_raw(self) -> bool:
        """Whatever a page may lose, `choose` would say RAW now."""
        best = self._best(may_lose=True) if self._fixed is None else self._fixed
        return best is Codec.RAW

    def passed_over(self, num_pages: int) -> None:
        """Take note of pages that went RAW because of `is_raw`, without a `choose`."""
        for candidate in self._candidates:
            candidate.passed_over(num_pages)

    def encoded(
        self, codec: Codec, *, num_bytes: int, num_encoded_bytes: int, seconds: float
    ) -> None:
        """Take note of a page that `choose` wanted in `codec`, whatever came of it."""
        for candidate in self._candidates:
            if candidate.codec is codec:
                candidate.measured(
                    encode_s_per_byte=seconds / num_bytes, ratio=num_encoded_bytes / num_bytes
                )

    def sent(self, *, num_bytes: int, seconds: float) -> None:
        """Take note of bytes that the link took, and how long it made the sender wait."""
        self._link_s_per_byte = _mean(self._link_s_per_byte, seconds / num_bytes, WEIGHT)


def _mean(before: float, newest: float, weight: float) -> float:
    return before + weight * (newest - before)
