"""Who may use the KV channel: both ends prove that they hold the cluster key, which never travels.

    asker -> peer    hello    version, nonce, epoch, identity
    peer  -> asker   reply    version, nonce, epoch, identity, proof
    asker -> peer    answer   the peer's nonce, proof

A proof is a MAC over the prover's role and all that was said: both nonces, both epochs and both
identities. Roles keep one side's proof from serving as the other's (reflection), nonces keep an old
one from serving again (replay), epochs bind it to two running processes. What both have proven gives
a session, whose keys sign requests, replies and frames. A request has a number, and no number counts
twice. Pure: no clock, no I/O; a nonce is drawn by the caller.
"""

import hashlib
import hmac
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from prfaas.errors import IncompatiblePeer, ProtocolError, UntrustedPeer
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.fields import dump, parse_object
from prfaas.transport.handshake import Identity, parse_identity

AUTH_VERSION = 1
AUTH_HEADER = "Prfaas-Auth"
PROOF_HEADER = "Prfaas-Proof"
HELLO_PATH = "/kv/v1/hello"
SESSION_PATH = "/kv/v1/session"
TOKEN_CHARS = 64
"""Of a nonce, an epoch or a proof: 32 bytes in hexadecimal."""
CHALLENGE_S = 10.0
MAX_CHALLENGES = 1024
MAX_SESSIONS = 256
COUNTER_WINDOW = 1024
"""Requests of one session may arrive this far out of order."""
MAX_COUNTER = (1 << 63) - 1

ProvingRole = Literal["asker", "peer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What each end says of itself before either has proven anything."""

    nonce: str
    epoch: str
    """Drawn by the process at its start."""
    identity: Identity
    version: int = AUTH_VERSION

    def fingerprint(self) -> bytes:
        """Return a hash of everything in it: of its JSON in ASCII, part of the protocol as it is."""
        fields = [self.version, self.nonce, self.epoch, self.identity.to_json()]
        return hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode()).digest()


@dataclass(frozen=True, slots=True)
class Session:
    """What two ends share once each has proven itself to the other."""

    session_id: str
    key: ClusterKey

    def sign_request(self, counter: int, method: str, path: str, body: bytes) -> str:
        """Return the value of the header that authenticates a request."""
        return f"{self.session_id} {counter} {self._request_mac(counter, method, path, body)}"

    def _request_mac(self, counter: int, method: str, path: str, body: bytes) -> str:
        parts = (b"request", str(counter).encode(), method.encode(), path.encode(), body)
        return self.key.mac(*parts).hex()

    def sign_reply(self, counter: int, status: int, body: bytes) -> str:
        """Return the value of the header that proves a reply to the request of that number."""
        parts = (b"reply", str(counter).encode(), str(status).encode(), body)
        return self.key.mac(*parts).hex()

    def frame_key(self, stream_id: str, sender: ProvingRole) -> ClusterKey:
        """Return the key that seals what one end sends on a stream; no two streams share an id."""
        return self.key.derive(b"frames", stream_id.encode(), sender.encode())


def _prove(key: ClusterKey, role: ProvingRole, asker: Hello, peer: Hello) -> str:
    return key.mac(b"proof", role.encode(), asker.fingerprint(), peer.fingerprint()).hex()


def _session(key: ClusterKey, asker: Hello, peer: Hello) -> Session:
    transcript = (asker.fingerprint(), peer.fingerprint())
    return Session(
        key.mac(b"session id", *transcript).hex()[:32], key.derive(b"session", *transcript)
    )


def is_same(ours: str, theirs: str) -> bool:
    """Return whether two secrets are equal, in time that does not say where they differ."""
    return hmac.compare_digest(ours.encode(), theirs.encode("utf-8", "surrogateescape"))


def encode_hello(hello: Hello, proof: str | None = None) -> bytes:
    """Return a hello or, with the proof, the reply to one as JSON."""
    fields = {
        "version": hello.version,
        "nonce": hello.nonce,
        "epoch": hello.epoch,
        "identity": hello.identity.to_json(),
    }
    return dump(fields if proof is None else fields | {"proof": proof})


def encode_answer(nonce: str, proof: str) -> bytes:
    """Return the asker's answer to a challenge as JSON."""
    return dump({"nonce": nonce, "proof": proof})


def parse_hello(data: bytes) -> Hello:
    """Return the hello in `data`; raises ProtocolError or, for another version, IncompatiblePeer."""
    value = parse_object(data)
    version = value.get("version")
    if version != AUTH_VERSION:
        shown = version if type(version) is int else "none"
        raise IncompatiblePeer(f"auth version differs: {AUTH_VERSION} here, {shown} there")
    return Hello(
        nonce=_token(value.get("nonce"), "nonce"),
        epoch=_token(value.get("epoch"), "epoch"),
        identity=parse_identity(value.get("identity")),
    )


