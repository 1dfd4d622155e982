"""The JSON of heartbeats: what a node tells its scheduler each second, and what it hears back.

Every field is checked and every list bounded; what is wrong is a ProtocolError that names the field.
Keys of blocks travel as one string of base64: a list of strings would be read ten times as slowly.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from prfaas.cache.changes import CacheSnapshot, Changes
from prfaas.cache.layout_json import encode_layout, parse_layout
from prfaas.cache.spec import CacheLayout
from prfaas.errors import ProtocolError
from prfaas.scheduler.heartbeat import Heartbeat, LinkReport, Mode, NodeRole
from prfaas.transport.address import parse_address
from prfaas.transport.fields import (
    MAX_TOKEN_ID,
    binary_of,
    count_of,
    dump,
    items_of,
    number_of,
    parse_object,
    shown,
    typed,
)
from prfaas.transport.fleet_messages import MAX_COUNT, MAX_NODE_CHARS, node_of, seconds_or_none
from prfaas.transport.handshake import Identity, parse_identity

KEY_BYTES = 32
MAX_MESSAGE_KEYS = 1 << 18
"""Keys, and as many places, in one message: 16 million tokens in blocks of 64."""
INLINE_KEYS = 4096
"""So many are encoded or read in some milliseconds; a message of more in a thread, beside the loop."""
INLINE_BYTES = INLINE_KEYS * KEY_BYTES * 3 // 2
MAX_LINKS = 1024
MAX_PERIOD_S = 60.0

Name = TypeVar("Name", bound=str)
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatMessage:
    """What a node says of itself, of what it computes, and of what its cache has come to hold."""

    heartbeat: Heartbeat
    identity: Identity
    layout: CacheLayout
    max_context_tokens: int
    changes: Changes | None = None
    """Since the message before; None if there were none, or a snapshot says it all."""
    snapshot: CacheSnapshot | None = None
    """If the scheduler has asked for one."""

    @property
    def num_keys(self) -> int:
        """Return how many keys and places it names."""
        changes, snapshot = self.changes, self.snapshot
        of_snapshot = () if snapshot is None else (snapshot.keys, snapshot.places)
        if changes is None:
            return sum(map(len, of_snapshot))
        added = (changes.added, changes.removed, changes.places_added, changes.places_removed)
        return sum(map(len, (*of_snapshot, *added)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply:
    """What the scheduler wants of a node."""

    is_known: bool
    """It knew the node, in this life of the node's, before this heartbeat."""
    wants_snapshot: bool
    mode: Mode | None
    """To take from now on; None is as it is."""
    peers: tuple[str, ...]
    """Nodes that this one may be told to exchange KVCache with: connections to them can be kept."""
    period_s: float
    """Until the next heartbeat."""


def encode_heartbeat(message: HeartbeatMessage) -> bytes:
    """Return the body of POST /fleet/v1/heartbeat."""
    beat = message.heartbeat
    return dump(
        {
            "node": beat.node,
            "role": beat.role,
            "cluster": beat.cluster,
            "mode": beat.mode,
            "epoch": beat.epoch,
            "is_ready": beat.is_ready,
            "reason": beat.reason,
            "is_draining": beat.is_draining,
            "num_running": beat.num_running,
            "num_waiting": beat.num_waiting,
            "max_running": beat.max_running,
            "num_waiting_tokens": beat.num_waiting_tokens,
            "prefill_tokens_per_s": beat.prefill_tokens_per_s,
            "decode_step_s": beat.decode_step_s,
            "free_pages_fraction": beat.free_pages_fraction,
            "free_kv_bytes": beat.free_kv_bytes,
            "links": {
                node: [link.rtt_s, link.bytes_per_s, link.retransmit_fraction]
                for node, link in beat.links.items()
            },
            "peers_usable": dict(beat.peers_usable),
            "identity": message.identity.to_json(),
            "layout": encode_layout(message.layout),
            "max_context_tokens": message.max_context_tokens,
            "changes": None if message.changes is None else _encode_changes(message.changes),
            "snapshot": None if message.snapshot is None else _encode_snapshot(message.snapshot),
        }
    )


def parse_heartbeat(data: bytes) -> HeartbeatMessage:
    """Return the heartbeat in `data`, or raise ProtocolError naming the field at fault."""
    value = parse_object(data)
    return HeartbeatMessage(
        heartbeat=_parse_beat(value),
        identity=parse_identity(value.get("identity")),
        layout=_layout_of(value),
        max_context_tokens=count_of(value, "max_context_tokens", 1, MAX_TOKEN_ID),
        changes=_optional(value, "changes", _parse_changes),
        snapshot=_optional(value, "snapshot", _parse_snapshot),
    )


def encode_reply(reply: HeartbeatReply) -> bytes:
    """Return the answer to a heartbeat."""
    return dump(
        {
            "is_known": reply.is_known,
            "wants_snapshot": reply.wants_snapshot,
            "mode": reply.mode,
            "peers": reply.peers,
            "period_s": reply.period_s,
        }
    )


def parse_reply(data: bytes) -> HeartbeatReply:
    """Return the answer in `data`, or raise ProtocolError naming the field at fault."""
    value = parse_object(data)
    return HeartbeatReply(
        is_known=typed(value, "is_known", bool),
        wants_snapshot=typed(value, "wants_snapshot", bool),
        mode=None if value.get("mode") is None else one_of(value, "mode", get_args(Mode)),
        peers=tuple(node_of({"peers": item}, "peers") for item in items_of(value, "peers")),
        period_s=number_of(value, "period_s", 0.01, MAX_PERIOD_S),
    )


def encode_leave(node: str, epoch: int) -> bytes:
    """Return the body of POST /fleet/v1/leave: this life of the node ends."""
    return dump({"node": node, "epoch": epoch})


