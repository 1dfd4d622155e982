"""The HTTP face of a fake node on a real port, and clients that look at its answers closely."""

import asyncio
import io
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from prfaas.config.options import HttpOptions, ModelOptions, NodeConfig
from prfaas.server.app import Face
from prfaas.server.lifecycle import Lifecycle
from prfaas.server.listening import Listener, bind_socket
from prfaas.server.metrics import Metrics
from tests.server.fake_node import FakeNode

CONFIG = NodeConfig(
    role="pd",
    model=ModelOptions(served_model_name="tiny"),
    http=HttpOptions(port=0, max_body_bytes=1 << 20),
)
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "Hi", "max_tokens": 100}


@dataclass
class HttpFace:
    node: FakeNode
    lifecycle: Lifecycle
    metrics: Metrics
    face: Face
    session: aiohttp.ClientSession
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.get(self.url + path, **options) as response:
            return response.status, strict_json(await response.read())

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        data = io.BytesIO(json.dumps(body).encode())
        options["headers"] = {"Content-Type": "application/json", **options.get("headers", {})}
        async with self.session.post(self.url + path, data=data, **options) as response:
            return response.status, strict_json(await response.read())

    async def chat(self, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/chat/completions", {**CHAT, **fields})

    async def complete(self, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/completions", {**TEXT, **fields})

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, which must end with [DONE]."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            text = (await response.read()).decode()
            assert response.status == 200, text
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        return parse_events(text)

    async def stream_chat(self, **fields: Any) -> list[Any]:
        return await self.stream("/v1/chat/completions", {**CHAT, **fields})

    async def stream_complete(self, **fields: Any) -> list[Any]:
        return await self.stream("/v1/completions", {**TEXT, **fields})


@asynccontextmanager
async def running(node: FakeNode | None = None, **http: Any) -> AsyncIterator[HttpFace]:
    """Serve `node` (a default one) with these HTTP options."""
    node = node or FakeNode()
    config = replace(CONFIG, http=replace(CONFIG.http, **http))
    lifecycle, metrics = Lifecycle(), Metrics()
    listening = bind_socket("127.0.0.1", 0)
    port = listening.getsockname()[1]
    with Face(config, lifecycle, metrics) as face:
        async with Listener(listening, config.http) as listener, aiohttp.ClientSession() as session:
            await listener.show(face.node_app(node))
            face.start_serving(node)
            yield HttpFace(
                node=node,
                lifecycle=lifecycle,
                metrics=metrics,
                face=face,
                session=session,
                port=port,
            )


async def until(condition: Callable[[], object]) -> None:
    """Return once `condition` holds; the test's own time-out is the bound."""
    while not condition():  # noqa: ASYNC110  the condition belongs to the code under test
        await asyncio.sleep(0.001)


async def settled(face: HttpFace) -> None:
    """Return once nothing runs at the node and nobody is inside."""
    await until(lambda: not face.node.num_running and not face.lifecycle.num_inside)


def strict_json(data: bytes) -> Any:
    """Parse JSON as the standard has it: no NaN, no Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(data, parse_constant=refuse)


def parse_events(text: str) -> list[Any]:
    """The bodies of a stream's events, by the rules of server-sent events."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if not lines:
            continue
        assert len(lines) == 1, block
        assert lines[0].startswith("data: "), block
        events.append(lines[0].removeprefix("data: "))
    assert events[-1] == "[DONE]"
    return [strict_json(event.encode()) for event in events[:-1]]


def chat_text(events: list[Any], index: int = 0) -> str:
    """The text of one choice of a streamed chat."""
    return "".join(
        choice["delta"].get("content", "")
        for event in events
        for choice in event["choices"]
        if choice["index"] == index
    )


def finish_reasons(events: list[Any]) -> dict[int, list[str]]:
    """All finish reasons of a stream, by choice."""
    reasons: dict[int, list[str]] = {}
    for event in events:
        for choice in event["choices"]:
            if choice["finish_reason"] is not None:
                reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    return reasons


def reset(connection: socket.socket) -> None:
    """Leave without a goodbye: the other side sees RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def blocking_client(port: int) -> socket.socket:
    """A connected socket for the loop's sock_ calls."""
    client = socket.create_connection(("127.0.0.1", port))
    client.setblocking(False)
    return client


def raw_chat(port: int, **fields: object) -> bytes:
    """A chat request as its bytes."""
    body = json.dumps({**CHAT, **fields}).encode()
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
