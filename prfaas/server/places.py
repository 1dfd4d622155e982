"""Which pages a transfer carries: both sides compute the same lists."""

from prfaas.cache.spec import (
    CacheLayout,
    FullSpec,
    GroupSpec,
    StateSpec,
    WindowSpec,
    bytes_of_page,
    held_blocks,
    missing_blocks,
    snapshot_blocks,
)
from prfaas.transport.pieces import PagePlace

SNAPSHOT_FRACTION = 0.1
"""Of the KV's bytes: what snapshots may add where nobody says how often they are wanted."""


def places_to_send(layout: CacheLayout, num_tokens: int, have_tokens: int) -> list[PagePlace]:
    """Return every page that a receiver lacks who holds a prefix hit of `have_tokens`.

    Both sides compute this list; what a hit pins at the receiver does not travel.
    """
    block_tokens = layout.block_tokens
    return [
        PagePlace(
            group=group,
            index=index,
            block=block,
            num_tokens=min(block_tokens, num_tokens - block * block_tokens),
        )
        for group, spec in enumerate(layout.groups)
        for block in missing_blocks(spec, num_tokens, have_tokens, block_tokens)
        for index in range(spec.pages_per_block)
    ]


def blocks_of_prefix(
    spec: GroupSpec, num_tokens: int, have_tokens: int, block_tokens: int
) -> tuple[int, ...]:
    """Return the blocks that a hit of `num_tokens` pins and one of `have_tokens` does not."""
    held = held_blocks(spec, have_tokens, block_tokens)
    return tuple(b for b in held_blocks(spec, num_tokens, block_tokens) if b not in held)


def places_of_prefix(layout: CacheLayout, num_tokens: int, have_tokens: int) -> list[PagePlace]:
    """Return every page that makes a hit of `have_tokens` one of `num_tokens`, both whole blocks.

    Unlike `places_to_send` nothing is needed but to go on there.
    """
    block_tokens = layout.block_tokens
    return [
        PagePlace(group=group, index=index, block=block, num_tokens=block_tokens)
        for group, spec in enumerate(layout.groups)
        for block in blocks_of_prefix(spec, num_tokens, have_tokens, block_tokens)
        for index in range(spec.pages_per_block)
    ]


def places_of_snapshots(
    layout: CacheLayout, num_tokens: int, have_tokens: int, snapshot_tokens: int
) -> list[PagePlace]:
    """Return every page beyond `places_to_send` by which one could go on at multiples of an interval.

    These are windows and states behind `have_tokens`; 0 stands for no snapshots.
    """
    if not snapshot_tokens:
        return []
    block_tokens = layout.block_tokens
    first = (have_tokens // snapshot_tokens + 1) * snapshot_tokens
    places = []
    for group, spec in enumerate(layout.groups):
        needed = set(missing_blocks(spec, num_tokens, have_tokens, block_tokens))
        blocks = {
            block
            for at in range(first, num_tokens + 1, snapshot_tokens)
            for block in snapshot_blocks(spec, at, block_tokens)
        }
        places += [
            PagePlace(group=group, index=index, block=block, num_tokens=block_tokens)
            for block in sorted(blocks - needed)
            for index in range(spec.pages_per_block)
        ]
    return places


def bytes_of_places(layout: CacheLayout, places: list[PagePlace]) -> int:
    """Return what the pages hold."""
    return sum(
        bytes_of_page(layout.groups[p.group], p.index, p.num_tokens, layout.block_tokens)
        for p in places
    )


def snapshot_interval(setting: str, layout: CacheLayout) -> int:
    """Return the tokens between two snapshots of a transfer; 0 is none.

    "auto" is the shortest interval at which they add at most a tenth to the bytes of full attention. A
    model without windows and states needs none, one without full attention has nothing to weigh by.
    """
    if setting != "auto":
        return int(setting)
    block_tokens = layout.block_tokens
    block_bytes = snapshot_bytes = 0
    for spec in layout.groups:
        match spec:
            case FullSpec():
                block_bytes += len(spec.layers) * spec.page_bytes
            case WindowSpec():
                num_blocks = -(-(spec.window_tokens - 1) // block_tokens)
                snapshot_bytes += num_blocks * len(spec.layers) * spec.page_bytes
            case StateSpec():
                snapshot_bytes += len(spec.layers) * spec.state_bytes
    if not block_bytes or not snapshot_bytes:
        return 0
    return -(-snapshot_bytes // int(SNAPSHOT_FRACTION * block_bytes)) * block_tokens
