"""What a cache holds: groups of layers, the blocks a position needs, and the bytes they take.

A block is `block_tokens` consecutive tokens. A page is one layer's KV of one block. Layers that
look back equally far form a group; a group's block is one page for each of its layers.
"""

from dataclasses import dataclass, field
from typing import assert_never

LAYOUT_VERSION = "1"
"""Changes whenever equal tokens could give other page bytes; part of every key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSpec:
    """Layers that attend to every earlier token."""

    name: str
    layers: tuple[int, ...]
    page_bytes: int
    """One layer's KV of a whole block; a multiple of the block's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """Layers whose query at i sees the keys j with i - window_tokens < j <= i."""

    name: str
    layers: tuple[int, ...]
    page_bytes: int
    window_tokens: int


GroupSpec = FullSpec | WindowSpec


def held_blocks(spec: GroupSpec, num_tokens: int, block_tokens: int) -> range:
    """Return the blocks that the layers look back at from position `num_tokens` on.

    A prefix hit of that length pins exactly these, and needs no others.
    """
    match spec:
        case FullSpec():
            first_token = 0
        case WindowSpec(window_tokens=window_tokens):
            first_token = max(0, num_tokens - (window_tokens - 1))
        case _:
            assert_never(spec)
    return range(first_token // block_tokens, -(-num_tokens // block_tokens))


def needed_blocks(spec: GroupSpec, num_tokens: int, block_tokens: int) -> range:
    """Return the blocks to have so that `num_tokens` and the block boundary before it can go on.

    The boundary matters because a prefix hit leaves a token to compute: the same prompt, sent
    again, hits at floor((num_tokens - 1) / block_tokens) blocks.
    """
    if num_tokens == 0:
        return range(0)
    boundary_tokens = (num_tokens - 1) // block_tokens * block_tokens
    first = held_blocks(spec, boundary_tokens, block_tokens).start
    return range(first, -(-num_tokens // block_tokens))


def missing_blocks(
    spec: GroupSpec, num_tokens: int, have_tokens: int, block_tokens: int
) -> tuple[int, ...]:
    """Return the needed blocks at `num_tokens` that a hit of `have_tokens` does not pin."""
    held = held_blocks(spec, have_tokens, block_tokens)
    return tuple(b for b in needed_blocks(spec, num_tokens, block_tokens) if b not in held)


def bytes_of_block(spec: GroupSpec, num_tokens_in_block: int, block_tokens: int) -> int:
    """Return the bytes of a page's first `num_tokens_in_block` tokens; less than the page's if cut."""
    if not 0 <= num_tokens_in_block <= block_tokens:
        raise ValueError(f"{num_tokens_in_block} tokens do not fit a block of {block_tokens}")
    return spec.page_bytes // block_tokens * num_tokens_in_block


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """The groups of one model at one block size. Equal layouts describe equal bytes."""

    block_tokens: int
    groups: tuple[GroupSpec, ...]
    layout_version: str = LAYOUT_VERSION
    _place_of_layer: dict[int, tuple[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError for a layout in which a layer or a byte has no single place."""
        if self.block_tokens < 1 or not self.groups:
            raise ValueError(f"{len(self.groups)} groups of {self.block_tokens}-token blocks")
        places: dict[int, tuple[int, int]] = {}
        for group, spec in enumerate(self.groups):
            if not spec.layers or spec.page_bytes < 1 or spec.page_bytes % self.block_tokens:
                raise ValueError(
                    f"group {spec.name!r}: {len(spec.layers)} layers, pages of {spec.page_bytes} "
                    f"bytes for blocks of {self.block_tokens} tokens"
                )
            if isinstance(spec, WindowSpec) and spec.window_tokens < 1:
                raise ValueError(f"group {spec.name!r}: a window of {spec.window_tokens} tokens")
            for index, layer in enumerate(spec.layers):
                if layer in places:
                    raise ValueError(f"layer {layer} is twice in the layout")
                places[layer] = (group, index)
        object.__setattr__(self, "_place_of_layer", places)

    @property
    def page_bytes(self) -> int:
        """The size of every page of the pool: the largest group's."""
        return max(spec.page_bytes for spec in self.groups)

    @property
    def pages_per_block(self) -> int:
        """Pages that one block takes in all groups together."""
        return sum(len(spec.layers) for spec in self.groups)

    def group_of_layer(self, layer: int) -> tuple[int, int]:
        """Return (group, index within the group). Raises KeyError for a layer without KV."""
        return self._place_of_layer[layer]

    def pages_needed(self, num_tokens: int, have_tokens: int = 0) -> int:
        """Return the pages to reserve for `num_tokens` on top of a hit of `have_tokens`."""
        return sum(
            len(spec.layers) * len(missing_blocks(spec, num_tokens, have_tokens, self.block_tokens))
            for spec in self.groups
        )

    def bytes_needed(self, num_tokens: int, have_tokens: int = 0) -> int:
        """Return the KV bytes that `pages_needed` pages hold, the last block cut at the token."""
        return sum(self._missing_bytes(spec, num_tokens, have_tokens) for spec in self.groups)

    def streamed_bytes(self, num_tokens: int, have_tokens: int = 0) -> int:
        """Return the part of `bytes_needed` that a prefill makes in step with its tokens.

        These are the full groups' bytes: a window is only needed as it is at the end.
        """
        return sum(
            self._missing_bytes(spec, num_tokens, have_tokens)
            for spec in self.groups
            if isinstance(spec, FullSpec)
        )

    def _missing_bytes(self, spec: GroupSpec, num_tokens: int, have_tokens: int) -> int:
        page_bytes = 0
        for block in missing_blocks(spec, num_tokens, have_tokens, self.block_tokens):
            tokens = min(self.block_tokens, num_tokens - block * self.block_tokens)
            page_bytes += bytes_of_block(spec, tokens, self.block_tokens)
        return len(spec.layers) * page_bytes
