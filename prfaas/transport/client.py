"""The pd side of the KV channel: asks a prefill node for a prompt's KV and receives its frames.

Control requests are HTTP through aiohttp; streams are connections of their own (see dialing), open before
they are needed. This side dials and pulls; only the prefill node must be reachable. With a cluster key
every request is signed by a session, and no success counts that the peer has not proven.
"""

import asyncio
import base64
import contextlib
import secrets
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import aiohttp

from prfaas.clock import Clock, monotonic_s
from prfaas.errors import (
    Overloaded,
    TransferError,
)
from prfaas.log import get_logger
from prfaas.transport.address import PeerAddress, as_transfer_errors
from prfaas.transport.dialing import UpgradeRefused, connect, upgrade
from prfaas.transport.fields import dump
from prfaas.transport.handshake import Identity
from prfaas.transport.http_port import HttpPort
from prfaas.transport.incoming import FrameConsumer
from prfaas.transport.kv_numbers import KvNumbers
from prfaas.transport.measuring import (
    MeasureRequest,
    SenderReport,
    encode_measure_request,
    parse_sender_report,
)
from prfaas.transport.messages import (
    PeerStatus,
    TransferAccepted,
    TransferRequest,
    encode_transfer_request,
    parse_accepted,
    parse_status,
)
from prfaas.transport.options import TransportOptions
from prfaas.transport.ports import StreamPort
from prfaas.transport.pulling import Pulled, Pulling
from prfaas.transport.security import ChannelSecurity
from prfaas.transport.signed_http import SignedHttp, read_bounded, refusal_of
from prfaas.transport.stream import RawStream
from prfaas.transport.stream_seals import StreamSeals, stream_seals
from prfaas.transport.warm_streams import WarmStreams

STREAM_HEADER = "Prfaas-Stream"
"""An id that the asker draws: with a cluster key the stream's keys are derived from it."""
STREAM_PATH = "/kv/v1/stream"
MEASURE_PATH = "/kv/v1/measure"
FRAMES_PATH = "/kv/v1/frames"
ATTACH_HEADER = "Prfaas-Attach"
"""An ATTACH frame in base64: it comes back as the frames of its transfer."""
UNPROVEN, FULL = 401, 503
"""What a peer that has raw streams answers to an upgrade; anything else but 101 is a proxy's, or that of a
server that knows of none."""
HTTP_FOR_S = 60.0
"""So long after such an answer the next raw stream is tried."""


