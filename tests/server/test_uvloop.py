"""Nodes run on uvloop, whose transports and sockets differ from asyncio's: the roles work there too."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from tests.server import test_failures, test_pd
from tests.server.scripted_engine import DENSE, HYBRID
from tests.transport import test_channel, test_resume

SCENARIOS: list[Callable[[], Coroutine[Any, Any, None]]] = [
    lambda: test_pd.test_a_long_prompt_is_prefilled_by_the_peer_and_answered_as_locally(HYBRID),
    lambda: test_pd.test_of_a_known_prefix_only_what_is_missing_travels(DENSE),
    lambda: test_failures.test_a_stream_cut_or_damaged_anywhere_gives_the_local_answer(
        DENSE, "cut", 0.6
    ),
    lambda: test_failures.test_a_stream_cut_or_damaged_anywhere_gives_the_local_answer(
        HYBRID, "flip", 0.3
    ),
    lambda: test_failures.test_clients_that_leave_in_any_phase_leave_nothing_held(
        HYBRID, test_failures.leave_during_the_remote_prefill
    ),
    test_channel.test_pages_and_frames_arrive_whole_and_the_ack_completes_the_transfer,
    test_channel.test_leaving_a_pull_and_cancelling_ends_the_transfer,
    test_channel.test_a_receiver_that_does_not_read_loses_its_lease,
    test_channel.test_streams_are_used_again_and_a_request_costs_no_connection,
    test_resume.test_all_streams_lost_again_and_again_only_delay_a_transfer,
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_roles_work_on_uvloop(scenario):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
