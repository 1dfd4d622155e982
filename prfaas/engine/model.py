"""The decoder: embedding, layers of mixer and feed-forward, final norm and head.

Attribute names follow the Hugging Face checkpoint. Shapes: T rows, D model dim, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from prfaas.cache.spec import CacheLayout
from prfaas.engine.batch import Batch, Segment
from prfaas.engine.config import ModelConfig, kv_groups
from prfaas.engine.layers.gqa import GqaMixer
from prfaas.engine.layers.mlp import GatedMlp
from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.linear import Linear, Packing, padded_rows
from prfaas.engine.sequence_kv import SequenceKv, capacity_bytes

__all__ = ["Block", "Embedding", "Model", "Segment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """Rows of the embedding table, which stays in the mapped checkpoint file."""

    weight: Tensor
    """[V, D], of any float dtype."""
    scale: float
    is_half: bool
    """Round to float16 first, as the packed head of a tied checkpoint does."""

    def __call__(self, tokens_T: Tensor) -> Tensor:
        """Return the tokens' rows, scaled, as new float32 memory."""
        rows_TD = self.weight[tokens_T]
        if self.is_half:
            rows_TD = rows_TD.half()
        rows_TD = rows_TD.float()
        return rows_TD if self.scale == 1.0 else rows_TD.mul_(self.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One layer. `post_*` norms apply to what is added to the residual stream, if present."""

    input_layernorm: RmsNorm
    self_attn: GqaMixer
    post_attention_norm: RmsNorm | None
    pre_mlp_norm: RmsNorm
    mlp: GatedMlp
    post_mlp_norm: RmsNorm | None

    def add_to(
        self, x_TD: Tensor, batch: Batch, layer: int, on_written: Callable[[], None]
    ) -> None:
        """Add the layer's outputs to the residual stream in place."""
        mixed_TD = self.self_attn(self.input_layernorm(x_TD), batch, layer, on_written)
        x_TD += mixed_TD if self.post_attention_norm is None else self.post_attention_norm(mixed_TD)
        fed_TD = self.mlp(self.pre_mlp_norm(x_TD))
        x_TD += fed_TD if self.post_mlp_norm is None else self.post_mlp_norm(fed_TD)


class Model:
    """A loaded model. One thread at a time calls forward."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embed_tokens: Embedding,
        layers: Sequence[Block],
        norm: RmsNorm,
        lm_head: Linear,
        packing: Packing,
        model_fingerprint: str,
    ) -> None:
        self.config = config
        self.embed_tokens = embed_tokens
        self.layers = tuple(layers)
        self.norm = norm
        self.lm_head = lm_head
        self.packing = packing
        self.model_fingerprint = model_fingerprint
        self.numerics_fingerprint = ""  # set once the self-test passed

    def layout(self, block_tokens: int) -> CacheLayout:
        """Return the groups of layers whose KV is cached together."""
        return kv_groups(self.config, block_tokens)

    def new_kv(self, *, capacity_tokens: int, block_tokens: int = 64) -> SequenceKv:
        """Return an empty working copy for a sequence of up to `capacity_tokens`."""
        return SequenceKv(
            self.config.layers, capacity_tokens=capacity_tokens, block_tokens=block_tokens
        )

    def kv_capacity_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the working copy of a sequence of up to `num_tokens`."""
        return capacity_bytes(self.config.layers, num_tokens)

    @torch.no_grad()
    def forward(
        self, segments: Sequence[Segment], *, on_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """Run every segment's tokens; return float32 logits [sum of num_logits, V].

        Segments must be of different sequences. A row's bits depend on its sequence's tokens alone.
        Each kv.num_tokens advances when forward returns; after an error none has, and the same
        forward may be run again.

        Args:
            segments: at least one.
            on_layer: called with l once layer l wrote every segment's K and V, which may be
                exported from then on.
        """
        for segment in segments:
            segment.kv.begin_forward(segment.snapshots)
        batch = Batch(segments, self.packing)
        x_TD = self.embed_tokens(batch.tokens_T)
        on_layer = on_layer or _ignore
        for index, layer in enumerate(self.layers):
            layer.add_to(x_TD, batch, index, partial(on_layer, index))
        logits_TV = self._logits(x_TD, batch.logit_rows)
        for segment in segments:
            segment.kv.num_tokens += len(segment.tokens)
        return logits_TV

    def _logits(self, x_TD: Tensor, rows: list[int]) -> Tensor:
        if not rows:
            return x_TD.new_empty(0, self.config.vocab_size)
        padding = padded_rows(len(rows), self.packing) - len(rows)
        return self.lm_head(self.norm(x_TD[rows + rows[:1] * padding]))[: len(rows)]


def _ignore(layer: int) -> None:
    """Nobody waits for this layer's K and V."""
