"""Length samples have the moments of what they stand for."""

from math import erf, exp, log, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.lengths import mixture, of_sample, truncated_lognormal


def phi(z: float) -> float:
    return (1 + erf(z / sqrt(2))) / 2


def moment(k: int, mu: float, sigma: float, low: float, high: float) -> float:
    """E[L^k] of a log-normal cut to [low, high], in closed form."""

    def mass(power: int) -> float:
        shift = mu + power * sigma**2
        return phi((log(high) - shift) / sigma) - phi((log(low) - shift) / sigma)

    return exp(k * mu + k * k * sigma**2 / 2) * mass(k) / mass(0)


@pytest.mark.parametrize(
    ("mu", "sigma", "low", "high"),
    [(9.9, 1.0, 128, 131072), (6.0, 0.5, 10, 5000), (9.0, 2.0, 1000, 100_000)],
)
def test_a_truncated_lognormal_has_the_moments_of_its_closed_form(mu, sigma, low, high):
    lengths = truncated_lognormal(mu=mu, sigma=sigma, min_tokens=low, max_tokens=high)
    lengths.check()
    assert low <= lengths.tokens[0] < lengths.tokens[-1] <= high
    for k, tolerance in ((1, 1e-4), (2, 1e-3)):
        mean = sum(t**k * s for t, s in zip(lengths.tokens, lengths.shares, strict=True))
        assert mean == pytest.approx(moment(k, mu, sigma, low, high), rel=tolerance)


def test_the_case_study_has_a_mean_of_about_27k_tokens():
    lengths = truncated_lognormal(mu=9.9, sigma=1.0, min_tokens=128, max_tokens=131072)
    assert 26_500 < lengths.mean_tokens < 27_999


@pytest.mark.parametrize(("mu", "high"), [(1000.0, 131072.0), (-90.0, 131072.0), (9.9, 129.0)])
def test_a_lognormal_outside_its_limits_is_refused_with_its_share(mu, high):
    with pytest.raises(ValueError, match=r"a share of .* lies between 128 and .* tokens"):
        truncated_lognormal(mu=mu, sigma=0.1, min_tokens=128, max_tokens=high)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200), st.floats(0.01, 1))
def test_quantiles_are_those_of_the_sorted_sample(sample, fraction):
    lengths = of_sample(sample)
    lengths.check()
    quantile = lengths.quantile_tokens(fraction)
    assert quantile in sample
    below = sum(length <= quantile for length in sample) / len(sample)
    under = sum(length < quantile for length in sample) / len(sample)
    assert below >= fraction - 1e-9
    assert under < fraction + 1e-9


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 9))
def test_a_mixture_of_a_sample_with_itself_is_the_sample(sample, weight):
    lengths = of_sample(sample)
    mixed = mixture([(weight, lengths), (1.0, lengths)])
    mixed.check()
    assert mixed.tokens == lengths.tokens
    assert mixed.shares == pytest.approx(lengths.shares)


def test_a_mixture_weighs_its_parts():
    mixed = mixture([(3.0, of_sample([10])), (1.0, of_sample([10, 20]))])
    assert list(mixed.tokens) == [10, 20]
    assert mixed.shares == pytest.approx((0.875, 0.125))


@pytest.mark.parametrize("sample", [[], [0], [0, 0]])
def test_a_sample_without_a_token_to_compute_is_refused(sample):
    with pytest.raises(ValueError, match="no prompt with an uncached token"):
        of_sample(sample)
