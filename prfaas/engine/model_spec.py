"""A model as its config.json describes it, whether or not this engine computes it; torch-free."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from prfaas.engine.ffn_spec import FfnSpec
from prfaas.engine.mixer_spec import (
    KvDtype,
    MixerSpec,
    NoMixerSpec,
    StateTensor,
    bytes_per_token,
    state_bytes,
)
from prfaas.engine.parameters import ffn_parameters, mixer_parameters

Activation = Literal["silu", "gelu_tanh", "relu2", "clamped_silu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualSpec:
    """How a layer's mixer, or its feed-forward, f joins the residual stream x.

    x <- keep_scale * r + add_scale * post_norm(f(pre_norm(x))), where r is x, or pre_norm(x).
    """

    has_pre_norm: bool = True
    has_post_norm: bool = False
    """The output is normed before it is added (Gemma, OLMo)."""
    keeps_normed: bool = False
    """What f got is kept, not what was there before (MiniMax-01)."""
    keep_scale: float = 1.0
    add_scale: float = 1.0

    @property
    def num_norms(self) -> int:
        """Norms of the hidden size."""
        return int(self.has_pre_norm) + int(self.has_post_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The layers of a model and what surrounds them."""

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[MixerSpec, ...]
    ffns: tuple[FfnSpec | None, ...]
    """The feed-forward of each layer."""
    max_context_tokens: int
    norm_eps: float
    mixer_residuals: tuple[ResidualSpec, ...]
    """How each layer's mixer joins the stream; without meaning for a layer without one."""
    ffn_residuals: tuple[ResidualSpec, ...]
    """How each layer's feed-forward joins the stream; likewise."""
    activation: Activation = "silu"
    has_tied_embeddings: bool = False
    has_unit_offset_norms: bool = False
    """Norms multiply by 1 + weight."""
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    num_further_layers: int = 0
    """Layers stored after these that predict tokens further ahead; they are not computed."""
    unsupported: tuple[str, ...] = ()
    """Fields that ask for what no layer above describes, each as "name=value"."""

    @property
    def num_parameters(self) -> int:
        """Return the number of weights; a tied head is counted once."""
        hidden = self.hidden_size
        layers = sum(mixer_parameters(layer, hidden) for layer in self.layers)
        ffns = sum(ffn_parameters(ffn, hidden) for ffn in self.ffns)
        norms = hidden * (sum(self._norms()) + 1)
        tables = self.vocab_size * hidden * (1 if self.has_tied_embeddings else 2)
        return layers + ffns + norms + tables

    def _norms(self) -> Iterator[int]:
        """The norms around each mixer and each feed-forward."""
        for mixer, residual in zip(self.layers, self.mixer_residuals, strict=True):
            yield 0 if isinstance(mixer, NoMixerSpec) else residual.num_norms
        for ffn, residual in zip(self.ffns, self.ffn_residuals, strict=True):
            yield 0 if ffn is None else residual.num_norms


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that keep the same tensors for the same tokens."""

    kind: Literal["full", "window", "state"]
    mixer: str
    layout: str
    layers: tuple[int, ...] = ()
    bytes_per_token: int = 0
    """Of one layer."""
    window_tokens: int | None = None
    states: tuple[StateTensor, ...] = ()
    state_bytes: int = 0
    """Of one layer."""


def layer_groups(layers: Sequence[MixerSpec], kv_dtype: KvDtype) -> tuple[LayerGroup, ...]:
    """Return the groups: full attention, then windows, then states, each by its first layer.

    Falcon-H1's layers stand in two groups, those that keep nothing in none.
    """
    members: dict[LayerGroup, list[int]] = {}
    for index, layer in enumerate(layers):
        for group in _kept(layer, kv_dtype):
            members.setdefault(group, []).append(index)
    order = ("full", "window", "state")
    ranked = sorted(members.items(), key=lambda item: (order.index(item[0].kind), item[1][0]))
    return tuple(replace(group, layers=tuple(indices)) for group, indices in ranked)


def constant_bytes(layers: Sequence[MixerSpec], kv_dtype: KvDtype) -> int:
    """Return S0: bytes of all states and of every window once it is full."""
    windows = sum(
        (layer.window_tokens - 1) * bytes_per_token(layer, kv_dtype)
        for layer in layers
        if layer.window_tokens is not None
    )
    return windows + sum(state_bytes(layer, kv_dtype) for layer in layers)


def growth_bytes(layers: Sequence[MixerSpec], kv_dtype: KvDtype) -> int:
    """Return s: bytes that one more token adds where every window is full."""
    return sum(bytes_per_token(layer, kv_dtype) for layer in layers if layer.window_tokens is None)


def layers_kv_bytes(layers: Sequence[MixerSpec], num_tokens: int, kv_dtype: KvDtype) -> int:
    """Return S_kv(num_tokens): bytes needed to continue a sequence of that many tokens elsewhere.

    Full and latent attention keep every token, a window of W the last W - 1, a linear mixer its
    state, but for the empty sequence (models.md §2, "Bytes per request").
    """
    if num_tokens == 0:
        return 0
    return sum(
        layer.kept_tokens(num_tokens) * bytes_per_token(layer, kv_dtype)
        + state_bytes(layer, kv_dtype)
        for layer in layers
    )


def _kept(layer: MixerSpec, kv_dtype: KvDtype) -> list[LayerGroup]:
    groups = []
    if layer.values_per_token:
        groups.append(
            LayerGroup(
                kind="full" if layer.window_tokens is None else "window",
                mixer=layer.mixer,
                layout=layer.kv_layout,
                bytes_per_token=bytes_per_token(layer, kv_dtype),
                window_tokens=layer.window_tokens,
            )
        )
    if layer.states:
        groups.append(
            LayerGroup(
                kind="state",
                mixer=layer.mixer,
                layout=layer.state_layout,
                states=layer.states,
                state_bytes=state_bytes(layer, kv_dtype),
            )
        )
    return groups
