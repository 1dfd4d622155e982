"""Every metric of a node, in a registry of its own; `docs/observability.md` lists them.

Label values are bounded: what comes from outside is mapped to a fixed set first, so that no client
can make a series.
"""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from prfaas.clock import Clock, monotonic_s
from prfaas.server.cache_metrics import Family, cache_families
from prfaas.server.fleet_metrics import routing_families
from prfaas.server.link_metrics import link_families
from prfaas.server.node import NodeLoad, PageState
from prfaas.server.recent import Balance, RecentTimes
from prfaas.types import RequestRecord

Series = TypeVar("Series", Counter, Histogram)
Direction = Literal["received", "sent"]

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
OTHER = "other"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
MAX_REASONS = 32
"""Distinct reasons kept as label values; what comes later counts as "other"."""
MAX_SERIES = 1024
"""That are kept at hand; what is left out is looked up."""
PAGE_STATES: tuple[PageState, ...] = ("free", "referenced", "cached", "transfer")

_REASON = re.compile(r"[a-z][a-z0-9_]{0,39}")
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10)
QUANTILES = (0.5, 0.9)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class BoundedLabel:
    """Maps text to at most `max_values` label values, then to "other".

    The value is the text up to its first colon if that is a plain word: "peer_down: refused" counts
    as "peer_down".
    """

    def __init__(self, max_values: int = MAX_REASONS) -> None:
        self._max_values = max_values
        self._seen: set[str] = set()

    def value(self, text: str) -> str:
        """Return the label value of `text`."""
        word = text.partition(":")[0].strip()
        if word in self._seen:
            return word
        if not _REASON.fullmatch(word) or len(self._seen) >= self._max_values:
            return OTHER
        self._seen.add(word)
        return word


def _children(family: Series) -> Callable[..., Series]:
    """Return what gives the series of label values; each is looked up in the family once."""
    return functools.lru_cache(MAX_SERIES)(family.labels)


class _LoadCollector(Collector):
    """Gauges read from the node at scrape time; absent while there is no node."""

    def __init__(self) -> None:
        self.read: Callable[[], NodeLoad] | None = None

    def describe(self) -> Iterator[Family]:
        """Yield the families without samples: registering must not read the node."""
        yield from _load_families().values()
        yield from cache_families(NodeLoad())
        yield from link_families(NodeLoad())
        yield from routing_families(NodeLoad())

    def collect(self) -> Iterator[Family]:
        """Yield the families as the node is now."""
        families = _load_families()
        if self.read is not None:
            load = self.read()
            families["running"].add_metric([], load.num_running)
            families["waiting"].add_metric([], load.num_waiting)
            families["transfers"].add_metric([], load.num_transfers)
            for state in PAGE_STATES:
                families["pages"].add_metric([state], load.pages.get(state, 0))
            for peer, is_usable in load.peers_usable.items():
                families["peers"].add_metric([peer], is_usable)
            for peer, is_by_http in load.peers_by_http.items():
                families["http_peers"].add_metric([peer], is_by_http)
            yield from cache_families(load)
            yield from link_families(load)
            yield from routing_families(load)
        else:
            yield from cache_families(NodeLoad())
            yield from link_families(NodeLoad())
            yield from routing_families(NodeLoad())
        yield from families.values()


def _load_families() -> dict[str, GaugeMetricFamily]:
    return {
        "running": GaugeMetricFamily("prfaas_requests_running", "Requests in the batch."),
        "waiting": GaugeMetricFamily("prfaas_requests_waiting", "Requests not yet in the batch."),
        "transfers": GaugeMetricFamily("prfaas_transfers_in_flight", "KV transfers now under way."),
        "pages": GaugeMetricFamily(
            "prfaas_cache_pages", "Pages of the pool, by what they hold.", labels=["state"]
        ),
        "peers": GaugeMetricFamily(
            "prfaas_peer_usable", "1: prefills may be sent to this peer now.", labels=["peer"]
        ),
        "http_peers": GaugeMetricFamily(
            "prfaas_peer_by_http", "1: KV comes as answers of HTTP from this peer.", labels=["peer"]
        ),
    }


