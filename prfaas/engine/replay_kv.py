"""The KV, states and logits of a replayed model: hashes of the tokens up to there; torch-free.

What a page holds follows from the tokens before its end, its layer and its place. What a sequence is
given as pages is compared with that, byte for byte, once: a byte that differs leaves a *taint*, on
which every later page and every later token of the sequence depends.
"""

import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from prfaas.cache.hashing import block_keys
from prfaas.cache.spec import CacheLayout
from prfaas.engine.sampler import Float32s

if TYPE_CHECKING:
    from prfaas.engine.segment import Segment

_FORMAT = b"prfaas replay 1"
_KV, _STATE = 0, 1
_PLACE = struct.Struct("<BIQ")
_SPOKEN = b"abcdefghijklmnopqrstuvwxyz    "
_UNSPOKEN_LOGIT = np.float32(-24.0)
"""Added to the logits of everything but small letters and spaces."""

Words = NDArray[np.uint64]
Stream = Callable[[bytes, int], bytes]
"""(16 bytes of key, number of bytes) -> bytes that depend on all of the key."""


class TokenChain:
    """Names for every prefix of one growing sequence.

    Args:
        links: the root, and the names of the prefixes of whole blocks that are known.
        block_tokens: a prefix is named from the block boundary before its end.
        tokens: of the sequence; its owner appends to it and never changes what is there.
    """

    def __init__(self, links: Sequence[bytes], block_tokens: int, tokens: Sequence[int]) -> None:
        self._links = list(links)
        self._block_tokens = block_tokens
        self._tokens = tokens

    def at(self, num_tokens: int) -> bytes:
        """Return the 32 bytes that name the first `num_tokens` tokens."""
        size = self._block_tokens
        num_blocks, rest = divmod(num_tokens, size)
        known = len(self._links) - 1
        if num_blocks > known:
            new = self._tokens[known * size : num_blocks * size]
            self._links += block_keys(self._links[-1], new, size)
        link = self._links[num_blocks]
        if not rest:
            return link
        ids = array("I", self._tokens[num_blocks * size : num_tokens])
        if sys.byteorder == "big":
            ids.byteswap()
        return sha256(link + ids.tobytes()).digest()

    def of(self, tokens: Sequence[int]) -> "TokenChain":
        """Return the chain of a sequence that begins with all tokens that this one has named."""
        return TokenChain(self._links, self._block_tokens, tokens)


class ReplayedKv:
    """The working copy of one sequence: how far it is computed, and whether a wrong byte came in.

    It has of `sequence_kv.SequenceKv`'s face what the runner and pages ask for, and no bytes: they
    are made when they are asked for.
    """

    def __init__(self, chain: TokenChain, block_tokens: int, stream: Stream) -> None:
        self.num_tokens = 0
        self.num_loaded = 0
        """Tokens that came as pages."""
        self.taint = b""
        """Empty as long as every byte was right."""
        self._chain = chain
        self._block_tokens = block_tokens
        self._stream = stream

    def tell(self, tokens: Sequence[int]) -> None:
        """Say what the sequence's tokens are; what was computed before is of the same."""
        self._chain = self._chain.of(tokens)

    def digest(self, num_tokens: int) -> bytes:
        """Return 16 bytes that depend on all tokens up to there, and on every wrong byte."""
        return blake2b(self.taint + self._chain.at(num_tokens), digest_size=16).digest()

    def export_block(self, layer: int, block: int, num_tokens: int, out: memoryview) -> None:
        """Write what stands for K and V of the first `num_tokens` tokens of a block."""
        self._give(_KV, layer, block * self._block_tokens + num_tokens, 0, out)

    def import_block(self, layer: int, block: int, num_tokens: int, data: memoryview) -> None:
        """Read what export_block wrote."""
        self._take(_KV, layer, block * self._block_tokens + num_tokens, 0, data)

    def state_of(self, layer: int) -> "ReplayedState":
        """Return a layer's state."""
        return ReplayedState(self, layer)

    def export_state(self, layer: int, position: int, start: int, out: memoryview) -> None:
        """Write what stands for the bytes from `start` on of a state after `position` tokens."""
        self._give(_STATE, layer, position, start, out)

    def import_state(self, layer: int, position: int, start: int, data: memoryview) -> None:
        """Read what export_state wrote."""
        self._take(_STATE, layer, position, start, data)

    def set_num_tokens(self, num_tokens: int) -> None:
        """Declare the first `num_tokens` tokens to be computed."""
        self.num_tokens = num_tokens

    def reserve(self, capacity_tokens: int) -> None:
        """Make room, of which there is always enough."""

    def fork(self) -> "ReplayedKv":
        """Return an independent copy."""
        other = ReplayedKv(self._chain, self._block_tokens, self._stream)
        other.num_tokens, other.num_loaded = self.num_tokens, self.num_loaded
        other.taint = self.taint
        return other

    def _give(self, kind: int, layer: int, position: int, start: int, out: memoryview) -> None:
        out[:] = self._expected(kind, layer, position, start, len(out))

    def _take(self, kind: int, layer: int, position: int, start: int, data: memoryview) -> None:
        # As bytes: numpy would give up the GIL for every page, memoryviews compare one by one.
        if bytes(data) != self._expected(kind, layer, position, start, len(data)):
            place = _PLACE.pack(kind, layer, start) + position.to_bytes(8, "little")
            self.taint = blake2b(self.taint + place + data, digest_size=16).digest()

    def _expected(self, kind: int, layer: int, position: int, start: int, size: int) -> bytes:
        place = _PLACE.pack(kind, layer, start)
        key = blake2b(self.digest(position) + place, digest_size=16).digest()
        return self._stream(key, size)


