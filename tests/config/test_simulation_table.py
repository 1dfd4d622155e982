"""[simulation] of a plan file: everything has a default and a limit."""

import pytest

from prfaas.config.plan_file import read_plan_file
from prfaas.config.simulation_table import Failure, LinkChange, SimulationOptions
from prfaas.errors import ConfigError
from tests.config.plan_files import PLAN, changed, write_plan


def read(tmp_path, **keys) -> SimulationOptions:
    return read_plan_file(write_plan(tmp_path, changed(PLAN, "simulation", keys))).simulation


def test_a_plan_without_the_table_has_the_defaults(tmp_path):
    assert read_plan_file(write_plan(tmp_path, PLAN)).simulation == SimulationOptions()
    assert read(tmp_path) == SimulationOptions()


def test_every_key_is_read(tmp_path):
    numbers = {
        "ttft_slo_s": 3.0,
        "max_egress_fraction": 0.5,
        "clusters": 2,
        "pieces": 16,
        "streams": 8,
        "jitter_s": 0.01,
        "stall_timeout_s": 2.0,
        "view_period_s": 0.5,
        "view_delay_s": 0.2,
        "local_cache_tokens": 1000,
        "prfaas_cache_tokens": 2000,
    }
    options = read(
        tmp_path,
        **numbers,
        decode="stepped",
        link=[{"at_s": 5, "bandwidth_fraction": 0.5}, {"at_s": 9, "competing_flows": 3}],
        failures=[{"role": "decode", "at_s": 1, "for_s": 2, "instances": 3}],
        rebalance={"period_s": 30, "confirmations": 2, "conversion_s": 7},
    )
    assert {name: getattr(options, name) for name in numbers} == numbers
    assert options.decode == "stepped"
    assert options.link == (
        LinkChange(at_s=5, bandwidth_fraction=0.5),
        LinkChange(at_s=9, competing_flows=3),
    )
    assert options.failures == (Failure(role="decode", at_s=1, for_s=2, instances=3),)
    assert options.rebalance is not None
    assert options.rebalance.conversion_s == 7
    assert (options.rebalance.options.period_s, options.rebalance.options.confirmations) == (30, 2)
    assert options.rebalance.options.dwell_s == 300


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"pices": 4}, "unknown key simulation.pices; did you mean pieces"),
        ({"ttft_slo_s": 0}, "simulation.ttft_slo_s: 0 must be above 0"),
        ({"ttft_slo_s": float("nan")}, "expected a finite number, not nan"),
        ({"pieces": 0}, "0 is below the minimum of 1"),
        ({"pieces": 1.5}, "expected a whole number, not 1.5"),
        ({"max_egress_fraction": 1.1}, "1.1 is above the maximum of 1"),
        ({"view_delay_s": -1}, "-1 is below the minimum of 0"),
        ({"decode": "exact"}, "expected one of fluid, stepped"),
        ({"link": [{"bandwidth_fraction": 1}]}, "simulation.link[0].at_s: is not set"),
        ({"link": [{"at_s": 1, "loss": 1}]}, "unknown key simulation.link[0].loss"),
        (
            {"failures": [{"role": "gpu", "at_s": 1, "for_s": 1, "instances": 1}]},
            "expected one of prfaas, prefill, decode",
        ),
        (
            {
                "failures": [
                    {"role": "prefill", "at_s": 1, "for_s": 1, "instances": 1, "cluster": 0}
                ]
            },
            "simulation.failures[0].cluster: only of PrfaaS instances there are several, not of prefill",
        ),
        (
            {
                "clusters": 2,
                "failures": [
                    {"role": "prfaas", "at_s": 1, "for_s": 1, "instances": 1, "cluster": 2}
                ],
            },
            "simulation.failures[0].cluster: 2 is above the maximum of 1",
        ),
        ({"rebalance": {"dwell": 1}}, "unknown key simulation.rebalance.dwell"),
        ({"rebalance": {"num_prompts": 3}}, "3 is below the minimum of 4"),
    ],
)
def test_what_makes_no_sense_is_named(tmp_path, keys, says):
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, **keys)
    assert says in str(refused.value)
