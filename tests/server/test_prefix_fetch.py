"""A prefix that another node has cached: fetched, published, hit. What goes wrong costs time only.

Every `fleet` checks at its end that both pools are whole and hold nothing for anybody.
"""

import asyncio
from dataclasses import replace

import pytest

from prfaas.clock import monotonic_s
from prfaas.server.directions import Directions
from tests.relay import Fault
from tests.server.fleet import IDENTITY, Answer, Fleet, evict_all, fleet, request, until
from tests.server.scripted_engine import BLOCK_TOKENS, DENSE, HYBRID, STATES

pytestmark = pytest.mark.usefixtures("no_leaks")
layouts = pytest.mark.parametrize(
    "layout", [DENSE, HYBRID, STATES], ids=["dense", "hybrid", "states"]
)

NUM_TOKENS = 150
PREFIX_TOKENS = 144
"""What can be hit of it."""


async def warm(nodes: Fleet, num_tokens: int = NUM_TOKENS) -> None:
    """Let the peer, and nobody else, have the prompt's KV."""
    answer = await nodes.ask(request(num_tokens), "remote")
    assert answer.record.route == "remote"
    await until(lambda: not nodes.pd_cache.counts().num_tables)
    evict_all(nodes.pd_cache)


def from_peer(nodes: Fleet, num_tokens: int = PREFIX_TOKENS) -> Directions:
    return Directions(reason="near", prefix_from=nodes.peer_name, prefix_tokens=num_tokens)


async def fetch(nodes: Fleet, num_tokens: int = NUM_TOKENS) -> Answer:
    """Ask for an answer behind a fetched prefix; it is the local one, whatever came of the fetch."""
    answer = await nodes.ask(request(num_tokens), directions=from_peer(nodes))
    record = answer.record
    assert answer.tokens == (await nodes.ask_locally(request(num_tokens))).tokens
    assert (record.route, record.reason, record.peer) == ("local", "near", None)
    assert record.tokens_remote == 0
    assert record.tokens_reused + record.tokens_local == num_tokens
    return answer


def last_outcome(nodes: Fleet) -> str:
    direction, outcome = nodes.pd_metrics.outcomes[-1]
    assert direction == "received"
    return outcome


@layouts
async def test_a_prefix_that_the_peer_has_is_fetched_and_nothing_is_computed_for_it(layout):
    async with fleet(layout=layout) as nodes:
        await warm(nodes)
        num_steps = nodes.prefill_engine.load().step_count
        record = (await fetch(nodes)).record
        assert (record.tokens_reused, record.tokens_local) == (PREFIX_TOKENS, 6)
        assert record.bytes_received > 0
        assert last_outcome(nodes) == "completed"
        assert nodes.prefill_engine.load().step_count == num_steps
        again = await nodes.ask(request(NUM_TOKENS), "local")
        assert again.record.tokens_reused == PREFIX_TOKENS, "what came stays"


@layouts
async def test_only_what_is_lacking_travels(layout):
    async with fleet(layout=layout) as nodes:
        await warm(nodes)
        whole = (await fetch(nodes)).record.bytes_received
        evict_all(nodes.pd_cache)
        ours = 10 * BLOCK_TOKENS
        await nodes.ask(request(ours + 1), "local")
        part = (await fetch(nodes)).record
        assert part.tokens_reused == PREFIX_TOKENS
        assert 0 < part.bytes_received < whole


async def test_the_peer_sends_what_it_has_where_that_is_less_than_was_believed():
    async with fleet() as nodes:
        await warm(nodes, 80)
        assert (await fetch(nodes)).record.tokens_reused == 80


async def test_a_peer_that_has_nothing_more_refuses_and_nothing_is_waited_for():
    async with fleet() as nodes:
        record = (await fetch(nodes)).record
        assert (record.tokens_reused, record.bytes_received) == (0, 0)
        assert last_outcome(nodes) == "prompt_refused"
        assert nodes.pd.peers.all[0].is_usable, "it is no fault of the peer's"


async def test_what_is_here_is_not_fetched():
    async with fleet() as nodes:
        await warm(nodes)
        await nodes.ask(request(NUM_TOKENS), "local")
        num_transfers = len(nodes.pd_metrics.outcomes)
        assert (await fetch(nodes)).record.tokens_reused == PREFIX_TOKENS
        assert len(nodes.pd_metrics.outcomes) == num_transfers


