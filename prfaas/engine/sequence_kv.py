"""The working copy of one sequence: every layer's keys and values, exported and imported as pages.

Shapes: H KV heads, T tokens, K head dim.
"""

from collections.abc import Sequence
from copy import copy

import numpy as np

from prfaas.engine.config import LayerSpec
from prfaas.engine.kv import FLOAT32_BYTES, Array, LayerKv, layer_capacity


def capacity_bytes(layers: Sequence[LayerSpec], capacity_tokens: int) -> int:
    """Return the bytes of a sequence's working copy in all layers."""
    return sum(
        layer_capacity(layer, capacity_tokens) * layer.values_per_token * FLOAT32_BYTES
        for layer in layers
    )


class SequenceKv:
    """K and V of one sequence, layer by layer; `num_tokens` of them are complete in all layers."""

    def __init__(
        self, layers: Sequence[LayerSpec], *, capacity_tokens: int, block_tokens: int
    ) -> None:
        self.num_tokens = 0
        self.capacity_tokens = capacity_tokens
        self.block_tokens = block_tokens
        self.layers = [LayerKv(spec, capacity_tokens, block_tokens) for spec in layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(layer.kv_2HCK.nbytes for layer in self.layers)

    def export_block(self, layer: int, block: int, num_tokens: int, out: memoryview) -> None:
        """Write the first `num_tokens` tokens of a block to `out`: K, then V, each [H, T, K].

        Legal inside `on_layer` for tokens that the running forward just wrote.

        Raises:
            ValueError: the tokens are not here, or `out` has another size.
        """
        page_2HTK = self._page(layer, num_tokens, out)
        page_2HTK[:] = self.layers[layer].read(block * self.block_tokens, num_tokens)

    def import_block(self, layer: int, block: int, num_tokens: int, data: memoryview) -> None:
        """Read what export_block wrote; set_num_tokens makes it count.

        Raises:
            ValueError: `data` has another size, or the block lies before the window.
        """
        page_2HTK = self._page(layer, num_tokens, data)
        room_2HTK = self.layers[layer].load(block * self.block_tokens, num_tokens)
        room_2HTK[:] = page_2HTK

    def set_num_tokens(self, num_tokens: int) -> None:
        """Declare that every layer holds what it needs to go on at `num_tokens`; void the rest.

        Raises:
            ValueError: a layer does not hold it.
        """
        for layer in self.layers:
            layer.truncate(num_tokens)
        self.num_tokens = num_tokens

    def reserve(self, capacity_tokens: int) -> None:
        """Make room for up to `capacity_tokens`, layer by layer; what is held stays."""
        for layer in self.layers:
            layer.reserve(capacity_tokens)
        self.capacity_tokens = max(self.capacity_tokens, capacity_tokens)

    def fork(self) -> "SequenceKv":
        """Return an independent copy, for another continuation of the same tokens."""
        other = copy(self)
        other.layers = [layer.fork() for layer in self.layers]
        return other

    def _page(self, layer: int, num_tokens: int, data: memoryview) -> Array:
        spec = self.layers[layer].spec
        expected = num_tokens * spec.values_per_token * FLOAT32_BYTES
        if data.nbytes != expected:
            raise ValueError(f"a page of {data.nbytes} bytes; {num_tokens} tokens take {expected}")
        page = np.frombuffer(data, dtype=np.float32)
        return page.reshape(2, spec.num_kv_heads, num_tokens, spec.head_dim)
