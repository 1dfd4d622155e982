"""How positions rotate q and k; torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by `factor` (position interpolation)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a linear blend between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


RopeScaling = LinearScaling | Llama3Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Half-split rotary embedding of the whole head."""

    theta: float
    scaling: RopeScaling | None = None
