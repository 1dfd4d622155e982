"""What drives a pd node's requests, put together from its parts."""

from prfaas.cache.spec import CacheLayout
from prfaas.clock import Clock
from prfaas.scheduler.profile import Prior
from prfaas.scheduler.router import Router
from prfaas.server.adapting import Adapting
from prfaas.server.engine_thread import EngineThread
from prfaas.server.filling import PromptFiller
from prfaas.server.peers import Peers, Spawn
from prfaas.server.places import snapshot_interval
from prfaas.server.prefix_fetch import PrefixFetcher
from prfaas.server.prefix_finder import PrefixFinder
from prfaas.server.prefixes import PrefixLookup
from prfaas.server.remote_prefill import RemotePrefiller
from prfaas.server.request_driver import RequestDriver
from prfaas.server.routing import PromptRouter
from prfaas.server.transfer_metrics import TransferMetrics
from prfaas.transport.handshake import Identity
from prfaas.transport.options import TransportOptions


def make_driver(
    *,
    identity: Identity,
    layout: CacheLayout,
    options: TransportOptions,
    vocab_size: int,
    max_context_tokens: int,
    engine: EngineThread,
    finder: PrefixFinder,
    adapting: Adapting,
    peers: Peers,
    metrics: TransferMetrics,
    clock: Clock,
    spawn: Spawn,
    router: Router,
    prior: Prior | None,
    address: str | None,
) -> RequestDriver:
    """Return what takes a request through lookup, route, transfer and engine.

    `spawn` gives work a task of the node's; `address` is what other nodes call it.
    """
    prompt_router = PromptRouter(
        router=router,
        engine=engine,
        layout=layout,
        clock=clock,
        prior=prior,
        snapshot_tokens=snapshot_interval(options.transfer_snapshot_tokens, layout),
        adapting=adapting,
    )
    filler = PromptFiller(
        lookup=PrefixLookup(finder, options.kv_codec),
        router=prompt_router,
        peers=peers,
        prefiller=RemotePrefiller(
            identity=identity,
            layout=layout,
            vocab_size=vocab_size,
            options=options,
            metrics=metrics,
            clock=clock,
            spawn=spawn,
        ),
        fetcher=PrefixFetcher(
            identity=identity,
            layout=layout,
            options=options,
            metrics=metrics,
            clock=clock,
            spawn=spawn,
        ),
        options=options,
        address=address,
    )
    return RequestDriver(
        engine=engine,
        filler=filler,
        router=prompt_router,
        vocab_size=vocab_size,
        max_context_tokens=max_context_tokens,
    )
