"""scripts/bench/policies.py compares policies on every scenario and trace it is given."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "policies.py"
SCENARIOS = {"steady", "halved", "outages", "bursts", "cross traffic", "halved, light load"}


@pytest.mark.slow
def test_every_scenario_has_the_best_static_threshold_and_both_adaptive_policies(tmp_path):
    trace = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": 900 * i, "input_length": 500 + 997 * i % 60_000, "output_length": 50}
        for i in range(60)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--json", "--seeds", "1", "--requests", "60", "--trace", str(trace)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=True
    )
    table = json.loads(done.stdout)["scenarios"]
    assert set(table) == {*SCENARIOS, "t"}
    for found in table.values():
        assert len(found["best_factors"]) == 1
        assert found["planned"]["goodput_vs_best_static"] <= 1e-9
        rows = {"static", "planned", "threshold", "predictive"}
        assert set(found) == {"best_factors", "offered_rps", *rows}
        assert all(found[name]["goodput_rps"] <= found["offered_rps"] * (1 + 1e-9) for name in rows)
