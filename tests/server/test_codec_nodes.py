"""Pages that cross the link encoded: the answer is the local one, and what is told of the transfer is right."""

import pytest

from tests.relay import Fault
from tests.server.fleet import fleet, request
from tests.server.scripted_engine import DENSE, HYBRID, STATES

pytestmark = pytest.mark.usefixtures("no_leaks")
NUM_TOKENS = 150
layouts = pytest.mark.parametrize(
    "layout", [DENSE, HYBRID, STATES], ids=["dense", "hybrid", "states"]
)


@layouts
@pytest.mark.parametrize("codec", ["raw", "zstd", "auto"])
async def test_every_codec_gives_the_local_answer_and_calls_it_exact(layout, codec):
    async with fleet(layout=layout, kv_codec=codec) as nodes:
        answer = await nodes.ask(request(NUM_TOKENS))
        assert (answer.record.route, answer.record.exact) == ("remote", True)
        assert answer.tokens == (await nodes.ask_locally(request(NUM_TOKENS))).tokens
        again = await nodes.ask(request(NUM_TOKENS))  # what arrived is an ordinary prefix hit
        assert again.record.tokens_reused > 0
        assert again.tokens == answer.tokens


async def test_bytes_received_are_those_that_crossed_the_link():
    received = {}
    for codec in ("raw", "zstd"):
        async with fleet(layout=DENSE, kv_codec=codec) as nodes:
            answer = await nodes.ask(request(NUM_TOKENS))
            received[codec] = answer.record.bytes_received
            assert received[codec] < nodes.relay.stream_bytes
    assert received["raw"] == DENSE.bytes_needed(NUM_TOKENS)
    assert 0 < received["zstd"] <= received["raw"]


@layouts
@pytest.mark.parametrize("kind", ["cut", "flip"])
@pytest.mark.parametrize("after_bytes", [200, 700, 1500])
async def test_encoded_pages_that_were_hurt_are_not_used(layout, kind, after_bytes):
    async with fleet(layout=layout, kv_codec="zstd") as nodes:
        nodes.relay.fault = Fault(after_bytes, kind)
        answer = await nodes.ask(request(NUM_TOKENS))
        await nodes.relay.hurt()
        assert answer.record.route == "remote"  # by another stream
        assert answer.tokens == (await nodes.ask_locally(request(NUM_TOKENS))).tokens
