"""Attention of a batch's rows, each over what its own sequence holds in a layer.

Shapes: T rows of the batch, H KV heads, G query heads of each, K key dim, V value dim.
"""

from torch import Tensor

from prfaas.engine.attention import attend, attend_steps
from prfaas.engine.batch import Batch
from prfaas.engine.layers.torch_attention import TorchAttention
from prfaas.engine.linear import Packing, is_exact


class BatchAttention:
    """The attention of one layer, exact: a row depends on its own sequence alone. For a CPU.

    Attributes:
        has_exact_steps: attend_steps gives the bits of attend on this machine; the self-test may
            clear it.
    """

    def __init__(
        self, *, scale: float, window_tokens: int | None, sinks_HG: Tensor | None = None
    ) -> None:
        self.has_exact_steps = True
        self._scale = scale
        self._window_tokens = window_tokens
        self._sinks_HG = sinks_HG

    def __call__(self, q_THGK: Tensor, batch: Batch, layer: int, out_THGV: Tensor) -> None:
        """Write each segment's rows of `out_THGV`; its keys and values are in place."""
        steps = batch.steps if self.has_exact_steps else ()
        if steps:
            out_THGV[batch.step_rows] = attend_steps(
                q_THGK[batch.step_rows],
                [segment.kv.kv_of(layer).span for segment in steps],
                [segment.kv.num_tokens for segment in steps],
                scale=self._scale,
                window_tokens=self._window_tokens,
                sinks_HG=self._sinks_HG,
            )
        for rows, segment in batch.chunks if steps else batch.parts:
            attend(
                q_THGK[rows],
                segment.kv.kv_of(layer).span,
                first_position=segment.kv.num_tokens,
                scale=self._scale,
                window_tokens=self._window_tokens,
                sinks_HG=self._sinks_HG,
                out_THGV=out_THGV[rows],
            )


Attention = type[BatchAttention] | type[TorchAttention]
"""Called with scale, window_tokens and sinks_HG, it makes one layer's attention."""


def attention_for(packing: Packing) -> Attention:
    """Return the kernels that keep what the packing promises."""
    return BatchAttention if is_exact(packing) else TorchAttention
