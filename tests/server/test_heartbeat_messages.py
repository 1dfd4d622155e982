"""A heartbeat and its answer round-trip; anything else is a ProtocolError."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.changes import CacheSnapshot, Changes
from prfaas.errors import ProtocolError
from prfaas.scheduler.heartbeat import Heartbeat, LinkReport
from prfaas.server.heartbeat_messages import (
    MAX_MESSAGE_KEYS,
    HeartbeatMessage,
    HeartbeatReply,
    encode_heartbeat,
    encode_leave,
    encode_reply,
    parse_heartbeat,
    parse_leave,
    parse_reply,
)
from tests.server.fleet import IDENTITY
from tests.server.scripted_engine import HYBRID

keys = st.lists(st.binary(min_size=32, max_size=32), max_size=3).map(tuple)
rates = st.none() | st.floats(0, 1e12)
names = st.text("abc.:019", min_size=1, max_size=20)
addresses = st.builds("{}:{}".format, st.sampled_from(["a", "b.c", "[::1]"]), st.integers(1, 65535))
messages = st.builds(
    HeartbeatMessage,
    heartbeat=st.builds(
        Heartbeat,
        node=addresses,
        role=st.sampled_from(["pd", "prefill"]),
        cluster=names,
        mode=st.sampled_from(["prefill", "decode", "both"]),
        epoch=st.integers(0, 2**60),
        is_ready=st.booleans(),
        reason=st.text("abc ", max_size=20),
        is_draining=st.booleans(),
        num_running=st.integers(0, 1000),
        num_waiting=st.integers(0, 1000),
        max_running=st.integers(1, 1000),
        num_waiting_tokens=st.integers(0, 2**40),
        prefill_tokens_per_s=rates,
        decode_step_s=rates,
        free_pages_fraction=st.floats(0, 1),
        free_kv_bytes=st.one_of(st.none(), st.integers(0, 1 << 50)),
        links=st.dictionaries(
            names,
            st.builds(LinkReport, rtt_s=rates, bytes_per_s=rates, retransmit_fraction=rates),
            max_size=3,
        ),
        peers_usable=st.dictionaries(names, st.booleans(), max_size=3),
    ),
    identity=st.just(IDENTITY),
    layout=st.just(HYBRID),
    max_context_tokens=st.integers(1, 2**31 - 1),
    changes=st.none()
    | st.builds(
        Changes,
        epoch=st.integers(0, 2**60),
        sequence=st.integers(1, 2**60),
        added=keys,
        removed=keys,
        places_added=keys,
        places_removed=keys,
    ),
    snapshot=st.none()
    | st.builds(
        CacheSnapshot,
        epoch=st.integers(0, 2**60),
        sequence=st.integers(0, 2**60),
        keys=keys,
        places=keys,
    ),
)
BEAT = HeartbeatMessage(
    heartbeat=Heartbeat(
        node="127.0.0.1:8000",
        role="pd",
        cluster="default",
        epoch=1,
        links={"127.0.0.1:8100": LinkReport(rtt_s=0.01)},
        peers_usable={"127.0.0.1:8100": True},
    ),
    identity=IDENTITY,
    layout=HYBRID,
    max_context_tokens=2048,
    changes=Changes(epoch=1, sequence=1, added=(b"k" * 32,)),
    snapshot=CacheSnapshot(epoch=1, sequence=0, keys=(b"k" * 32,)),
)
REPLY = HeartbeatReply(
    is_known=True, wants_snapshot=False, mode="decode", peers=("127.0.0.1:8100",), period_s=1.0
)


@given(message=messages)
def test_a_heartbeat_round_trips(message):
    assert parse_heartbeat(encode_heartbeat(message)) == message


@pytest.mark.parametrize("reply", [REPLY, replace(REPLY, mode=None, peers=(), is_known=False)])
def test_an_answer_round_trips(reply):
    assert parse_reply(encode_reply(reply)) == reply


def test_a_leave_round_trips():
    assert parse_leave(encode_leave("[::1]:8000", 7)) == ("[::1]:8000", 7)


def _changed(data: bytes, path: tuple[str, ...], to: Any) -> bytes:
    value = json.loads(data)
    inner = value
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = to
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("path", "to"),
    [
        (("node",), ""), (("node",), 5), (("node",), "a\nb"), (("node",), "[:]:1"), (("node",), "u@h:1"), (("role",), "scheduler"), (("mode",), "all"),
        (("epoch",), -1), (("epoch",), True), (("is_ready",), None), (("max_running",), 0),
        (("num_waiting_tokens",), 1.5), (("prefill_tokens_per_s",), -1), (("decode_step_s",), "x"),
        (("free_pages_fraction",), 1.1), (("free_kv_bytes",), -1), (("free_kv_bytes",), 1.5), (("links",), []), (("links", "a"), [1, 2]), (("links", "a"), [1, 2, -3]),
        (("links",), {"x" * 257: [1, 2, 3]}), (("links",), {str(n): [1, 2, 3] for n in range(1025)}),
        (("peers_usable", "a"), 1), (("identity",), {}), (("layout",), None), (("layout", "block_tokens"), 0),
        (("max_context_tokens",), 0), (("changes",), []), (("changes", "sequence"), 0),
        (("changes", "added"), "AAAA"), (("changes", "removed"), "?"), (("snapshot", "keys"), None),
        (("snapshot", "epoch"), "1"),
    ],
)  # fmt: skip
def test_a_damaged_heartbeat_is_refused(path, to):
    data = encode_heartbeat(BEAT)
    assert parse_heartbeat(data) == BEAT
    with pytest.raises(ProtocolError):
        parse_heartbeat(_changed(data, path, to))


@pytest.mark.parametrize(
    ("field", "to"),
    [("mode", "all"), ("peers", [5]), ("peers", "x"), ("period_s", 0), ("period_s", 1e9), ("is_known", 1)],
)  # fmt: skip
def test_a_damaged_answer_is_refused(field, to):
    with pytest.raises(ProtocolError):
        parse_reply(_changed(encode_reply(REPLY), (field,), to))


def test_a_snapshot_of_too_many_keys_is_refused():
    too_many = "A" * (4 * (MAX_MESSAGE_KEYS * 32 // 3 + 11) // 4 * 4)
    with pytest.raises(ProtocolError):
        parse_heartbeat(_changed(encode_heartbeat(BEAT), ("snapshot", "keys"), too_many))
