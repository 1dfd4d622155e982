"""scripts/bench/overlap.py: what it compares with what, and that a pair of nodes really runs."""

import json

import pytest

from scripts.bench import overlap
from scripts.bench.link_places import why_no_links
from scripts.bench.overlap import Work


def test_the_link_is_shaped_so_that_the_stream_takes_as_long_as_the_prefill():
    work = Work(
        num_tokens=1000, prefill_s=2.0, num_bytes=30_000_000, tail_bytes=5_000_000, unlimited={}
    )
    assert work.mbit * 1e6 / 8 * work.prefill_s == pytest.approx(work.stream_bytes)


def test_aims_are_judged_at_each_round_trip():
    near = {"rtt_s": 0.0, "ttft_s": 1.0, "second_s": 2.0, "bound_s": 2.1, "tail_s": 0.5}
    far = {"rtt_s": 0.08, "ttft_s": 1.59, "second_s": 2.57, "bound_s": 2.2, "tail_s": 0.5}
    found = overlap.aims([near, far])
    assert [aim["is_met"] for aim in found] == [True, False, False, True]
    assert [aim["rtt_s"] for aim in found] == [0.0, 0.08, 0.08, 0.08]


def test_prompts_are_the_same_for_the_same_seed_only():
    assert overlap.prompts(50, 2, seed=1) == overlap.prompts(50, 2, seed=1)
    first, second = overlap.prompts(50, 2, seed=1)
    assert first != second


def test_without_links_it_says_why(monkeypatch):
    monkeypatch.setattr(overlap, "why_no_links", lambda: "needs root")
    with pytest.raises(SystemExit, match="needs root"):
        overlap.main(["--quick"])


@pytest.mark.slow
def test_a_quick_run_has_times_beside_the_bound_and_beside_no_overlap(capsys):
    reason = why_no_links()
    if reason is not None:
        pytest.skip(reason)
    arguments = ["--quick", "--json", "--tokens", "4000", "--rtt-ms", "0", "--congestion", "reno"]
    overlap.main([*arguments, "--link-seconds", "0.1"])
    [found] = json.loads(capsys.readouterr().out)["engines"]
    assert found["num_tokens"] == 4000
    assert 0 < found["tail_bytes"] < found["num_bytes"]
    [one] = found["links"]
    assert 0 < one["ttft_s"] <= one["second_s"]
    assert one["without_overlap_s"] > one["kv_alone_second_s"] > 0
    assert [aim["at_most_s"] for aim in found["aims"]] == [one["bound_s"]]
