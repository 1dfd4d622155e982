"""The port: bound before anything slow, and served by one application after another."""

import asyncio
import socket
import ssl
from types import TracebackType

from aiohttp import web

from prfaas.config.options import HttpOptions
from prfaas.errors import ConfigError
from prfaas.server.connection import Connection

BACKLOG = 4096
"""Connections that wait to be taken: a busy node takes them late, and the kernel drops those beyond."""
IDLE_TIMEOUT_S = 75.0
"""Longer than the idle time of the usual proxies, so that it is they who close."""
CLEANUP_TIMEOUT_S = 0.5
"""For handlers that a drain and a closed node have not ended: aiohttp waits this twice, then cuts."""
MAX_PORT = 65535


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket; port 0 takes a free one.

    SO_REUSEADDR lets a restart follow at once; without SO_REUSEPORT a second server is refused.

    Raises:
        ConfigError: the address is not valid, not ours, in use, or not allowed.
    """
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"http.port is {port}, must be from 0 to {MAX_PORT}")
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"http.host {host!r} cannot be resolved: {error}") from error
    family, kind, protocol, _, address = infos[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


class Listener:
    """Serves a bound socket, by TLS if there is a context for it; an async context manager that owns the socket.

    `show` changes the application for the connections accepted from then on.
    """

    def __init__(
        self, listener: socket.socket, options: HttpOptions, tls: ssl.SSLContext | None = None
    ) -> None:
        self._socket = listener
        self._tls = tls
        self._options = options
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    async def show(self, app: web.Application) -> None:
        """Serve `app` instead of what was served; begins to accept if this is the first."""
        loop = asyncio.get_running_loop()
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=CLEANUP_TIMEOUT_S
        )
        await runner.setup()
        before, self._runner = self._runner, runner
        if self._server is None:
            handshake_timeout_s = None if self._tls is None else self._options.read_timeout_s
            self._server = await loop.create_server(
                self._accept,
                sock=self._socket,
                backlog=BACKLOG,  # the socket listens already; this would set another one
                ssl=self._tls,
                ssl_handshake_timeout=handshake_timeout_s,
            )
        if before is not None:
            await before.cleanup()

    def _accept(self) -> Connection:
        assert self._runner is not None
        server = self._runner.server
        assert server is not None
        return Connection(
            server,
            loop=asyncio.get_running_loop(),
            head_timeout_s=self._options.read_timeout_s,
            keepalive_timeout=IDLE_TIMEOUT_S,
            access_log=None,
            auto_decompress=False,  # `body` refuses encodings: no bomb is ever unpacked
        )

    async def __aenter__(self) -> "Listener":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Accept no more, end idle connections at once and others after CLEANUP_TIMEOUT_S."""
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self._socket.close()
