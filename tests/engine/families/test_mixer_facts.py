"""What no byte count shows: gates, norms, routers, scales, as models.md has them (§1, §2)."""

from typing import Any

import pytest
from transformers.models.olmo_hybrid.configuration_olmo_hybrid import OlmoHybridConfig

from prfaas.engine.families.registry import describe
from prfaas.engine.ffn_spec import FfnSpec, MlpSpec, MoeSpec
from prfaas.engine.mixer_spec import GqaSpec, MixerSpec
from prfaas.engine.model_spec import ModelSpec, ResidualSpec
from tests.engine.families.tiny_hf import config_json, hf_configs

CONFIGS = hf_configs()
FACTS: dict[tuple[str, str], dict[str, Any]] = {
    # (config, mixer or class of feed-forward) -> fields
    ("qwen3_5", "gqa"): {"has_output_gate": True, "has_qk_norm": True, "qk_norm_span": "head"},
    ("qwen3_5", "gdn"): {"beta_scale": 1.0, "conv_width": 4},
    ("olmo_hybrid", "gdn"): {"beta_scale": 2.0, "key_dim": 12, "value_dim": 24},
    ("olmo_hybrid", "gqa"): {"has_qk_norm": True, "qk_norm_span": "all_heads"},
    ("minimax_m2", "gqa"): {"has_qk_norm": True, "qk_norm_span": "all_heads", "has_sinks": False},
    ("gpt_oss", "gqa"): {"has_sinks": True, "has_bias": True, "value_scale": 1.0},
    ("kimi_linear", "kda"): {"decay": "softplus", "decay_bound": None, "gate_rank": 16},
    ("kimi_linear", "mla"): {"rope": None, "has_output_gate": False, "query_rank": None},
    ("ling3", "kda"): {"decay": "bounded", "decay_bound": -5.0, "gate_rank": None},
    ("ling3", "mla"): {"has_output_gate": True, "value_dim": 16},
    ("ling3-query-rank", "mla"): {"query_rank": 24},
    ("minimax", "lightning"): {"scale": 1.0, "rope": None, "has_silu": True, "norm_groups": 1},
    ("granite", "mamba2"): {"gated_norm": "gate_first", "num_groups": 1},
    ("granite", "gqa"): {"rope": None, "scale": 1.0},
    ("falcon_h1-normed", "gqa+mamba2"): {"key_scale": 1.0, "mamba_scales": (1.0,) * 5},
    ("nemotron_h", "gqa"): {"rope": None, "scale": 0.25},
    ("lfm2", "shortconv"): {"conv_width": 3, "channels": 64},
    ("qwen3_moe", "moe"): {"router": "softmax", "is_renormalised": False, "shared_size": 0},
    ("qwen3_next", "moe"): {"is_renormalised": True, "shared_size": 32, "has_shared_gate": True},
    ("qwen3_5_moe", "moe"): {"is_renormalised": True, "has_shared_gate": True},
    ("kimi_linear", "moe"): {"router": "sigmoid", "routed_scale": 2.446, "shared_size": 32},
    ("ling3", "moe"): {"router": "sigmoid", "num_groups": 2, "groups_per_token": 1},
    ("gpt_oss", "moe"): {"router": "top_softmax", "has_bias": True},
    ("granite-moe", "moe"): {"router": "top_softmax", "shared_size": 48},
    ("minimax", "moe"): {"router": "softmax", "is_renormalised": True},
    ("minimax_m2", "moe"): {"router": "sigmoid", "is_renormalised": True},
    ("nemotron_h", "moe"): {"router": "sigmoid", "is_gated": False, "latent_size": None},
    ("nemotron_h", "mlp"): {"is_gated": False},
}


def first(model: ModelSpec, kind: str) -> MixerSpec | FfnSpec:
    """Return the model's first layer of a mixer, or its first feed-forward of a class."""
    if kind == "moe":
        return next(ffn for ffn in model.ffns if isinstance(ffn, MoeSpec))
    if kind == "mlp":
        return next(ffn for ffn in model.ffns if isinstance(ffn, MlpSpec))
    return next(layer for layer in model.layers if layer.mixer == kind)


