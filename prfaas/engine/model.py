"""The decoder: embedding, layers of mixer and feed-forward, final norm and head.

Shapes: T rows, D model dim, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prfaas.cache.spec import CacheLayout
from prfaas.engine.batch import Batch, OnWritten, Rows, Segment
from prfaas.engine.greedy_head import GreedyHead
from prfaas.engine.kv import CPU
from prfaas.engine.kv_groups import kv_groups
from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.linear import Linear, Packing, is_exact, kv_dtype
from prfaas.engine.mixer_spec import KvDtype
from prfaas.engine.model_spec import ModelSpec, ResidualSpec
from prfaas.engine.recording import Recordings
from prfaas.engine.sequence_kv import SequenceKv, capacity_bytes
from prfaas.log import get_logger

__all__ = ["Block", "Embedding", "Model", "Residual", "Segment"]

TEST_STEPS = 2
"""One that is recorded and one that is run from the recording."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """Rows of the embedding table, which on a CPU stays in the mapped checkpoint file."""

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


Mixer = Callable[[Tensor, Rows, int, OnWritten], Tensor]
"""(x_TD, rows, layer, on_written) -> y_TD; calls on_written once what the layer keeps is in place."""
Ffn = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """How one part of a layer joins the residual stream, with the norms that its spec asks for."""

    spec: ResidualSpec
    pre_norm: RmsNorm | None
    post_norm: RmsNorm | None

    def add_to(self, x_TD: Tensor, part: Ffn) -> None:
        """Replace the stream by what it is after `part`, in place."""
        spec = self.spec
        normed_TD = x_TD if self.pre_norm is None else self.pre_norm(x_TD)
        out_TD = part(normed_TD)
        if self.post_norm is not None:
            if spec.keep_scale == 1.0 and not spec.keeps_normed:
                self.post_norm.add_to(x_TD, out_TD, spec.add_scale)
                return
            out_TD = self.post_norm(out_TD)
        if spec.add_scale != 1.0:
            out_TD = out_TD * spec.add_scale
        if spec.keeps_normed:
            x_TD.copy_(normed_TD)
        if spec.keep_scale != 1.0:
            x_TD *= spec.keep_scale
        x_TD += out_TD


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One layer: a mixer, a feed-forward, or one after the other."""

    mixer: Mixer | None
    mixer_residual: Residual | None
    ffn: Ffn | None
    ffn_residual: Residual | None

    def add_to(self, x_TD: Tensor, rows: Rows, layer: int) -> None:
        """Take the residual stream through the layer, in place; tells the batch what is written."""

        def on_written(batch: Batch) -> None:
            batch.on_layer(layer)

        mixer = self.mixer
        if mixer is None:
            rows.each_time(on_written)
        else:
            assert self.mixer_residual is not None
            self.mixer_residual.add_to(x_TD, lambda y_TD: mixer(y_TD, rows, layer, on_written))
        if self.ffn is not None:
            assert self.ffn_residual is not None
            self.ffn_residual.add_to(x_TD, self.ffn)