def parse_leave(data: bytes) -> tuple[str, int]:
    """Return the node that leaves and the life of it that ends, or raise ProtocolError."""
    value = parse_object(data)
    return node_of(value, "node"), count_of(value, "epoch", 0, MAX_COUNT)


def _parse_beat(value: dict[str, Any]) -> Heartbeat:
    return Heartbeat(
        node=_address_of(value, "node"),
        role=one_of(value, "role", get_args(NodeRole)),
        cluster=node_of(value, "cluster"),
        mode=one_of(value, "mode", get_args(Mode)),
        epoch=count_of(value, "epoch", 0, MAX_COUNT),
        is_ready=typed(value, "is_ready", bool),
        reason=shown(typed(value, "reason", str)),
        is_draining=typed(value, "is_draining", bool),
        num_running=count_of(value, "num_running", 0, MAX_TOKEN_ID),
        num_waiting=count_of(value, "num_waiting", 0, MAX_TOKEN_ID),
        max_running=count_of(value, "max_running", 1, MAX_TOKEN_ID),
        num_waiting_tokens=count_of(value, "num_waiting_tokens", 0, MAX_COUNT),
        prefill_tokens_per_s=seconds_or_none(value, "prefill_tokens_per_s"),
        decode_step_s=seconds_or_none(value, "decode_step_s"),
        free_pages_fraction=number_of(value, "free_pages_fraction", 0, 1),
        free_kv_bytes=(
            None
            if value.get("free_kv_bytes") is None
            else count_of(value, "free_kv_bytes", 0, MAX_COUNT)
        ),
        links=_mapping_of(value, "links", _parse_link),
        peers_usable=_mapping_of(value, "peers_usable", _parse_flag),
    )


def _address_of(value: dict[str, Any], name: str) -> str:
    """Return the field, a name at which the scheduler and other nodes can try to reach a node."""
    text = node_of(value, name)
    try:
        parse_address(text)
    except ValueError as error:
        raise ProtocolError(f"field {name} names no host and port") from error
    return text


def one_of(value: dict[str, Any], name: str, names: tuple[Name, ...]) -> Name:
    """Return the field, which is one of `names`."""
    text = typed(value, name, str)
    if text not in names:
        raise ProtocolError(f"field {name} is not one of {', '.join(names)}")
    return text


def _layout_of(value: dict[str, Any]) -> CacheLayout:
    try:
        return parse_layout(value.get("layout"))
    except ValueError as error:
        raise ProtocolError(f"field {error}") from error


def _optional(
    value: dict[str, Any], name: str, parse: Callable[[dict[str, Any]], Item]
) -> Item | None:
    return None if value.get(name) is None else parse(typed(value, name, dict))


def _mapping_of(
    value: dict[str, Any], name: str, parse: Callable[[object], Item]
) -> Mapping[str, Item]:
    fields = typed(value, name, dict)
    if len(fields) > MAX_LINKS or any(len(node) > MAX_NODE_CHARS for node in fields):
        raise ProtocolError(f"field {name} has {len(fields)} nodes or a long name")
    return {node: parse(item) for node, item in fields.items()}


def _parse_link(item: object) -> LinkReport:
    if not isinstance(item, list) or len(item) != 3:
        raise ProtocolError("field links has an item that is no link")
    fields = dict(zip(("rtt_s", "bytes_per_s", "retransmit_fraction"), item, strict=True))
    return LinkReport(**{name: seconds_or_none(fields, name) for name in fields})


def _parse_flag(item: object) -> bool:
    if not isinstance(item, bool):
        raise ProtocolError("field peers_usable has an item that is no boolean")
    return item


def _encode_changes(changes: Changes) -> dict[str, object]:
    return {
        "epoch": changes.epoch,
        "sequence": changes.sequence,
        "added": _encode_keys(changes.added),
        "removed": _encode_keys(changes.removed),
        "places_added": _encode_keys(changes.places_added),
        "places_removed": _encode_keys(changes.places_removed),
    }


def _parse_changes(value: dict[str, Any]) -> Changes:
    return Changes(
        epoch=count_of(value, "epoch", 0, MAX_COUNT),
        sequence=count_of(value, "sequence", 1, MAX_COUNT),
        added=_keys_of(value, "added"),
        removed=_keys_of(value, "removed"),
        places_added=_keys_of(value, "places_added"),
        places_removed=_keys_of(value, "places_removed"),
    )


def _encode_snapshot(snapshot: CacheSnapshot) -> dict[str, object]:
    return {
        "epoch": snapshot.epoch,
        "sequence": snapshot.sequence,
        "keys": _encode_keys(snapshot.keys),
        "places": _encode_keys(snapshot.places),
    }


def _parse_snapshot(value: dict[str, Any]) -> CacheSnapshot:
    return CacheSnapshot(
        epoch=count_of(value, "epoch", 0, MAX_COUNT),
        sequence=count_of(value, "sequence", 0, MAX_COUNT),
        keys=_keys_of(value, "keys"),
        places=_keys_of(value, "places"),
    )


def _encode_keys(keys: Sequence[bytes]) -> str:
    assert len(keys) <= MAX_MESSAGE_KEYS, f"{len(keys)} keys in one message"
    return base64.b64encode(b"".join(keys)).decode()


def _keys_of(value: dict[str, Any], name: str) -> tuple[bytes, ...]:
    data = binary_of(value, name)
    if len(data) % KEY_BYTES or len(data) > MAX_MESSAGE_KEYS * KEY_BYTES:
        raise ProtocolError(f"field {name} has {len(data)} bytes, which are no keys or too many")
    return tuple(data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES))
