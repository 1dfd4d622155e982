"""What the self-test computes with: numbers that are the same on every machine, with any library.

Generators of libraries promise no bits: torch.randn's depend on the vectors of a CPU.
"""

import numpy as np
import torch
from torch import Tensor

from prfaas.engine.splitmix import GOLDEN, mix_in_place

PARTS = 4
"""16-bit numbers of a word, whose sum has about a bell's shape."""
CENTRE = PARTS * ((1 << 16) - 1) // 2
SCALE = np.float32(2.642829e-05)
"""1 / the standard deviation of the sum; with more bits than one, so that products have all of theirs."""
DENORMAL_EXPONENT, LARGEST_EXPONENT = -149, 30
SPAN, STEP = 4096, np.float32(37.1)
TAIL_POWER = 2
"""Every second row is drawn out by so much: a few large numbers among small ones."""


class Probe:
    """Float32 numbers in one order, from SplitMix64."""

    def __init__(self) -> None:
        self._num_drawn = 0

    def normal(self, *shape: int) -> Tensor:
        """Return numbers of mean 0 and standard deviation 1, within 3.5."""
        count = int(np.prod(shape))
        steps = np.arange(self._num_drawn + 1, self._num_drawn + 1 + count, dtype=np.uint64)
        self._num_drawn += count
        words = steps * np.uint64(GOLDEN)
        mix_in_place(words, np.empty_like(words))
        sums = words.view(np.uint16).reshape(-1, PARTS).sum(axis=1, dtype=np.int64)
        return torch.from_numpy((sums - CENTRE).astype(np.float32) * SCALE).view(shape)

    def rows(self, num_rows: int, width: int) -> Tensor:
        """Return rows of such numbers; every second one has its numbers' cubes."""
        rows = self.normal(num_rows, width).numpy()
        for _ in range(TAIL_POWER):
            rows[1::2] *= np.abs(rows[1::2])
        return torch.from_numpy(rows)


def all_sizes() -> Tensor:
    """Return finite float32s of all sizes and signs, the smallest denormals and 0 among them, [2 N]."""
    steps = np.arange(-SPAN, SPAN).astype(np.float32) / STEP
    exponents = np.arange(DENORMAL_EXPONENT, LARGEST_EXPONENT)
    powers = np.ldexp(np.float32(1.0), exponents).astype(np.float32)
    return torch.from_numpy(np.concatenate([steps, powers, -powers]))
