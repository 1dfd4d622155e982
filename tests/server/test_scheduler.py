"""The scheduler's HTTP face: one API in front of many nodes, and its own door for them."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import aiohttp
import pytest

from prfaas.cache.changes import CacheSnapshot, Changes
from prfaas.clock import monotonic_s
from prfaas.config.options import HttpOptions, ModelOptions, NodeConfig
from prfaas.errors import BadRequest, TransferError, UntrustedPeer
from prfaas.scheduler.options import SchedulerOptions
from prfaas.scheduler.placing import Placement
from prfaas.server import fleet_client, fleet_routes
from prfaas.server.app import Face
from prfaas.server.fleet_client import FleetClient
from prfaas.server.heartbeat_messages import INLINE_KEYS
from prfaas.server.lifecycle import Lifecycle
from prfaas.server.listening import Listener, bind_socket
from prfaas.server.metrics import Metrics
from prfaas.server.pd import load_pd_node
from prfaas.server.scheduler import SchedulerNode, load_scheduler_node
from prfaas.transport.address import PeerAddress
from prfaas.transport.cluster_key import ClusterKey
from prfaas.transport.fleet_messages import FLEET_PREFIX, Refused
from prfaas.transport.security import ChannelSecurity
from tests.accepting import accept_no_more
from tests.server.fake_node import TOKENIZER
from tests.server.fleet import request, until
from tests.server.fleet_nodes import PATIENT, TEMPLATE, ScriptedNode
from tests.server.http_face import TEXT, parse_events, strict_json
from tests.server.real_nodes import config as real_config
from tests.server.real_nodes import no_progress
from tests.tiny_models import write_tiny_model

KEY, OTHER_KEY = ClusterKey(b"0123456789abcdef"), ClusterKey(b"fedcba9876543210")
API_KEY = "operator"


@dataclass
class SchedulerFace:
    node: SchedulerNode
    session: aiohttp.ClientSession
    address: PeerAddress

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(f"http://{self.address}{path}") as response:
            return response.status, strict_json(await response.read())

    async def status_of(self, endpoint: str, body: dict[str, Any]) -> int:
        url = f"http://{self.address}/v1/{endpoint}"
        async with self.session.post(url, json=body | {"model": "tiny"}) as response:
            await response.read()
            return response.status

    async def complete(self, **fields: Any) -> tuple[int, Any, Any]:
        body = {**TEXT, "prompt": [5, 6, 7], "max_tokens": 6, "seed": 3, **fields}
        url = f"http://{self.address}/v1/completions"
        async with self.session.post(url, json=body) as response:
            data = await response.read()
        answer = parse_events(data.decode()) if fields.get("stream") else strict_json(data)
        return response.status, answer, response.headers


@contextlib.asynccontextmanager
async def scheduler_face(
    num_nodes: int = 2, *, key: ClusterKey | None = KEY, api_key: str | None = None
) -> AsyncIterator[tuple[SchedulerFace, list[ScriptedNode]]]:
    config = NodeConfig(
        role="scheduler",
        model=ModelOptions(served_model_name="tiny"),
        http=HttpOptions(port=0, api_key=api_key),
    )
    security = ChannelSecurity(cluster_key=key)
    node = SchedulerNode(
        tokenizer=TOKENIZER,
        chat_template=TEMPLATE,
        options=PATIENT,
        scheduler=SchedulerOptions(placement_timeout_s=0.0),
        clock=monotonic_s,
        security=security,
    )
    listening = bind_socket("127.0.0.1", 0)
    address = PeerAddress("127.0.0.1", listening.getsockname()[1])
    nodes = [ScriptedNode(key=key) for _ in range(num_nodes)]
    client = FleetClient(address, PATIENT, security)
    with Face(config, Lifecycle(), Metrics()) as face:
        async with (
            asyncio.timeout(60),
            asyncio.TaskGroup() as tasks,
            Listener(listening, config.http) as listener,
            aiohttp.ClientSession(headers={"X-Api-Key": api_key or ""}) as session,
        ):
            await node.start(tasks)
            await listener.show(face.node_app(node))
            face.start_serving(node)
            try:
                for each in nodes:
                    await each.start()
                    await client.heartbeat(each.message())
                yield SchedulerFace(node, session, address), nodes
            finally:
                for each in nodes:
                    await each.close()
                await client.close()
                await node.close()
                await accept_no_more(listener._server)


def text_of(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


async def test_a_scheduler_without_nodes_lives_and_is_not_ready():
    async with scheduler_face(0) as (face, _):
        assert (await face.get("/health"))[0] == 200
        status, body = await face.get("/ready")
        assert (status, "no pd node" in str(body)) == (503, True)
        status, body, headers = await face.complete()
        assert status == 503
        assert int(headers["Retry-After"]) >= 1
        assert body["error"]["type"] == "overloaded_error"


async def test_an_answer_is_the_same_when_its_node_dies_after_the_first_delta():
    async with scheduler_face(2) as (face, nodes):
        assert (await face.get("/ready"))[0] == 200
        _, whole, _ = await face.complete()
        text = whole["choices"][0]["text"]
        placed = (await face.node.explain(request(prompt_tokens=(5, 6, 7)))).answer
        assert isinstance(placed, Placement)
        (dying,) = (node for node in nodes if node.name == placed.decode_at)
        dying.die_at = 1
        status, events, headers = await face.complete(
            stream=True, stream_options={"include_usage": True}
        )
        assert (status, text_of(events)) == (200, text)
        assert (headers["X-Prfaas-Route"], headers["X-Prfaas-Node"]) == ("local", dying.name)
        story = events[-1]["usage"]["prfaas"]
        assert (story["retries"], story["node"] != dying.name) == (1, True)
        assert events[-1]["usage"]["completion_tokens"] == 6
        _, record = await face.get(f"/debug/requests/{headers['X-Request-Id']}")
        assert [
            (each["node"], each["outcome"], each["num_tokens"]) for each in record["tries"]
        ] == [(dying.name, "failed", 1), (story["node"], "completed", 5)]
        first, second = record["tries"]
        assert (first["reason"], first["node_reason"], first["prefill_at"]) == (
            "short",
            "least_loaded",
            None,
        )
        assert dying.name in first["error"]
        assert (second["error"], second["waited_s"] < 60) == (None, True)


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
async def test_requests_are_spread_while_they_run_and_counted_no_longer_however_they_end(endpoint):
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    if endpoint == "completions":
        prompt = {"prompt": [5, 6, 7]}
    async with scheduler_face(2) as (face, nodes), asyncio.TaskGroup() as tasks:

        def ask() -> asyncio.Task[int]:
            return tasks.create_task(face.status_of(endpoint, prompt | {"max_tokens": 1}))

        def inflight() -> list[int]:
            return [member.num_inflight for member in face.node.members()]

        for node in nodes:
            node.hold_at = 0
        asked = [ask() for _ in range(4)]
        await until(lambda: [node.num_running for node in nodes] == [2, 2])
        assert inflight() == [2, 2]
        asked.pop().cancel()
        await until(lambda: sum(inflight()) == 3)
        for node in nodes:
            node.release.set()
        assert [await task for task in asked] == [200] * 3
        await until(lambda: sum(inflight()) == 0)
        for node in nodes:
            node.refuses = BadRequest("too long")
        assert await ask() == 400
        assert inflight() == [0, 0]
        for node in nodes:
            node.refuses, node.say_at = None, (0, Refused(kind="engine_error", message="crash"))
        assert await ask() == 500
        assert inflight() == [0, 0]


async def test_an_answer_that_nobody_can_continue_ends_with_an_error_and_nothing_twice():
    async with scheduler_face(2) as (face, nodes):
        _, whole, _ = await face.complete()
        for node in nodes:
            node.die_at = 2
        status, (*events, last), _ = await face.complete(stream=True)
        assert status == 200
        assert last["error"]["code"] == "engine_error"
        assert whole["choices"][0]["text"].startswith(text_of(events))
        status, body, _ = await face.complete()
        assert (status, body["error"]["type"]) == (503, "overloaded_error")  # both are suspected


async def test_a_loaded_scheduler_has_the_text_of_its_models_nodes(tmp_path):
    path = write_tiny_model(tmp_path / "tiny", "llama")
    ours = load_scheduler_node(
        NodeConfig(role="scheduler", model=ModelOptions(model=str(path))), Metrics(), no_progress
    )
    node = load_pd_node(real_config(path), Metrics(), no_progress)
    for name in ("tokenizer_fingerprint", "template_fingerprint"):
        assert getattr(ours.identity, name) == getattr(node.identity, name)
    assert ours.tokenizer.encode("Hello", add_bos=True) == node.tokenizer.encode(
        "Hello", add_bos=True
    )
    await ours.close()
    await node.close()


async def test_the_story_says_which_node_answered_and_why():
    async with scheduler_face(2) as (face, nodes):
        _, whole, _ = await face.complete()
        story = whole["usage"]["prfaas"]
        assert story["node"] in {node.name for node in nodes}
        assert story["node_reason"]
        assert story["retries"] == 0
        answer_id = whole["id"]
        status, record = await face.get(f"/debug/requests/{answer_id}")
        assert (status, record["node"]) == (200, story["node"])


async def test_the_api_key_and_the_cluster_key_open_different_doors():
    async with scheduler_face(1, api_key=API_KEY) as (face, (node,)):
        assert (await face.complete())[0] == 200
        async with aiohttp.ClientSession() as stranger:
            url = f"http://{face.address}"
            async with stranger.post(f"{url}/v1/completions", json=TEXT) as response:
                assert response.status == 401
        for path in ("heartbeat", "leave"):
            async with face.session.post(
                f"http://{face.address}{FLEET_PREFIX}{path}", json={"node": node.name, "epoch": 1}
            ) as response:
                assert response.status == 401
        assert len(face.node.members()) == 1


@pytest.mark.parametrize("key", [None, OTHER_KEY], ids=["no key", "another key"])
async def test_a_node_without_our_key_does_not_get_into_the_fleet(key):
    async with scheduler_face(0) as (face, _):
        stranger = ScriptedNode(key=key)
        stranger.name = "127.0.0.1:9"
        client = FleetClient(face.address, PATIENT, ChannelSecurity(cluster_key=key))
        try:
            with pytest.raises(UntrustedPeer):
                await client.heartbeat(stranger.message())
            with pytest.raises(UntrustedPeer):
                await client.leave(stranger.name, stranger.epoch, stranger.identity)
        finally:
            await client.close()
        assert face.node.members() == ()


async def test_a_node_that_wants_proof_finds_a_scheduler_without_a_key():
    async with scheduler_face(0, key=None) as (face, _):
        node = ScriptedNode(key=KEY)
        node.name = "127.0.0.1:9"
        client = FleetClient(face.address, PATIENT, ChannelSecurity(cluster_key=KEY))
        try:
            with pytest.raises(UntrustedPeer, match="has no cluster key"):
                await client.heartbeat(node.message())
        finally:
            await client.close()


async def test_what_a_large_cache_says_is_written_and_read_beside_the_loop(monkeypatch):
    threads: dict[str, list[bool]] = {"encode_heartbeat": [], "parse_heartbeat": []}

    def watched(module: ModuleType, name: str) -> None:
        work = getattr(module, name)

        def seen(*args: object) -> object:
            threads[name].append(threading.current_thread() is threading.main_thread())
            return work(*args)

        monkeypatch.setattr(module, name, seen)

    watched(fleet_client, "encode_heartbeat")
    watched(fleet_routes, "parse_heartbeat")
    keys = tuple(4 * index.to_bytes(8, "big") for index in range(2 * INLINE_KEYS))
    async with scheduler_face(1) as (face, (node,)):
        client = FleetClient(face.address, PATIENT, ChannelSecurity(cluster_key=KEY))
        try:
            said = CacheSnapshot(epoch=1, sequence=0, keys=keys)
            await client.heartbeat(replace(node.message(), snapshot=said))
            assert face.node.driver.num_keys == len(keys)
            more = Changes(epoch=1, sequence=1, removed=keys)
            await client.heartbeat(replace(node.message(), changes=more))
            assert face.node.driver.num_keys == 0
        finally:
            await client.close()
    assert list(threads.values()) == [[True, False, False], [True, False, False]]


async def test_a_heartbeat_that_makes_no_sense_is_refused_and_changes_nothing():
    async with scheduler_face(1, key=None) as (face, (node,)):
        url = f"http://{face.address}{FLEET_PREFIX}heartbeat"
        for body in (b"", b"{}", b"[]", b'{"node":"x"}'):
            async with face.session.post(url, data=body) as response:
                assert response.status == 400
                assert strict_json(await response.read())["error"]["message"]
        client = FleetClient(face.address, PATIENT)
        other = replace(node.message(), identity=replace(node.identity, kv_dtype="other"))
        try:
            with pytest.raises(TransferError, match=r"kv_dtype differs: 'bytes' here"):
                await client.heartbeat(other)
        finally:
            await client.close()
        assert [member.node for member in face.node.members()] == [node.name]
