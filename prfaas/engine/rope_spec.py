"""How positions rotate q and k; torch-free."""

from dataclasses import dataclass
from typing import Literal

from prfaas.errors import ConfigError


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


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Low frequencies divided by `factor`, high ones kept, a ramp in wavelength between (YaRN)."""

    factor: float
    original_context_tokens: int
    beta_fast: float = 32.0
    """Turns over the original context from which a frequency is kept."""
    beta_slow: float = 1.0
    """Turns over the original context up to which a frequency is divided."""
    is_truncated: bool = True
    """The ramp starts and ends at whole dimensions."""
    attention_factor: float | None = None
    """What the rotated part of q and k is multiplied by; None: it follows from the others."""
    mscale: float | None = None
    mscale_all_dim: float = 0.0
    """Not 0: latent attention multiplies its scale by the square of `magnitude` (DeepSeek)."""

    def magnitude(self, mscale: float) -> float:
        """Return what YaRN multiplies attention by to keep its entropy over a longer context."""
        if self.factor <= 1:
            return 1.0
        from prfaas.engine import portable  # imports numpy, which a description never needs

        return 0.1 * mscale * portable.log_of(self.factor) + 1.0


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of a head, or of its first `rotary_dim` dimensions."""

    theta: float
    scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    """Dimensions that rotate, from the first on; None: all."""
    pairs: Literal["halves", "neighbours"] = "halves"
    """Dimension i turns with i + rotary_dim / 2 (Hugging Face) or 2i with 2i + 1 (DeepSeek)."""

    def __post_init__(self) -> None:
        """Raise ConfigError for frequencies that YaRN cannot stretch."""
        if isinstance(self.scaling, YarnScaling) and self.theta <= 1:
            raise ConfigError(f"rope_theta is {self.theta:g}: with YaRN it has to be above 1")
