"""GGUF metadata and tensor names as Hugging Face writes them; torch-free."""

from collections.abc import Mapping
from typing import Any

from prfaas.errors import ConfigError

MODEL_TYPE_OF_ARCHITECTURE = {"gemma3": "gemma3_text", "llama": "llama", "qwen3": "qwen3"}
ARCHITECTURE_CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROOT_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA3_LAYER_NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def to_hf_config(metadata: Mapping[str, object]) -> dict[str, Any]:
    """Return a config.json-style dict of a GGUF file's metadata.

    Whether the head is tied to the embedding is not in the metadata: it is set to False here, and
    read_gguf corrects it when the file has no output tensor.

    Raises:
        ConfigError: an architecture or rope scaling that is not supported, or a missing key.
    """
    architecture = metadata.get("general.architecture")
    model_type = MODEL_TYPE_OF_ARCHITECTURE.get(str(architecture))
    if model_type is None:
        raise ConfigError(
            f"GGUF architecture {architecture!r} is not supported; supported: "
            f"{', '.join(MODEL_TYPE_OF_ARCHITECTURE)}"
        )
    read = _Reader(metadata, str(architecture))
    num_heads = read.integer("attention.head_count")
    hidden_size = read.integer("embedding_length")
    head_dim = read.integer("attention.key_length", hidden_size // num_heads)
    if read.integer("attention.value_length", head_dim) != head_dim:
        raise ConfigError("keys and values of different lengths are not supported")
    if read.integer("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError("rope over a part of the head is not supported")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE_CLASSES[model_type]],
        "model_type": model_type,
        "vocab_size": read.vocab_size(),
        "hidden_size": hidden_size,
        "intermediate_size": read.integer("feed_forward_length"),
        "num_hidden_layers": read.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": read.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": read.integer("context_length"),
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": read.number("rope.freq_base", 10_000.0),
        "rope_scaling": read.rope_scaling(),
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if model_type == "gemma3_text":
        return config | _gemma3_fields(read, config)
    return config | {"hidden_act": "silu"}


def _gemma3_fields(read: "_Reader", config: Mapping[str, Any]) -> dict[str, Any]:
    # The 27B model alone scales by hidden_size / num_heads; llama.cpp decides by the same rule.
    is_27b = config["num_hidden_layers"] == 62
    scalar = (
        config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    )
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": read.integer("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": read.number("rope.freq_base_swa", 10_000.0),
    }


class _Reader:
    """Typed access to the keys of one architecture."""

    def __init__(self, metadata: Mapping[str, object], architecture: str) -> None:
        self._metadata = metadata
        self._architecture = architecture

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        if not isinstance(value, int):
            raise ConfigError(f"GGUF key {self._architecture}.{key} is {value!r}, not one integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        if not isinstance(value, int | float):
            raise ConfigError(f"GGUF key {self._architecture}.{key} is {value!r}, not a number")
        return float(value)

    def vocab_size(self) -> int:
        tokens = self._metadata.get("tokenizer.ggml.tokens")
        return self.integer("vocab_size", len(tokens) if isinstance(tokens, list) else None)

    def rope_scaling(self) -> dict[str, Any] | None:
        kind = self._metadata.get(f"{self._architecture}.rope.scaling.type", "none")
        match kind:
            case "none":
                return None
            case "linear":
                return {"rope_type": "linear", "factor": self.number("rope.scaling.factor")}
            case _:
                raise ConfigError(f"GGUF rope scaling {kind!r} is not supported")


def hf_name(name: str, model_type: str) -> str:
    """Return the Hugging Face name of GGUF tensor `name`; raises ConfigError for an unknown one."""
    if name in ROOT_NAMES:
        return ROOT_NAMES[name]
    names = GEMMA3_LAYER_NAMES if model_type == "gemma3_text" else LAYER_NAMES
    match name.split("."):
        case ["blk", layer, part, "weight"] if layer.isdigit() and part in names:
            return f"model.layers.{layer}.{names[part]}.weight"
    raise ConfigError(f"GGUF tensor {name!r} is not part of a {model_type} model")
