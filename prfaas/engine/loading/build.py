"""Builds a model from its description and a checkpoint's tensors."""

import torch
from torch import Tensor

from prfaas.engine.greedy_head import GreedyHead
from prfaas.engine.kv import CPU
from prfaas.engine.linear import WEIGHT_DTYPES, Packing, PanelLinear, is_exact
from prfaas.engine.loading.checkpoint import TensorSource
from prfaas.engine.loading.ffns import build_ffn
from prfaas.engine.loading.mixers import add_ropes, build_mixer
from prfaas.engine.loading.names import NAMES, NormNames
from prfaas.engine.loading.parts import Parts
from prfaas.engine.mixer_spec import GqaSpec, MlaSpec
from prfaas.engine.model import Block, Embedding, Model, Residual
from prfaas.engine.model_spec import ModelSpec, ResidualSpec

GREEDY_HEAD_WEIGHTS = 1 << 24
"""A smaller head is little of a step, and needs no second copy in 8 bits."""


def build_model(
    spec: ModelSpec,
    weights: TensorSource,
    packing: Packing,
    *,
    model_fingerprint: str,
    device: torch.device = CPU,
) -> Model:
    """Return the model on `device`, its tensors packed, each taken from `weights` once.

    Raises:
        ConfigError: a tensor is missing or has another shape.
    """
    weights = _Moved(weights, device)
    parts = Parts(spec, NAMES[spec.model_type], weights, packing, device)
    for layer in spec.layers:
        add_ropes(parts, layer)
    names = parts.names
    size = (spec.vocab_size, spec.hidden_size)
    embedding = weights.take(f"{names.embed_tokens}.weight", *size)
    is_tied = spec.has_tied_embeddings
    if not is_exact(packing):
        embedding = embedding.to(WEIGHT_DTYPES[packing])  # one tensor with a tied head
    head = embedding if is_tied else weights.take(f"{names.lm_head}.weight", *size)
    layers = [_block(parts, index) for index in range(len(spec.layers))]
    lm_head = parts.pack(head)
    greedy_head = None
    if isinstance(lm_head, PanelLinear) and head.numel() >= GREEDY_HEAD_WEIGHTS:
        greedy_head = GreedyHead(lm_head, logits_scale=spec.logits_scale)
    return Model(
        spec,
        embed_tokens=Embedding(
            weight=embedding, scale=spec.embedding_scale, is_half=packing == "fma-fp16"
        ),
        layers=layers,
        norm=parts.hidden_norm(names.final_norm),
        lm_head=lm_head,
        greedy_head=greedy_head,
        packing=packing,
        model_fingerprint=model_fingerprint,
        device=device,
    )


class _Moved:
    """A source whose tensors are moved to a device as they are taken."""

    def __init__(self, source: TensorSource, device: torch.device) -> None:
        self._source = source
        self._device = device

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""
        return self._source.has(name)

    def take(self, name: str, *shape: int) -> Tensor:
        """Return the tensor on the device; raises as the source does."""
        return self._source.take(name, *shape).to(self._device)


def _block(parts: Parts, index: int) -> Block:
    spec, names = parts.model, parts.names
    mixer_spec, ffn_spec = spec.layers[index], spec.ffns[index]
    prefix = names.layer.format(index)
    norms = names.norms
    if names.linear_norms is not None and not isinstance(mixer_spec, GqaSpec | MlaSpec):
        norms = names.linear_norms
    mixer, ffn = build_mixer(parts, mixer_spec, prefix), build_ffn(parts, ffn_spec, prefix)
    return Block(
        mixer=mixer,
        mixer_residual=None
        if mixer is None
        else _mixer_residual(parts, spec.mixer_residuals[index], norms, prefix),
        ffn=ffn,
        ffn_residual=None
        if ffn is None
        else _ffn_residual(parts, spec.ffn_residuals[index], norms, prefix),
    )


def _mixer_residual(parts: Parts, spec: ResidualSpec, names: NormNames, prefix: str) -> Residual:
    return _residual(parts, spec, prefix + names.mixer_pre, prefix + names.mixer_post)


def _ffn_residual(parts: Parts, spec: ResidualSpec, names: NormNames, prefix: str) -> Residual:
    return _residual(parts, spec, prefix + names.ffn_pre, prefix + names.ffn_post)


def _residual(parts: Parts, spec: ResidualSpec, pre: str, post: str) -> Residual:
    return Residual(
        spec=spec,
        pre_norm=parts.hidden_norm(pre) if spec.has_pre_norm else None,
        post_norm=parts.hidden_norm(post) if spec.has_post_norm else None,
    )
