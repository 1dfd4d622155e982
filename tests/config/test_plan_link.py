"""The link of a plan is what it says, else what its local profile measured."""

import pytest

from prfaas.config.plan_file import read_plan_file
from prfaas.errors import ConfigError
from prfaas.scheduler.profile import Link
from tests.config.plan_files import PLAN, PROFILE, UNSET, changed, write_plan

LINK = {"bytes_per_s": 2e7, "rtt_s": 0.03, "provenance": "measured", "source": "a test"}
MEASURED = changed(PROFILE, "link", LINK)


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        (UNSET, Link(bytes_per_s=2e7, rtt_s=0.03)),
        ({}, Link(bytes_per_s=2e7, rtt_s=0.03)),
        ({"max_egress_fraction": 0.5}, Link(bytes_per_s=2e7, rtt_s=0.03, max_egress_fraction=0.5)),
        ({"bytes_per_s": 1e9}, Link(bytes_per_s=1e9, rtt_s=0.03)),
        ({"rtt_s": 0.0}, Link(bytes_per_s=2e7)),
    ],
)
def test_what_a_plan_leaves_out_is_as_it_was_measured(tmp_path, link, expected):
    plan = changed(changed(PLAN, "link", link), "published", UNSET)
    assert read_plan_file(write_plan(tmp_path, plan, MEASURED)).model.link == expected


def test_a_plan_without_a_link_of_its_own_or_a_measured_one_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="a PrfaaS cluster needs a link"):
        read_plan_file(write_plan(tmp_path, changed(PLAN, "link", UNSET)))
    with pytest.raises(ConfigError, match=r"link\.bytes_per_s: is not set"):
        read_plan_file(write_plan(tmp_path, changed(PLAN, "link", {})))


def test_a_plan_of_local_instances_alone_heeds_no_link(tmp_path):
    plan = PLAN
    for key in ("link", "profiles.prfaas", "deployments.a", "compare", "published"):
        plan = changed(plan, key, UNSET)
    assert read_plan_file(write_plan(tmp_path, plan, MEASURED)).model.link is None


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("bytes_per_s", 0, "link.bytes_per_s: 0 must be above 0"),
        ("bytes_per_s", UNSET, "link.bytes_per_s: is not set"),
        ("rtt_s", -1, "link.rtt_s: -1 is below the minimum of 0"),
        ("rtt_s", UNSET, "link.rtt_s: is not set"),
        ("source", UNSET, "link.source: is not set"),
        ("max_egress_fraction", 1, "unknown key link.max_egress_fraction"),
    ],
)
def test_a_measured_link_that_makes_no_sense_is_refused(tmp_path, key, value, says):
    broken = changed(MEASURED, f"link.{key}", value)
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        read_plan_file(write_plan(tmp_path, PLAN, broken))
