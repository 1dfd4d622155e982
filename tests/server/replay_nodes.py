"""Nodes that replay profiles, in a pair with a relay between them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from prfaas.cache.options import CacheOptions
from prfaas.config.options import NodeConfig, Role
from prfaas.engine.options import EngineOptions
from prfaas.engine.replay_options import ReplayOptions
from prfaas.scheduler.options import SchedulerOptions
from prfaas.server.pd import load_pd_node
from prfaas.server.prefill import load_prefill_node
from prfaas.transport.options import TransportOptions
from prfaas.transport.security import peer_security
from scripts.bench.shaped_relay import Rate, ShapedRelay
from tests.accepting import accept_no_more
from tests.relay import Relay, tag_bytes
from tests.server.fleet import CountedTransfers, PrefillHost
from tests.server.real_nodes import RealNodes, no_progress

PROFILES = Path(__file__).parents[2] / "configs" / "profiles"
LOCAL, REMOTE = (PROFILES / f"{name}-internal-1t.toml" for name in ("h20", "h200"))


def replay_config(
    role: Role,
    profile: Path,
    *,
    peer: str | None = None,
    cache_dir: Path | None = None,
    speed: float = 200.0,
    bytes_scale: float = 0.002,
    scheduler: SchedulerOptions | None = None,
    **transport: Any,
) -> NodeConfig:
    return NodeConfig(
        role=role,
        engine=EngineOptions(kind="replay", profile=str(profile)),
        replay=ReplayOptions(speed=speed, bytes_scale=bytes_scale),
        scheduler=scheduler or SchedulerOptions(),
        cache=CacheOptions(ram_bytes=64 << 20, dir=None if cache_dir is None else str(cache_dir)),
        transport=TransportOptions(**{"stall_timeout_s": 10.0, **transport, "peer": peer}),
    )


@contextlib.asynccontextmanager
async def replay_nodes(
    *,
    cache_dir: Path | None = None,
    of_prefill: dict[str, Any] | None = None,
    of_pd: dict[str, Any] | None = None,
    link: Rate | None = None,
    **settings: Any,
) -> AsyncIterator[RealNodes]:
    """Run a pd node and its peer, each with the profile of its kind of machine.

    Args:
        of_prefill: settings of the peer alone.
        of_pd: settings of the pd node alone.
        link: what comes from the peer has this rate; None is no limit.
    """
    peers_config = replay_config("prefill", REMOTE, **settings, **(of_prefill or {}))
    prefill = load_prefill_node(peers_config, CountedTransfers(), no_progress)
    tls = peer_security(peers_config.transport).tls
    host = PrefillHost(lambda: prefill, tls)
    relay = Relay(tag_bytes(peers_config.transport.cluster_key_file))
    async with asyncio.TaskGroup() as tasks:
        await host.start(tasks)
        shaped = None if link is None else await ShapedRelay(host.port, link).start()
        port = host.port if shaped is None else shaped.sockets[0].getsockname()[1]
        await relay.start(port)
        pd = load_pd_node(
            replay_config(
                "pd",
                LOCAL,
                peer=f"127.0.0.1:{relay.port}",
                cache_dir=cache_dir,
                **settings,
                **(of_pd or {}),
            ),
            CountedTransfers(),
            no_progress,
        )
        await pd.start(tasks)
        nodes = RealNodes(pd, prefill, relay)
        try:
            async with asyncio.timeout(120):
                assert pd.peer is not None
                await pd.peer.settled()
                yield nodes
                await nodes.at_rest()
        finally:
            await pd.close()
            await host.close()
            await relay.close()
            if shaped is not None:
                await accept_no_more(shaped)
                shaped.close()
