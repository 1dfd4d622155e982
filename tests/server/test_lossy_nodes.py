"""A lossy codec's KV never passes for exact: not in the cache, not in an answer, not after a fault.

The scripted engine's pages are bytes, which no codec changes: answers stay equal to the local ones,
so that what is said of them is seen apart from what became of them.
"""

import pytest

from prfaas.cache.prefix import PrefixCache
from prfaas.server.prefixes import lossy_salt
from prfaas.types import Request
from tests.relay import Fault
from tests.server.fleet import fleet, request
from tests.server.scripted_engine import DENSE, HYBRID, STATES

pytestmark = pytest.mark.usefixtures("no_leaks")
NUM_TOKENS = 150
LOSSY = ["fp16", "int8", "fp8", "auto-lossy"]
layouts = pytest.mark.parametrize(
    "layout", [DENSE, HYBRID, STATES], ids=["dense", "hybrid", "states"]
)


def cached_tokens(cache: PrefixCache, asked: Request, salt: bytes) -> int:
    table = cache.lookup(cache.block_keys(asked.prompt_tokens, salt), len(asked.prompt_tokens))
    hit_tokens = table.hit_tokens
    table.release()
    return hit_tokens


@layouts
@pytest.mark.parametrize("codec", LOSSY)
async def test_received_kv_is_found_by_its_own_setting_alone_and_called_inexact(layout, codec):
    async with fleet(layout=layout, kv_codec=codec) as nodes:
        asked = request(NUM_TOKENS)
        answer = await nodes.ask(asked)
        assert (answer.record.route, answer.record.exact) == ("remote", False)
        assert answer.tokens == (await nodes.ask_locally(asked)).tokens
        salts = {name: lossy_salt(asked.cache_salt, name) for name in LOSSY}  # type: ignore[arg-type]
        salts["raw"] = asked.cache_salt
        found = {name for name, salt in salts.items() if cached_tokens(nodes.pd_cache, asked, salt)}
        assert found == {codec}
        assert cached_tokens(nodes.prefill_cache, asked, asked.cache_salt) > 0
        again = await nodes.ask(request(NUM_TOKENS), "local")
        assert again.record.tokens_reused > 0
        assert not again.record.exact
        assert again.tokens == answer.tokens


@layouts
async def test_what_this_node_made_itself_stays_exact_beside_a_lossy_peer(layout):
    async with fleet(layout=layout, kv_codec="int8") as nodes:
        first = await nodes.ask(request(NUM_TOKENS), "local")
        assert first.record.exact
        again = await nodes.ask(request(NUM_TOKENS))
        assert again.record.tokens_reused > 0
        assert (again.record.route, again.record.exact) == ("local", True)


@layouts
async def test_a_narrower_salt_keeps_lossy_kv_apart_too(layout):
    async with fleet(layout=layout, kv_codec="fp8") as nodes:
        await nodes.ask(request(NUM_TOKENS, salt=b"somebody"))
        other = await nodes.ask(request(NUM_TOKENS, salt=b"somebody else"), "local")
        assert (other.record.tokens_reused, other.record.exact) == (0, True)


@pytest.mark.parametrize(("after_bytes", "is_salvaged"), [(100, False), (4000, True)])
async def test_a_broken_transfer_leaves_an_inexact_prefix_or_an_exact_answer(
    after_bytes, is_salvaged
):
    async with fleet(layout=DENSE, kv_codec="int8") as nodes:
        nodes.relay.fault = Fault(after_bytes, "gone")
        asked = request(NUM_TOKENS)
        answer = await nodes.ask(asked)
        await nodes.relay.hurt()
        record = answer.record
        assert record.route == "local"
        assert (record.tokens_remote > 0) == is_salvaged
        assert record.exact != is_salvaged
        assert answer.tokens == (await nodes.ask_locally(asked)).tokens
        assert (cached_tokens(nodes.pd_cache, asked, asked.cache_salt) == 0) == is_salvaged
