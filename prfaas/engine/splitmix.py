"""SplitMix64: the hash that sampling noise and the self-test's numbers come from."""

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK = (1 << 64) - 1


def mix64(word: int) -> int:
    """Return SplitMix64's output function of a 64-bit word: a bijection that avalanches."""
    word = ((word ^ (word >> 30)) * MIX_1) & MASK
    word = ((word ^ (word >> 27)) * MIX_2) & MASK
    return word ^ (word >> 31)


def mix_in_place(words: NDArray[np.uint64], shifted: NDArray[np.uint64]) -> None:
    """Apply `mix64` to every word; numpy's uint64 wraps as the hash wants. `shifted` is scratch."""
    np.right_shift(words, np.uint64(30), out=shifted)
    np.bitwise_xor(words, shifted, out=words)
    np.multiply(words, np.uint64(MIX_1), out=words)
    np.right_shift(words, np.uint64(27), out=shifted)
    np.bitwise_xor(words, shifted, out=words)
    np.multiply(words, np.uint64(MIX_2), out=words)
    np.right_shift(words, np.uint64(31), out=shifted)
    np.bitwise_xor(words, shifted, out=words)
