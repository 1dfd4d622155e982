"""Every kind of layer that prfaas knows: what it keeps for each token, and what once; torch-free.

A mixer is how a layer's tokens see each other. A token adds `values_per_token` numbers to what the
layer keeps, in the KV dtype; `states` do not grow: a recurrent state is float32 whatever the
activations are, a convolution keeps its last width - 1 input rows in their dtype (models.md §2).
`kv_layout` and `state_layout` name how the bytes lie; empty where there are none.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from prfaas.engine.rope_spec import RopeSpec

KvDtype = Literal["bfloat16", "float16", "float32"]
KV_DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
STATE_DTYPE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor of fixed size that a layer carries from token to token."""

    name: Literal["conv", "recurrent"]
    shape: tuple[int, ...]
    dtype: Literal["activation", "float32"]
    """A convolution's rows have the dtype of the activations; it is that of K and V."""

    def num_bytes(self, kv_dtype: KvDtype) -> int:
        """Return the tensor's bytes where activations, K and V are `kv_dtype`."""
        value_bytes = STATE_DTYPE_BYTES if self.dtype == "float32" else KV_DTYPE_BYTES[kv_dtype]
        return math.prod(self.shape) * value_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaSpec:
    """Grouped-query attention, over the whole context or a sliding window."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Multiplies q.k before the softmax."""
    rope: RopeSpec | None
    """None: positions are not encoded (NoPE)."""
    window_tokens: int | None = None
    """A query sees itself and the window_tokens - 1 tokens before it; None: all before it."""
    has_qk_norm: bool = False
    """RMS norm of q and k, before rope."""
    qk_norm_span: Literal["head", "all_heads"] = "head"
    """What one root mean square is taken over; all_heads also has a weight for each head."""
    value_head_dim: int | None = None
    """None: as head_dim."""
    value_scale: float = 1.0
    """Multiplies v (MiMo)."""
    has_sinks: bool = False
    """A learnt score of each head joins the softmax's denominator only (gpt-oss, MiMo)."""
    has_output_gate: bool = False
    """The output is multiplied by the sigmoid of a second half of q_proj's rows (Qwen3-Next)."""
    has_bias: bool = False
    """q, k, v and o projections add one."""
    mixer: Literal["gqa"] = "gqa"
    kv_layout: ClassVar[str] = "kv-htd"
    state_layout: ClassVar[str] = ""
    states: ClassVar[tuple[StateTensor, ...]] = ()

    @property
    def value_dim(self) -> int:
        """Length of a head's value."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def values_per_token(self) -> int:
        """Numbers kept for each token: K and V of every KV head."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)

    def kept_tokens(self, num_tokens: int) -> int:
        """Tokens whose K and V are needed to go on after `num_tokens`."""
        return num_tokens if self.window_tokens is None else min(num_tokens, self.window_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    """Latent attention: all heads share one normed latent and one rotated key (DeepSeek)."""

    num_heads: int
    latent_dim: int
    """kv_lora_rank."""
    rope_dim: int
    """Length of the shared key part; it takes part in scores also where `rope` is None."""
    nope_dim: int
    """Length of the key part that a head makes from the latent."""
    value_dim: int
    scale: float
    rope: RopeSpec | None
    query_rank: int | None = None
    """q_lora_rank; None: q is projected at once."""
    has_output_gate: bool = False
    """One sigmoid for each head multiplies its output (Ling 3)."""
    mixer: Literal["mla"] = "mla"
    kv_layout: ClassVar[str] = "latent-rope-t"
    state_layout: ClassVar[str] = ""
    window_tokens: ClassVar[None] = None
    states: ClassVar[tuple[StateTensor, ...]] = ()

    @property
    def values_per_token(self) -> int:
        """Numbers kept for each token: the latent and the rotated key, whatever the heads."""
        return self.latent_dim + self.rope_dim

    def kept_tokens(self, num_tokens: int) -> int:
        """Return all tokens."""
        return num_tokens


class _FixedState:
    """A mixer whose memory of the past does not grow."""

    __slots__ = ()
    kv_layout: ClassVar[str] = ""
    window_tokens: ClassVar[None] = None
    values_per_token: ClassVar[int] = 0

    def kept_tokens(self, num_tokens: int) -> int:
        """Return 0: no token is kept as such."""
        return 0 * num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnSpec(_FixedState):
    """Gated DeltaNet: a delta rule with one decay for each value head."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    beta_scale: float = 1.0
    """2: eigenvalues may be negative (OLMo)."""
    norm_eps: float | None = None
    """Of the output norm; None: the model's."""
    mixer: Literal["gdn"] = "gdn"
    state_layout: ClassVar[str] = "conv-qkv-tc,state-hkv"

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: q, k and v before it."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """The convolution's last rows and S [value heads, key dim, value dim]."""
        return (
            _conv_rows(self.conv_width, self.conv_channels),
            _recurrent(self.num_value_heads, self.key_dim, self.value_dim),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaSpec(_FixedState):
    """Kimi Delta Attention: a delta rule with one decay for each key channel."""

    num_heads: int
    head_dim: int
    conv_width: int
    decay: Literal["softplus", "bounded"] = "softplus"
    """softplus: g = -exp(A) softplus(f + b); bounded: g = decay_bound sigmoid(exp(A) (f + b))."""
    decay_bound: float | None = None
    gate_rank: int | None = None
    """Rank of the decay's and the output gate's projections; None: full."""
    mixer: Literal["kda"] = "kda"
    state_layout: ClassVar[str] = "conv-qkv-tc,state-hkv"

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """The last rows of q's, k's and v's convolutions and S [heads, key dim, value dim]."""
        return (
            _conv_rows(self.conv_width, 3 * self.num_heads * self.head_dim),
            _recurrent(self.num_heads, self.head_dim, self.head_dim),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningSpec(_FixedState):
    """Linear attention with a constant decay for each head (MiniMax-01, Ring 2.5)."""

    num_heads: int
    head_dim: int
    scale: float
    """Multiplies q."""
    slope_scale: float
    """The layer's factor on its heads' slopes 2^(-8 (h + 1) / heads); S decays by exp(-slope)."""
    rope: RopeSpec | None = None
    has_silu: bool = True
    """silu of the projected q, k and v."""
    has_qk_norm: bool = False
    norm_groups: int = 1
    """Groups of heads that the output norm is taken over."""
    norm_eps: float | None = None
    """Of the output norm; None: the model's."""
    mixer: Literal["lightning"] = "lightning"
    state_layout: ClassVar[str] = "state-hkv"

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """S [heads, key dim, value dim]."""
        return (_recurrent(self.num_heads, self.head_dim, self.head_dim),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec(_FixedState):
    """A Mamba-2 state space layer."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    """Groups of heads that share B and C."""
    conv_width: int
    has_conv_bias: bool = True
    has_in_bias: bool = False
    has_out_bias: bool = False
    dt_limit: tuple[float, float] = (0.0, math.inf)
    """Bounds of dt after its softplus."""
    gated_norm: Literal["gate_first", "norm_first"] | None = "gate_first"
    """None: the gate alone (Falcon-H1)."""
    mixer: Literal["mamba2"] = "mamba2"
    state_layout: ClassVar[str] = "conv-xbc-tc,state-hnp"

    @property
    def inner_dim(self) -> int:
        """Width of x and of the gate."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: x, B and C before it."""
        return self.inner_dim + 2 * self.num_groups * self.state_dim

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """The convolution's last rows and S [heads, state dim, head dim]."""
        return (
            _conv_rows(self.conv_width, self.conv_channels),
            _recurrent(self.num_heads, self.state_dim, self.head_dim),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec(_FixedState):
    """A gated convolution over the last `conv_width` tokens (LFM2)."""

    channels: int
    conv_width: int
    has_bias: bool = False
    mixer: Literal["shortconv"] = "shortconv"
    state_layout: ClassVar[str] = "conv-tc"

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """The convolution's last rows."""
        return (_conv_rows(self.conv_width, self.channels),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSpec:
    """Attention and Mamba-2 on the same input, their outputs added (Falcon-H1)."""

    attention: GqaSpec
    mamba: Mamba2Spec
    attention_in_scale: float = 1.0
    attention_out_scale: float = 1.0
    key_scale: float = 1.0
    mamba_in_scale: float = 1.0
    mamba_out_scale: float = 1.0
    mamba_scales: tuple[float, ...] = (1.0,) * 5
    """Multiply the gate, x, B, C and dt rows of mamba's in_proj."""
    mixer: Literal["gqa+mamba2"] = "gqa+mamba2"
    kv_layout: ClassVar[str] = GqaSpec.kv_layout
    state_layout: ClassVar[str] = Mamba2Spec.state_layout

    @property
    def window_tokens(self) -> int | None:
        """The attention's window."""
        return self.attention.window_tokens

    @property
    def values_per_token(self) -> int:
        """The attention's K and V."""
        return self.attention.values_per_token

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """The Mamba-2 part's."""
        return self.mamba.states

    def kept_tokens(self, num_tokens: int) -> int:
        """Tokens whose K and V are needed to go on after `num_tokens`."""
        return self.attention.kept_tokens(num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoMixerSpec(_FixedState):
    """A layer of a feed-forward alone, which keeps nothing (Nemotron-H)."""

    mixer: Literal["none"] = "none"
    state_layout: ClassVar[str] = ""
    states: ClassVar[tuple[StateTensor, ...]] = ()


MixerSpec = (
    GqaSpec
    | MlaSpec
    | GdnSpec
    | KdaSpec
    | LightningSpec
    | Mamba2Spec
    | ShortConvSpec
    | ParallelSpec
    | NoMixerSpec
)


def bytes_per_token(layer: MixerSpec, kv_dtype: KvDtype) -> int:
    """Return the bytes of K and V, or of the latent, that one token adds to one layer."""
    return layer.values_per_token * KV_DTYPE_BYTES[kv_dtype]


def state_bytes(layer: MixerSpec, kv_dtype: KvDtype) -> int:
    """Return the bytes of the layer's recurrent and convolution state, whatever the length."""
    return sum(state.num_bytes(kv_dtype) for state in layer.states)


def _conv_rows(width: int, channels: int) -> StateTensor:
    return StateTensor(name="conv", shape=(width - 1, channels), dtype="activation")


def _recurrent(*shape: int) -> StateTensor:
    return StateTensor(name="recurrent", shape=shape, dtype="float32")
