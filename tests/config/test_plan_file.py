"""A plan file is read whole or refused with the key, the value and the limit."""

from pathlib import Path

import pytest

from prfaas.config.plan_file import read_plan_file
from prfaas.errors import ConfigError
from tests.config.knobs import INF, NAN, number
from tests.config.plan_files import PLAN, PROFILE, UNSET, changed, write_plan

GPUS = "deployments.a.prfaas_gpus"
LOCAL = "deployments.a.local_gpus"
BUDGET = changed(PLAN, "deployments.a", {"kind": "prfaas", "budget_cost": 64.0})

CASES = [
    *(case for case in number("min_decode_tokens_per_s", above=0, maximum=1e6) if case[1] != 1e6),
    ("min_decode_tokens_per_s", 1e6, "decodes 100 tokens/s alone; 1e+06 are asked for"),
    *number("link.bytes_per_s", above=0, maximum=1e15),
    *number("link.rtt_s", minimum=0, maximum=60, is_needed=False),
    *number("link.max_egress_fraction", above=0, maximum=1, is_needed=False),
    (GPUS, 0, "0 is below the minimum of 8"),
    (GPUS, 1, "1 is below the minimum of 8"),
    (GPUS, 8, None),
    (GPUS, 12, "12 is no multiple of the 8 GPUs of an instance"),
    (GPUS, -8, "-8 is below the minimum of 8"),
    (GPUS, 10**9, "1000000000 is above the maximum of 800000"),
    (GPUS, NAN, "expected a whole number, not nan"),
    (GPUS, 8.0, "expected a whole number, not 8.0"),
    (GPUS, UNSET, "deployments.a.prfaas_gpus: is not set"),
    (LOCAL, 8, "1 PrfaaS and 1 local instances make no prfaas deployment; it needs at least"),
    (LOCAL, 16, None),
    (LOCAL, 0, "0 is below the minimum of 8"),
    (LOCAL, INF, "expected a whole number, not inf"),
    ("deployments.a.kind", "other", "expected one of prfaas, homogeneous, naive, not 'other'"),
    ("deployments.a.kind", "homogeneous", "unknown key deployments.a.prfaas_gpus"),
    ("deployments.a.kind", "naive", None),
    ("deployments", UNSET, "deployments: is not set"),
    ("deployments", {}, "deployments: has no deployment"),
    ("profiles.prfaas", UNSET, "a PrfaaS cluster needs a link, and a link one"),
    ("profiles.local", UNSET, "profiles.local: is not set"),
    ("profiles.local", "nowhere.toml", "cannot read"),
    ("link", UNSET, "a PrfaaS cluster needs a link, and a link one"),
    ("workload", UNSET, "workload: is not set"),
    ("workload", 3, "workload: expected printable text, not 3"),
    ("compare.deployment", "c", "expected one of a, b, not 'c'"),
    ("compare.equal_cost", UNSET, None),
    ("compare", UNSET, None),
    ("published", UNSET, None),
    ("published.deployments.c", {}, "c: is no deployment; there are a, b"),
    ("published.gains.c", {}, "c: is no deployment; there are a, b"),
    ("published.deployments.a.lambda", 1.0, "unknown key published.deployments.a.lambda"),
    ("published.deployments.a.lambda_max_rps", 0, "0 must be above 0"),
    ("published.gains.b.ttft_p90_s", -1, "-1 must be above -1"),
    ("published.gains.b.ttft_p90_s", -0.99, None),
    ("published.gains.b.ttft_p90_s", NAN, "expected a finite number, not nan"),
    ("worklaod", "x", "unknown key worklaod; did you mean workload?"),
]


@pytest.mark.parametrize(("key", "value", "says"), CASES)
def test_a_plan_is_read_or_refused_with_key_value_and_limit(tmp_path, key, value, says):
    path = write_plan(tmp_path, changed(PLAN, key, value))
    if says is None:
        read_plan_file(path)
        return
    with pytest.raises(ConfigError) as caught:
        read_plan_file(path)
    assert says in str(caught.value)


BUDGET_CASES = [
    *(
        c
        for c in number("deployments.a.budget_cost", above=0, maximum=1e12)
        if c[1] not in (1e12, UNSET)
    ),
    ("deployments.a.budget_cost", 1e12, "shapes or more; at most 200,000 are searched"),
    ("deployments.a.budget_cost", 1, "a budget of 1 buys no prfaas deployment: at least 1 PrfaaS"),
    ("deployments.a.budget_cost", 23.99, "a budget of 23.99 buys no prfaas deployment"),
    ("deployments.a.budget_cost", 24, None),
]


@pytest.mark.parametrize(("key", "value", "says"), BUDGET_CASES)
def test_a_budget_is_spent_or_refused_with_value_and_limit(tmp_path, key, value, says):
    path = write_plan(tmp_path, changed(BUDGET, key, value))
    if says is None:
        assert read_plan_file(path).plans["a"].cost <= value
        return
    with pytest.raises(ConfigError) as caught:
        read_plan_file(path)
    assert says in str(caught.value)


def test_costs_are_needed_only_to_compare_them(tmp_path):
    free = changed(PROFILE, "cost", UNSET)
    with pytest.raises(ConfigError, match=r"compare\.equal_cost: needs a \[cost\]"):
        read_plan_file(write_plan(tmp_path, profile=free))
    with pytest.raises(ConfigError, match=r"budget_cost: a budget needs a \[cost\]"):
        read_plan_file(write_plan(tmp_path, BUDGET, free))
    file = read_plan_file(write_plan(tmp_path, changed(PLAN, "compare.equal_cost", UNSET), free))
    assert file.plans["a"].cost is None


def test_a_plan_of_local_instances_needs_no_link(tmp_path):
    local = changed(changed(PLAN, "link", UNSET), "profiles.prfaas", UNSET)
    local = changed(changed(local, "deployments.a", UNSET), "compare", UNSET)
    local = changed(local, "published", UNSET)
    plans = read_plan_file(write_plan(tmp_path, local)).plans
    assert [(name, plan.kind) for name, plan in plans.items()] == [("b", "homogeneous")]
    naive = changed(local, "deployments.b.kind", "naive")
    with pytest.raises(ConfigError, match=r"naive needs profiles\.prfaas and \[link\]"):
        read_plan_file(write_plan(tmp_path, naive))


@pytest.mark.parametrize("text", ["[", "a = ", "\ufffd"])
def test_a_file_that_is_no_toml_is_refused(tmp_path, text):
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(ConfigError, match="is not TOML"):
        read_plan_file(tmp_path / "plan.toml")


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_plan_file(tmp_path)


def test_relative_paths_start_at_the_file(tmp_path, monkeypatch):
    path = write_plan(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_plan_file(Path("..") / path.name).plans
