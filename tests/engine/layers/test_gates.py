"""The gates' functions: values of float64, and elements that do not depend on their neighbours."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from prfaas.engine.layers.gates import sigmoid, softplus

EACH = pytest.mark.parametrize("function", [sigmoid, softplus])


@pytest.mark.parametrize(
    ("function", "exact"),
    [(sigmoid, torch.sigmoid), (softplus, lambda x: torch.logaddexp(x, torch.zeros_like(x)))],
)
def test_values_are_those_of_float64(
    function: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor]
) -> None:
    x = torch.linspace(-80.0, 120.0, 4001)
    torch.testing.assert_close(function(x), exact(x.double()).float(), rtol=1e-6, atol=1e-37)


@EACH
def test_extremes_do_not_overflow(function: Callable[[Tensor], Tensor]) -> None:
    low, high = function(torch.tensor([-1e30, 1e30]))
    assert low == 0.0
    assert high == (1.0 if function is sigmoid else 1e30)


@EACH
def test_an_element_has_the_same_bits_wherever_it_stands(
    function: Callable[[Tensor], Tensor],
) -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 10
    whole = function(x)
    for start, stop in [(0, n) for n in range(1, 70)] + [(n, 300) for n in range(1, 300, 7)]:
        assert torch.equal(function(x[start:stop]), whole[start:stop])


@EACH
def test_a_strided_row_has_the_bits_of_a_contiguous_one(
    function: Callable[[Tensor], Tensor],
) -> None:
    wide = torch.randn(9, 40, generator=torch.Generator().manual_seed(0)) * 10
    strided = function(wide[:, 3:20])
    assert strided.is_contiguous()
    assert torch.equal(strided, function(wide[:, 3:20].contiguous()))
