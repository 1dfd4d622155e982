"""The layers that mixers.py measures: each a small config.json whose one layer has the mixer, or the experts."""

from dataclasses import dataclass
from typing import Any, Literal

SHARED: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 64,
    "vocab_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 1,
    "max_position_embeddings": 65536,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
KIMI: dict[str, Any] = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "num_heads": 16,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 2,
    "num_experts": 2,
    "num_experts_per_token": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 1.0,
}
RING: dict[str, Any] = {
    "model_type": "bailing_hybrid",
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "num_hidden_layers": 2,
    "layer_group_size": 2,
    "group_norm_size": 4,
    "linear_silu": False,
    "use_qk_norm": True,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 1.0,
    "rope_theta": 600000.0,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A part of a layer: the config of a model whose layer `layer` has it."""

    name: str
    config: dict[str, Any]
    part: Literal["mixer", "ffn"] = "mixer"
    layer: int = 0
    attribute: str | None = None
    """The part's name in transformers' layer; None: transformers has none."""
    most_tokens: int | None = None
    """Longer prompts are not given to transformers."""
    left_out: str = ""
    """Why."""
    is_linear: bool = True
    """False: its time grows with the square of the prompt."""


FAMILIES = (
    Family(
        name="gdn",
        config={
            "model_type": "qwen3_5_text",
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "rope_theta": 1e7,
        },
        attribute="linear_attn",
    ),
    Family(
        name="kda",
        config=KIMI,
        attribute="self_attn",
        most_tokens=2048,
        left_out="too slow: it makes a product of chunk x chunk x key dim",
    ),
    Family(
        name="lightning",
        config={
            "model_type": "minimax",
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "linear_attention"],
            "block_size": 256,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_theta": 1e6,
        },
        layer=1,
        attribute="self_attn",
    ),
    Family(name="lightning-ring", config=RING, left_out="transformers has no Ring 2.5"),
    Family(
        name="mamba2",
        config={
            "model_type": "granitemoehybrid",
            "layer_types": ["mamba"],
            "mamba_n_heads": 32,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 256,
            "shared_intermediate_size": 64,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
        },
        attribute="mamba",
        most_tokens=2048,
        left_out="too large: it holds the scores of all chunks at once",
    ),
    Family(
        name="shortconv",
        config={
            "model_type": "lfm2",
            "layer_types": ["conv"],
            "full_attn_idxs": [],
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        attribute="conv",
    ),
    Family(
        name="mla",
        config=KIMI,
        layer=1,
        attribute="self_attn",
        most_tokens=2048,
        left_out="too slow: the square of the prompt",
        is_linear=False,
    ),
    Family(
        name="swa",
        config={
            "model_type": "gemma3_text",
            "layer_types": ["sliding_attention"],
            "sliding_window": 512,
            "query_pre_attn_scalar": 128,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        attribute="self_attn",
        most_tokens=2048,
        left_out="too slow: it reads keys before the window",
    ),
    Family(
        name="moe",
        config={
            "model_type": "qwen3_moe",
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "rope_theta": 1e6,
        },
        part="ffn",
        attribute="mlp",
    ),
)
