"""What a slow link teaches the node behind it, and what its egress target then does."""

import pytest

from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.view import PeerView
from prfaas.server.verify import verify_tokens
from prfaas.types import Request, RouteName, SamplingParams
from tests.server.real_nodes import RealNodes
from tests.server.replay_nodes import replay_nodes

LIMIT_BYTES_PER_S = 4e6
NUM_TOKENS = 20_000
SPEED = 50.0
"""The prefill takes 40 ms: no word of it comes in between."""
BYTES_SCALE = 0.008

pytestmark = pytest.mark.slow


async def ask(nodes: RealNodes, name: str, route: RouteName | None = None) -> bool:
    """Return whether the prompt, which nobody has cached, was prefilled by the peer."""
    asked = Request(
        request_id=name,
        prompt_tokens=verify_tokens(nodes.pd.tokenizer.encode, NUM_TOKENS),
        sampling=SamplingParams(max_tokens=2, seed=5),
        num_choices=1,
        cache_salt=name.encode(),
    )
    async with nodes.pd.generate(asked, force_route=route) as generation:
        async for _ in generation:
            pass
    return generation.record.route == "remote"


def peer_of(nodes: RealNodes) -> PeerView:
    (name,) = nodes.pd._router.peers
    return nodes.pd._router.peer(name)


@pytest.mark.parametrize(("egress_target", "is_overdrawn"), [(1.0, False), (0.01, True)])
async def test_a_slow_link_is_learnt_and_its_egress_target_counts(egress_target, is_overdrawn):
    async with replay_nodes(
        speed=SPEED,
        bytes_scale=BYTES_SCALE,
        scheduler=SchedulerOptions(policy="predictive", egress_target=egress_target),
        of_prefill={"egress_limit_bytes_per_s": LIMIT_BYTES_PER_S},
    ) as nodes:
        for number in range(2):
            assert await ask(nodes, f"taught-{number}", "remote")
        link_bytes_per_s = peer_of(nodes).link_bytes_per_s
        assert link_bytes_per_s is not None
        assert LIMIT_BYTES_PER_S / 1.5 < link_bytes_per_s < LIMIT_BYTES_PER_S * 1.5
        assert await ask(nodes, "counted", "remote")
        router = nodes.pd._router
        (name,) = router.peers
        scarcity = router.scarcity(name, nodes.pd._clock())
        assert scarcity > 0
        assert (scarcity > 1) == is_overdrawn
