"""Rotary position embedding: tables of turns, and their application.

Shapes: T tokens, H heads, K head dim, P positions.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prfaas.engine import portable
from prfaas.engine.native import rows
from prfaas.engine.rope_spec import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling

TABLE_STEP_TOKENS = 1024
TURNED_AT_ONCE = 1 << 13
"""Angles whose cosines and sines are made together: they stay in cache."""
CPU = torch.device("cpu")

Float32s = NDArray[np.float32]


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Return the angle per position of each pair that turns, float32 [rotary_dim / 2]."""
    return torch.from_numpy(_frequencies(spec, head_dim))


def _frequencies(spec: RopeSpec, head_dim: int) -> Float32s:
    # Rounded to float32 at each step, as the models were trained; powers from float64.
    rotary_dim = spec.rotary_dim or head_dim
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    powers = portable.power(float(np.float32(spec.theta)), exponents.astype(np.float64))
    frequencies: Float32s = np.float32(1.0) / powers.astype(np.float32)
    match spec.scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / np.float32(factor)
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling)
        case YarnScaling() as scaling:
            return _yarn(frequencies, scaling, spec.theta)


def _llama3(frequencies: Float32s, scaling: Llama3Scaling) -> Float32s:
    context = scaling.original_context_tokens
    wavelength = np.float32(2 * math.pi) / frequencies
    blend = (np.float32(context) / wavelength - np.float32(scaling.low_freq_factor)) / np.float32(
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    factor = np.float32(scaling.factor)
    blended = (np.float32(1) - blend) * frequencies / factor + blend * frequencies
    is_low = wavelength > np.float32(context / scaling.low_freq_factor)
    is_high = wavelength < np.float32(context / scaling.high_freq_factor)
    scaled = np.where(is_low, frequencies / factor, frequencies)
    return np.where(is_low | is_high, scaled, blended)


def _yarn(frequencies: Float32s, scaling: YarnScaling, theta: float) -> Float32s:
    """YaRN (arXiv 2309.00071, §3.2): a linear ramp over the pairs between two numbers of turns."""
    num_pairs = len(frequencies)

    def pair_of(num_turns: float) -> float:
        wavelength = scaling.original_context_tokens / (num_turns * 2 * math.pi)
        return num_pairs * portable.log_of(wavelength) / portable.log_of(theta)

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    pairs = np.arange(num_pairs, dtype=np.float32)
    ramp = (pairs - np.float32(low)) / np.float32(high - low or 0.001)
    kept = np.float32(1) - np.minimum(np.maximum(ramp, np.float32(0)), np.float32(1))
    divided = frequencies / np.float32(scaling.factor)
    return divided * (np.float32(1) - kept) + frequencies * kept


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
        self._frequencies = _frequencies(spec, head_dim)
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
        first, num_pairs = self._turns_PK.shape
        step_PK = np.ones((num_positions - first, num_pairs), np.complex64)
        num_turning = len(self._frequencies)
        size = max(1, TURNED_AT_ONCE // num_turning)
        for start in range(0, len(step_PK), size):
            part_PK = step_PK[start : start + size, :num_turning]
            positions = np.arange(first + start, first + start + len(part_PK))
            _write_turns(positions, self._frequencies, self._factor, part_PK)
        added_PK = torch.from_numpy(step_PK).to(self._turns_PK.device)
        self._turns_PK = torch.cat([self._turns_PK, added_PK])


def turns_of(spec: RopeSpec, head_dim: int, positions_P: NDArray[np.int64]) -> Tensor:
    """Return a table's turns of the positions, of the pairs that turn alone; complex [P, K / 2]."""
    frequencies = _frequencies(spec, head_dim)
    out_PK = np.empty((len(positions_P), len(frequencies)), np.complex64)
    _write_turns(positions_P, frequencies, attention_factor(spec), out_PK)
    return torch.from_numpy(out_PK)


def _write_turns(
    positions_P: NDArray[np.int64],
    frequencies_K: Float32s,
    factor: float,
    out_PK: NDArray[np.complex64],
) -> None:
    """Write factor * (cos + i sin) of the positions' angles; the bits are the same everywhere."""
    # Rounded in float32, as the models were trained.
    angles = positions_P.astype(np.float32)[:, None] * frequencies_K
    cos, sin = portable.cos_sin(angles.astype(np.float64))
    out_PK.real, out_PK.imag = cos, sin
    if factor != 1.0:
        out_PK.real *= np.float32(factor)
        out_PK.imag *= np.float32(factor)


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