@layouts
@pytest.mark.parametrize("kind", ["cut", "flip", "gone"])
async def test_a_stream_cut_or_damaged_on_the_way_costs_time_only(layout, kind):
    async with fleet(layout=layout) as nodes:
        await warm(nodes)
        before = nodes.relay.stream_bytes
        await fetch(nodes)
        length = nodes.relay.stream_bytes - before
        for fraction in (0.0, 0.5):
            evict_all(nodes.pd_cache)
            await until(lambda: nodes.pd.peers.all[0].is_usable)
            nodes.relay.fault = Fault(int(length * fraction), kind)
            record = (await fetch(nodes)).record
            await nodes.relay.hurt()
            assert nodes.relay.num_struck
            if kind == "gone":
                assert record.tokens_reused < PREFIX_TOKENS
            else:
                assert record.tokens_reused == PREFIX_TOKENS
            nodes.relay.fault = None


async def test_a_prefix_that_comes_in_part_is_hit_as_far_as_it_came():
    async with fleet(layout=DENSE, streams=1) as nodes:
        await warm(nodes)
        before = nodes.relay.stream_bytes
        await fetch(nodes)
        evict_all(nodes.pd_cache)
        nodes.relay.fault = Fault((nodes.relay.stream_bytes - before) * 9 // 10, "gone")
        record = (await fetch(nodes)).record
        assert 0 < record.tokens_reused < PREFIX_TOKENS
        nodes.relay.fault = None


async def test_a_silent_peer_is_given_up_after_the_stall_timeout():
    async with fleet(stall_timeout_s=0.3) as nodes:
        await warm(nodes)
        nodes.relay.fault = Fault(700, "black_hole")
        await fetch(nodes)
        assert last_outcome(nodes) == "peer_stuck"
        nodes.relay.fault = None


async def test_a_peer_that_is_gone_is_not_waited_for():
    async with fleet() as nodes:
        await warm(nodes)
        await nodes.prefill.close()
        assert (await fetch(nodes)).record.tokens_reused == 0


async def test_a_prefix_that_would_come_later_than_it_is_computed_is_given_up():
    async with fleet(
        layout=DENSE,
        pd_clock=lambda: 100 * monotonic_s(),
        streams=1,
        stall_timeout_s=60.0,
        lease_s=60.0,
    ) as nodes:
        num_tokens = 1000
        await warm(nodes, num_tokens)
        nodes.pd_engine.prefill_tokens_per_s = 1e6
        await nodes.ask(request(10, salt=b"other"), "local")  # loads are as of the last step
        nodes.relay.fault = Fault(9000, "slow")
        directions = from_peer(nodes, num_tokens)
        answer = await nodes.ask(request(num_tokens), directions=directions)
        assert last_outcome(nodes) == "slower_than_local"
        assert 0 < answer.record.tokens_reused < num_tokens - BLOCK_TOKENS


async def test_a_prefix_without_room_is_not_fetched():
    async with fleet(layout=DENSE, pd_pages=45) as nodes:
        await warm_peer_alone(nodes)
        await fetch(nodes)
        assert last_outcome(nodes) == "pool_full"


async def warm_peer_alone(nodes: Fleet) -> None:
    """Like `warm`, with a node that has no room for the prompt: the peer computes it for another."""
    keys = nodes.prefill_cache.block_keys(request(NUM_TOKENS).prompt_tokens, b"")
    table = nodes.prefill_cache.lookup(keys, NUM_TOKENS)
    assert table.try_reserve(NUM_TOKENS)
    for block in range(len(keys)):
        table.commit(0, block)
    table.release()


async def test_a_client_that_leaves_while_a_prefix_comes_leaves_nothing_held():
    async with fleet() as nodes:
        await warm(nodes)
        nodes.relay.fault = Fault(700, "black_hole")
        asked = request(NUM_TOKENS)
        async with nodes.pd.generate(asked, directions=from_peer(nodes)):
            await nodes.relay.hurt()
        nodes.relay.fault = None
        await nodes.relay.cut_all()


async def test_a_draining_peer_sends_nothing_more():
    async with fleet() as nodes:
        await warm(nodes)
        nodes.prefill.node.drain()
        assert (await fetch(nodes)).record.tokens_reused == 0
        assert last_outcome(nodes) == "peer_overloaded"


async def test_kv_of_other_numerics_is_kept_apart_and_said_to_be_inexact():
    other = replace(IDENTITY, numerics_fingerprint="accelerator")
    async with fleet(prefill_identity=other, accept_numerics="approximate") as nodes:
        await warm(nodes)
        answer = await nodes.ask(request(NUM_TOKENS), directions=from_peer(nodes))
        assert (answer.record.tokens_reused, answer.record.exact) == (PREFIX_TOKENS, False)
        keys = nodes.pd_cache.block_keys(request(NUM_TOKENS).prompt_tokens, b"")
        table = nodes.pd_cache.lookup(keys, NUM_TOKENS)
        assert table.hit_tokens == 0, "no exact key names it"
        table.release()


async def test_what_a_lossy_codec_may_have_changed_is_kept_apart():
    async with fleet(kv_codec="auto-lossy") as nodes:
        await warm(nodes)
        answer = await nodes.ask(request(NUM_TOKENS), directions=from_peer(nodes))
        assert (answer.record.tokens_reused, answer.record.exact) == (PREFIX_TOKENS, False)


async def test_a_prefix_is_fetched_first_where_the_rest_is_prefilled_elsewhere():
    async with fleet() as nodes:
        await warm(nodes)
        directions = replace(from_peer(nodes), prefill_at=nodes.peer_name)
        answer = await nodes.ask(request(NUM_TOKENS), directions=directions)
        record = answer.record
        assert (record.route, record.tokens_reused, record.tokens_remote) == ("remote", 144, 6)
        assert answer.tokens == (await nodes.ask_locally(request(NUM_TOKENS))).tokens
        received = [outcome for direction, outcome in nodes.pd_metrics.outcomes]
        assert received[-2:] == ["completed", "completed"]


async def ask_at_once(nodes: Fleet, num: int = 5) -> list[Answer]:
    """Ask alike so many times at once; each answer is the local one."""
    asked = [request(NUM_TOKENS, seed=seed) for seed in range(num)]
    async with asyncio.TaskGroup() as tasks:
        answers = [tasks.create_task(nodes.ask(one, directions=from_peer(nodes))) for one in asked]
    for one, task in zip(asked, answers, strict=True):
        alone = replace(one, request_id=f"{one.request_id}-again")
        assert task.result().tokens == (await nodes.ask_locally(alone)).tokens
    return [task.result() for task in answers]


@layouts
async def test_many_askers_of_a_hot_prefix_share_one_fetch(layout):
    async with fleet(layout=layout) as nodes:
        await warm(nodes)
        num_before = len(nodes.pd_metrics.outcomes)
        answers = await ask_at_once(nodes)
        assert [answer.record.tokens_reused for answer in answers] == [PREFIX_TOKENS] * 5
        assert len(nodes.pd_metrics.outcomes) == num_before + 1
        assert sum(answer.record.bytes_received > 0 for answer in answers) == 1


async def test_a_shared_fetch_that_fails_leaves_each_to_its_own_way():
    async with fleet() as nodes:
        await warm(nodes)
        num_before = len(nodes.pd_metrics.outcomes)
        nodes.relay.fault = Fault(0, "gone")
        await ask_at_once(nodes)
        assert nodes.relay.num_struck
        assert len(nodes.pd_metrics.outcomes) == num_before + 1, "the others do not try it, too"
        nodes.relay.fault = None


async def test_those_who_wait_for_a_fetch_go_on_when_its_client_leaves():
    async with fleet() as nodes:
        await warm(nodes)
        nodes.relay.fault = Fault(700, "black_hole")
        async with (
            asyncio.TaskGroup() as tasks,
            nodes.pd.generate(request(NUM_TOKENS), directions=from_peer(nodes)),
        ):
            await nodes.relay.hurt()
            waiting = tasks.create_task(fetch(nodes))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            nodes.relay.fault = None
        assert waiting.result().record.tokens_reused == PREFIX_TOKENS


async def test_who_wants_more_than_is_on_its_way_fetches_the_rest():
    async with fleet(layout=DENSE) as nodes:
        await warm(nodes, 400)
        short, long = request(NUM_TOKENS), request(400)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(nodes.ask(short, directions=from_peer(nodes)))
            whole = tasks.create_task(nodes.ask(long, directions=from_peer(nodes, 392)))
        assert whole.result().record.tokens_reused == 392
        assert [outcome for _, outcome in nodes.pd_metrics.outcomes[-2:]] == ["completed"] * 2
