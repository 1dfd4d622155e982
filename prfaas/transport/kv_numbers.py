"""What the numbers in a page are: codecs that change them must know their type and their rows."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PageNumbers:
    """The numbers in the pages of one group."""

    dtype: str
    """float32, float16 or bfloat16; of another type nothing is known but its size, 2 bytes."""
    row_items: int | None = None
    """Numbers in a row that share a scale; None: these pages must stay exact."""

    @property
    def item_bytes(self) -> int:
        """Bytes of one number, by which pages are shuffled."""
        return 4 if self.dtype == "float32" else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KvNumbers:
    """The numbers in the pages of every group."""

    dtype: str = "float32"
    row_items: Sequence[int | None] = ()
    """Of each group; those beyond the last must stay exact."""

    def of(self, group: int) -> PageNumbers:
        """Return what the pages of a group hold."""
        row_items = self.row_items[group] if group < len(self.row_items) else None
        return PageNumbers(dtype=self.dtype, row_items=row_items)
