"""Builds a layer's mixer from its tensors.

Rows of q and k are stored for rotation by halves; they are put in rope.pair_order here, once.
Shapes: H heads, N key dim without positions, V value dim, R latent dim.
"""

from typing import assert_never

import torch
from torch import Tensor

from prfaas.engine.layers.gdn import GdnMixer
from prfaas.engine.layers.gqa import GqaMixer
from prfaas.engine.layers.kda import KdaMixer
from prfaas.engine.layers.lightning import LightningMixer
from prfaas.engine.layers.mamba2 import Mamba2Mixer
from prfaas.engine.layers.mla import MlaMixer
from prfaas.engine.layers.norm import RmsNorm
from prfaas.engine.layers.parallel import ParallelMixer
from prfaas.engine.layers.shortconv import ShortConvMixer
from prfaas.engine.linear import Linear
from prfaas.engine.loading.names import FUSED_QKV
from prfaas.engine.loading.parts import Parts
from prfaas.engine.mixer_spec import (
    GdnSpec,
    GqaSpec,
    KdaSpec,
    LightningSpec,
    Mamba2Spec,
    MixerSpec,
    MlaSpec,
    NoMixerSpec,
    ParallelSpec,
    ShortConvSpec,
)
from prfaas.engine.model import Mixer
from prfaas.engine.rope import pair_order

LATENT_NORM_EPS = 1e-6
"""Of the norms inside latent attention, whatever the config says (models.md §2)."""


def add_ropes(parts: Parts, layer: MixerSpec) -> None:
    """Make the rope tables that build_mixer will ask for."""
    match layer:
        case GqaSpec() | LightningSpec():
            parts.add_rope(layer.rope, layer.head_dim)
        case MlaSpec():
            parts.add_rope(layer.rope, layer.rope_dim)
        case ParallelSpec():
            add_ropes(parts, layer.attention)
        case _:
            pass


def build_mixer(parts: Parts, layer: MixerSpec, prefix: str) -> Mixer | None:
    """Return the mixer of the layer whose names begin with `prefix`; None if it has none."""
    mixer: Mixer | None = None
    match layer:
        case GqaSpec():
            mixer = _gqa(parts, layer, prefix)
        case MlaSpec():
            mixer = _mla(parts, layer, prefix)
        case GdnSpec():
            mixer = _gdn(parts, layer, prefix)
        case KdaSpec():
            mixer = _kda(parts, layer, prefix)
        case LightningSpec():
            mixer = _lightning(parts, layer, prefix)
        case Mamba2Spec():
            mixer = _mamba2(parts, layer, prefix)
        case ShortConvSpec():
            mixer = _shortconv(parts, layer, prefix)
        case ParallelSpec():
            mixer = ParallelMixer(
                layer,
                attention=_gqa(parts, layer.attention, prefix, key_scale=layer.key_scale),
                mamba=_mamba2(parts, layer.mamba, prefix, layer.mamba_scales),
            )
        case NoMixerSpec():
            pass
        case _:
            assert_never(layer)
    return mixer


def _gqa(parts: Parts, spec: GqaSpec, prefix: str, *, key_scale: float = 1.0) -> GqaMixer:
    names, hidden = parts.names.gqa, parts.model.hidden_size
    prefix += names.prefix
    q_rows, out_columns = spec.num_heads * spec.head_dim, spec.num_heads * spec.value_dim
    sizes = {
        "q": q_rows,
        "k": spec.num_kv_heads * spec.head_dim,
        "v": spec.num_kv_heads * spec.value_dim,
        "gate": out_columns,
    }
    stored = parts.projection(
        prefix,
        names.in_proj,
        sizes,
        hidden,
        num_groups=spec.num_heads,
        has_bias=spec.has_bias,
    )
    order = pair_order(spec.head_dim, spec.rope)
    stored.reorder("q", order)
    stored.reorder("k", order)
    stored.scale("k", key_scale)
    gate = ("gate",) if spec.has_output_gate else ()
    sinks = parts.vector(prefix + names.sinks, spec.num_heads) if spec.has_sinks else None
    return GqaMixer(
        spec,
        qkv_proj=parts.join(stored, ("q", "k", "v", *gate)),
        o_proj=parts.linear(prefix + names.out, hidden, out_columns, has_bias=spec.has_bias),
        qk_norm=_qk_norm(parts, spec, prefix) if spec.has_qk_norm else None,
        rope=parts.rope(spec.rope, spec.head_dim),
        sinks_H=sinks,
        attention=parts.attention,
    )


def _qk_norm(parts: Parts, spec: GqaSpec, prefix: str) -> RmsNorm:
    """A weight row for each head of q, then of k, in pair_order."""
    names, head_dim = parts.names.gqa, spec.head_dim
    order = pair_order(head_dim, spec.rope)
    weights = []
    for name, num_heads in ((names.q_norm, spec.num_heads), (names.k_norm, spec.num_kv_heads)):
        num_rows = 1 if spec.qk_norm_span == "head" else num_heads
        weight = parts.weights.take(f"{prefix}{name}.weight", num_rows * head_dim)
        by_head = weight.view(num_rows, head_dim)[:, order].float()
        weights.append(by_head.expand(num_heads, head_dim))
    return RmsNorm(
        torch.cat(weights),
        parts.model.norm_eps,
        has_unit_offset=parts.model.has_unit_offset_norms,
    )


