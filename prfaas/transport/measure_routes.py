"""The routes by which an asker measures the link to a prefill node.

POST /kv/v1/measure             send me so many made-up bytes; then ATTACH as for any transfer
POST /kv/v1/measure/{id}        how did your sockets fare?
"""

import time

from aiohttp import web

from prfaas.errors import BadRequest, Overloaded, ProtocolError, UntrustedPeer
from prfaas.transport.answers import proven, read_body, refusal, refuse
from prfaas.transport.auth import is_same
from prfaas.transport.client import MEASURE_PATH
from prfaas.transport.fields import parse_object
from prfaas.transport.measuring import (
    Measurements,
    MeasureRequest,
    encode_sender_report,
    parse_measure_request,
    sender_report,
)
from prfaas.transport.messages import (
    TransferAccepted,
    capability_of,
    encode_accepted,
)
from prfaas.transport.sending import SendingStream
from prfaas.transport.server import KvChannel
from prfaas.transport.tcpinfo import TcpInfo, read_congestion, read_tcp_info


class MeasureRoutes:
    """Lets askers measure the link over the streams of a channel."""

    def __init__(self, channel: KvChannel, measurements: Measurements) -> None:
        self._channel = channel
        self._measurements = measurements
        self._asked: MeasureRequest | None = None
        """Opened last."""
        self._before: list[TcpInfo | None] = []
        self._began_cpu_s = 0.0

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.post(MEASURE_PATH, self.measure),
            web.post(MEASURE_PATH + "/{transfer_id}", self.report),
        ]

    async def measure(self, request: web.Request) -> web.Response:
        """Open a measurement."""
        try:
            body = await read_body(request)
            caller = self._channel.caller(request, body)
            asked = parse_measure_request(body)
            try:
                self._measurements.open(asked)
            finally:
                self._channel.settle(asked.transfer_id)
        except (BadRequest, Overloaded, ProtocolError, TimeoutError, UntrustedPeer) as error:
            return refusal(error)
        self._asked = asked
        self._before = [read_tcp_info(stream.port.sock) for stream in self._streams(request)]
        self._began_cpu_s = time.process_time()
        return proven(201, encode_accepted(TransferAccepted(hit_tokens=0)), caller)

    async def report(self, request: web.Request) -> web.Response:
        """Say what the sockets of the asker's streams saw since the measurement was opened."""
        try:
            body = await read_body(request)
            caller = self._channel.caller(request, body)
            capability = capability_of(parse_object(body))
        except (ProtocolError, TimeoutError, UntrustedPeer) as error:
            return refusal(error)
        asked = self._asked
        if asked is None or asked.transfer_id != request.match_info["transfer_id"]:
            return refuse(404, "no such measurement, or another one was opened since")
        if not is_same(asked.capability, capability):
            return refuse(403, "the measurement was somebody else's")
        streams = self._streams(request)
        congestion = {read_congestion(stream.port.sock) for stream in streams}
        report = sender_report(
            self._before,
            [read_tcp_info(stream.port.sock) for stream in streams],
            congestion=",".join(sorted(congestion)),
            cpu_s=time.process_time() - self._began_cpu_s,
        )
        return proven(200, encode_sender_report(report), caller)

    def _streams(self, request: web.Request) -> list[SendingStream]:
        return [stream for stream in self._channel.streams if stream.asker == request.remote]
