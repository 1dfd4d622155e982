"""Frames of a stream: what was moved, repeated or left out does not verify; under a MAC, what was changed or reflected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ProtocolError
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.decoder import FrameDecoder
from prfaas.transport.seals import MAC_BYTES, FrameSeal, MacSeal, NumberedChecksumSeal
from prfaas.transport.wire import (
    FROM_SENDER,
    UNTAGGED_BYTES,
    DamagedFrame,
    FrameType,
    encode_frame,
    refuse_pages,
)

KEY = ClusterKey(b"k" * 16)


def frames(
    key: ClusterKey | None = KEY, texts: tuple[bytes, ...] = (b"one", b"two", b"three")
) -> list[bytes]:
    seal = seal_of(key)
    return [encode_frame(FrameType.ERROR, text, seal) for text in texts]


def seal_of(key: ClusterKey | None) -> FrameSeal:
    """Return that of a stream, a checksum if there is no key."""
    return NumberedChecksumSeal() if key is None else MacSeal(key)


def decode(data: bytes | bytearray, key: ClusterKey | None = KEY) -> list[bytes]:
    decoder = FrameDecoder(allowed=FROM_SENDER, resolve=refuse_pages, seal=seal_of(key))
    texts, rest = [], memoryview(data)
    while rest:
        target = decoder.buffer()
        part = rest[: len(target)]
        target[: len(part)] = part
        rest = rest[len(part) :]
        if (frame := decoder.received(len(part))) is not None:
            texts.append(frame.payload)
    decoder.ended()
    return texts


@pytest.mark.parametrize("key", [KEY, None])
def test_frames_in_order_verify(key):
    assert decode(b"".join(frames(key)), key) == [b"one", b"two", b"three"]


@pytest.mark.parametrize("key", [KEY, None])
@pytest.mark.parametrize("order", [(1,), (0, 0), (0, 2), (1, 0), (0, 1, 1)])
def test_frames_out_of_their_order_are_damage(order, key):
    made = frames(key)
    with pytest.raises(DamagedFrame, match="MAC mismatch"):
        decode(b"".join(made[index] for index in order), key)


def test_another_key_does_not():
    with pytest.raises(ProtocolError, match="MAC mismatch"):
        decode(b"".join(frames()), ClusterKey(b"l" * 16))


@given(position=st.integers(0, UNTAGGED_BYTES + MAC_BYTES + 2), bit=st.integers(0, 7))
def test_no_bit_can_be_changed(position, bit):
    (data,) = frames(texts=(b"one",))
    damaged = bytearray(data)
    damaged[position] ^= 1 << bit
    with pytest.raises(ProtocolError):
        decode(damaged)


def test_a_checksum_is_no_mac():
    with pytest.raises(ProtocolError):
        decode(encode_frame(FrameType.ERROR, b"a plain frame that is long enough"))
