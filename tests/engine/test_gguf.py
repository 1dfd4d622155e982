"""GGUF checkpoints: every quantisation against its formula, and names and orders as HF has them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from prfaas.engine.gguf import SUPPORTED_TYPES, read_gguf, unpermute
from prfaas.engine.gguf_config import GEMMA3_LAYER_NAMES, LAYER_NAMES, ROOT_NAMES
from prfaas.errors import ConfigError
from tests.tiny_models import Family, random_tensors, tiny_config

Array = NDArray[np.float32]
Bytes = NDArray[np.uint8]
SUPER_BLOCK = 256


def half(raw: Bytes) -> float:
    return float(raw[:2].view("<f2")[0])


def nibbles(raw: Bytes) -> list[int]:
    """Low nibbles of all bytes, then the high ones."""
    return [int(byte) & 15 for byte in raw] + [int(byte) >> 4 for byte in raw]


def q4_0(block: Bytes) -> list[float]:
    return [half(block) * (q - 8) for q in nibbles(block[2:])]


def q4_1(block: Bytes) -> list[float]:
    return [half(block) * q + half(block[2:]) for q in nibbles(block[4:])]


def q5_0(block: Bytes) -> list[float]:
    high = int(block[2:6].view("<u4")[0])
    low = nibbles(block[6:])
    return [half(block) * ((q | (high >> i & 1) << 4) - 16) for i, q in enumerate(low)]


def q8_0(block: Bytes) -> list[float]:
    return [half(block) * int(q) for q in block[2:].view(np.int8)]


def scales_and_mins(packed: Bytes) -> list[tuple[int, int]]:
    """The eight 6-bit (scale, min) pairs of Q4_K and Q5_K, as ggml's get_scale_min_k4 reads them."""
    p = [int(byte) for byte in packed]
    pairs = [(p[j] & 63, p[j + 4] & 63) for j in range(4)]
    for j in range(4, 8):
        scale = p[j + 4] & 15 | (p[j - 4] >> 6) << 4
        pairs.append((scale, p[j + 4] >> 4 | (p[j] >> 6) << 4))
    return pairs


