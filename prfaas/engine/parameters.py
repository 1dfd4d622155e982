"""How many weights a described model has, counted as transformers counts its parameters.

Buffers, such as a router's selection bias, are not parameters there and are not counted here.
Norm weights inside a mixer belong to it; those around it are counted in ModelSpec.
"""

from typing import assert_never

from prfaas.engine.ffn_spec import FfnSpec, MlpSpec, MoeSpec
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


def mixer_parameters(layer: MixerSpec, hidden_size: int) -> int:
    """Return the weights of one layer's mixer."""
    match layer:
        case GqaSpec():
            total = _gqa(layer, hidden_size)
        case MlaSpec():
            total = _mla(layer, hidden_size)
        case GdnSpec():
            total = _gdn(layer, hidden_size)
        case KdaSpec():
            total = _kda(layer, hidden_size)
        case LightningSpec():
            total = _lightning(layer, hidden_size)
        case Mamba2Spec():
            total = _mamba2(layer, hidden_size)
        case ShortConvSpec():
            total = layer.channels * (4 * hidden_size + layer.conv_width)  # in_proj: B, C and x
            total += 5 * layer.channels if layer.has_bias else 0
        case ParallelSpec():
            total = _gqa(layer.attention, hidden_size) + _mamba2(layer.mamba, hidden_size)
        case NoMixerSpec():
            total = 0
        case _:
            assert_never(layer)
    return total


def ffn_parameters(ffn: FfnSpec | None, hidden_size: int) -> int:
    """Return the weights of one layer's feed-forward; None has none."""
    match ffn:
        case None:
            return 0
        case MlpSpec():
            return _mlp(hidden_size, ffn.intermediate_size, ffn.is_gated, has_bias=ffn.has_bias)
        case MoeSpec():
            return _moe(ffn, hidden_size)
        case _:
            assert_never(ffn)


def _gqa(layer: GqaSpec, hidden: int) -> int:
    q_rows = layer.num_heads * layer.head_dim * (2 if layer.has_output_gate else 1)
    kv_rows = layer.values_per_token
    out_columns = layer.num_heads * layer.value_dim
    total = hidden * (q_rows + kv_rows + out_columns)
    if layer.has_bias:
        total += q_rows + kv_rows + hidden
    if layer.has_qk_norm:
        num_heads = layer.num_heads + layer.num_kv_heads
        total += layer.head_dim * (2 if layer.qk_norm_span == "head" else num_heads)
    return total + (layer.num_heads if layer.has_sinks else 0)


def _mla(layer: MlaSpec, hidden: int) -> int:
    q_rows = layer.num_heads * (layer.nope_dim + layer.rope_dim)
    rank = layer.query_rank
    query = hidden * q_rows if rank is None else rank * (hidden + 1 + q_rows)
    latent = hidden * (layer.latent_dim + layer.rope_dim) + layer.latent_dim
    expand = layer.latent_dim * layer.num_heads * (layer.nope_dim + layer.value_dim)
    out = layer.num_heads * layer.value_dim * hidden
    gate = hidden * layer.num_heads if layer.has_output_gate else 0
    return query + latent + expand + out + gate


def _gdn(layer: GdnSpec, hidden: int) -> int:
    values = layer.num_value_heads * layer.value_dim
    project = hidden * (layer.conv_channels + values + 2 * layer.num_value_heads)
    decay = 2 * layer.num_value_heads
    return (
        project + layer.conv_width * layer.conv_channels + decay + layer.value_dim + values * hidden
    )


def _kda(layer: KdaSpec, hidden: int) -> int:
    width, rank = layer.num_heads * layer.head_dim, layer.gate_rank
    gate = hidden * width if rank is None else rank * (hidden + width)
    project = 4 * hidden * width + 2 * gate + hidden * layer.num_heads  # q, k, v, o; f, g; beta
    return project + 3 * width * layer.conv_width + layer.num_heads + width + layer.head_dim


def _lightning(layer: LightningSpec, hidden: int) -> int:
    width = layer.num_heads * layer.head_dim
    qk_norm = 2 * layer.head_dim if layer.has_qk_norm else 0
    return 5 * hidden * width + width + qk_norm  # q, k, v, gate, out


def _mamba2(layer: Mamba2Spec, hidden: int) -> int:
    rows = layer.inner_dim + layer.conv_channels + layer.num_heads
    total = hidden * (rows + layer.inner_dim) + layer.conv_width * layer.conv_channels
    total += 3 * layer.num_heads  # A, D, dt_bias
    total += layer.inner_dim if layer.gated_norm is not None else 0
    total += layer.conv_channels if layer.has_conv_bias else 0
    total += rows if layer.has_in_bias else 0
    return total + (hidden if layer.has_out_bias else 0)


def _mlp(width: int, intermediate: int, is_gated: bool, *, has_bias: bool) -> int:
    num_in = 2 if is_gated else 1
    bias = num_in * intermediate + width if has_bias else 0
    return (num_in + 1) * width * intermediate + bias


def _moe(ffn: MoeSpec, hidden: int) -> int:
    width = hidden if ffn.latent_size is None else ffn.latent_size
    expert = _mlp(width, ffn.intermediate_size, ffn.is_gated, has_bias=ffn.has_bias)
    router = ffn.num_experts * (hidden + (1 if ffn.has_bias else 0))
    shared = _mlp(hidden, ffn.shared_size, ffn.is_gated, has_bias=False) if ffn.shared_size else 0
    latent = 0 if ffn.latent_size is None else 2 * hidden * ffn.latent_size
    gate = hidden if ffn.has_shared_gate else 0
    return router + ffn.num_experts * expert + shared + latent + gate
