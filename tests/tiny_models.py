"""Tiny random models in the Hugging Face directory format, written without transformers.

All families share one byte-level BPE tokenizer of 512 ids: 0 <pad>, 1 <eos>, 2 <bos>, 3 <unk>, the
256 bytes, then merges. The weights are random, but scaled so that activations keep their size
through the layers and greedy answers vary.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

Family = Literal["gemma3", "llama", "qwen3"]
Array = NDArray[np.float32]

VOCAB_SIZE = 512
PAD_ID, EOS_ID, BOS_ID, UNK_ID = range(4)
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
CORPUS = (
    "The capital of France is Paris, and the capital of Germany is Berlin.",
    "Long prompts are prefilled by a remote node; the local node decodes the answer.",
    "She sells sea shells by the sea shore, and the shells she sells are sea shells, I am sure.",
    "The quick brown fox jumps over the lazy dog while the other foxes are sleeping.",
    "Question: what is the largest planet of the solar system? Answer: Jupiter is the largest.",
    "Die schnelle Übertragung größerer Datenmengen benötigt genügend Bandbreite für alle.",
    "Les élèves étudient près de la fenêtre; où êtes-vous allés après le déjeuner d'été?",
    "Быстрая коричневая лиса прыгает через ленивую собаку. Это предложение для обучения.",
    "日本語の文章もあります。今日は良い天気ですね。東京は日本の首都です。",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, i))\n",
    "0 1 2 3 4 5 6 7 8 9 10 100 1000 2024 2025 3.14159 😀 🚀",
)


def write_tiny_model(directory: Path, family: Family, seed: int = 0, **overrides: object) -> Path:
    """Write a model of `family` into `directory` (made if absent) and return it.

    The same family, seed and overrides give the same bytes. `overrides` replace config.json
    fields, e.g. num_hidden_layers=2.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family) | overrides
    tensors = random_tensors(config, seed)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", config)
    write_json(
        directory / "tokenizer_config.json",
        {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "add_bos_token": True,
            "add_eos_token": False,
        },
    )
    (directory / "tokenizer.json").write_text(tiny_tokenizer().to_str())
    return directory


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def tiny_config(family: Family) -> dict[str, Any]:
    """A config.json of `family`.

    gemma3: window 16, full attention in layers 2 and 5 of 7. llama: llama3 rope scaling, untied
    head. qwen3: per-head q/k norms, tied head.
    """
    shared: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "float32",
        "use_cache": True,
    }
    match family:
        case "gemma3":
            return shared | {
                "architectures": ["Gemma3ForCausalLM"],
                "model_type": "gemma3_text",
                "num_hidden_layers": 7,
                "num_key_value_heads": 1,
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 32,
                "sliding_window": 16,
                "layer_types": [
                    "full_attention" if layer % 3 == 2 else "sliding_attention"
                    for layer in range(7)
                ],
                "rope_theta": 1000000.0,
                "rope_local_base_freq": 10000.0,
                "rope_scaling": None,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "tie_word_embeddings": True,
            }
        case "llama":
            return shared | {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "num_hidden_layers": 4,
                "num_key_value_heads": 2,
                "hidden_act": "silu",
                "mlp_bias": False,
                "rope_theta": 10000.0,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 256,
                },
                "tie_word_embeddings": False,
            }
        case "qwen3":
            return shared | {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "num_hidden_layers": 4,
                "num_key_value_heads": 2,
                "hidden_act": "silu",
                "rope_theta": 1000000.0,
                "rope_scaling": None,
                "use_sliding_window": False,
                "sliding_window": None,
                "tie_word_embeddings": True,
            }


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, Array]:
    """The checkpoint of a config, by Hugging Face name; float32."""
    rng = np.random.default_rng(seed)
    is_gemma = config["model_type"] == "gemma3_text"
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q_rows = config["num_attention_heads"] * head_dim
    kv_rows = config["num_key_value_heads"] * head_dim

    def linear(rows: int, columns: int) -> Array:
        return rng.normal(0.0, columns**-0.5, (rows, columns)).astype(np.float32)

    def norm(size: int) -> Array:
        neutral = 0.0 if is_gemma else 1.0  # Gemma's norms multiply by 1 + weight
        return (neutral + rng.normal(0.0, 0.2, size)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": linear(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        tensors |= {
            f"model.layers.{layer}.{name}": value
            for name, value in random_layer(config, q_rows, kv_rows, linear, norm).items()
        }
    tensors["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = linear(config["vocab_size"], hidden)
    return tensors


def random_layer(
    config: dict[str, Any],
    q_rows: int,
    kv_rows: int,
    linear: Callable[[int, int], Array],
    norm: Callable[[int], Array],
) -> dict[str, Array]:
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    tensors = {
        "input_layernorm.weight": norm(hidden),
        "post_attention_layernorm.weight": norm(hidden),
        "self_attn.q_proj.weight": linear(q_rows, hidden),
        "self_attn.k_proj.weight": linear(kv_rows, hidden),
        "self_attn.v_proj.weight": linear(kv_rows, hidden),
        "self_attn.o_proj.weight": linear(hidden, q_rows),
        "mlp.gate_proj.weight": linear(ffn, hidden),
        "mlp.up_proj.weight": linear(ffn, hidden),
        "mlp.down_proj.weight": linear(hidden, ffn),
    }
    if config["model_type"] in {"gemma3_text", "qwen3"}:
        tensors["self_attn.q_norm.weight"] = norm(head_dim)
        tensors["self_attn.k_norm.weight"] = norm(head_dim)
    if config["model_type"] == "gemma3_text":
        tensors["pre_feedforward_layernorm.weight"] = norm(hidden)
        tensors["post_feedforward_layernorm.weight"] = norm(hidden)
    return tensors


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of VOCAB_SIZE ids; encoding puts <bos> first."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        show_progress=False,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS_ID)]
    )
    return tokenizer
