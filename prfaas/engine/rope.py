"""Rotary position embedding: tables of turns, and their application.

Shapes: T tokens, H heads, K head dim, P positions.
"""

import math

import torch
from torch import Tensor

from prfaas.engine.native import rows
from prfaas.engine.rope_spec import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling

TABLE_STEP_TOKENS = 1024
CPU = torch.device("cpu")


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Return the angle per position of each pair that turns, float32 [rotary_dim / 2]."""
    rotary_dim = spec.rotary_dim or head_dim
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    frequencies = 1.0 / (spec.theta**exponent)
    match spec.scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling)
        case YarnScaling() as scaling:
            return _yarn(frequencies, scaling, spec.theta)


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


def _yarn(frequencies: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    """YaRN (arXiv 2309.00071, §3.2): a linear ramp over the pairs between two numbers of turns."""
    num_pairs = len(frequencies)

    def pair_of(num_turns: float) -> float:
        wavelength = scaling.original_context_tokens / (num_turns * 2 * math.pi)
        return num_pairs * math.log(wavelength) / math.log(theta)

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    ramp = (torch.arange(num_pairs).float() - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return frequencies / scaling.factor * (1 - kept) + frequencies * kept


def attention_factor(spec: RopeSpec) -> float:
    """Return what the rotated part of q and k is multiplied by: YaRN's magnitude, else 1."""
    match spec.scaling:
        case YarnScaling(attention_factor=float(factor)):
            return factor
        case YarnScaling(mscale=mscale, mscale_all_dim=all_dim) as scaling if mscale and all_dim:
            return scaling.magnitude(mscale) / scaling.magnitude(all_dim)
        case YarnScaling() as scaling:
            return scaling.magnitude(1.0)
        case _:
            return 1.0


class RopeTable:
    """The turn of every position so far asked for; one table serves all layers of a spec.

    Pairs past rotary_dim turn by 1, which leaves them as they are.
    """

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device = CPU) -> None:
        self._frequencies = inverse_frequencies(spec, head_dim)
        self._factor = attention_factor(spec)
        self._turns_PK = torch.empty(0, head_dim // 2, dtype=torch.complex64, device=device)

    @property
    def num_pairs(self) -> int:
        """Pairs of a turn, those that stay included."""
        return self._turns_PK.shape[1]

    def at(self, positions_T: Tensor, end: int) -> Tensor:
        """Return cos + i sin of the positions, all below `end`; complex [T, 1, K / 2]."""
        if end > len(self._turns_PK):
            self._grow(-(-end // TABLE_STEP_TOKENS) * TABLE_STEP_TOKENS)
        return self._turns_PK[positions_T].unsqueeze(1)

    def _grow(self, num_positions: int) -> None:
        # Whole steps from absolute position 0: a row's bits never depend on when it was made.
        turns_PK = [self._turns_PK]
        num_turning = len(self._frequencies)
        for first in range(len(self._turns_PK), num_positions, TABLE_STEP_TOKENS):
            positions = torch.arange(first, first + TABLE_STEP_TOKENS).float()
            # Rounded in float32, as the models were trained. In float64 cos and sin are right to
            # the last bit of float32 whichever library made them.
            angles = (positions[:, None] * self._frequencies).double()
            step_PK = torch.ones(TABLE_STEP_TOKENS, self._turns_PK.shape[1], dtype=torch.complex64)
            step_PK[:, :num_turning] = torch.complex(angles.cos().float(), angles.sin().float())
            if self._factor != 1.0:
                step_PK[:, :num_turning] *= self._factor
            turns_PK.append(step_PK.to(self._turns_PK.device))
        self._turns_PK = torch.cat(turns_PK)


def pair_order(head_dim: int, spec: RopeSpec | None) -> Tensor:
    """Return the order of a head's dimensions in which the two of each rotated pair are neighbours.

    Checkpoints of "halves" rotate dimension i against i + rotary_dim / 2. Scores do not change when
    q and k are reordered alike, and neighbours are rotated by one complex product. Dimensions that
    do not rotate keep their place.
    """
    order = torch.arange(head_dim)
    if spec is not None and spec.pairs == "halves":
        rotary_dim = spec.rotary_dim or head_dim
        order[:rotary_dim] = order[:rotary_dim].view(2, -1).T.flatten()
    return order


def rotate(x_THK: Tensor, turns_T1K: Tensor) -> Tensor:
    """Return `x_THK`, in pair_order, with each pair turned; a new contiguous tensor.

    `x_THK` may be a slice of contiguous rows. Its pairs are neighbours in memory.
    """
    if x_THK.is_cpu:
        return rows.rotate(x_THK, turns_T1K)
    pairs_THK = torch.view_as_complex(x_THK.view(*x_THK.shape[:-1], -1, 2))
    return torch.view_as_real(pairs_THK * turns_T1K).flatten(-2)
