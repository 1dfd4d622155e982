"""The models that this engine computes, from Hugging Face's config.json or GGUF metadata; torch-free.

`describe` reads the config.json of every family that prfaas knows. What a description cannot say is
in its `unsupported`, and such a model is refused by name before anything of it is loaded.
"""

from collections.abc import Mapping
from typing import Any

from prfaas.engine import gguf_config
from prfaas.engine.families.registry import describe
from prfaas.engine.mixer_spec import KvDtype
from prfaas.engine.model_spec import ModelSpec, layers_kv_bytes
from prfaas.errors import ConfigError


def model_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json describes.

    Raises:
        ConfigError: an unknown architecture, a missing field, or a feature that is not computed.
    """
    model = describe(config)
    if model.unsupported:
        raise ConfigError(f"not supported: {', '.join(model.unsupported)}")
    return model


def model_from_gguf(metadata: Mapping[str, object]) -> ModelSpec:
    """Return the model that a GGUF file's metadata describes; raises like model_from_hf."""
    return model_from_hf(gguf_config.to_hf_config(metadata))


def kv_bytes(model: ModelSpec, num_tokens: int, kv_dtype: KvDtype = "float32") -> int:
    """Return S_kv(num_tokens): bytes needed to continue a sequence of that many tokens elsewhere."""
    return layers_kv_bytes(model.layers, num_tokens, kv_dtype)
