"""Families with a delta rule: Qwen3-Next, Qwen3.5, OLMo hybrid, Kimi Linear, Ling 3."""

import math

from prfaas.engine.families.attention import gqa, head_dim_of, qwen_ffns
from prfaas.engine.families.experts import dense, dense_first, sigmoid_experts
from prfaas.engine.families.fields import FULL, LINEAR, PRE_NORM, Fields, bad_layer_type
from prfaas.engine.families.ropes import rope
from prfaas.engine.mixer_spec import GdnSpec, KdaSpec, MixerSpec, MlaSpec
from prfaas.engine.model_spec import ModelSpec, ResidualSpec
from prfaas.engine.rope_spec import RopeSpec, YarnScaling
from prfaas.errors import ConfigError

OLMO_FULL = ResidualSpec(has_pre_norm=False, has_post_norm=True)
"""Of OLMo's attention layers; its linear ones norm what goes in."""


def qwen3_next(fields: Fields) -> ModelSpec:
    """Return a Qwen3-Next: Gated DeltaNet and gated attention, experts in every layer."""
    return fields.model(
        layers=_qwen_layers(fields),
        ffns=qwen_ffns(fields, is_renormalised=True),
        has_unit_offset_norms=True,
    )


def qwen3_5(fields: Fields) -> ModelSpec:
    """Return the text part of a dense Qwen3.5."""
    layers = _qwen_layers(fields)
    ffns = [dense(fields)] * len(layers)
    return fields.model(layers=layers, ffns=ffns, has_unit_offset_norms=True)


def _qwen_layers(fields: Fields) -> list[MixerSpec]:
    interval = fields.integer("full_attention_interval", default=4)
    kinds = fields.layer_types(lambda layer: LINEAR if (layer + 1) % interval else FULL)
    head_dim = fields.integer("head_dim", default=256)
    attention = gqa(
        fields,
        rope(fields, head_dim, default_part=0.25),
        head_dim=head_dim,
        has_qk_norm=True,
        has_output_gate=fields.flag("attn_output_gate", default=True),
    )
    linear = GdnSpec(
        num_key_heads=fields.integer("linear_num_key_heads"),
        num_value_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        conv_width=fields.integer("linear_conv_kernel_dim", default=4),
    )
    return of_kinds(kinds, full=attention, linear=linear)


def of_kinds(kinds: list[str], *, full: MixerSpec, linear: MixerSpec) -> list[MixerSpec]:
    """Return a mixer for each layer type; raises ConfigError for a type of neither."""
    mixers = {FULL: full, LINEAR: linear}
    for kind in kinds:
        if kind not in mixers:
            raise bad_layer_type(kind)
    return [mixers[kind] for kind in kinds]


def olmo_hybrid(fields: Fields) -> ModelSpec:
    """Return an OLMo hybrid: Gated DeltaNet with a doubled beta, attention normed afterwards."""
    kinds = fields.layer_types(lambda layer: FULL if layer % 4 == 3 else LINEAR)
    if FULL not in kinds:
        kinds[-1] = FULL
    num_heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    num_key_heads = fields.integer("linear_num_key_heads", default=num_heads)
    key_dim = fields.integer("linear_key_head_dim", default=int(0.75 * hidden / num_key_heads))
    linear = GdnSpec(
        num_key_heads=num_key_heads,
        num_value_heads=fields.integer("linear_num_value_heads", default=num_heads),
        key_dim=key_dim,
        value_dim=fields.integer("linear_value_head_dim", default=2 * key_dim),
        conv_width=fields.integer("linear_conv_kernel_dim", default=4),
        beta_scale=2.0 if fields.flag("linear_allow_neg_eigval", default=True) else 1.0,
        norm_eps=1e-5,
    )
    attention = gqa(fields, _olmo_rope(fields), has_qk_norm=True, qk_norm_span="all_heads")
    layers = of_kinds(kinds, full=attention, linear=linear)
    residuals = [OLMO_FULL if kind == FULL else PRE_NORM for kind in kinds]
    return fields.model(
        layers=layers,
        ffns=[dense(fields)] * len(layers),
        mixer_residual=residuals,
        ffn_residual=residuals,
    )


def _olmo_rope(fields: Fields) -> RopeSpec | None:
    """A theta that is null, as in the released checkpoints, encodes no positions."""
    own = fields.section("rope_parameters") or fields
    return None if own.is_null("rope_theta") else rope(fields, head_dim_of(fields))


