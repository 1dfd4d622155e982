"""The case study comes out as published, and says what that proves."""

import json
from pathlib import Path

import pytest

from prfaas.config.plan_file import METRICS, read_plan_file
from prfaas.scheduler.profile import ROUNDING
from prfaas.sim.plan_report import metrics, report
from tests.config.plan_files import PLAN, UNSET, changed, write_plan

CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"
# PrfaaS §4, typed from the paper and not from the file that the report compares with.
PAPER = {
    "prfaas": {
        "threshold_tokens": 19_400,
        "num_prfaas": 4,
        "num_prefill": 3,
        "num_decode": 5,
        "theta_prfaas_rps": 1.61,
        "theta_prefill_rps": 1.64,
        "theta_decode_rps": 3.91,
        "lambda_max_rps": 3.24,
        "ttft_mean_s": 2.22,
        "ttft_p90_s": 3.51,
        "egress_bytes_per_s": 13e9 / 8,
        "offload_fraction": 0.5,
    },
    "homogeneous": {
        "num_prefill": 9,
        "num_decode": 3,
        "theta_prefill_rps": 2.11,
        "theta_decode_rps": 2.35,
        "lambda_max_rps": 2.11,
        "ttft_mean_s": 4.44,
        "ttft_p90_s": 9.73,
    },
    "naive": {
        "num_prfaas": 4,
        "num_decode": 8,
        "theta_prfaas_rps": 2.45,
        "theta_decode_rps": 6.25,
        "lambda_max_rps": 2.45,
        "ttft_mean_s": 1.74,
        "ttft_p90_s": 3.51,
    },
}
TOLERANCES = {
    "num_prfaas": 0.0,
    "num_prefill": 0.0,
    "num_decode": 0.0,
    "threshold_tokens": 0.02,
    "theta_prfaas_rps": 0.02,
    "theta_prefill_rps": 0.02,
    "theta_decode_rps": 0.02,
    "lambda_max_rps": 0.015,
    "ttft_mean_s": 0.06,
    "ttft_p90_s": 0.06,
    "egress_bytes_per_s": 0.06,
    "offload_fraction": 0.02,
}
ROWS = [(name, metric) for name, figures in PAPER.items() for metric in figures]


@pytest.fixture(scope="module")
def facts():
    return report(read_plan_file(CASE_STUDY))


@pytest.mark.parametrize(("name", "metric"), ROWS)
def test_the_case_study_is_as_near_to_the_paper_as_promised(facts, name, metric):
    value, published = facts["deployments"][name][metric], PAPER[name][metric]
    assert value == pytest.approx(published, rel=TOLERANCES[metric])
    assert facts["error_vs_paper"][name][metric] == pytest.approx(value / published - 1)


def test_every_published_figure_and_no_other_has_an_error(facts):
    errors = facts["error_vs_paper"]
    assert {name: set(figures) for name, figures in errors.items()} == {
        name: set(figures) for name, figures in PAPER.items()
    }


def test_the_deployments_have_exactly_the_promised_keys(facts):
    assert set(facts["deployments"]) == {"prfaas", "homogeneous", "naive"}
    for figures in facts["deployments"].values():
        assert tuple(figures) == METRICS
    absent = {
        name: {metric for metric, value in figures.items() if value is None}
        for name, figures in facts["deployments"].items()
    }
    assert absent == {
        "prfaas": set(),
        "homogeneous": {"threshold_tokens", "theta_prfaas_rps"},
        "naive": {"threshold_tokens", "theta_prefill_rps"},
    }
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts


def test_the_gains_are_the_papers(facts):
    gains = facts["gains"]
    assert 1 + gains["homogeneous"]["lambda_max_rps"] == pytest.approx(1.54, rel=0.015)
    assert 1 + gains["naive"]["lambda_max_rps"] == pytest.approx(1.32, rel=0.015)
    assert gains["homogeneous"]["ttft_p90_s"] == pytest.approx(-0.64, abs=0.01)
    assert facts["gains_vs_paper"]["naive"]["lambda_max_rps"]["error"] == pytest.approx(
        (1 + gains["naive"]["lambda_max_rps"]) / 1.32 - 1
    )


