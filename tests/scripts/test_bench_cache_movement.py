"""scripts/bench/cache_movement.py has a row for each load, link and placement of caches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "cache_movement.py"


@pytest.mark.slow
def test_rows_stand_beside_the_same_requests_without_movement(tmp_path):
    trace = tmp_path / "t.jsonl"
    lines = [
        {
            "timestamp": 400 * i,
            "input_length": 512 * (2 + i),
            "output_length": 50,
            "hash_ids": [*range(2 + i)],
        }
        for i in range(60)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    done = subprocess.run(
        [sys.executable, SCRIPT, "--json", "--parts", "2", "--load", "0.9", "--trace", trace],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(done.stdout)
    assert len(rows) == 4 * 4
    assert {row["gbps"] for row in rows} == {100, 14, 7, 3}
    assert all(row["alone"]["num_moved"] == 0 for row in rows)
    wide = [row for row in rows if row["gbps"] == 100 and not row["caches"]["prfaas_tokens"]]
    assert all(row["moving"]["num_moved"] > 0 for row in wide)
