"""Functions of float64 whose bits are the same on every machine and with every library.

They are made of additions, multiplications, divisions and roundings to whole numbers, one numpy call
each, which IEEE 754 defines to the last bit; so nothing can be fused, reordered or approximated. A
library's exp, log or cos is right to about one last place, and which one it gives differs between
instruction sets and versions.

They are for constants, tables and a few draws: kernels have their own (`native/exp.py`). NaN and what
is out of a function's domain give nothing of use.
"""

import math

import numpy as np
from numpy.typing import NDArray

Float64s = NDArray[np.float64]

LOG2_E = float.fromhex("0x1.71547652b82fep+0")
LN2_HIGH, LN2_LOW = (float.fromhex(part) for part in ("0x1.62e42fefa38p-1", "0x1.ef35793c7673p-45"))
"""ln 2 in two parts, the first of so few bits that a power of 2's exponent times it is exact."""
TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")
HALF_PI = tuple(
    float.fromhex(part) for part in ("0x1.921fb54p+0", "0x1.10b4611p-30", "0x1.4c4c6628b80dcp-59")
)
"""pi / 2 in parts, of which whole numbers below 2^24 times the first two are exact."""
EXP_TERMS, SMALL_EXP_TERMS, ATANH_TERMS, SIN_TERMS, COS_TERMS = 15, 16, 13, 9, 10
"""Of power series; what is left out is below 2^-54 of the sum."""
SMALL = 0.375
"""Below it exp(x) - 1 is summed by itself, lest the 1 take its digits."""
LOWEST, HIGHEST = -800.0, 800.0
"""exp is 0 before and infinite after."""


def exp(x: Float64s) -> Float64s:
    """Return e^x, right to 1e-15 of it."""
    kept = np.minimum(np.maximum(x, LOWEST), HIGHEST)
    n = np.rint(kept * LOG2_E)
    r = (kept - n * LN2_HIGH) - n * LN2_LOW
    power = _series(r, [1.0 / math.factorial(i) for i in range(EXP_TERMS)])
    with np.errstate(over="ignore", under="ignore"):
        return np.ldexp(power, n.astype(np.int32))


def expm1(x: Float64s) -> Float64s:
    """Return e^x - 1, right to 1e-15 of it."""
    series = _series(x, [1.0 / math.factorial(i + 1) for i in range(SMALL_EXP_TERMS)])
    return np.where(np.abs(x) < SMALL, x * series, exp(x) - 1.0)


def log(x: Float64s) -> Float64s:
    """Return the natural logarithm of positive numbers, right to 1e-15 of it."""
    mantissa, exponent = np.frexp(x)
    is_low = mantissa < math.sqrt(0.5)
    mantissa = np.where(is_low, mantissa * 2.0, mantissa)
    n = exponent - is_low
    s = (mantissa - 1.0) / (mantissa + 1.0)
    series = _series(s * s, [2.0 / (2 * i + 1) for i in range(ATANH_TERMS)])
    return n * LN2_HIGH + (s * series + n * LN2_LOW)


def log_of(x: float) -> float:
    """Return the natural logarithm of one positive number."""
    return float(log(np.array(x)))


def power(base: float, exponents: Float64s) -> Float64s:
    """Return the powers of a positive base, right to 1e-14 of them."""
    return exp(exponents * log_of(base))


def cos_sin(x: Float64s) -> tuple[Float64s, Float64s]:
    """Return cosine and sine, right to 1e-15, of numbers from 0 to 2^24."""
    n = np.rint(x * TWO_OVER_PI)
    r = x - n * HALF_PI[0]
    r -= n * HALF_PI[1]
    r -= n * HALF_PI[2]
    square = r * r
    sine = r * _series(square, _alternating(1, SIN_TERMS))
    cosine = _series(square, _alternating(0, COS_TERMS))
    quarter = n.astype(np.int64) & 3
    is_odd = (quarter & 1).astype(bool)
    cos = np.where(is_odd, sine, cosine)
    sin = np.where(is_odd, cosine, sine)
    np.negative(cos, out=cos, where=(quarter == 1) | (quarter == 2))
    np.negative(sin, out=sin, where=quarter >= 2)
    return cos, sin


def _alternating(first: int, count: int) -> list[float]:
    """Return 1 / first!, -1 / (first + 2)!, ..."""
    return [(-1.0) ** i / math.factorial(first + 2 * i) for i in range(count)]


def _series(x: Float64s, coefficients: list[float]) -> Float64s:
    """Return the sum of coefficients[i] * x^i, by Horner's rule."""
    total = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total *= x
        total += coefficient
    return total
