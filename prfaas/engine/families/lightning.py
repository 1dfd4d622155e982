"""Families with lightning attention: MiniMax-01 and M1, Ring and Ling 2.5."""

import math

from prfaas.engine.families.attention import gqa, head_dim_of
from prfaas.engine.families.delta import mla
from prfaas.engine.families.experts import (
    EXPERTS_PER_TOKEN,
    NUM_EXPERTS,
    dense_first,
    sigmoid_experts,
)
from prfaas.engine.families.fields import FULL, LINEAR, Fields, bad_layer_type
from prfaas.engine.families.ropes import rope
from prfaas.engine.ffn_spec import MoeSpec
from prfaas.engine.mixer_spec import LightningSpec, MixerSpec
from prfaas.engine.model_spec import ModelSpec, ResidualSpec
from prfaas.engine.rope_spec import RopeSpec
from prfaas.errors import ConfigError


def minimax(fields: Fields) -> ModelSpec:
    """Return a MiniMax-01: lightning attention and grouped-query attention, experts everywhere."""
    fields.refuse_unless("shared_intermediate_size", 0)
    fields.refuse_unless("postnorm", True)
    _refuse_uneven_heads(fields)
    head_dim, num_layers = head_dim_of(fields), fields.num_layers()
    full = gqa(fields, rope(fields, head_dim, default_theta=1_000_000.0))
    layers: list[MixerSpec] = []
    for index, kind in enumerate(_minimax_kinds(fields)):
        match kind:
            case "full_attention":
                layers.append(full)
            case "linear_attention":
                layers.append(
                    LightningSpec(
                        num_heads=fields.integer("num_attention_heads"),
                        head_dim=head_dim,
                        scale=1.0,
                        slope_scale=1 - index / (num_layers - 1 + 1e-5) + 1e-5,
                        norm_eps=1e-6,
                    )
                )
            case _:
                raise bad_layer_type(kind)
    moe = MoeSpec(
        num_experts=fields.integer(*NUM_EXPERTS),
        experts_per_token=fields.integer(*EXPERTS_PER_TOKEN),
        intermediate_size=fields.integer("intermediate_size"),
    )
    return fields.model(
        layers=layers,
        ffns=[moe] * len(layers),
        mixer_residual=[
            _minimax_residual(fields, "full_attn" if layer == full else "linear_attn")
            for layer in layers
        ],
        ffn_residual=_minimax_residual(fields, "mlp"),
    )


def _refuse_uneven_heads(fields: Fields) -> None:
    """Public code disagrees on the slopes of heads whose number is no power of two."""
    if (num_heads := fields.integer("num_attention_heads")).bit_count() != 1:
        fields.refuse(
            f"num_attention_heads={num_heads}, not a power of 2, with lightning attention"
        )


def _minimax_residual(fields: Fields, part: str) -> ResidualSpec:
    """The normed input is kept; the hub's names differ from those of transformers."""
    old = {"full_attn": "layernorm_full_attention", "linear_attn": "layernorm_linear_attention"}
    scales = [
        fields.number(
            f"{part}_{factor}_factor", f"{old.get(part, 'layernorm_mlp')}_{factor}", default=1.0
        )
        for factor in ("alpha", "beta")
    ]
    return ResidualSpec(keeps_normed=True, keep_scale=scales[0], add_scale=scales[1])


def _minimax_kinds(fields: Fields) -> list[str]:
    """The layer types; the hub's attn_type_list writes 1 for full attention, 0 for lightning."""
    marks = fields.items("attn_type_list")
    if marks is None:
        return fields.layer_types(lambda layer: LINEAR if layer % 2 else FULL)
    if len(marks) != fields.num_layers():
        raise ConfigError(f"attn_type_list names {len(marks)} of {fields.num_layers()} layers")
    return [FULL if mark else LINEAR for mark in marks]


def ring(fields: Fields) -> ModelSpec:
    """Return a Ring or Ling 2.5: lightning attention and latent attention, seven to one."""
    num_layers, group = fields.num_layers(), fields.integer("layer_group_size")
    _refuse_uneven_heads(fields)
    head_dim = head_dim_of(fields)
    theta = fields.number("rope_theta", default=600_000.0)
    full = mla(
        fields,
        # partial_rotary_factor is lightning's; latent attention rotates all of its rotary part.
        rope(
            fields.with_values({"partial_rotary_factor": 1.0}),
            fields.integer("qk_rope_head_dim"),
            default_theta=theta,
            pairs="neighbours" if fields.flag("rope_interleave", default=True) else "halves",
        ),
    )
    part = fields.number("partial_rotary_factor", default=0.5)
    rotary_dim = int(head_dim * part)
    layers: list[MixerSpec] = []
    for index in range(num_layers):
        is_full = (index + 1) % group == 0 or index >= num_layers // group * group
        layers.append(full if is_full else _ring_lightning(fields, index, theta, rotary_dim))
    ffns = dense_first(fields, sigmoid_experts(fields), default_dense=1)
    return fields.model(layers=layers, ffns=ffns)


def _ring_lightning(fields: Fields, index: int, theta: float, rotary_dim: int) -> LightningSpec:
    head_dim = head_dim_of(fields)
    return LightningSpec(
        num_heads=fields.integer("num_attention_heads"),
        head_dim=head_dim,
        scale=1.0 / math.sqrt(head_dim),
        # The official code counts from -1 here; other engines from 0.
        slope_scale=1 - (index - 1) / (fields.num_layers() - 1) + 1e-5,
        rope=RopeSpec(theta=theta, rotary_dim=None if rotary_dim == head_dim else rotary_dim),
        has_silu=fields.flag("linear_silu"),
        has_qk_norm=fields.flag("use_qk_norm", default=True),
        norm_groups=fields.integer("group_norm_size", default=1),
    )
