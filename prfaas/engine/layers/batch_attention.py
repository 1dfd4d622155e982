"""Attention of a batch's rows, each over what its own sequence holds in a layer.

Shapes: T rows of the batch, H KV heads, G query heads of each, K key dim, V value dim.
"""

from torch import Tensor

from prfaas.engine.attention import Queries, attend
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

    def __call__(self, q_THGK: Tensor, batch: Batch, layer: int, out_THGV: Tensor) -> None:
        """Write each segment's rows of `out_THGV`; its keys and values are in place."""
        queries = [
            Queries(
                segment.kv.kv_of(layer).span,
                segment.kv.num_tokens,
                rows.start,
                rows.stop - rows.start,
            )
            for rows, segment in batch.parts
        ]
        attend(
            q_THGK,
            queries,
            scale=self._scale,
            window_tokens=self._window_tokens,
            out_THGV=out_THGV,
            sinks_HG=self._sinks_HG,
        )


Attention = type[BatchAttention] | type[TorchAttention]
"""Called with scale, window_tokens and sinks_HG, it makes one layer's attention."""


def attention_for(packing: Packing) -> Attention:
    """Return the kernels that keep what the packing promises."""
    return BatchAttention if is_exact(packing) else TorchAttention
