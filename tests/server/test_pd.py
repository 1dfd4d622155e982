"""The pd role: every way a prompt can be filled gives the answer that this node gives alone."""

from dataclasses import replace

import pytest

from prfaas.errors import BadRequest, Overloaded
from prfaas.server.prefixes import approximate_salt
from tests.server.fleet import CONTEXT_TOKENS, IDENTITY, evict_all, fleet, prompt, request, until
from tests.server.scripted_engine import (
    BLOCK_TOKENS,
    DENSE,
    END_TOKEN,
    HYBRID,
    STATES,
    first_logits,
)

pytestmark = pytest.mark.usefixtures("no_leaks")
layouts = pytest.mark.parametrize(
    "layout", [DENSE, HYBRID, STATES], ids=["dense", "hybrid", "states"]
)


@layouts
async def test_a_long_prompt_is_prefilled_by_the_peer_and_answered_as_locally(layout):
    async with fleet(layout=layout) as nodes:
        asked = request(100)
        answer = await nodes.ask(asked)
        record = answer.record
        assert (record.route, record.reason, record.exact) == ("remote", "long", True)
        assert (record.tokens_reused, record.tokens_local, record.tokens_remote) == (0, 0, 100)
        assert record.bytes_received == layout.bytes_needed(100)
        assert record.peer == f"127.0.0.1:{nodes.relay.port}"
        assert record.ttft_s is not None
        assert record.completion_tokens == 6
        assert answer.tokens == (await nodes.ask_locally(asked)).tokens
        await until(lambda: ("sent", "completed") in nodes.prefill_metrics.outcomes)
        assert nodes.pd_metrics.outcomes == [("received", "completed")]
        for metrics, direction in ((nodes.pd_metrics, "received"), (nodes.prefill_metrics, "sent")):
            assert metrics.num_bytes[direction] == record.bytes_received


@layouts
@pytest.mark.parametrize(
    "num_tokens", [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS + 5, 257]
)
async def test_prompts_of_any_length_go_remote_and_give_the_local_answer(layout, num_tokens):
    async with fleet(layout=layout) as nodes:
        asked = request(num_tokens)
        answer = await nodes.ask(asked, "remote")
        assert answer.record.route == "remote"
        assert answer.record.tokens_remote == num_tokens
        assert answer.tokens == (await nodes.ask_locally(asked)).tokens


@layouts
async def test_of_a_known_prefix_only_what_is_missing_travels(layout):
    async with fleet(layout=layout) as nodes:
        await nodes.ask(request(100))
        longer = request(180)
        answer = await nodes.ask(longer)
        record, held = answer.record, 100 // BLOCK_TOKENS * BLOCK_TOKENS
        assert record.route == "remote"
        assert (record.tokens_reused, record.tokens_remote) == (held, 180 - held)
        assert record.bytes_received == layout.bytes_needed(180, held)
        assert answer.tokens == (await nodes.ask_locally(longer)).tokens


@layouts
async def test_what_the_peer_has_cached_counts_as_reused_and_still_travels(layout):
    async with fleet(layout=layout) as nodes:
        await nodes.ask(request(100))
        await nodes.at_rest()
        evict_all(nodes.pd_cache)
        asked = request(100)
        answer = await nodes.ask(asked)
        record, cached = answer.record, 100 // BLOCK_TOKENS * BLOCK_TOKENS
        assert (record.tokens_reused, record.tokens_remote) == (cached, 100 - cached)
        assert record.bytes_received == layout.bytes_needed(100)
        assert answer.tokens == (await nodes.ask_locally(asked)).tokens


@layouts
async def test_a_prompt_sent_again_is_a_local_hit(layout):
    async with fleet(layout=layout) as nodes:
        first = await nodes.ask(request(100))
        again = await nodes.ask(request(100))
        assert (again.record.route, again.record.reason) == ("local", "short")
        assert again.record.tokens_reused == 100 // BLOCK_TOKENS * BLOCK_TOKENS
        assert again.record.bytes_received == 0
        assert again.tokens == first.tokens