def kimi_linear(fields: Fields) -> ModelSpec:
    """Return a Kimi Linear: KDA and latent attention without positions."""
    own = fields.section("linear_attn_config")
    if own is None:
        num_heads, head_dim = fields.integer("linear_num_heads"), fields.integer("linear_head_dim")
        conv_width = fields.integer("linear_conv_kernel_dim", default=4)
    else:
        num_heads, head_dim = own.integer("num_heads"), own.integer("head_dim")
        conv_width = own.integer("short_conv_kernel_size", default=4)
    linear = KdaSpec(
        num_heads=num_heads, head_dim=head_dim, conv_width=conv_width, gate_rank=head_dim
    )
    fields.refuse_unless("mla_use_nope", True)
    # Kimi K3's text configs share the model_type and differ in these.
    fields.refuse_unless("use_full_rank_gate", False)
    fields.refuse_unless("mla_use_output_gate", False)
    if "gate_lower_bound" in fields:
        fields.refuse(f"gate_lower_bound={fields.get('gate_lower_bound')!r}")
    layers = of_kinds(_kimi_kinds(fields, own), full=mla(fields, None), linear=linear)
    return fields.model(
        layers=layers, ffns=dense_first(fields, sigmoid_experts(fields), default_dense=1)
    )


def _kimi_kinds(fields: Fields, own: Fields | None) -> list[str]:
    """The types of the layers; the checkpoint's lists count them from 1."""
    full = None if own is None else own.items("full_attn_layers")
    linear = None if own is None else own.items("kda_layers")
    if full is None or linear is None:
        return fields.layer_types(lambda layer: LINEAR if layer % 4 or layer == 0 else FULL)
    num_layers = fields.num_layers()
    if sorted([*full, *linear]) != list(range(1, num_layers + 1)):
        raise ConfigError(
            f"full_attn_layers and kda_layers do not name the layers 1 to {num_layers} once each"
        )
    return [FULL if layer in full else LINEAR for layer in range(1, num_layers + 1)]


def mla(fields: Fields, rotation: RopeSpec | None, *, has_output_gate: bool = False) -> MlaSpec:
    """Return the latent attention that DeepSeek's fields describe."""
    for name in ("attention_bias", "use_qkv_bias", "use_bias"):
        fields.refuse_unless(name, False)
    nope_dim, rope_dim = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    scale = 1.0 / math.sqrt(nope_dim + rope_dim)
    if rotation is not None and isinstance(rotation.scaling, YarnScaling):
        yarn = rotation.scaling
        scale *= yarn.magnitude(yarn.mscale_all_dim) ** 2 if yarn.mscale_all_dim else 1.0
    return MlaSpec(
        num_heads=fields.integer("num_attention_heads"),
        latent_dim=fields.integer("kv_lora_rank"),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        value_dim=fields.integer("v_head_dim"),
        scale=scale,
        rope=rotation,
        query_rank=fields.optional_integer("q_lora_rank"),
        has_output_gate=has_output_gate,
    )


def ling3(fields: Fields) -> ModelSpec:
    """Return a Ling 3: KDA with a bounded decay and full-rank gates, gated latent attention."""
    group = fields.integer("layer_group_size", default=6)
    kinds = fields.layer_types(lambda layer: LINEAR if (layer + 1) % group else FULL)
    is_bounded = fields.flag("kda_safe_gate", default=True)
    bound = fields.get("kda_lower_bound")
    if bound is not None and not (isinstance(bound, int | float) and -math.inf < bound < 0):
        raise ConfigError(f"kda_lower_bound={bound!r} is not a negative number")
    linear = KdaSpec(
        num_heads=fields.integer("linear_num_heads", "num_attention_heads"),
        head_dim=fields.integer("linear_head_dim", "head_dim"),
        conv_width=fields.integer("short_conv_kernel_size", default=4),
        decay="bounded" if is_bounded else "softplus",
        decay_bound=(-5.0 if bound is None else float(bound)) if is_bounded else None,
    )
    rotation = rope(
        fields,
        fields.integer("qk_rope_head_dim"),
        default_theta=6_000_000.0,
        pairs="neighbours",
    )
    full = mla(fields, rotation, has_output_gate=True)
    moe = sigmoid_experts(fields, num_groups=8, groups_per_token=4)
    return fields.model(
        layers=of_kinds(kinds, full=full, linear=linear),
        ffns=dense_first(fields, moe, default_dense=2),
    )