class _RecentCollector(Collector):
    """Gauges of the last requests; absent while there were none."""

    def __init__(self, clock: Clock) -> None:
        self.ttft = RecentTimes()
        self.itl = RecentTimes()
        self.balance = Balance(clock)

    def describe(self) -> Iterator[Family]:
        """Yield the families without samples."""
        yield from _recent_families()

    def collect(self) -> Iterator[Family]:
        """Yield the families as the last requests were."""
        ttft, itl, balance = _recent_families()
        for family, recent in ((ttft, self.ttft), (itl, self.itl)):
            for quantile, value_s in zip(
                QUANTILES, recent.quantiles(*QUANTILES) or (), strict=False
            ):
                family.add_metric([f"{quantile:g}"], value_s)
        ratio = self.balance.ratio
        if ratio is not None:
            balance.add_metric([], ratio)
        yield from (ttft, itl, balance)


def _recent_families() -> tuple[GaugeMetricFamily, ...]:
    quantile = ["quantile"]
    return (
        GaugeMetricFamily("prfaas_ttft_recent_seconds", "TTFT, last requests.", labels=quantile),
        GaugeMetricFamily("prfaas_itl_recent_seconds", "ITL, last tokens.", labels=quantile),
        GaugeMetricFamily(
            "prfaas_producer_consumer_ratio", "Prompts prefilled for each answer that ended."
        ),
    )