class PeerClient:
    """Talks to one prefill node. Every failure is a TransferError or, when it is full, Overloaded."""

    def __init__(
        self,
        address: PeerAddress,
        options: TransportOptions,
        *,
        security: ChannelSecurity | None = None,
        clock: Clock = monotonic_s,
    ) -> None:
        self.address = address
        self._options = options
        self._security = security or ChannelSecurity()
        self._http = SignedHttp(address, options, self._security)
        self._clock = clock
        self._uses_http = options.kv_channel == "http"
        self._retry_raw_s: float | None = None
        """When raw streams may be tried again that were refused; None: they were not."""
        self._tasks: asyncio.TaskGroup | None = None
        self._raw_streams: list[RawStream] = []
        self.streams = WarmStreams(self._dial_raw, 0 if self._uses_http else options.streams)

    @property
    def uses_http(self) -> bool:
        """Frames come as answers of HTTP."""
        return self._uses_http

    def open_ports(self) -> list[StreamPort]:
        """Return the connections of all raw streams, idle or not."""
        return [stream.port for stream in self._raw_streams if stream.is_open]

    def heard(self) -> None:
        """Open the streams that are missing: the peer was heard of.

        Where only HTTP got through a while ago one is tried, beside the transfers: if it opens, all are.
        """
        if self._retry_raw_s is not None and self._clock() >= self._retry_raw_s:
            self.streams.num_idle = 1
        self.streams.want()

    async def run(self) -> None:
        """Keep streams open until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            await self.streams.keep()

    async def close(self) -> None:
        """Close the connections that are kept, for control requests and for streams."""
        self.streams.close()
        await self._http.close()

    async def handshake(self, ours: Identity) -> PeerStatus:
        """Return who the peer is and how busy; the caller compares the identities.

        Raises UntrustedPeer if one of both has not proven that it has the cluster key.
        """
        body = dump({"identity": ours.to_json()})
        return parse_status(await self._http.post("/kv/v1/handshake", body, ours))

    async def open(self, asked: TransferRequest) -> TransferAccepted:
        """Ask for a transfer; return once the peer has reserved all pages and queued the prompt.

        Raises IncompatiblePeer, PromptRefused, Overloaded (with the peer's wish when to retry) or
        TransferError.
        """
        body = encode_transfer_request(asked)
        return parse_accepted(await self._http.post("/kv/v1/transfers", body, asked.identity))

    async def cancel(self, transfer_id: str) -> None:
        """Tell the peer to drop a transfer; unknown ones are fine."""
        path = f"/kv/v1/transfers/{transfer_id}"
        with as_transfer_errors(self.address):
            async with (
                asyncio.timeout(self._options.connect_timeout_s),
                self._http.http.delete(path, headers=self._http.trust.sign("DELETE", path, b"")[1]),
            ):
                pass

    @contextlib.asynccontextmanager
    async def pull(
        self, asked: TransferRequest, consumer: FrameConsumer, *, numbers: KvNumbers | None = None
    ) -> AsyncIterator[Pulling]:
        """Ask for a transfer and let its frames into `consumer`; `numbers` says what is in its pages.

        The streams that are open are attached at the moment the request is sent, so that the first page
        comes one round trip later. Leaving the block lets them go: a transfer that is not finished must
        be cancelled. Raises like `open`.
        """
        with contextlib.closing(self._pulling(asked, consumer, numbers or KvNumbers())) as pulling:
            pulling.attach_warm()
            accepted = await self.open(asked)
            with as_transfer_errors(self.address):
                await pulling.begin(accepted)
            yield pulling

    def _pulling(self, asked: Pulled, consumer: FrameConsumer, numbers: KvNumbers) -> Pulling:
        return Pulling(
            asked=asked,
            consumer=consumer,
            streams=self.streams,
            dial=self.dial,
            stall_timeout_s=self._options.stall_timeout_s,
            numbers=numbers,
        )

    @contextlib.asynccontextmanager
    async def measure(
        self, asked: MeasureRequest, consumer: FrameConsumer, ours: Identity, *, numbers: KvNumbers
    ) -> AsyncIterator[Pulling]:
        """Like `pull`, for made-up pages; raises BadRequest's PromptRefused, Overloaded or TransferError."""
        with contextlib.closing(self._pulling(asked, consumer, numbers)) as pulling:
            pulling.attach_warm()
            reply = await self._http.post(MEASURE_PATH, encode_measure_request(asked), ours)
            with as_transfer_errors(self.address):
                await pulling.begin(parse_accepted(reply))
            yield pulling

    async def measured(self, asked: MeasureRequest, ours: Identity) -> SenderReport:
        """Return what the peer's sockets saw of a measurement, the last that it served."""
        path = f"{MEASURE_PATH}/{asked.transfer_id}"
        body = dump({"capability": asked.capability})
        return parse_sender_report(await self._http.post(path, body, ours))

    async def acknowledge(self, asked: TransferRequest) -> None:
        """Tell the peer by HTTP that everything is verified, where no stream is left to say so."""
        path = f"/kv/v1/transfers/{asked.transfer_id}/ack"
        await self._http.post(path, dump({"capability": asked.capability}), asked.identity)

    async def dial(self) -> RawStream:
        """Return a new stream: a raw one, or where only HTTP gets through an HTTP answer to be.

        Raises TransferError, or Overloaded where the peer has too many streams. Once an upgrade was
        answered by something that knows of none, HTTP is used until `heard` has found that a raw
        stream opens again.
        """
        if not self._uses_http:
            try:
                return await self._dial_raw()
            except UpgradeRefused:
                if not self._uses_http:
                    raise
        stream_id = secrets.token_hex(16)
        seals = self._seals(stream_id)
        port = HttpPort(lambda attach: self._fetch(stream_id, attach), self._spawn)
        return RawStream(port, peer_seal=seals.peer, our_seal=seals.asker)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None, "not run"
        return self._tasks.create_task(work)

    @contextlib.asynccontextmanager
    async def _fetch(self, stream_id: str, attach: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        encoded = base64.b64encode(attach).decode()
        _, headers = self._http.trust.sign("GET", FRAMES_PATH, f"{stream_id} {encoded}".encode())
        headers |= {STREAM_HEADER: stream_id, ATTACH_HEADER: encoded}
        async with self._http.http.get(FRAMES_PATH, headers=headers) as response:
            if response.status != 200:
                refusal = refusal_of(response, await read_bounded(response), self.address)
                raise refusal if isinstance(refusal, TransferError) else TransferError(str(refusal))
            yield response

    async def _dial_raw(self) -> RawStream:
        with as_transfer_errors(self.address):
            async with asyncio.timeout(self._options.connect_timeout_s):
                port = await connect(self.address, self._security.tls, self._options.tcp_congestion)
        try:
            stream_id = secrets.token_hex(16)
            _, headers = self._http.trust.sign("GET", STREAM_PATH, stream_id.encode())
            headers[STREAM_HEADER] = stream_id
            seals = self._seals(stream_id)
            with as_transfer_errors(self.address):
                async with asyncio.timeout(self._options.stall_timeout_s):
                    rest = await upgrade(port, self.address, STREAM_PATH, headers)
            stream = RawStream(port, rest, peer_seal=seals.peer, our_seal=seals.asker)
            self._raw_streams = [s for s in self._raw_streams if s.is_open] + [stream]
            if self._retry_raw_s is not None:
                self._retry_raw_s = None
                self._change_channel(uses_http=False, status=101)
            return stream
        except UpgradeRefused as error:
            port.close()
            if error.status == FULL:
                raise Overloaded(f"peer {self.address}: no room for another stream") from error
            if error.status != UNPROVEN:
                self._retry_raw_s = self._clock() + HTTP_FOR_S
                self._change_channel(uses_http=True, status=error.status)
            raise
        except BaseException:
            port.close()
            raise

    def _change_channel(self, *, uses_http: bool, status: int) -> None:
        """Use the other channel from here on, and say so if it is another; `status` answered an upgrade."""
        self.streams.num_idle = 0 if uses_http else self._options.streams
        if uses_http != self._uses_http:
            self._uses_http = uses_http
            log, peer = get_logger(), str(self.address)
            if uses_http:
                log.warning("peer.channel", peer=peer, channel="http", status=status)
            else:
                log.info("peer.channel", peer=peer, channel="stream", status=status)

    def _seals(self, stream_id: str) -> StreamSeals:
        is_tls = self._security.tls is not None
        return stream_seals(self._http.trust.session, stream_id, is_tls=is_tls)
