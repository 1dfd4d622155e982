"""Nodes that share a cluster key, and nodes that do not: the answer is the local one either way."""

import pytest

from prfaas.transport.cluster_key import ClusterKey
from tests.relay import Fault
from tests.server.fleet import fleet, request, until
from tests.server.scripted_engine import DENSE, HYBRID, STATES

pytestmark = pytest.mark.usefixtures("no_leaks")
KEY, OTHER_KEY = ClusterKey(b"k" * 16), ClusterKey(b"l" * 16)
NUM_TOKENS = 150


@pytest.mark.parametrize("layout", [DENSE, HYBRID, STATES], ids=["dense", "hybrid", "states"])
async def test_two_nodes_with_the_key_give_the_local_answer(layout):
    async with fleet(layout=layout, prefill_key=KEY, pd_key=KEY) as nodes:
        answer = await nodes.ask(request(NUM_TOKENS))
        assert answer.record.route == "remote"
        assert answer.tokens == (await nodes.ask_locally(request(NUM_TOKENS))).tokens


@pytest.mark.parametrize(
    ("prefill_key", "pd_key"), [(KEY, None), (None, KEY), (OTHER_KEY, KEY)], ids=str
)
async def test_a_node_without_the_same_key_is_no_peer(prefill_key, pd_key):
    async with fleet(prefill_key=prefill_key, pd_key=pd_key, wait_for_peer=False) as nodes:
        peer = nodes.pd.peer
        assert peer is not None
        await until(lambda: peer.state == "untrusted")
        answer = await nodes.ask(request(NUM_TOKENS))
        assert (answer.record.route, answer.record.reason) == ("local", "peer_down")
        assert answer.tokens == (await nodes.ask_locally(request(NUM_TOKENS))).tokens
        assert not nodes.prefill_metrics.outcomes


async def test_a_peer_that_started_anew_is_asked_for_proof_anew():
    async with fleet(prefill_key=KEY, pd_key=KEY) as nodes:
        await nodes.prefill.close()
        await nodes.ask(request(NUM_TOKENS))  # it is gone, and so is our session
        await until(lambda: nodes.pd.peer is not None and nodes.pd.peer.state == "down")
        await nodes.prefill.restart(nodes.tasks)
        await nodes.peer_up()
        answer = await nodes.ask(request(NUM_TOKENS, salt=b"other"))
        assert answer.record.route == "remote"


@pytest.mark.parametrize("kind", ["cut", "flip"])
@pytest.mark.parametrize("after_bytes", [120, 1000, 5000])
async def test_frames_that_were_touched_on_the_way_are_not_used(kind, after_bytes):
    async with fleet(layout=HYBRID, prefill_key=KEY, pd_key=KEY) as nodes:
        nodes.relay.fault = Fault(after_bytes, kind)
        answer = await nodes.ask(request(NUM_TOKENS))
        await nodes.relay.hurt()
        assert answer.record.route == "remote"  # by another stream
        assert answer.tokens == (await nodes.ask_locally(request(NUM_TOKENS))).tokens
