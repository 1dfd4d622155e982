"""Families with Mamba-2: Granite 4 H, Bamba, Falcon-H1, Nemotron-H."""

import math
from dataclasses import replace

from prfaas.engine.families.attention import gqa, head_dim_of
from prfaas.engine.families.delta import of_kinds
from prfaas.engine.families.experts import EXPERTS_PER_TOKEN, NUM_EXPERTS, dense
from prfaas.engine.families.fields import (
    ACTIVATION_NAMES,
    FULL,
    HYBRID,
    LAYER_TYPE_ALIASES,
    LINEAR,
    MLP,
    MOE,
    Fields,
    bad_layer_type,
)
from prfaas.engine.families.ropes import rope
from prfaas.engine.ffn_spec import FfnSpec, MlpSpec, MoeSpec
from prfaas.engine.mixer_spec import Mamba2Spec, MixerSpec, NoMixerSpec, ParallelSpec
from prfaas.engine.model_spec import ModelSpec, ResidualSpec
from prfaas.errors import ConfigError

INFINITY = math.inf
WRITTEN_INFINITY = {"__float__": "Infinity"}
"""What transformers writes, as JSON has no infinity."""
NEMOTRON_PATTERN = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}


def mamba2(fields: Fields, *, inner_dim: int | None = None) -> Mamba2Spec:
    """Return the Mamba-2 layer that the mamba_* fields describe."""
    if inner_dim is None:
        inner_dim = int(fields.number("mamba_expand", default=2) * fields.integer("hidden_size"))
    num_heads = fields.integer("mamba_n_heads")
    head_dim = inner_dim // num_heads
    if fields.get("mamba_d_head") not in (None, "auto"):
        head_dim = fields.integer("mamba_d_head")
    if num_heads * head_dim != inner_dim:
        raise ConfigError(
            f"mamba_n_heads={num_heads} of mamba_d_head={head_dim} do not fill {inner_dim}"
        )
    return Mamba2Spec(
        num_heads=num_heads,
        head_dim=head_dim,
        state_dim=fields.integer("mamba_d_state"),
        num_groups=fields.integer("mamba_n_groups", default=1),
        conv_width=fields.integer("mamba_d_conv", default=4),
        has_conv_bias=fields.flag("mamba_conv_bias", default=True),
        has_in_bias=fields.flag("mamba_proj_bias"),
        has_out_bias=fields.flag("mamba_proj_bias"),
        dt_limit=_dt_limit(fields),
    )


def _dt_limit(fields: Fields) -> tuple[float, float]:
    """The bounds of dt; transformers' Nemotron-H clamps a prompt at time_step_min, vLLM does not."""
    limit = fields.items("time_step_limit", "mamba_dt_limit")
    if limit is None:
        return (0.0, INFINITY)
    bounds = [INFINITY if bound == WRITTEN_INFINITY else bound for bound in limit]
    if len(bounds) != 2 or not all(isinstance(bound, int | float) for bound in bounds):
        raise ConfigError(f"time_step_limit={limit!r} is not two numbers")
    return (float(bounds[0]), float(bounds[1]))


def granite(fields: Fields) -> ModelSpec:
    """Return a Granite 4 H: Mamba-2 and attention, experts beside a shared feed-forward."""
    kinds = fields.layer_types(lambda _: LINEAR)
    fields.refuse_unless("position_embedding_type", "rope", "nope")
    has_rope = fields.get("position_embedding_type") == "rope"
    attention = gqa(
        fields,
        rope(fields, head_dim_of(fields)) if has_rope else None,
        scale=fields.number("attention_multiplier", default=1.0),
    )
    layers = of_kinds(kinds, full=attention, linear=mamba2(fields))
    residual = ResidualSpec(add_scale=fields.number("residual_multiplier", default=1.0))
    return fields.model(
        layers=layers,
        ffns=[_granite_ffn(fields)] * len(layers),
        embedding_scale=fields.number("embedding_multiplier", default=1.0),
        mixer_residual=residual,
        ffn_residual=residual,
        logits_scale=1 / fields.number("logits_scaling", default=1.0),
    )


def _granite_ffn(fields: Fields) -> FfnSpec:
    shared = fields.integer("shared_intermediate_size")
    if not fields.count(*NUM_EXPERTS):
        return MlpSpec(intermediate_size=shared)
    return MoeSpec(
        num_experts=fields.integer(*NUM_EXPERTS),
        experts_per_token=fields.integer(*EXPERTS_PER_TOKEN),
        intermediate_size=fields.integer("intermediate_size"),
        shared_size=shared,
        router="top_softmax",
    )


def bamba(fields: Fields) -> ModelSpec:
    """Return a Bamba: Mamba-2 but for the layers of attn_layer_indices."""
    full = set(fields.items("attn_layer_indices") or ())
    kinds = fields.layer_types(lambda layer: FULL if layer in full else LINEAR)
    attention = gqa(fields, rope(fields, head_dim_of(fields), default_part=0.5))
    layers = of_kinds(kinds, full=attention, linear=mamba2(fields))
    return fields.model(layers=layers, ffns=[dense(fields)] * len(layers))


