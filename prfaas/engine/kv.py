"""The working copy of what one attention layer keeps of one sequence.

Full-attention layers keep every token. Window layers keep the last window and what a forward adds
to it; older tokens are dropped when room is needed. Buffers lie on an absolute grid of KEY_BLOCK
tokens, and every byte of a visible block is finite: a key that a query does not see still has its value
multiplied by zero.

Shapes: H KV heads, C capacity in tokens, T tokens, K a buffer's width.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prfaas.engine.attention import KeySpan
from prfaas.engine.mixer_spec import GqaSpec, MixerSpec, MlaSpec, ParallelSpec
from prfaas.engine.native.attention_unit import KEY_BLOCK
from prfaas.errors import EngineError

AttentionSpec = GqaSpec | MlaSpec
Array = NDArray[np.float32]
CPU = torch.device("cpu")

WINDOW_SLACK_TOKENS = 1024
"""Room of a window layer beyond its window, for the tokens of a forward (a prefill chunk)."""


class Copied(Protocol):
    """A tensor, or an array in its place."""

    def __len__(self) -> int: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __setitem__(self, key: Any, value: Any, /) -> None: ...


def attention_of(spec: MixerSpec) -> AttentionSpec | None:
    """Return the mixer's softmax attention, None if it has none."""
    attention = spec.attention if isinstance(spec, ParallelSpec) else spec
    return attention if isinstance(attention, GqaSpec | MlaSpec) else None


def layer_capacity(layer: AttentionSpec, capacity_tokens: int) -> int:
    """Return the tokens of one layer's buffers in a sequence of up to `capacity_tokens`."""
    if layer.window_tokens is not None:
        capacity_tokens = min(capacity_tokens, layer.window_tokens + WINDOW_SLACK_TOKENS)
    return _ceil(capacity_tokens)


