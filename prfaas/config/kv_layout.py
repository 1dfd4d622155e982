"""[[kv.groups]] of a profile: which layers keep what for a prompt, as a cache layout; torch-free.

Each group has its `kind` and its `layers`: "full" keeps `bytes_per_token` in each of them for every
token, "window" for the last `window_tokens` - 1, "state" keeps `state_bytes` whatever the length.
"""

from collections.abc import Iterator
from typing import Literal, assert_never, cast, get_args

from prfaas.cache.spec import CacheLayout, FullSpec, GroupSpec, StateSpec, WindowSpec
from prfaas.config.tables import Table
from prfaas.engine.kv_groups import STATE_PAGE_BYTES
from prfaas.scheduler.curves import LinearCurve

GroupKind = Literal["full", "window", "state"]

MAX_LAYERS = 65_536
MAX_WINDOW_TOKENS = 100_000_000
MAX_BYTES = 1 << 32
"""Of one layer: a token's KV, or a state."""


def read_layout(table: Table, block_tokens: int) -> CacheLayout:
    """Return the layout that the `groups` of a [kv] describe, in blocks of so many tokens.

    Raises:
        ConfigError: an unknown or missing key, a value that makes no sense, or a layer that stands
            in two groups of KV.
    """
    groups: list[GroupSpec] = []
    largest = 0
    for index, group in enumerate(table.tables("groups")):
        spec = _group(group, index, block_tokens, largest)
        largest = max(largest, spec.page_bytes)
        groups.append(spec)
    try:
        return CacheLayout(block_tokens=block_tokens, groups=tuple(groups))
    except ValueError as error:
        raise table.error("groups", error) from None


def layout_lines(layout: CacheLayout) -> Iterator[str]:
    """Yield the lines of TOML that `read_layout` reads as a layout of the same bytes."""
    for spec in layout.groups:
        yield "[[kv.groups]]"
        match spec:
            case FullSpec():
                yield 'kind = "full"'
                yield f"bytes_per_token = {spec.page_bytes // layout.block_tokens}"
            case WindowSpec():
                yield 'kind = "window"'
                yield f"window_tokens = {spec.window_tokens}"
                yield f"bytes_per_token = {spec.page_bytes // layout.block_tokens}"
            case StateSpec():
                yield 'kind = "state"'
                yield f"state_bytes = {spec.state_bytes}"
            case _:
                assert_never(spec)
        yield f"layers = {list(spec.layers)}"


def layout_kv_bytes(layout: CacheLayout, num_tokens: int) -> int:
    """Return S_kv(num_tokens): what it takes to go on from a prompt of that many tokens, above 0.

    A transfer brings a little more: whole blocks of windows, and also what the last block boundary
    needs (`CacheLayout.bytes_needed`).
    """
    total = 0
    for spec in layout.groups:
        match spec:
            case FullSpec():
                kept = num_tokens * (spec.page_bytes // layout.block_tokens)
            case WindowSpec():
                tokens = min(num_tokens, spec.window_tokens - 1)
                kept = tokens * (spec.page_bytes // layout.block_tokens)
            case StateSpec():
                kept = spec.state_bytes
            case _:
                assert_never(spec)
        total += len(spec.layers) * kept
    return total


def layout_kv_curve(layout: CacheLayout) -> LinearCurve:
    """Return S_kv as a curve that equals `layout_kv_bytes` at every whole number of tokens above 0."""
    windows = {spec.window_tokens - 1 for spec in layout.groups if isinstance(spec, WindowSpec)}
    knots = sorted({1, *(kept for kept in windows if kept > 0)})
    knots.append(knots[-1] + 1)
    return LinearCurve(
        tokens=tuple(float(knot) for knot in knots),
        values=tuple(float(layout_kv_bytes(layout, knot)) for knot in knots),
    )


def _group(table: Table, index: int, block_tokens: int, largest: int) -> GroupSpec:
    """Return one group; slices of states are as large as the `largest` page before them."""
    kind = cast("GroupKind", table.choice("kind", get_args(GroupKind)))
    name, layers = f"{kind}-{index}", _layers(table)
    spec: GroupSpec
    match kind:
        case "full":
            spec = FullSpec(name=name, layers=layers, page_bytes=_page_bytes(table, block_tokens))
        case "window":
            spec = WindowSpec(
                name=name,
                layers=layers,
                page_bytes=_page_bytes(table, block_tokens),
                window_tokens=table.integer("window_tokens", minimum=1, maximum=MAX_WINDOW_TOKENS),
            )
        case "state":
            state_bytes = table.integer("state_bytes", minimum=1, maximum=MAX_BYTES)
            page_bytes = min(state_bytes, largest or STATE_PAGE_BYTES)
            spec = StateSpec(
                name=name, layers=layers, page_bytes=page_bytes, state_bytes=state_bytes
            )
        case _:
            assert_never(kind)
    table.finish()
    return spec


def _page_bytes(table: Table, block_tokens: int) -> int:
    return block_tokens * table.integer("bytes_per_token", minimum=1, maximum=MAX_BYTES)


def _layers(table: Table) -> tuple[int, ...]:
    numbers = table.numbers("layers", minimum=0, maximum=MAX_LAYERS)
    for number in numbers:
        if number != int(number):
            raise table.error("layers", f"{number:g} is no layer")
    return tuple(int(number) for number in numbers)
