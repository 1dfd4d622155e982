"""When a prefill goes to the peer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Options of the `[scheduler]` section."""

    threshold_tokens: int = 512
    """t of PrfaaS §3.4: uncached prompts longer than this are prefilled by the peer."""
