"""What a profile says is corrected by the rate that the engine shows."""

import pytest

from prfaas.scheduler.correction import RateCorrection
from prfaas.scheduler.curves import PolynomialCurve
from prfaas.scheduler.profile import Prior

PRIOR = Prior(prefill_s=PolynomialCurve(coefficients=(0.0, 1e-3, 1e-6)), speed=2.0)
"""1,000 tokens/s at 1,000 tokens, 400 at 4,000."""


def made(prior: Prior | None = PRIOR) -> RateCorrection:
    return RateCorrection(prior, memory_tokens=4096)


@pytest.mark.parametrize("observed", [None, 0.0, -1.0, float("nan"), float("inf")])
def test_before_anything_is_observed_the_profile_speaks(observed):
    assert made().tokens_per_s(1000, observed) == pytest.approx(1000)
    assert made().tokens_per_s(4000, observed) == pytest.approx(400)
    assert made(None).tokens_per_s(1000, observed) is None


def test_without_a_profile_every_length_has_the_observed_rate():
    correction = made(None)
    correction.computed(1000)
    assert correction.tokens_per_s(0, 70.0) == 70.0
    assert correction.tokens_per_s(10**6, 70.0) == 70.0


def test_a_machine_that_is_half_as_fast_is_so_at_every_length():
    correction = made()
    for _ in range(40):
        correction.computed(1000)
    assert correction.tokens_per_s(1000, 500.0) == pytest.approx(500)
    assert correction.tokens_per_s(4000, 500.0) == pytest.approx(200)
    assert correction.tokens_per_s(0, 500.0) == pytest.approx(500 * 2 / 1.001, rel=1e-3)


def test_the_prompts_that_the_observed_rate_is_of_are_those_of_late():
    correction = made()
    correction.computed(4000)
    for _ in range(40):
        correction.computed(1000)
    assert correction.tokens_per_s(4000, 1000.0) == pytest.approx(400, rel=0.01)


def test_a_rate_of_nothing_known_to_be_computed_is_taken_as_it_is():
    correction = made()
    correction.computed(0)
    assert correction.tokens_per_s(4000, 123.0) == 123.0
