"""Where a scheduler directs a prompt, there it is prefilled; where that cannot be, it is done here."""

import socket
from typing import Any

import pytest

from prfaas.errors import BadRequest
from prfaas.server.directions import Directions
from tests.server.fleet import THRESHOLD_TOKENS, Fleet, fleet, request, until
from tests.server.scripted_engine import DENSE, HYBRID, STATES, VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("no_leaks")
PATIENT: dict[str, Any] = {"connect_timeout_s": 20.0, "stall_timeout_s": 20.0, "lease_s": 20.0}
"""A busy machine must not turn what is directed elsewhere into what is done here."""
LAYOUT_NAMES = ["dense", "hybrid", "states"]
layouts = pytest.mark.parametrize("layout", [DENSE, HYBRID, STATES], ids=LAYOUT_NAMES)


def forgotten_peer(nodes: Fleet) -> str:
    """The name of the peer, which the node does not know any more."""
    peers = nodes.pd.peers
    peers._given = ()
    peers.keep(())
    assert not peers.all
    return nodes.peer_name


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("layout", "num_tokens"), [(DENSE, 5), (HYBRID, 100), (STATES, 100)], ids=LAYOUT_NAMES
)
async def test_a_prompt_of_any_length_is_prefilled_where_it_is_directed(layout, num_tokens):
    """At a node that this one never heard of, and here, whatever the router would have said."""
    async with fleet(layout=layout, **PATIENT) as nodes:
        there = Directions(
            prefill_at=forgotten_peer(nodes), reason="cluster", predicted_ttft_s=0.25
        )
        answer = await nodes.ask(request(num_tokens), directions=there)
        record = answer.record
        assert (record.route, record.reason, record.peer) == ("remote", "cluster", nodes.peer_name)
        assert (record.tokens_remote, record.predicted_ttft_s) == (num_tokens, 0.25)
        assert answer.tokens == (await nodes.ask_locally(request(num_tokens))).tokens
        here = Directions(reason="idle")
        answer = await nodes.ask(request(num_tokens, variant=1), directions=here)
        assert (answer.record.route, answer.record.reason) == ("local", "idle")
        assert answer.record.tokens_local == num_tokens


async def test_a_node_that_is_directed_to_itself_stays_there():
    async with fleet() as nodes:
        assert nodes.pd._driver is not None
        nodes.pd._driver._filler._address = "10.0.0.1:8000"
        directions = Directions(
            prefill_at="10.0.0.1:8000", prefix_from="10.0.0.1:8000", prefix_tokens=80, reason="near"
        )
        answer = await nodes.ask(request(100), directions=directions)
        assert (answer.record.route, answer.record.reason) == ("local", "near")


@pytest.mark.parametrize("is_dead", [True, False])
async def test_what_cannot_be_obeyed_is_done_here(is_dead):
    async with fleet() as nodes:
        at = f"127.0.0.1:{free_port()}" if is_dead else "no address"
        directions = Directions(prefill_at=at, prefix_from=at, prefix_tokens=80, reason="cluster")
        answer = await nodes.ask(request(100), directions=directions)
        assert (answer.record.route, answer.record.reason) == ("local", "peer_down")
        assert answer.tokens == (await nodes.ask_locally(request(100))).tokens


async def test_a_peer_that_dies_under_a_directed_prompt_costs_time_only():
    async with fleet() as nodes:
        directions = Directions(prefill_at=nodes.peer_name, reason="cluster")
        nodes.prefill_engine.max_prefill_steps = 3
        async with nodes.pd.generate(request(150), directions=directions) as generation:
            await until(lambda: not nodes.prefill_engine.gate.is_set())
            await nodes.relay.close()
            nodes.prefill_engine.gate.set()
            tokens = [event.token_id async for event in generation]
        assert generation.record.route == "local"
        assert generation.route_outcome in ("transfer_failed", "peer_stuck", "peer_down")
        assert [tokens] == (await nodes.ask_locally(request(150))).tokens


async def test_a_generation_says_what_was_here_before_anything_was_fetched():
    async with fleet(**PATIENT) as nodes:
        await nodes.ask(request(THRESHOLD_TOKENS), "local")
        directions = Directions(prefill_at=nodes.peer_name, reason="cluster")
        async with nodes.pd.generate(request(100), directions=directions) as generation:
            async for _ in generation:
                pass
        assert (generation.hit_tokens, generation.route_outcome) == (24, "completed")


@layouts
@pytest.mark.parametrize("route", ["local", "remote"])
async def test_what_others_drew_is_continued_and_not_said_again(layout, route):
    async with fleet(layout=layout, **PATIENT) as nodes:
        at = nodes.peer_name if route == "remote" else None
        directions = Directions(prefill_at=at, reason="again")
        for lengths in [(1, 1), (3, 0), (0, 5), (6, 2), (4, 6)]:
            asked = request(100, num_choices=2, salt=repr(lengths).encode())
            alone = await nodes.ask_locally(asked)
            drawn = tuple(
                tuple(tokens[:num]) for tokens, num in zip(alone.tokens, lengths, strict=True)
            )
            answer = await nodes.ask(asked, directions=directions, drawn_tokens=drawn)
            rest = [tokens[num:] for tokens, num in zip(alone.tokens, lengths, strict=True)]
            assert answer.tokens == rest
            assert answer.record.route == route
            assert answer.record.completion_tokens == sum(map(len, rest))
            assert set(answer.record.finish_reasons) == {0, 1}


async def test_an_answer_that_was_drawn_whole_needs_nothing_more():
    async with fleet() as nodes:
        asked = request(100)
        (tokens,) = (await nodes.ask_locally(asked)).tokens
        answer = await nodes.ask(asked, drawn_tokens=(tuple(tokens),))
        assert answer.events == []
        assert answer.record.finish_reasons == {0: "length"}


async def test_a_drawn_token_that_the_model_does_not_have_is_refused():
    async with fleet() as nodes:
        with pytest.raises(BadRequest, match="drawn token"):
            await nodes.ask(request(10), drawn_tokens=((VOCAB_SIZE,),))


def test_a_prefix_of_negative_length_is_no_direction():
    with pytest.raises(ValueError, match="-1"):
        Directions(reason="near", prefix_tokens=-1)
