"""Server-sent events: one `data:` line of JSON each, `[DONE]` at the end."""

import asyncio

from aiohttp import web

from prfaas.server.openai.answers import Json, to_json

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold the stream back
}


class ClientStalled(ConnectionError):
    """The client took nothing of its stream for too long."""


class EventStream:
    """A stream of events to one client, begun by the first of them.

    Every send waits until the client has taken enough of what went before, at most
    `write_timeout_s`: then the connection is cut and ClientStalled raised.
    """

    def __init__(self, request: web.Request, *, write_timeout_s: float) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=HEADERS)
        self._write_timeout_s = write_timeout_s

    @property
    def response(self) -> web.StreamResponse:
        """What the handler returns; its headers may be set until the stream is begun."""
        return self._response

    @property
    def is_begun(self) -> bool:
        """Whether the head has gone out: from then on errors can only be events."""
        return self._response.prepared

    async def send(self, body: Json) -> None:
        """Send one event."""
        await self._write(b"data: " + to_json(body) + b"\n\n")

    async def comment(self) -> None:
        """Send a line that clients skip, to keep proxies from timing out."""
        await self._write(b": waiting\n\n")

    async def end(self) -> None:
        """Send `[DONE]` and end the answer."""
        await self._write(b"data: [DONE]\n\n")
        await self._response.write_eof()

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                if not self._response.prepared:
                    await self._response.prepare(self._request)
                await self._response.write(data)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientStalled(
                f"the client took nothing for {self._write_timeout_s:g} s"
            ) from None
