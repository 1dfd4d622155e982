"""One accepted HTTP connection: aiohttp's, with a deadline for heads and errors as JSON."""

import asyncio
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from aiohttp.web_request import BaseRequest

from prfaas.log import get_logger
from prfaas.server.failures import json_error
from prfaas.server.openai.answers import error_body

log = get_logger()


class Connection(web.RequestHandler):
    """Closes itself when a request's head is not whole in time; aiohttp would wait for minutes.

    The time runs from the connection's start, and again from the first byte after an answer.
    Between requests the connection may idle for aiohttp's keepalive_timeout.
    """

    __slots__ = ("_head_timeout_s", "_head_timer", "_is_in_request")

    def __init__(
        self,
        manager: web.Server,
        *,
        loop: asyncio.AbstractEventLoop,
        head_timeout_s: float,
        **options: Any,
    ) -> None:
        super().__init__(manager, loop=loop, **options)
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_in_request = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the first head's time."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Begin a head's time unless it runs or a request is under way."""
        if not self._is_in_request and self._head_timer is None:
            self._start_timer()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def request_began(self) -> None:
        """A head is whole; called by `tracking`."""
        self._is_in_request = True
        self._stop_timer()

    def request_ended(self) -> None:
        """The handler is done; called by `tracking`."""
        self._is_in_request = False

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to what is no HTTP, in OpenAI's shape; the connection ends with it.

        Handlers' exceptions do not come here (`answering_errors` maps them) save for a connection
        that broke, to which nothing more can be said.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("request.crashed", exc_info=exc)
            what = "internal error"
        else:
            what = "the request is not valid HTTP"
        response = json_error(error_body(what, status=status), status=status)
        response.force_close()
        return response

    def _start_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._head_timer = loop.call_later(self._head_timeout_s, self.force_close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


@web.middleware
async def _track(request: web.Request, handler: Handler) -> web.StreamResponse:
    connection = request.protocol
    if not isinstance(connection, Connection):
        return await handler(request)
    connection.request_began()
    try:
        return await handler(request)
    finally:
        connection.request_ended()


tracking: Middleware = _track
"""The middleware that tells a Connection when requests begin and end."""
