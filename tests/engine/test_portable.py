"""Functions with the same bits everywhere: right, and made of nothing that a CPU or library decides."""

import hashlib
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.engine import portable

PROGRAM = """
import hashlib, numpy as np
from prfaas.engine import portable
x = np.arange(1, 40_000) / 977.0
parts = [portable.exp(-x), portable.expm1(-x / 41), portable.log(x), portable.power(1e6, -x / 41)]
parts += portable.cos_sin((x * 4099.7).astype(np.float32).astype(np.float64))
print(hashlib.sha256(np.concatenate(parts).tobytes()).hexdigest())
"""


def one(x: float) -> np.ndarray:
    return np.array([x])


@given(st.floats(-700, 700))
def test_exp_is_the_exponential(x: float) -> None:
    assert portable.exp(one(x))[0] == pytest.approx(math.exp(x), rel=1e-15, abs=0)


@given(st.floats(-30, 30))
def test_expm1_keeps_its_digits_near_zero(x: float) -> None:
    assert portable.expm1(one(x))[0] == pytest.approx(math.expm1(x), rel=1e-15, abs=0)


@given(st.floats(1e-300, 1e300))
def test_log_is_the_logarithm(x: float) -> None:
    assert portable.log(one(x))[0] == pytest.approx(math.log(x), rel=1e-15, abs=0)


@given(st.floats(2**-54, 0.5))
def test_log_keeps_its_digits_near_one(below: float) -> None:
    x = 1.0 - below
    assert portable.log(one(x))[0] == pytest.approx(math.log(x), rel=1e-15, abs=0)


@given(st.floats(1.5, 1e8), st.floats(-1, 1))
def test_power_is_the_power(base: float, exponent: float) -> None:
    assert portable.power(base, one(exponent))[0] == pytest.approx(base**exponent, rel=1e-14, abs=0)


@given(st.floats(0, 2**24, width=32))
def test_cos_and_sin_are_right_however_often_an_angle_turns(x: float) -> None:
    cos, sin = portable.cos_sin(one(x))
    assert cos[0] == pytest.approx(math.cos(x), rel=1e-9, abs=1e-15)
    assert sin[0] == pytest.approx(math.sin(x), rel=1e-9, abs=1e-15)


def test_the_ends_of_exp_are_zero_and_infinity() -> None:
    ends = portable.exp(np.array([-math.inf, -1e300, 0.0, 1e300, math.inf]))
    assert ends.tolist() == [0.0, 0.0, 1.0, math.inf, math.inf]


def test_numpys_code_for_plainer_cpus_gives_the_same_bits() -> None:
    found = np.show_config(mode="dicts")["SIMD Extensions"]["found"]
    hashes = []
    for disabled in ([], found):
        more = {"NPY_DISABLE_CPU_FEATURES": " ".join(disabled)} if disabled else {}
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
        run = subprocess.run(
            command, env=os.environ | more, capture_output=True, text=True, check=True
        )
        hashes.append(run.stdout.strip())
    assert len(hashes[0]) == len(hashlib.sha256().hexdigest())
    assert hashes[0] == hashes[1]
