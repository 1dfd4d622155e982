"""What transfers over a slow link teach the node behind it, and what its egress target then does."""

import pytest

from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.peer_states import EWMA_WEIGHT
from prfaas.scheduler.view import PeerView
from prfaas.server.verify import verify_tokens
from prfaas.types import Request, SamplingParams
from scripts.bench.shaped_relay import Rate
from tests.server.real_nodes import RealNodes
from tests.server.replay_nodes import replay_nodes

LINK_BYTES_PER_S = 8e5
"""Far less than a busy machine carries."""
BURST_FACTOR = 1.2
"""What came first of a transfer may have been let through before it was asked for."""
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


async def test_short_prefills_show_what_a_link_carries_and_that_it_was_halved():
    """A busy machine makes a link look slower, nothing makes it look faster."""
    link = Rate(LINK_BYTES_PER_S)
    async with replay_nodes(speed=SPEED, bytes_scale=BYTES_SCALE, link=link) as nodes:
        await ask(nodes, "whole")
        known = peer_of(nodes).link_bytes_per_s
        assert known is not None
        most = known
        assert most < BURST_FACTOR * LINK_BYTES_PER_S
        link.bytes_per_s = LINK_BYTES_PER_S / 2
        for number in range(3):
            await ask(nodes, f"halved-{number}")
            most += EWMA_WEIGHT * (BURST_FACTOR * LINK_BYTES_PER_S / 2 - most)
            halved = peer_of(nodes).link_bytes_per_s
            assert halved is not None
            assert halved <= most
            assert halved != known  # each of them tells of it anew
            known = halved


@pytest.mark.parametrize(("egress_target", "is_overdrawn"), [(1.0, False), (0.01, True)])
async def test_an_egress_target_counts_once_the_link_is_known(egress_target, is_overdrawn):
    async with replay_nodes(
        speed=SPEED,
        bytes_scale=BYTES_SCALE,
        scheduler=SchedulerOptions(policy="predictive", egress_target=egress_target),
        link=Rate(LINK_BYTES_PER_S),
    ) as nodes:
        for number in range(2):  # nothing is spent before the first has shown the rate
            await ask(nodes, str(number))
        router = nodes.pd._router
        (name,) = router.peers
        scarcity = router.scarcity(name, nodes.pd._clock())
        assert (scarcity > 1) == is_overdrawn


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
