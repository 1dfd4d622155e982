"""A cache's layout as plain JSON values, so that who holds no pages can name blocks and count bytes.

What is parsed may come from anywhere: every number and every list is bounded before it is used.
"""

from collections.abc import Mapping
from typing import Any, assert_never

from prfaas.cache.spec import CacheLayout, FullSpec, GroupSpec, StateSpec, WindowSpec

MAX_GROUPS = 64
MAX_LAYERS = 4096
"""Of one group, and the layer numbers end below it."""
MAX_BLOCK_TOKENS = 1 << 16
MAX_WINDOW_TOKENS = 1 << 32
MAX_PAGE_BYTES = 1 << 32
MAX_STATE_BYTES = 1 << 40
MAX_NAME_LENGTH = 256

_FIELDS = {
    "full": ("page_bytes", "row_items"),
    "window": ("page_bytes", "window_tokens", "row_items"),
    "state": ("page_bytes", "state_bytes"),
}


def encode_layout(layout: CacheLayout) -> dict[str, object]:
    """Return the layout as JSON has it; `parse_layout` makes an equal one of it."""
    return {
        "version": layout.layout_version,
        "block_tokens": layout.block_tokens,
        "groups": [_encode_group(spec) for spec in layout.groups],
    }


def _encode_group(spec: GroupSpec) -> dict[str, object]:
    match spec:
        case FullSpec():
            kind = "full"
        case WindowSpec():
            kind = "window"
        case StateSpec():
            kind = "state"
        case _:
            assert_never(spec)
    sizes = {field: getattr(spec, field) for field in _FIELDS[kind]}
    return {"kind": kind, "name": spec.name, "layers": list(spec.layers)} | sizes


def parse_layout(value: object) -> CacheLayout:
    """Return the layout that `encode_layout` gave this value for.

    Raises:
        ValueError: it is no such value, or describes no layout; the message names the field.
    """
    fields = _fields(value, "layout", ("version", "block_tokens", "groups"))
    groups = _list(fields["groups"], "layout.groups", MAX_GROUPS)
    return CacheLayout(
        block_tokens=_count(fields["block_tokens"], "layout.block_tokens", MAX_BLOCK_TOKENS),
        groups=tuple(_parse_group(group, f"layout.groups[{n}]") for n, group in enumerate(groups)),
        layout_version=_name(fields["version"], "layout.version"),
    )


def _parse_group(value: object, where: str) -> GroupSpec:
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(f"{where}.kind is not one of {', '.join(_FIELDS)}")
    fields = _fields(value, where, ("kind", "name", "layers", *_FIELDS[kind]))
    name = _name(fields["name"], f"{where}.name")
    layers = tuple(
        _count(layer, f"{where}.layers[{n}]", MAX_LAYERS - 1, least=0)
        for n, layer in enumerate(_list(fields["layers"], f"{where}.layers", MAX_LAYERS))
    )
    page_bytes = _count(fields["page_bytes"], f"{where}.page_bytes", MAX_PAGE_BYTES)
    if kind == "state":
        state_bytes = _count(fields["state_bytes"], f"{where}.state_bytes", MAX_STATE_BYTES)
        return StateSpec(name=name, layers=layers, page_bytes=page_bytes, state_bytes=state_bytes)
    row_items = fields["row_items"]
    if row_items is not None:
        row_items = _count(row_items, f"{where}.row_items", MAX_PAGE_BYTES)
    if kind == "full":
        return FullSpec(name=name, layers=layers, page_bytes=page_bytes, row_items=row_items)
    return WindowSpec(
        name=name,
        layers=layers,
        page_bytes=page_bytes,
        window_tokens=_count(fields["window_tokens"], f"{where}.window_tokens", MAX_WINDOW_TOKENS),
        row_items=row_items,
    )


def _fields(value: object, where: str, names: tuple[str, ...]) -> Mapping[str, Any]:
    """Return an object that has these fields and no others."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is no object")  # noqa: TRY004  what is wrong is a value
    missing = [name for name in names if name not in value]
    if missing:
        raise ValueError(f"{where}.{missing[0]} is missing")
    if len(value) != len(names):
        raise ValueError(f"{where} has fields besides {', '.join(names)}")
    return value


def _list(value: object, where: str, longest: int) -> list[object]:
    if not isinstance(value, list) or len(value) > longest:
        raise ValueError(f"{where} is no list of at most {longest}")
    return value


def _count(value: object, where: str, most: int, *, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{where} is no whole number from {least} to {most}")
    return value


def _name(value: object, where: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME_LENGTH:
        raise ValueError(f"{where} is no text of 1 to {MAX_NAME_LENGTH} characters")
    return value