def falcon_h1(fields: Fields) -> ModelSpec:
    """Return a Falcon-H1: attention and Mamba-2 side by side in every layer."""
    for kind in fields.layer_types(lambda _: HYBRID):
        if kind != HYBRID:
            raise bad_layer_type(kind)
    is_normed = fields.flag("mamba_rms_norm")
    norm_first = fields.flag("mamba_norm_before_gate", default=True)
    scales = fields.numbers("ssm_multipliers", 5)
    layer = ParallelSpec(
        attention=gqa(fields, rope(fields, head_dim_of(fields))),
        mamba=replace(
            mamba2(fields, inner_dim=fields.optional_integer("mamba_d_ssm")),
            has_out_bias=fields.flag("projectors_bias"),
            gated_norm=("norm_first" if norm_first else "gate_first") if is_normed else None,
        ),
        attention_in_scale=fields.number("attention_in_multiplier", default=1.0),
        attention_out_scale=fields.number("attention_out_multiplier", default=1.0),
        key_scale=fields.number("key_multiplier", default=1.0),
        mamba_in_scale=fields.number("ssm_in_multiplier", default=1.0),
        mamba_out_scale=fields.number("ssm_out_multiplier", default=1.0),
        mamba_scales=(1.0,) * 5 if scales is None else scales,
    )
    num_layers = fields.num_layers()
    gate_scale, down_scale = fields.numbers("mlp_multipliers", 2) or (1.0, 1.0)
    mlp = MlpSpec(
        intermediate_size=fields.integer("intermediate_size"),
        has_bias=fields.flag("mlp_bias"),
        gate_scale=gate_scale,
        down_scale=down_scale,
    )
    return fields.model(
        layers=[layer] * num_layers,
        ffns=[mlp] * num_layers,
        embedding_scale=fields.number("embedding_multiplier", default=1.0),
        logits_scale=fields.number("lm_head_multiplier", default=1.0),
    )


def nemotron_h(fields: Fields) -> ModelSpec:
    """Return a Nemotron-H, whose layers are each a mixer or a feed-forward, never both."""
    kinds = _nemotron_kinds(fields)
    fields.refuse_unless("moe_shared_expert_overlap", True)
    fields.refuse_unless("mamba_hidden_act", *ACTIVATION_NAMES["silu"])
    mamba = Mamba2Spec(
        num_heads=fields.integer("mamba_num_heads"),
        head_dim=fields.integer("mamba_head_dim"),
        state_dim=fields.integer("ssm_state_size"),
        num_groups=fields.integer("n_groups", "mamba_n_groups", default=8),
        conv_width=fields.integer("conv_kernel", "mamba_d_conv", default=4),
        has_conv_bias=fields.flag("use_conv_bias", "mamba_conv_bias", default=True),
        has_in_bias=fields.flag("use_bias"),
        has_out_bias=fields.flag("use_bias"),
        dt_limit=_dt_limit(fields),
    )
    fields.refuse_unless("attention_bias", False)
    head_dim = fields.integer("head_dim", "attention_head_dim", default=128)
    attention = gqa(fields, None, head_dim=head_dim, has_bias=False)
    mixers: dict[str, MixerSpec] = {FULL: attention, LINEAR: mamba}
    return fields.model(
        layers=[mixers.get(kind, NoMixerSpec()) for kind in kinds],
        ffns=[_nemotron_ffn(fields, kind) for kind in kinds],
        eps_names=("layer_norm_epsilon", "rms_norm_eps"),
        activation="relu2",
        activation_field="mlp_hidden_act",
    )


def _nemotron_kinds(fields: Fields) -> list[str]:
    """The layer types; num_hidden_layers, where it is written, may be out of date."""
    types = fields.items("layer_types", "layers_block_type")
    if types is None:
        pattern = str(fields.get("hybrid_override_pattern") or "")
        types = [NEMOTRON_PATTERN.get(mark, mark) for mark in pattern]
    kinds = [LAYER_TYPE_ALIASES.get(str(kind), str(kind)) for kind in types]
    for kind in kinds:
        if kind not in NEMOTRON_PATTERN.values():
            raise bad_layer_type(kind)
    if not kinds:
        raise ConfigError("hybrid_override_pattern=None does not name the layers")
    return kinds


def _nemotron_ffn(fields: Fields, kind: str) -> FfnSpec | None:
    if kind == MLP:
        size = fields.integer("intermediate_size")
        return MlpSpec(intermediate_size=size, is_gated=False, has_bias=fields.flag("mlp_bias"))
    if kind != MOE:
        return None
    fields.refuse_unless("mlp_bias", False)
    return MoeSpec(
        num_experts=fields.integer(*NUM_EXPERTS),
        experts_per_token=fields.integer(*EXPERTS_PER_TOKEN),
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_size=fields.integer("moe_shared_expert_intermediate_size"),
        router="sigmoid",
        is_renormalised=fields.flag("norm_topk_prob", default=True),
        routed_scale=fields.number("routed_scaling_factor", default=1.0),
        num_groups=fields.integer("n_group", default=1),
        groups_per_token=fields.integer("topk_group", default=1),
        is_gated=False,
        latent_size=fields.optional_integer("moe_latent_size"),
    )
