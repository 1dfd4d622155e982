"""A config.json of every family, small enough to run in a test, with the fields of the hub."""

from typing import Literal, get_args

from tests.tiny_attention import (
    FULL,
    GEMMA3,
    GPT_OSS,
    LLAMA,
    MIMO,
    MINIMAX_M2,
    QWEN3,
    QWEN3_MOE,
    QWEN_EXPERTS,
    Config,
)

Family = Literal[
    "bamba",
    "falcon_h1",
    "gemma3",
    "gpt_oss",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
    "ling3",
    "llama",
    "mimo_v2_flash",
    "minimax",
    "minimax_m2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
    "ring",
]
FAMILIES: tuple[Family, ...] = get_args(Family)
VOCAB_SIZE = 512
PAD_ID, EOS_ID, BOS_ID, UNK_ID = range(4)
LINEAR = "linear_attention"

SHARED: Config = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "torch_dtype": "float32",
    "use_cache": True,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
QWEN_GDN: Config = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "num_hidden_layers": 3,
    "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.25,
}
QWEN_SHARED_EXPERT: Config = {"shared_expert_intermediate_size": 48}
MLA: Config = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
DEEPSEEK_EXPERTS: Config = {
    "num_experts": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
MAMBA: Config = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}


def tiny_config(family: Family) -> Config:
    """Return a config.json of `family`."""
    return SHARED | _OWN[family]


_QWEN3_NEXT: Config = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    **QWEN_GDN,
    **QWEN_EXPERTS,
    **QWEN_SHARED_EXPERT,
}
_QWEN3_5: Config = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "tie_word_embeddings": True,
    **QWEN_GDN,
}
_QWEN3_5_MOE: Config = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    **QWEN_GDN,
    **QWEN_EXPERTS,
    **QWEN_SHARED_EXPERT,
}
_KIMI: Config = {
    # Layers are counted from 1: one of latent attention among three.
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "num_hidden_layers": 3,
    "mla_use_nope": True,
    "q_lora_rank": None,
    "model_max_length": 65536,
    "linear_attn_config": {
        "full_attn_layers": [2],
        "kda_layers": [1, 3],
        "head_dim": 16,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
    "num_experts_per_token": 2,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    **MLA,
    **DEEPSEEK_EXPERTS,
}
_BAILING: Config = {
    "model_type": "bailing_hybrid",
    "head_dim": 16,
    "rope_theta": 600000.0,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "n_group": 2,
    "topk_group": 1,
    **MLA,
    **DEEPSEEK_EXPERTS,
}
_LING3: Config = _BAILING | {
    "architectures": ["BailingHybridForCausalLM"],
    "num_hidden_layers": 3,
    "layer_group_size": 3,
    "short_conv_kernel_size": 4,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "num_mtp_layers": 0,
}
_RING: Config = _BAILING | {
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "num_hidden_layers": 3,
    "layer_group_size": 3,
    "group_norm_size": 2,
    "linear_silu": False,
    "use_qk_norm": True,
    "q_lora_rank": 24,
    "partial_rotary_factor": 0.5,
    "rope_interleave": True,
    "num_nextn_predict_layers": 0,
}
_OLMO: Config = {
    "architectures": ["OlmoHybridForCausalLM"],
    "model_type": "olmo_hybrid",
    "num_hidden_layers": 3,
    "layer_types": [LINEAR, FULL, LINEAR],
    "head_dim": 16,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
}
_MINIMAX: Config = {
    "architectures": ["MiniMaxForCausalLM"],
    "model_type": "minimax",
    "num_hidden_layers": 3,
    # transformers reads its length off layer 0, which therefore must be a full one.
    "layer_types": [FULL, LINEAR, LINEAR],
    "head_dim": 16,
    "block_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_theta": 1000000.0,
    "full_attn_alpha_factor": 1.5,
    "full_attn_beta_factor": 0.9,
    "linear_attn_alpha_factor": 1.2,
    "linear_attn_beta_factor": 1.1,
    "mlp_alpha_factor": 1.3,
    "mlp_beta_factor": 0.8,
}
_GRANITE: Config = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "head_dim": 16,
    "shared_intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "position_embedding_type": "nope",
    "attention_multiplier": 0.125,
    "embedding_multiplier": 8.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    **MAMBA,
}
_BAMBA: Config = {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    **MAMBA,
}
_FALCON_H1: Config = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "num_hidden_layers": 2,
    "head_dim": 16,
    "rope_theta": 100000000000.0,
    "mamba_d_ssm": 64,
    "embedding_multiplier": 5.6,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.9, 0.8],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.8, 0.6, 0.5, 0.7, 0.9],
    "mamba_rms_norm": False,
    "mamba_norm_before_gate": False,
    "projectors_bias": False,
    "mlp_bias": False,
    **MAMBA,
    "mamba_n_heads": 4,
}
_NEMOTRON_H: Config = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-*EM",
    "num_hidden_layers": 5,
    "head_dim": 16,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 64,
    "use_conv_bias": True,
    "use_bias": False,
    "mlp_bias": False,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
_LFM2: Config = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "num_hidden_layers": 3,
    "full_attn_idxs": [1],
    "head_dim": 16,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "conv_bias": False,
    "block_auto_adjust_ff_dim": False,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
_OWN: dict[Family, Config] = {
    "bamba": _BAMBA,
    "falcon_h1": _FALCON_H1,
    "gemma3": GEMMA3,
    "gpt_oss": GPT_OSS,
    "granitemoehybrid": _GRANITE,
    "kimi_linear": _KIMI,
    "lfm2": _LFM2,
    "ling3": _LING3,
    "llama": LLAMA,
    "mimo_v2_flash": MIMO,
    "minimax": _MINIMAX,
    "minimax_m2": MINIMAX_M2,
    "nemotron_h": _NEMOTRON_H,
    "olmo_hybrid": _OLMO,
    "qwen3": QWEN3,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": _QWEN3_NEXT,
    "ring": _RING,
}
