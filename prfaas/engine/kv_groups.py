"""Which layers' KV and states are cached together, as pages of which size; torch-free."""

import math
from collections.abc import Sequence

from prfaas.cache.spec import (
    LAYOUT_VERSION,
    CacheLayout,
    FullSpec,
    GroupSpec,
    StateSpec,
    WindowSpec,
)
from prfaas.engine.mixer_spec import GqaSpec, KvDtype, MixerSpec, MlaSpec, ParallelSpec, state_bytes
from prfaas.engine.model_spec import LayerGroup, layer_groups

STATE_PAGE_BYTES = 256 << 10
"""A slice of a state in a model without KV, whose pages would else set the size."""


def kv_groups(
    layers: Sequence[MixerSpec], block_tokens: int, kv_dtype: KvDtype = "float32"
) -> CacheLayout:
    """Return the cache layout of a model's layers: those that keep the same bytes share a group.

    Full attention stands first, whose blocks decide most hits, then windows, then states, each in
    the order of its first layer. The layout's version names how the bytes of every group lie.

    Args:
        layers: of the model, in order.
        block_tokens: of the pages of K and V; states are kept at its multiples.
        kv_dtype: of K and V, and of convolution rows.
    """
    kept = layer_groups(layers, kv_dtype)
    page_bytes = [block_tokens * group.bytes_per_token for group in kept if group.bytes_per_token]
    largest = max(page_bytes, default=STATE_PAGE_BYTES)
    groups: list[GroupSpec] = []
    tags: list[str] = []
    for group in kept:
        if group.kind == "state":
            num_bytes = state_bytes(layers[group.layers[0]], kv_dtype)
            groups.append(_state_group(group, largest, num_bytes))
        else:
            row_items = math.gcd(*(_row_items(layers[layer]) for layer in group.layers))
            groups.append(_kv_group(group, block_tokens, row_items))
        tags.append(group.layout)
    return CacheLayout(
        block_tokens=block_tokens,
        groups=tuple(groups),
        layout_version=f"{LAYOUT_VERSION} {' '.join(tags)}",
    )


def _row_items(layer: MixerSpec) -> int:
    """Return the numbers of one token's one head, of K and of V; the longest part of unequal ones.

    The latent and the rotated key of latent attention are two such parts: their scales differ.
    """
    match layer:
        case GqaSpec():
            return math.gcd(layer.head_dim, layer.value_dim)
        case MlaSpec():
            return math.gcd(layer.latent_dim, layer.rope_dim)
        case ParallelSpec():
            return _row_items(layer.attention)
        case _:
            raise AssertionError(f"a {layer.mixer} layer keeps nothing for a token")


def _kv_group(group: LayerGroup, block_tokens: int, row_items: int) -> FullSpec | WindowSpec:
    page_bytes = block_tokens * group.bytes_per_token
    if group.window_tokens is None:
        return FullSpec(
            name=f"full-{group.bytes_per_token}",
            layers=group.layers,
            page_bytes=page_bytes,
            row_items=row_items,
        )
    return WindowSpec(
        name=f"window{group.window_tokens}-{group.bytes_per_token}",
        layers=group.layers,
        page_bytes=page_bytes,
        window_tokens=group.window_tokens,
        row_items=row_items,
    )


def _state_group(group: LayerGroup, largest_page_bytes: int, num_bytes: int) -> StateSpec:
    return StateSpec(
        name=f"state-{group.mixer}-{num_bytes}",
        layers=group.layers,
        page_bytes=min(num_bytes, largest_page_bytes),
        state_bytes=num_bytes,
    )
