"""Our exponential function against float64's."""

import math

import pytest
import torch
from torch import Tensor

from prfaas.engine.native.code import Code, Pointer
from prfaas.engine.native.exp import LOWEST, exp
from prfaas.engine.native.kernel import Kernel, Task

LANES = 8


def body(task: Task) -> None:
    code: Code = task.code
    x, y = task.pointer("x"), task.pointer("y")

    def write(to: Pointer, source: Pointer, lanes: int) -> None:
        to.store(exp(code, source.load(lanes)))

    with task.units(task.number("n") // LANES) as unit:
        write(y + unit * LANES, x + unit * LANES, LANES)


kernel = Kernel("test_exp", {"x": "float32*", "y": "float32*", "n": "int"}, body)


def ours(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    kernel(x.data_ptr(), y.data_ptr(), len(x), threads=1)
    return y


def test_it_is_the_exponential() -> None:
    x = torch.linspace(-87.0, 88.0, 1 << 18)
    expected = x.double().exp()
    assert float(((ours(x).double() - expected) / expected).abs().max()) < 2e-7


def test_near_zero_it_is_exact_enough_for_a_softmax() -> None:
    x = torch.cat([-torch.logspace(-12, 0, 1 << 12), torch.zeros(8)])
    expected = x.double().exp()
    assert float((ours(x).double() - expected).abs().max()) < 1e-7
    assert (ours(x)[-8:] == 1.0).all()


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (-math.inf, 0.0),
        (-3.4e38, 0.0),
        (-88.0, 0.0),
        (math.nextafter(LOWEST, -math.inf) - 1e-4, 0.0),
        (89.0, math.inf),
        (3.4e38, math.inf),
        (math.inf, math.inf),
        (0.0, 1.0),
        (-0.0, 1.0),
    ],
)
def test_the_ends_are_zero_and_infinity(x: float, expected: float) -> None:
    assert ours(torch.full((LANES,), x)).tolist() == [expected] * LANES


def test_a_nan_stays_one() -> None:
    assert ours(torch.full((LANES,), math.nan)).isnan().all()
