"""The exponential function in float32, of our own: its bits are the same on every machine."""

import torch
from torch import Tensor

from prfaas.engine import portable
from prfaas.engine.native.code import Code, Value

LOWEST = -87.33654
"""The logarithm of the smallest normal float32; below it the result is 0."""
HIGHEST = 88.72284
"""The logarithm of the largest float32."""
LOG2_E = 1.44269504
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
"""ln 2 in two parts, the first of so few bits that a whole number times it is exact."""
COEFFICIENTS = (0.0013933651, 0.0083631799, 0.0416664667, 0.1666657627, 0.5, 1.0, 1.0)
"""Of r^6, ..., r^0, where |r| <= ln 2 / 2; r^6 to r^2 were fitted at Chebyshev's points."""


def exp_of(x: Tensor) -> Tensor:
    """Return e^x of float32 constants, rounded from float64, as new memory on their device."""
    wide = portable.exp(x.double().cpu().numpy())
    return torch.from_numpy(wide).to(device=x.device, dtype=torch.float32)


def exp(code: Code, x: Value) -> Value:
    """Return e^x, float32 in every lane.

    From LOWEST to 88 the relative error is below 2e-7, and exp(0) is 1; below it is 0, above it
    ends in infinity. A NaN stays one.
    """
    kept = code.maximum(code.minimum(x, HIGHEST), LOWEST)  # a NaN becomes a number
    n = code.round(kept * LOG2_E)
    r = code.fma(n, code.like(x, -LN2_HIGH), x)
    r = code.fma(n, code.like(x, -LN2_LOW), r)
    power = code.like(x, COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        power = code.fma(power, r, code.like(x, coefficient))
    scale = code.bits_as_float((code.to_int32(n) + 127) << 23)
    return code.select(x < LOWEST, code.like(x, 0.0), power * scale)
