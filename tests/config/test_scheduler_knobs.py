"""The knobs of routing: what is taken, what is refused, and that one without effect is."""

import math
from typing import get_args

import pytest

from prfaas.config.load import load_config
from prfaas.config.options import NodeConfig
from prfaas.config.render import render_toml
from prfaas.errors import ConfigError
from prfaas.scheduler.options import FIRST_THRESHOLD_TOKENS, SchedulerOptions
from prfaas.scheduler.policies import PolicyName

PEER = "127.0.0.1:9"
POLICIES = get_args(PolicyName)


def load(**flags: object) -> NodeConfig:
    return load_config(flags={"peer": PEER} | flags, environ={})


@pytest.mark.parametrize(
    ("flags", "policy", "tokens"),
    [
        ({}, "predictive", FIRST_THRESHOLD_TOKENS),
        ({"threshold_tokens": "auto"}, "predictive", FIRST_THRESHOLD_TOKENS),
        ({"threshold_tokens": "0"}, "static", 0),
        ({"threshold_tokens": "1"}, "static", 1),
        ({"threshold_tokens": str(1 << 40)}, "static", 1 << 40),
        ({"policy": "static"}, "static", FIRST_THRESHOLD_TOKENS),
        ({"policy": "static", "threshold_tokens": "auto"}, "static", FIRST_THRESHOLD_TOKENS),
        ({"policy": "threshold", "threshold_tokens": "9"}, "threshold", 9),
        ({"policy": "threshold"}, "threshold", FIRST_THRESHOLD_TOKENS),
        ({"policy": "local"}, "local", FIRST_THRESHOLD_TOKENS),
        ({"policy": "always-remote"}, "always-remote", FIRST_THRESHOLD_TOKENS),
    ],
)
def test_the_policy_in_force_and_its_first_threshold(flags, policy, tokens):
    options = load(**flags).scheduler
    assert options.policy_in_force == policy
    assert options.first_threshold_tokens == tokens


@pytest.mark.parametrize(
    ("key", "raw", "message"),
    [
        ("threshold_tokens", "-1", "-1 is below the minimum of 0"),
        ("threshold_tokens", str(-(10**18)), "is below the minimum of 0"),
        ("threshold_tokens", str(10**18), "is above the maximum of 1099511627776"),
        ("threshold_tokens", "nan", "expected a whole number or auto, not 'nan'"),
        ("threshold_tokens", "", "expected a whole number or auto, not ''"),
        ("threshold_tokens", True, "expected a whole number or auto, not true"),
        ("threshold_tokens", math.nan, "expected a whole number or auto, not nan"),
        ("egress_target", "0", "0 must be above 0"),
        ("egress_target", "-0.1", "-0.1 must be above 0"),
        ("egress_target", "1.01", "1.01 is above the maximum of 1"),
        ("egress_target", "1e300", "is above the maximum of 1"),
        ("egress_target", math.nan, "expected a finite number, not nan"),
        ("egress_target", "auto", "expected a number, not 'auto'"),
        ("policy", "naive", "expected one of local, always-remote, static, threshold, predictive"),
        ("policy", "", "expected one of"),
        ("rebalance_period_s", "0", "0 must be above 0"),
        ("rebalance_period_s", "-1", "-1 must be above 0"),
        ("rebalance_period_s", "1e9", "1e.09 is above the maximum of 86400"),
        ("rebalance_dwell_s", "-1", "-1 is below the minimum of 0"),
        ("rebalance_dwell_s", math.inf, "expected a finite number, not inf"),
        ("rebalance_prompts", "19", "19 is below the minimum of 20"),
        ("rebalance_prompts", "10001", "is above the maximum of 10000"),
    ],
)
def test_a_knob_out_of_bounds_is_refused_with_value_and_limit(key, raw, message):
    flag = "--" + key.replace("_", "-")
    with pytest.raises(ConfigError, match=f"^{flag}: .*{message}"):
        load(**{key: raw})


@pytest.mark.parametrize(
    ("key", "raw"),
    [
        ("egress_target", "1"),
        ("egress_target", "1e-9"),
        ("rebalance_period_s", "1e-3"),
        ("rebalance_period_s", "86400"),
        ("rebalance_dwell_s", "0"),
        ("rebalance_dwell_s", "86400"),
        ("rebalance_prompts", "20"),
    ],
)
def test_a_knob_at_its_bounds_is_taken_and_reaches_the_long_time_scale(key, raw):
    options = load(**{key: raw}).scheduler
    assert getattr(options, key) == float(raw)
    rebalance = options.rebalance
    assert (rebalance.period_s, rebalance.dwell_s, rebalance.num_prompts) == (
        options.rebalance_period_s,
        options.rebalance_dwell_s,
        options.rebalance_prompts,
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("role", ["pd", "scheduler"])
def test_a_knob_that_the_policy_does_not_have_is_refused(policy, role):
    def load_as(**flags: object) -> SchedulerOptions:
        where = {"role": role} | ({"peer": PEER} if role == "pd" else {})
        return load_config(flags=where | {"policy": policy} | flags, environ={}).scheduler

    assert load_as().policy_in_force == policy
    for key, raw, heeded_by in (
        ("threshold_tokens", "99", ("static", "threshold")),
        ("egress_target", "0.5", ("threshold", "predictive")),
    ):
        flag = "--" + key.replace("_", "-")
        if policy in heeded_by:
            assert getattr(load_as(**{key: raw}), key) == float(raw)
        else:
            with pytest.raises(ConfigError, match=f"^{flag} has no effect with .* {policy} "):
                load_as(**{key: raw})


@pytest.mark.parametrize(
    "flags", [{"policy": "static"}, {"threshold_tokens": "9"}, {"egress_target": "0.5"}]
)
def test_who_has_no_choice_has_no_knob_of_it(flags):
    flag = "--" + next(iter(flags)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"^{flag} has no effect without --peer$"):
        load_config(flags=flags, environ={})
    with pytest.raises(ConfigError, match=f"^{flag} has no effect with --scheduler: the scheduler"):
        load(scheduler="127.0.0.1:8200", **flags)
    with pytest.raises(ConfigError, match=f"^{flag} has no effect with role prefill"):
        load_config(flags={"role": "prefill"} | flags, environ={})


def test_auto_over_a_number_of_a_weaker_source_is_auto(tmp_path):
    path = tmp_path / "node.toml"
    path.write_text("[scheduler]\nthreshold_tokens = 7\n", encoding="utf-8")
    flags = {"peer": PEER, "threshold_tokens": "auto"}
    config = load_config(flags=flags, environ={}, config_path=path)
    assert config.scheduler.threshold_tokens is None
    path.write_text(render_toml(config), encoding="utf-8")
    assert load_config(flags={}, environ={}, config_path=path) == config