def _token(item: object, name: str) -> str:
    if not isinstance(item, str) or len(item) != TOKEN_CHARS or not item.isascii():
        raise ProtocolError(f"field {name} is not {TOKEN_CHARS} characters of ASCII")
    return item


class AskerSide:
    """The asker's part of one try."""

    def __init__(self, key: ClusterKey, hello: Hello) -> None:
        self.hello = hello
        self._key = key

    def meet(self, reply: bytes) -> tuple[bytes, Session]:
        """Return the answer to the peer's reply, and the session if the peer takes it.

        Raises UntrustedPeer if the peer has not proven itself; nothing was proven to it then.
        """
        peer = parse_hello(reply)
        if peer.nonce == self.hello.nonce:
            raise UntrustedPeer("the peer sent our own nonce back")
        proof = _token(parse_object(reply).get("proof"), "proof")
        if not is_same(_prove(self._key, "peer", self.hello, peer), proof):
            raise UntrustedPeer("the peer did not prove that it has our cluster key")
        answer = encode_answer(peer.nonce, _prove(self._key, "asker", self.hello, peer))
        return answer, _session(self._key, self.hello, peer)


@dataclass(frozen=True, slots=True)
class _Challenge:
    asker: Hello
    peer: Hello
    deadline_s: float


class _Counters:
    """The numbers that one session's requests have used."""

    def __init__(self) -> None:
        self._highest = -1
        self._used: set[int] = set()

    def try_use(self, counter: int) -> bool:
        """Take a number; False if it was used or may have been."""
        if counter in self._used or counter <= self._highest - COUNTER_WINDOW:
            return False
        self._used.add(counter)
        if counter > self._highest:
            self._highest = counter
            if len(self._used) > 2 * COUNTER_WINDOW:
                self._used = {n for n in self._used if n > counter - COUNTER_WINDOW}
        return True


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it was, and its number."""

    session: Session
    counter: int


class PeerSide:
    """The peer's part: challenges under way and sessions, both bounded; the oldest fall out."""

    def __init__(
        self, key: ClusterKey, *, identity: Identity, epoch: str, max_sessions: int = MAX_SESSIONS
    ) -> None:
        self._key = key
        self._max_sessions = max_sessions
        self._identity = identity
        self._epoch = epoch
        self._challenges: OrderedDict[str, _Challenge] = OrderedDict()
        self._sessions: OrderedDict[str, tuple[Session, _Counters]] = OrderedDict()

    def challenge(self, hello: bytes, *, nonce: str, now_s: float) -> bytes:
        """Return the reply to a hello, which `nonce` must never have been in before."""
        asker = parse_hello(hello)
        if asker.nonce == nonce or asker.epoch == self._epoch:
            raise UntrustedPeer("the asker says of itself what we say of ourselves")
        peer = Hello(nonce=nonce, epoch=self._epoch, identity=self._identity)
        self._challenges[nonce] = _Challenge(asker, peer, now_s + CHALLENGE_S)
        if len(self._challenges) > MAX_CHALLENGES:
            self._challenges.popitem(last=False)
        return encode_hello(peer, _prove(self._key, "peer", asker, peer))

    def admit(self, answer: bytes, *, now_s: float) -> None:
        """Open the session of an asker that has proven itself; a challenge can be answered once."""
        value = parse_object(answer)
        proof = _token(value.get("proof"), "proof")
        challenge = self._challenges.pop(_token(value.get("nonce"), "nonce"), None)
        if challenge is None or now_s > challenge.deadline_s:
            raise UntrustedPeer("the challenge is unknown, used or too old")
        if not is_same(_prove(self._key, "asker", challenge.asker, challenge.peer), proof):
            raise UntrustedPeer("the asker did not prove that it has our cluster key")
        session = _session(self._key, challenge.asker, challenge.peer)
        self._sessions[session.session_id] = (session, _Counters())
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)

    def check(self, signature: str, method: str, path: str, body: bytes) -> Caller:
        """Return whose request it is; raises UntrustedPeer if that is not proven or it was here before."""
        session_id, _, rest = signature.partition(" ")
        counter_text, _, mac = rest.partition(" ")
        held = self._sessions.get(session_id)
        if held is None:
            raise UntrustedPeer("no such session: prove that you have the cluster key")
        if not (counter_text.isascii() and counter_text.isdigit() and len(counter_text) < 20):
            raise UntrustedPeer("the request has no number")
        session, counters = held
        counter = int(counter_text)
        if not is_same(session.sign_request(counter, method, path, body), signature) or not mac:
            raise UntrustedPeer("the request is not signed by its session")
        if not counters.try_use(counter):
            raise UntrustedPeer("the request was here before")
        self._sessions.move_to_end(session_id)
        return Caller(session, counter)
