"""A client of `/v1/completions` that notes when each token of a stream came, and never tries again."""

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import aiohttp

from prfaas.bench.load import Load, OpenLoop, Planned, Sample
from prfaas.clock import Clock, monotonic_s

PATH = "/v1/completions"
CONNECT_TIMEOUT_S = 30.0
MAX_EVENT_BYTES = 1 << 20
MAX_ERROR_BYTES = 1 << 16
MAX_NAME_CHARS = 80


class EventParser:
    """The bytes of a stream of server-sent events, in any cuts, as the data of each event."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of every event that is whole now. ValueError for one without an end."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"a line of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


class CompletionClient:
    """Asks one server. As many connections as there are requests in flight; none is tried twice."""

    def __init__(self, url: str, *, api_key: str | None, clock: Clock) -> None:
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._url = url.rstrip("/") + PATH
        self._clock = clock
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            headers=headers,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def ask(self, body: bytes, sample: Sample) -> None:
        """Send the body, and note in the sample how the answer came."""
        try:
            async with self._session.post(self._url, data=body) as response:
                if response.status != HTTPStatus.OK:
                    sample.error = await _refusal(response)
                    return
                _note_headers(sample, response.headers)
                sample.error = await self._read(response, sample)
                sample.is_done = sample.error is None
        except asyncio.CancelledError:
            sample.error = "unfinished"
            raise
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError):
            sample.error = "no_connection"
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError):
            sample.error = "connection_lost"
        except (aiohttp.ClientError, ValueError, LookupError, TypeError, AttributeError):
            sample.error = "bad_answer"

    async def _read(self, response: aiohttp.ClientResponse, sample: Sample) -> str | None:
        """Take the stream to its end; return what went wrong with it."""
        parser, is_whole = EventParser(), False
        async for data in response.content.iter_any():  # to its end, else the connection is lost
            now_s = self._clock()
            for event in parser.feed(data):
                is_whole = is_whole or event == b"[DONE]"
                error = None if is_whole else _note_event(sample, json.loads(event), now_s)
                if error is not None:
                    return error
        return None if is_whole else "cut_off"


def _note_event(sample: Sample, event: Mapping[str, Any], now_s: float) -> str | None:
    if "error" in event:
        return f"error_event {_code(event)}".rstrip()
    if event.get("choices"):
        sample.token(now_s)
    usage = event.get("usage")
    if usage:
        sample.completion_tokens = int(usage["completion_tokens"])
        sample.prompt_tokens = int(usage["prompt_tokens"])
        story = usage.get("prfaas") or {}
        sample.route = _name(story.get("route"), sample.route)
        sample.reason = _reason(story.get("reason"), sample.reason)
        sample.peer = _name(story.get("peer"), None)
        sample.node = _name(story.get("node"), None)
        sample.tokens_reused = int(story.get("tokens_reused", 0))
        sample.tokens_local = int(story.get("tokens_local", 0))
        sample.tokens_remote = int(story.get("tokens_remote", 0))
        sample.bytes_received = int(story.get("bytes_received", 0))
        predicted_s = story.get("predicted_ttft_s")
        sample.predicted_ttft_s = None if predicted_s is None else float(predicted_s)
    return None


def _note_headers(sample: Sample, headers: Mapping[str, str]) -> None:
    """What a stream says of its way when it begins: all there is of one that does not end."""
    sample.route = _name(headers.get("X-Prfaas-Route"), None)
    sample.reason = _reason(headers.get("X-Prfaas-Reason"), None)
    sample.bytes_received = int(headers.get("X-Prfaas-Bytes-Received", "0"))


async def _refusal(response: aiohttp.ClientResponse) -> str:
    body = await response.content.read(MAX_ERROR_BYTES)
    try:
        code = _code(json.loads(body))
    except (ValueError, AttributeError):
        code = ""
    return f"http_{response.status} {code}".rstrip()


def _code(body: Mapping[str, Any]) -> str:
    """Return an OpenAI error's machine-readable name, or nothing."""
    error = body.get("error")
    if not isinstance(error, dict):
        return ""
    return _name(error.get("code") or error.get("type"), None) or ""


def _reason(value: object, otherwise: str | None) -> str | None:
    """Return the reason without what it says of this request alone, behind a colon."""
    name = _name(value, otherwise)
    return None if name is None else name.partition(":")[0]


def _name(value: object, otherwise: str | None) -> str | None:
    """Return a string of the server as a label: short, without control characters."""
    if not isinstance(value, str):
        return otherwise
    return "".join(char if char.isprintable() else "?" for char in value[:MAX_NAME_CHARS])


async def load_server(
    url: str,
    planned: Sequence[Planned],
    *,
    max_s: float,
    api_key: str | None = None,
    on_sent: Callable[[int], object] = lambda _: None,
) -> Load:
    """Return how a server answered the requests. SIGINT and SIGTERM end it early: main thread only."""
    client = CompletionClient(url, api_key=api_key, clock=monotonic_s)
    sending = OpenLoop(client.ask, clock=monotonic_s, cpu_clock=time.process_time)
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as undo:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, sending.stop, number.name)
            undo.callback(loop.remove_signal_handler, number)
        try:
            return await sending.run(
                planned, num_planned=len(planned), max_s=max_s, on_sent=on_sent
            )
        finally:
            await client.close()
