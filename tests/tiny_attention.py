"""The fields that the families of attention alone add to tiny_configs' shared ones."""

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
Config = dict[str, Any]

QWEN_EXPERTS: Config = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
GEMMA3: Config = {
    # Window 16, full attention in layers 2 and 5 of 7.
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "num_key_value_heads": 1,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 32,
    "sliding_window": 16,
    "layer_types": [FULL if layer % 3 == 2 else SLIDING for layer in range(7)],
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
    "max_position_embeddings": 16384,
}
LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "mlp_bias": False,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "max_position_embeddings": 16384,
}
QWEN3: Config = {
    # Norms of each head of q and k, tied head.
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "max_position_embeddings": 16384,
}
QWEN3_MOE: Config = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "tie_word_embeddings": False,
    **QWEN_EXPERTS,
}
MINIMAX_M2: Config = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "num_hidden_layers": 3,
    "rotary_dim": 16,
    "rope_theta": 5000000.0,
    "use_qk_norm": True,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "scoring_func": "sigmoid",
}
MIMO: Config = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "head_dim": 24,
    "v_head_dim": 16,
    "attention_value_scale": 0.707,
    "sliding_window_size": 16,
    "hybrid_layer_pattern": [0, 1, 1],
    "moe_layer_freq": [0, 1, 1],
    "partial_rotary_factor": 0.334,
    "rope_theta": 5000000.0,
    "swa_rope_theta": 10000.0,
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": None,
    "moe_intermediate_size": 32,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
}
GPT_OSS: Config = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 2,
    "attention_bias": True,
    "sliding_window": 16,
    "layer_types": [SLIDING, FULL],
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 256,
        "truncate": False,
    },
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
