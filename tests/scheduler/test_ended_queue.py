"""A prompt that has ended waits at the peer no more, whatever the peer last said of its queue."""

import pytest

from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.router import Router, RouteRequest
from prfaas.scheduler.view import LocalView

PROMPT = RouteRequest(num_tokens=1_000, hit_tokens=0, num_kv_bytes=0)


@pytest.mark.parametrize(
    ("heard_s", "queue_tokens", "left_tokens"),
    [
        (2.0, 1_000, 0),
        (2.0, 424, 0),  # part of it was computed when the peer spoke
        (2.0, 3_500, 2_500),  # others wait, too
        (1.0, 3_500, 2_500),  # at the moment of the decision
        (0.5, 3_500, 3_500),  # said before: all of it is others'
    ],
)
def test_an_ended_prompt_leaves_the_queue_that_it_was_heard_in(heard_s, queue_tokens, left_tokens):
    router = Router(peers=("p",), options=SchedulerOptions())

    def hear(now_s: float) -> None:
        router.heard("p", now_s=now_s, is_ready=True, num_queue_tokens=queue_tokens)

    if heard_s < 1.0:
        hear(heard_s)
    assert router.route("a", PROMPT, local=LocalView(), now_s=1.0).peer == "p"
    if heard_s >= 1.0:
        hear(heard_s)
    assert router.peer("p").num_queue_tokens == queue_tokens
    router.ended("a", "completed", now_s=3.0)
    assert router.peer("p").num_queue_tokens == left_tokens
    router.check()
