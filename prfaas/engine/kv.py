"""The working copy of one layer's keys and values of one sequence.

Full-attention layers keep every token. Window layers keep the last window and what a forward adds
to it; older tokens are dropped when room is needed. Buffers lie on the absolute grid of the
attention kernel (KEY_BLOCK), and every byte of a visible block is finite: an unwritten key is masked,
but its value is still multiplied by zero.

Shapes: H KV heads, C capacity in tokens, T tokens, K head dim.
"""

from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prfaas.engine.attention import KEY_BLOCK, KeySpan
from prfaas.engine.mixer_spec import GqaSpec

Array = NDArray[np.float32]

WINDOW_SLACK_TOKENS = 1024
"""Room of a window layer beyond its window, for the tokens of a forward (a prefill chunk)."""
FLOAT32_BYTES = 4


def layer_capacity(layer: GqaSpec, capacity_tokens: int) -> int:
    """Return the tokens of one layer's buffer in a sequence of up to `capacity_tokens`."""
    if layer.window_tokens is not None:
        capacity_tokens = min(capacity_tokens, layer.window_tokens + WINDOW_SLACK_TOKENS)
    return _ceil(capacity_tokens)


class LayerKv:
    """K and V of one layer: kv[0] and kv[1], [H, C, K], of positions base_tokens + 0, 1, ...

    One buffer, seen by attention as tensors and by what copies in and out as an array: for the few
    KiB of a single token an array copy costs a tenth of a tensor's.
    """

    def __init__(self, spec: GqaSpec, capacity_tokens: int, margin_tokens: int) -> None:
        self.spec = spec
        self._margin_tokens = margin_tokens
        self._end_tokens = 0  # tokens are written up to here
        self._finite_tokens = 0  # from base_tokens up to here no byte is uninitialised
        self._hold(self._empty(layer_capacity(spec, capacity_tokens)), 0)

    def _empty(self, capacity_tokens: int) -> Tensor:
        return torch.empty(2, self.spec.num_kv_heads, capacity_tokens, self.spec.head_dim)

    def _hold(self, kv_2HCK: Tensor, base_tokens: int) -> None:
        self.kv_2HCK = kv_2HCK
        self.base_tokens = base_tokens
        self._array_2HCK: Array = kv_2HCK.numpy()
        self._span = KeySpan(kv_2HCK[0], kv_2HCK[1], base_tokens)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit the buffer."""
        return self.kv_2HCK.shape[2]

    @property
    def span(self) -> KeySpan:
        """The whole buffer, for attention; void once the layer is written again."""
        return self._span

    def write(self, start: int, k_THK: Array, v_THK: Array) -> None:
        """Put the K and V of positions start, start + 1, ...; what follows them is void."""
        room_2HTK = self._room(start, len(k_THK))
        room_2HTK[0] = k_THK.swapaxes(0, 1)
        room_2HTK[1] = v_THK.swapaxes(0, 1)
        self._end_tokens = start + len(k_THK)

    def load(self, start: int, num_tokens: int) -> Array:
        """Return room [2, H, num_tokens, K] for tokens made elsewhere, to be filled at once.

        Blocks of one window may come in any order.

        Raises:
            ValueError: the tokens lie before the window, or beyond the capacity.
        """
        if self._end_tokens == 0:
            self._hold(self.kv_2HCK, self._first_kept(start))
            self._finite_tokens = self.base_tokens
        if start < self.base_tokens:
            raise ValueError(f"token {start} lies before the first kept, {self.base_tokens}")
        room_2HTK = self._room(start, num_tokens)
        self._end_tokens = max(self._end_tokens, start + num_tokens)
        return room_2HTK

    def read(self, start: int, num_tokens: int) -> Array:
        """Return the K and V of positions start, ..., [2, H, num_tokens, K]; a view.

        Raises:
            ValueError: they are not all here.
        """
        if not self.base_tokens <= start <= start + num_tokens <= self._end_tokens:
            raise ValueError(
                f"tokens {start}..{start + num_tokens} asked of a buffer that holds "
                f"{self.base_tokens}..{self._end_tokens}"
            )
        first = start - self.base_tokens
        return self._array_2HCK[:, :, first : first + num_tokens]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.kv_2HCK.nbytes

    def write_to(self, start: int, num_tokens: int, out: memoryview) -> None:
        """Write positions start, ... to `out` as a page holds them: K, then V, each [H, T, K].

        Raises:
            ValueError: the tokens are not here, or `out` has another size.
        """
        self._page(num_tokens, out)[:] = self.read(start, num_tokens)

    def read_from(self, start: int, num_tokens: int, data: memoryview) -> None:
        """Read what write_to wrote; blocks of one window may come in any order.

        Raises:
            ValueError: `data` has another size, or the tokens lie before the window.
        """
        page_2HTK = self._page(num_tokens, data)
        self.load(start, num_tokens)[:] = page_2HTK

    def _page(self, num_tokens: int, data: memoryview) -> Array:
        spec = self.spec
        expected = num_tokens * spec.values_per_token * FLOAT32_BYTES
        if data.nbytes != expected:
            raise ValueError(f"a page of {data.nbytes} bytes; {num_tokens} tokens take {expected}")
        page = np.frombuffer(data, dtype=np.float32)
        return page.reshape(2, spec.num_kv_heads, num_tokens, spec.head_dim)

    def truncate(self, num_tokens: int) -> None:
        """Void everything from position `num_tokens` on.

        Raises:
            ValueError: a token needed to go on from there is not here.
        """
        first_needed = num_tokens - self.spec.kept_tokens(num_tokens)
        if not self.base_tokens <= first_needed <= num_tokens <= self._end_tokens:
            raise ValueError(
                f"going on at {num_tokens} needs tokens from {first_needed}; the buffer holds "
                f"{self.base_tokens}..{self._end_tokens}"
            )
        self._end_tokens = num_tokens

    def fork(self) -> "LayerKv":
        """Return an independent copy."""
        other = copy(self)
        other.reallocate(self.capacity_tokens)
        return other

    def reserve(self, capacity_tokens: int) -> None:
        """Make room for a sequence of up to `capacity_tokens`; what is held stays."""
        wanted_tokens = layer_capacity(self.spec, capacity_tokens)
        if wanted_tokens > self.capacity_tokens:
            self.reallocate(wanted_tokens)

    def reallocate(self, capacity_tokens: int) -> None:
        """Move what is held to a buffer of `capacity_tokens`, which must be enough for it."""
        held = self.kv_2HCK[:, :, : self._finite_tokens - self.base_tokens]
        buffer_2HCK = self._empty(capacity_tokens)
        buffer_2HCK[:, :, : held.shape[2]] = held
        self._hold(buffer_2HCK, self.base_tokens)

    def _first_kept(self, num_tokens: int) -> int:
        """The first position still wanted when the sequence goes on at `num_tokens`.

        The margin keeps one cache block more, which an export at a boundary may ask for.
        """
        if self.spec.window_tokens is None:
            return 0
        first = num_tokens - (self.spec.window_tokens - 1) - self._margin_tokens
        return max(0, first) // KEY_BLOCK * KEY_BLOCK

    def _room(self, start: int, num_tokens: int) -> Array:
        end, block_end = start + num_tokens, _ceil(start + num_tokens)
        if block_end - self.base_tokens > self.capacity_tokens:
            self._make_room(start, block_end)
        base = self.base_tokens
        if block_end > self._finite_tokens:
            self._array_2HCK[:, :, max(0, self._finite_tokens - base) : start - base] = 0.0
            self._array_2HCK[:, :, end - base : block_end - base] = 0.0
            self._finite_tokens = block_end
        return self._array_2HCK[:, :, start - base : end - base]

    def _make_room(self, start: int, end: int) -> None:
        """Drop what no query from `start` on sees; grow a window's buffer for a long forward."""
        base = max(self.base_tokens, self._first_kept(start))
        held_end = max(base, min(self._finite_tokens, _ceil(start)))
        held = self.kv_2HCK[:, :, base - self.base_tokens : held_end - self.base_tokens]
        buffer_2HCK = self.kv_2HCK
        if end - base <= self.capacity_tokens:
            held = held.clone()  # it may overlap its new place
        elif self.spec.window_tokens is None:
            raise ValueError(f"{end} tokens in a sequence of {self.capacity_tokens}")
        else:
            buffer_2HCK = self._empty(end - base + KEY_BLOCK)
        buffer_2HCK[:, :, : held.shape[2]] = held
        self._finite_tokens = held_end
        self._hold(buffer_2HCK, base)


def _ceil(num_tokens: int) -> int:
    return -(-num_tokens // KEY_BLOCK) * KEY_BLOCK
