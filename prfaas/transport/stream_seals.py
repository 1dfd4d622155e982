"""Which seals guard the frames of a stream: MACs where nothing else does, checksums elsewhere."""

from typing import NamedTuple

from prfaas.transport.auth import Session
from prfaas.transport.seals import FrameSeal, MacSeal, NumberedChecksumSeal


class StreamSeals(NamedTuple):
    """One for each direction; both ends of a stream make equal ones."""

    peer: FrameSeal
    """Of what the prefill node sends."""
    asker: FrameSeal


def stream_seals(session: Session | None, stream_id: str, *, is_tls: bool) -> StreamSeals:
    """Return the seals of a new stream; `session` is None where no cluster key is used."""
    if session is None or is_tls:
        return StreamSeals(NumberedChecksumSeal(), NumberedChecksumSeal())
    return StreamSeals(
        MacSeal(session.frame_key(stream_id, "peer")),
        MacSeal(session.frame_key(stream_id, "asker")),
    )
