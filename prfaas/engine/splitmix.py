"""SplitMix64: the hash that sampling noise comes from."""

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK = (1 << 64) - 1


def mix64(word: int) -> int:
    """Return SplitMix64's output function of a 64-bit word: a bijection that avalanches."""
    word = ((word ^ (word >> 30)) * MIX_1) & MASK
    word = ((word ^ (word >> 27)) * MIX_2) & MASK
    return word ^ (word >> 31)