@pytest.mark.parametrize(("name", "kind"), FACTS)
def test_a_family_has_the_gates_norms_and_routers_of_its_code(name: str, kind: str) -> None:
    spec = first(describe(config_json(CONFIGS[name])), kind)
    assert {field: getattr(spec, field) for field in FACTS[name, kind]} == FACTS[name, kind]


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("ling3", "neighbours"),
        ("qwen3_5", "halves"),
        ("llama", "halves"),
        ("mimo_v2_flash", "halves"),
    ],
)
def test_only_latent_attention_turns_neighbours(name: str, pairs: str) -> None:
    layers = describe(config_json(CONFIGS[name])).layers
    ropes = {rope for layer in layers if (rope := getattr(layer, "rope", None)) is not None}
    assert {rope.pairs for rope in ropes} == {pairs}


def test_falcons_multipliers_are_read() -> None:
    scales = {
        "attention_in_multiplier": 1.5,
        "attention_out_multiplier": 0.9,
        "key_multiplier": 0.4,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.2,
        "ssm_multipliers": [0.1, 0.2, 0.3, 0.4, 0.5],
        "mlp_multipliers": [0.8, 0.3],
        "embedding_multiplier": 5.6,
        "lm_head_multiplier": 0.04,
    }
    model = describe(config_json(CONFIGS["falcon_h1"]) | scales)
    layer = first(model, "gqa+mamba2")
    names = ("attention_in", "attention_out", "key", "mamba_in", "mamba_out")
    assert [getattr(layer, f"{name}_scale") for name in names] == [1.5, 0.9, 0.4, 1.2, 0.2]
    assert getattr(layer, "mamba_scales", None) == (0.1, 0.2, 0.3, 0.4, 0.5)
    mlp = first(model, "mlp")
    assert isinstance(mlp, MlpSpec)
    assert (mlp.gate_scale, mlp.down_scale) == (0.8, 0.3)
    assert (model.embedding_scale, model.logits_scale) == (5.6, 0.04)


def test_granites_multipliers_are_read() -> None:
    scales = {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
    model = describe(config_json(CONFIGS["granite"]) | scales | {"attention_multiplier": 0.015})
    assert (model.embedding_scale, model.logits_scale) == (12.0, 0.125)
    residuals = {*model.mixer_residuals, *model.ffn_residuals}
    assert residuals == {ResidualSpec(add_scale=0.22)}
    assert getattr(first(model, "gqa"), "scale", None) == 0.015


@pytest.mark.parametrize(
    ("fields", "has_rope"),
    [
        ({}, True),
        ({"rope_parameters": None}, True),
        ({"rope_theta": None, "rope_parameters": None}, False),
        ({"rope_parameters": {"rope_type": "default"}}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, False),
    ],
)
def test_olmo_encodes_no_positions_where_theta_is_null(
    fields: dict[str, Any], has_rope: bool
) -> None:
    config = config_json(CONFIGS["olmo_hybrid"])
    del config["rope_parameters"]
    theirs: Any = OlmoHybridConfig(**fields).rope_parameters
    assert (theirs["rope_theta"] is not None) == has_rope
    layer = first(describe(config | fields), "gqa")
    assert isinstance(layer, GqaSpec)
    assert (layer.rope is not None) == has_rope


def test_experts_come_every_few_layers_but_for_those_listed() -> None:
    config = config_json(CONFIGS["qwen3_moe"]) | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    ffns = describe(config).ffns
    assert [isinstance(ffn, MoeSpec) for ffn in ffns] == [False, True, False, False]


def test_norms_that_multiply_by_one_plus_their_weight_are_those_of_gemma_and_qwen3_next() -> None:
    named = {n for n, c in CONFIGS.items() if describe(config_json(c)).has_unit_offset_norms}
    assert named == {"gemma3", "qwen3_next", "qwen3_5", "qwen3_5_moe"}
