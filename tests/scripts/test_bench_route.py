"""scripts/bench/route.py: the directory it fills, and the JSON that it writes."""

import json
import sys

import pytest

from scripts.bench import route

ARGUMENTS = ["route.py", "--json", "--blocks", "3000", "--nodes", "5", "--prompts", "20"]


@pytest.mark.parametrize("places", [[], ["--places"]])
def test_the_report_has_every_length_and_most_decisions_follow_a_hit(monkeypatch, capsys, places):
    monkeypatch.setattr(sys, "argv", [*ARGUMENTS, *places])
    route.main()
    report = json.loads(capsys.readouterr().out)
    assert (report["blocks"], report["nodes"]) == (3000, 5)
    assert set(report["prompts"]) == set(report["predictive"]) == {"1K", "27K", "128K"}
    for row in (*report["prompts"].values(), *report["predictive"].values()):
        assert 0 < row["lookup_p50_us"] <= row["p50_us"] <= row["p99_us"]
        assert row["hit_fraction"] > 0
    assert min(report["events"].values()) > 0
