"""Families of attention alone: Llama, Qwen3, Gemma 3, MiniMax-M2, MiMo-V2-Flash, gpt-oss."""

import math
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack

from prfaas.engine.families.experts import (
    EXPERTS_PER_TOKEN,
    NUM_EXPERTS,
    by_layer,
    dense,
    dense_first,
    sigmoid_experts,
    softmax_experts,
)
from prfaas.engine.families.fields import FULL, SLIDING, Fields, bad_layer_type
from prfaas.engine.families.ropes import rope, ropes_by_layer_type
from prfaas.engine.ffn_spec import FfnSpec, MoeSpec
from prfaas.engine.mixer_spec import GqaSpec
from prfaas.engine.model_spec import ModelSpec, ResidualSpec
from prfaas.engine.rope_spec import RopeSpec, YarnScaling
from prfaas.errors import ConfigError

GEMMA3_DEFAULTS: dict[str, Any] = {
    # Google's multimodal checkpoints leave out text_config fields that equal these defaults.
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
DEFAULT_SLIDING_WINDOW_PATTERN = 6
CLAMP, CLAMPED_SLOPE = 7.0, 1.702
"""Of gpt-oss's feed-forwards, whatever the config says; as layers.mlp computes them."""
GPT_OSS_YARN = YarnScaling(factor=32.0, original_context_tokens=4096, is_truncated=False)


class GqaChanges(TypedDict, total=False):
    """What a family may set itself in GqaSpec; the other fields are read."""

    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    value_scale: float
    scale: float
    window_tokens: int | None
    has_qk_norm: bool
    qk_norm_span: Literal["head", "all_heads"]
    has_sinks: bool
    has_output_gate: bool
    has_bias: bool


def gqa(fields: Fields, rotation: RopeSpec | None, **changes: Unpack[GqaChanges]) -> GqaSpec:
    """Return the grouped-query attention that the usual fields describe, but for `changes`."""
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    head_dim = changes.get("head_dim") or head_dim_of(fields)
    layer = GqaSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=1.0 / math.sqrt(head_dim),
        rope=rotation,
        has_bias=fields.flag("attention_bias"),
    )
    layer = replace(layer, **changes)
    if layer.num_heads % layer.num_kv_heads:
        raise ConfigError(
            f"{layer.num_heads} heads cannot share {layer.num_kv_heads} key-value heads"
        )
    return layer


def head_dim_of(fields: Fields) -> int:
    """Return head_dim, by default an equal share of the hidden size."""
    share = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    return fields.integer("head_dim", default=share)


def window_tokens(fields: Fields, kind: str) -> int | None:
    """Return the window of a layer of this type; raises ConfigError for types without attention."""
    if kind == FULL:
        return None
    if kind != SLIDING:
        raise bad_layer_type(kind)
    return fields.integer("sliding_window")


def llama(fields: Fields) -> ModelSpec:
    """Return a Llama: full attention in every layer."""
    rotation = rope(fields, head_dim_of(fields))
    kinds = fields.layer_types(lambda _: FULL)
    layers = [gqa(fields, rotation, window_tokens=window_tokens(fields, kind)) for kind in kinds]
    return fields.model(layers=layers, ffns=[dense(fields)] * len(layers))


def qwen3(fields: Fields) -> ModelSpec:
    """Return a dense Qwen3."""
    layers = _qwen3_layers(fields)
    return fields.model(layers=layers, ffns=[dense(fields)] * len(layers))


def qwen3_moe(fields: Fields) -> ModelSpec:
    """Return a Qwen3 with experts."""
    return fields.model(layers=_qwen3_layers(fields), ffns=qwen_ffns(fields, is_renormalised=False))


def qwen_ffns(fields: Fields, *, is_renormalised: bool) -> list[FfnSpec]:
    """Return experts every decoder_sparse_step layers, but for mlp_only_layers."""
    moe = softmax_experts(fields, is_renormalised=is_renormalised)
    only_mlp = set(fields.items("mlp_only_layers") or ())
    step = fields.integer("decoder_sparse_step", default=1)
    return by_layer(fields, moe, lambda i: i not in only_mlp and (i + 1) % step == 0)


def _qwen3_layers(fields: Fields) -> list[GqaSpec]:
    first_sliding = fields.num_layers()
    if fields.flag("use_sliding_window"):
        first_sliding = fields.integer("max_window_layers", default=28)
    kinds = fields.layer_types(lambda layer: SLIDING if layer >= first_sliding else FULL)
    rotation = rope(fields, head_dim_of(fields))
    return [
        gqa(fields, rotation, window_tokens=window_tokens(fields, kind), has_qk_norm=True)
        for kind in kinds
    ]


def gemma3(fields: Fields) -> ModelSpec:
    """Return a Gemma 3: five windows to a full layer, and norms on both sides."""
    fields = fields.with_defaults(GEMMA3_DEFAULTS)
    period = fields.integer(
        "sliding_window_pattern", "_sliding_window_pattern", default=DEFAULT_SLIDING_WINDOW_PATTERN
    )
    kinds = fields.layer_types(lambda layer: SLIDING if (layer + 1) % period else FULL)
    ropes = ropes_by_layer_type(
        fields, head_dim_of(fields), sliding_theta=fields.number("rope_local_base_freq")
    )
    scale = 1.0 / math.sqrt(fields.number("query_pre_attn_scalar"))
    layers = []
    for kind in kinds:
        window = window_tokens(fields, kind)
        layers.append(gqa(fields, ropes[kind], scale=scale, window_tokens=window, has_qk_norm=True))
    return fields.model(
        layers=layers,
        ffns=[dense(fields)] * len(layers),
        mixer_residual=ResidualSpec(has_post_norm=True),
        ffn_residual=ResidualSpec(has_post_norm=True),
        activation="gelu_tanh",
        activation_field="hidden_activation",
        has_unit_offset_norms=True,
        # transformers rounds the factor to the dtype of the embedding, here float32.
        embedding_scale=math.sqrt(fields.integer("hidden_size")),
    )


