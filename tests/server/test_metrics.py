from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from prfaas.server.metrics import MAX_REASONS, BoundedLabel, Metrics
from prfaas.server.node import NodeLoad
from prfaas.types import RequestRecord


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What a scrape reads, by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def a_record(**fields: object) -> RequestRecord:
    values: dict[str, object] = {
        "request_id": "r", "prompt_tokens": 10, "route": "remote", "reason": "above_threshold",
        "tokens_reused": 2, "tokens_local": 1, "tokens_remote": 7, "completion_tokens": 5,
        "ttft_s": 0.2,
    }  # fmt: skip
    return RequestRecord(**(values | fields))  # type: ignore[arg-type]


def test_a_finished_request_is_counted_by_route_reason_and_source():
    metrics = Metrics()
    metrics.record_finished(a_record(), e2e_s=1.5)
    metrics.record_finished(a_record(route="local", reason="peer_down: refused"), e2e_s=3.0)
    read = samples(metrics)
    assert read["prfaas_requests_total", (("reason", "above_threshold"), ("route", "remote"))] == 1
    assert read["prfaas_requests_total", (("reason", "peer_down"), ("route", "local"))] == 1
    assert read["prfaas_prompt_tokens_total", (("source", "remote"),)] == 14
    assert read["prfaas_prompt_tokens_total", (("source", "reused"),)] == 4
    assert read["prfaas_prompt_tokens_total", (("source", "local"),)] == 2
    assert read["prfaas_completion_tokens_total", ()] == 10
    assert read["prfaas_e2e_seconds_sum", (("route", "remote"),)] == 1.5
    assert read["prfaas_ttft_seconds_count", (("route", "local"),)] == 1


def test_a_failed_request_is_counted_by_reason_and_in_no_histogram():
    metrics = Metrics()
    metrics.record_failed(None, reason="overloaded")
    metrics.record_failed(a_record(), reason="engine_error")
    read = samples(metrics)
    assert read["prfaas_request_failures_total", (("reason", "overloaded"),)] == 1
    assert read["prfaas_request_failures_total", (("reason", "engine_error"),)] == 1
    assert not any(name.startswith("prfaas_e2e_seconds") for name, _ in read)


def test_gauges_are_what_the_node_says_at_the_scrape():
    metrics = Metrics(version="1", role="pd")
    assert not any(name == "prfaas_requests_running" for name, _ in samples(metrics))
    load = [
        NodeLoad(
            num_running=2,
            num_waiting=1,
            pages={"cached": 4},
            peers_usable={"p:1": False},
            peers_by_http={"p:1": True},
        )
    ]
    metrics.watch(lambda: load[0])
    metrics.set_ready(is_ready=True)
    read = samples(metrics)
    assert read["prfaas_requests_running", ()] == 2
    assert read["prfaas_requests_waiting", ()] == 1
    assert read["prfaas_cache_pages", (("state", "cached"),)] == 4
    assert read["prfaas_cache_pages", (("state", "free"),)] == 0
    assert read["prfaas_peer_usable", (("peer", "p:1"),)] == 0
    assert read["prfaas_peer_by_http", (("peer", "p:1"),)] == 1
    assert read["prfaas_build_info", (("role", "pd"), ("version", "1"))] == 1
    assert read["prfaas_ready", ()] == 1
    load[0] = NodeLoad(num_running=7)
    assert samples(metrics)["prfaas_requests_running", ()] == 7


def test_transfers_are_counted_by_direction_and_outcome():
    metrics = Metrics()
    metrics.transfer_bytes("received", 100)
    metrics.transfer_bytes("received", 50)
    metrics.transfer_finished("received", "completed")
    metrics.transfer_finished("sent", "peer_gone: reset")
    read = samples(metrics)
    assert read["prfaas_kv_bytes_total", (("direction", "received"),)] == 150
    assert (
        read["prfaas_transfers_total", (("direction", "received"), ("outcome", "completed"))] == 1
    )
    assert read["prfaas_transfers_total", (("direction", "sent"), ("outcome", "peer_gone"))] == 1


@settings(deadline=None)
@given(st.lists(st.text() | st.from_regex(r"[a-z_]{1,5}(: x)?", fullmatch=True), max_size=200))
def test_any_reasons_make_a_bounded_number_of_values(reasons):
    label = BoundedLabel(max_values=5)
    values = {label.value(reason) for reason in reasons}
    assert len(values) <= 6
    assert [label.value(reason) for reason in reasons[:1]] == [
        BoundedLabel(max_values=5).value(reason) for reason in reasons[:1]
    ]


def test_a_flood_of_reasons_does_not_grow_the_series():
    metrics = Metrics()
    for number in range(1000):
        metrics.record_failed(None, reason=f"reason_{number}")
    failures = [key for key in samples(metrics) if key[0] == "prfaas_request_failures_total"]
    assert len(failures) == MAX_REASONS + 1


def test_names_have_units_and_counters_end_in_total():
    metrics = Metrics()
    metrics.record_finished(a_record(), e2e_s=1)
    for family in metrics.registry.collect():
        assert family.name.startswith("prfaas_")
        assert family.documentation.endswith(".")
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_ratio"))
        for sample in family.samples:
            if family.type == "counter" and not sample.name.endswith("_created"):
                assert sample.name.endswith("_total")


def test_a_prediction_is_compared_with_what_came():
    metrics = Metrics()
    metrics.record_finished(a_record(ttft_s=0.2, predicted_ttft_s=0.1), e2e_s=1)
    metrics.record_finished(a_record(ttft_s=0.2, predicted_ttft_s=None), e2e_s=1)
    read = samples(metrics)
    assert read["prfaas_ttft_predicted_ratio_sum", (("route", "remote"),)] == 0.5
    assert read["prfaas_ttft_predicted_ratio_count", (("route", "remote"),)] == 1


def test_placements_and_retries_are_counted_of_requests_that_a_scheduler_placed():
    metrics = Metrics()
    metrics.record_finished(a_record(), e2e_s=1)
    metrics.record_finished(a_record(node="n:1", node_reason="prefix"), e2e_s=1)
    metrics.record_failed(a_record(node="n:1", node_reason="spilled", retries=2), reason="internal")
    read = samples(metrics)
    placed = {
        labels[0][1]: value
        for (name, labels), value in read.items()
        if name.startswith("prfaas_placements_total")
    }
    assert placed == {"prefix": 1, "spilled": 1}
    assert read["prfaas_retries_total", ()] == 2


def test_recent_times_and_balance_are_there_once_there_is_something_to_say():
    metrics = Metrics(clock=lambda: 0.0)
    assert not any("recent" in name or "producer" in name for name, _ in samples(metrics))
    for ttft_s in (0.1, 0.2, 0.3, 0.4):
        metrics.record_finished(a_record(ttft_s=ttft_s), e2e_s=1)
    metrics.record_token_gap(0.01)
    for _ in range(3):
        metrics.record_begun()
    metrics.record_ended()
    read = samples(metrics)
    assert read["prfaas_ttft_recent_seconds", (("quantile", "0.5"),)] == 0.2
    assert read["prfaas_ttft_recent_seconds", (("quantile", "0.9"),)] == 0.4
    assert read["prfaas_itl_recent_seconds", (("quantile", "0.9"),)] == 0.01
    assert read["prfaas_producer_consumer_ratio", ()] == 3
