"""The pages of a replayed model: those of the real one, or fewer and smaller ones. Pure; torch-free."""

from dataclasses import replace

from prfaas.cache.spec import (
    LAYOUT_VERSION,
    MAX_PAGES_PER_BLOCK,
    CacheLayout,
    FullSpec,
    GroupSpec,
    StateSpec,
    WindowSpec,
)
from prfaas.engine.kv_groups import STATE_PAGE_BYTES

LEAST_LAYERS = 4
"""A scaled group keeps as many layers, so that pages still come layer by layer."""
_VERSION = f"{LAYOUT_VERSION} replay"


def replay_layout(layout: CacheLayout, bytes_scale: float) -> CacheLayout:
    """Return the layout with `bytes_scale` of its bytes, rounded to whole bytes a token and layer.

    Pages stay as large as they can: a group gives up layers before its pages shrink.
    """
    sizes = [_num_layers(spec, bytes_scale) for spec in layout.groups]
    layers = [spec.layers for spec in layout.groups] if bytes_scale == 1 else _interleaved(sizes)
    largest = 0
    groups: list[GroupSpec] = []
    for spec, own in zip(layout.groups, layers, strict=True):
        share = bytes_scale * len(spec.layers) / len(own)
        if isinstance(spec, StateSpec):
            size = max(1, round(spec.state_bytes * share))
            page_bytes = _slice_bytes(size, len(own), largest or STATE_PAGE_BYTES)
            groups.append(replace(spec, layers=own, state_bytes=size, page_bytes=page_bytes))
        else:
            per_token = max(1, round(spec.page_bytes / layout.block_tokens * share))
            page_bytes = per_token * layout.block_tokens
            largest = max(largest, page_bytes)
            # Its pages hold no numbers that a lossy codec could round.
            groups.append(replace(spec, layers=own, page_bytes=page_bytes, row_items=None))
    return CacheLayout(
        block_tokens=layout.block_tokens, groups=tuple(groups), layout_version=_VERSION
    )


def plain_layout(*, bytes_per_token: float, state_bytes: float, block_tokens: int) -> CacheLayout:
    """Return the layout of a model of which no more than its S_kv is known, a straight line."""
    per_layer = max(1, round(bytes_per_token / LEAST_LAYERS))
    page_bytes = per_layer * block_tokens
    layers = _interleaved([LEAST_LAYERS] * (2 if state_bytes >= LEAST_LAYERS else 1))
    groups: list[GroupSpec] = [FullSpec(name="full", layers=layers[0], page_bytes=page_bytes)]
    for own in layers[1:]:
        size = round(state_bytes / LEAST_LAYERS)
        groups.append(
            StateSpec(
                name="state",
                layers=own,
                page_bytes=_slice_bytes(size, len(own), page_bytes),
                state_bytes=size,
            )
        )
    return CacheLayout(block_tokens=block_tokens, groups=tuple(groups), layout_version=_VERSION)


def _slice_bytes(state_bytes: int, num_layers: int, page_bytes: int) -> int:
    """Return the size of a state's slices: that of the other pages, unless they were too many."""
    least = -(-state_bytes * num_layers // (MAX_PAGES_PER_BLOCK // 2))
    return min(state_bytes, max(page_bytes, least))


def _num_layers(spec: FullSpec | WindowSpec | StateSpec, bytes_scale: float) -> int:
    count = len(spec.layers)
    return max(min(count, LEAST_LAYERS), round(count * bytes_scale))


def _interleaved(sizes: list[int]) -> list[tuple[int, ...]]:
    """Return layer numbers for groups of these sizes, each spread over all layers."""
    places = [((place + 0.5) / size, g) for g, size in enumerate(sizes) for place in range(size)]
    groups: list[list[int]] = [[] for _ in sizes]
    for layer, (_, group) in enumerate(sorted(places)):
        groups[group].append(layer)
    return [tuple(group) for group in groups]
