"""The models that this engine computes, from Hugging Face's config.json or GGUF metadata; torch-free.

`describe` reads the config.json of every family that prfaas knows; ModelConfig is a description
whose layers this engine computes. A field that asks for something else is refused by name, never
ignored.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prfaas.cache.spec import CacheLayout, FullSpec, GroupSpec, WindowSpec
from prfaas.engine import gguf_config
from prfaas.engine.families.registry import describe
from prfaas.engine.ffn_spec import MlpSpec, MoeSpec
from prfaas.engine.mixer_spec import GqaSpec, KvDtype, MixerSpec, bytes_per_token
from prfaas.engine.model_spec import ModelSpec, layers_kv_bytes
from prfaas.engine.rope_spec import YarnScaling
from prfaas.errors import ConfigError

__all__ = [
    "Activation",
    "GqaSpec",
    "LayerSpec",
    "ModelConfig",
    "bytes_per_token",
    "describe",
    "kv_bytes",
    "kv_groups",
    "uncomputed",
]

Activation = Literal["silu", "gelu_tanh"]
LAYOUT_VERSION = "gqa-kv-htd-pairs-1"
"""Names the bytes of a page: K then V, each [kv heads, tokens, head dim], K in rope.pair_order."""
LayerSpec = GqaSpec
"""The mixers that this engine computes; a member of MixerSpec joins when its kernel does."""


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
        spec = describe(config)
        if missing := uncomputed(spec):
            raise ConfigError(
                f"model_type {spec.model_type!r} describes {', '.join(missing)}, which this engine "
                "does not compute yet"
            )
        if spec.unsupported:
            raise ConfigError(f"not supported: {', '.join(spec.unsupported)}")
        (ffn,) = {ffn for ffn in spec.ffns if isinstance(ffn, MlpSpec)}
        return cls(
            model_type=spec.model_type,
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            intermediate_size=ffn.intermediate_size,
            layers=tuple(layer for layer in spec.layers if isinstance(layer, GqaSpec)),
            max_context_tokens=spec.max_context_tokens,
            norm_eps=spec.norm_eps,
            activation="gelu_tanh" if spec.activation == "gelu_tanh" else "silu",
            has_unit_offset_norms=spec.has_unit_offset_norms,
            has_post_norms=spec.has_post_norms,
            embedding_scale=spec.embedding_scale,
            has_tied_embeddings=spec.has_tied_embeddings,
            bos_token_id=spec.bos_token_id,
            eos_token_ids=spec.eos_token_ids,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> "ModelConfig":
        """Return the model that a GGUF file's metadata describes; raises like from_hf."""
        return cls.from_hf(gguf_config.to_hf_config(metadata))


def uncomputed(spec: ModelSpec) -> tuple[str, ...]:
    """Return what of the description this engine does not compute yet, in words, each once."""
    mixers = sorted({layer.mixer for layer in spec.layers if not isinstance(layer, GqaSpec)})
    found = [f"{', '.join(mixers)} layers"] if mixers else []
    found += [word for layer in spec.layers for word in _uncomputed_attention(layer)]
    if any(isinstance(ffn, MoeSpec) for ffn in spec.ffns):
        found.append("routed experts")
    if any(isinstance(ffn, MlpSpec) and ffn.has_bias for ffn in spec.ffns):
        found.append("feed-forward biases (mlp_bias)")
    if (spec.residual_scale, spec.logits_scale) != (1.0, 1.0):
        found.append("scaled residuals or logits")
    return tuple(dict.fromkeys(found))


def _uncomputed_attention(layer: MixerSpec) -> Iterator[str]:
    if not isinstance(layer, GqaSpec):
        return
    if layer.has_sinks:
        yield "attention sinks"
    if layer.has_output_gate:
        yield "gated attention"
    if layer.has_bias:
        yield "projection biases (attention_bias)"
    if layer.value_dim != layer.head_dim or layer.value_scale != 1.0:
        yield "values of another length or scale than keys"
    if layer.has_qk_norm and layer.qk_norm_span != "head":
        yield "q and k normed over all heads"
    if layer.rope is None:
        yield "attention without positions"
        return
    if layer.rope.rotary_dim is not None:
        yield "rotation of a part of the head (partial_rotary_factor)"
    if isinstance(layer.rope.scaling, YarnScaling):
        yield "rope type 'yarn'"


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


def kv_bytes(model: ModelConfig | ModelSpec, num_tokens: int, kv_dtype: KvDtype = "float32") -> int:
    """Return S_kv(num_tokens): bytes needed to continue a sequence of that many tokens elsewhere."""
    return layers_kv_bytes(model.layers, num_tokens, kv_dtype)
