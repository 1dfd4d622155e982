"""What `prfaas model inspect` says of a config.json, as JSON and as lines."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prfaas.cli.layer_pattern import shortest
from prfaas.engine.config import kv_bytes
from prfaas.engine.families.registry import describe
from prfaas.engine.mixer_spec import KvDtype, MixerSpec, StateTensor
from prfaas.engine.model_spec import constant_bytes, growth_bytes, layer_groups
from prfaas.errors import ConfigError

SHOWN_LENGTHS = (1024, 8192, 32_768, 131_072)
UNCERTAIN = "_uncertain"
"""A config's own note of fields that are not known for sure: field -> why."""
Report = dict[str, Any]


def read_config(path: Path) -> Report:
    """Return the object in a config.json; raises ConfigError if it cannot be read."""
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a JSON {type(config).__name__}, not an object")
    return config


def report(config: Mapping[str, Any], kv_dtype: KvDtype) -> Report:
    """Return everything that follows from a config.json; values of JSON types only.

    Raises:
        ConfigError: an unknown family, or a field that is missing or makes no sense.
    """
    model = describe(config)
    uncertain = config.get(UNCERTAIN) or {}
    if not isinstance(uncertain, Mapping):
        raise ConfigError(f"{UNCERTAIN}={uncertain!r} is not an object")
    constant, growth = constant_bytes(model.layers, kv_dtype), growth_bytes(model.layers, kv_dtype)
    kinds = [_kind(layer) for layer in model.layers]
    return {
        "model_type": model.model_type,
        "max_context_tokens": model.max_context_tokens,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "parameters": model.num_parameters,
        "num_layers": len(kinds),
        "layers": kinds,
        "pattern": ", ".join(str(part) for part in shortest(kinds)),
        "groups": [
            {
                "kind": group.kind,
                "mixer": group.mixer,
                "layout": group.layout,
                "layers": list(group.layers),
                "bytes_per_token": group.bytes_per_token,
                "window_tokens": group.window_tokens,
                "states": [_state(state) for state in group.states],
                "state_bytes": group.state_bytes,
            }
            for group in layer_groups(model.layers, kv_dtype)
        ],
        "kv_dtype": kv_dtype,
        "kv_bytes": {str(length): kv_bytes(model, length, kv_dtype) for length in SHOWN_LENGTHS},
        "bytes_per_token": growth,
        "constant_bytes": constant,
        "break_even_tokens": constant / growth if growth else None,
        "unsupported": list(model.unsupported),
        "uncertain": dict(uncertain),
    }


def lines(facts: Report, template: str | None = None) -> Iterator[str]:
    """Yield the report as label and value; `template` is said if given."""
    context = facts["max_context_tokens"]
    rows = [
        ("family", facts["model_type"]),
        ("context", f"{context:,} tokens"),
        ("vocabulary", f"{facts['vocab_size']:,}"),
        ("parameters", f"{facts['parameters']:,}"),
        ("layers", f"{facts['num_layers']}: {facts['pattern']}"),
    ]
    rows += [] if template is None else [("template", template)]
    rows += [("groups", _group(group)) for group in facts["groups"]]
    rows.append(
        ("KVCache", f"{facts['bytes_per_token']:,} bytes for each token, {facts['kv_dtype']}")
    )
    if facts["constant_bytes"]:
        even = facts["break_even_tokens"]
        worth = "" if even is None else f", as much as {even:,.0f} tokens"
        rows.append(("", f"{_mib(facts['constant_bytes'])} of state and full windows{worth}"))
    for length, num_bytes in facts["kv_bytes"].items():
        note = "" if int(length) <= context else "  (longer than the context)"
        rows.append((f"  at {int(length):,}", f"{_mib(num_bytes)}{note}"))
    rows += [("unsupported", what) for what in facts["unsupported"]]
    rows += [("uncertain", f"{field}: {why}") for field, why in facts["uncertain"].items()]
    for index, (label, value) in enumerate(rows):
        is_again = index and label == rows[index - 1][0]
        yield f"{'' if is_again else label:<12} {value}"


def _kind(layer: MixerSpec) -> str:
    window = "" if layer.window_tokens is None else f" window {layer.window_tokens}"
    return f"{layer.mixer}{window}"


def _state(state: StateTensor) -> dict[str, Any]:
    return {"name": state.name, "shape": list(state.shape), "dtype": state.dtype}


def _group(group: Mapping[str, Any]) -> str:
    text = f"{group['kind']:<7}{len(group['layers']):>3} {group['mixer']}: "
    if group["kind"] == "state":
        tensors = (f"{state['name']} {state['shape']}" for state in group["states"])
        return text + f"{group['state_bytes']:,} bytes each, {', '.join(tensors)}"
    text += f"{group['bytes_per_token']:,} bytes for each token"
    window = group["window_tokens"]
    return text if window is None else f"{text}, the last {window - 1} of them"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
