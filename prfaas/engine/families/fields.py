"""Typed access to the fields of a config.json, and what they ask for that no spec describes."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict, Unpack

from prfaas.engine.ffn_spec import FfnSpec
from prfaas.engine.mixer_spec import MixerSpec
from prfaas.engine.model_spec import Activation, ModelSpec, ResidualSpec
from prfaas.errors import ConfigError

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
CONV, HYBRID, MOE, MLP = "conv", "hybrid", "moe", "mlp"
PRE_NORM = ResidualSpec()
CONTEXT_TOKENS = ("max_position_embeddings", "model_max_length")
FURTHER_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_layers")
LAYER_TYPE_ALIASES = {"attention": FULL, "mamba": LINEAR, "mamba2": LINEAR}
"""Older names of layer types, in configs on the hub."""
REFUSED: Mapping[str, tuple[object, ...]] = {
    # field -> the values that mean "off"
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "quantization_config": (None,),
    "compression_config": (None,),
    "quantization": (None,),
    "pretraining_tp": (None, 1),
}
ACTIVATION_NAMES: Mapping[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "clamped_silu": ("silu",),
    "gelu_tanh": ("gelu_pytorch_tanh",),
    "relu2": ("relu2",),
}


class ModelFeatures(TypedDict, total=False):
    """What only some families set in ModelSpec."""

    has_unit_offset_norms: bool
    embedding_scale: float
    logits_scale: float


class Fields:
    """The fields of one config.json; a null is a field that is not there.

    Attributes:
        unsupported: what a reader met and no spec describes, each as "name=value".
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = {name: value for name, value in config.items() if value is not None}
        self._nulls = config.keys() - self._config.keys()
        self.unsupported: list[str] = []

    def get(self, *names: str) -> Any:
        """Return the first field of these names that is there, or None."""
        return next((self._config[name] for name in names if name in self._config), None)

    def __contains__(self, name: str) -> bool:
        return name in self._config

    def is_null(self, name: str) -> bool:
        """Return whether the field is written, as null; for the few that mean something by it."""
        return name in self._nulls

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return a positive integer; raises ConfigError if it is something else, or missing."""
        value = self.number(*names, default=default)
        if not value.is_integer():
            raise ConfigError(f"{names[0]}={self.get(*names)!r} is not a positive integer")
        return int(value)

    def count(self, *names: str) -> int:
        """Return an integer of at least 0, such as a number of shared experts; 0 if missing."""
        return 0 if self.get(*names) in (None, 0) else self.integer(*names)

    def optional_integer(self, *names: str) -> int | None:
        """Return a positive integer, or None if it is missing."""
        return None if self.get(*names) is None else self.integer(*names)

    def number(self, *names: str, default: float | None = None) -> float:
        """Return a positive number; raises ConfigError if it is something else, or missing."""
        value = self.get(*names)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_positive(value):
            raise ConfigError(f"{names[0]}={value!r} is not a positive number")
        return float(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...] | None:
        """Return so many numbers, or None if missing; raises ConfigError if it is something else."""
        values = self.items(name)
        if values is None:
            return None
        if len(values) != count or not all(_is_number(value) for value in values):
            raise ConfigError(f"{name}={values!r} is not a list of {count} numbers")
        return tuple(map(float, values))

    def flag(self, *names: str, default: bool = False) -> bool:
        """Return a boolean; raises ConfigError if it is something else."""
        value = self.get(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{names[0]}={value!r} is neither true nor false")
        return value

    def items(self, *names: str) -> list[Any] | None:
        """Return a list, or None if it is missing; raises ConfigError if it is something else."""
        value = self.get(*names)
        if value is not None and not isinstance(value, list | tuple):
            raise ConfigError(f"{names[0]}={value!r} is not a list")
        return None if value is None else list(value)

    def section(self, name: str) -> "Fields | None":
        """Return an object inside the config, or None if it is missing."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}={value!r} is not an object")
        fields = Fields(value)
        fields.unsupported = self.unsupported
        return fields

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Fields":
        """Return these fields with defaults for those that are not there."""
        fields = Fields(dict(defaults) | self._config)
        fields.unsupported = self.unsupported
        return fields

    def with_values(self, values: Mapping[str, Any]) -> "Fields":
        """Return these fields with others in place of some."""
        fields = Fields(self._config | dict(values))
        fields.unsupported = self.unsupported
        return fields

    def refuse(self, what: str) -> None:
        """Note a feature that no spec describes."""
        self.unsupported.append(what)

    def refuse_unless(self, field: str, *off: object) -> None:
        """Note `field` if it is there and has none of the values `off`."""
        value = self.get(field)
        if value is not None and value not in off:
            self.refuse(f"{field}={value!r}")

    def num_layers(self) -> int:
        """Return num_hidden_layers."""
        return self.integer("num_hidden_layers")

    def layer_types(self, default: Callable[[int], str]) -> list[str]:
        """Return the type of each layer, by its present name; `default` where the config has none."""
        num_layers = self.num_layers()
        types = self.items("layer_types", "layers_block_type")
        if types is None:
            return [default(layer) for layer in range(num_layers)]
        if len(types) != num_layers:
            raise ConfigError(f"layer_types names {len(types)} of {num_layers} layers")
        return [LAYER_TYPE_ALIASES.get(str(kind), str(kind)) for kind in types]

    def model(
        self,
        *,
        layers: Iterable[MixerSpec],
        ffns: Iterable[FfnSpec | None],
        mixer_residual: ResidualSpec | Iterable[ResidualSpec] = PRE_NORM,
        ffn_residual: ResidualSpec | Iterable[ResidualSpec] = PRE_NORM,
        eps_names: tuple[str, ...] = ("rms_norm_eps",),
        activation: Activation = "silu",
        activation_field: str = "hidden_act",
        is_tied: bool = False,
        **more: Unpack[ModelFeatures],
    ) -> ModelSpec:
        """Return the model around these layers; `is_tied` where the config does not say.

        One residual is that of every layer.
        """
        layers, ffns = tuple(layers), tuple(ffns)
        for field, off in REFUSED.items():
            self.refuse_unless(field, *off)
        self.refuse_unless(activation_field, *ACTIVATION_NAMES[activation])
        bos = self.get("bos_token_id")
        return ModelSpec(
            model_type=str(self.get("model_type")),
            vocab_size=self.integer("vocab_size"),
            hidden_size=self.integer("hidden_size"),
            layers=layers,
            ffns=ffns,
            max_context_tokens=self.integer(*CONTEXT_TOKENS),
            norm_eps=self.number(*eps_names),
            mixer_residuals=_for_each(mixer_residual, len(layers)),
            ffn_residuals=_for_each(ffn_residual, len(layers)),
            activation=activation,
            has_tied_embeddings=self.flag("tie_word_embeddings", "tie_embedding", default=is_tied),
            bos_token_id=bos if isinstance(bos, int) else None,
            eos_token_ids=_eos_ids(self.get("eos_token_id")),
            num_further_layers=self.count(*FURTHER_LAYERS),
            unsupported=tuple(dict.fromkeys(self.unsupported)),
            **more,
        )


def bad_layer_type(kind: str) -> ConfigError:
    """Return the error for a layer type that the family does not have."""
    return ConfigError(f"layer type {kind!r} is not supported")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive(value: float) -> bool:
    return 0 < value < math.inf


def _for_each(
    residual: ResidualSpec | Iterable[ResidualSpec], num_layers: int
) -> tuple[ResidualSpec, ...]:
    return (residual,) * num_layers if isinstance(residual, ResidualSpec) else tuple(residual)


def _eos_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    return tuple(x for x in value if isinstance(x, int)) if isinstance(value, list) else ()
