"""Peers that die, lie, hang or come back, and clients that leave: the answer is the local one.

Every `fleet` checks at its end that both pools are whole and hold nothing for anybody.
"""

import asyncio
from dataclasses import replace

import pytest
import structlog

from prfaas.clock import monotonic_s
from prfaas.errors import EngineError
from prfaas.transport.wire import FrameType
from prfaas.types import RequestRecord
from tests.relay import Fault
from tests.server.fleet import IDENTITY, Fleet, fleet, request, until
from tests.server.scripted_engine import BLOCK_TOKENS, DENSE, HYBRID, STATES

pytestmark = pytest.mark.usefixtures("no_leaks")
layouts = pytest.mark.parametrize(
    "layout", [DENSE, HYBRID, STATES], ids=["dense", "hybrid", "states"]
)

NUM_TOKENS = 150


def check_sums(record: RequestRecord) -> None:
    assert record.tokens_reused + record.tokens_local + record.tokens_remote == NUM_TOKENS


async def stream_length(nodes: Fleet, num_choices: int = 1) -> int:
    """How many bytes the peer sends on the stream of a prompt like the test's."""
    before = nodes.relay.stream_bytes
    answer = await nodes.ask(request(NUM_TOKENS, salt=b"measured", num_choices=num_choices))
    assert answer.record.route == "remote"
    return nodes.relay.stream_bytes - before


async def test_a_peer_that_is_gone_before_the_request_means_a_local_prefill():
    async with fleet() as nodes:
        await nodes.prefill.close()
        answer = await nodes.ask(request(NUM_TOKENS))
        assert answer.record.route == "local"
        assert answer.record.reason.partition(":")[0] in ("peer_down", "transfer_failed")
        check_sums(answer.record)
        assert answer.tokens == (await nodes.ask_locally(request(NUM_TOKENS))).tokens


@layouts
@pytest.mark.parametrize("kind", ["cut", "flip", "gone"])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.95])
async def test_a_stream_cut_or_damaged_anywhere_gives_the_local_answer(layout, kind, fraction):
    """One stream that breaks is replaced; where none gets through any more the rest is computed here."""
    async with fleet(layout=layout, stall_timeout_s=0.5) as nodes:
        length = await stream_length(nodes)
        nodes.relay.fault = Fault(int(length * fraction), kind)
        answer = await nodes.ask(request(NUM_TOKENS))
        await nodes.relay.hurt()
        if kind == "gone":
            assert answer.record.route == "local"
            assert answer.record.reason.startswith(("transfer_failed: ", "peer_stuck: "))
        else:
            assert answer.record.route == "remote"
        check_sums(answer.record)
        assert len(answer.events) == 6
        assert answer.tokens == (await nodes.ask_locally(request(NUM_TOKENS))).tokens
        nodes.relay.fault = None


@pytest.mark.parametrize("after_bytes", [0, 50, 700, 9000])
async def test_a_stream_that_goes_silent_is_given_up_after_the_stall_timeout(after_bytes):
    async with fleet(stall_timeout_s=0.3) as nodes:
        nodes.relay.fault = Fault(after_bytes, "black_hole")
        answer = await nodes.ask(request(NUM_TOKENS))
        assert answer.record.route == "local"
        assert answer.record.reason.startswith("peer_stuck: ")
        check_sums(answer.record)
        assert answer.tokens == (await nodes.ask_locally(request(NUM_TOKENS))).tokens


async def test_a_peer_that_is_stopped_but_connected_is_given_up():
    async with fleet(stall_timeout_s=0.3) as nodes:
        nodes.relay.is_black_hole = True
        answer = await nodes.ask(request(NUM_TOKENS))
        assert answer.record.reason.startswith("peer_stuck: ")
        assert answer.tokens == (await nodes.ask_locally(request(NUM_TOKENS))).tokens


