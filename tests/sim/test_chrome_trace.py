"""A recording shows where each of the first requests was, one thing at a time at each place."""

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from prfaas.config.simulation_table import Failure, LinkChange, SimulationOptions
from prfaas.errors import ConfigError
from prfaas.sim.chrome_trace import Recorder, trace_events, write_trace
from prfaas.sim.run import Run, simulate
from tests.sim.deployments import MODEL, arriving, planned


def recorded(num_recorded: int, num: int = 120, **options: Any) -> tuple[Recorder, Run]:
    recorder = Recorder(num_recorded)
    run = simulate(
        MODEL,
        planned(),
        arriving(num, 0.6),
        policy="static",
        options=SimulationOptions(**options),
        seed=0,
        recorder=recorder,
    )
    return recorder, run


def of_phase(recorder: Recorder, phase: str) -> list[dict[str, Any]]:
    return [event for event in trace_events({"a": recorder}) if event["ph"] == phase]


def test_recording_changes_nothing():
    assert recorded(50)[1] == recorded(0)[1]
    assert recorded(0)[0].spans == []


def test_each_of_the_first_requests_is_seen_at_every_stage_and_no_other():
    recorder, run = recorded(50)
    stages: defaultdict[int, list[str]] = defaultdict(list)
    for span in sorted(recorder.spans, key=lambda span: span.end_s):
        stages[span.journey.number].append(span.name)
        assert span.outcome in ("done", "completed")
        assert span.journey.arrived_s <= span.start_s <= span.end_s
    assert sorted(stages) == [*range(50)]
    local, remote = ["prefill", "decode"], ["prefill", "transfer", "decode"]
    assert {tuple(each) for each in stages.values()} == {tuple(local), tuple(remote)}
    assert len(recorder.samples) == 50
    assert 0 < run.offload_fraction < 1


def test_first_token_and_spans_agree():
    recorder, _ = recorded(50)
    for span in recorder.spans:
        assert span.journey.ttft_s is not None
        if span.name == "decode":
            assert span.start_s == pytest.approx(span.journey.arrived_s + span.journey.ttft_s)
        elif span.process == "local prefill":
            assert span.end_s == pytest.approx(span.journey.arrived_s + span.journey.ttft_s)


def test_nothing_overlaps_on_a_thread_and_instances_are_no_more_than_there_are():
    recorder, _ = recorded(120)
    spans: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in of_phase(recorder, "X"):
        spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for own in spans.values():
        assert all(before[1] <= after[0] + 0.01 for before, after in pairwise(sorted(own)))
    names = {
        event["pid"]: event["args"]["name"]
        for event in of_phase(recorder, "M")
        if event["name"] == "process_name"
    }
    threads: defaultdict[str, int] = defaultdict(int)
    for pid, _ in spans:
        threads[names[pid]] += 1
    assert threads["a: prfaas-0 prefill"] == 2
    assert threads["a: local prefill"] == planned().shape.num_prefill


def test_what_is_lost_and_given_up_says_so():
    recorder, run = recorded(
        120,
        failures=(
            *(
                Failure(role="prfaas", at_s=at_s, for_s=1.0, instances=2)
                for at_s in (30.0, 35.0, 40.0)
            ),
            Failure(role="prefill", at_s=50.0, for_s=10.0, instances=9),
            Failure(role="decode", at_s=60.0, for_s=10.0, instances=1),
        ),
        link=tuple(
            LinkChange(at_s=at_s + off_s, bandwidth_fraction=fraction)
            for at_s in (80.0, 100.0, 120.0, 140.0)
            for off_s, fraction in ((0.0, 0.0), (10.0, 1.0))
        ),
    )
    outcomes = {(span.name, span.outcome) for span in recorder.spans}
    assert {("prefill", "transfer_failed"), ("prefill", "lost"), ("decode", "lost")} <= outcomes
    assert ("prefill", "peer_stuck") in outcomes
    assert run.num_fallbacks > 0


def test_counters_are_those_of_the_moment_of_an_arrival(tmp_path):
    recorder, _ = recorded(20)
    counters = of_phase(recorder, "C")
    assert {event["name"] for event in counters} == {"queue", "sequences", "egress_bytes_per_s"}
    assert max(event["args"]["sequences"] for event in counters if event["name"] == "sequences") > 3
    path = tmp_path / "t.json"
    write_trace({"a": recorder, "b": recorder}, path)
    events = json.loads(path.read_text())["traceEvents"]
    assert len(events) == 2 * len([*trace_events({"a": recorder})])
    with pytest.raises(ConfigError, match="cannot write"):
        write_trace({"a": recorder}, tmp_path / "none" / "t.json")
