"""What transfers over a slow link teach the node behind it, and what its egress target then does."""

from itertools import count

import pytest

from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.view import PeerView
from prfaas.server.verify import verify_tokens
from prfaas.types import Request, SamplingParams
from scripts.bench.shaped_relay import Rate
from tests.server.real_nodes import RealNodes
from tests.server.replay_nodes import replay_nodes

LINK_BYTES_PER_S = 8e5
"""Far less than a busy machine carries."""
NUM_TOKENS = 3_000
SPEED = 20.0
"""The prefill takes a fraction of the time in which PROGRESS comes."""
BYTES_SCALE = 0.001

pytestmark = pytest.mark.slow


async def ask(nodes: RealNodes, name: str) -> None:
    """Have a prompt that nobody has cached prefilled by the peer."""
    asked = Request(
        request_id=name,
        prompt_tokens=verify_tokens(nodes.pd.tokenizer.encode, NUM_TOKENS),
        sampling=SamplingParams(max_tokens=2, seed=5),
        num_choices=1,
        cache_salt=name.encode(),
    )
    async with nodes.pd.generate(asked, force_route="remote") as generation:
        async for _ in generation:
            pass
    assert generation.record.route == "remote"


def peer_of(nodes: RealNodes) -> PeerView:
    (name,) = nodes.pd._router.peers
    return nodes.pd._router.peer(name)


async def ask_until_link_is_below(nodes: RealNodes, bytes_per_s: float) -> None:
    """Transfer until the link is taken for less: a machine that stood still may have seen a burst."""
    for number in count():
        await ask(nodes, f"{bytes_per_s}-{number}")
        known = peer_of(nodes).link_bytes_per_s
        if known is not None and known < bytes_per_s:
            return


async def test_short_prefills_show_what_a_link_carries_and_that_it_became_slower():
    link = Rate(LINK_BYTES_PER_S)
    async with replay_nodes(speed=SPEED, bytes_scale=BYTES_SCALE, link=link) as nodes:
        await ask_until_link_is_below(nodes, 1.5 * LINK_BYTES_PER_S)
        link.bytes_per_s = LINK_BYTES_PER_S / 4
        await ask_until_link_is_below(nodes, LINK_BYTES_PER_S / 2)


async def test_an_egress_target_counts_once_the_link_is_known():
    async with replay_nodes(
        speed=SPEED,
        bytes_scale=BYTES_SCALE,
        scheduler=SchedulerOptions(policy="predictive", egress_target=0.01),
        link=Rate(LINK_BYTES_PER_S),
    ) as nodes:
        router = nodes.pd._router
        (name,) = router.peers
        for number in range(2):  # nothing is spent before the first has shown the rate
            assert router.scarcity(name, nodes.pd._clock()) == 0
            await ask(nodes, str(number))
        assert router.scarcity(name, nodes.pd._clock()) > 1


async def test_a_peer_s_egress_limit_is_known_before_the_first_transfer_and_never_exceeded():
    async with replay_nodes(
        speed=SPEED,
        bytes_scale=BYTES_SCALE,
        kv_codec="raw",
        of_prefill={"egress_limit_bytes_per_s": LINK_BYTES_PER_S},
    ) as nodes:
        for number in range(3):
            assert peer_of(nodes).egress_limit_bytes_per_s == LINK_BYTES_PER_S
            fraction = peer_of(nodes).wire_fraction
            assert fraction == pytest.approx(1.0, abs=0.2)  # more with snapshots on the way
            assert 1 / peer_of(nodes).byte_s <= LINK_BYTES_PER_S / fraction * 1.001
            await ask(nodes, str(number))