class Metrics:
    """The counters and histograms of one node. Every method may be called from any thread."""

    def __init__(self, *, version: str = "", role: str = "", clock: Clock = monotonic_s) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._reasons = BoundedLabel()
        self._failure_reasons = BoundedLabel()
        self._outcomes = BoundedLabel()
        self._load = _LoadCollector()
        self.registry.register(self._load)
        self._recent = _RecentCollector(clock)
        self.registry.register(self._recent)
        self._node_reasons = BoundedLabel()
        build = Gauge("prfaas_build_info", "1, with the build's labels.", ["version", "role"],
                      registry=self.registry)  # fmt: skip
        build.labels(version, role).set(1)
        self._is_ready = Gauge(
            "prfaas_ready", "1: this node takes requests.", registry=self.registry
        )
        self._make_http()
        self._make_requests()
        self._make_transfers()

    def _make_http(self) -> None:
        self._http = _children(
            Counter(
                "prfaas_http_requests_total",
                "HTTP answers, by route template.",
                ["route_template", "method", "status"],
                registry=self.registry,
            )
        )

    def _make_requests(self) -> None:
        registry = self.registry
        self._requests = _children(
            Counter(
                "prfaas_requests_total",
                "Generations that ended, by route and its reason.",
                ["route", "reason"],
                registry=registry,
            )
        )
        self._failures = Counter(
            "prfaas_request_failures_total",
            "Generations that did not end with an answer.",
            ["reason"],
            registry=registry,
        )
        prompt_tokens = Counter(
            "prfaas_prompt_tokens_total",
            "Prompt tokens, by where their KV came from.",
            ["source"],
            registry=registry,
        )
        self._tokens_reused, self._tokens_local, self._tokens_remote = (
            prompt_tokens.labels(source) for source in ("reused", "local", "remote")
        )
        self._completion_tokens = Counter(
            "prfaas_completion_tokens_total", "Tokens drawn.", registry=registry
        )
        self._ttft = _children(
            Histogram(
                "prfaas_ttft_seconds",
                "Arrival to first token.",
                ["route"],
                buckets=_TTFT_BUCKETS,
                registry=registry,
            )
        )
        self._itl = Histogram(
            "prfaas_itl_seconds",
            "Between two tokens of one choice.",
            buckets=_ITL_BUCKETS,
            registry=registry,
        )
        self._e2e = _children(
            Histogram(
                "prfaas_e2e_seconds",
                "Arrival to the end of the answer.",
                ["route"],
                buckets=_TTFT_BUCKETS,
                registry=registry,
            )
        )

        self._ttft_ratio = _children(
            Histogram(
                "prfaas_ttft_predicted_ratio",
                "Predicted over actual TTFT.",
                ["route"],
                buckets=_RATIO_BUCKETS,
                registry=registry,
            )
        )
        self._placements = _children(
            Counter(
                "prfaas_placements_total",
                "Requests that a scheduler placed, by why at that node.",
                ["reason"],
                registry=registry,
            )
        )
        self._retries = Counter(
            "prfaas_retries_total",
            "Further nodes that requests were placed at, because one refused or failed.",
            registry=registry,
        )

    def _make_transfers(self) -> None:
        self._kv_bytes = Counter(
            "prfaas_kv_bytes_total",
            "KV bytes moved, verified ones only where received.",
            ["direction"],
            registry=self.registry,
        )
        self._transfers = Counter(
            "prfaas_transfers_total",
            "KV transfers that ended.",
            ["direction", "outcome"],
            registry=self.registry,
        )

    def watch(self, read_load: Callable[[], NodeLoad]) -> None:
        """Read the gauges from `read_load` at every scrape from now on."""
        self._load.read = read_load

    def set_ready(self, is_ready: bool) -> None:
        """Say whether this node takes requests."""
        self._is_ready.set(is_ready)

    def record_http(self, *, route_template: str, method: str, status: int) -> None:
        """Count an HTTP answer; `route_template` must be a registered route's, or "other"."""
        method = method if method in METHODS else OTHER
        self._http(route_template, method, str(status)).inc()

    def record_finished(self, record: RequestRecord, *, e2e_s: float) -> None:
        """Count a generation that gave its answer, `e2e_s` after it arrived."""
        self._requests(record.route, self._reasons.value(record.reason)).inc()
        self._count_tokens(record)
        self._e2e(record.route).observe(e2e_s)
        if record.ttft_s is not None:
            self._ttft(record.route).observe(record.ttft_s)
            self._recent.ttft.add(record.ttft_s)
            if record.predicted_ttft_s is not None and record.ttft_s > 0:
                ratio = record.predicted_ttft_s / record.ttft_s
                self._ttft_ratio(record.route).observe(ratio)

    def record_failed(self, record: RequestRecord | None, *, reason: str) -> None:
        """Count a generation that ended without its whole answer; the record if it got one."""
        self._failures.labels(self._failure_reasons.value(reason)).inc()
        if record is not None:
            self._requests(record.route, self._reasons.value(record.reason)).inc()
            self._count_tokens(record)

    def record_begun(self) -> None:
        """Take note that a prompt is prefilled: its answer has a first token."""
        self._recent.balance.produced()

    def record_ended(self) -> None:
        """Take note that an answer that had begun has ended, whole or not."""
        self._recent.balance.consumed()

    def _count_tokens(self, record: RequestRecord) -> None:
        if record.node is not None:
            self._placements(self._node_reasons.value(record.node_reason or OTHER)).inc()
            self._retries.inc(record.retries)
        self._tokens_reused.inc(record.tokens_reused)
        self._tokens_local.inc(record.tokens_local)
        self._tokens_remote.inc(record.tokens_remote)
        self._completion_tokens.inc(record.completion_tokens)

    def record_token_gap(self, gap_s: float) -> None:
        """Note the time between two tokens of one choice."""
        self._itl.observe(gap_s)
        self._recent.itl.add(gap_s)

    def transfer_bytes(self, direction: Direction, num_bytes: int) -> None:
        """Count KV bytes as they move."""
        self._kv_bytes.labels(direction).inc(num_bytes)

    def transfer_finished(self, direction: Direction, outcome: str) -> None:
        """Count a KV transfer that ended; `outcome` is "completed" or what ended it."""
        self._transfers.labels(direction, self._outcomes.value(outcome)).inc()

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)