@dataclass(frozen=True, slots=True)
class ReplayedState:
    """One layer's state: of `states.LayerState`'s face what pages ask for."""

    kv: ReplayedKv
    layer: int

    def holds(self, position: int) -> bool:
        """Return whether that after `position` tokens can be written."""
        return position <= self.kv.num_tokens

    def write_to(self, position: int, out: memoryview, start: int) -> None:
        """Write the bytes from `start` on of the state after `position` tokens."""
        self.kv.export_state(self.layer, position, start, out)

    def read_from(self, position: int, data: memoryview, start: int) -> None:
        """Read what write_to wrote."""
        self.kv.import_state(self.layer, position, start, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """What a runner wants to know of a model."""

    vocab_size: int
    """Ids below 256 are bytes."""
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class ReplayedRows:
    """Rows of logits: of a tensor's face what a forward asks for."""

    rows: list[Float32s]

    def numpy(self) -> list[Float32s]:
        """Return the rows."""
        return self.rows


class ReplayModel:
    """Makes logits, and working copies that make pages, out of hashes. For one thread.

    Args:
        layout: of the pages.
        config: its limits.
        seed: equal seeds make equal bytes.
    """

    def __init__(self, layout: CacheLayout, config: ReplayConfig, *, seed: bytes) -> None:
        self.config = config
        self.num_layers = 1 + max(layer for spec in layout.groups for layer in spec.layers)
        self._layout = layout
        self._root = sha256(_FORMAT + seed).digest()
        num_words = max(-(-layout.page_bytes // 8), config.vocab_size)
        noise = np.random.PCG64(int.from_bytes(self._root, "little"))
        self._noise: Words = noise.random_raw(num_words)
        self._scratch: Words = np.empty_like(self._noise)  # a new array a page costs page faults
        self._offset_V = np.full(config.vocab_size, _UNSPOKEN_LOGIT, np.float32)
        self._offset_V[[*_SPOKEN]] = 0.0

    def kv_capacity_bytes(self, num_tokens: int) -> int:
        """Return 0: a working copy has no bytes."""
        return 0 * num_tokens

    def new_kv(self, *, capacity_tokens: int, block_tokens: int) -> ReplayedKv:
        """Return an empty working copy; it has to be told its tokens."""
        assert capacity_tokens >= 0
        return ReplayedKv(TokenChain([self._root], block_tokens, ()), block_tokens, self._stream)

    def forward(
        self, segments: Sequence["Segment"], *, on_layer: Callable[[int], None]
    ) -> "ReplayedRows":
        """Take the segments' working copies to their ends, at once; return the wanted logits."""
        for layer in range(self.num_layers):
            on_layer(layer)
        rows: list[Float32s] = []
        for segment in segments:
            kv = cast("ReplayedKv", segment.kv)  # new_kv made it
            kv.num_tokens += len(segment.tokens)
            if segment.num_logits:
                rows.append(self.logits(kv, kv.num_tokens))
        return ReplayedRows(rows)

    def logits(self, kv: ReplayedKv, num_tokens: int) -> Float32s:
        """Return the logits [V] after the first `num_tokens` tokens: most likely small letters."""
        words_V = self._mix(kv.digest(num_tokens), self.config.vocab_size)
        unit_V = (words_V >> np.uint64(40)).astype(np.float32)  # 24 bits: exact in float32
        logits_V: Float32s = unit_V * np.float32(2.0**-21) + self._offset_V
        return logits_V

    def _mix(self, key: bytes, num_words: int) -> Words:
        """Return fixed noise, shifted and multiplied by what the key says, until the next call."""
        shift, factor = struct.unpack("<QQ", key)
        words = self._scratch[:num_words]
        np.bitwise_xor(self._noise[:num_words], np.uint64(shift), out=words)
        np.multiply(words, np.uint64(factor | 1), out=words)
        return words

    def _stream(self, key: bytes, num_bytes: int) -> bytes:
        words = self._mix(key, -(-num_bytes // 8)).astype("<u8", copy=False)
        return words.view(np.uint8)[:num_bytes].tobytes()
