"""HTTP requests to one node, each signed by a session if there is a cluster key.

No success counts that the other end has not proven: a reply carries its proof, an answer of many lines
one in each.
"""

import asyncio
import contextlib
import itertools
import secrets
from collections import deque
from collections.abc import AsyncIterator

import aiohttp

from prfaas.errors import (
    IncompatiblePeer,
    Overloaded,
    PromptRefused,
    ProtocolError,
    TransferError,
    UntrustedPeer,
)
from prfaas.transport.address import PeerAddress, as_transfer_errors
from prfaas.transport.auth import (
    AUTH_HEADER,
    HELLO_PATH,
    PROOF_HEADER,
    SESSION_PATH,
    AskerSide,
    Hello,
    Session,
    encode_hello,
    is_same,
)
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.fields import parse_object, shown
from prfaas.transport.handshake import Identity
from prfaas.transport.options import TransportOptions
from prfaas.transport.security import ChannelSecurity
from prfaas.transport.signed_lines import LineReader, answer_key

MAX_REPLY_BYTES = 1 << 20
MAX_RETRY_AFTER_S = 60.0
REFUSED_STATUSES = frozenset({413, 422})
"""Of prompts that are too long for the peer."""
LAST_BYTES_S = 1.0
"""How long the end of an answer may take to come after its last line; then its connection is closed."""


class SignedHttp:
    """Talks to one node. Every failure is a TransferError or, when it is full, Overloaded.

    Args:
        max_connections: kept at once; requests beyond them wait. None sets no limit.
    """

    def __init__(
        self,
        address: PeerAddress,
        options: TransportOptions,
        security: ChannelSecurity,
        *,
        max_connections: int | None = 100,
    ) -> None:
        self.address = address
        self.trust = Trust()
        self.num_answers = 0
        """Of many lines, that are being read."""
        self._options = options
        self._cluster_key = security.cluster_key
        tls = security.tls
        self.http = aiohttp.ClientSession(
            base_url=f"{'http' if tls is None else 'https'}://{address}",
            connector=aiohttp.TCPConnector(
                ssl=True if tls is None else tls, limit=max_connections or 0
            ),
            timeout=aiohttp.ClientTimeout(total=None, connect=options.connect_timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._tls_hint = "; does it speak TLS? --tls-ca" if tls is None else ""
        """Empty once the peer has answered."""

    async def close(self) -> None:
        """Close the connections that are kept."""
        await self.http.close()

    async def post(self, path: str, body: bytes, ours: Identity) -> bytes:
        """Return the reply to a request; with a cluster key both are of one session.

        `ours` is who we say we are if a session must be opened first.
        """
        session = await self._session(ours)
        try:
            return await self._send(path, body)
        except SessionLost:  # the peer has started anew, or has more askers than it remembers
            await self._renew(session, ours)
        return await self._send(path, body)

    @contextlib.asynccontextmanager
    async def lines(
        self, path: str, body: bytes, ours: Identity, *, silence_s: float, max_line_bytes: int
    ) -> AsyncIterator["AnswerLines"]:
        """Send a request whose answer comes line by line.

        Leaving the block before the answer's end closes the connection, which ends the work at the
        other end. An answer that does not begin within `silence_s` is a TransferTimeout.
        """
        session = await self._session(ours)
        try:
            response, key = await self._ask(path, body, silence_s)
        except SessionLost:
            await self._renew(session, ours)
            response, key = await self._ask(path, body, silence_s)
        reader = LineReader(key, max_line_bytes=max_line_bytes)
        self.num_answers += 1
        try:
            yield AnswerLines(response, reader, self.address, silence_s)
            await _drain(response)
        finally:
            self.num_answers -= 1
            response.close()

    async def _ask(
        self, path: str, body: bytes, silence_s: float
    ) -> tuple[aiohttp.ClientResponse, ClusterKey | None]:
        """Return the answer to a request, once it has begun, and the key of its lines."""
        session = self.trust.session
        counter, signature = self.trust.sign("POST", path, body)
        headers = {"Content-Type": "application/json", **signature}
        with as_transfer_errors(self.address, self._tls_hint):
            async with asyncio.timeout(silence_s):
                response = await self.http.post(
                    path, data=body, headers=headers, allow_redirects=False
                )
                if response.status >= 300:
                    async with response:
                        raise refusal_of(response, await read_bounded(response), self.address)
        self._tls_hint = ""
        return response, None if session is None else answer_key(session, counter)

    async def _session(self, ours: Identity) -> Session | None:
        """Return the session of the next request, a new one if there is none; None without a key."""
        if self._cluster_key is None:
            return None
        async with self.trust.lock:
            if self.trust.session is None:
                await self._prove(self._cluster_key, ours)
            return self.trust.session

    async def _renew(self, lost: Session | None, ours: Identity) -> None:
        """Open another session than the one that the peer does not know, unless somebody has.

        Where somebody has tried and failed there is none: nothing is asked without one.
        """
        if self._cluster_key is None:
            return
        async with self.trust.lock:
            if self.trust.session is None or self.trust.session is lost:
                await self._prove(self._cluster_key, ours)

    async def _prove(self, key: ClusterKey, ours: Identity) -> None:
        """Open a session: both ends prove that they hold the key."""
        self.trust.session = None
        hello = Hello(nonce=secrets.token_hex(32), epoch=self.trust.epoch, identity=ours)
        side = AskerSide(key, hello)
        answer, session = side.meet(await self._send(HELLO_PATH, encode_hello(hello)))
        await self._send(SESSION_PATH, answer)
        self.trust.begin(session)

    async def _send(self, path: str, body: bytes) -> bytes:
        counter, signature = self.trust.sign("POST", path, body)
        session = self.trust.session
        headers = {"Content-Type": "application/json", **signature}
        with as_transfer_errors(self.address, self._tls_hint):
            async with (
                asyncio.timeout(self._options.stall_timeout_s),
                self.http.post(path, data=body, headers=headers, allow_redirects=False) as response,
            ):
                self._tls_hint = ""
                reply = await read_bounded(response)
                if response.status >= 300:
                    raise refusal_of(response, reply, self.address)
        if session is not None:
            proof = session.sign_reply(counter, response.status, reply)
            if not is_same(proof, response.headers.get(PROOF_HEADER, "")):
                raise UntrustedPeer(f"peer {self.address}: the reply is not signed by our session")
        return reply


class AnswerLines:
    """The lines of one answer, each proven if there is a cluster key."""

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        reader: LineReader,
        address: PeerAddress,
        silence_s: float,
    ) -> None:
        self._response = response
        self._reader = reader
        self._address = address
        self._silence_s = silence_s
        self._texts: deque[bytes] = deque()

    async def next(self) -> bytes | None:
        """Return the text of the next line, None at the answer's end.

        Raises TransferTimeout where nothing came for too long, TransferError where the connection
        broke, UntrustedPeer for a line that is not proven.
        """
        while not self._texts:
            data = _read_now(self._response)
            if not data:
                with as_transfer_errors(self._address):
                    async with asyncio.timeout(self._silence_s):
                        data = await _read_some(self._response)
            if not data:
                if not self._reader.is_between_lines:
                    raise TransferError(f"peer {self._address}: its answer ends within a line")
                return None
            self._texts.extend(self._reader.received(data))
        return self._texts.popleft()


class Trust:
    """The session with the peer, if there is one, and the numbers of its requests."""

    def __init__(self) -> None:
        self.epoch = secrets.token_hex(32)
        self.session: Session | None = None
        self.lock = asyncio.Lock()
        self._counters = itertools.count()

    def begin(self, session: Session) -> None:
        """Number the requests of a new session from 0."""
        self.session = session
        self._counters = itertools.count()

    def sign(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, str]]:
        """Return the request's number and the headers that sign it; none without a session."""
        counter = next(self._counters)
        if self.session is None:
            return counter, {}
        return counter, {AUTH_HEADER: self.session.sign_request(counter, method, path, body)}


