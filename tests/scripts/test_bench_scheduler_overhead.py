"""scripts/bench/scheduler_overhead.py: what is compared with what, and that a fleet really runs."""

import json
from array import array

import pytest

from prfaas.bench.load import Load, Sample
from scripts.bench import scheduler_overhead


def load(*latencies_s: float) -> Load:
    samples = []
    for latency_s in latencies_s:
        sample = Sample(due_s=0.0, prompt_tokens=1, sent_s=5.0, is_done=True)
        sample.token(5.0 + latency_s)
        sample.token(5.0 + 2 * latency_s)
        samples.append(sample)
    return Load(
        began_s=0.0,
        samples=samples,
        num_planned=len(samples),
        ended_s=10.0,
        stopped_by=None,
        loop_lags_s=array("d"),
        cpu_s=0.0,
    )


def test_what_is_added_counts_from_the_sending_over_all_rounds_and_in_each():
    rounds = {
        "direct": [load(1.0, 1.0), load(2.0, 2.0)],
        "scheduler": [load(1.5, 3.0), load(2.25, 2.25)],
    }
    found = scheduler_overhead.compared(rounds)
    assert found["ttft_p50_s"] == {
        "direct": 1.0,
        "scheduler": 2.25,
        "added": 1.25,
        "added_by_round": [0.5, 0.25],
    }
    assert found["e2e_p99_s"]["added_by_round"] == [4.0, 0.5]


def test_arrivals_are_the_same_for_both_ways_and_as_frequent_as_asked_for():
    options = scheduler_overhead.parse(["--prompt-tokens", "77"])
    requests = scheduler_overhead.arrivals(100.0, 20.0, options)
    assert requests == scheduler_overhead.arrivals(100.0, 20.0, options)
    assert len(requests) == pytest.approx(2000, rel=0.1)
    assert {request.input_tokens for request in requests} == {77}


@pytest.mark.slow
def test_a_small_run_compares_both_ways(capsys):
    scheduler_overhead.main(["--json", "--rate", "20", "--seconds", "0.5", "--rounds", "1"])
    [found] = json.loads(capsys.readouterr().out)["rates"]
    assert found["num_rounds"] == 1
    for name in ("ttft_p50_s", "ttft_p99_s", "e2e_p50_s", "e2e_p99_s"):
        row = found[name]
        assert row["direct"] > 0
        assert row["added"] == pytest.approx(row["scheduler"] - row["direct"])
    assert found["cpu_s"]["scheduler"]["scheduler"] > found["cpu_s"]["direct"]["scheduler"] >= 0
    assert found["cpu_s"]["direct"]["node"] > 0
