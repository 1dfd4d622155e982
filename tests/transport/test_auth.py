"""Mutual proof of the cluster key: replays, reflections, strangers and other versions are refused."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import IncompatiblePeer, ProtocolError, UntrustedPeer
from prfaas.transport.auth import (
    AUTH_VERSION,
    CHALLENGE_S,
    COUNTER_WINDOW,
    MAX_CHALLENGES,
    AskerSide,
    Hello,
    PeerSide,
    Session,
    encode_hello,
    parse_hello,
)
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.handshake import Identity
from tests.transport.samples import IDENTITY

SECRET = b"k" * 16
KEY, OTHER_KEY = ClusterKey(SECRET), ClusterKey(b"l" * 16)
_numbers = itertools.count(1)


def token() -> str:
    return f"{next(_numbers):064x}"


def asker(key: ClusterKey = KEY) -> AskerSide:
    return AskerSide(key, Hello(nonce=token(), epoch=token(), identity=IDENTITY))


def peer(key: ClusterKey = KEY) -> PeerSide:
    return PeerSide(key, identity=IDENTITY, epoch=token())


def challenge(us: AskerSide, them: PeerSide) -> bytes:
    return them.challenge(encode_hello(us.hello), nonce=token(), now_s=0.0)


def admitted() -> tuple[PeerSide, Session]:
    us, them = asker(), peer()
    answer, session = us.meet(challenge(us, them))
    them.admit(answer, now_s=1.0)
    return them, session


def test_two_that_have_the_key_share_a_session():
    them, session = admitted()
    caller = them.check(session.sign_request(7, "POST", "/p", b"body"), "POST", "/p", b"body")
    assert caller.counter == 7
    assert caller.session.sign_reply(7, 200, b"x") == session.sign_reply(7, 200, b"x")
    ours, theirs = (s.frame_key("t", "peer") for s in (session, caller.session))
    assert ours.mac(b"x") == theirs.mac(b"x")


def test_nothing_that_travels_has_the_key_in_it():
    us, them = asker(), peer()
    reply = challenge(us, them)
    answer, session = us.meet(reply)
    said = (
        encode_hello(us.hello) + reply + answer + session.sign_request(0, "GET", "/", b"").encode()
    )
    sessions_secret = KEY.mac(b"session", us.hello.fingerprint(), parse_hello(reply).fingerprint())
    assert ClusterKey(sessions_secret).mac(b"x") == session.key.mac(b"x")
    for raw in (SECRET, sessions_secret):
        assert raw not in said
        assert raw.hex().encode() not in said


def test_a_peer_without_the_key_is_refused_before_we_prove_anything():
    us = asker()
    with pytest.raises(UntrustedPeer):
        us.meet(challenge(us, peer(OTHER_KEY)))


def test_an_asker_without_the_key_is_refused():
    honest, them = asker(), peer()
    reply = json.loads(challenge(honest, them))
    answer = json.dumps({"nonce": reply["nonce"], "proof": "0" * 64}).encode()
    with pytest.raises(UntrustedPeer):
        them.admit(answer, now_s=0.0)


def test_a_peer_that_sends_our_words_back_is_refused():
    us = asker()
    hello = json.loads(encode_hello(us.hello))
    with pytest.raises(UntrustedPeer):
        us.meet(json.dumps(hello | {"proof": "0" * 64}).encode())


def test_a_peers_proof_does_not_serve_as_an_askers():
    us, them = asker(), peer()
    reply = json.loads(challenge(us, them))
    reflected = json.dumps({"nonce": reply["nonce"], "proof": reply["proof"]}).encode()
    with pytest.raises(UntrustedPeer):
        them.admit(reflected, now_s=0.0)


def test_a_node_that_is_shown_its_own_hello_refuses():
    them = peer()
    mirrored = Hello(nonce=token(), epoch=them._epoch, identity=IDENTITY)
    with pytest.raises(UntrustedPeer):
        them.challenge(encode_hello(mirrored), nonce=token(), now_s=0.0)


def test_an_old_proof_does_not_serve_again():
    us, them = asker(), peer()
    answer, _ = us.meet(challenge(us, them))
    them.admit(answer, now_s=0.0)
    with pytest.raises(UntrustedPeer):
        them.admit(answer, now_s=0.0)
    with pytest.raises(UntrustedPeer):
        peer().admit(answer, now_s=0.0)


def test_an_old_reply_does_not_serve_for_a_new_hello():
    first, second, them = asker(), asker(), peer()
    reply = challenge(first, them)
    with pytest.raises(UntrustedPeer):
        second.meet(reply)


def test_a_challenge_ages():
    us, them = asker(), peer()
    answer, _ = us.meet(challenge(us, them))
    with pytest.raises(UntrustedPeer):
        them.admit(answer, now_s=CHALLENGE_S + 0.1)


@pytest.mark.parametrize("field", ["nonce", "epoch", "identity"])
def test_whatever_is_changed_on_the_way_spoils_the_proof(field):
    us, them = asker(), peer()
    reply = json.loads(challenge(us, them))
    reply[field] = token() if field != "identity" else reply[field] | {"kv_dtype": "float16"}
    with pytest.raises(UntrustedPeer):
        us.meet(json.dumps(reply).encode())


@pytest.mark.parametrize("version", [0, AUTH_VERSION + 1, None, "1", True])
def test_another_version_is_refused_with_both_named(version):
    us, them = asker(), peer()
    hello = json.loads(encode_hello(us.hello)) | {"version": version}
    if version is True:  # equal to 1 in Python: the same version
        them.challenge(json.dumps(hello).encode(), nonce=token(), now_s=0.0)
        return
    with pytest.raises(IncompatiblePeer, match=f"{AUTH_VERSION} here"):
        them.challenge(json.dumps(hello).encode(), nonce=token(), now_s=0.0)
    with pytest.raises(IncompatiblePeer, match=f"{AUTH_VERSION} here"):
        us.meet(json.dumps(hello | {"proof": "0" * 64}).encode())


@given(data=st.binary(max_size=200))
def test_any_bytes_are_refused(data):
    us, them = asker(), peer()
    for hear in (
        us.meet,
        lambda said: them.challenge(said, nonce=token(), now_s=0.0),
        lambda said: them.admit(said, now_s=0.0),
    ):
        with pytest.raises((ProtocolError, IncompatiblePeer)):
            hear(data)


def test_a_request_counts_once_whatever_its_order():
    them, session = admitted()
    signed = {n: session.sign_request(n, "GET", "/p", b"") for n in (0, 2, 1, COUNTER_WINDOW + 2)}
    for signature in signed.values():
        them.check(signature, "GET", "/p", b"")
    for signature in signed.values():
        with pytest.raises(UntrustedPeer, match="before"):
            them.check(signature, "GET", "/p", b"")


def test_a_request_from_far_back_may_have_been_here():
    them, session = admitted()
    them.check(session.sign_request(5000, "GET", "/p", b""), "GET", "/p", b"")
    late = session.sign_request(5000 - COUNTER_WINDOW, "GET", "/p", b"")
    with pytest.raises(UntrustedPeer, match="before"):
        them.check(late, "GET", "/p", b"")


@pytest.mark.parametrize(
    ("method", "path", "body"), [("GET", "/p", b"b"), ("POST", "/q", b"b"), ("POST", "/p", b"c")]
)
def test_a_signature_is_of_one_request(method, path, body):
    them, session = admitted()
    with pytest.raises(UntrustedPeer, match="not signed"):
        them.check(session.sign_request(1, "POST", "/p", b"b"), method, path, body)


@given(signature=st.text(max_size=80))
def test_any_other_signature_is_refused(signature):
    them, session = admitted()
    for shown in (signature, f"{session.session_id} {signature}", f"{session.session_id} 1 é"):
        with pytest.raises(UntrustedPeer):
            them.check(shown, "GET", "/p", b"")


def test_a_refused_request_uses_up_no_number():
    them, session = admitted()
    forged = session.sign_request(3, "GET", "/p", b"").replace(" 3 ", " 4 ")
    with pytest.raises(UntrustedPeer):
        them.check(forged, "GET", "/p", b"")
    them.check(session.sign_request(4, "GET", "/p", b""), "GET", "/p", b"")


def test_each_direction_of_each_transfer_has_its_own_frame_key():
    _, session = admitted()
    keys = [session.frame_key(t, who) for t in ("a", "b") for who in ("peer", "asker")]
    assert len({key.mac(b"x") for key in keys}) == len(keys)


def test_strangers_cannot_fill_the_memory():
    them = peer()
    for _ in range(MAX_CHALLENGES + 20):
        challenge(asker(), them)
    assert len(them._challenges) == MAX_CHALLENGES


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("gqa:w1024;é", "bf09ae570e0a6d6a"),
        ('plain [64] {"a":1}\\', "2a37ddf92bfd72ff"),
    ],
)
def test_what_a_hello_is_known_by_is_part_of_the_protocol(layout, expected):
    identity = Identity(
        model_fingerprint="a" * 64,
        tokenizer_fingerprint="b",
        template_fingerprint="c",
        kv_dtype="bfloat16",
        block_tokens=64,
        layout=layout,
        numerics_fingerprint="cpu; x",
    )
    hello = Hello(nonce="n" * 64, epoch="e" * 64, identity=identity)
    assert hello.fingerprint().hex()[:16] == expected
    assert parse_hello(encode_hello(hello)).fingerprint() == hello.fingerprint()
