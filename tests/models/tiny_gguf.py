"""Tiny GGUF files written with the gguf library."""

from pathlib import Path

import gguf
import numpy as np

from tests.text.vocabularies import byte_level_metadata, byte_level_tokenizer

HIDDEN, HEADS, HEAD_DIM, LAYERS, FFN = 32, 2, 16, 2, 64
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def write_tiny_gguf(path: Path, *, seed: int = 0, scale: float = 1.0) -> Path:
    """Write a llama of two layers with a byte-level tokenizer: Q8_0, F16 and F32 tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    metadata = byte_level_metadata(byte_level_tokenizer("gpt-2"), "gpt-2")
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])  # type: ignore[arg-type]
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])  # type: ignore[arg-type]
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(seed)
    for name, shape in shapes(len(tokens)).items():
        array = (rng.standard_normal(shape) * scale).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, array)
        elif "ffn" in name:
            with np.errstate(over="ignore"):
                writer.add_tensor(name, array.astype(np.float16))
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    """GGUF tensor names and shapes of the tiny llama."""
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab_size, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        found |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_k.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FFN),
        }
    return found
