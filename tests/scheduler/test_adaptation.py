"""The long time scale of one node: it comes to the plan's threshold and share, and rests there."""

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.scheduler.adaptation import (
    MAX_THRESHOLD_TOKENS,
    MIN_SHARE,
    MIN_THRESHOLD_TOKENS,
    Adaptation,
    Adapted,
    Observed,
)
from prfaas.scheduler.curves import LinearCurve, PolynomialCurve, scaled
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.profile import DecodeProfile, Prior

KV = LinearCurve(tokens=(1.0, 2.0), values=(1e4, 2e4))
OPTIONS = SchedulerOptions(rebalance_prompts=80, rebalance_dwell_s=100.0)
SEEN = Observed(
    prefill_tokens_per_s=1000.0,
    prefill_chunk_s=0.5,
    decode_step_s=0.05,
    num_decoding=4,
    num_peers=1,
    peer_tokens_per_s=2000.0,
    link_bytes_per_s=1e8,
)


def made(options: SchedulerOptions = OPTIONS, prior: Prior | None = None) -> Adaptation:
    return Adaptation(options, kv_bytes=KV, max_batch=8, prior=prior)


def seeing(adaptation: Adaptation, seed: int = 0, num: int = 80, outputs: int = 100) -> Adaptation:
    random = Random(seed)
    for _ in range(num):
        adaptation.saw(round(random.lognormvariate(7, 1)), outputs)
    return adaptation


def last_of(adaptation: Adaptation, observed: Observed = SEEN, looks: int = 12) -> Adapted:
    return [adaptation.look(look * 60.0, observed) for look in range(looks)][-1]


def test_nothing_known_and_few_prompts_change_nothing():
    unknown = Adapted(threshold_tokens=None, prefill_share=1.0)
    assert last_of(seeing(made()), Observed()) == unknown
    assert last_of(made()) == unknown
    assert last_of(seeing(made(), num=19)) == unknown
    assert last_of(seeing(made(), num=20)).threshold_tokens is not None


def threshold(**changes: Any) -> float:
    tokens = last_of(seeing(made()), replace(SEEN, **changes)).threshold_tokens
    assert tokens is not None
    return tokens


def test_t_rises_as_peer_or_link_get_slower_and_falls_as_they_get_faster():
    usual = threshold(link_bytes_per_s=1e7)
    assert threshold(link_bytes_per_s=5e6) > usual > threshold(link_bytes_per_s=1e8)
    assert threshold(peer_tokens_per_s=500.0) > threshold() >= threshold(peer_tokens_per_s=9e3)
    assert threshold(num_peers=4, link_bytes_per_s=None) < threshold(link_bytes_per_s=None)


def test_t_follows_the_link_down_and_up_again():
    adaptation = seeing(made())
    full, half = (replace(SEEN, link_bytes_per_s=rate) for rate in (1e7, 4e6))
    before = last_of(adaptation, full).threshold_tokens
    halved = last_of(adaptation, half).threshold_tokens
    after = last_of(adaptation, full, looks=20).threshold_tokens
    assert before is not None
    assert halved is not None
    assert halved > 1.25 * before
    assert after == pytest.approx(before, rel=0.3)


def test_long_answers_take_steps_from_prefill_and_short_ones_give_them_back():
    adaptation = seeing(made(), outputs=2000)
    many = last_of(adaptation).prefill_share
    assert MIN_SHARE <= many < 0.6
    few = last_of(seeing(adaptation, outputs=1), looks=30).prefill_share
    assert few > many


def test_no_step_is_kept_from_prefill_before_looks_agree_and_changes_rest():
    adaptation = seeing(made(), outputs=2000)
    assert [adaptation.look(now_s, SEEN).prefill_share for now_s in (0.0, 1.0)] == [1.0, 1.0]
    first = adaptation.look(2.0, SEEN).prefill_share
    assert first < 1.0
    seeing(adaptation, outputs=1)
    shares = [adaptation.look(2.0 + now_s, SEEN).prefill_share for now_s in range(1, 100)]
    assert set(shares) == {first}
    assert adaptation.look(103.0, SEEN).prefill_share > first


