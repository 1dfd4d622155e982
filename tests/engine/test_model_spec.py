"""S_kv(l) of the paper's models, from the configs that are shipped."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.engine.config import kv_bytes
from prfaas.engine.families.registry import describe
from prfaas.engine.model_spec import constant_bytes, growth_bytes, layer_groups

MODELS = {path.stem: path for path in (Path(__file__).parents[2] / "configs/models").glob("*.json")}
LENGTHS = (1024, 8192, 32_768, 131_072)
PAPER_MODELS = {
    # S0 in MiB, s in bytes, S in MiB at LENGTHS; bfloat16 with float32 state
    "kimi-linear-48b": (41.4, 8_064, (49.3, 104.4, 293.4, 1049)),
    "mimo-v2-flash": (24.4, 23_040, (46.9, 204.4, 744.4, 2904)),
    "qwen3.5-397b": (183.2, 30_720, (213.2, 423.2, 1143, 4023)),
    "ring-2.5-1t": (280.0, 11_520, (291.2, 370, 640, 1720)),
    "minimax-m2.5": (0, 253_952, (248, 1984, 7936, 31_744)),
    "qwen3-235b": (0, 192_512, (188, 1504, 6016, 24_064)),
}
TABLE_5 = {1024: 190.8, 8192: 308.9, 32_003: 701.3, 130_004: 2316.3}
"""PrfaaS Table 5: tokens -> MiB. Its "32K" and "128K" rows are prompts of about these lengths."""
FALCON: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "model_type": "falcon_h1",
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
}


def config(name: str) -> dict[str, Any]:
    fields = json.loads(MODELS[name].read_text())
    assert isinstance(fields, dict)
    return fields


def mib(num_bytes: int) -> float:
    return num_bytes / 2**20


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_the_papers_models_keep_what_was_worked_out(name: str) -> None:
    model = describe(config(name))
    constant, growth, sizes = PAPER_MODELS[name]
    assert round(mib(constant_bytes(model.layers, "bfloat16")), 1) == constant
    assert growth_bytes(model.layers, "bfloat16") == growth
    for length, size in zip(LENGTHS, sizes, strict=True):
        digits = 1 if size % 1 else 0
        assert round(mib(kv_bytes(model, length, "bfloat16")), digits) == size


@pytest.mark.parametrize("tokens", TABLE_5)
def test_the_internal_model_keeps_what_table_5_says(tokens: int) -> None:
    model = describe(config("internal-1t"))
    assert round(mib(kv_bytes(model, tokens, "bfloat16")), 1) == TABLE_5[tokens]


def test_the_internal_model_is_42_kda_and_15_latent_layers_of_1t_parameters() -> None:
    model = describe(config("internal-1t"))
    mixers = [layer.mixer for layer in model.layers]
    assert (mixers.count("kda"), mixers.count("mla"), len(mixers)) == (42, 15, 57)
    assert constant_bytes(model.layers, "bfloat16") == 42 * (64 * 128 * 128 * 4 + 3 * 3 * 8192 * 2)
    assert model.num_parameters == pytest.approx(1e12, rel=0.05)


def test_ring_has_1t_parameters() -> None:
    assert describe(config("ring-2.5-1t")).num_parameters == pytest.approx(1e12, rel=0.02)


@pytest.mark.parametrize("name", MODELS)
def test_a_shipped_config_says_where_it_is_from_and_why_a_field_is_uncertain(name: str) -> None:
    fields = config(name)
    assert fields["_source"]
    for field, why in fields["_uncertain"].items():
        part: Any = fields
        for key in field.split("."):
            assert key in part, field
            part = part[key]
        assert why


def test_seven_models_are_shipped() -> None:
    assert set(MODELS) == {*PAPER_MODELS, "internal-1t"}


@given(name=st.sampled_from(sorted(MODELS)), num_tokens=st.integers(1, 300_000))
def test_past_every_window_a_token_adds_the_growth_to_the_constant(
    name: str, num_tokens: int
) -> None:
    model = describe(config(name))
    widest = max((layer.window_tokens or 1) for layer in model.layers)
    size = kv_bytes(model, num_tokens, "bfloat16")
    line = constant_bytes(model.layers, "bfloat16") + num_tokens * growth_bytes(
        model.layers, "bfloat16"
    )
    assert size == line if num_tokens >= widest - 1 else size < line
    assert size < kv_bytes(model, num_tokens, "float32")
    assert kv_bytes(model, 0, "bfloat16") == 0


@pytest.mark.parametrize("name", [*MODELS, "falcon_h1"])
def test_the_groups_hold_all_that_the_layers_keep(name: str) -> None:
    model = describe(FALCON if name == "falcon_h1" else config(name))
    total = 0
    for group in layer_groups(model.layers, "bfloat16"):
        for layer in group.layers:
            total += group.state_bytes
            total += model.layers[layer].kept_tokens(5000) * group.bytes_per_token
    assert total == kv_bytes(model, 5000, "bfloat16")


def test_falcons_layers_stand_in_a_group_of_attention_and_one_of_states() -> None:
    groups = layer_groups(describe(FALCON).layers, "bfloat16")
    assert [(group.kind, group.layers) for group in groups] == [("full", (0, 1)), ("state", (0, 1))]
    assert [group.layout for group in groups] == ["kv-htd", "conv-xbc-tc,state-hnp"]


def test_full_attention_stands_before_windows_and_windows_before_states() -> None:
    groups = layer_groups(describe(config("mimo-v2-flash")).layers, "bfloat16")
    assert [(group.kind, len(group.layers)) for group in groups] == [("full", 9), ("window", 39)]
    groups = layer_groups(describe(config("kimi-linear-48b")).layers, "bfloat16")
    assert [(group.kind, len(group.layers)) for group in groups] == [("full", 7), ("state", 20)]
