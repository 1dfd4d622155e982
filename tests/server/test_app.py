import asyncio
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from prfaas.config.options import HttpOptions, ModelOptions, NodeConfig
from prfaas.errors import ConfigError, EngineError
from prfaas.server.app import serve, served_name
from prfaas.server.listening import bind_socket
from prfaas.server.node import NodeFactory
from tests.server.fake_node import FakeNode, byte_ids
from tests.server.http_face import CHAT, CONFIG, chat_text, parse_events, strict_json
from tests.transport.certificates import Certificates

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def config_on(port: int, **http: Any) -> NodeConfig:
    return replace(CONFIG, http=replace(CONFIG.http, port=port, **http))


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Client:
    """Asks a node that may not listen yet."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self._session = session
        self.url = f"http://127.0.0.1:{port}"

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(self.url + path) as response:
            return response.status, strict_json(await response.read())

    async def post(self, path: str, body: Any) -> tuple[int, Any, Any]:
        async with self._session.post(self.url + path, json=body) as response:
            return response.status, strict_json(await response.read()), response.headers

    async def until_ready(self, status: int = 200) -> Any:
        while True:
            try:
                answered, body = await self.get("/ready")
            except aiohttp.ClientError:
                answered, body = 0, None
            if answered == status:
                return body
            await asyncio.sleep(0.005)


async def with_node(
    node: Any, config: NodeConfig, act: Callable[[Client], Any], factory: NodeFactory | None = None
) -> None:
    """Run `serve` and `act` side by side; `act` must make the node stop."""
    assert config.http.port is not None
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(factory or (lambda *_: node), config))
        await act(Client(session, config.http.port))


async def test_a_node_lives_from_load_to_drain_and_leaves_nothing(no_leaks):
    node = FakeNode()
    seen: list[Any] = []
    config = config_on(free_port())
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        client = Client(session, config.http.port or 0)
        tasks.create_task(serve(lambda *_: node, config, on_ready=lambda *what: seen.append(what)))
        await client.until_ready()
        assert (await client.get("/health")) == (200, {"status": "alive"})
        status, body, _ = await client.post("/v1/chat/completions", CHAT)
        assert (status, body["choices"][0]["message"]["content"]) == (200, "Hello, world!")
        terminate()
    assert node.is_started
    assert node.is_draining
    assert node.is_closed
    ((told, routes),) = seen
    assert told is node
    assert {"POST /v1/chat/completions", "GET /ready", "GET /metrics"} <= set(routes)


async def test_while_loading_a_node_is_alive_and_not_ready():
    release = threading.Event()
    node = FakeNode()

    def factory(config, metrics, progress):
        progress("weights", 45, 100)
        release.wait()
        return node

    async def act(client):
        body = await client.until_ready(503)
        while "weights" not in body["reason"]:
            body = await client.until_ready(503)
        assert body == {"status": "not_ready", "reason": "loading: weights 45 %"}
        assert (await client.get("/health"))[0] == 200
        for path in ("/v1/models", "/nope"):
            status, body = await client.get(path)
            assert status == 503
            assert body["error"]["code"] == "overloaded"
        status, body, headers = await client.post("/v1/chat/completions", CHAT)
        assert status == 503
        assert int(headers["Retry-After"]) >= 1
        async with aiohttp.request("GET", client.url + "/metrics") as response:
            assert "prfaas_ready 0.0" in await response.text()
        release.set()
        await client.until_ready()  # the same client: its connection must reach the new face
        assert (await client.get("/v1/models"))[0] == 200
        terminate()

    await with_node(node, config_on(free_port()), act, factory)


async def test_a_signal_while_loading_stops_the_load_at_its_next_progress_call():
    is_loading = threading.Event()

    def factory(config, metrics, progress):
        is_loading.set()
        while True:
            progress("weights", 1, 100)

    async def act(client):
        await client.until_ready(503)
        await asyncio.to_thread(is_loading.wait)
        terminate()

    await with_node(None, config_on(free_port()), act, factory)  # returns


async def test_a_node_whose_load_ends_after_the_signal_is_closed_unused():
    release = threading.Event()
    node = FakeNode()

    def factory(config, metrics, progress):
        release.wait()
        return node

    async def act(client):
        await client.until_ready(503)
        terminate()
        await asyncio.sleep(0)
        release.set()

    await with_node(node, config_on(free_port()), act, factory)
    assert node.is_closed
    assert not node.is_started


async def test_a_load_that_cannot_be_stopped_is_left_behind():
    release = threading.Event()

    def factory(config, metrics, progress):
        release.wait()
        return FakeNode()

    async def act(client):
        await client.until_ready(503)
        terminate()

    await with_node(None, config_on(free_port(), drain_timeout_s=0.05), act, factory)
    release.set()


async def test_a_model_that_cannot_be_loaded_ends_the_node_with_its_reason():
    def factory(config, metrics, progress):
        raise ConfigError("no such model: x")

    with pytest.raises(ConfigError, match="no such model"):
        await serve(factory, config_on(free_port()))


async def test_a_used_port_is_told_before_loading():
    loaded: list[int] = []

    def factory(config, metrics, progress):
        loaded.append(1)
        return FakeNode()

    with bind_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: .*in use"):
            await serve(factory, config_on(port))
    assert loaded == []


async def test_a_node_whose_engine_hangs_is_alive_and_not_ready():
    node = FakeNode()

    async def act(client):
        await client.until_ready()
        node.ready = (False, "the engine has made no step for 61 s")
        assert (await client.get("/health"))[0] == 200
        status, body = await client.get("/ready")
        assert (status, body["reason"]) == (503, "the engine has made no step for 61 s")
        status, body, _ = await client.post("/v1/chat/completions", CHAT)
        assert status == 503
        node.ready = (True, "")
        assert (await client.get("/ready"))[0] == 200
        terminate()

    await with_node(node, config_on(free_port()), act)


async def test_a_drain_refuses_the_new_and_finishes_the_running():
    node = FakeNode(lambda request: [byte_ids("x" * 50)])
    node.hold_at = 5

    async def act(client):
        await client.until_ready()
        body = {**CHAT, "stream": True}
        async with (
            aiohttp.ClientSession() as own,
            own.post(client.url + "/v1/chat/completions", json=body) as response,
        ):
            assert response.status == 200
            terminate()
            reason = (await client.until_ready(503))["reason"]
            assert "draining" in reason
            assert (await client.get("/health"))[0] == 200
            status, refused, headers = await client.post("/v1/chat/completions", CHAT)
            assert status == 503
            assert "draining" in refused["error"]["message"]
            assert "Retry-After" in headers
            assert not node.is_closed
            node.release.set()
            events = parse_events((await response.read()).decode())
        assert chat_text(events) == "x" * 50

    await with_node(node, config_on(free_port()), act)
    assert node.num_aborted == 0


class ClosingNode(FakeNode):
    """Ends what runs when it is closed, as a real one does."""

    async def close(self) -> None:
        self.fail_at = (self.hold_at or 0, EngineError("the node is closing"))
        self.release.set()
        await super().close()


@pytest.mark.parametrize("by", ["second signal", "time-out"])
async def test_a_drain_that_is_cut_short_ends_streams_with_an_error_event(by):
    node = ClosingNode()
    node.hold_at = 2

    async def act(client):
        await client.until_ready()
        body = {**CHAT, "stream": True}
        async with (
            aiohttp.ClientSession() as own,
            own.post(client.url + "/v1/chat/completions", json=body) as response,
        ):
            terminate()
            await client.until_ready(503)
            if by == "second signal":
                terminate()
            events = parse_events((await response.read()).decode())
        assert events[-1]["error"]["message"] == "the node is closing"

    timeout_s = 600.0 if by == "second signal" else 0.1
    await with_node(node, config_on(free_port(), drain_timeout_s=timeout_s), act)


async def test_a_drain_waits_for_transfers_to_peers():
    class SendingNode(FakeNode):
        num_transfers = 1

        def load(self):
            return replace(super().load(), num_transfers=self.num_transfers)

    node = SendingNode()

    async def act(client):
        await client.until_ready()
        terminate()
        await client.until_ready(503)
        await asyncio.sleep(0.1)
        assert not node.is_closed
        node.num_transfers = 0

    await with_node(node, config_on(free_port()), act)
    assert node.is_closed


async def test_a_background_task_that_fails_ends_the_node():
    class FailingNode(FakeNode):
        async def start(self, tasks):
            tasks.create_task(self._fail())

        async def _fail(self) -> None:
            raise EngineError("the engine thread died")

    node = FailingNode()
    with pytest.raises(EngineError, match="thread died"):
        await serve(lambda *_: node, config_on(free_port()))
    assert node.is_closed


class PrefillNode(FakeNode):
    """A node of the prefill role, as far as HTTP sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.role = "prefill"

    def routes(self):
        async def handshake(_request):
            return web.json_response({"ok": True})

        return [web.post("/kv/v1/handshake", handshake)]


