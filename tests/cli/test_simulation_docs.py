"""docs/simulation.md names every option with its default, and every policy."""

from dataclasses import fields
from pathlib import Path

import pytest

from prfaas.config.simulation_table import Failure, LinkChange, SimulationOptions
from prfaas.scheduler.policies import POLICIES
from prfaas.scheduler.rebalancer import RebalanceOptions

PAGE = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text(encoding="utf-8")
PLAIN = [f for f in fields(SimulationOptions) if f.name not in ("link", "failures", "rebalance")]


@pytest.mark.parametrize("name", [field.name for field in PLAIN])
def test_an_option_is_in_the_table_with_its_default(name):
    default = getattr(SimulationOptions(), name)
    rows = [line for line in PAGE.split("## Options")[1].splitlines() if line.startswith("|")]
    (row,) = (row for row in rows if f"`{name}`" in row.split("|")[1])
    names, shown = row.split("|")[1:3]
    index = [each.strip(" `") for each in names.split(",")].index(name)
    cells = [each.strip(" `") for each in shown.split(",")]
    said = cells[min(index, len(cells) - 1)]
    if isinstance(default, str | bool):
        assert said == str(default).lower()
    else:
        assert float(said) == default


@pytest.mark.parametrize("kind", [LinkChange, Failure, RebalanceOptions])
def test_the_keys_of_inner_tables_are_named(kind):
    assert [f.name for f in fields(kind) if f"`{f.name}`" not in PAGE and f.name != "role"] == []


def test_the_defaults_of_rebalancing_are_those_shown():
    for field in fields(RebalanceOptions):
        shown = PAGE.split(f"`{field.name}` (")[1].split(")")[0]
        assert float(shown) == getattr(RebalanceOptions(), field.name)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_described(policy):
    assert f"| `{policy}` |" in PAGE
