"""Writes files that a plan is read from, with a change somewhere."""

from pathlib import Path
from typing import Any

WORKLOAD: dict[str, Any] = {
    "kind": "lognormal",
    "mu": 9.9,
    "sigma": 1.0,
    "min_tokens": 128,
    "max_tokens": 131072,
    "output_tokens": 1024,
}
PROFILE: dict[str, Any] = {
    "name": "p",
    "hardware": "8 x G",
    "gpus_per_instance": 8,
    "prefill": {
        "curve": "cubic",
        "tokens": [1000, 100_000],
        "seconds": [0.5, 8.0],
        "provenance": "measured",
        "source": "a test",
    },
    "kv": {"tokens": [1, 1000], "bytes": [1000, 1_000_000]},
    "decode": {
        "max_batch": 32,
        "batch": [1, 32],
        "step_s": [0.01, 0.025],
        "provenance": "measured",
        "source": "a test",
    },
    "cost": {"per_gpu": 1.0, "provenance": "measured", "source": "a test"},
}
PLAN: dict[str, Any] = {
    "workload": "workload.toml",
    "min_decode_tokens_per_s": 40.0,
    "profiles": {"local": "profile.toml", "prfaas": "profile.toml"},
    "link": {"bytes_per_s": 1e9, "rtt_s": 0.01, "max_egress_fraction": 0.7},
    "deployments": {
        "a": {"kind": "prfaas", "prfaas_gpus": 8, "local_gpus": 24},
        "b": {"kind": "homogeneous", "local_gpus": 32},
    },
    "compare": {"deployment": "a", "equal_cost": "b"},
    "published": {
        "deployments": {"a": {"lambda_max_rps": 1.0}},
        "gains": {"b": {"ttft_p90_s": 0.1}},
    },
}
UNSET = object()
"""A change to this leaves the key out."""


def changed(tables: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    """Return a copy with one dotted key changed."""
    copy = dict(tables)
    first, dot, rest = key.partition(".")
    if dot:
        copy[first] = changed(copy[first], rest, value)
    elif value is UNSET:
        del copy[first]
    else:
        copy[first] = value
    return copy


def toml(tables: dict[str, Any], name: str = "") -> str:
    """Return the tables as TOML."""
    plain = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    lines = [f"[{name}]"] if name else []
    lines += [f"{key} = {_value(value)}" for key, value in plain.items()]
    for key, value in tables.items():
        if isinstance(value, dict):
            lines.append(toml(value, f"{name}.{key}" if name else key))
    return "\n".join(lines)


def write_plan(
    directory: Path,
    plan: dict[str, Any] | None = None,
    profile: dict[str, Any] | None = None,
    workload: dict[str, Any] | None = None,
) -> Path:
    """Write a plan with all that it names; return its path."""
    files = {
        "workload": WORKLOAD if workload is None else workload,
        "profile": PROFILE if profile is None else profile,
        "plan": PLAN if plan is None else plan,
    }
    for name, tables in files.items():
        (directory / f"{name}.toml").write_text(toml(tables))
    return directory / "plan.toml"


def _value(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        case list():
            return "[" + ", ".join(_value(entry) for entry in value) + "]"
        case dict():
            return "{" + ", ".join(f"{k} = {_value(v)}" for k, v in value.items()) + "}"
        case _:
            return str(value)