def q4_k(block: Bytes) -> list[float]:
    d, dmin, pairs, quants = half(block), half(block[2:]), scales_and_mins(block[4:16]), block[16:]
    values = []
    for sub in range(8):
        scale, minimum = pairs[sub]
        for byte in quants[sub // 2 * 32 : sub // 2 * 32 + 32]:
            q = int(byte) >> 4 if sub % 2 else int(byte) & 15
            values.append(d * scale * q - dmin * minimum)
    return values


def q5_k(block: Bytes) -> list[float]:
    d, dmin, pairs = half(block), half(block[2:]), scales_and_mins(block[4:16])
    high, quants = block[16:48], block[48:]
    values = []
    for sub in range(8):
        scale, minimum = pairs[sub]
        for i, byte in enumerate(quants[sub // 2 * 32 : sub // 2 * 32 + 32]):
            q = int(byte) >> 4 if sub % 2 else int(byte) & 15
            q += 16 * (int(high[i]) >> sub & 1)
            values.append(d * scale * q - dmin * minimum)
    return values


def q6_k(block: Bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8)
    d = half(block[208:])
    values = [0.0] * SUPER_BLOCK
    for part in range(2):
        for i in range(32):
            h = int(high[part * 32 + i])
            first, second = int(low[part * 64 + i]), int(low[part * 64 + i + 32])
            for quarter, q in enumerate((first & 15, second & 15, first >> 4, second >> 4)):
                q6 = (q | (h >> 2 * quarter & 3) << 4) - 32
                scale = int(scales[part * 8 + quarter * 2 + i // 16])
                values[part * 128 + quarter * 32 + i] = d * scale * q6
    return values


FORMULAS = {
    Kind.Q4_0: q4_0,
    Kind.Q4_1: q4_1,
    Kind.Q5_0: q5_0,
    Kind.Q8_0: q8_0,
    Kind.Q4_K: q4_k,
    Kind.Q5_K: q5_k,
    Kind.Q6_K: q6_k,
}
HALVES_AT = {
    # where a block keeps its float16 scales
    Kind.Q4_0: (0,),
    Kind.Q4_1: (0, 2),
    Kind.Q5_0: (0,),
    Kind.Q8_0: (0,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
}


def llama_metadata(config: Mapping[str, Any], architecture: str) -> dict[str, int | float]:
    metadata: dict[str, int | float] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "vocab_size": config["vocab_size"],
    }
    if architecture == "gemma3":
        metadata["attention.sliding_window"] = config["sliding_window"]
    return metadata


def write_gguf(
    path: Path,
    architecture: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Array],
    raw: Mapping[str, tuple[Bytes, Kind]] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in llama_metadata(config, architecture).items():
        if isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
        else:
            writer.add_float32(f"{architecture}.{key}", value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    for name, (data, kind) in (raw or {}).items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str, family: Family) -> str:
    roots = {hf: ours for ours, hf in ROOT_NAMES.items()}
    if name in roots:
        return roots[name]
    names = GEMMA3_LAYER_NAMES if family == "gemma3" else LAYER_NAMES
    layers = {hf: ours for ours, hf in names.items()}
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{layers[rest.removesuffix('.weight')]}.weight"


def permute(weight: Array, num_heads: int) -> Array:
    """llama.cpp's own reordering (convert_hf_to_gguf.py, LlamaModel.permute)."""
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def as_gguf(name: str, values: Array, family: Family, config: Mapping[str, Any]) -> Array:
    if family == "gemma3" and name.endswith("norm.weight"):
        return values + np.float32(1.0)
    if family == "llama" and name.endswith("q_proj.weight"):
        return permute(values, config["num_attention_heads"])
    if family == "llama" and name.endswith("k_proj.weight"):
        return permute(values, config["num_key_value_heads"])
    return values


@pytest.mark.parametrize("kind", FORMULAS)
def test_quants_equal_their_formula(tmp_path: Path, kind: Kind) -> None:
    block_items, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    num_rows, num_blocks = 3, 2
    blocks = rng.integers(0, 256, (num_rows, num_blocks, block_bytes), dtype=np.uint8)
    for offset in HALVES_AT[kind]:
        scales = rng.normal(0, 0.01, (num_rows, num_blocks)).astype("<f2")
        blocks[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    path = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        tiny_config("llama"),
        {},
        {"token_embd.weight": (blocks.reshape(num_rows, -1), kind)},
    )
    tensors = dict(read_gguf(path).tensors)
    expected = [[FORMULAS[kind](block) for block in row] for row in blocks]
    np.testing.assert_allclose(
        tensors["model.embed_tokens.weight"],
        np.array(expected, dtype=np.float64).reshape(num_rows, num_blocks * block_items),
        rtol=1e-6,
        atol=1e-7,
    )


@pytest.mark.parametrize(
    "kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0]
)
def test_what_the_library_quantises_comes_back_close(tmp_path: Path, kind: Kind) -> None:
    values = np.random.default_rng(1).normal(0, 0.05, (4, 64)).astype(np.float32)
    raw = gguf.quants.quantize(values, kind)
    path = write_gguf(
        tmp_path / "m.gguf", "llama", tiny_config("llama"), {}, {"output.weight": (raw, kind)}
    )
    (read,) = dict(read_gguf(path).tensors).values()
    tolerance = {Kind.F32: 0.0, Kind.F16: 1e-4, Kind.BF16: 1e-3, Kind.Q8_0: 1e-3}.get(kind, 0.02)
    np.testing.assert_allclose(read, values, atol=tolerance, rtol=0)
    assert read.dtype == np.float32


@pytest.mark.parametrize("family", ["gemma3", "llama", "qwen3"])
def test_a_model_comes_back_under_its_hugging_face_names(tmp_path: Path, family: Family) -> None:
    overrides: dict[str, Any] = {"num_hidden_layers": 2, "rope_scaling": None, "layer_types": None}
    config = tiny_config(family) | overrides
    tensors = random_tensors(config, 0)
    stored = {
        gguf_name(name, family): as_gguf(name, values, family, config)
        for name, values in tensors.items()
    }
    checkpoint = read_gguf(write_gguf(tmp_path / "m.gguf", family, config, stored))
    read = dict(checkpoint.tensors)
    assert read.keys() == tensors.keys()
    assert checkpoint.num_tensors == len(tensors)
    for name, values in tensors.items():
        np.testing.assert_allclose(read[name], values, atol=1e-6, rtol=0, err_msg=name)
    for field in ("hidden_size", "num_key_value_heads", "head_dim", "tie_word_embeddings"):
        assert checkpoint.config[field] == config[field]


@given(num_heads=st.integers(1, 6), half_dim=st.integers(1, 8), columns=st.integers(1, 5))
@settings(max_examples=30)
def test_unpermute_undoes_llama_cpps_order(num_heads: int, half_dim: int, columns: int) -> None:
    size = num_heads * half_dim * 2 * columns
    weight = np.arange(size, dtype=np.float32).reshape(-1, columns)
    np.testing.assert_array_equal(unpermute(permute(weight, num_heads), num_heads), weight)


def llama3_divisors(head_dim: int, theta: float, factor: float) -> Array:
    """The loop of convert_hf_to_gguf.py that makes rope_freqs."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4.0:
            divisors.append(1.0)
        elif wavelength > 8192 / 1.0:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def test_rope_divisors_become_llama3_scaling(tmp_path: Path) -> None:
    config = tiny_config("llama") | {"rope_theta": 500000.0}
    divisors = llama3_divisors(config["head_dim"], config["rope_theta"], 32.0)
    path = write_gguf(tmp_path / "m.gguf", "llama", config, {"rope_freqs.weight": divisors})
    checkpoint = read_gguf(path)
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert list(checkpoint.tensors) == []


def test_rope_divisors_of_another_law_are_refused(tmp_path: Path) -> None:
    config = tiny_config("llama")
    other = np.linspace(1, 4, config["head_dim"] // 2, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", "llama", config, {"rope_freqs.weight": other})
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        read_gguf(path)


def test_an_unknown_quantisation_is_refused_by_name(tmp_path: Path) -> None:
    assert Kind.Q2_K not in SUPPORTED_TYPES
    _, block_bytes = gguf.GGML_QUANT_SIZES[Kind.Q2_K]
    raw = np.zeros((1, block_bytes), dtype=np.uint8)
    path = write_gguf(
        tmp_path / "m.gguf", "llama", tiny_config("llama"), {}, {"output.weight": (raw, Kind.Q2_K)}
    )
    with pytest.raises(ConfigError, match=r"output\.weight.*Q2_K"):
        read_gguf(path)


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    stray = {"blk.0.attn_sinks.weight": np.zeros(4, dtype=np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_config("llama"), stray)
    with pytest.raises(ConfigError, match="attn_sinks"):
        read_gguf(path)
