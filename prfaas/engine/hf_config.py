"""Reads Hugging Face's config.json for gemma3, llama and qwen3; refuses what is not computed."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prfaas.engine.rope_spec import LinearScaling, Llama3Scaling, RopeScaling, RopeSpec
from prfaas.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"
SUPPORTED_MODEL_TYPES = ("gemma3_text", "gemma3", "llama", "qwen3")
GEMMA3_DEFAULTS: dict[str, Any] = {
    # Google's multimodal checkpoints leave out text_config fields that equal these defaults.
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
DEFAULT_SLIDING_WINDOW_PATTERN = 6
REFUSED_IF_SET: Mapping[str, tuple[object, ...]] = {
    # field -> the values that mean "off"
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "pretraining_tp": (None, 1),
}
Rope = Mapping[str, RopeSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFields:
    """What differs between layers."""

    rope: RopeSpec
    window_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HfFields:
    """The fields of a config.json that decide what is computed, with defaults filled in."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    has_qk_norm: bool
    norm_eps: float
    max_context_tokens: int
    has_tied_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    layers: tuple[LayerFields, ...]


def parse(config: Mapping[str, Any]) -> HfFields:
    """Return the fields of `config`; raises ConfigError naming the field that cannot be used."""
    model_type = config.get("model_type")
    if model_type == "gemma3" and isinstance(config.get("text_config"), Mapping):
        return parse({"model_type": "gemma3_text"} | dict(config["text_config"]))
    if model_type == "gemma3_text":
        config = GEMMA3_DEFAULTS | {k: v for k, v in config.items() if v is not None}
    elif model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(
            f"model_type {model_type!r} is not supported; supported: "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    _refuse_unsupported(config)
    num_heads = _int(config, "num_attention_heads")
    hidden_size = _int(config, "hidden_size")
    num_kv_heads = _int(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(f"{num_heads} heads cannot share {num_kv_heads} key-value heads")
    head_dim = _int(config, "head_dim", hidden_size // num_heads)
    is_gemma = model_type == "gemma3_text"
    scale = _float(config, "query_pre_attn_scalar") ** -0.5 if is_gemma else head_dim**-0.5
    bos = config.get("bos_token_id")
    return HfFields(
        model_type=str(model_type),
        vocab_size=_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_int(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=scale,
        has_qk_norm=model_type in {"gemma3_text", "qwen3"},
        norm_eps=_float(config, "rms_norm_eps", 1e-6),
        max_context_tokens=_int(config, "max_position_embeddings"),
        has_tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=tuple(_eos_ids(config.get("eos_token_id"))),
        layers=_layers(config),
    )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    for field, off in REFUSED_IF_SET.items():
        if config.get(field) not in off:
            raise ConfigError(f"{field}={config[field]!r} is not supported")
    expected = "gelu_pytorch_tanh" if config["model_type"] == "gemma3_text" else "silu"
    field = "hidden_activation" if config["model_type"] == "gemma3_text" else "hidden_act"
    if (activation := config.get(field, expected)) != expected:
        raise ConfigError(f"{field}={activation!r} is not supported; supported: {expected}")


def _layers(config: Mapping[str, Any]) -> tuple[LayerFields, ...]:
    ropes = _ropes(config)
    window = config.get("sliding_window")
    layers = []
    for kind in _layer_types(config):
        if kind not in {FULL, SLIDING}:
            raise ConfigError(f"layer type {kind!r} is not supported")
        if kind == SLIDING and (not isinstance(window, int) or window < 1):
            raise ConfigError(f"sliding_window={window!r} is not a number of tokens")
        layers.append(
            LayerFields(rope=ropes[kind], window_tokens=window if kind == SLIDING else None)
        )
    return tuple(layers)


def _layer_types(config: Mapping[str, Any]) -> Iterable[str]:
    num_layers = _int(config, "num_hidden_layers")
    if (types := config.get("layer_types")) is not None:
        if len(types) != num_layers:
            raise ConfigError(f"layer_types names {len(types)} of {num_layers} layers")
        return [str(kind) for kind in types]
    if config["model_type"] == "gemma3_text":
        pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
        period = pattern or DEFAULT_SLIDING_WINDOW_PATTERN
        return [SLIDING if (layer + 1) % period else FULL for layer in range(num_layers)]
    first_sliding = num_layers
    if config["model_type"] == "qwen3" and config.get("use_sliding_window"):
        first_sliding = _int(config, "max_window_layers", 28)
    return [SLIDING if layer >= first_sliding else FULL for layer in range(num_layers)]


def _ropes(config: Mapping[str, Any]) -> Rope:
    """The rope of each layer type, from `rope_parameters` (transformers 5) or the older fields."""
    parameters = config.get("rope_parameters")
    if isinstance(parameters, Mapping) and (FULL in parameters or SLIDING in parameters):
        return {kind: _rope(value, config) for kind, value in parameters.items()}
    if isinstance(parameters, Mapping):
        rope = _rope(parameters, config)
        return {FULL: rope, SLIDING: rope}
    theta = _float(config, "rope_theta", 10_000.0)
    full = RopeSpec(theta=theta, scaling=_scaling(config.get("rope_scaling") or {}, config))
    if config["model_type"] != "gemma3_text":
        return {FULL: full, SLIDING: full}
    # Gemma's scaling stretches only the layers that see far.
    return {FULL: full, SLIDING: RopeSpec(theta=_float(config, "rope_local_base_freq"))}


def _rope(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> RopeSpec:
    if parameters.get("partial_rotary_factor") not in REFUSED_IF_SET["partial_rotary_factor"]:
        raise ConfigError(
            f"partial_rotary_factor={parameters['partial_rotary_factor']!r} is not supported"
        )
    return RopeSpec(theta=_float(parameters, "rope_theta"), scaling=_scaling(parameters, config))


def _scaling(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    match kind := parameters.get("rope_type", parameters.get("type", "default")):
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=_float(parameters, "factor"))
        case "llama3":
            return Llama3Scaling(
                factor=_float(parameters, "factor"),
                low_freq_factor=_float(parameters, "low_freq_factor"),
                high_freq_factor=_float(parameters, "high_freq_factor"),
                original_context_tokens=_int(
                    parameters,
                    "original_max_position_embeddings",
                    _int(config, "max_position_embeddings"),
                ),
            )
        case _:
            raise ConfigError(
                f"rope type {kind!r} is not supported; supported: default, linear, llama3"
            )


def _eos_ids(value: object) -> Iterable[int]:
    if isinstance(value, int):
        return [value]
    return [item for item in value if isinstance(item, int)] if isinstance(value, list) else []


def _number(
    config: Mapping[str, Any], field: str, default: float | None, convert: Callable[[Any], Any]
) -> Any:
    value = config.get(field)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{field}={value!r} is not a positive number")
    return convert(value)


def _int(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = _number(config, field, default, int)
    assert isinstance(value, int)
    return value


def _float(config: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = _number(config, field, default, float)
    assert isinstance(value, float)
    return value
