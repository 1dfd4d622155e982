"""Text and TOML values become typed values within their limits, or a ConfigError that names both."""

import math
import re

from prfaas.config.setting import Kind, Setting
from prfaas.errors import ConfigError

Value = bool | int | float | str | None

_UNITS: dict[str, int] = {"": 1, "B": 1}
_UNITS |= {f"{prefix}iB": 1 << 10 * power for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
_RATE_UNITS: dict[str, float] = {
    f"{prefix}bit": 10 ** (3 * power) / 8 for power, prefix in enumerate(["", "k", "M", "G", "T"])
}
_RATE_UNITS |= {unit: float(scale) for unit, scale in _UNITS.items() if unit}
_SWITCH = {"true": True, "1": True, "yes": True, "on": True}
_SWITCH |= {"false": False, "0": False, "no": False, "off": False}
_EXPECTED: dict[Kind, str] = {
    "integer": "a whole number",
    "number": "a number",
    "rate": "a rate such as 800Mbit, or bytes per second",
    "size": "bytes such as 4GiB or 4096",
    "switch": "true or false",
    "text": "printable text",
}
_INTEGER = re.compile(r"[+-]?\d{1,200}", re.ASCII)
"""Longer than any limit, so that what is too large is said to be that."""
_NUMBER = re.compile(r"[+-]?\d{1,200}(?:\.\d{1,19})?(?:[eE][+-]?\d{1,3})?", re.ASCII)


def parse_size(text: str) -> int:
    """Return the bytes that `4GiB`, `1.5 GB` or `4096` stands for.

    Raises:
        ValueError: not a number with a known unit, or no whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS or len(match[1]) > 24:
        raise ValueError(f"expected bytes such as 4GiB, 500MB or 4096, not {text!r}")
    whole, _, fraction = match[1].partition(".")
    scale: int = 10 ** len(fraction)
    num_bytes, rest = divmod(int(whole + fraction) * _UNITS[match[2]], scale)
    if rest:
        raise ValueError(f"{text!r} is no whole number of bytes")
    return num_bytes


def parse_rate(text: str) -> float:
    """Return the bytes per second that `800Mbit`, `1.5 Gbit/s` or `100MB/s` stands for.

    Raises:
        ValueError: not a number with a known unit; one without a unit could be bits or bytes.
    """
    match = _SIZE.fullmatch(text.strip().removesuffix("/s"))
    if match is None or match[2] not in _RATE_UNITS or len(match[1]) > 24:
        raise ValueError(f"expected a rate such as 800Mbit, 1.5Gbit or 100MB/s, not {text!r}")
    return float(match[1]) * _RATE_UNITS[match[2]]


def read_value(setting: Setting, raw: object, *, origin: str) -> Value:
    """Return the value of `raw`, which is text from a flag or variable, or a TOML value.

    Raises:
        ConfigError: of another type, or out of bounds; names `origin`, the value and the limit.
    """
    try:
        value = _typed(setting, raw)
        _check_bounds(setting, value)
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}") from None
    return value


def _typed(setting: Setting, raw: object) -> Value:
    if setting.takes_auto and raw == "auto":
        return None
    if isinstance(raw, str):
        return _from_text(setting, raw)
    match setting.kind, raw:
        case "switch", bool():
            return raw
        case (("integer" | "size"), int()) if not isinstance(raw, bool):
            return raw
        case (("number" | "rate"), (int() | float())) if not isinstance(raw, bool):
            return float(raw)
        case _:
            raise _unexpected(setting, raw)


def _from_text(setting: Setting, text: str) -> Value:
    value: Value = None
    match setting.kind:
        case "switch":
            value = _SWITCH.get(text.lower())
        case "integer":
            value = int(text) if _INTEGER.fullmatch(text) else None
        case "number":
            value = float(text) if _NUMBER.fullmatch(text) else None
        case "size":
            value = parse_size(text)
        case "rate":
            value = parse_rate(text)
        case "choice":
            value = text if text in setting.choices else None
        case "text":
            value = text if text and text.isprintable() else None
    if value is None:
        raise _unexpected(setting, text)
    return value


def _unexpected(setting: Setting, raw: object) -> ValueError:
    if setting.is_secret:
        return ValueError(f"expected {_expected(setting)}")
    shown = str(raw).lower() if isinstance(raw, bool) else repr(raw)
    return ValueError(f"expected {_expected(setting)}, not {shown}")


def _expected(setting: Setting) -> str:
    if setting.kind == "choice":
        return "one of " + ", ".join(setting.choices)
    expected = _EXPECTED[setting.kind]
    return f"{expected} or auto" if setting.takes_auto else expected


def _check_bounds(setting: Setting, value: Value) -> None:
    if value is None or isinstance(value, bool | str):
        return
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    if not math.isfinite(value):
        raise ValueError(f"expected a finite number, not {shown}")
    if setting.above is not None and value <= setting.above:
        raise ValueError(f"{shown} must be above {setting.above:g}")
    if setting.minimum is not None and value < setting.minimum:
        raise ValueError(f"{shown} is below the minimum of {setting.minimum:.15g}")
    if setting.maximum is not None and value > setting.maximum:
        raise ValueError(f"{shown} is above the maximum of {setting.maximum:.15g}")
