"""Rotary position embedding: tables of cos and sin, and their application.

Shapes: T tokens, H heads, K head dim.
"""

import math

import torch
from torch import Tensor

from prfaas.engine.rope_spec import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling

TABLE_STEP_TOKENS = 1024


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Return the angle per position of each pair of dimensions, float32 [head_dim / 2]."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (spec.theta**exponent)
    match spec.scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling)
        case YarnScaling():
            raise AssertionError("refused with the model's config")


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    context = scaling.original_context_tokens
    wavelength = 2 * math.pi / frequencies
    blend = (context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    is_low = wavelength > context / scaling.low_freq_factor
    is_high = wavelength < context / scaling.high_freq_factor
    scaled = torch.where(is_low, frequencies / scaling.factor, frequencies)
    return torch.where(is_low | is_high, scaled, blended)


class RopeTable:
    """cos and sin of every position so far asked for; one table serves all layers of a spec."""

    def __init__(self, spec: RopeSpec, head_dim: int) -> None:
        self._frequencies = inverse_frequencies(spec, head_dim)
        self._cos_PK = torch.empty(0, head_dim)
        self._sin_PK = torch.empty(0, head_dim // 2)

    def at(self, positions_T: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Return (cos [T, 1, K], sin [T, 1, K / 2]) of the positions, all below `end`."""
        if end > len(self._cos_PK):
            self._grow(-(-end // TABLE_STEP_TOKENS) * TABLE_STEP_TOKENS)
        return self._cos_PK[positions_T].unsqueeze(1), self._sin_PK[positions_T].unsqueeze(1)

    def _grow(self, num_positions: int) -> None:
        # Whole steps from absolute position 0: a row's bits never depend on when it was made.
        start = len(self._cos_PK)
        new = [
            torch.arange(first, first + TABLE_STEP_TOKENS).float()[:, None] * self._frequencies
            for first in range(start, num_positions, TABLE_STEP_TOKENS)
        ]
        cos_PK = [torch.cos(angles).repeat(1, 2) for angles in new]
        sin_PK = [torch.sin(angles) for angles in new]
        self._cos_PK = torch.cat([self._cos_PK, *cos_PK])
        self._sin_PK = torch.cat([self._sin_PK, *sin_PK])


def rotate(x_THK: Tensor, cos_T1K: Tensor, sin_T1K: Tensor) -> Tensor:
    """Return x with its first half of dimensions rotated against the second; contiguous."""
    half = x_THK.shape[-1] // 2
    rotated = x_THK * cos_T1K
    rotated[..., :half].addcmul_(x_THK[..., half:], sin_T1K, value=-1)
    rotated[..., half:].addcmul_(x_THK[..., :half], sin_T1K)
    return rotated
