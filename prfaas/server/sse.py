"""Server-sent events: one `data:` line of JSON each, `[DONE]` at the end."""

import asyncio

from aiohttp import web

from prfaas.server.openai.answers import Json, to_json

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold the stream back
}
MAX_WRITE_BYTES = 1 << 14
"""Events that come at once go out in one write; no more of them are held back than these."""


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
        self._waiting = bytearray()

    @property
    def response(self) -> web.StreamResponse:
        """What the handler returns; its headers may be set until the stream is begun."""
        return self._response

    @property
    def is_begun(self) -> bool:
        """Whether there is an event, sent or about to be: from then on errors can only be events."""
        return self._response.prepared or bool(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether what was added is enough for one write."""
        return len(self._waiting) >= MAX_WRITE_BYTES

    def add(self, body: Json) -> None:
        """Put one event into the next write."""
        self._waiting += b"data: " + to_json(body) + b"\n\n"

    async def send(self) -> None:
        """Send the events that were added, in one write."""
        if self._waiting:
            await self._write(self._taken())

    async def comment(self) -> None:
        """Send what was added and a line that clients skip, to keep proxies from timing out."""
        await self._write(self._taken() + b": waiting\n\n")

    async def end(self) -> None:
        """Send what was added, `[DONE]` and the answer's end."""
        await self._write(self._taken() + b"data: [DONE]\n\n", is_last=True)

    def _taken(self) -> bytes:
        data = bytes(self._waiting)
        self._waiting.clear()
        return data

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                if not self._response.prepared:
                    await self._response.prepare(self._request)
                await (self._response.write_eof(data) if is_last else self._response.write(data))
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientStalled(
                f"the client took nothing for {self._write_timeout_s:g} s"
            ) from None
