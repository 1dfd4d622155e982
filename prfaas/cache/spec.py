"""What a cache holds: groups of layers, the blocks a position needs, and the bytes they take.

A block is `block_tokens` consecutive tokens. A page is one layer's KV of one block, or a slice of
one layer's state. Layers that look back equally far form a group; a layer with attention and a
state, in parallel, stands in two.

Block b of a state group is the state after block b: exact at (b + 1) * block_tokens tokens, or at
the sequence's end if that cuts the block. The pages of a block are numbered through: layer by layer
of the group, and slice by slice of a layer.
"""

from dataclasses import dataclass, field
from typing import assert_never

LAYOUT_VERSION = "2"
"""Changes whenever equal tokens could give other page bytes; part of every key."""

MAX_PAGES_PER_BLOCK = 1 << 16
"""Of one group: what names a page within its block has 16 bits on the wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSpec:
    """Layers that attend to every earlier token."""

    name: str
    layers: tuple[int, ...]
    page_bytes: int
    """One layer's KV of a whole block; a multiple of the block's tokens."""
    row_items: int | None = None
    """Numbers in a row of one token's one head, or of an equal part of it; None is unknown."""

    @property
    def pages_per_block(self) -> int:
        """One a layer."""
        return len(self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """Layers whose query at i sees the keys j with i - window_tokens < j <= i."""

    name: str
    layers: tuple[int, ...]
    page_bytes: int
    window_tokens: int
    row_items: int | None = None
    """See FullSpec."""

    @property
    def pages_per_block(self) -> int:
        """One a layer."""
        return len(self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """Layers that fold all earlier tokens into a state of fixed size."""

    name: str
    layers: tuple[int, ...]
    page_bytes: int
    """A slice of one layer's state; the last slice may be shorter."""
    state_bytes: int
    """One layer's state."""

    @property
    def slices_per_layer(self) -> int:
        """Pages that one layer's state takes."""
        return -(-self.state_bytes // self.page_bytes)

    @property
    def pages_per_block(self) -> int:
        """The slices of all layers."""
        return len(self.layers) * self.slices_per_layer


GroupSpec = FullSpec | WindowSpec | StateSpec


def held_blocks(spec: GroupSpec, num_tokens: int, block_tokens: int) -> range:
    """Return the blocks that the layers look back at from position `num_tokens` on.

    A prefix hit of that length pins exactly these, and needs no others.
    """
    num_blocks = -(-num_tokens // block_tokens)
    match spec:
        case FullSpec():
            return range(num_blocks)
        case WindowSpec(window_tokens=window_tokens):
            first_token = max(0, num_tokens - (window_tokens - 1))
            return range(first_token // block_tokens, num_blocks)
        case StateSpec():
            return range(max(0, num_blocks - 1), num_blocks)
        case _:
            assert_never(spec)


def replay_boundary(num_tokens: int, block_tokens: int) -> int:
    """Return the last block boundary that leaves a token of the first `num_tokens` to compute.

    The same prompt, sent again, hits there, and is computed from there where logits are wanted.
    """
    return max(0, num_tokens - 1) // block_tokens * block_tokens


def needed_blocks(spec: GroupSpec, num_tokens: int, block_tokens: int) -> range:
    """Return the blocks to have so that `num_tokens` and its replay boundary can go on."""
    boundary_tokens = replay_boundary(num_tokens, block_tokens)
    at_boundary = held_blocks(spec, boundary_tokens, block_tokens)
    return range(at_boundary.start, held_blocks(spec, num_tokens, block_tokens).stop)


def snapshot_blocks(spec: GroupSpec, num_tokens: int, block_tokens: int) -> range:
    """Return the blocks that a group adds to the KV of `num_tokens` tokens to go on there.

    `num_tokens` is a whole number of blocks. Full attention adds none: all its blocks stay anyway.
    """
    if isinstance(spec, FullSpec):
        return range(0)
    return held_blocks(spec, num_tokens, block_tokens)


def snapshot_of_block(
    spec: GroupSpec,
    block: int,
    *,
    every_tokens: int,
    num_tokens: int,
    block_tokens: int,
    after_tokens: int = 0,
) -> int:
    """Return the first snapshot behind `after_tokens` that a group's block is part of, or 0.

    Snapshots are taken at the multiples of `every_tokens`, itself a whole number of blocks, up to
    `num_tokens`; never, if it is 0.
    """
    if not every_tokens:
        return 0
    least = max((block + 1) * block_tokens, after_tokens + 1)
    at = -(-least // every_tokens) * every_tokens
    is_part = at <= num_tokens and block in snapshot_blocks(spec, at, block_tokens)
    return at if is_part else 0


def missing_blocks(
    spec: GroupSpec, num_tokens: int, have_tokens: int, block_tokens: int
) -> tuple[int, ...]:
    """Return the needed blocks at `num_tokens` that a hit of `have_tokens` does not pin."""
    held = held_blocks(spec, have_tokens, block_tokens)
    return tuple(b for b in needed_blocks(spec, num_tokens, block_tokens) if b not in held)


def bytes_of_page(
    spec: GroupSpec, page_index: int, num_tokens_in_block: int, block_tokens: int
) -> int:
    """Return the bytes that a page holds, counted among those of its block.

    KV that covers `num_tokens_in_block` tokens of a block is shorter if they are fewer than the
    block's; a state is as long after any of them.

    Raises:
        ValueError: the block has no such page, or not so many tokens.
    """
    if not 0 <= num_tokens_in_block <= block_tokens:
        raise ValueError(f"{num_tokens_in_block} tokens do not fit a block of {block_tokens}")
    if not 0 <= page_index < spec.pages_per_block:
        raise ValueError(f"page {page_index} of {spec.pages_per_block} in {spec.name}")
    match spec:
        case FullSpec() | WindowSpec():
            return spec.page_bytes // block_tokens * num_tokens_in_block
        case StateSpec():
            start = page_index % spec.slices_per_layer * spec.page_bytes
            return min(spec.page_bytes, spec.state_bytes - start)
        case _:
            assert_never(spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """The groups of one model at one block size. Equal layouts describe equal bytes."""

    block_tokens: int
    groups: tuple[GroupSpec, ...]
    layout_version: str = LAYOUT_VERSION
    _places_of_layer: dict[int, list[tuple[int, int]]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Raise ValueError for a layout in which a layer or a byte has no single place."""
        if self.block_tokens < 1 or not self.groups:
            raise ValueError(f"{len(self.groups)} groups of {self.block_tokens}-token blocks")
        places: dict[int, list[tuple[int, int]]] = {}
        kept: set[tuple[int, bool]] = set()
        for group, spec in enumerate(self.groups):
            self._check_group(spec)
            for index, layer in enumerate(spec.layers):
                what = (layer, isinstance(spec, StateSpec))
                if what in kept:
                    raise ValueError(f"layer {layer} is twice in the layout")
                kept.add(what)
                places.setdefault(layer, []).append((group, index))
        object.__setattr__(self, "_places_of_layer", places)

    def _check_group(self, spec: GroupSpec) -> None:
        num_bytes = spec.page_bytes
        is_whole = isinstance(spec, StateSpec) or num_bytes % self.block_tokens == 0
        if not spec.layers or num_bytes < 1 or not is_whole:
            raise ValueError(
                f"group {spec.name!r}: {len(spec.layers)} layers, pages of {num_bytes} bytes for "
                f"blocks of {self.block_tokens} tokens"
            )
        if isinstance(spec, WindowSpec) and spec.window_tokens < 1:
            raise ValueError(f"group {spec.name!r}: a window of {spec.window_tokens} tokens")
        if isinstance(spec, StateSpec) and spec.state_bytes < 1:
            raise ValueError(f"group {spec.name!r}: a state of {spec.state_bytes} bytes")
        if spec.pages_per_block > MAX_PAGES_PER_BLOCK:
            raise ValueError(
                f"group {spec.name!r}: {spec.pages_per_block} pages a block, at most "
                f"{MAX_PAGES_PER_BLOCK} have a name"
            )

    @property
    def page_bytes(self) -> int:
        """The size of every page of the pool: the largest group's."""
        return max(spec.page_bytes for spec in self.groups)

    @property
    def pages_per_block(self) -> int:
        """Pages that one block takes in all groups together."""
        return sum(spec.pages_per_block for spec in self.groups)

    @property
    def has_states(self) -> bool:
        """Whether some layers can only go on where their state was kept."""
        return any(isinstance(spec, StateSpec) for spec in self.groups)

    def groups_of_layer(self, layer: int) -> tuple[tuple[int, int], ...]:
        """Return (group, index within its layers) for each group that the layer stands in."""
        return tuple(self._places_of_layer.get(layer, ()))

    def pages_needed(self, num_tokens: int, have_tokens: int = 0) -> int:
        """Return the pages to reserve for `num_tokens` on top of a hit of `have_tokens`."""
        return sum(
            spec.pages_per_block * _num_missing(spec, num_tokens, have_tokens, self.block_tokens)[0]
            for spec in self.groups
        )

    def bytes_needed(self, num_tokens: int, have_tokens: int = 0) -> int:
        """Return the bytes that `pages_needed` pages hold, the last block cut at the token."""
        return sum(self._missing_bytes(spec, num_tokens, have_tokens) for spec in self.groups)

    def streamed_bytes(self, num_tokens: int, have_tokens: int = 0) -> int:
        """Return the part of `bytes_needed` that a prefill makes in step with its tokens.

        These are the full groups' bytes: windows and states are only needed as they are at the end.
        """
        return sum(
            self._missing_bytes(spec, num_tokens, have_tokens)
            for spec in self.groups
            if isinstance(spec, FullSpec)
        )

    def _missing_bytes(self, spec: GroupSpec, num_tokens: int, have_tokens: int) -> int:
        num_missing, lacks_last = _num_missing(spec, num_tokens, have_tokens, self.block_tokens)
        if isinstance(spec, StateSpec):
            return len(spec.layers) * spec.state_bytes * num_missing
        page_bytes = spec.page_bytes * num_missing
        if lacks_last:  # it may be cut
            cut_tokens = -num_tokens % self.block_tokens
            page_bytes -= spec.page_bytes // self.block_tokens * cut_tokens
        return len(spec.layers) * page_bytes


def _num_missing(
    spec: GroupSpec, num_tokens: int, have_tokens: int, block_tokens: int
) -> tuple[int, bool]:
    """Return how many `missing_blocks` there are, and whether the last one needed is among them."""
    needed = needed_blocks(spec, num_tokens, block_tokens)
    held = held_blocks(spec, have_tokens, block_tokens)
    num_held = max(0, min(needed.stop, held.stop) - max(needed.start, held.start))
    return len(needed) - num_held, bool(needed) and needed[-1] not in held
