"""Attention of a batch's rows, each over what its own sequence holds in a layer.

Shapes: T rows of the batch, H KV heads, G query heads of each, K key dim, V value dim.
"""

from collections.abc import Callable

from torch import Tensor

from prfaas.engine.attention import Attending
from prfaas.engine.batch import Batch
from prfaas.engine.layers.torch_attention import TorchAttention
from prfaas.engine.linear import Packing, is_exact


class BatchAttention:
    """The attention of one layer, exact: a row depends on its own sequence alone. For a CPU."""

    def __init__(
        self, *, scale: float, window_tokens: int | None, sinks_HG: Tensor | None = None
    ) -> None:
        self._scale = scale
        self._window_tokens = window_tokens
        self._sinks_HG = sinks_HG

    def of(self, q_THGK: Tensor, out_THGV: Tensor) -> Callable[[Batch, int], None]:
        """Return what writes the rows of `out_THGV` for a batch, in a layer.

        Each segment's keys and values are in place then.
        """
        attending = Attending(
            q_THGK,
            out_THGV,
            scale=self._scale,
            window_tokens=self._window_tokens,
            sinks_HG=self._sinks_HG,
        )
        return lambda batch, layer: batch.attend(layer, attending)


Attention = type[BatchAttention] | type[TorchAttention]
"""Called with scale, window_tokens and sinks_HG, it makes one layer's attention."""


def attention_for(packing: Packing) -> Attention:
    """Return the kernels that keep what the packing promises."""
    return BatchAttention if is_exact(packing) else TorchAttention
