"""Two nodes with real engines over tiny models, and a relay between them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from prfaas.cache.options import CacheOptions
from prfaas.cache.prefix import PrefixCache
from prfaas.config.options import ModelOptions, NodeConfig
from prfaas.engine.options import EngineOptions, WeightDtype
from prfaas.server.pd import PdNode, load_pd_node
from prfaas.server.prefill import PrefillNode, load_prefill_node
from prfaas.transport.messages import CodecName
from prfaas.transport.options import TransportOptions
from tests.relay import Relay
from tests.server.fleet import CountedTransfers, PrefillHost, until

CONTEXT_TOKENS = 260
TRANSPORT = TransportOptions(stall_timeout_s=10.0)
"""Patient: tests share their processors."""


@dataclass
class RealNodes:
    pd: PdNode
    prefill: PrefillNode
    relay: Relay

    async def at_rest(self) -> None:
        """Return when nobody holds anything; check every count on the way."""
        caches = (self.pd._cache, self.prefill._cache)
        await until(lambda: not any(is_held(cache) for cache in caches))
        for cache in caches:
            cache.check()


def is_held(cache: PrefixCache) -> bool:
    """Return whether somebody holds a page; an idle engine that leaves the end of a turn may for a while."""
    counts = cache.counts()
    return bool(counts.num_tables or counts.num_referenced or counts.num_transfer)


def config(
    model: Path,
    peer: str | None = None,
    *,
    device: str = "cpu",
    dtype: WeightDtype = "float16",
    accept_numerics: Literal["equal", "approximate"] = "equal",
    block_tokens: int = 16,
    max_context_tokens: int = CONTEXT_TOKENS,
    kv_codec: CodecName = "raw",
    streams: int = 4,
    transfer_snapshot_tokens: str = "auto",
    stall_timeout_s: float = TRANSPORT.stall_timeout_s,
    cache_dir: Path | None = None,
) -> NodeConfig:
    return NodeConfig(
        model=ModelOptions(model=str(model)),
        cache=CacheOptions(
            ram_bytes=64 << 20,
            block_tokens=block_tokens,
            dir=None if cache_dir is None else str(cache_dir),
        ),
        engine=EngineOptions(
            threads=1,
            device=device,
            dtype=dtype,
            chunk_tokens=64,
            max_context_tokens=max_context_tokens,
        ),
        transport=replace(
            TRANSPORT,
            peer=peer,
            accept_numerics=accept_numerics,
            kv_codec=kv_codec,
            streams=streams,
            transfer_snapshot_tokens=transfer_snapshot_tokens,
            stall_timeout_s=stall_timeout_s,
        ),
    )


def no_progress(stage: str, done: int, total: int) -> None:
    return None


@contextlib.asynccontextmanager
async def real_nodes(
    pd_model: Path,
    prefill_model: Path,
    *,
    is_approximate: bool = False,
    cache_dirs: tuple[Path | None, Path | None] = (None, None),
    **settings: Any,
) -> AsyncIterator[RealNodes]:
    """Run both; with `is_approximate` the pd node's weights are float32 and it takes what comes.

    `settings` go to both nodes' `config`, one of `cache_dirs` to the pd node and one to its peer.
    """
    pd_dir, prefill_dir = cache_dirs
    prefill = load_prefill_node(
        config(prefill_model, cache_dir=prefill_dir, **settings), CountedTransfers(), no_progress
    )
    settings |= {"cache_dir": pd_dir}
    host, relay = PrefillHost(lambda: prefill), Relay()
    async with asyncio.TaskGroup() as tasks:
        await host.start(tasks)
        await relay.start(host.port)
        peer = f"127.0.0.1:{relay.port}"
        pd_config = (
            config(pd_model, peer, dtype="float32", accept_numerics="approximate", **settings)
            if is_approximate
            else config(pd_model, peer, **settings)
        )
        pd = load_pd_node(pd_config, CountedTransfers(), no_progress)
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
