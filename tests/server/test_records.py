from prfaas.server.records import RecordRing
from prfaas.types import RequestRecord


def record(name: str) -> RequestRecord:
    return RequestRecord(request_id=name, prompt_tokens=1)


def test_the_ring_keeps_the_latest_and_forgets_the_oldest():
    ring = RecordRing(max_records=3)
    for name in "abcd":
        ring.add(record(name))
    assert ring.get("a") is None
    assert [kept.request_id for kept in ring.latest(10)] == ["d", "c", "b"]
    assert [kept.request_id for kept in ring.latest(1)] == ["d"]


def test_a_record_added_again_is_the_latest():
    ring = RecordRing(max_records=2)
    first = record("a")
    for added in (first, record("b"), first, record("c")):
        ring.add(added)
    assert ring.get("a") is first
    assert ring.get("b") is None
