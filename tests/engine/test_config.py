"""Model configs: what is read, what is refused, and how many bytes a sequence keeps."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.engine.config import kv_bytes, model_from_gguf, model_from_hf
from prfaas.engine.mixer_spec import GqaSpec, MixerSpec
from prfaas.engine.rope_spec import LinearScaling, Llama3Scaling, RopeSpec
from prfaas.errors import ConfigError
from tests.tiny_configs import FAMILIES, Family, tiny_config

MODELS = Path(__file__).parents[2] / "configs" / "models"
GEMMA_3_270M: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}
GEMMA_3_270M_GGUF: dict[str, object] = {
    "general.architecture": "gemma3",
    "gemma3.context_length": 32768,
    "gemma3.embedding_length": 640,
    "gemma3.block_count": 18,
    "gemma3.feed_forward_length": 2048,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256,
    "gemma3.attention.sliding_window": 512,
    "gemma3.rope.freq_base": 1000000.0,
    "tokenizer.ggml.tokens": ["x"] * 262144,
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
}
QWEN3_235B = tiny_config("qwen3") | {
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def rope_of(layer: MixerSpec) -> RopeSpec | None:
    assert isinstance(layer, GqaSpec)
    return layer.rope


def config_theta(family: Family) -> float:
    return float(tiny_config(family)["rope_theta"])


def test_every_sixth_gemma_layer_sees_everything() -> None:
    config = model_from_hf(GEMMA_3_270M)
    full = [index for index, layer in enumerate(config.layers) if layer.window_tokens is None]
    assert full == [5, 11, 17]
    assert {layer.window_tokens for layer in config.layers} == {None, 512}
    assert rope_of(config.layers[5]) == RopeSpec(theta=1e6)
    assert rope_of(config.layers[0]) == RopeSpec(theta=1e4)
    assert config.embedding_scale == pytest.approx(640**0.5)
    assert config.has_tied_embeddings


def test_gguf_metadata_and_config_json_describe_the_same_gemma() -> None:
    from_gguf = model_from_gguf(GEMMA_3_270M_GGUF)
    untied = GEMMA_3_270M | {"tie_word_embeddings": False}  # metadata does not say
    assert from_gguf == model_from_hf(untied)


def test_a_multimodal_gemma_is_its_text_config() -> None:
    sparse = {
        "model_type": "gemma3",
        "vision_config": {},
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "num_hidden_layers": 34,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window": 1024,
        },
    }
    config = model_from_hf(sparse)
    assert rope_of(config.layers[5]) == RopeSpec(theta=1e6, scaling=LinearScaling(factor=8.0))
    assert rope_of(config.layers[0]) == RopeSpec(theta=1e4)
    first = config.layers[0]
    assert isinstance(first, GqaSpec)
    assert (first.num_heads, first.num_kv_heads) == (8, 4)
    assert config.vocab_size == 262208


@pytest.mark.parametrize("family", ["gemma3", "llama", "qwen3"])
def test_old_and_new_rope_fields_mean_the_same(family: Family) -> None:
    old = tiny_config(family)
    new = dict(old)
    theta, scaling = new.pop("rope_theta"), new.pop("rope_scaling")
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": theta} | (scaling or {})
    if family == "gemma3":
        local = {"rope_type": "default", "rope_theta": new.pop("rope_local_base_freq")}
        new["rope_parameters"] = {
            "full_attention": new["rope_parameters"],
            "sliding_attention": local,
        }
    assert model_from_hf(new) == model_from_hf(old)


def test_llama3_scaling_is_read() -> None:
    config = model_from_hf(tiny_config("llama"))
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=256
    )
    assert rope_of(config.layers[0]) == RopeSpec(theta=config_theta("llama"), scaling=scaling)


def test_qwen3_windows_start_at_max_window_layers() -> None:
    config = model_from_hf(
        tiny_config("qwen3")
        | {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}
    )
    assert [layer.window_tokens for layer in config.layers] == [None, None, None, 32]


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llama", "model_type", "mamba2"),
        ("llama", "model_type", None),
        ("llama", "hidden_act", "relu"),
        ("llama", "rope_scaling", {"rope_type": "longrope", "factor": 4.0}),
        ("llama", "quantization_config", {"quant_method": "gptq"}),
        ("llama", "num_key_value_heads", 3),
        ("llama", "hidden_size", None),
        ("llama", "hidden_size", "64"),
        ("llama", "vocab_size", 0),
        ("llama", "rms_norm_eps", True),
        ("qwen3", "layer_types", ["full_attention"] * 3 + ["linear_attention"]),
        ("qwen3", "layer_types", ["full_attention"] * 3),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma3", "final_logit_softcapping", 30.0),
        ("gemma3", "hidden_activation", "gelu"),
        ("gemma3", "sliding_window", 0),
        ("gemma3", "use_bidirectional_attention", True),
    ],
)
def test_what_is_not_computed_is_refused_by_name(family: Family, field: str, value: object) -> None:
    named = {"num_key_value_heads": "key-value heads", "layer_types": "layer"}.get(field, field)
    named = "rope type 'longrope'" if field == "rope_scaling" else named
    with pytest.raises(ConfigError, match=named):
        model_from_hf(tiny_config(family) | {field: value})


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("general.architecture", "mamba", "mamba"),
        ("gemma3.attention.value_length", 128, "different lengths"),
        ("gemma3.rope.dimension_count", 128, "rope"),
        ("gemma3.rope.scaling.type", "yarn", "yarn"),
        ("gemma3.attention.head_count_kv", [1, 2], "head_count_kv"),
        ("gemma3.attention.layer_norm_rms_epsilon", "small", "epsilon"),
        ("gemma3.block_count", None, "block_count"),
    ],
)
def test_gguf_metadata_that_cannot_be_used_is_named(key: str, value: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        model_from_gguf(GEMMA_3_270M_GGUF | {key: value})


def test_gguf_linear_rope_scaling_stretches_the_far_seeing_layers() -> None:
    scaled = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    config = model_from_gguf(GEMMA_3_270M_GGUF | scaled)
    assert rope_of(config.layers[5]) == RopeSpec(theta=1e6, scaling=LinearScaling(factor=8.0))
    assert rope_of(config.layers[0]) == RopeSpec(theta=1e4)


def test_kv_bytes_equal_the_published_sizes() -> None:
    # Gemma 3 270M in bfloat16: 7.5 MiB and 3,072 bytes a token; float32 is twice that.
    gemma = model_from_hf(GEMMA_3_270M)
    constant = 15 * 511 * 2 * 256 * 4
    assert kv_bytes(gemma, 8192) == constant + 8192 * 6144
    assert constant / 2**20 == pytest.approx(2 * 7.5, abs=0.1)
    # Qwen3-235B: 192,512 bytes a token in bfloat16.
    assert kv_bytes(model_from_hf(QWEN3_235B), 1000) == 1000 * 2 * 192_512


@given(num_tokens=st.integers(0, 2000))
def test_kv_bytes_grow_by_full_layers_alone_past_the_window(num_tokens: int) -> None:
    config = model_from_hf(GEMMA_3_270M)
    growth = kv_bytes(config, num_tokens + 1) - kv_bytes(config, num_tokens)
    assert growth == 2048 * (18 if num_tokens < 511 else 3)


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.json")), ids=lambda path: path.stem)
def test_the_papers_models_are_all_computed(path: Path) -> None:
    assert model_from_hf(json.loads(path.read_text())).num_parameters > 1e10


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_computed(family: Family) -> None:
    assert model_from_hf(tiny_config(family)).unsupported == ()


def test_configs_load_without_torch() -> None:
    code = "import sys, prfaas.engine.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
