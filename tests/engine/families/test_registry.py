"""Which family a config.json is of, the spellings it may have, and what is refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from prfaas.engine.families.registry import READERS, TEXT_PART_OF, describe
from prfaas.engine.ffn_spec import MlpSpec, MoeSpec
from prfaas.engine.mixer_spec import GqaSpec, KdaSpec, LightningSpec, MlaSpec
from prfaas.engine.rope import attention_factor
from prfaas.engine.rope_spec import RopeSpec, YarnScaling
from prfaas.errors import ConfigError
from tests.tiny_configs import tiny_config

MODELS = Path(__file__).parents[3] / "configs" / "models"
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "intermediate_size": 96,
    "shared_intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-*E",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "max_position_embeddings": 4096,
    "layer_norm_epsilon": 1e-5,
}


def shipped(name: str) -> dict[str, Any]:
    fields = json.loads((MODELS / f"{name}.json").read_text())
    assert isinstance(fields, dict)
    return fields


RING = shipped("ring-2.5-1t")
KIMI = shipped("kimi-linear-48b")
MIMO = shipped("mimo-v2-flash")
GPT_OSS = tiny_config("gpt_oss")
GRANITE = tiny_config("granitemoehybrid")
LING3 = {k: v for k, v in RING.items() if k not in {"group_norm_size", "linear_silu"}} | {
    "architectures": ["BailingHybridForCausalLM"],
    "short_conv_kernel_size": 4,
}


def mixers(config: dict[str, Any]) -> list[str]:
    return [layer.mixer for layer in describe(config).layers]


def test_the_class_name_tells_ring_from_ling_3() -> None:
    assert set(mixers(RING)) == {"lightning", "mla"}
    named = {"architectures": ["BailingMoeV2_5ForCausalLM"]}
    without_fields = {k: v for k, v in LING3.items() if k != "short_conv_kernel_size"}
    assert set(mixers(without_fields | named)) == {"lightning", "mla"}
    assert set(mixers(LING3)) == {"kda", "mla"}


def test_without_a_class_name_the_fields_tell_ring_from_ling_3() -> None:
    assert set(mixers(RING | {"architectures": None})) == {"lightning", "mla"}
    assert set(mixers(LING3 | {"architectures": None})) == {"kda", "mla"}
    assert set(mixers(LING3 | {"architectures": [], "linear_silu": None})) == {"kda", "mla"}


@pytest.mark.parametrize(
    "config",
    [
        LING3 | {"architectures": None, "linear_silu": False},
        {k: v for k, v in LING3.items() if k not in {"short_conv_kernel_size", "architectures"}},
    ],
)
def test_what_could_be_ring_and_ling_3_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"'bailing_hybrid' is of Ring 2\.5 and of Ling 3"):
        describe(config)


@pytest.mark.parametrize("model_type", ["mamba2", "zamba2", None, 3, ["llama"]])
def test_an_unknown_family_is_named_beside_the_known_ones(model_type: object) -> None:
    with pytest.raises(ConfigError, match="is not supported; supported: bailing_hybrid, bamba"):
        describe(KIMI | {"model_type": model_type})


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_a_multimodal_qwen_is_its_text_config(name: str) -> None:
    text = shipped("qwen3.5-397b")["text_config"] | {"intermediate_size": 96}
    text["model_type"] = TEXT_PART_OF[name]
    whole = {"model_type": name, "text_config": text, "vision_config": {}}
    assert describe(whole) == describe(text)
    tied = describe(whole | {"tie_word_embeddings": True})
    assert tied.has_tied_embeddings
    assert not describe(text).has_tied_embeddings


def test_every_multimodal_family_has_a_reader() -> None:
    assert set(TEXT_PART_OF.values()) <= set(READERS)


def test_kimi_counts_its_layers_from_one() -> None:
    layers = describe(KIMI).layers
    full = [index for index, layer in enumerate(layers) if isinstance(layer, MlaSpec)]
    assert full == [3, 7, 11, 15, 19, 23, 26]
    assert all(isinstance(layer, KdaSpec | MlaSpec) for layer in layers)


@pytest.mark.parametrize(
    "change",
    [
        {"full_attn_layers": [0, 8, 12, 16, 20, 24, 27]},
        {"full_attn_layers": [4, 8, 12, 16, 20, 24]},
        {"kda_layers": [4, *KIMI["linear_attn_config"]["kda_layers"]]},
    ],
)
def test_kimi_lists_that_do_not_cover_the_layers_are_refused(change: dict[str, Any]) -> None:
    own = KIMI["linear_attn_config"] | change
    with pytest.raises(ConfigError, match="full_attn_layers and kda_layers"):
        describe(KIMI | {"linear_attn_config": own})


def test_old_names_of_layer_types_mean_the_new_ones() -> None:
    granite = MAMBA | {"model_type": "granitemoehybrid", "num_hidden_layers": 3}
    old = granite | {"layer_types": ["mamba", "attention", "mamba"]}
    new = granite | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    assert mixers(old) == ["mamba2", "gqa", "mamba2"]
    assert describe(old) == describe(new)
    by_other_field = granite | {"layers_block_type": ["mamba", "attention", "mamba"]}
    assert describe(by_other_field) == describe(new)


def test_bamba_attends_where_its_indices_say() -> None:
    bamba = MAMBA | {"model_type": "bamba", "num_hidden_layers": 3, "attn_layer_indices": [2]}
    assert mixers(bamba) == ["mamba2", "mamba2", "gqa"]
    assert mixers(bamba | {"attn_layer_indices": None}) == ["mamba2"] * 3


def test_nemotron_patterns_spell_mixers_and_feed_forwards() -> None:
    model = describe(NEMOTRON)
    assert [layer.mixer for layer in model.layers] == ["mamba2", "none", "gqa", "none"]
    assert [type(ffn) for ffn in model.ffns] == [type(None), MlpSpec, type(None), MoeSpec]
    types = ["linear_attention", "mlp", "full_attention", "moe"]
    spelled = NEMOTRON | {"hybrid_override_pattern": None, "layers_block_type": types}
    assert describe(spelled) == model
    with pytest.raises(ConfigError, match="layer type 'X'"):
        describe(NEMOTRON | {"hybrid_override_pattern": "MX"})
    with pytest.raises(ConfigError, match="hybrid_override_pattern"):
        describe(NEMOTRON | {"hybrid_override_pattern": None})


def test_mimo_reads_the_hubs_fields_and_those_of_transformers_alike() -> None:
    hub = describe(MIMO)
    names = {0: "full_attention", 1: "sliding_attention"}
    gone = dict.fromkeys(("hybrid_layer_pattern", "sliding_window_size", "moe_layer_freq"))
    new = gone | {
        "layer_types": [names[mark] for mark in MIMO["hybrid_layer_pattern"]],
        "mlp_layer_types": ["dense"] + ["sparse"] * 47,
        "sliding_window": 129,
        "swa_num_key_value_heads": None,
    }
    assert describe(MIMO | new) == hub
    full, window = hub.layers[0], hub.layers[1]
    assert isinstance(full, GqaSpec)
    assert isinstance(window, GqaSpec)
    assert (full.num_kv_heads, full.has_sinks, full.window_tokens) == (4, False, None)
    assert (window.num_kv_heads, window.has_sinks, window.window_tokens) == (8, True, 129)
    assert full.rope == RopeSpec(theta=5e6, rotary_dim=64)
    assert window.rope == RopeSpec(theta=1e4, rotary_dim=64)
    assert full.value_dim == 128


def test_mimo_without_a_pattern_is_full_first_and_every_sixth() -> None:
    assert describe(MIMO | {"hybrid_layer_pattern": None}) == describe(MIMO)


def test_minimax_marks_mean_full_or_lightning() -> None:
    config = {k: v for k, v in shipped("minimax-m2.5").items() if k != "rotary_dim"}
    config |= {"model_type": "minimax_text_01", "num_hidden_layers": 3}
    assert mixers(config | {"attn_type_list": [0, 0, 1]}) == ["lightning", "lightning", "gqa"]
    with pytest.raises(ConfigError, match="attn_type_list names 2 of 3 layers"):
        describe(config | {"attn_type_list": [0, 1]})


def test_ring_attends_fully_at_each_groups_end_and_past_the_last_group() -> None:
    layers = mixers(RING | {"num_hidden_layers": 21})
    assert [i for i, mixer in enumerate(layers) if mixer == "mla"] == [7, 15, 16, 17, 18, 19, 20]


def test_ring_follows_its_official_slopes_and_rotations() -> None:
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65_536}
    layers = describe(RING | {"rope_scaling": yarn}).layers
    first, last = layers[0], layers[79]
    assert isinstance(first, LightningSpec)
    assert isinstance(last, MlaSpec)
    assert first.slope_scale == pytest.approx(1 + 1 / 79 + 1e-5)
    assert first.rope == RopeSpec(theta=6e6, rotary_dim=64)
    assert last.rope is not None
    assert last.rope.rotary_dim is None
    assert last.rope.pairs == "neighbours"
    assert last.rope.scaling == YarnScaling(factor=2.0, original_context_tokens=65_536)


@pytest.mark.parametrize("given", [None, 1.25])
def test_yarns_own_attention_factor_is_read(given: float | None) -> None:
    yarn = {"type": "yarn", "factor": 2.0, "attention_factor": given}
    last = describe(RING | {"rope_scaling": yarn}).layers[79]
    assert isinstance(last, MlaSpec)
    assert last.rope is not None
    assert isinstance(last.rope.scaling, YarnScaling)
    assert last.rope.scaling.attention_factor == given
    assert attention_factor(last.rope) == pytest.approx(given or 0.1 * math.log(2.0) + 1.0)


def test_an_attention_factor_that_is_no_number_is_refused_by_name() -> None:
    yarn = {"type": "yarn", "factor": 2.0, "attention_factor": "auto"}
    with pytest.raises(ConfigError, match="attention_factor='auto'"):
        describe(RING | {"rope_scaling": yarn})


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (KIMI, "mla_use_nope", False),
        (KIMI, "use_full_rank_gate", True),
        (KIMI, "mla_use_output_gate", True),
        (KIMI, "gate_lower_bound", -5.0),
        (KIMI, "moe_router_activation_func", "softmax"),
        (KIMI, "quantization_config", {"quant_method": "fp8"}),
        (KIMI, "hidden_act", "relu"),
        (RING, "use_qkv_bias", True),
        (RING, "use_bias", True),
        (MIMO, "swa_head_dim", 128),
        (MIMO, "swa_v_head_dim", 64),
        (MIMO, "swa_num_attention_heads", 32),
        (shipped("minimax-m2.5"), "attn_type_list", [1] * 61 + [0]),
        (shipped("minimax-m2.5"), "shared_intermediate_size", 1024),
        (shipped("minimax-m2.5"), "qk_norm_type", "per_head"),
        (NEMOTRON, "attention_bias", True),
        (NEMOTRON, "mlp_hidden_act", "silu"),
        (NEMOTRON, "moe_shared_expert_overlap", False),
        (NEMOTRON, "mamba_hidden_act", "gelu"),
        (KIMI, "compression_config", {"format": "pack-quantized"}),
        (KIMI, "topk_method", "group_limited_greedy"),
        (RING, "num_attention_heads", 48),
        (shipped("minimax-m2.5"), "scoring_func", "softmax"),
        (GPT_OSS, "swiglu_limit", 10.0),
        (GPT_OSS, "swiglu_alpha", 1.5),
        (GRANITE, "position_embedding_type", "alibi"),
        (shipped("qwen3-235b"), "rope_scaling", {"rope_type": "longrope", "factor": 2.0}),
    ],
)
def test_a_feature_that_no_spec_describes_is_named(
    config: dict[str, Any], field: str, value: object
) -> None:
    assert describe(config).unsupported == ()
    (named,) = describe(config | {field: value}).unsupported
    assert ("longrope" if field == "rope_scaling" else field) in named


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (KIMI, "kv_lora_rank", None),
        (KIMI, "linear_attn_config", [1]),
        (KIMI, "num_experts", "many"),
        (MIMO, "v_head_dim", 0),
        (MIMO, "hybrid_layer_pattern", [0, 1]),
        (MIMO, "moe_layer_freq", [0, 1]),
        (MIMO, "hybrid_layer_pattern", "SSF"),
        (MIMO, "add_swa_attention_sink_bias", 1),
        (NEMOTRON, "mamba_num_heads", True),
        (MAMBA | {"model_type": "falcon_h1", "num_hidden_layers": 1}, "mamba_d_ssm", 100),
        (MAMBA | {"model_type": "falcon_h1", "num_hidden_layers": 1}, "layer_types", ["mamba"]),
        (MAMBA | {"model_type": "bamba", "num_hidden_layers": 1}, "layer_types", ["conv"]),
        (MAMBA | {"model_type": "lfm2", "num_hidden_layers": 1}, "layer_types", ["mamba"]),
        (MAMBA | {"model_type": "falcon_h1", "num_hidden_layers": 1}, "mlp_multipliers", [1.0]),
        (MAMBA | {"model_type": "falcon_h1", "num_hidden_layers": 1}, "ssm_multipliers", ["a"] * 5),
        (MAMBA | {"model_type": "bamba", "num_hidden_layers": 1}, "mamba_d_head", [16]),
        (MAMBA | {"model_type": "bamba", "num_hidden_layers": 1}, "rms_norm_eps", None),
        (KIMI, "routed_scaling_factor", None),
        (RING, "routed_scaling_factor", None),
        (RING, "architectures", 7),
        (LING3, "kda_lower_bound", 5.0),
        (LING3, "kda_lower_bound", "low"),
        (MAMBA | {"model_type": "llama", "num_hidden_layers": 1}, "layer_types", ["mamba"]),
    ],
)
def test_a_field_that_makes_no_sense_is_refused(
    config: dict[str, Any], field: str, value: object
) -> None:
    named = {"moe_layer_freq": "names 2 of 48", "mamba_d_ssm": "do not fill 100"}.get(field, field)
    with pytest.raises(ConfigError, match=named if field != "layer_types" else "layer type"):
        describe(config | {field: value})


def test_lfm2_rounds_its_feed_forward_as_the_released_350m_does() -> None:
    lfm2 = MAMBA | {
        "model_type": "lfm2",
        "num_hidden_layers": 2,
        "full_attn_idxs": [1],
        "norm_eps": 1e-5,
        "block_ff_dim": 6656,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "block_auto_adjust_ff_dim": True,
    }
    (ffn,) = set(describe(lfm2).ffns)
    assert ffn == MlpSpec(intermediate_size=4608)
    (ffn,) = set(describe(lfm2 | {"block_auto_adjust_ff_dim": False}).ffns)
    assert ffn == MlpSpec(intermediate_size=6656)
    assert describe(lfm2).has_tied_embeddings
    assert not describe(lfm2 | {"tie_embedding": False}).has_tied_embeddings


@pytest.mark.parametrize("field", ["mla_use_nope", "quantization_config", "rope_scaling"])
def test_a_null_is_a_field_that_is_not_there(field: str) -> None:
    assert describe(KIMI | {field: None}) == describe(
        {name: value for name, value in KIMI.items() if name != field}
    )
