"""The self-test's numbers follow from SplitMix64 alone, and have the sizes that kernels meet."""

import numpy as np
import torch

from prfaas.engine.probe import CENTRE, SCALE, Probe, all_sizes
from prfaas.engine.splitmix import GOLDEN, MASK, mix64


def test_a_number_is_the_sum_of_a_words_quarters() -> None:
    expected = []
    for step in range(1, 41):
        word = mix64(step * GOLDEN & MASK)
        total = sum(word >> shift & 0xFFFF for shift in (0, 16, 32, 48))
        expected.append(np.float32(total - CENTRE) * SCALE)
    probe = Probe()
    drawn = torch.cat([probe.normal(7), probe.normal(3, 11).flatten()])
    assert drawn.tolist() == [float(number) for number in expected]


def test_numbers_are_spread_like_a_bell() -> None:
    x = Probe().normal(200, 500).double()
    assert abs(float(x.mean())) < 0.01
    assert abs(float(x.std()) - 1.0) < 0.01
    assert 0.66 < float((x.abs() < 1).double().mean()) < 0.70


def test_numbers_use_all_bits_of_a_float32() -> None:
    bits = Probe().normal(4096).view(torch.int32)
    assert {int((bits >> place & 1).sum()) > 1000 for place in range(20)} == {True}


def test_every_second_row_has_a_few_large_numbers() -> None:
    plain, rows = Probe().normal(8, 64), Probe().rows(8, 64)
    assert torch.equal(rows[::2], plain[::2])
    assert float(rows[1::2].abs().max()) > 8.0
    torch.testing.assert_close(rows[1::2], plain[1::2] * plain[1::2].abs() ** 3)


def test_all_sizes_are_there() -> None:
    x = all_sizes()
    assert x.isfinite().all()
    assert (x == 0).any()
    assert float(x.abs()[x != 0].min()) == 2.0**-149
    assert float(x.max()) > 2.0**28
    near = x[x.abs() < 110].sort().values
    assert float(near.diff().max()) < 0.1
