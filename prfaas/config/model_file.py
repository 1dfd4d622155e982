"""S_kv of the model that a config.json describes, for profiles; torch-free."""

import json
from pathlib import Path
from typing import cast, get_args

from prfaas.engine.families.registry import describe
from prfaas.engine.mixer_spec import KvDtype
from prfaas.engine.model_spec import ModelSpec, layers_kv_bytes
from prfaas.errors import ConfigError
from prfaas.scheduler.curves import LinearCurve

KV_DTYPES: tuple[str, ...] = get_args(KvDtype)


def read_model(path: Path) -> ModelSpec:
    """Return the model of a config.json. Raises ConfigError if it cannot be read or makes no sense."""
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a JSON {type(config).__name__}, not an object")
    return describe(config)


def kv_curve(model: ModelSpec, kv_dtype: KvDtype) -> LinearCurve:
    """Return S_kv(l), equal to `layers_kv_bytes` at every whole number of tokens above 0.

    It is made of straight lines: a full layer adds bytes with every token, a window until it is
    full, a state at once.
    """
    windows = {layer.window_tokens - 1 for layer in model.layers if layer.window_tokens is not None}
    knots = sorted({1, *(kept for kept in windows if kept > 0)})
    knots.append(knots[-1] + 1)
    values = tuple(float(layers_kv_bytes(model.layers, knot, kv_dtype)) for knot in knots)
    return LinearCurve(tokens=tuple(float(knot) for knot in knots), values=values)


def as_kv_dtype(name: str) -> KvDtype:
    """Return a name out of KV_DTYPES as what it is."""
    assert name in KV_DTYPES
    return cast("KvDtype", name)