class LayerKv:
    """One layer's buffers, [H, C, K] each, of positions base_tokens + 0, 1, ...

    Grouped-query attention has two, K and V, whose widths may differ. Latent attention has one,
    [1, C, latent and rotated key]: its values are the first columns of its keys.

    A buffer is seen by attention as a tensor and by what copies in and out as `copied` says. Pages
    hold the buffers' dtype; a copy to one is over when write_to returns, whatever the device.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        capacity_tokens: int,
        margin_tokens: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self._device = device
        self._margin_tokens = margin_tokens
        self._end_tokens = 0  # tokens are written up to here
        self._finite_tokens = 0  # from base_tokens up to here no byte is uninitialised
        self._hold(self._empty(layer_capacity(spec, capacity_tokens)), 0)

    def _empty(self, capacity_tokens: int) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty(num_heads, capacity_tokens, width, dtype=self.dtype, device=self._device)
            for num_heads, width in buffer_shapes(self.spec)
        )

    def _hold(self, buffers: tuple[Tensor, ...], base_tokens: int) -> None:
        self.buffers = buffers
        self.base_tokens = base_tokens
        self._arrays = tuple(copied(buffer) for buffer in buffers)
        self._span = span_of(self.spec, buffers, base_tokens)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit the buffers."""
        return self.buffers[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def span(self) -> KeySpan:
        """All that is held, for attention; void once the layer is written again."""
        return self._span

    def write(self, start: int, *rows_THK: Tensor) -> None:
        """Put positions start, start + 1, ...: K and V, or the latent; what follows them is void.

        The rows are of the buffers' dtype and on their device.
        """
        num_tokens = len(rows_THK[0])
        self._make_finite(start, num_tokens)
        first = start - self.base_tokens
        for buffer_HCK, row_THK in zip(self.buffers, rows_THK, strict=True):
            buffer_HCK[:, first : first + num_tokens] = row_THK.transpose(0, 1)
        self._end_tokens = start + num_tokens

    def open(self, start: int, num_tokens: int) -> tuple[int, int, int, int]:
        """Be written from position `start` on by who asks, at once; for float32 on a CPU.

        Returns:
            Addresses of the position's key and value, and the strides between heads, in elements.
        """
        end = start + num_tokens
        if end > self._finite_tokens:  # which is the end of a block that there is room for
            self._make_finite(start, num_tokens)
        self._end_tokens = end
        place = self._span.place
        assert place is not None
        keys, values, key_head, value_head = place.numbers
        *_, key_stride, value_stride = place.shape
        key, value = keys + start * key_stride * 4, values + start * value_stride * 4
        return key, value, key_head, value_head

    @property
    def strides(self) -> tuple[int, int]:
        """Elements from a token's key to the next one's, and of values."""
        place = self._span.place
        assert place is not None
        *_, key_stride, value_stride = place.shape
        return key_stride, value_stride

    def write_to(self, start: int, num_tokens: int, out: memoryview) -> None:
        """Write positions start, ... to `out` as a page holds them: K, then V, each [H, T, K].

        What is not finite is not written: a key that a query does not see has no weight, but a tile of
        queries multiplies its value by zero, so one token could spoil those before it.

        Raises:
            ValueError: the tokens are not all here, or `out` has another size.
            EngineError: K or V is not finite.
        """
        page = self._page(num_tokens, out)
        if not self.base_tokens <= start <= start + num_tokens <= self._end_tokens:
            raise ValueError(
                f"tokens {start}..{start + num_tokens} asked of a buffer that holds "
                f"{self.base_tokens}..{self._end_tokens}"
            )
        first = start - self.base_tokens
        for page_HTK, array_HCK in zip(page, self._arrays, strict=True):
            page_HTK[:] = array_HCK[:, first : first + num_tokens]
            if not _is_finite(page_HTK):
                raise EngineError("the model's keys and values are not finite")

    def read_from(self, start: int, num_tokens: int, data: memoryview) -> None:
        """Read what write_to wrote; blocks of one window may come in any order.

        Raises:
            ValueError: `data` has another size, or the tokens lie before the window or beyond the
                capacity.
        """
        page = self._page(num_tokens, data)
        self._begin_at(start)
        self._make_finite(start, num_tokens)
        first = start - self.base_tokens
        for array_HCK, page_HTK in zip(self._arrays, page, strict=True):
            array_HCK[:, first : first + num_tokens] = page_HTK
        self._end_tokens = max(self._end_tokens, start + num_tokens)

    def gather(self, start: int, tokens_per_page: int, pages_PN: Tensor, numbers_B: Tensor) -> None:
        """Read pages that follow each other from position `start` on, as read_from reads each.

        One call copies a head of all pages, on torch's threads.

        Args:
            start: position of the first page's first token.
            tokens_per_page: the same in each.
            pages_PN: the pages there are, on the CPU; of each row the first numbers count.
            numbers_B: which rows.

        Raises:
            ValueError: the tokens lie before the window or beyond the capacity.
        """
        end = start + len(numbers_B) * tokens_per_page
        self._begin_at(start)
        self._make_finite(start, end - start)
        first = 0
        for buffer_HCK in self.buffers:
            size = tokens_per_page * buffer_HCK.shape[2]
            for room_TK in buffer_HCK[:, start - self.base_tokens : end - self.base_tokens]:
                head_PN, room_BN = pages_PN[:, first : first + size], room_TK.view(-1, size)
                if room_BN.is_cpu:
                    torch.index_select(head_PN, 0, numbers_B, out=room_BN)
                else:
                    room_BN.copy_(head_PN[numbers_B])
                first += size
        self._end_tokens = max(self._end_tokens, end)

    def _begin_at(self, start: int) -> None:
        """Be ready for imported tokens from `start` on; the first decide where a window begins."""
        if self._end_tokens == 0:
            self._hold(self.buffers, self._first_kept(start))
            self._finite_tokens = self.base_tokens
        if start < self.base_tokens:
            raise ValueError(f"token {start} lies before the first kept, {self.base_tokens}")

    def _page(self, num_tokens: int, data: memoryview) -> list[Copied]:
        """Return the page's part of each buffer, [H, T, K]; views of `data`."""
        expected = num_tokens * self.spec.values_per_token * self.dtype.itemsize
        if data.nbytes != expected:
            raise ValueError(f"a page of {data.nbytes} bytes; {num_tokens} tokens take {expected}")
        values: Copied = (
            np.frombuffer(data, dtype=np.float32)
            if isinstance(self._arrays[0], np.ndarray)
            else torch.frombuffer(data, dtype=self.dtype)
        )
        parts: list[Copied] = []
        start = 0
        for num_heads, width in buffer_shapes(self.spec):
            stop = start + num_heads * num_tokens * width
            parts.append(values[start:stop].reshape(num_heads, num_tokens, width))
            start = stop
        return parts

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
        """Move what is held to buffers of `capacity_tokens`, which must be enough for it."""
        num_held = self._finite_tokens - self.base_tokens
        buffers = self._empty(capacity_tokens)
        for buffer_HCK, old_HCK in zip(buffers, self.buffers, strict=True):
            buffer_HCK[:, :num_held] = old_HCK[:, :num_held]
        self._hold(buffers, self.base_tokens)

    def _first_kept(self, num_tokens: int) -> int:
        """The first position still wanted when the sequence goes on at `num_tokens`.

        The margin keeps one cache block more, which an export at a boundary may ask for.
        """
        if self.spec.window_tokens is None:
            return 0
        first = num_tokens - (self.spec.window_tokens - 1) - self._margin_tokens
        return max(0, first) // KEY_BLOCK * KEY_BLOCK

    def _make_finite(self, start: int, num_tokens: int) -> None:
        """Have room for positions that are written at once, and zeros to the end of their block."""
        end, block_end = start + num_tokens, _ceil(start + num_tokens)
        if block_end - self.base_tokens > self.capacity_tokens:
            self._make_room(start, block_end)
        base = self.base_tokens
        if block_end > self._finite_tokens:
            for array_HCK in self._arrays:
                array_HCK[:, max(0, self._finite_tokens - base) : start - base] = 0.0
                array_HCK[:, end - base : block_end - base] = 0.0
            self._finite_tokens = block_end

    def _make_room(self, start: int, end: int) -> None:
        """Drop what no query from `start` on sees; grow a window's buffers for a long forward."""
        base = max(self.base_tokens, self._first_kept(start))
        held_end = max(base, min(self._finite_tokens, _ceil(start)))
        held = slice(base - self.base_tokens, held_end - self.base_tokens)
        buffers, is_moved = self.buffers, end - base > self.capacity_tokens
        if is_moved:
            if self.spec.window_tokens is None:
                raise ValueError(f"{end} tokens in a sequence of {self.capacity_tokens}")
            buffers = self._empty(end - base + KEY_BLOCK)
        for buffer_HCK, old_HCK in zip(buffers, self.buffers, strict=True):
            held_HCK = old_HCK[:, held]
            # In the same buffer it may overlap its new place.
            buffer_HCK[:, : held_end - base] = held_HCK if is_moved else held_HCK.clone()
        self._finite_tokens = held_end
        self._hold(buffers, base)


def _is_finite(values: Any) -> bool:
    return bool((np if isinstance(values, np.ndarray) else torch).isfinite(values).all())


def copied(tensor: Tensor) -> Copied:
    """Return what pages are copied from and to by: an array in a tensor's place, where there is one."""
    return tensor.numpy() if tensor.is_cpu and tensor.dtype == torch.float32 else tensor


def buffer_shapes(spec: AttentionSpec) -> tuple[tuple[int, int], ...]:
    """Return (heads, width) of each of a layer's buffers."""
    if isinstance(spec, MlaSpec):
        return ((1, spec.latent_dim + spec.rope_dim),)
    return ((spec.num_kv_heads, spec.head_dim), (spec.num_kv_heads, spec.value_dim))


def span_of(spec: AttentionSpec, buffers: Sequence[Tensor], base_tokens: int) -> KeySpan:
    """Return the keys and values in a layer's buffers; views."""
    if isinstance(spec, MlaSpec):
        (latent_1CK,) = buffers
        return KeySpan(latent_1CK, latent_1CK[..., : spec.latent_dim], base_tokens)
    keys_HCK, values_HCK = buffers
    return KeySpan(keys_HCK, values_HCK, base_tokens)


def _ceil(num_tokens: int) -> int:
    return -(-num_tokens // KEY_BLOCK) * KEY_BLOCK