async def test_a_peer_whose_engine_hangs_shows_no_progress_and_is_given_up():
    async with fleet(stall_timeout_s=0.7) as nodes:
        nodes.prefill_engine.max_prefill_steps = 3
        answer = await nodes.ask(request(NUM_TOKENS))
        assert answer.record.reason.startswith("peer_stuck: ")
        check_sums(answer.record)
        nodes.prefill_engine.gate.set()
        assert answer.tokens == (await nodes.ask_locally(request(NUM_TOKENS))).tokens


async def test_a_transfer_that_would_end_after_a_local_prefill_is_given_up_unless_it_was_asked_for():
    async with fleet(pd_clock=lambda: 20 * monotonic_s()) as nodes:
        nodes.prefill_engine.prefill_step_s = 0.05
        nodes.pd_engine.prefill_tokens_per_s = 1e6
        await nodes.ask(request(10))  # the engine's load is as of its last step
        slow = await nodes.ask(request(600))
        assert slow.record.route == "local"
        assert slow.record.reason.startswith("slower_than_local: ")
        assert slow.tokens == (await nodes.ask_locally(request(600))).tokens
        assert nodes.pd.peer is not None
        await until(lambda: nodes.pd.peer is not None and nodes.pd.peer.is_usable)
        asked_for = await nodes.ask(request(600, variant=1), "remote")
        assert asked_for.record.route == "remote"


async def test_a_peer_that_lacks_our_prefix_is_not_made_to_compute_it_where_that_takes_longer():
    async with fleet() as nodes:
        peer = nodes.pd.peer
        assert peer is not None
        nodes.prefill_engine.prefill_step_s = 0.5  # 60 tokens a second, as the first transfer shows
        nodes.pd_engine.prefill_tokens_per_s = 1e4
        await nodes.ask(request(30, salt=b"other"), "remote")  # loads are as of the last step
        await nodes.ask(request(600), "local")
        peer.doubt()
        await until(lambda: peer.view.token_s is not None)
        longer = request(700)
        answer = await nodes.ask(longer)
        assert answer.record.route == "local"
        assert answer.record.reason.startswith("peer_lacks_prefix: it has 0 of our 600 ")
        assert answer.record.tokens_reused >= 500
        assert peer.is_usable
        assert answer.tokens == (await nodes.ask_locally(longer)).tokens
        nodes.prefill_engine.prefill_step_s = 0.0
        asked_for = await nodes.ask(request(720), "remote")
        assert asked_for.record.route == "remote"


