"""Open loop: requests leave when they are due, whatever became of the earlier ones."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.bench.load import Ask, Load, OpenLoop, Planned, Sample
from prfaas.bench.load_report import to_json
from tests.bench.virtual_time import busy, now_s, run_virtually


def planned(*dues_s: float) -> list[Planned]:
    return [
        Planned(due_s=due_s, prompt_tokens=10, body=f"{index}".encode)
        for index, due_s in enumerate(dues_s)
    ]


def answers(*steps_s: Sequence[float]) -> Ask:
    """The n-th request gets tokens after these waits, each from the one before."""

    async def ask(body: bytes, sample: Sample) -> None:
        try:
            for step_s in steps_s[int(body)]:
                await asyncio.sleep(step_s)
                sample.token(now_s())
            sample.is_done = True
        except asyncio.CancelledError:
            sample.error = "unfinished"
            raise

    return ask


def run(ask: Ask, requests: list[Planned], *, max_s: float = 1e6, begin_s: float = 0.0) -> Load:
    async def main() -> Load:
        await asyncio.sleep(begin_s)
        loop = OpenLoop(ask, clock=now_s, cpu_clock=lambda: 0.0)
        return await loop.run(requests, num_planned=len(requests), max_s=max_s)

    return run_virtually(main())


def test_a_slow_answer_holds_no_later_request_back():
    load = run(answers([100.0], [1.0], [1.0]), planned(0.0, 1.0, 1.5), begin_s=50.0)
    assert [sample.sent_s for sample in load.samples] == [50.0, 51.0, 51.5]
    assert [sample.ended_s for sample in load.samples] == [150.0, 52.0, 52.5]
    assert load.ended_s == 150.0
    assert load.stopped_by is None
    assert max(load.loop_lags_s) == pytest.approx(0.0, abs=1e-9)


def test_latencies_are_those_that_the_answers_took():
    load = run(answers([0.5, 0.25, 0.25], [2.0]), planned(1.0, 1.0))
    report = to_json(load, ttft_slo_s=1.0)
    assert report["ttft_s"] == {"mean": 1.25, "p50": 0.5, "p90": 2.0, "p99": 2.0, "max": 2.0}
    assert report["e2e_s"]["p50"] == 1.0
    assert report["itl_s"]["max"] == 0.25
    assert report["tpot_s"]["mean"] == 0.25
    assert report["duration_s"] == 3.0
    assert report["goodput"] == {"ttft_slo_s": 1.0, "requests_per_s": 1 / 3, "fraction": 0.5}
    assert report["throughput"]["completion_tokens_per_s"] == 4 / 3
    assert report["warnings"] == []


def test_a_generator_that_stands_still_shows_as_latency_and_warns():
    async def ask(body: bytes, sample: Sample) -> None:
        if body == b"0":
            busy(0.5)
        await asyncio.sleep(1.0)
        sample.token(now_s())
        sample.is_done = True

    load = run(ask, planned(0.0, 0.1))
    late = load.samples[1]
    assert late.sent_s == 0.5
    assert late.first_s == 1.5
    report = to_json(load, ttft_slo_s=1.2)
    assert report["ttft_s"]["max"] == pytest.approx(1.5)
    assert report["goodput"]["fraction"] == 0.0
    assert report["generator"]["send_lag_s"]["max"] == pytest.approx(0.4)
    assert report["generator"]["loop_lag_s"]["max"] == pytest.approx(0.48)
    assert sum("the generator was the limit" in warning for warning in report["warnings"]) == 2


def test_a_load_that_is_stopped_reports_what_was_answered():
    async def main() -> Load:
        ask = answers([1.0], [9.0], [1.0])
        loop = OpenLoop(ask, clock=now_s, cpu_clock=lambda: 0.0)
        asyncio.get_running_loop().call_later(3.0, loop.stop, "SIGINT")
        return await loop.run(planned(0.0, 0.5, 5.0), num_planned=3, max_s=100.0)

    load = run_virtually(main())
    assert load.ended_s == 3.0
    assert [sample.is_done for sample in load.samples] == [True, False]
    report = to_json(load, ttft_slo_s=1.0)
    assert report["requests"] == {
        "planned": 3,
        "sent": 2,
        "done": 1,
        "unfinished": 1,
        "failed": 0,
    }
    assert report["errors"] == {"unfinished": 1}
    assert "ended early by SIGINT: 2 of 3 requests" in report["warnings"][0]


def test_time_is_bounded_with_requests_in_flight_and_without():
    load = run(answers([50.0], [50.0]), planned(0.0, 30.0), max_s=10.0)
    assert len(load.samples) == 1
    assert load.ended_s == pytest.approx(10.0)
    assert load.stopped_by == "the limit of 10 s"
    load = run(answers([50.0]), planned(0.0), max_s=10.0)
    assert load.samples[0].error == "unfinished"
    assert load.ended_s == pytest.approx(10.0)


def test_a_stop_after_the_last_answer_changes_nothing():
    async def main() -> Load:
        loop = OpenLoop(answers([1.0]), clock=now_s, cpu_clock=lambda: 0.0)
        load = await loop.run(planned(0.0), num_planned=1, max_s=100.0)
        loop.stop("SIGINT")
        return load

    assert run_virtually(main()).stopped_by is None


def test_a_failure_of_ours_ends_the_load_loudly():
    async def ask(body: bytes, sample: Sample) -> None:
        raise RuntimeError(body.decode())

    with pytest.raises(ExceptionGroup) as raised:
        run(ask, planned(0.0))
    assert raised.group_contains(RuntimeError)


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 2, allow_nan=False),
            st.lists(st.floats(0, 1, allow_nan=False), min_size=1, max_size=4),
        ),
        max_size=8,
    )
)
def test_every_request_is_sent_when_due_and_ends_when_answered(drawn):
    drawn.sort(key=lambda pair: pair[0])
    load = run(answers(*(steps for _, steps in drawn)), planned(*(due for due, _ in drawn)))
    assert len(load.samples) == len(drawn)
    for sample, (due_s, steps_s) in zip(load.samples, drawn, strict=True):
        assert sample.sent_s == pytest.approx(due_s, abs=1e-6)
        assert sample.first_s == pytest.approx(due_s + steps_s[0], abs=1e-6)
        assert sample.ended_s == pytest.approx(due_s + sum(steps_s), abs=1e-6)
        assert sum(sample.gaps_s) == pytest.approx(sum(steps_s[1:]), abs=1e-6)
