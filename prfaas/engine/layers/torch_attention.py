"""Attention by torch's own kernels, on any device and in the dtype of K and V.

Fast on an accelerator. How a kernel splits its work depends on the number of rows and keys, so a
row's bits may depend on the cut and on its neighbours.

Shapes: T query tokens, H KV heads, G query heads of each, R = T * G rows, C keys, K key dim, V value
dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from prfaas.engine.attention import KeySpan
from prfaas.engine.batch import Batch

TILE_TOKENS = 512
"""Query tokens computed at once: later ones see more keys, and a mask for all would be large."""


class TorchAttention:
    """The attention of one layer: scaled_dot_product_attention, or by hand where there are sinks."""

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
        return lambda batch, layer: self._write(q_THGK, batch, layer, out_THGV)

    def _write(self, q_THGK: Tensor, batch: Batch, layer: int, out_THGV: Tensor) -> None:
        for rows, segment in batch.parts:
            span = segment.kv.kv_of(layer).span
            for start in range(rows.start, rows.stop, TILE_TOKENS):
                tile = slice(start, min(start + TILE_TOKENS, rows.stop))
                position = segment.kv.num_tokens + start - rows.start
                out_THGV[tile] = self._attend(q_THGK[tile], span, position)

    def _attend(self, q_THGK: Tensor, span: KeySpan, position: int) -> Tensor:
        """Return [T, H, G, V] of the queries at `position` and on."""
        num_tokens, num_heads, num_groups, key_dim = q_THGK.shape
        seen = span.blocks(position, position + num_tokens, self._window_tokens)
        q_HRK = q_THGK.transpose(0, 1).reshape(num_heads, -1, key_dim).to(seen.keys.dtype)
        # One mask serves all heads: the query heads of a KV head lie in the rows.
        mask_RC = self._mask(seen, position, num_tokens).repeat_interleave(num_groups, dim=0)
        if self._sinks_HG is None:
            out_HRV = F.scaled_dot_product_attention(
                q_HRK[None],
                seen.keys[None],
                seen.values[None],
                mask_RC[None, None],
                scale=self._scale,
            )[0]
        else:
            sinks_HR = self._sinks_HG.repeat(1, num_tokens)
            out_HRV = _with_sinks(q_HRK, seen, mask_RC, self._scale, sinks_HR)
        return out_HRV.view(num_heads, num_tokens, num_groups, -1).transpose(0, 1)

    def _mask(self, seen: KeySpan, position: int, num_tokens: int) -> Tensor:
        """Return which keys each query sees, [T, C]."""
        device = seen.keys.device
        queries_T1 = torch.arange(position, position + num_tokens, device=device)[:, None]
        end = seen.first_key + seen.keys.shape[1]
        keys_C = torch.arange(seen.first_key, end, device=device)
        mask_TC = keys_C <= queries_T1
        if self._window_tokens is None:
            return mask_TC
        return mask_TC & (keys_C > queries_T1 - self._window_tokens)


def _with_sinks(
    q_HRK: Tensor, seen: KeySpan, mask_RC: Tensor, scale: float, sinks_HR: Tensor
) -> Tensor:
    """Return [H, R, V]: a row's sink joins the softmax, in float32, and has no value."""
    scores_HRC = torch.bmm(q_HRK, seen.keys.transpose(1, 2)).float().mul_(scale)
    scores_HRC.masked_fill_(~mask_RC, float("-inf"))
    weights_HRC = torch.softmax(torch.cat([scores_HRC, sinks_HR[..., None]], dim=-1), dim=-1)
    return torch.bmm(weights_HRC[..., :-1].to(seen.values.dtype), seen.values)
