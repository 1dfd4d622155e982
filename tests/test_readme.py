"""What the README says in numbers and commands is so."""

import re
from pathlib import Path

import pytest

from prfaas.engine.config import kv_bytes, model_from_hf
from prfaas.server.openai.answers import usage_body
from prfaas.types import RequestRecord

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")

# The published configurations of both models, as far as attention goes.
GEMMA_3_270M = model_from_hf(
    {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 18,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rms_norm_eps": 1e-6,
        "vocab_size": 262_144,
        "tie_word_embeddings": True,
    }
)
SMOLLM2_135M = model_from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 1e5,
        "rms_norm_eps": 1e-5,
        "vocab_size": 49_152,
        "tie_word_embeddings": True,
    }
)


def table_rows() -> list[tuple[str, ...]]:
    """Return the cells of the rows below the KVCache table's head."""
    _, table = README.split("\n|---:|---:|---:|---:|\n")
    rows = table.split("\n\n")[0].splitlines()
    return [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in rows]


def test_the_kv_table_shows_what_the_engine_needs_to_move():
    rows = table_rows()
    growth = [
        kv_bytes(model, 9001) - kv_bytes(model, 9000) for model in (GEMMA_3_270M, SMOLLM2_135M)
    ]
    assert rows[0][1:] == (f"{growth[0]:,} B", f"{growth[1]:,} B", f"{growth[1] / growth[0]:.1f}")
    for tokens, *cells in rows[1:]:
        gemma, smol = (
            kv_bytes(model, int(tokens.replace(",", ""))) for model in (GEMMA_3_270M, SMOLLM2_135M)
        )
        assert cells == [
            f"{gemma / 2**20:.1f} MiB",
            f"{smol / 2**20:.1f} MiB",
            f"{smol / gemma:.1f}",
        ]
    assert len(rows) >= 4


def test_the_story_of_an_answer_is_documented_field_by_field():
    story = usage_body([RequestRecord(request_id="r", prompt_tokens=1)], 1)["prfaas"]
    documented = re.findall(r"^\| (`.+?) \|", README, re.MULTILINE)
    names = {name for cell in documented for name in re.findall(r"`(\w+)`", cell)}
    assert isinstance(story, dict)
    assert names == set(story)


@pytest.mark.parametrize("script", sorted(set(re.findall(r"scripts/\w+", README))))
def test_a_script_that_is_named_exists(script):
    path = Path(__file__).parents[1] / script
    assert path.stat().st_mode & 0o111


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([\w./]+)\)", README))))
def test_a_file_that_is_linked_exists(link):
    assert (Path(__file__).parents[1] / link).is_file()