async def test_requests_of_another_salt_share_nothing():
    async with fleet() as nodes:
        await nodes.ask(request(100))
        other = await nodes.ask(request(100, salt=b"tenant"))
        assert (other.record.tokens_reused, other.record.tokens_remote) == (0, 100)


async def test_a_short_prompt_and_a_forced_one_stay_local_and_say_why():
    async with fleet() as nodes:
        short = await nodes.ask(request(20))
        forced = await nodes.ask(request(100, variant=1), "local")
        assert (short.record.route, short.record.reason) == ("local", "short")
        assert (forced.record.route, forced.record.reason) == ("local", "forced")
        assert (short.record.tokens_local, forced.record.tokens_local) == (20, 100)
        assert nodes.relay.stream_bytes == 0


@layouts
async def test_an_answer_of_one_token_is_the_peers_and_nothing_is_decoded_here(layout):
    async with fleet(layout=layout) as nodes:
        asked = request(100, max_tokens=1)
        answer = await nodes.ask(asked)
        assert nodes.pd_engine.load().step_count == 0
        assert answer.record.finish_reasons == {0: "length"}
        assert answer.record.tokens_remote == 100
        assert answer.tokens == (await nodes.ask_locally(asked)).tokens


async def test_a_first_token_that_ends_the_answer_is_its_end():
    async with fleet() as nodes:
        nodes.prefill_engine.end_after = 0
        answer = await nodes.ask(request(100))
        assert answer.tokens == [[END_TOKEN]]
        assert answer.record.finish_reasons == {0: "stop"}
        assert nodes.pd_engine.load().step_count == 0


async def test_every_choice_continues_from_its_own_first_token():
    async with fleet() as nodes:
        asked = request(100, num_choices=3)
        answer = await nodes.ask(asked)
        assert answer.record.route == "remote"
        assert len(set(map(tuple, answer.tokens))) == 3
        assert answer.tokens == (await nodes.ask_locally(asked)).tokens
        assert answer.record.finish_reasons == {0: "length", 1: "length", 2: "length"}
        assert all(event.logprobs is not None for event in answer.events)


@pytest.mark.parametrize("route", ["local", "remote"])
async def test_a_stopped_choice_ends_and_the_others_go_on(route):
    async with fleet() as nodes:
        asked = request(100, num_choices=3, max_tokens=8)
        tokens: list[list[int]] = [[], [], []]
        async with nodes.pd.generate(asked, force_route=route) as generation:
            async for event in generation:
                tokens[event.choice_index].append(event.token_id)
                if event.choice_index == 1 and len(tokens[1]) == 3:
                    generation.stop_choice(1)
        alone = (await nodes.ask_locally(asked)).tokens
        assert tokens == [alone[0], alone[1][:3], alone[2]]
        assert generation.record.completion_tokens == 8 + 3 + 8


async def test_stopping_every_choice_ends_the_iteration():
    async with fleet() as nodes:
        asked = request(100, num_choices=2, max_tokens=500)
        async with nodes.pd.generate(asked) as generation:
            async for _ in generation:
                generation.stop_choice(0)
                generation.stop_choice(1)
                generation.stop_choice(1)
        assert generation.record.completion_tokens < 10


@pytest.mark.parametrize("route", ["local", "remote"])
async def test_first_logits_come_from_whoever_prefilled(route):
    async with fleet() as nodes:
        answer = await nodes.ask(request(100), route, return_logits=True)
        assert answer.record.route == route
        assert answer.first_logits == first_logits(prompt(100))


async def test_a_full_pool_means_a_local_prefill():
    needed = HYBRID.pages_needed(100)
    async with fleet(pd_pages=needed - 1) as nodes:
        asked = request(100)
        answer = await nodes.ask(asked)
        assert (answer.record.route, answer.record.reason) == ("local", "pool_full")
        assert answer.record.tokens_local == 100
        assert answer.tokens == (await nodes.ask_locally(asked)).tokens


async def test_a_peer_without_room_is_overloaded_and_the_prefill_local():
    needed = HYBRID.pages_needed(100)
    async with fleet(prefill_pages=needed) as nodes:
        asked = request(100)
        other = nodes.prefill_cache.lookup((), 1)
        other.try_allocate(0, 0)
        answer = await nodes.ask(asked)
        other.release()
        assert answer.record.route == "local"
        assert answer.record.reason.startswith("peer_overloaded: ")
        assert "no free pages" in answer.record.reason
        assert answer.tokens == (await nodes.ask_locally(asked)).tokens