async def test_the_prefill_role_serves_its_channel_and_says_who_serves_chats():
    async def act(client):
        await client.until_ready()
        assert (await client.post("/kv/v1/handshake", {}))[:2] == (200, {"ok": True})
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
            status, body, _ = await client.post(path, CHAT)
            assert status == 404
            assert body["error"]["code"] == "wrong_role"
            assert "pd" in body["error"]["message"]
        assert (await client.get("/v1/models"))[0] == 404
        async with aiohttp.request("GET", client.url + "/metrics") as response:
            assert 'role="prefill"' in await response.text()
        terminate()

    config = replace(config_on(free_port(), api_key="k"), role="prefill")
    open_config = replace(config, http=replace(config.http, api_key=None))
    await with_node(PrefillNode(), open_config, act)


async def test_the_key_of_clients_does_not_bar_peers():
    async def act(client):
        await client.until_ready()
        assert (await client.post("/kv/v1/handshake", {}))[0] == 200
        assert (await client.get("/metrics"))[0] == 401
        terminate()

    config = replace(config_on(free_port(), api_key="k"), role="prefill")
    await with_node(PrefillNode(), config, act)


async def test_the_prefill_role_leaves_loopback_in_plain_text_only_when_allowed():
    config = replace(config_on(free_port(), host="0.0.0.0"), role="prefill")
    with pytest.raises(ConfigError, match="allow-plaintext"):
        await serve(lambda *_: PrefillNode(), config)