def test_at_equal_cost_the_gain_is_about_15_percent(facts):
    equal = facts["equal_cost"]
    assert 1 + equal["gains"]["lambda_max_rps"] == pytest.approx(1.15, rel=0.015)
    assert equal["cost"] == pytest.approx(facts["detail"]["prfaas"]["cost"], rel=ROUNDING)
    grown = equal["deployment"]
    assert 8 * (grown["num_prefill"] + grown["num_decode"]) == 128  # H20
    assert equal["provenance"] == "fitted"  # the price of an H200 is not published


def test_the_egress_is_about_13_percent_of_the_link(facts):
    share = facts["detail"]["prfaas"]["egress_fraction_of_link"]
    assert share == facts["deployments"]["prfaas"]["egress_bytes_per_s"] / 12.5e9
    assert share == pytest.approx(0.13, rel=0.06)
    assert facts["detail"]["homogeneous"]["egress_fraction_of_link"] == 0


def test_fitted_and_independent_figures_are_marked(facts):
    marks = facts["provenance"]
    assert {metric: marks["naive"][metric] for metric in marks["naive"]} == {
        "theta_decode_rps": "fitted",
        "theta_prfaas_rps": "independent",
        "ttft_mean_s": "independent",
        "ttft_p90_s": "independent",
        "lambda_max_rps": "independent",
        "egress_bytes_per_s": "independent",
    }
    assert set(marks["homogeneous"].values()) == {"fitted"}
    assert marks["prfaas"]["theta_prefill_rps"] == marks["prfaas"]["theta_decode_rps"] == "fitted"
    assert marks["prfaas"]["lambda_max_rps"] == marks["prfaas"]["threshold_tokens"] == "mixed"


def test_measured_profiles_leave_nothing_fitted(tmp_path):
    marks = report(read_plan_file(write_plan(tmp_path)))["provenance"]
    assert {mark for figures in marks.values() for mark in figures.values()} == {"independent"}


def test_what_decode_limits_is_as_fitted_as_decode(tmp_path):
    plan = changed(PLAN, "deployments.n", {"kind": "naive", "prfaas_gpus": 800, "local_gpus": 8})
    plan = changed(plan, "min_decode_tokens_per_s", 90)
    file = read_plan_file(write_plan(tmp_path, plan))
    assert file.plans["n"].rates.bottleneck == "decode"
    fitted = {"max_batch": 8, "batch": [1], "step_s": [0.01], "provenance": "fitted", "source": "-"}
    from tests.config.plan_files import PROFILE

    file = read_plan_file(write_plan(tmp_path, plan, changed(PROFILE, "decode", fitted)))
    marks = report(file)["provenance"]["n"]
    assert marks["lambda_max_rps"] == "fitted"
    assert marks["theta_prfaas_rps"] == "independent"


def test_a_file_without_comparison_or_published_figures_has_neither(tmp_path):
    plain = changed(changed(PLAN, "compare", UNSET), "published", UNSET)
    facts = report(read_plan_file(write_plan(tmp_path, plain)))
    assert "gains" not in facts
    assert facts["error_vs_paper"] == {}
    alone = changed(changed(PLAN, "compare.equal_cost", UNSET), "published", UNSET)
    facts = report(read_plan_file(write_plan(tmp_path, alone)))
    assert facts["equal_cost"] is None
    assert facts["gains_vs_paper"] == {}


def test_a_threshold_is_a_whole_number_of_tokens(facts):
    file = read_plan_file(CASE_STUDY)
    assert isinstance(metrics(file.plans["prfaas"])["threshold_tokens"], int)