@pytest.mark.parametrize("seed", range(4))
def test_a_tenth_of_noise_makes_nothing_flap(seed):
    random = Random(seed)

    def noisy(value: float | None) -> float | None:
        return None if value is None else value * random.uniform(0.9, 1.1)

    options = replace(OPTIONS, rebalance_prompts=300)
    adaptation = seeing(made(options), seed, num=300, outputs=700)
    thresholds, shares = [], []
    for look in range(60):
        seeing(adaptation, 100 * seed + look, num=8, outputs=700)
        observed = replace(
            SEEN,
            prefill_tokens_per_s=noisy(SEEN.prefill_tokens_per_s),
            peer_tokens_per_s=noisy(SEEN.peer_tokens_per_s),
            link_bytes_per_s=noisy(SEEN.link_bytes_per_s),
        )
        adapted = adaptation.look(look * 60.0, observed)
        thresholds.append(adapted.threshold_tokens)
        shares.append(adapted.prefill_share)
    for values in (thresholds[5:], shares[5:]):
        assert sum(before != after for before, after in pairwise(values)) <= 2


@pytest.mark.parametrize(
    ("options", "adapts"),
    [
        ({}, True),
        ({"policy": "static"}, True),
        ({"policy": "threshold"}, True),
        ({"threshold_tokens": 512}, False),
        ({"policy": "threshold", "threshold_tokens": 512}, False),
        ({"policy": "local"}, False),
        ({"policy": "always-remote"}, False),
    ],
)
def test_a_threshold_that_was_set_or_that_nobody_asks_for_stays(options, adapts):
    adapted = last_of(seeing(made(replace(OPTIONS, **options))))
    assert (adapted.threshold_tokens is not None) == adapts


def test_without_a_peer_t_stays_and_the_share_still_follows():
    alone = last_of(seeing(made(), outputs=2000), replace(SEEN, num_peers=0))
    assert alone.threshold_tokens is None
    assert alone.prefill_share < 1.0


def test_a_node_whose_peer_prefills_all_decodes_in_nearly_all_of_its_steps():
    options = replace(OPTIONS, policy="always-remote")
    assert last_of(seeing(made(options), outputs=2000)).prefill_share == MIN_SHARE


@pytest.mark.parametrize("observed_rate", [None, 500.0, 4000.0])
def test_a_profile_is_corrected_by_what_is_observed(observed_rate):
    """A node that is as fast as it looks has the same threshold, whatever its profile promised."""
    decode = DecodeProfile(
        step_s=LinearCurve(tokens=(1.0, 8.0), values=(0.02, 0.05)),
        max_batch=8,
        provenance="measured",
    )
    curve = PolynomialCurve(coefficients=(0.0, 1e-3, 1e-7))
    found = []
    for factor in (1.0, 3.0):
        prior = Prior(
            prefill_s=curve if observed_rate is None else scaled(curve, factor),
            speed=2.0,
            decode=decode,
        )
        seen = replace(SEEN, prefill_tokens_per_s=observed_rate)
        found.append(last_of(seeing(made(prior=prior)), seen))
    assert found[0].threshold_tokens is not None
    assert found[0].threshold_tokens == pytest.approx(found[1].threshold_tokens)


NUMBERS = st.none() | st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=60)
@given(
    prompts=st.lists(st.tuples(st.integers(-1, 10**9), st.integers(-1, 10**9)), max_size=40),
    looks=st.lists(
        st.builds(
            Observed,
            prefill_tokens_per_s=NUMBERS,
            prefill_chunk_s=NUMBERS,
            decode_step_s=NUMBERS,
            num_decoding=st.integers(-1, 10**6),
            num_peers=st.integers(0, 1000),
            peer_tokens_per_s=NUMBERS,
            link_bytes_per_s=NUMBERS,
        ),
        max_size=4,
    ),
)
def test_whatever_is_seen_t_and_share_stay_in_bounds(prompts, looks):
    adaptation = made(replace(OPTIONS, rebalance_prompts=20, rebalance_dwell_s=0.0))
    for uncached_tokens, output_tokens in prompts:
        adaptation.saw(uncached_tokens, output_tokens)
    for look, observed in enumerate(looks):
        adapted = adaptation.look(float(look), observed)
        assert MIN_SHARE <= adapted.prefill_share <= 1
        if adapted.threshold_tokens is not None:
            assert MIN_THRESHOLD_TOKENS <= adapted.threshold_tokens <= MAX_THRESHOLD_TOKENS
