"""Equations 1 to 8 on numbers worked by hand, and the model against sums over the sample."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.curves import LinearCurve
from prfaas.scheduler.lengths import of_sample
from prfaas.scheduler.profile import DecodeProfile, Link
from prfaas.scheduler.throughput import (
    Shape,
    ThroughputModel,
    cluster_egress,
    decode_rate,
    kv_throughput,
    prefill_balance,
    prefill_rate,
    prfaas_rate,
    stage_balance,
    system_rate,
)
from tests.scheduler.planning import FAST, KV, SLOW, model, profile

MIB = 2**20
samples = st.lists(st.integers(1, 200_000), min_size=1, max_size=60).map(of_sample)


def test_equation_1_gives_the_phi_of_table_5():
    for mib, prefill_s, gbps in ((190.8, 0.44, 3.61), (308.9, 0.72, 3.59), (701.3, 1.84, 3.19)):
        assert kv_throughput(mib * MIB, prefill_s) * 8e-9 == pytest.approx(gbps, rel=0.01)


def test_equation_2_gives_the_egress_of_512_gpus():
    assert cluster_egress(512, 8, 59.93e9 / 8) * 8e-12 == pytest.approx(3.8, rel=0.02)


def test_equation_3_is_bound_by_compute_or_by_the_link():
    assert prfaas_rate(4, 2.5, 12.5e9, 1e9) == 1.6
    assert prfaas_rate(4, 2.5, 1e9, 1e9) == 1.0


def test_equations_4_and_5_give_the_stage_rates_of_the_homogeneous_deployment():
    assert prefill_rate(9, 9 / 2.11) == pytest.approx(2.11)
    assert decode_rate(3, 20, 0.025, 1024) == pytest.approx(2.35, rel=0.003)


def test_equation_6_is_the_least_of_its_terms_and_ignores_stages_without_prompts():
    assert system_rate(1.61, 1.64, 3.91, 0.495) == pytest.approx(3.24, rel=0.005)
    assert system_rate(1.61, 1.64, 3.0, 0.495) == 3.0
    assert system_rate(None, 2.11, 2.35, 0.0) == 2.11
    assert system_rate(2.45, None, 6.25, 1.0) == 2.45
    assert system_rate(None, None, 6.25, 0.5) == 6.25


def test_equations_7_and_8_are_1_in_balance():
    assert prefill_balance(1.5, 1.5, 0.5) == 1.0
    assert prefill_balance(1.0, 3.0, 0.25) == 1.0
    assert stage_balance(1.5, 1.5, 3.0) == 1.0


@given(lengths=samples, num_prfaas=st.integers(1, 9), num_prefill=st.integers(1, 9), data=st.data())
def test_rates_are_those_of_expected_service_times_on_either_side(
    lengths, num_prfaas, num_prefill, data
):
    made = model(lengths, link=Link(bytes_per_s=3e9))
    threshold = data.draw(st.floats(0, 250_000))
    cut = made.cut_at(threshold)
    rates = made.rates(Shape(num_prfaas=num_prfaas, num_prefill=num_prefill, num_decode=2), cut)
    pairs = list(zip(lengths.tokens, lengths.shares, strict=True))
    long = [(t, s) for t, s in pairs if t > threshold]
    short = [(t, s) for t, s in pairs if t <= threshold]
    p = sum(s for _, s in long)
    assert rates.offload_fraction == pytest.approx(p, abs=1e-12)
    assert (rates.theta_prfaas_rps is None) == (not long)
    assert (rates.theta_prefill_rps is None) == (not short)
    terms = [rates.theta_decode_rps]
    if long:
        work_s = sum(FAST(t) * s for t, s in long)
        sent = sum(KV(t) * s for t, s in long)
        terms.append(min(num_prfaas / work_s, 3e9 / sent))
        assert rates.theta_prfaas_rps == pytest.approx(terms[-1] * p)
        assert rates.egress_bytes_per_s == pytest.approx(rates.lambda_max_rps * sent)
    else:
        assert rates.egress_bytes_per_s == 0
    if short:
        terms.append(num_prefill / sum(SLOW(t) * s for t, s in short))
        assert rates.theta_prefill_rps == pytest.approx(terms[-1] * (1 - p))
    assert rates.lambda_max_rps == pytest.approx(min(terms))
    limits = made.limits(Shape(num_prfaas=num_prfaas, num_prefill=num_prefill, num_decode=2), cut)
    assert min(limits.values()) == pytest.approx(rates.lambda_max_rps)
    assert limits[rates.bottleneck] == min(limits.values())


@given(lengths=samples)
def test_every_cut_is_made_by_the_threshold_it_names(lengths):
    made = model(lengths)
    for cut in range(made.num_cuts):
        assert made.cut_at(made.threshold_at(cut)) == cut


@given(lengths=samples)
def test_the_egress_never_exceeds_what_the_link_may_carry(lengths):
    link = Link(bytes_per_s=5e8, max_egress_fraction=0.7)
    made = model(lengths, link=link)
    for cut in range(made.num_cuts):
        rates = made.rates(Shape(num_prfaas=50, num_prefill=50, num_decode=50), cut)
        assert rates.egress_bytes_per_s <= 0.7 * 5e8 * (1 + 1e-9)


def test_a_thin_link_is_the_bottleneck_and_says_so():
    made = model(link=Link(bytes_per_s=1e8))
    rates = made.rates(Shape(num_prfaas=4, num_decode=8), 0)
    assert rates.bottleneck == "link"
    assert rates.egress_bytes_per_s == pytest.approx(1e8)


def first_tokens_s(made: ThroughputModel, cut: int) -> list[float]:
    return [time_s for time_s, _ in made.service_times(cut)]


def test_the_first_token_waits_for_the_slower_of_prefill_and_transfer_and_a_round_trip():
    lengths = of_sample([1000])
    fast = model(lengths, link=Link(bytes_per_s=1e12, rtt_s=0.05))
    assert first_tokens_s(fast, 0) == pytest.approx([FAST(1000) + 0.05])
    thin = model(lengths, link=Link(bytes_per_s=1e6, rtt_s=0.05))
    assert first_tokens_s(thin, 0) == pytest.approx([KV(1000) / 1e6 + 0.05])
    assert first_tokens_s(thin, 1) == pytest.approx([SLOW(1000)])


@pytest.mark.parametrize(
    ("speed", "batch"),
    [(100.0, 1), (1e-3, 64), (40.0, 20), (50.0, 13), (39.999, 20)],
)
def test_the_batch_is_the_largest_that_keeps_the_speed(speed, batch):
    assert model(min_decode_tokens_per_s=speed).batch == batch


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=6), st.floats(0.0001, 1), st.integers(1, 300)
)
def test_the_batch_within_a_step_is_what_trying_each_one_finds(rises, limit_s, max_batch):
    points = tuple(sum(rises[: i + 1]) / 1000 for i in range(len(rises)))
    decode = DecodeProfile(
        step_s=LinearCurve(tokens=tuple(float(4**i) for i in range(len(rises))), values=points),
        max_batch=max_batch,
        provenance="measured",
    )
    fitting = [b for b in range(1, max_batch + 1) if decode.step_s(b) <= limit_s * (1 + 1e-9)]
    assert decode.batch_within(limit_s) == max(fitting, default=0)


def test_a_speed_that_no_batch_reaches_is_refused_with_the_one_that_is():
    with pytest.raises(ValueError, match=r"decodes 100 tokens/s alone; 101 are asked for"):
        model(min_decode_tokens_per_s=101)


def test_a_prfaas_cluster_and_a_link_come_together():
    parts: Any = {"workload": model().workload, "local": profile(), "min_decode_tokens_per_s": 40}
    with pytest.raises(ValueError, match="needs a link"):
        ThroughputModel(prfaas=profile(FAST), **parts)
    with pytest.raises(ValueError, match="needs a link"):
        ThroughputModel(link=Link(bytes_per_s=1e9), **parts)
    assert ThroughputModel(**parts).num_cuts == model().num_cuts


def test_a_local_cluster_has_to_decode():
    with pytest.raises(ValueError, match="profile p has no decode"):
        model(local=profile(decodes=False))


@pytest.mark.parametrize(
    "counts",
    [
        {"num_decode": 0, "num_prefill": 1},
        {"num_decode": -1, "num_prefill": 1},
        {"num_decode": 1},
        {"num_decode": 1, "num_prefill": -1, "num_prfaas": 2},
        {"num_decode": 1, "num_prefill": 2, "num_prfaas": -1},
    ],
)
def test_a_shape_that_cannot_finish_a_request_is_refused(counts):
    with pytest.raises(ValueError, match=r"no count below 0|no instance prefills"):
        Shape(**counts)


def test_prompts_for_a_role_without_instances_leave_no_rate():
    made = model()
    assert made.rates(Shape(num_prefill=1, num_decode=1), 0).lambda_max_rps == 0
    last = made.num_cuts - 1
    assert made.rates(Shape(num_prfaas=1, num_decode=1), last).lambda_max_rps == 0
    assert math.isfinite(made.rates(Shape(num_prfaas=1, num_decode=1), 0).lambda_max_rps)
