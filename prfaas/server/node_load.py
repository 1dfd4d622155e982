"""How busy a node is, put together from its engine and its pool."""

from collections.abc import Mapping

from prfaas.cache.prefix import PrefixCache
from prfaas.scheduler.view import PeerView
from prfaas.server.engine_thread import EngineThread
from prfaas.server.fleet_view import MemberView, RoutingView
from prfaas.server.node import NodeLoad
from prfaas.transport.link_state import LinkView


def node_load(
    engine: EngineThread,
    cache: PrefixCache,
    *,
    num_transfers: int,
    peers_usable: Mapping[str, bool] | None = None,
    peers: Mapping[str, PeerView] | None = None,
    routing: RoutingView | None = None,
    member: MemberView | None = None,
    peers_by_http: Mapping[str, bool] | None = None,
    links: Mapping[str, LinkView] | None = None,
) -> NodeLoad:
    """Return one look at both; the page states add up to all pages."""
    load, counts = engine.load(), cache.counts()
    return NodeLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_waiting_tokens=load.num_waiting_tokens,
        num_decoding=load.num_decoding,
        prefill_tokens_per_s=load.prefill_tokens_per_s or None,
        decode_step_s=load.decode_step_s,
        num_transfers=num_transfers,
        pages={
            "free": counts.num_free,
            "referenced": counts.num_referenced - counts.num_transfer,
            "cached": counts.num_cached,
            "transfer": counts.num_transfer,
        },
        peers_usable=peers_usable or {},
        peers=peers or {},
        routing=routing,
        member=member,
        peers_by_http=peers_by_http or {},
        links=links or {},
        lookups=counts.lookups,
        num_evictions=counts.num_evictions,
        store=None if cache.tier is None else cache.tier.store.stats(),
    )