async def test_what_arrived_whole_before_a_cut_is_reused_on_a_dense_model():
    async with fleet(layout=DENSE) as nodes:
        length = await stream_length(nodes)
        nodes.relay.fault = Fault(length * 6 // 10, "gone")
        answer = await nodes.ask(request(NUM_TOKENS))
        record = answer.record
        assert record.reason.startswith(("transfer_failed: ", "peer_stuck: "))
        assert record.tokens_reused == 0
        assert record.tokens_remote >= 5 * BLOCK_TOKENS
        assert record.tokens_remote % BLOCK_TOKENS == 0
        assert record.tokens_local == NUM_TOKENS - record.tokens_remote
        assert answer.tokens == (await nodes.ask_locally(request(NUM_TOKENS))).tokens


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_first_tokens_that_came_before_a_failure_are_continued_and_not_drawn_again(
    num_choices,
):
    async with fleet(streams=1) as nodes:
        length = await stream_length(nodes, num_choices)
        asked = request(NUM_TOKENS, num_choices=num_choices)
        alone = await nodes.ask_locally(asked)
        # A first token that this node would not have drawn shows whose it is.
        nodes.prefill_engine.first_token = 123
        nodes.relay.fault = Fault(length - 10, "gone")
        answer = await nodes.ask(asked)
        assert answer.record.route == "local"
        assert answer.record.reason.startswith(("transfer_failed: ", "peer_stuck: "))
        check_sums(answer.record)
        assert [tokens[0] for tokens in answer.tokens] == [123] * num_choices
        assert [len(tokens) for tokens in answer.tokens] == [6] * num_choices
        assert answer.tokens != alone.tokens
        nodes.pd_engine.first_token = 123
        assert answer.tokens == (await nodes.ask_locally(asked)).tokens


async def test_a_peer_killed_after_the_transfer_is_not_missed():
    async with fleet() as nodes:
        asked = request(NUM_TOKENS, max_tokens=20)
        tokens = []
        async with nodes.pd.generate(asked) as generation:
            async for event in generation:
                tokens.append(event.token_id)
                if len(tokens) == 3:
                    await nodes.prefill.close()
        assert generation.record.route == "remote"
        assert [tokens] == (await nodes.ask_locally(asked)).tokens


async def test_a_peer_killed_in_the_middle_of_its_prefill_costs_time_only():
    async with fleet() as nodes:
        nodes.prefill_engine.max_prefill_steps = 4
        asked = request(NUM_TOKENS)
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(nodes.ask(asked))
            await until(lambda: not nodes.prefill_engine.gate.is_set())
            await until(lambda: nodes.pd_metrics.num_bytes["received"] > 0)
            await nodes.relay.close()
        answer = answering.result()
        assert answer.record.reason.startswith("transfer_failed: ")
        nodes.prefill_engine.gate.set()
        assert answer.tokens == (await nodes.ask_locally(asked)).tokens


async def test_a_peer_whose_engine_dies_says_so_and_is_not_ready():
    async with fleet() as nodes:
        nodes.prefill_engine.crash_next = True
        with structlog.testing.capture_logs():
            answer = await nodes.ask(request(NUM_TOKENS))
        assert "scripted crash" in answer.record.reason
        is_ready, why = nodes.prefill.node.is_ready
        assert not is_ready
        assert why.startswith("engine_failed")
        assert answer.tokens == (await nodes.ask_locally(request(NUM_TOKENS))).tokens


async def test_a_dead_engine_fails_every_request_and_hangs_none():
    async with fleet() as nodes:
        nodes.pd_engine.crash_next = True
        with structlog.testing.capture_logs():
            for _ in range(3):
                with pytest.raises(EngineError):
                    await nodes.ask(request(10))
        assert not nodes.pd.is_ready[0]


async def test_another_model_on_the_peer_is_refused_with_both_values_named_once():
    other = replace(IDENTITY, model_fingerprint="another model")
    with structlog.testing.capture_logs() as logs:
        async with fleet(prefill_identity=other, wait_for_peer=False) as nodes:
            assert nodes.pd.peer is not None
            await nodes.pd.peer.settled()
            for _ in range(4):
                answer = await nodes.ask(request(NUM_TOKENS))
                assert answer.record.route == "local"
                assert answer.record.reason == "peer_incompatible" or answer.record.tokens_reused
                nodes.pd.peer.doubt()
            assert nodes.relay.stream_bytes == 0
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [entry["event"] for entry in warnings] == ["peer.lost"]
    assert "'scripted' here, 'another model' there" in warnings[0]["detail"]


async def test_a_peer_that_changes_its_model_between_handshakes_is_refused_before_any_work():
    async with fleet() as nodes:
        nodes.prefill.node.service._identity = replace(IDENTITY, model_fingerprint="another model")
        answer = await nodes.ask(request(NUM_TOKENS))
        reason = answer.record.reason
        assert reason.startswith("peer_incompatible")
        if reason != "peer_incompatible":  # else a handshake came first
            assert "'another model' here, 'scripted' there" in reason
        assert nodes.prefill_engine.load().step_count == 0
        # a stream that was attached beside the request may be told that there is no such transfer
        assert set(nodes.relay.delivered) <= {FrameType.ERROR}


async def test_a_peer_that_comes_back_is_used_again_and_each_change_is_logged_once():
    with structlog.testing.capture_logs() as logs:
        async with fleet() as nodes:
            await nodes.prefill.close()
            await nodes.ask(request(NUM_TOKENS))
            assert nodes.pd.peer is not None
            await until(lambda: nodes.pd.peer is not None and nodes.pd.peer.state == "down")
            nodes.relay.is_black_hole = False
            await nodes.prefill.restart(nodes.tasks)
            await nodes.peer_up()
            await until(lambda: nodes.pd.peer is not None and nodes.pd.peer.is_usable)
            answer = await nodes.ask(request(NUM_TOKENS, variant=1))
            assert answer.record.route == "remote"
    changes = [entry["event"] for entry in logs if entry["event"].startswith("peer.")]
    assert changes == ["peer.up", "peer.lost", "peer.up"]


async def leave_while_queued_at_the_peer(nodes: Fleet, variant: int) -> None:
    nodes.prefill_engine.gate.clear()
    async with nodes.pd.generate(request(NUM_TOKENS, variant=variant)):
        await until(lambda: nodes.prefill.node.load().num_transfers > 0)
    nodes.prefill_engine.gate.set()


async def leave_at_once(nodes: Fleet, variant: int) -> None:
    async with nodes.pd.generate(request(NUM_TOKENS, variant=variant)):
        for _ in range(variant % 7):
            await asyncio.sleep(0)


async def leave_during_the_remote_prefill(nodes: Fleet, variant: int) -> None:
    nodes.prefill_engine.max_prefill_steps = 1 + variant % 8
    async with nodes.pd.generate(request(NUM_TOKENS, variant=variant)):
        await until(lambda: not nodes.prefill_engine.gate.is_set())
    nodes.prefill_engine.gate.set()


async def leave_between_prefill_and_decode(nodes: Fleet, variant: int) -> None:
    nodes.pd_engine.gate.clear()
    async with nodes.pd.generate(request(NUM_TOKENS, variant=variant)) as generation:
        async for _ in generation:
            break
        if variant % 2:
            await until(lambda: nodes.pd.load().num_transfers == 0)
    nodes.pd_engine.gate.set()


async def leave_during_decode(nodes: Fleet, variant: int) -> None:
    asked = request(NUM_TOKENS, variant=variant, max_tokens=1000)
    async with nodes.pd.generate(asked) as generation:
        num_events = 0
        async for _ in generation:
            num_events += 1
            if num_events > 2 + variant % 3:
                break


async def leave_with_an_exception(nodes: Fleet, variant: int) -> None:
    class Left(Exception):
        pass

    async def answer() -> None:
        async with nodes.pd.generate(request(NUM_TOKENS, variant=variant)) as generation:
            async for _ in generation:
                raise Left

    with pytest.raises(Left):
        await answer()


@pytest.mark.slow
@layouts
@pytest.mark.parametrize(
    "leave",
    [
        leave_at_once,
        leave_while_queued_at_the_peer,
        leave_during_the_remote_prefill,
        leave_between_prefill_and_decode,
        leave_during_decode,
        leave_with_an_exception,
    ],
)
async def test_clients_that_leave_in_any_phase_leave_nothing_held(layout, leave):
    async with fleet(layout=layout) as nodes:
        for variant in range(6):
            await leave(nodes, variant)
            nodes.prefill_engine.max_prefill_steps = None
        await nodes.at_rest()
        assert nodes.pd_engine.load().num_running == nodes.prefill_engine.load().num_running == 0
        asked = request(NUM_TOKENS, variant=500)
        answer = await nodes.ask(asked)
        assert answer.record.route == "remote"
        assert answer.tokens == (await nodes.ask_locally(asked)).tokens


@pytest.mark.slow
async def test_many_requests_at_once_through_a_bad_link_all_get_the_local_answer():
    async with fleet(max_transfers=4, stall_timeout_s=0.5) as nodes:
        length = await stream_length(nodes)
        faults = [None, Fault(length // 3, "gone"), Fault(length // 2, "flip"), None]
        asked = [request(NUM_TOKENS, variant=variant) for variant in range(24)]
        answers = []
        for start in range(0, 24, 6):
            nodes.relay.fault = faults[start // 6]
            async with asyncio.TaskGroup() as tasks:
                group = [tasks.create_task(nodes.ask(one)) for one in asked[start : start + 6]]
            answers += [task.result() for task in group]
        assert {answer.record.route for answer in answers} == {"local", "remote"}
        nodes.relay.fault = None
        for one, answer in zip(asked, answers, strict=True):
            check_sums(answer.record)
            assert answer.tokens == (await nodes.ask_locally(one)).tokens