class Model:
    """A loaded model. One thread at a time calls forward."""

    def __init__(
        self,
        config: ModelSpec,
        *,
        embed_tokens: Embedding,
        layers: Sequence[Block],
        norm: RmsNorm,
        lm_head: Linear,
        greedy_head: GreedyHead | None = None,
        packing: Packing,
        model_fingerprint: str,
        device: torch.device = CPU,
    ) -> None:
        self.config = config
        self.embed_tokens = embed_tokens
        self.layers = tuple(layers)
        self.norm = norm
        self.lm_head = lm_head
        self.greedy_head = greedy_head
        """Where it can tell the largest logit without all of them."""
        self.packing = packing
        self.model_fingerprint = model_fingerprint
        self.device = device
        self.recordings = Recordings(self.layers)
        self.numerics_fingerprint = ""  # set once the self-test passed

    @property
    def is_exact(self) -> bool:
        """Whether a row's bits depend on its sequence's tokens alone."""
        return is_exact(self.packing)

    @property
    def kv_dtype(self) -> KvDtype:
        """What pages hold K, V and convolution rows in."""
        return kv_dtype(self.packing)

    def layout(self, block_tokens: int) -> CacheLayout:
        """Return the groups of layers whose KV is cached together."""
        return kv_groups(self.config.layers, block_tokens, self.kv_dtype)

    def new_kv(self, *, capacity_tokens: int, block_tokens: int = 64) -> SequenceKv:
        """Return an empty working copy for a sequence of up to `capacity_tokens`."""
        return SequenceKv(
            self.config.layers,
            capacity_tokens=capacity_tokens,
            block_tokens=block_tokens,
            kv_dtype=self.kv_dtype,
            device=self.device,
        )

    def kv_capacity_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the working copy of a sequence of up to `num_tokens`."""
        return capacity_bytes(self.config.layers, num_tokens, kv_dtype=self.kv_dtype)

    @torch.no_grad()
    def forward(
        self, segments: Sequence[Segment], *, on_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """Run every segment's tokens; return float32 logits on the CPU, [sum of num_logits, V].

        Segments must be of different sequences. A row's bits depend on its sequence's tokens alone,
        if the model is exact.
        Each kv.num_tokens advances when forward returns; after an error none has, and the same
        forward may be run again.

        Args:
            segments: at least one.
            on_layer: called with l once layer l wrote every segment's K and V, which may be
                exported from then on.
        """
        return self._logits(self._run(segments, on_layer))

    @torch.no_grad()
    def largest(
        self, segments: Sequence[Segment], *, on_layer: Callable[[int], None] | None = None
    ) -> list[int] | Tensor:
        """Run every segment's tokens as `forward` does; return the ids of the largest logits.

        Of equals it is the smallest id. Where only the logits can tell, they are returned.
        """
        if self.greedy_head is None:
            return self.forward(segments, on_layer=on_layer)
        rows_TD = self._run(segments, on_layer)
        ids = self.greedy_head.largest(rows_TD) if len(rows_TD) else []
        return self._logits(rows_TD) if ids is None else ids

    def _run(self, segments: Sequence[Segment], on_layer: Callable[[int], None] | None) -> Tensor:
        """Run every segment's tokens; return what the head takes where num_logits is 1."""
        for segment in segments:
            segment.kv.begin_forward(segment.snapshots)
        batch = Batch(segments, self.device, on_layer=on_layer)
        x_TD = self.recordings.run(self.embed_tokens(batch.tokens_T), batch, self._through_layers)
        rows = torch.tensor(batch.logit_rows, dtype=torch.int64, device=x_TD.device)
        rows_TD = self.norm(x_TD[rows]) if len(rows) else x_TD[:0]
        for segment in segments:
            segment.kv.num_tokens += len(segment.tokens)
        return rows_TD

    def _through_layers(self, x_TD: Tensor, rows: Rows) -> None:
        for index, layer in enumerate(self.layers):
            layer.add_to(x_TD, rows, index)

    @torch.no_grad()
    def choose_recordings(self) -> None:
        """Keep recordings if steps that are run from one have the bits of plain ones; else none is made.

        A few layers' worth of work: two sequences of unlike lengths, which change places.
        """
        kvs = [self.new_kv(capacity_tokens=TEST_STEPS + 4) for _ in range(2)]
        recordings = Recordings(self.layers, num_plain=0)
        self._through_sequences(kvs, (3, 1), None)
        for _ in range(TEST_STEPS):
            kvs.reverse()
            plain_TD = self._through_sequences(kvs, (1, 1), None, is_kept=False)
            recorded_TD = self._through_sequences(kvs, (1, 1), recordings)
            if not torch.equal(plain_TD, recorded_TD):
                get_logger().warning("recordings.inexact")
                self.recordings = Recordings(self.layers, max_bytes=0)
                return

    def _through_sequences(
        self,
        kvs: Sequence[SequenceKv],
        counts: Sequence[int],
        recordings: Recordings | None,
        *,
        is_kept: bool = True,
    ) -> Tensor:
        """Return the stream after so many next tokens of each; they advance if it is kept."""
        segments = [
            Segment(kv=kv, tokens=range(count), num_logits=0)
            for kv, count in zip(kvs, counts, strict=True)
        ]
        for segment in segments:
            segment.kv.begin_forward(())
        batch = Batch(segments, self.device)
        x_TD = self.embed_tokens(batch.tokens_T)
        if recordings is None:
            self._through_layers(x_TD, Rows(batch))
        else:
            x_TD = recordings.run(x_TD, batch, self._through_layers).clone()
        for segment in segments if is_kept else ():
            segment.kv.num_tokens += len(segment.tokens)
        return x_TD

    def _logits(self, rows_TD: Tensor) -> Tensor:
        """Return float32 logits on the CPU of the rows that `_run` returned, [T, V]."""
        if not len(rows_TD):
            return torch.empty(0, self.config.vocab_size)
        logits_TV = self.lm_head(rows_TD).cpu()
        scale = self.config.logits_scale
        return logits_TV if scale == 1.0 else logits_TV.mul_(scale)
