"""Rotary position embedding: tables of turns, and their application.

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
    """The turn of every position so far asked for; one table serves all layers of a spec."""

    def __init__(self, spec: RopeSpec, head_dim: int) -> None:
        self._frequencies = inverse_frequencies(spec, head_dim)
        self._turns_PK = torch.empty(0, head_dim // 2, dtype=torch.complex64)

    def at(self, positions_T: Tensor, end: int) -> Tensor:
        """Return cos + i sin of the positions, all below `end`; complex [T, 1, K / 2]."""
        if end > len(self._turns_PK):
            self._grow(-(-end // TABLE_STEP_TOKENS) * TABLE_STEP_TOKENS)
        return self._turns_PK[positions_T].unsqueeze(1)

    def _grow(self, num_positions: int) -> None:
        # Whole steps from absolute position 0: a row's bits never depend on when it was made.
        turns_PK = [self._turns_PK]
        for first in range(len(self._turns_PK), num_positions, TABLE_STEP_TOKENS):
            positions = torch.arange(first, first + TABLE_STEP_TOKENS).float()
            angles = positions[:, None] * self._frequencies
            turns_PK.append(torch.complex(torch.cos(angles), torch.sin(angles)))
        self._turns_PK = torch.cat(turns_PK)


def pair_order(head_dim: int) -> Tensor:
    """Return the order of a head's dimensions in which the two of each rotated pair are neighbours.

    Checkpoints rotate dimension i against i + K / 2. Scores do not change when q and k are reordered
    alike, and neighbours are rotated by one complex product.
    """
    return torch.arange(head_dim).view(2, -1).T.flatten()


def rotate(x_THK: Tensor, turns_T1K: Tensor) -> Tensor:
    """Return contiguous `x_THK`, in pair_order, with each pair turned; a new tensor."""
    pairs = torch.view_as_complex(x_THK.view(*x_THK.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns_T1K).flatten(-2)
