"""How much the prefix cache may hold."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Options of the `[cache]` section."""

    ram_bytes: int = 2 << 30
    block_tokens: int = 64
