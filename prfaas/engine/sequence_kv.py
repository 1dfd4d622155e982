"""The working copy of one sequence: each layer's keys and values, or state, or both.

They are exported and imported as pages: K and V by the block, a state by the slice.
"""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from prfaas.engine.kv import CPU, LayerKv, attention_of, layer_capacity
from prfaas.engine.mixer_spec import KV_DTYPE_BYTES, KvDtype, MixerSpec, state_bytes
from prfaas.engine.states import LayerState

HELD_STATES = 3
"""A forward reads a layer's state where it starts and holds the one where it ends; that at the last
block boundary stays, for whoever goes on from there."""


def capacity_bytes(
    layers: Sequence[MixerSpec],
    capacity_tokens: int,
    kv_dtype: KvDtype = "float32",
) -> int:
    """Return the bytes of a sequence's working copy in all layers.

    A state counts HELD_STATES times; the copies that a prefill takes in passing live for one forward,
    as activations do, and do not count.
    """
    return sum(
        _kv_bytes(layer, capacity_tokens, kv_dtype) + HELD_STATES * state_bytes(layer, kv_dtype)
        for layer in layers
    )


def _kv_bytes(layer: MixerSpec, capacity_tokens: int, kv_dtype: KvDtype) -> int:
    attention = attention_of(layer)
    if attention is None:
        return 0
    num_tokens = layer_capacity(attention, capacity_tokens)
    return num_tokens * attention.values_per_token * KV_DTYPE_BYTES[kv_dtype]


class SequenceKv:
    """What every layer keeps of one sequence; `num_tokens` tokens are complete in all layers.

    Attributes:
        layers: for each layer its K and V, None if it has no attention.
        states: for each layer its recurrent and convolution state, None if it has none.
    """

    def __init__(
        self,
        layers: Sequence[MixerSpec],
        *,
        capacity_tokens: int,
        block_tokens: int,
        kv_dtype: KvDtype = "float32",
        device: torch.device = CPU,
    ) -> None:
        """Make an empty working copy.

        Args:
            layers: of the model.
            capacity_tokens: the sequence's length is up to it.
            block_tokens: of the pages.
            kv_dtype: of K and V, and of convolution rows in pages.
            device: where all of it lies.
        """
        self.num_tokens = 0
        self.capacity_tokens = capacity_tokens
        self.block_tokens = block_tokens
        dtype: torch.dtype = getattr(torch, kv_dtype)
        attentions = [attention_of(spec) for spec in layers]
        self.layers = [
            None
            if attention is None
            else LayerKv(attention, capacity_tokens, block_tokens, dtype=dtype, device=device)
            for attention in attentions
        ]
        self.states = [
            LayerState(spec, kv_dtype=dtype, device=device) if spec.states else None
            for spec in layers
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, each state as often as `capacity_bytes` counts it."""
        kv_bytes = sum(layer.nbytes for layer in self.layers if layer is not None)
        return kv_bytes + HELD_STATES * sum(s.nbytes for s in self.states if s is not None)

    def kv_of(self, layer: int) -> LayerKv:
        """Return an attention layer's K and V."""
        kv = self.layers[layer]
        assert kv is not None, f"layer {layer} has no attention"
        return kv

    def state_of(self, layer: int) -> LayerState:
        """Return a linear layer's state."""
        state = self.states[layer]
        assert state is not None, f"layer {layer} has no state"
        return state

    def begin_forward(self, snapshots: Sequence[int]) -> None:
        """Forget states of other positions than num_tokens and the last block boundary before it.

        Those after `snapshots` are kept next.
        """
        boundary = self.num_tokens // self.block_tokens * self.block_tokens
        for state in self.states:
            if state is not None:
                state.begin(self.num_tokens, snapshots, kept=boundary)

    def export_block(self, layer: int, block: int, num_tokens: int, out: memoryview) -> None:
        """Write the first `num_tokens` tokens of a block to `out`: K, then V.

        Legal inside `on_layer` for tokens that the running forward just wrote.

        Raises:
            ValueError: the tokens are not here, or `out` has another size.
        """
        self.kv_of(layer).write_to(block * self.block_tokens, num_tokens, out)

    def import_block(self, layer: int, block: int, num_tokens: int, data: memoryview) -> None:
        """Read what export_block wrote; set_num_tokens makes it count.

        Raises:
            ValueError: `data` has another size, or the block lies before the window.
        """
        self.kv_of(layer).read_from(block * self.block_tokens, num_tokens, data)

    def import_blocks(
        self, layer: int, first_block: int, arena: memoryview, page_bytes: int, pages_B: Tensor
    ) -> None:
        """Read whole blocks that follow each other, as `import_block` reads each.

        Args:
            layer: an attention layer.
            first_block: the others come after it.
            arena: pages of equal size.
            page_bytes: of each; may be more than a block of the layer takes.
            pages_B: the number of each block's page, on the CPU.

        Raises:
            ValueError: the first block lies before the window.
        """
        kv = self.kv_of(layer)
        pages_PN = torch.frombuffer(arena[:], dtype=kv.dtype).view(
            -1, page_bytes // kv.dtype.itemsize
        )
        kv.gather(first_block * self.block_tokens, self.block_tokens, pages_PN, pages_B)

    def set_num_tokens(self, num_tokens: int) -> None:
        """Declare that every layer holds what it needs to go on at `num_tokens`; void the rest.

        Raises:
            ValueError: a layer does not hold it.
        """
        for layer in self.layers:
            if layer is not None:
                layer.truncate(num_tokens)
        for state in self.states:
            if state is not None:
                state.at(num_tokens)
        self.num_tokens = num_tokens

    def reserve(self, capacity_tokens: int) -> None:
        """Make room for up to `capacity_tokens`, layer by layer; what is held stays."""
        for layer in self.layers:
            if layer is not None:
                layer.reserve(capacity_tokens)
        self.capacity_tokens = max(self.capacity_tokens, capacity_tokens)

    def fork(self) -> "SequenceKv":
        """Return an independent copy, for another continuation of the same tokens."""
        other = copy(self)
        other.layers = [None if layer is None else layer.fork() for layer in self.layers]
        other.states = [None if state is None else state.fork() for state in self.states]
        return other