def _mla(parts: Parts, spec: MlaSpec, prefix: str) -> MlaMixer:
    names, hidden = parts.names.mla, parts.model.hidden_size
    prefix += names.prefix
    rank, nope_dim = spec.latent_dim, spec.nope_dim
    kv_a = parts.weights.take(f"{prefix}{names.kv_a}.weight", rank + spec.rope_dim, hidden)
    turning = torch.arange(rank, rank + spec.rope_dim)[pair_order(spec.rope_dim, spec.rope)]
    kv_b = parts.weights.take(
        f"{prefix}{names.kv_b}.weight", spec.num_heads * (nope_dim + spec.value_dim), rank
    )
    by_head = kv_b.view(spec.num_heads, -1, rank).float()
    gate = None
    if spec.has_output_gate:
        gate = parts.linear(prefix + names.gate, spec.num_heads, hidden)
    return MlaMixer(
        spec,
        q_proj=_mla_query(parts, spec, prefix),
        kv_a_proj=parts.pack(kv_a[torch.cat([torch.arange(rank), turning])]),
        kv_norm=parts.plain_norm(prefix + names.kv_a_norm, rank, eps=LATENT_NORM_EPS),
        k_up_HNR=by_head[:, :nope_dim].contiguous(),
        v_up_HRV=by_head[:, nope_dim:].transpose(1, 2).contiguous(),
        o_proj=parts.linear(prefix + names.out, hidden, spec.num_heads * spec.value_dim),
        gate_proj=gate,
        rope=parts.rope(spec.rope, spec.rope_dim),
        attention=parts.attention,
    )


def _mla_query(parts: Parts, spec: MlaSpec, prefix: str) -> Linear:
    """X -> q of all heads, each [nope | rope]; through a normed bottleneck where there is one."""
    names, hidden = parts.names.mla, parts.model.hidden_size
    head_dim = spec.nope_dim + spec.rope_dim
    rank = spec.query_rank
    name, num_inputs = (names.q, hidden) if rank is None else (names.q_b, rank)
    weight = parts.weights.take(f"{prefix}{name}.weight", spec.num_heads * head_dim, num_inputs)
    order = torch.arange(head_dim)
    order[spec.nope_dim :] = order[spec.nope_dim :][pair_order(spec.rope_dim, spec.rope)]
    expand = parts.pack(weight.view(-1, head_dim, num_inputs)[:, order].flatten(0, 1))
    if rank is None:
        return expand
    reduce = parts.linear(prefix + names.q_a, rank, hidden)
    norm = parts.plain_norm(prefix + names.q_a_norm, rank, eps=LATENT_NORM_EPS)
    return lambda x_TD: expand(norm(reduce(x_TD)))


def _gdn(parts: Parts, spec: GdnSpec, prefix: str) -> GdnMixer:
    names, hidden = parts.names.gdn, parts.model.hidden_size
    assert names is not None, f"{parts.model.model_type} has no names for GDN"
    prefix += names.prefix
    keys, values = spec.num_key_heads * spec.key_dim, spec.num_value_heads * spec.value_dim
    heads = spec.num_value_heads
    sizes = {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}
    stored = parts.projection(prefix, names.in_proj, sizes, hidden, num_groups=spec.num_key_heads)
    conv_sizes = [spec.conv_channels] if len(names.conv) == 1 else [keys, keys, values]
    return GdnMixer(
        spec,
        in_proj=parts.join(stored, (*FUSED_QKV, "z", "b", "a")),
        conv_weight_WC=parts.conv_weights(
            [prefix + name for name in names.conv], conv_sizes, spec.conv_width
        ),
        A_log_H=parts.vector(prefix + "A_log", heads),
        dt_bias_H=parts.vector(prefix + "dt_bias", heads),
        norm=parts.plain_norm(prefix + names.norm, spec.value_dim, eps=spec.norm_eps),
        out_proj=parts.linear(prefix + names.out, hidden, values),
    )


def _kda(parts: Parts, spec: KdaSpec, prefix: str) -> KdaMixer:
    names, hidden = parts.names.kda, parts.model.hidden_size
    assert names is not None, f"{parts.model.model_type} has no names for KDA"
    prefix += names.prefix
    heads, width = spec.num_heads, spec.num_heads * spec.head_dim
    rank = spec.gate_rank
    gates = width if rank is None else rank
    sizes = {"q": width, "k": width, "v": width, "b": heads, "f": gates, "g": gates}
    stored = parts.projection(prefix, names.in_proj, sizes, hidden)
    wide = (1, 1, heads, 1) if names.has_wide_decay else (heads,)
    f_b, g_b = (
        None if rank is None or name is None else parts.linear(prefix + name, width, rank)
        for name in (names.f_b, names.g_b)
    )
    return KdaMixer(
        spec,
        in_proj=parts.join(stored, (*FUSED_QKV, "b", "f", "g")),
        f_b=f_b,
        g_b=g_b,
        conv_weight_WC=parts.conv_weights(
            [prefix + name for name in names.conv], [width] * 3, spec.conv_width
        ),
        A_log_H=parts.vector(prefix + "A_log", *wide).flatten(),
        dt_bias_HD=parts.vector(prefix + "dt_bias", width).view(heads, spec.head_dim),
        norm=parts.plain_norm(prefix + names.norm, spec.head_dim),
        out_proj=parts.linear(prefix + names.out, hidden, width),
    )


