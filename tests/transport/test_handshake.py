"""A difference is refused with both values named, before any work."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import IncompatiblePeer, ProtocolError
from prfaas.transport.handshake import Identity, check_compatible, parse_identity
from tests.transport.samples import IDENTITY

OTHER = {"block_tokens": 32, "protocol_version": 9}
NAMES = [field.name for field in fields(Identity)]


def test_equal_identities_are_exact():
    assert check_compatible(IDENTITY, replace(IDENTITY), accept_approximate=False)


@pytest.mark.parametrize("accept_approximate", [False, True])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "numerics_fingerprint"])
def test_any_difference_but_numerics_is_refused_with_both_values(name, accept_approximate):
    theirs = parse_identity(IDENTITY.to_json() | {name: OTHER.get(name, "something else")})
    with pytest.raises(IncompatiblePeer) as caught:
        check_compatible(IDENTITY, theirs, accept_approximate=accept_approximate)
    for value in (name, repr(getattr(IDENTITY, name)), repr(getattr(theirs, name))):
        assert value in str(caught.value)


def test_other_numerics_are_approximate_if_accepted_and_refused_if_not():
    theirs = replace(IDENTITY, numerics_fingerprint="gpu")
    assert not check_compatible(IDENTITY, theirs, accept_approximate=True)
    with pytest.raises(IncompatiblePeer, match="'cpu' here, 'gpu' there"):
        check_compatible(IDENTITY, theirs, accept_approximate=False)


def test_every_differing_field_is_named():
    theirs = replace(IDENTITY, kv_dtype="float16", layout="other")
    with pytest.raises(IncompatiblePeer, match=r"kv_dtype.*layout"):
        check_compatible(IDENTITY, theirs, accept_approximate=False)


def test_an_identity_round_trips():
    assert parse_identity(IDENTITY.to_json()) == IDENTITY


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [None, 1.5, [], True, "x" * 5000])
def test_a_damaged_field_is_named(name, value):
    with pytest.raises(ProtocolError, match=name):
        parse_identity(IDENTITY.to_json() | {name: value})


@given(value=st.none() | st.integers() | st.text() | st.lists(st.text()))
def test_what_is_no_object_is_refused(value):
    with pytest.raises(ProtocolError, match="object"):
        parse_identity(value)