async def test_a_prefill_node_with_a_certificate_speaks_nothing_but_tls(tmp_path, no_leaks):
    made = Certificates(tmp_path)
    cert, key = made.issue("node")
    config = replace(
        config_on(free_port()),
        role="prefill",
        transport=replace(CONFIG.transport, tls_cert=cert, tls_key=key),
    )
    trusted = ssl.create_default_context(cafile=made.authority)

    async def act(client: Client) -> None:
        client.url = client.url.replace("http:", "https:")
        await client.until_ready()
        async with aiohttp.ClientSession() as plain:
            with pytest.raises(aiohttp.ClientError):
                await plain.get(f"http://127.0.0.1:{config.http.port}/health")
        terminate()

    connector = aiohttp.TCPConnector(ssl=trusted)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(lambda *_: PrefillNode(), config))
        await act(Client(session, config.http.port or 0))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (ModelOptions(model="gemma-3-270m"), "gemma-3-270m"),
        (ModelOptions(model="org/name"), "org/name"),
        (ModelOptions(model="x", served_model_name="mine"), "mine"),
    ],
)
def test_a_model_is_served_under_the_name_it_was_given_by(options, name):
    assert served_name(NodeConfig(model=options)) == name


def test_a_model_given_as_a_path_is_served_under_its_stem(tmp_path):
    (tmp_path / "Qwen2.5-0.5B").mkdir()
    (tmp_path / "tiny.Q4.gguf").touch()
    assert (
        served_name(NodeConfig(model=ModelOptions(model=str(tmp_path / "Qwen2.5-0.5B"))))
        == "Qwen2.5-0.5B"
    )
    assert (
        served_name(NodeConfig(model=ModelOptions(model=str(tmp_path / "tiny.Q4.gguf"))))
        == "tiny.Q4"
    )


async def test_a_port_that_is_not_set_is_a_config_error():
    with pytest.raises(ConfigError, match=r"http\.port"):
        await serve(lambda *_: FakeNode(), NodeConfig(http=HttpOptions()))


PROCESS = """
import asyncio, sys
import uvloop
sys.path.insert(0, {root!r})
from tests.server.test_app import ClosingNode, config_on
from tests.server.fake_node import byte_ids
from prfaas.server.app import serve

async def main():
    node = ClosingNode(lambda request: [byte_ids("x" * 50)])
    node.hold_at = 5
    await serve(lambda *_: node, config_on(int(sys.argv[1]), drain_timeout_s=0.3))

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


@pytest.mark.slow
async def test_a_process_on_uvloop_exits_with_0_and_its_port_is_free_at_once():
    port = free_port()
    command = [sys.executable, "-c", PROCESS.format(root=str(ROOT)), str(port)]
    async with aiohttp.ClientSession() as session:
        client = Client(session, port)
        # The second start follows at once, with a connection left open.
        for number in (signal.SIGTERM, signal.SIGINT):
            process = await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, stdout=asyncio.subprocess.DEVNULL
            )
            try:
                await client.until_ready()
                async with session.post(
                    client.url + "/v1/chat/completions", json={**CHAT, "stream": True}
                ) as stream:
                    assert stream.status == 200
                    with socket.create_connection(("127.0.0.1", port)):
                        process.send_signal(number)
                        assert await process.wait() == 0
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
