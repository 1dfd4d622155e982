"""[simulation] of a plan file: everything has a default and a limit."""

from dataclasses import fields
from pathlib import Path

import pytest

from prfaas.config.plan_file import read_plan_file
from prfaas.config.simulation_table import (
    Failure,
    LinkChange,
    SimulationOptions,
    read_simulation,
)
from prfaas.config.tables import Table
from prfaas.errors import ConfigError
from prfaas.scheduler.rebalancer import RebalanceOptions
from tests.config.knobs import Case, integer, number
from tests.config.plan_files import PLAN, UNSET, changed, write_plan


def read(**keys: object) -> SimulationOptions:
    return read_simulation(Table(keys, Path("plan.toml"), "simulation"))


def test_a_plan_without_the_table_has_the_defaults(tmp_path):
    assert read_plan_file(write_plan(tmp_path, PLAN)).simulation == SimulationOptions()
    assert read() == SimulationOptions()
    path = write_plan(tmp_path, changed(PLAN, "simulation", {"pieces": 7}))
    assert read_plan_file(path).simulation == SimulationOptions(pieces=7)


def test_every_key_is_read():
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
        **numbers,
        decode="stepped",
        moves_cache=True,
        link=[{"at_s": 5, "bandwidth_fraction": 0.5}, {"at_s": 9, "competing_flows": 3}],
        failures=[{"role": "decode", "at_s": 1, "for_s": 2, "instances": 3}],
        rebalance={"period_s": 30, "confirmations": 2, "conversion_s": 7},
    )
    assert {name: getattr(options, name) for name in numbers} == numbers
    assert (options.decode, options.moves_cache) == ("stepped", True)
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
        ({"moves_cache": 1}, "simulation.moves_cache: expected true or false, not 1"),
        ({"moves_cache": True}, "there is no cache to move; set local_cache_tokens"),
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
def test_what_makes_no_sense_is_named(keys, says):
    with pytest.raises(ConfigError) as refused:
        read(**keys)
    assert says in str(refused.value)


KNOBS: list[Case] = [
    *number("ttft_slo_s", above=0, maximum=1e9, is_needed=False),
    *number("max_egress_fraction", above=0, maximum=1, is_needed=False),
    *integer("clusters", minimum=1, maximum=1_000, is_needed=False),
    *integer("pieces", minimum=1, maximum=1024, is_needed=False),
    *integer("streams", minimum=1, maximum=1024, is_needed=False),
    *number("jitter_s", minimum=0, maximum=60, is_needed=False),
    *number("stall_timeout_s", above=0, maximum=1e9, is_needed=False),
    *number("view_period_s", above=0, maximum=1e9, is_needed=False),
    *number("view_delay_s", minimum=0, maximum=60, is_needed=False),
    *integer("local_cache_tokens", minimum=0, maximum=10**14, is_needed=False),
    *integer("prfaas_cache_tokens", minimum=0, maximum=10**14, is_needed=False),
    ("decode", UNSET, None),
    ("decode", "fluid", None),
    ("decode", "", "expected one of fluid, stepped, not ''"),
    ("moves_cache", UNSET, None),
    ("moves_cache", False, None),
    ("moves_cache", "true", "expected true or false, not 'true'"),
    ("moves_cache", float("nan"), "expected true or false, not nan"),
]
LINK: list[Case] = [
    *number("at_s", minimum=0, maximum=1e9),
    *number("bandwidth_fraction", minimum=0, maximum=1, is_needed=False),
    *integer("competing_flows", minimum=0, maximum=1_000_000, is_needed=False),
]
FAILURES: list[Case] = [
    *number("at_s", minimum=0, maximum=1e9),
    *number("for_s", above=0, maximum=1e9),
    *integer("instances", minimum=1, maximum=100_000),
    *integer("cluster", minimum=0, maximum=2, is_needed=False),
    ("role", UNSET, "is not set"),
    ("role", "", "expected one of prfaas, prefill, decode, not ''"),
]
REBALANCE: list[Case] = [
    *number("period_s", above=0, maximum=1e9, is_needed=False),
    *number("dwell_s", minimum=0, maximum=1e9, is_needed=False),
    *number("min_gain_fraction", minimum=0, maximum=100, is_needed=False),
    *integer("confirmations", minimum=1, maximum=1000, is_needed=False),
    *integer("num_prompts", minimum=4, maximum=100_000, is_needed=False),
    *number("conversion_s", minimum=0, maximum=1e9, is_needed=False),
]
ONE_FAILURE = {"role": "prfaas", "at_s": 1, "for_s": 1, "instances": 1}


def decided(keys: dict[str, object], key: str, says: str | None) -> None:
    if says is None:
        read(**keys)
        return
    with pytest.raises(ConfigError) as refused:
        read(**keys)
    assert key in str(refused.value)
    assert says in str(refused.value)


def among(key: str, value: object, others: dict[str, object]) -> dict[str, object]:
    given = {**others, key: value}
    return {name: each for name, each in given.items() if each is not UNSET}


@pytest.mark.parametrize(("key", "value", "says"), KNOBS)
def test_a_knob_is_taken_within_its_limits_and_refused_beyond(key, value, says):
    decided(among(key, value, {}), f"simulation.{key}", says)


@pytest.mark.parametrize(("key", "value", "says"), LINK)
def test_a_change_of_the_link_is_taken_within_its_limits(key, value, says):
    entry = among(key, value, {"at_s": 1})
    decided({"link": [entry]}, f"simulation.link[0].{key}", says)


@pytest.mark.parametrize(("key", "value", "says"), FAILURES)
def test_a_failure_is_taken_within_its_limits(key, value, says):
    entry = among(key, value, ONE_FAILURE)
    decided({"clusters": 3, "failures": [entry]}, f"simulation.failures[0].{key}", says)


@pytest.mark.parametrize(("key", "value", "says"), REBALANCE)
def test_a_knob_of_rebalancing_is_taken_within_its_limits(key, value, says):
    decided({"rebalance": among(key, value, {})}, f"simulation.rebalance.{key}", says)


def test_every_knob_has_a_table_of_decisions():
    rebalance = {field.name for field in fields(RebalanceOptions)} | {"conversion_s"}
    for kind, table, inner in (
        (SimulationOptions, KNOBS, {"link", "failures", "rebalance"}),
        (LinkChange, LINK, set()),
        (Failure, FAILURES, set()),
    ):
        assert {key for key, _, _ in table} == {field.name for field in fields(kind)} - inner
    assert {key for key, _, _ in REBALANCE} == rebalance
