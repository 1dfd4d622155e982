"""The prefix cache of a simulated cluster: blocks by name, the longest unused one leaves first."""

from collections import OrderedDict
from collections.abc import Sequence

from prfaas.config.traces import MOONCAKE_BLOCK_TOKENS


class PrefixLru:
    """Blocks of a bounded number; a block's name stands for everything up to its end."""

    def __init__(self, *, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens // MOONCAKE_BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        """Return the blocks held."""
        return len(self._blocks)

    def hit_tokens(self, block_ids: Sequence[int], num_tokens: int) -> int:
        """Return the leading tokens that are held, one less than the prompt at most."""
        num_hits = 0
        for block in block_ids:
            if block not in self._blocks:
                break
            num_hits += 1
        return max(0, min(num_hits * MOONCAKE_BLOCK_TOKENS, num_tokens - 1))

    def add(self, block_ids: Sequence[int]) -> None:
        """Hold a prompt's blocks, its first ones longest."""
        if not self._capacity:
            return
        for block in reversed(block_ids):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
