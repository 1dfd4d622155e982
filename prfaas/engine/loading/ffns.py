"""Builds a layer's feed-forward from its tensors.

Shapes: E experts, N outputs, K inputs, F hidden dim of a feed-forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import assert_never

import torch
from torch import Tensor

from prfaas.engine.ffn_spec import FfnSpec, MlpSpec, MoeSpec
from prfaas.engine.layers.mlp import GatedMlp, PlainMlp
from prfaas.engine.layers.moe import MoeMlp
from prfaas.engine.loading.names import FusedExperts, MlpNames
from prfaas.engine.loading.parts import Parts
from prfaas.engine.model import Ffn
from prfaas.errors import ConfigError

QUANTISED_SUFFIX = "_blocks"
"""Of the MXFP4 tensors in gpt-oss's checkpoints."""


def build_ffn(parts: Parts, ffn: FfnSpec | None, prefix: str) -> Ffn | None:
    """Return the feed-forward of the layer whose names begin with `prefix`; None if it has none."""
    match ffn:
        case None:
            return None
        case MlpSpec():
            return _mlp(parts, ffn, parts.names.mlp, prefix, parts.model.hidden_size)
        case MoeSpec():
            return _moe(parts, ffn, prefix)
        case _:
            assert_never(ffn)


def _mlp(parts: Parts, ffn: MlpSpec, names: MlpNames, prefix: str, width: int) -> Ffn:
    prefix += names.prefix
    size = ffn.intermediate_size
    stored = parts.projection(
        prefix, names.in_proj, {"gate": size, "up": size}, width, has_bias=ffn.has_bias
    )
    down = parts.linear(prefix + names.down, width, size, has_bias=ffn.has_bias)
    if not ffn.is_gated:
        return PlainMlp(parts.join(stored, ("up",)), down, parts.model.activation)
    return GatedMlp(
        parts.join(stored, ("gate", "up")),
        down,
        parts.model.activation,
        size,
        gate_scale=ffn.gate_scale,
        down_scale=ffn.down_scale,
    )


def _moe(parts: Parts, ffn: MoeSpec, prefix: str) -> MoeMlp:
    names, hidden, experts = parts.names.moe, parts.model.hidden_size, ffn.num_experts
    own = prefix + names.prefix
    selection_bias = shared = shared_gate = latent_in = latent_out = None
    if ffn.router == "sigmoid":
        selection_bias = parts.vector(own + names.selection_bias, experts)
    if ffn.shared_size:
        spec = MlpSpec(intermediate_size=ffn.shared_size, is_gated=ffn.is_gated)
        shared = _mlp(parts, spec, names.shared, prefix, hidden)
    if ffn.has_shared_gate:
        shared_gate = parts.linear(own + names.shared_gate, 1, hidden)
    if ffn.latent_size is not None:
        latent_in = parts.linear(own + names.latent_in, ffn.latent_size, hidden)
        latent_out = parts.linear(own + names.latent_out, hidden, ffn.latent_size)
    return MoeMlp(
        ffn,
        router=parts.linear(own + names.router, experts, hidden, has_bias=ffn.has_bias),
        selection_bias_E=selection_bias,
        experts=_experts(parts, ffn, own),
        shared=shared,
        shared_gate=shared_gate,
        latent_in=latent_in,
        latent_out=latent_out,
    )


def _experts(parts: Parts, ffn: MoeSpec, prefix: str) -> Sequence[Callable[[Tensor], Tensor]]:
    """Read the first known form whose tensors are there; the first of all names what is missing."""
    forms = parts.names.moe.experts
    form = next((form for form in forms if _is_there(parts, form, prefix)), forms[0])
    width = parts.model.hidden_size if ffn.latent_size is None else ffn.latent_size
    if isinstance(form, FusedExperts):
        return _fused_experts(parts, ffn, form, prefix, width)
    spec = MlpSpec(
        intermediate_size=ffn.intermediate_size, is_gated=ffn.is_gated, has_bias=ffn.has_bias
    )
    return [
        _mlp(parts, spec, replace(form, prefix=form.prefix.format(expert)), prefix, width)
        for expert in range(ffn.num_experts)
    ]


def _is_there(parts: Parts, form: MlpNames | FusedExperts, prefix: str) -> bool:
    if isinstance(form, FusedExperts):
        name = form.gate_up
        if parts.weights.has(prefix + name + QUANTISED_SUFFIX):
            raise ConfigError(
                f"tensor {prefix + name + QUANTISED_SUFFIX!r} holds MXFP4 weights, which are not "
                "supported: convert the checkpoint to bfloat16"
            )
        return parts.weights.has(prefix + name)
    first = f"{form.prefix.format(0)}{form.in_proj[0].name}.weight"
    return parts.weights.has(prefix + first)


def _fused_experts(
    parts: Parts, ffn: MoeSpec, names: FusedExperts, prefix: str, width: int
) -> list[Ffn]:
    """All experts of two tensors [E, N, K], or of two [E, K, N] with gate and up in turn."""
    experts, size = ffn.num_experts, ffn.intermediate_size
    shapes = [(2 * size, width), (width, size)]
    if names.is_transposed:
        shapes = [(num_inputs, num_outputs) for num_outputs, num_inputs in shapes]
    tensors = [
        parts.weights.take(prefix + name, experts, *shape)
        for name, shape in zip((names.gate_up, names.down), shapes, strict=True)
    ]
    biases: list[Tensor | None] = [None, None]
    if ffn.has_bias:
        biases = [
            parts.weights.take(f"{prefix}{name}_bias", experts, num_outputs)
            for name, num_outputs in ((names.gate_up, 2 * size), (names.down, width))
        ]
    return [
        _fused_expert(
            parts,
            ffn,
            names,
            [tensor[expert] for tensor in tensors],
            [None if bias is None else bias[expert] for bias in biases],
        )
        for expert in range(experts)
    ]


def _fused_expert(
    parts: Parts,
    ffn: MoeSpec,
    names: FusedExperts,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> Ffn:
    (gate_up, down), (gate_up_bias, down_bias) = weights, biases
    if names.is_transposed:
        alternate = torch.arange(2 * ffn.intermediate_size).view(-1, 2).T.flatten()
        gate_up, down = gate_up.T[alternate], down.T
        gate_up_bias = None if gate_up_bias is None else gate_up_bias[alternate]
    return GatedMlp(
        parts.pack(gate_up, gate_up_bias),
        parts.pack(down, down_bias),
        parts.model.activation,
        ffn.intermediate_size,
    )
