"""What one step of the engine does, as the batcher decides it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Tokens of one sequence to compute in this step, from position `start` on."""

    key: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A sequence whose working copy must now hold `capacity_tokens`."""

    key: int
    capacity_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What to do in one step, in this order."""

    preempted: tuple[int, ...]
    """Move their KV out and say how much was saved: `Batcher.stored`."""
    admitted: tuple[Reservation, ...]
    """New or resumed: make a working copy and fill it with the first `num_computed` tokens."""
    grown: tuple[Reservation, ...]
    decodes: tuple[Grant, ...]
    """One token each, oldest sequence first."""
    prefills: tuple[Grant, ...]
    is_prefill_held_back: bool = False
    """There is prefill to do, and this step is not of its share."""


@dataclass(slots=True, kw_only=True)
class Draft:
    """A plan in the making."""

    preempted: list[int] = field(default_factory=list)
    admitted: dict[int, int] = field(default_factory=dict)
    """Key -> capacity in tokens."""
    grown: dict[int, int] = field(default_factory=dict)
    decodes: list[int] = field(default_factory=list)
    granted: dict[int, int] = field(default_factory=dict)
    """Key -> prefill tokens."""
    is_prefill_held_back: bool = False
    leaders: Mapping[int, int]
    """Waiting sequence -> running one that makes what it could start from."""


def reservations(capacities: dict[int, int]) -> tuple[Reservation, ...]:
    """Return what `capacities` (key -> tokens) reserves."""
    return tuple(Reservation(key=k, capacity_tokens=c) for k, c in capacities.items())
