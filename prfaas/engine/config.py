"""What a model is made of, normalised from Hugging Face's config.json or GGUF metadata; torch-free.

A model is a stack of layers, each a mixer (how tokens see each other) and a feed-forward part.
Everything that differs between layers is in a LayerSpec; a field of a checkpoint that this engine
does not compute is refused by name, never ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prfaas.cache.spec import CacheLayout, FullSpec, GroupSpec, WindowSpec
from prfaas.engine import gguf_config, hf_config
from prfaas.engine.rope_spec import RopeSpec

Activation = Literal["silu", "gelu_tanh"]
KvDtype = Literal["float32"]
KV_DTYPE_BYTES: dict[str, int] = {"float32": 4}
LAYOUT_VERSION = "gqa-kv-htd-pairs-1"
"""Names the bytes of a page: K then V, each [kv heads, tokens, head dim], K in rope.pair_order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaSpec:
    """Grouped-query attention, over the whole context or a sliding window."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Multiplies q.k before the softmax."""
    rope: RopeSpec
    window_tokens: int | None = None
    """A query sees itself and the window_tokens - 1 tokens before it; None: all before it."""
    has_qk_norm: bool = False
    """RMS norm of each head of q and k, before rope."""
    mixer: Literal["gqa"] = "gqa"

    @property
    def values_per_token(self) -> int:
        """Numbers kept for each token: K and V of every KV head."""
        return 2 * self.num_kv_heads * self.head_dim

    def kept_tokens(self, num_tokens: int) -> int:
        """Tokens whose K and V are needed to go on after `num_tokens`."""
        return num_tokens if self.window_tokens is None else min(num_tokens, self.window_tokens - 1)


LayerSpec = GqaSpec
"""A union with one member for each mixer; gqa is the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model that this engine can run."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    max_context_tokens: int
    norm_eps: float
    activation: Activation
    has_unit_offset_norms: bool = False
    """Norms multiply by 1 + weight (Gemma)."""
    has_post_norms: bool = False
    """Mixer and feed-forward outputs are normed before they are added (Gemma)."""
    embedding_scale: float = 1.0
    has_tied_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Return the model that a config.json describes.

        Raises:
            ConfigError: an unknown architecture, a missing field, or a feature not computed here.
        """
        fields = hf_config.parse(config)
        layers = tuple(
            GqaSpec(
                num_heads=fields.num_heads,
                num_kv_heads=fields.num_kv_heads,
                head_dim=fields.head_dim,
                scale=fields.scale,
                rope=layer.rope,
                window_tokens=layer.window_tokens,
                has_qk_norm=fields.has_qk_norm,
            )
            for layer in fields.layers
        )
        is_gemma = fields.model_type == "gemma3_text"
        return cls(
            model_type=fields.model_type,
            vocab_size=fields.vocab_size,
            hidden_size=fields.hidden_size,
            intermediate_size=fields.intermediate_size,
            layers=layers,
            max_context_tokens=fields.max_context_tokens,
            norm_eps=fields.norm_eps,
            activation="gelu_tanh" if is_gemma else "silu",
            has_unit_offset_norms=is_gemma,
            has_post_norms=is_gemma,
            # transformers rounds the factor to the dtype of the embedding, here float32.
            embedding_scale=fields.hidden_size**0.5 if is_gemma else 1.0,
            has_tied_embeddings=fields.has_tied_embeddings,
            bos_token_id=fields.bos_token_id,
            eos_token_ids=fields.eos_token_ids,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> "ModelConfig":
        """Return the model that a GGUF file's metadata describes; raises like from_hf."""
        return cls.from_hf(gguf_config.to_hf_config(metadata))


def bytes_per_token(layer: LayerSpec, kv_dtype: str) -> int:
    """Bytes of K and V that one token adds to one layer."""
    return layer.values_per_token * KV_DTYPE_BYTES[kv_dtype]


def kv_groups(config: ModelConfig, block_tokens: int, kv_dtype: KvDtype = "float32") -> CacheLayout:
    """Return the cache layout of the model: layers of one window and page size share a group.

    Groups stand in the order of their first layer with full attention first, whose blocks decide
    most hits.
    """
    members: dict[tuple[int | None, int], list[int]] = {}
    for index, layer in enumerate(config.layers):
        key = (layer.window_tokens, block_tokens * bytes_per_token(layer, kv_dtype))
        members.setdefault(key, []).append(index)
    groups: list[GroupSpec] = []
    for (window_tokens, page_bytes), layers in sorted(
        members.items(), key=lambda item: (item[0][0] is not None, item[1][0])
    ):
        if window_tokens is None:
            name = f"full-{page_bytes // block_tokens}"
            groups.append(FullSpec(name=name, layers=tuple(layers), page_bytes=page_bytes))
        else:
            groups.append(
                WindowSpec(
                    name=f"window{window_tokens}-{page_bytes // block_tokens}",
                    layers=tuple(layers),
                    page_bytes=page_bytes,
                    window_tokens=window_tokens,
                )
            )
    return CacheLayout(
        block_tokens=block_tokens, groups=tuple(groups), layout_version=LAYOUT_VERSION
    )


def kv_bytes(config: ModelConfig, num_tokens: int, kv_dtype: KvDtype = "float32") -> int:
    """Return S_kv(num_tokens): bytes needed to continue a sequence of that many tokens elsewhere.

    Full attention keeps every token, a window of W the last W - 1 (models.md §2, "Bytes per
    request").
    """
    return sum(
        layer.kept_tokens(num_tokens) * bytes_per_token(layer, kv_dtype) for layer in config.layers
    )
