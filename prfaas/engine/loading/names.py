"""What each family's checkpoints call the tensors of a layer; data alone.

Names of a mixer's or a feed-forward's parts follow its prefix, which follows the layer's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

FUSED_QKV = ("q", "k", "v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One stored matrix: the rows of several parts of a projection, one after another."""

    name: str
    parts: tuple[str, ...]
    is_by_group: bool = False
    """The parts follow each other anew for each head, or each group of heads."""


def rows(name: str, *parts: str) -> Rows:
    """Return the matrix `name` of these parts."""
    return Rows(name=name, parts=parts)


def rows_by_group(name: str, *parts: str) -> Rows:
    """Return the matrix `name` of these parts for each group of heads."""
    return Rows(name=name, parts=parts, is_by_group=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormNames:
    """The norms around a layer's mixer and feed-forward."""

    mixer_pre: str = "input_layernorm"
    mixer_post: str = "post_attention_layernorm"
    ffn_pre: str = "post_attention_layernorm"
    ffn_post: str = "post_feedforward_layernorm"


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaNames:
    """Grouped-query attention."""

    prefix: str = "self_attn."
    in_proj: tuple[Rows, ...] = (rows("q_proj", "q"), rows("k_proj", "k"), rows("v_proj", "v"))
    out: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    sinks: str = "sinks"


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaNames:
    """Latent attention."""

    prefix: str = "self_attn."
    q: str = "q_proj"
    q_a: str = "q_a_proj"
    q_a_norm: str = "q_a_layernorm"
    q_b: str = "q_b_proj"
    kv_a: str = "kv_a_proj_with_mqa"
    kv_a_norm: str = "kv_a_layernorm"
    kv_b: str = "kv_b_proj"
    gate: str = "g_proj"
    out: str = "o_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnNames:
    """Gated DeltaNet."""

    prefix: str = "linear_attn."
    in_proj: tuple[Rows, ...]
    conv: tuple[str, ...] = ("conv1d",)
    """One after another."""
    norm: str = "norm"
    out: str = "out_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaNames:
    """Kimi Delta Attention."""

    prefix: str = "self_attn."
    in_proj: tuple[Rows, ...]
    f_b: str | None = None
    g_b: str | None = None
    conv: tuple[str, ...] = ("q_conv1d", "k_conv1d", "v_conv1d")
    has_wide_decay: bool = False
    """A_log is [1, 1, heads, 1]."""
    norm: str = "o_norm"
    out: str = "o_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningNames:
    """Lightning attention."""

    prefix: str = "self_attn."
    in_proj: tuple[Rows, ...] = (
        rows_by_group("qkv_proj", *FUSED_QKV),
        rows("output_gate", "gate"),
    )
    q_norm: str = "query_layernorm"
    k_norm: str = "key_layernorm"
    norm: str = "norm"
    out: str = "out_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpNames:
    """A dense feed-forward, or one expert."""

    prefix: str = "mlp."
    in_proj: tuple[Rows, ...] = (rows("gate_proj", "gate"), rows("up_proj", "up"))
    down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedExperts:
    """All experts in two tensors, [experts, ...]."""

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    is_transposed: bool = False
    """An expert's matrices are [inputs, outputs], and gate and up outputs alternate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeNames:
    """Routed experts."""

    prefix: str = "mlp."
    router: str = "gate"
    selection_bias: str = "gate.e_score_correction_bias"
    experts: tuple[MlpNames | FusedExperts, ...] = (MlpNames(prefix="experts.{}."), FusedExperts())
    """The forms that are known; the first whose tensors are there is read."""
    shared: MlpNames = MlpNames(prefix="mlp.shared_experts.")
    """Follows the layer's prefix."""
    shared_gate: str = "shared_expert_gate"
    latent_in: str = "fc1_latent_proj"
    latent_out: str = "fc2_latent_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """A whole checkpoint."""

    embed_tokens: str = "model.embed_tokens"
    layer: str = "model.layers.{}."
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    norms: NormNames = field(default_factory=NormNames)
    linear_norms: NormNames | None = None
    """Around layers with a linear mixer; None: as `norms`."""
    gqa: GqaNames = field(default_factory=GqaNames)
    mla: MlaNames = field(default_factory=MlaNames)
    gdn: GdnNames | None = None
    kda: KdaNames | None = None
    lightning: LightningNames = field(default_factory=LightningNames)
    mamba2: str = "mamba."
    """Prefix; what follows is the same in all families."""
    shortconv: str = "conv."
    """Prefix; likewise."""
    mlp: MlpNames = field(default_factory=MlpNames)
    moe: MoeNames = field(default_factory=MoeNames)


LLAMA = Names()
GEMMA = Names(norms=NormNames(ffn_pre="pre_feedforward_layernorm"))
QWEN_MOE = MoeNames(shared=MlpNames(prefix="mlp.shared_expert."))
GATED_GQA = GqaNames(
    in_proj=(rows_by_group("q_proj", "q", "gate"), rows("k_proj", "k"), rows("v_proj", "v"))
)
QWEN3_NEXT = Names(
    gqa=GATED_GQA,
    gdn=GdnNames(
        in_proj=(
            rows_by_group("in_proj_qkvz", *FUSED_QKV, "z"),
            rows_by_group("in_proj_ba", "b", "a"),
        )
    ),
    moe=QWEN_MOE,
)
QWEN3_5 = replace(
    QWEN3_NEXT,
    gdn=GdnNames(
        in_proj=(
            rows("in_proj_qkv", *FUSED_QKV),
            rows("in_proj_z", "z"),
            rows("in_proj_b", "b"),
            rows("in_proj_a", "a"),
        )
    ),
)
QKV = GqaNames().in_proj
OLMO = Names(
    linear_norms=NormNames(mixer_pre="attention_layer_norm", ffn_pre="feedforward_layer_norm"),
    gdn=GdnNames(
        in_proj=(*QKV, rows("g_proj", "z"), rows("b_proj", "b"), rows("a_proj", "a")),
        conv=("q_conv1d", "k_conv1d", "v_conv1d"),
        norm="o_norm",
        out="o_proj",
    ),
)
W_MLP = MlpNames(in_proj=(rows("w1", "gate"), rows("w3", "up")), down="w2")
W_EXPERTS = (replace(W_MLP, prefix="experts.{}."),)
MIXTRAL_MOE = MoeNames(
    prefix="block_sparse_moe.", selection_bias="e_score_correction_bias", experts=W_EXPERTS
)
KIMI = Names(
    kda=KdaNames(
        in_proj=(*QKV, rows("b_proj", "b"), rows("f_a_proj", "f"), rows("g_a_proj", "g")),
        f_b="f_b_proj",
        g_b="g_b_proj",
        has_wide_decay=True,
    ),
    moe=MoeNames(
        prefix="block_sparse_moe.",
        experts=W_EXPERTS,
        shared=MlpNames(prefix="block_sparse_moe.shared_experts."),
    ),
)
BAILING = Names(
    embed_tokens="model.word_embeddings",
    mla=MlaNames(prefix="attention.", out="dense"),
    kda=KdaNames(
        prefix="attention.",
        in_proj=(*QKV, rows("b_proj", "b"), rows("f_proj", "f"), rows("g_proj", "g")),
        out="dense",
    ),
    lightning=LightningNames(
        prefix="attention.",
        in_proj=(rows("query_key_value", *FUSED_QKV), rows("g_proj", "gate")),
        norm="g_norm",
        out="dense",
    ),
    moe=MoeNames(selection_bias="gate.expert_bias"),
)
"""Ling 3 and Ring 2.5, whose mixers differ."""
GPT_OSS = Names(moe=MoeNames(router="router", experts=(FusedExperts(is_transposed=True),)))
MIMO = Names(gqa=GqaNames(sinks="attention_sink_bias"))
GRANITE_MLP = MlpNames(
    prefix="shared_mlp.", in_proj=(rows("input_linear", "gate", "up"),), down="output_linear"
)
GRANITE = Names(
    mlp=GRANITE_MLP,
    moe=MoeNames(
        prefix="block_sparse_moe.",
        router="router.layer",
        experts=(FusedExperts(gate_up="input_linear.weight", down="output_linear.weight"),),
        shared=GRANITE_MLP,
    ),
)
BAMBA = Names(
    final_norm="model.final_layernorm",
    norms=NormNames(ffn_pre="pre_ff_layernorm"),
    mlp=MlpNames(prefix="feed_forward."),
)
UP_ONLY = (rows("up_proj", "up"),)
NEMOTRON = Names(
    embed_tokens="backbone.embeddings",
    layer="backbone.layers.{}.",
    final_norm="backbone.norm_f",
    norms=NormNames(mixer_pre="norm", ffn_pre="norm"),
    gqa=GqaNames(prefix="mixer."),
    mamba2="mixer.",
    mlp=MlpNames(prefix="mixer.", in_proj=UP_ONLY),
    moe=MoeNames(
        prefix="mixer.",
        experts=(MlpNames(prefix="experts.{}.", in_proj=UP_ONLY),),
        shared=MlpNames(prefix="mixer.shared_experts.", in_proj=UP_ONLY),
    ),
)
LFM2 = Names(
    final_norm="model.embedding_norm",
    norms=NormNames(mixer_pre="operator_norm", ffn_pre="ffn_norm"),
    gqa=GqaNames(out="out_proj", q_norm="q_layernorm", k_norm="k_layernorm"),
    mlp=replace(W_MLP, prefix="feed_forward."),
)
MIXTRAL = Names(moe=MIXTRAL_MOE)

NAMES: Mapping[str, Names] = {
    "bailing_hybrid": BAILING,
    "bamba": BAMBA,
    "falcon_h1": BAMBA,
    "gemma3_text": GEMMA,
    "gpt_oss": GPT_OSS,
    "granitemoehybrid": GRANITE,
    "kimi_linear": KIMI,
    "lfm2": LFM2,
    "llama": LLAMA,
    "mimo_v2_flash": MIMO,
    "minimax": MIXTRAL,
    "minimax_m1": MIXTRAL,
    "minimax_m2": MIXTRAL,
    "minimax_text_01": MIXTRAL,
    "nemotron_h": NEMOTRON,
    "olmo_hybrid": OLMO,
    "qwen3": LLAMA,
    "qwen3_5_moe_text": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "qwen3_moe": Names(moe=QWEN_MOE),
    "qwen3_next": QWEN3_NEXT,
}
"""By model_type; a test holds it against the registry of families."""
