"""One transfer as its receiver sees it: pages land in a table and are published when whole.

What was published stays when the transfer dies: a fresh lookup finds it, and that is the fallback.
"""

from collections.abc import Callable

from prfaas.cache.block_table import BlockTable
from prfaas.cache.spec import (
    CacheLayout,
    GroupSpec,
    StateSpec,
    bytes_of_page,
    missing_blocks,
    snapshot_of_block,
)
from prfaas.errors import ProtocolError
from prfaas.transport.handshake import Identity
from prfaas.transport.kv_numbers import KvNumbers
from prfaas.transport.wire import Frame, FrameHeader

BlocksToCome = Callable[[GroupSpec, int, int, int], tuple[int, ...]]
"""(spec, num_tokens, have_tokens, block_tokens) -> the blocks of a group that come."""


def kv_numbers(layout: CacheLayout, identity: Identity) -> KvNumbers:
    """Return what codecs must know of the pages of a layout; equal on both sides of a transfer."""
    return KvNumbers(
        dtype=identity.kv_dtype,
        row_items=[
            None if isinstance(spec, StateSpec) else spec.row_items for spec in layout.groups
        ],
    )


class Pull:
    """Places the pages of one transfer; the table has everything reserved, and one hold is ours."""

    def __init__(
        self,
        *,
        layout: CacheLayout,
        table: BlockTable,
        num_tokens: int,
        have_tokens: int,
        snapshot_tokens: int = 0,
        blocks: BlocksToCome = missing_blocks,
    ) -> None:
        self.num_page_bytes = 0
        """Verified bytes, as they crossed the link."""
        self.num_kv_bytes = 0
        """What they decode to, snapshots on the way left out."""
        self._snapshot_tokens = snapshot_tokens
        self._snapshots: dict[tuple[int, int], set[int]] = {}
        """Like `_open`, of blocks that only snapshots need; for the newest of them there is room."""
        self._kept: list[tuple[int, tuple[int, int]]] = []
        """(position, place) of whole blocks of snapshots that the table still holds."""
        if snapshot_tokens:
            table.keep_snapshots(snapshot_tokens, num_tokens)
        self._layout = layout
        self._table = table
        self._num_tokens = num_tokens
        self._have_tokens = have_tokens
        self._open: dict[tuple[int, int], set[int]] = {
            (group, block): set(range(spec.pages_per_block))
            for group, spec in enumerate(layout.groups)
            for block in blocks(spec, num_tokens, have_tokens, layout.block_tokens)
        }
        """Pages not yet verified of each (group, block) not yet whole."""
        self._whole: set[tuple[int, int]] = set()

    @property
    def is_complete(self) -> bool:
        """Every page that was asked for is verified."""
        return not self._open

    def resolve(self, header: FrameHeader) -> memoryview | None:
        """Return where a page goes, None for one that was verified before; see wire.Resolve."""
        place = (header.group, header.block)
        is_asked = place in self._open or place in self._whole
        if not is_asked and not self._snapshot_at(place):
            raise ProtocolError(
                f"page of group {header.group} block {header.block} was not asked for"
            )
        spec = self._layout.groups[header.group]
        if header.index >= spec.pages_per_block:
            raise ProtocolError(f"page {header.index} of {spec.pages_per_block} in {spec.name}")
        block_tokens = self._layout.block_tokens
        num_tokens = min(block_tokens, self._num_tokens - header.block * block_tokens)
        if header.num_tokens != num_tokens:
            raise ProtocolError(f"page of {header.num_tokens} tokens, expected {num_tokens}")
        if not is_asked and not self._has_room(place):
            return None
        missing = (self._open if is_asked else self._snapshots).get(place)
        if missing is None or header.index not in missing:
            return None
        pages = self._table.pages(header.group, header.block)
        assert pages is not None, "a reserved block is gone"
        num_bytes = bytes_of_page(spec, header.index, num_tokens, block_tokens)
        return self._table.view(pages[header.index])[:num_bytes]

    def verified(self, frame: Frame) -> None:
        """Take note of a verified page; a block whose last page it was is published."""
        header = frame.header
        self.num_page_bytes += header.length
        place = (header.group, header.block)
        if place in self._snapshots:
            self._snapshot_verified(frame, place)
            return
        self.num_kv_bytes += header.length if frame.target is None else len(frame.target)
        if not frame.is_placed:
            return
        self._open[place].remove(header.index)
        if not self._open[place]:
            del self._open[place]
            self._whole.add(place)
            self._table.commit(*place)

    def finish(self) -> None:
        """Make the table exact at the prompt's end, or raise ProtocolError if something is missing."""
        if self._open:
            raise ProtocolError(f"the transfer ended without {len(self._open)} blocks")
        self._table.set_num_tokens(self._num_tokens)

    # ------------------------------------------------------------ snapshots on the way

    def _snapshot_at(self, place: tuple[int, int]) -> int:
        """Return the position of the first snapshot that needs a block, 0 if none was asked for."""
        group, block = place
        if not self._snapshot_tokens or group >= len(self._layout.groups):
            return 0
        return snapshot_of_block(
            self._layout.groups[group],
            block,
            every_tokens=self._snapshot_tokens,
            num_tokens=self._num_tokens,
            block_tokens=self._layout.block_tokens,
            after_tokens=self._have_tokens,
        )

    def _has_room(self, place: tuple[int, int]) -> bool:
        """Return whether a block of a snapshot is wanted and held; a snapshot is never waited for."""
        if place not in self._snapshots:
            if self._table.pages(*place) is not None or self._table.try_allocate(*place) is None:
                return False
            self._snapshots[place] = set(range(self._layout.groups[place[0]].pages_per_block))
        return True

    def _snapshot_verified(self, frame: Frame, place: tuple[int, int]) -> None:
        missing = self._snapshots[place]
        if not frame.is_placed:
            return
        missing.remove(frame.header.index)
        if missing:
            return
        self._table.commit(*place)
        self._kept.append((self._snapshot_at(place), place))
        newest = max(at for at, _ in self._kept)
        for _, old in [kept for kept in self._kept if kept[0] < newest]:
            self._table.let_go_of(*old)
        self._kept = [kept for kept in self._kept if kept[0] == newest]
