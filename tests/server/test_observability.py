"""docs/observability.md and the code list the same metrics and the same log events."""

import ast
import re
from pathlib import Path

from prfaas.cache.lookups import LookupCounts
from prfaas.cache.store import StoreStats
from prfaas.cache.store_types import RecordCounts, RecordStats
from prfaas.scheduler.fleet import Member
from prfaas.scheduler.heartbeat import Heartbeat
from prfaas.scheduler.view import PeerView
from prfaas.server.fleet_view import FleetView, MemberView, RoutingView
from prfaas.server.metrics import Metrics
from prfaas.server.node import NodeLoad
from prfaas.transport.link_state import LinkState
from prfaas.types import RequestRecord

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "observability.md").read_text()
LEVELS = {"debug", "info", "warning", "error", "exception"}


MEMBER = MemberView(scheduler="s:1", name="n:1", cluster="eu", mode="both", state="joined")
STORE = StoreStats(
    records=RecordStats(
        num_records=1,
        live_bytes=2,
        segment_bytes=3,
        other_bytes=0,
        num_segments=1,
        tenant_bytes={b"t": 2},
        oldest_s=None,
        is_broken=False,
        counts=RecordCounts(),
    ),
    quota_bytes=4,
    num_queued=0,
    queued_bytes=0,
    num_dropped_full=0,
    num_dropped_failing=0,
    num_dropped_large=0,
    num_failures=0,
)


def table_rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, code marks removed."""
    section = DOCUMENT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in rows]


def exercised() -> Metrics:
    """Metrics in which every family has a sample."""
    metrics = Metrics()
    record = RequestRecord(
        request_id="r",
        prompt_tokens=1,
        ttft_s=0.1,
        predicted_ttft_s=0.1,
        node="n:1",
        node_reason="only",
    )
    metrics.record_begun()
    metrics.record_ended()
    metrics.record_http(route_template="/health", method="GET", status=200)
    metrics.record_finished(record, e2e_s=1.0)
    metrics.record_failed(record, reason="overloaded")
    metrics.record_token_gap(0.01)
    metrics.transfer_bytes("sent", 1)
    metrics.transfer_finished("sent", "completed")
    metrics.watch(
        lambda: NodeLoad(
            links={"peer": LinkState().view()},
            peers_usable={"peer": True},
            peers_by_http={"peer": False},
            lookups=LookupCounts(),
            store=STORE,
            prefill_tokens_per_s=1.0,
            decode_step_s=0.1,
            routing=RoutingView(policy="predictive", threshold_tokens=512, egress_target=0.7),
            member=MEMBER,
            peers={"peer": PeerView(peer="peer", prefill_tokens_per_s=1.0, link_bytes_per_s=1.0)},
        )
    )
    return metrics


def exercised_scheduler() -> Metrics:
    """The same of a scheduler, whose families a node does not fill."""
    metrics = Metrics()
    beat = Heartbeat(node="n:1", role="pd", cluster="eu", epoch=1)
    member = Member(
        heartbeat=beat,
        numerics="",
        state="ready",
        wanted_mode=None,
        age_s=0.5,
        num_inflight=0,
        num_active=0,
        queue_tokens=0,
    )
    view = FleetView(members=(member,), threshold_tokens={"eu": 512.0})
    metrics.watch(lambda: NodeLoad(fleet=view))
    return metrics


def test_the_table_of_metrics_is_what_a_scrape_gives():
    scraped = set()
    of_scheduler = {f.name: f for f in exercised_scheduler().registry.collect() if f.samples}
    for filled in exercised().registry.collect():
        family = filled if filled.samples else of_scheduler.get(filled.name, filled)
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        scraped.add((name, family.type, ", ".join(sorted(labels)) or "-"))
    told = {(name, kind, labels) for name, kind, labels, _ in table_rows("Metrics")}
    assert told == scraped


def logged_events() -> dict[str, set[str]]:
    """Event -> the fields that its calls give, of all log calls in the package."""
    events: dict[str, set[str]] = {}
    for path in sorted((ROOT / "prfaas").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LEVELS
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and re.fullmatch(r"[a-z_]+\.[a-z_]+", event := str(node.args[0].value))
            ):
                names = {keyword.arg for keyword in node.keywords if keyword.arg} - {"exc_info"}
                events.setdefault(event, set()).update(names)
    return events


def test_the_table_of_log_events_is_what_the_code_logs():
    told = {
        event: set(filter(None, fields.replace("-", "").split(", ")))
        for event, _, fields, _ in table_rows("Log events")
    }
    assert told == logged_events()
