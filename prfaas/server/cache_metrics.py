"""The prefix cache's metrics, made at each scrape from what cache and store count themselves."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from prfaas.cache.lookups import LookupCounts
from prfaas.cache.store import StoreStats
from prfaas.server.node import NodeLoad

Family = CounterMetricFamily | GaugeMetricFamily


def cache_families(load: NodeLoad) -> Iterator[Family]:
    """Yield the families; without samples for a tier that the node does not have."""
    yield from _lookup_families(load.lookups, load.num_evictions)
    yield from _store_families(load.store)


def _lookup_families(lookups: LookupCounts | None, num_evictions: int) -> Iterator[Family]:
    asked = CounterMetricFamily("prfaas_cache_lookup_tokens", "Prompt tokens looked up.")
    hits = CounterMetricFamily(
        "prfaas_cache_hit_tokens", "Prompt tokens found, by tier.", labels=["tier"]
    )
    misses = CounterMetricFamily(
        "prfaas_cache_misses", "Lookups that found less than all, by why.", labels=["reason"]
    )
    evictions = CounterMetricFamily("prfaas_cache_evictions", "Blocks evicted from RAM.")
    if lookups is not None:
        asked.add_metric([], lookups.num_query_tokens)
        hits.add_metric(["ram"], lookups.num_ram_tokens)
        hits.add_metric(["disk"], lookups.num_disk_tokens)
        for reason, number in lookups.misses.items():
            misses.add_metric([reason], number)
        evictions.add_metric([], num_evictions)
    yield from (asked, hits, misses, evictions)


def _store_families(stats: StoreStats | None) -> Iterator[Family]:
    sizes = GaugeMetricFamily("prfaas_store_bytes", "Bytes of the disk tier.", labels=["state"])
    records = GaugeMetricFamily("prfaas_store_records_held", "Records on disk.")
    io = CounterMetricFamily(
        "prfaas_store_io_bytes", "Bytes moved to and from disk.", labels=["direction"]
    )
    events = CounterMetricFamily(
        "prfaas_store_records", "What became of records.", labels=["event"]
    )
    if stats is not None:
        held, counts = stats.records, stats.records.counts
        sizes.add_metric(["live"], held.live_bytes)
        sizes.add_metric(["files"], held.segment_bytes)
        sizes.add_metric(["queued"], stats.queued_bytes)
        sizes.add_metric(["quota"], stats.quota_bytes)
        records.add_metric([], held.num_records)
        io.add_metric(["written"], counts.stored_bytes)
        io.add_metric(["read"], counts.hit_bytes)
        for event, number in (
            ("stored", counts.num_stored),
            ("hit", counts.num_hits),
            ("missed", counts.num_misses),
            ("damaged", counts.num_damaged),
            ("evicted", counts.num_evicted),
            ("expired", counts.num_expired),
            ("dropped_full", stats.num_dropped_full),
            ("dropped_failing", stats.num_dropped_failing),
            ("dropped_large", stats.num_dropped_large),
        ):
            events.add_metric([event], number)
    yield from (sizes, records, io, events)
