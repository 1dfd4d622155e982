"""Which reader a config.json goes to."""

from collections.abc import Callable, Mapping
from typing import Any

from prfaas.engine.families import attention, delta, lightning, mamba, shortconv
from prfaas.engine.families.fields import Fields
from prfaas.engine.model_spec import ModelSpec
from prfaas.errors import ConfigError

READERS: Mapping[str, Callable[[Fields], ModelSpec]] = {
    "bamba": mamba.bamba,
    "falcon_h1": mamba.falcon_h1,
    "gemma3_text": attention.gemma3,
    "gpt_oss": attention.gpt_oss,
    "granitemoehybrid": mamba.granite,
    "kimi_linear": delta.kimi_linear,
    "lfm2": shortconv.lfm2,
    "llama": attention.llama,
    "mimo_v2_flash": attention.mimo_v2_flash,
    "minimax": lightning.minimax,
    "minimax_m1": lightning.minimax,
    "minimax_m2": attention.minimax_m2,
    "minimax_text_01": lightning.minimax,
    "nemotron_h": mamba.nemotron_h,
    "olmo_hybrid": delta.olmo_hybrid,
    "qwen3": attention.qwen3,
    "qwen3_5_moe_text": delta.qwen3_next,
    "qwen3_5_text": delta.qwen3_5,
    "qwen3_moe": attention.qwen3_moe,
    "qwen3_next": delta.qwen3_next,
}
BAILING = "bailing_hybrid"
"""The model_type of two families with different mixers."""
TEXT_PART_OF = {
    "gemma3": "gemma3_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Multimodal model types, whose text model's fields are in text_config."""
SHARED_WITH_TEXT = ("quantization_config", "tie_word_embeddings")
RING_FIELDS = ("group_norm_size", "linear_silu")
LING3_FIELDS = ("short_conv_kernel_size", "kda_safe_gate", "kda_lower_bound")


def describe(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json describes.

    Raises:
        ConfigError: an unknown family, a missing field, or one that makes no sense.
    """
    config = _text_part(config)
    model_type = config.get("model_type")
    if model_type == BAILING:
        return _bailing(config)(Fields(config))
    if not isinstance(model_type, str) or model_type not in READERS:
        known = ", ".join(sorted({*READERS, *TEXT_PART_OF, BAILING}))
        raise ConfigError(f"model_type {model_type!r} is not supported; supported: {known}")
    return READERS[model_type](Fields(config))


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in TEXT_PART_OF:
        return config
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        text = config
    shared = {name: config[name] for name in SHARED_WITH_TEXT if name in config}
    set_here = {name: value for name, value in text.items() if value is not None}
    return shared | set_here | {"model_type": TEXT_PART_OF[model_type]}


def _bailing(config: Mapping[str, Any]) -> Callable[[Fields], ModelSpec]:
    """The reader of one of two families that share a model_type.

    The class name decides, else the fields that only one of them has.
    """
    names = [str(name) for name in Fields(config).items("architectures") or ()]
    if any(name.startswith("BailingMoeV2_5") for name in names):
        return lightning.ring
    has_ring = any(config.get(name) is not None for name in RING_FIELDS)
    has_ling3 = any(config.get(name) is not None for name in LING3_FIELDS)
    if has_ring == has_ling3:
        raise ConfigError(
            f"model_type {BAILING!r} is of Ring 2.5 and of Ling 3; architectures={names} and "
            f"{'both' if has_ring else 'none'} of {', '.join(RING_FIELDS)} and "
            f"{', '.join(LING3_FIELDS)} do not say which"
        )
    return lightning.ring if has_ring else delta.ling3
