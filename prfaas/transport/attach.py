"""ATTACH: an asker's word that a stream carries a transfer from here on, and what it lost on others."""

from dataclasses import dataclass
from typing import Any

from prfaas.errors import ProtocolError
from prfaas.transport.fields import count_of, dump, items_of, name_of, parse_object
from prfaas.transport.messages import capability_of

MAX_STREAMS = 1 << 12
"""That one transfer may use one after the other, lost ones included."""
MAX_FRAMES = 1 << 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """One ATTACH frame. May come again on a stream that carries the transfer, to tell of losses."""

    transfer_id: str
    capability: str
    stream: int
    """Number of the stream within the transfer, never used for another connection."""
    resumes: tuple[tuple[int, int], ...] = ()
    """(stream, frames that came whole) of streams that were lost since the last word of them."""


def encode_attach(attach: Attach) -> bytes:
    """Return the payload of ATTACH."""
    return dump(
        {
            "transfer_id": attach.transfer_id,
            "capability": attach.capability,
            "stream": attach.stream,
            "resumes": attach.resumes,
        }
    )


def parse_attach(data: bytes) -> Attach:
    """Return what an ATTACH payload says, or raise ProtocolError."""
    value = parse_object(data)
    return Attach(
        transfer_id=name_of(value, "transfer_id", 32),
        capability=capability_of(value),
        stream=count_of(value, "stream", 0, MAX_STREAMS - 1),
        resumes=tuple(_resume(item) for item in items_of(value, "resumes")),
    )


def _resume(item: Any) -> tuple[int, int]:
    if not isinstance(item, list) or len(item) != 2:
        raise ProtocolError("field resumes has an item that is no pair")
    pair = {"stream": item[0], "frames": item[1]}
    return count_of(pair, "stream", 0, MAX_STREAMS - 1), count_of(pair, "frames", 0, MAX_FRAMES)