class SessionLost(UntrustedPeer):
    """The peer does not know our session, or we have shown it none."""


async def read_bounded(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of a reply; raises ProtocolError for one that is too long."""
    reply = bytearray()
    async for chunk in response.content.iter_any():
        reply += chunk
        if len(reply) > MAX_REPLY_BYTES:
            raise ProtocolError(f"reply is longer than {MAX_REPLY_BYTES} bytes")
    return bytes(reply)


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read on to the end, so that the connection can serve again; what comes late does not matter."""
    if response.content.at_eof():
        return
    with contextlib.suppress(TimeoutError, OSError, aiohttp.ClientError):
        async with asyncio.timeout(LAST_BYTES_S):
            await _read_some(response)


def _read_now(response: aiohttp.ClientResponse) -> bytes:
    """Return what has come of a body already; nothing where one has to wait, or at its end."""
    return b"" if response.content.exception() else response.content.read_nowait()


async def _read_some(response: aiohttp.ClientResponse) -> bytes:
    """Return what has come of a body, nothing at its end; raises ClientError, or what asyncio does."""
    try:
        return await response.content.readany()
    except RuntimeError as error:  # aiohttp's, of a connection that is closed at this end
        raise aiohttp.ClientConnectionError(str(error)) from error


def refusal_of(
    response: aiohttp.ClientResponse, reply: bytes, address: PeerAddress
) -> TransferError | Overloaded:
    """Return the error that an answer with a status from 300 on stands for."""
    try:
        message = shown(str(parse_object(reply)["error"]["message"]))
    except (ProtocolError, KeyError, TypeError):
        message = f"HTTP status {response.status}"
    message = f"peer {address}: {message}"
    if response.status == 503:
        try:
            retry_after_s = float(response.headers.get("Retry-After", "1"))
        except ValueError:
            retry_after_s = 1.0
        return Overloaded(message, retry_after_s=min(max(retry_after_s, 0.0), MAX_RETRY_AFTER_S))
    if response.status == 401:
        return SessionLost(message)
    if response.status == 409:
        return IncompatiblePeer(message)
    if response.status in REFUSED_STATUSES:
        return PromptRefused(message)
    return TransferError(message)
