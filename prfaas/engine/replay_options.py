"""What an engine without weights replays; torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Options of the `[replay]` section."""

    speed: float = 1.0
    """So many times as fast as the profile."""
    bytes_scale: float = 1.0
    """The part of the profile's KV bytes that pages really have."""
