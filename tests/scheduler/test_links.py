"""What a cluster knows of the ways to it."""

from math import inf, nan

import pytest

from prfaas.scheduler.heartbeat import LinkReport
from prfaas.scheduler.links import NEAR_BYTES_PER_S, Links
from tests.scheduler.fleets import beat


def heard(links: Links, **report: float | None) -> list[str]:
    return links.heard(beat(links={"p:1": LinkReport(**report)}))


def test_a_link_is_as_it_was_last_seen_and_only_changes_are_told():
    links = Links()
    assert (links.byte_s("p:1"), links.rtt_s("p:1")) == (None, None)
    assert heard(links, rtt_s=0.01, bytes_per_s=1e6) == ["p:1"]
    assert heard(links, rtt_s=0.01, bytes_per_s=1e6) == []
    assert heard(links, bytes_per_s=2e6) == ["p:1"]
    assert (links.byte_s("p:1"), links.rtt_s("p:1")) == (1 / 2e6, 0.01)
    links.forget("p:1")
    links.forget("unknown:1")
    assert (links.byte_s("p:1"), links.rtt_s("p:1")) == (None, None)


@pytest.mark.parametrize("value", [None, 0.0, -1.0, nan, inf, 1e-320])
def test_what_is_no_rate_changes_nothing(value):
    links = Links()
    assert heard(links, rtt_s=value, bytes_per_s=value) == []
    assert links.byte_s("p:1") is None


def test_the_mean_is_of_those_that_are_known():
    links = Links()
    assert links.mean_bytes_per_s(["p:1"]) is None
    heard(links, bytes_per_s=1e6)
    links.heard(beat(links={"q:1": LinkReport(bytes_per_s=3e6)}))
    assert links.mean_bytes_per_s(["p:1", "q:1", "r:1"]) == pytest.approx(2e6)
    assert links.mean_bytes_per_s(["r:1"]) is None


def test_a_link_inside_the_cluster_is_assumed_to_be_fast_until_it_was_measured():
    links = Links()
    assert links.near_byte_s(None) == links.near_byte_s("p:1") == 1 / NEAR_BYTES_PER_S
    heard(links, bytes_per_s=1e6)
    assert links.near_byte_s("p:1") == 1e-6


def test_the_least_rate_that_a_node_says_counts_until_it_says_another_or_leaves():
    links = Links()
    heard(links, bytes_per_s=1e6)
    other = beat("other:1", links={"p:1": LinkReport(bytes_per_s=5e7)})
    assert links.heard(other) == []
    assert links.byte_s("p:1") == 1e-6
    assert heard(links, bytes_per_s=2e6) == ["p:1"]
    links.forget(beat().node)
    assert links.byte_s("p:1") == 1 / 5e7
    links.forget("other:1")
    assert links.byte_s("p:1") is None
