"""Every line of an answer is proven, in its place; any cut of the bytes gives the same lines."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ProtocolError, UntrustedPeer
from prfaas.transport.auth import Caller, Session
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.signed_lines import LineReader, LineSigner, answer_key, line_key

KEY = ClusterKey(b"a cluster's secret")
MAX_BYTES = 200

texts = st.lists(st.binary(max_size=40).map(lambda text: text.replace(b"\n", b"")), max_size=6)


@given(texts=texts, has_key=st.booleans(), cuts=st.lists(st.integers(0, 600), max_size=8))
def test_lines_come_as_they_were_said_however_the_bytes_are_cut(texts, has_key, cuts):
    key = KEY if has_key else None
    signer, reader = LineSigner(key), LineReader(key, max_line_bytes=MAX_BYTES)
    data = b"".join(signer.seal(text) for text in texts)
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    got = []
    for start, stop in itertools.pairwise(places):
        got += reader.received(data[start:stop])
    assert got == texts
    assert reader.is_between_lines


def test_half_a_line_is_no_line():
    reader = LineReader(None, max_line_bytes=MAX_BYTES)
    assert reader.received(b"half") == []
    assert not reader.is_between_lines


@given(position=st.integers(0, 2), flip=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_changed_line_is_not_believed(position, flip, bit):
    signer = LineSigner(KEY)
    lines = [bytearray(signer.seal(text)) for text in (b"one", b"two", b"three")]
    index = flip % (len(lines[position]) - 1)
    lines[position][index] ^= 1 << bit
    reader = LineReader(KEY, max_line_bytes=MAX_BYTES)
    with pytest.raises(UntrustedPeer):
        reader.received(b"".join(lines))


@pytest.mark.parametrize("order", [(1,), (0, 2), (0, 0), (0, 1, 1), (1, 0)])
def test_a_missing_repeated_or_moved_line_is_not_believed(order):
    signer = LineSigner(KEY)
    lines = [signer.seal(text) for text in (b"one", b"two", b"three")]
    reader = LineReader(KEY, max_line_bytes=MAX_BYTES)
    with pytest.raises(UntrustedPeer):
        reader.received(b"".join(lines[index] for index in order))


def test_a_line_of_another_answer_is_not_believed():
    session = Session("s", KEY)
    line = LineSigner(answer_key(session, 1)).seal(b"one")
    assert line_key(Caller(session, 1)) is not None
    assert LineReader(line_key(Caller(session, 1)), max_line_bytes=MAX_BYTES).received(line) == [
        b"one"
    ]
    with pytest.raises(UntrustedPeer):
        LineReader(answer_key(session, 2), max_line_bytes=MAX_BYTES).received(line)


def test_where_nobody_proves_anything_lines_are_plain():
    assert line_key(None) is None
    assert LineSigner(None).seal(b"{}") == b"{}\n"


def test_an_endless_line_is_refused_before_it_fills_memory():
    reader = LineReader(None, max_line_bytes=MAX_BYTES)
    reader.received(b"x" * MAX_BYTES)
    with pytest.raises(ProtocolError):
        reader.received(b"x")