@pytest.mark.parametrize("num_tokens", [100, CONTEXT_TOKENS - 1])
async def test_a_prompt_that_the_peer_can_never_take_does_not_count_against_the_peer(num_tokens):
    async with fleet(prefill_pages=HYBRID.pages_needed(60)) as nodes:
        for _ in range(3):
            asked = request(num_tokens, max_tokens=1)
            answer = await nodes.ask(asked)
            assert answer.record.route == "local"
            assert answer.record.reason.startswith("prompt_refused: ")
            assert answer.tokens == (await nodes.ask_locally(asked)).tokens
            evict_all(nodes.pd_cache)
        assert (await nodes.ask(request(60, variant=1))).record.route == "remote"


async def test_a_peer_at_its_limit_of_transfers_is_overloaded():
    async with fleet(max_transfers=0) as nodes:
        answer = await nodes.ask(request(100))
        assert answer.record.reason.startswith("peer_overloaded: ")


async def test_a_peer_whose_engine_refuses_is_a_failed_transfer():
    async with fleet() as nodes:
        nodes.prefill_engine.is_full = True
        answer = await nodes.ask(request(100))
        assert answer.record.reason.startswith("transfer_failed: ")
        assert "queue is full" in answer.record.reason


async def test_the_engines_refusal_reaches_the_client_and_holds_nothing():
    async with fleet() as nodes:
        nodes.pd_engine.is_full = True
        with pytest.raises(Overloaded, match="queue is full"):
            await nodes.ask(request(10))


async def test_a_prompt_beyond_the_context_or_without_tokens_is_a_bad_request():
    async with fleet() as nodes:
        with pytest.raises(BadRequest, match=f"{CONTEXT_TOKENS} tokens") as caught:
            await nodes.ask(request(CONTEXT_TOKENS))
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(BadRequest, match="empty"):
            await nodes.ask(request(prompt_tokens=()))


async def test_prompts_long_enough_to_be_hashed_in_a_thread_get_the_same_keys(monkeypatch):
    async with fleet() as nodes:
        first = await nodes.ask(request(100))
        monkeypatch.setattr("prfaas.server.key_thread.INLINE_TOKENS", 10)
        again = await nodes.ask(request(100))
        assert again.record.tokens_reused == 100 // BLOCK_TOKENS * BLOCK_TOKENS
        assert again.tokens == first.tokens


APPROXIMATE = replace(IDENTITY, numerics_fingerprint="accelerator")


async def test_other_numerics_are_refused_unless_accepted():
    async with fleet(prefill_identity=APPROXIMATE, wait_for_peer=False) as nodes:
        assert nodes.pd.peer is not None
        await nodes.pd.peer.settled()
        answer = await nodes.ask(request(100))
        assert answer.record.reason.startswith("peer_incompatible")
        assert "'exact' here, 'accelerator' there" in nodes.pd.peer.detail


async def test_accepted_numerics_are_marked_and_never_mixed_with_exact_kv():
    async with fleet(prefill_identity=APPROXIMATE, accept_numerics="approximate") as nodes:
        asked = request(100)
        answer = await nodes.ask(asked)
        assert (answer.record.route, answer.record.exact) == ("remote", False)
        keys = nodes.pd_cache.block_keys(prompt(100), b"")
        table = nodes.pd_cache.lookup(keys, 100)
        assert table.hit_tokens == 0
        table.release()
        again = await nodes.ask(request(100))
        assert (again.record.route, again.record.exact) == ("local", False)
        assert again.record.tokens_reused == 100 // BLOCK_TOKENS * BLOCK_TOKENS
        exact = await nodes.ask(request(120, salt=b"other"), "local")
        assert exact.record.exact


def test_no_salt_of_a_client_finds_approximate_kv_of_another_peer():
    salts = {approximate_salt(salt, fp) for salt in (b"", b"a", b"ab") for fp in ("", "b", "ab")}
    assert len(salts) == 9
