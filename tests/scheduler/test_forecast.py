"""A view predicts waits and first tokens from what it was told."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.scheduler.forecast import (
    BUSY_JOBS,
    STALE_AFTER_S,
    ClustersView,
    LinkView,
    PrefillView,
    Profiles,
    Prompt,
    RemoteView,
    remote_ttft_s,
)
from tests.scheduler.planning import FAST, KV, profile

PROFILES = Profiles(local=profile(), remote=profile(FAST, decodes=False))


def remote(*, link: float = 1e9, rtt_s: float = 0.0, backlog: float = 0.0, **prefill) -> RemoteView:
    return RemoteView(
        name="r",
        prefill=PrefillView(**({"num_instances": 2} | prefill)),
        link=LinkView(bytes_per_s=link, rtt_s=rtt_s, backlog_bytes=backlog),
    )


@pytest.mark.parametrize(
    ("view", "wait_s"),
    [
        (PrefillView(num_instances=0), inf),
        (PrefillView(num_instances=2, num_busy=1, residual_work_s=9.0), 0.0),
        (PrefillView(num_instances=1, num_busy=1, residual_work_s=3.0), 3.0),
        (PrefillView(num_instances=1, num_busy=1, waiting_work_s=4.0, residual_work_s=3.0), 7.0),
        (
            PrefillView(
                num_instances=1, num_busy=1, residual_work_s=3.0, num_sent=1, sent_work_s=2.0
            ),
            5.0,
        ),
        (PrefillView(num_instances=4, num_busy=2, num_sent=1, sent_work_s=9.0), 0.0),
    ],
)
def test_a_wait_is_what_is_ahead_over_the_instances(view, wait_s):
    assert view.wait_s(0.0) == wait_s


def test_a_queue_has_gone_on_since_its_view():
    view = PrefillView(num_instances=1, num_busy=1, waiting_work_s=4.0, residual_work_s=3.0)
    assert view.wait_s(5.0) == 2.0
    assert view.wait_s(50.0) == 0.0
    assert view.wait_s(-1.0) == 7.0, "a view from the future is not older than now"


@pytest.mark.parametrize(
    ("busy", "waiting", "sent", "delayed"),
    [
        (0, 0, 0, 0.0),
        (2, 0, 0, BUSY_JOBS / 16),
        (4, 0, 0, BUSY_JOBS),
        (4, 8, 0, 2.0 + BUSY_JOBS),
        (3, 0, 1, 0.25 + BUSY_JOBS),
        (9, 0, 0, BUSY_JOBS),
    ],
)
def test_a_job_delays_the_queue_and_whoever_comes_to_a_full_cluster(busy, waiting, sent, delayed):
    view = PrefillView(num_instances=4, num_busy=busy, num_waiting=waiting, num_sent=sent)
    assert view.delayed_jobs() == pytest.approx(delayed)


@settings(max_examples=60)
@given(st.integers(0, 50), st.floats(0, 100), st.floats(0, 100), st.floats(0, 50))
def test_more_work_never_means_a_shorter_wait(busy, waiting_s, more_s, age_s):
    def wait_s(work_s: float) -> float:
        view = PrefillView(
            num_instances=8, num_busy=busy, waiting_work_s=work_s, residual_work_s=2.0 * busy
        )
        return view.wait_s(age_s)

    assert 0 <= wait_s(waiting_s) <= wait_s(waiting_s + more_s)


def predicted_s(prompt: Prompt, view: ClustersView) -> float:
    (work_s,) = PROFILES.remote_works_s(prompt, 1)
    num_bytes = PROFILES.kv_bytes(prompt)
    return remote_ttft_s(view.remotes[0], 0.0, work_s=work_s, num_bytes=num_bytes)


def test_a_remote_first_token_waits_for_the_slower_of_prefill_and_link():
    prompt = Prompt(num_tokens=20_000)
    compute_s = FAST(20_000)
    view = ClustersView(local=PrefillView(num_instances=1), remotes=(remote(rtt_s=0.1),))
    assert predicted_s(prompt, view) == pytest.approx(compute_s + 0.1)
    slow = ClustersView(local=view.local, remotes=(remote(link=1e8, backlog=5e7),))
    expected_s = (KV(20_000) + 5e7) / 1e8
    assert expected_s > compute_s
    assert predicted_s(prompt, slow) == pytest.approx(expected_s)
    out = ClustersView(local=view.local, remotes=(remote(link=0.0),))
    assert predicted_s(prompt, out) == inf


def test_work_there_and_bytes_to_move_are_two_numbers():
    prompt = Prompt(num_tokens=20_000, local_hit_tokens=15_000, remote_hit_tokens=(5_000,))
    assert PROFILES.remote_work_s(prompt, 0) == FAST(15_000)
    assert PROFILES.local_work_s(prompt) == PROFILES.local.prefill_s(5_000)
    assert PROFILES.kv_bytes(prompt) == pytest.approx(KV(20_000) - 15_000 * 17280)


def test_fresh_clusters_are_preferred_and_all_stale_ones_are_used():
    def cluster(taken_s: float, num_instances: int = 1) -> RemoteView:
        return remote(taken_s=taken_s, num_instances=num_instances)

    now_s = 100.0
    fresh, stale = cluster(now_s - STALE_AFTER_S), cluster(now_s - STALE_AFTER_S - 1)
    local = PrefillView(num_instances=1)

    def candidates(*remotes: RemoteView) -> tuple[int, ...]:
        return ClustersView(local=local, remotes=remotes).candidates(now_s)

    assert candidates(stale, fresh) == (1,)
    assert candidates(stale, stale) == (0, 1)
    assert candidates(cluster(now_s, 0), stale, remote(link=0.0, taken_s=now_s)) == (1,)
    assert candidates() == ()


@pytest.mark.parametrize("hits", [(-1, ()), (10, ()), (0, (10,)), (0, (3, -1))])
def test_a_hit_that_leaves_nothing_to_compute_is_refused(hits):
    with pytest.raises(ValueError, match="of 10 tokens"):
        Prompt(num_tokens=10, local_hit_tokens=hits[0], remote_hit_tokens=hits[1])