def _lightning(parts: Parts, spec: LightningSpec, prefix: str) -> LightningMixer:
    names, hidden = parts.names.lightning, parts.model.hidden_size
    prefix += names.prefix
    heads, head_dim = spec.num_heads, spec.head_dim
    width = heads * head_dim
    sizes = dict.fromkeys((*FUSED_QKV, "gate"), width)
    stored = parts.projection(prefix, names.in_proj, sizes, hidden, num_groups=heads)
    order = pair_order(head_dim, spec.rope)
    stored.reorder("q", order)
    stored.reorder("k", order)
    qk_norm = None
    if spec.has_qk_norm:
        weights = [
            parts.vector(f"{prefix}{name}.weight", head_dim)[order].expand(heads, head_dim)
            for name in (names.q_norm, names.k_norm)
        ]
        qk_norm = RmsNorm(torch.cat(weights), parts.model.norm_eps, has_unit_offset=False)
    groups = spec.norm_groups
    return LightningMixer(
        spec,
        in_proj=parts.join(stored, (*FUSED_QKV, "gate")),
        qk_norm=qk_norm,
        rope=parts.rope(spec.rope, head_dim),
        norm=parts.plain_norm(prefix + names.norm, groups, width // groups, eps=spec.norm_eps),
        out_proj=parts.linear(prefix + names.out, hidden, width),
    )


def _mamba2(
    parts: Parts, spec: Mamba2Spec, prefix: str, scales: tuple[float, ...] = (1.0,) * 5
) -> Mamba2Mixer:
    hidden = parts.model.hidden_size
    prefix += parts.names.mamba2
    inner, heads, groups = spec.inner_dim, spec.num_heads, spec.num_groups
    weight, bias = _mamba2_in_proj(parts, spec, prefix, scales)
    norm = None
    if spec.gated_norm is not None:
        norm = parts.plain_norm(prefix + "norm", groups, inner // groups)
    conv_bias = None
    if spec.has_conv_bias:
        conv_bias = parts.vector(prefix + "conv1d.bias", spec.conv_channels)
    return Mamba2Mixer(
        spec,
        in_proj=parts.pack(weight, bias),
        conv_weight_WC=parts.conv_weights(
            [prefix + "conv1d"], [spec.conv_channels], spec.conv_width
        ),
        conv_bias_C=conv_bias,
        A_log_H=parts.vector(prefix + "A_log", heads),
        D_H=parts.vector(prefix + "D", heads),
        dt_bias_H=parts.vector(prefix + "dt_bias", heads),
        dt_limit=spec.dt_limit,
        norm=norm,
        out_proj=parts.linear(prefix + "out_proj", hidden, inner, has_bias=spec.has_out_bias),
    )


def _mamba2_in_proj(
    parts: Parts, spec: Mamba2Spec, prefix: str, scales: tuple[float, ...]
) -> tuple[Tensor, Tensor | None]:
    """Rows [z | x | B | C | dt], each multiplied by its scale."""
    states = spec.num_groups * spec.state_dim
    sizes = (spec.inner_dim, spec.inner_dim, states, states, spec.num_heads)
    num_rows = sum(sizes)
    weight = parts.weights.take(f"{prefix}in_proj.weight", num_rows, parts.model.hidden_size)
    bias = parts.weights.take(f"{prefix}in_proj.bias", num_rows) if spec.has_in_bias else None
    if set(scales) != {1.0}:
        scale_N = torch.tensor(scales).repeat_interleave(torch.tensor(sizes)).to(weight.device)
        weight = weight.float() * scale_N[:, None]
        bias = None if bias is None else bias.float() * scale_N
    return weight, bias


def _shortconv(parts: Parts, spec: ShortConvSpec, prefix: str) -> ShortConvMixer:
    hidden, channels = parts.model.hidden_size, spec.channels
    prefix += parts.names.shortconv
    has_bias = spec.has_bias
    return ShortConvMixer(
        spec,
        in_proj=parts.linear(prefix + "in_proj", 3 * channels, hidden, has_bias=has_bias),
        conv_weight_WC=parts.conv_weights([prefix + "conv"], [channels], spec.conv_width),
        conv_bias_C=parts.vector(prefix + "conv.bias", channels) if has_bias else None,
        out_proj=parts.linear(prefix + "out_proj", hidden, channels, has_bias=has_bias),
    )
