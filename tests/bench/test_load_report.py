"""The figures of a load: percentiles by an independent definition, counts that add up, names that are bounded."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.bench.load import Load, Sample
from prfaas.bench.load_report import MAX_NAMES, quantile, spread, to_json, to_lines


def load(*samples: Sample, cpu_s: float = 0.0, planned: int | None = None) -> Load:
    return Load(
        began_s=100.0,
        samples=list(samples),
        num_planned=len(samples) if planned is None else planned,
        ended_s=110.0,
        stopped_by=None,
        loop_lags_s=array("d", [0.0]),
        cpu_s=cpu_s,
    )


def answered(due_s: float, *tokens_s: float, **story: object) -> Sample:
    sample = Sample(due_s=100 + due_s, prompt_tokens=50, sent_s=100 + due_s)
    for token_s in tokens_s:
        sample.token(100 + token_s)
    sample.ended_s = 100 + tokens_s[-1]
    sample.is_done = True
    for name, value in story.items():
        setattr(sample, name, value)
    return sample


def failed(error: str) -> Sample:
    return Sample(due_s=101.0, prompt_tokens=50, sent_s=101.0, ended_s=109.0, error=error)


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=300),
    st.sampled_from([0.01, 0.25, 0.5, 0.9, 0.99, 1.0]),
)
def test_a_percentile_is_the_inverted_distribution_function(values, fraction):
    ascending = sorted(values)
    theirs = np.quantile(ascending, fraction, method="inverted_cdf")
    assert quantile(ascending, fraction) == theirs


def test_nothing_has_no_spread():
    assert spread([]) is None


def test_figures_are_those_of_whole_answers_and_rates_those_until_the_last():
    report = to_json(
        load(
            answered(0.0, 1.0, 2.0, route="local", tokens_local=50, reason="short"),
            answered(
                2.0, 5.0, route="remote", tokens_remote=50, bytes_received=4000, reason="long"
            ),
            failed("http_503 overloaded"),
            failed("cut_off"),
        ),
        ttft_slo_s=2.0,
    )
    assert report["duration_s"] == 5.0
    assert report["requests"] == {
        "planned": 4,
        "sent": 4,
        "done": 2,
        "unfinished": 0,
        "failed": 2,
    }
    assert report["ttft_s"]["mean"] == 2.0
    assert report["goodput"]["requests_per_s"] == 0.2
    assert report["goodput"]["fraction"] == 0.25
    assert report["throughput"]["requests_per_s"] == 0.4
    assert report["throughput"]["kv_bytes_per_s"] == 800.0
    assert report["prompt_tokens"] == {"all": 100, "reused": 0, "local": 50, "remote": 50}
    assert {route: found["requests"] for route, found in report["routes"].items()} == {
        "local": 1,
        "remote": 1,
    }
    assert report["routes"]["remote"]["ttft_s"]["p50"] == 3.0
    assert report["errors"] == {"http_503 overloaded": 1, "cut_off": 1}
    text = "\n".join(to_lines(report))
    for said in ("2 of 4 requests answered", "http_503 overloaded 1", "goodput 0.200 req/s"):
        assert said in text


def test_the_distance_from_the_prediction_counts_either_way():
    samples = [answered(0.0, 1.0, predicted_ttft_s=3.0), answered(0.0, 1.0, predicted_ttft_s=0.5)]
    report = to_json(load(*samples), ttft_slo_s=1.0)
    assert report["prediction_error_s"]["mean"] == 1.25


def test_a_count_of_the_server_beats_one_of_events():
    report = to_json(load(answered(0.0, 1.0, 2.0, completion_tokens=5)), ttft_slo_s=1.0)
    assert report["tpot_s"]["mean"] == 0.25
    assert report["throughput"]["completion_tokens_per_s"] == 2.5


def test_names_that_a_server_makes_up_are_bounded():
    samples = [failed(f"http_{number}") for number in range(MAX_NAMES + 20)]
    errors = to_json(load(*samples), ttft_slo_s=1.0)["errors"]
    assert len(errors) == MAX_NAMES + 1
    assert errors["other"] == 20


def test_nothing_answered_is_a_report_too():
    report = to_json(load(failed("no_connection"), planned=3), ttft_slo_s=1.0)
    assert report["ttft_s"] is None
    assert report["throughput"]["requests_per_s"] == 0
    assert "0 of 3 requests" in next(iter(to_lines(report)))


@pytest.mark.parametrize(("cpu_s", "warns"), [(8.9, False), (9.5, True)])
def test_a_generator_that_uses_a_whole_core_is_the_limit(cpu_s, warns):
    report = to_json(load(answered(0.0, 1.0), cpu_s=cpu_s), ttft_slo_s=1.0)
    assert any("of a core" in warning for warning in report["warnings"]) == warns
    assert any(line.startswith("WARNING: ") for line in to_lines(report)) == warns