def minimax_m2(fields: Fields) -> ModelSpec:
    """Return a MiniMax-M2 or M2.5: full attention, q and k normed over all heads at once."""
    if any(kind != 1 for kind in fields.items("attn_type_list") or ()):
        fields.refuse("attn_type_list with other than full attention")
    fields.refuse_unless("shared_intermediate_size", 0)
    fields.refuse_unless("qk_norm_type", "per_layer")
    fields.refuse_unless("scoring_func", "sigmoid")
    rotation = rope(fields, head_dim_of(fields), default_theta=5_000_000.0)
    layer = gqa(
        fields,
        rotation,
        has_qk_norm=fields.flag("use_qk_norm", default=True),
        qk_norm_span="all_heads",
    )
    moe = MoeSpec(
        num_experts=fields.integer(*NUM_EXPERTS),
        experts_per_token=fields.integer(*EXPERTS_PER_TOKEN),
        intermediate_size=fields.integer("intermediate_size"),
        router="sigmoid",
    )
    num_layers = fields.num_layers()
    return fields.model(layers=[layer] * num_layers, ffns=[moe] * num_layers)


def mimo_v2_flash(fields: Fields) -> ModelSpec:
    """Return a MiMo-V2-Flash: windows with sinks and more KV heads, values shorter than keys."""
    head_dim = head_dim_of(fields)
    ropes = ropes_by_layer_type(
        fields,
        head_dim,
        default_theta=5_000_000.0,
        sliding_theta=fields.number("swa_rope_theta", default=10_000.0),
        default_part=0.334,
    )
    pattern = fields.items("hybrid_layer_pattern")
    if pattern is not None and len(pattern) != fields.num_layers():
        raise ConfigError(
            f"hybrid_layer_pattern names {len(pattern)} of {fields.num_layers()} layers"
        )
    kinds = fields.layer_types(
        lambda layer: (
            (FULL if layer == 0 or (layer + 1) % 6 == 0 else SLIDING)
            if pattern is None
            else (SLIDING if pattern[layer] else FULL)
        )
    )
    for name in ("swa_num_attention_heads", "swa_head_dim", "swa_v_head_dim"):
        fields.refuse_unless(name, fields.get(name.removeprefix("swa_")))
    layers = [_mimo_layer(fields, ropes[kind], kind) for kind in kinds]
    return fields.model(
        layers=layers,
        ffns=dense_first(fields, sigmoid_experts(fields, default_scale=1.0), default_dense=1),
        eps_names=("rms_norm_eps", "layernorm_epsilon"),
    )


def _mimo_layer(fields: Fields, rotation: RopeSpec, kind: str) -> GqaSpec:
    is_window = kind == SLIDING
    num_kv_heads = fields.integer("num_key_value_heads")
    if is_window:
        # transformers' own class has no field for it and doubles.
        num_kv_heads = fields.integer("swa_num_key_value_heads", default=2 * num_kv_heads)
    window = None
    if (size := fields.optional_integer("sliding_window_size")) is None:
        window = window_tokens(fields, kind)
    elif is_window:
        window = size + 1  # the hub's field counts the tokens before the query
    return gqa(
        fields,
        rotation,
        num_kv_heads=num_kv_heads,
        value_head_dim=fields.integer("v_head_dim"),
        value_scale=fields.number("attention_value_scale", default=0.707),
        window_tokens=window,
        has_sinks=fields.flag(
            "add_swa_attention_sink_bias" if is_window else "add_full_attention_sink_bias",
            default=is_window,
        ),
    )


def gpt_oss(fields: Fields) -> ModelSpec:
    """Return a gpt-oss: windows and full layers in turn, sinks and biases everywhere."""
    fields.refuse_unless("swiglu_limit", CLAMP)
    fields.refuse_unless("swiglu_alpha", CLAMPED_SLOPE)
    head_dim = head_dim_of(fields)
    rotation = rope(fields, head_dim, default_theta=150_000.0)
    if "rope_parameters" not in fields and "rope_scaling" not in fields:
        rotation = RopeSpec(theta=rotation.theta, scaling=GPT_OSS_YARN)
    kinds = fields.layer_types(lambda layer: FULL if layer % 2 else SLIDING)
    layers = [
        gqa(
            fields,
            rotation,
            window_tokens=window_tokens(fields, kind),
            has_sinks=True,
            has_bias=fields.flag("attention_bias", default=True),
        )
        for kind in kinds
    ]
    moe = MoeSpec(
        num_experts=fields.integer(*NUM_EXPERTS),
        experts_per_token=fields.integer(*EXPERTS_PER_TOKEN),
        intermediate_size=fields.integer("intermediate_size"),
        router="top_softmax",
        has_bias=True,
    )
    return fields.model(layers=layers, ffns=[moe] * len(layers), activation="clamped_silu")
