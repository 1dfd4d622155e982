"""Tiny configs of every family, as transformers' own classes write them to config.json."""

import json
from typing import Any

from transformers import (
    BambaConfig,
    FalconH1Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    MiniMaxConfig,
    MiniMaxM2Config,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.mimo_v2_flash.configuration_mimo_v2_flash import MiMoV2FlashConfig
from transformers.models.olmo_hybrid.configuration_olmo_hybrid import OlmoHybridConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
GDN: dict[str, Any] = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "moe_intermediate_size": 32,
}
MAMBA: dict[str, Any] = {"mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 32}


def hf_configs() -> dict[str, PreTrainedConfig]:
    """Return a config of each family and of each variant that counts weights differently."""
    return attention_configs() | linear_configs() | mamba_configs()


def make(config_class: Any, **fields: Any) -> PreTrainedConfig:
    """Return a config; its class's own signature has not every field that it reads."""
    config = config_class(**fields)
    assert isinstance(config, PreTrainedConfig)
    return config


def attention_configs() -> dict[str, PreTrainedConfig]:
    """Return the families of attention alone."""
    gemma = {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 16}
    mimo = {"num_attention_heads": 8, "head_dim": 24, "v_head_dim": 16, "n_routed_experts": 4}
    return {
        "llama": make(LlamaConfig, **SIZES, num_hidden_layers=2),
        "llama-biased": make(
            LlamaConfig,
            **SIZES,
            num_hidden_layers=2,
            attention_bias=True,
            mlp_bias=True,
            head_dim=24,
        ),
        "qwen3": make(Qwen3Config, **SIZES, num_hidden_layers=2, head_dim=16),
        "qwen3_moe": make(
            Qwen3MoeConfig,
            **SIZES,
            **EXPERTS,
            num_hidden_layers=4,
            head_dim=16,
            moe_intermediate_size=32,
            mlp_only_layers=[1],
            decoder_sparse_step=1,
        ),
        "gemma3": make(Gemma3TextConfig, **SIZES | gemma, num_hidden_layers=7),
        "minimax_m2": make(
            MiniMaxM2Config,
            **SIZES,
            **LOCAL_EXPERTS,
            num_hidden_layers=2,
            head_dim=16,
            rotary_dim=8,
        ),
        "mimo_v2_flash": make(
            MiMoV2FlashConfig,
            **SIZES | mimo,
            num_hidden_layers=7,
            moe_intermediate_size=32,
            sliding_window_size=16,
            num_experts_per_tok=2,
        ),
        "gpt_oss": make(
            GptOssConfig,
            **SIZES,
            **LOCAL_EXPERTS,
            num_hidden_layers=4,
            head_dim=16,
            sliding_window=16,
        ),
    }


def linear_configs() -> dict[str, PreTrainedConfig]:
    """Return the families with a delta rule or lightning attention."""
    sparse = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    kimi = {"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4}
    return {
        "qwen3_next": make(
            Qwen3NextConfig, **SIZES, **GDN, **EXPERTS, **sparse, num_hidden_layers=4
        ),
        "qwen3_5": make(Qwen3_5TextConfig, **SIZES, **GDN, num_hidden_layers=4),
        "qwen3_5_moe": make(
            Qwen3_5MoeTextConfig,
            **{k: v for k, v in SIZES.items() if k != "intermediate_size"},
            **GDN,
            **EXPERTS,
            **sparse,
            num_hidden_layers=4,
        ),
        "kimi_linear": make(
            KimiLinearConfig,
            **SIZES | MLA,
            **LOCAL_EXPERTS,
            num_hidden_layers=5,
            bos_token_id=1,
            eos_token_id=2,
            linear_attn_config=kimi | {"full_attn_layers": [3, 5], "kda_layers": [1, 2, 4]},
        ),
        "ling3": make(
            BailingHybridConfig,
            **SIZES | MLA,
            num_hidden_layers=6,
            head_dim=16,
            num_local_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            num_mtp_layers=0,
            eos_token_id=2,
        ),
        "ling3-query-rank": make(
            BailingHybridConfig,
            **SIZES | MLA,
            num_hidden_layers=6,
            head_dim=16,
            q_lora_rank=24,
            num_local_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            num_mtp_layers=0,
            eos_token_id=2,
        ),
        "olmo_hybrid": make(OlmoHybridConfig, **SIZES, num_hidden_layers=5, eos_token_id=2),
        "minimax": make(
            MiniMaxConfig,
            **SIZES,
            **LOCAL_EXPERTS,
            num_hidden_layers=4,
            head_dim=16,
            block_size=32,
            layer_types=["full_attention", "linear_attention"] * 2,
        ),
    }


def mamba_configs() -> dict[str, PreTrainedConfig]:
    """Return the families with Mamba-2 or short convolutions."""
    pattern = ["linear_attention", "mlp", "full_attention", "moe"]
    nemotron: dict[str, Any] = {
        "layers_block_type": pattern,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 32,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
    }
    granite = {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "shared_intermediate_size": 48,
    }
    return {
        "granite": make(
            GraniteMoeHybridConfig,
            **SIZES,
            **MAMBA,
            **granite,
            num_hidden_layers=3,
            num_local_experts=0,
        ),
        "granite-moe": make(
            GraniteMoeHybridConfig,
            **SIZES,
            **MAMBA,
            **granite,
            **LOCAL_EXPERTS,
            num_hidden_layers=3,
        ),
        "bamba": make(
            BambaConfig,
            **SIZES,
            **MAMBA,
            num_hidden_layers=3,
            attn_layer_indices=[1],
            mamba_n_heads=8,
        ),
        "falcon_h1": make(
            FalconH1Config, **SIZES, **MAMBA, num_hidden_layers=2, mamba_d_ssm=64, mamba_n_heads=4
        ),
        "falcon_h1-normed": make(
            FalconH1Config,
            **SIZES,
            **MAMBA,
            num_hidden_layers=2,
            mamba_d_ssm=64,
            mamba_n_heads=4,
            mamba_rms_norm=True,
            projectors_bias=True,
            mlp_bias=True,
        ),
        "nemotron_h": make(NemotronHConfig, **SIZES, **nemotron),
        "nemotron_h-latent": make(NemotronHConfig, **SIZES, **nemotron, moe_latent_size=24),
        "lfm2": make(Lfm2Config, **SIZES, num_hidden_layers=4, full_attn_idxs=[2]),
        "lfm2-biased": make(
            Lfm2Config,
            **SIZES,
            num_hidden_layers=4,
            full_attn_idxs=[1],
            conv_bias=True,
            conv_L_cache=5,
        ),
    }


def config_json(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what save_pretrained writes to config.json."""
    fields = json.loads(config.to_json_string())
    assert isinstance(fields, dict)
    return fields
