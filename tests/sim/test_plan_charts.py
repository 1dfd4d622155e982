"""The curves of figure 5 peak where the plan is."""

from pathlib import Path

import pytest

from prfaas.config.plan_file import read_plan_file
from prfaas.sim.plan_charts import LAMBDA_NAME, figure_5

CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"


@pytest.fixture(scope="module")
def file():
    return read_plan_file(CASE_STUDY)


def test_both_curves_peak_at_the_plan(file):
    plan = file.plans["prfaas"]
    for chart in figure_5(file.model, plan):
        (line,) = (line for line in chart.series if line.name == LAMBDA_NAME)
        x, y = max(line.points, key=lambda point: point[1])
        assert y == plan.rates.lambda_max_rps
        assert x == chart.marked_x


def test_lambda_max_is_the_least_of_the_terms_beside_it(file):
    over_threshold, _ = figure_5(file.model, file.plans["prfaas"])
    terms = [dict(line.points) for line in over_threshold.series if line.name != LAMBDA_NAME]
    (lambda_max,) = (line for line in over_threshold.series if line.name == LAMBDA_NAME)
    for x, y in lambda_max.points:
        assert y == pytest.approx(min(term[x] for term in terms))


def test_a_deployment_without_a_threshold_has_no_curve(file):
    with pytest.raises(ValueError, match="a naive deployment has no threshold"):
        figure_5(file.model, file.plans["naive"])
