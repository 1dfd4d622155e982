import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prfaas.errors import BadRequest, EngineError, Overloaded
from prfaas.server.generation import RunningGeneration
from prfaas.server.sse import ClientStalled, EventStream
from prfaas.types import FinishReason, Request, TokenEvent
from tests.server.fake_node import FakeNode, byte_ids, token_ids
from tests.server.http_face import (
    CHAT,
    TEXT,
    blocking_client,
    chat_text,
    finish_reasons,
    parse_events,
    raw_chat,
    reset,
    running,
    settled,
    until,
)

FOX = "The quick brown fox"


async def test_a_whole_chat_tells_its_text_usage_and_route():
    async with running(FakeNode("Hello 😀")) as face:
        status, body = await face.chat()
    assert status == 200
    assert body["object"] == "chat.completion"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello 😀", "refusal": None}
    assert choice["finish_reason"] == "stop"
    usage = body["usage"]
    num_prompt = len(face.node.requests[0].prompt_tokens)
    num_drawn = len(token_ids("Hello 😀")) + 1
    assert usage["prompt_tokens"] == num_prompt
    assert usage["completion_tokens"] == num_drawn
    assert usage["total_tokens"] == num_prompt + num_drawn
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
    assert usage["prfaas"]["route"] == "remote"
    assert usage["prfaas"]["tokens_remote"] == num_prompt - 1
    assert usage["prfaas"]["bytes_received"] == 1234


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_headers_say_how_the_prompt_came_to_its_kv(path, is_stream):
    body = {"model": "tiny", "stream": is_stream, "max_tokens": 5}
    body |= {"prompt": "Hi"} if path == "/v1/completions" else {"messages": CHAT["messages"]}
    async with (
        running() as face,
        face.session.post(face.url + path, json=body) as response,
    ):
        await response.read()
        headers = response.headers
    assert headers["X-Prfaas-Route"] == "remote"
    assert headers["X-Prfaas-Reason"] == "above_threshold"
    assert headers["X-Prfaas-Bytes-Received"] == "1234"
    assert headers["X-Request-Id"] == face.node.requests[0].request_id


async def test_a_reason_cannot_forge_a_header():
    node = FakeNode()
    async with running(node) as face:
        node.script = lambda request: [token_ids("x")]
        original = node.generate

        def generate(request, **options):
            context = original(request, **options)

            class Renamed:
                async def __aenter__(self):
                    generation = await context.__aenter__()
                    generation.record.reason = "peer_down: bad\r\nX-Evil: 1 \x1b[31m é"
                    return generation

                async def __aexit__(self, *error):
                    return await context.__aexit__(*error)

            return Renamed()

        node.generate = generate  # type: ignore[method-assign]
        async with face.session.post(face.url + "/v1/chat/completions", json=CHAT) as response:
            assert response.headers["X-Prfaas-Reason"] == "peer_down: bad??X-Evil: 1 ?[31m ?"
            assert "X-Evil" not in response.headers


@pytest.mark.parametrize("cut", ["tokens", "bytes"])
async def test_a_stop_string_that_spans_tokens_never_reaches_the_client(cut):
    tokens = token_ids(FOX) if cut == "tokens" else byte_ids(FOX)
    async with running(FakeNode(lambda request: [tokens])) as face:
        _, whole = await face.chat(stop=["own fox"])
        events = await face.stream_chat(stop=["own fox"])
        _, whole_text = await face.complete(stop="own fox")
        text_events = await face.stream_complete(stop="own fox")
        stopped = [choice for _, choice in face.node.stopped_choices]
    assert whole["choices"][0]["message"]["content"] == "The quick br"
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert chat_text(events) == "The quick br"
    assert finish_reasons(events) == {0: ["stop"]}
    assert whole_text["choices"][0]["text"] == "The quick br"
    assert "".join(c["text"] for e in text_events for c in e["choices"]) == "The quick br"
    assert stopped == [0, 0, 0, 0]


async def test_the_beginning_of_a_stop_string_is_released_at_the_end():
    async with running(FakeNode(FOX)) as face:
        _, whole = await face.chat(stop=["fox jumps"])
        events = await face.stream_chat(stop=["fox jumps"])
    assert whole["choices"][0]["message"]["content"] == FOX
    assert chat_text(events) == FOX
    assert finish_reasons(events) == {0: ["stop"]}


@pytest.mark.parametrize("text", ["😀", "a😀b", "日本", "x日y本z"])
async def test_characters_that_span_tokens_come_whole(text):
    async with running(FakeNode(lambda request: [byte_ids(text)])) as face:
        _, whole = await face.chat()
        events = await face.stream_chat()
    assert whole["choices"][0]["message"]["content"] == text
    assert chat_text(events) == text
    for event in events:
        for choice in event["choices"]:
            assert "\ufffd" not in choice["delta"].get("content", "")


async def test_a_stream_cut_inside_a_character_ends_with_one_replacement():
    async with running(FakeNode(lambda request: [byte_ids("ab😀")])) as face:
        _, whole = await face.chat(max_completion_tokens=4)
        events = await face.stream_chat(max_completion_tokens=4)
    assert whole["choices"][0]["message"]["content"] == "ab\ufffd"
    assert chat_text(events) == "ab\ufffd"
    assert finish_reasons(events) == {0: ["length"]}


async def test_text_does_not_stall_behind_a_bad_byte():
    async with running(FakeNode(lambda request: [byte_ids(b"\xffok")])) as face:
        node = face.node
        node.hold_at = 3
        async with face.session.post(
            face.url + "/v1/chat/completions", json={**CHAT, "stream": True}
        ) as response:
            received = b""
            while b'"content":"k"' not in received:  # before the hold is released
                received += await response.content.readany()
            node.release.set()
            received += await response.content.read()
    assert chat_text(parse_events(received.decode())) == "\ufffdok"


async def test_several_choices_keep_their_indexes_and_their_own_ends():
    texts = ["one", "two words", "three of them"]
    async with running(FakeNode(lambda request: [token_ids(t) for t in texts])) as face:
        _, whole = await face.chat(n=3, seed=7, temperature=1)
        events = await face.stream_chat(n=3, seed=7, temperature=1)
        request = face.node.requests[0]
    assert request.num_choices == 3
    assert request.sampling.seed == 7
    assert [c["message"]["content"] for c in whole["choices"]] == texts
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    assert [chat_text(events, index) for index in range(3)] == texts
    assert finish_reasons(events) == {0: ["stop"], 1: ["stop"], 2: ["stop"]}
    roles = [c["index"] for e in events for c in e["choices"] if c["delta"].get("role")]
    assert sorted(roles) == [0, 1, 2]


async def test_a_choice_stopped_by_a_string_leaves_the_others_running():
    texts = ["a STOP b", "c d e f g h i j k l m n o p q r s"]
    async with running(FakeNode(lambda request: [byte_ids(t) for t in texts])) as face:
        events = await face.stream_chat(n=2, stop="STOP")
        assert [choice for _, choice in face.node.stopped_choices] == [0]
    assert chat_text(events, 0) == "a "
    assert chat_text(events, 1) == texts[1]
    assert finish_reasons(events) == {0: ["stop"], 1: ["stop"]}


async def test_several_prompts_are_answered_in_order():
    def script(request):
        return [[token_id] * 2 for token_id in (request.prompt_tokens[-1],)] * request.num_choices

    async with running(FakeNode(script)) as face:
        _, whole = await face.complete(prompt=["aa", "bb", "cc"], n=2)
        events = await face.stream_complete(prompt=["aa", "bb", "cc"], n=2)
        ids = {request.request_id for request in face.node.requests}
    assert [c["index"] for c in whole["choices"]] == list(range(6))
    texts = [c["text"] for c in whole["choices"]]
    assert texts == [t for letter in "abc" for t in [texts["abc".index(letter) * 2]] * 2]
    assert all(letter in text for letter, text in zip("aabbcc", texts, strict=True))
    streamed = {
        index: "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index)
        for index in range(6)
    }
    assert list(streamed.values()) == texts
    assert len(ids) == 6
    assert whole["usage"]["prompt_tokens"] == sum(
        len(request.prompt_tokens) for request in face.node.requests[:3]
    )
    assert len(whole["usage"]["prfaas"]["requests"]) == 3


async def test_token_ids_are_a_prompt_as_they_are():
    async with running() as face:
        status, _ = await face.complete(prompt=[2, 5, 6])
        status_many, _ = await face.complete(prompt=[[5], [6, 7]])
    assert (status, status_many) == (200, 200)
    assert [r.prompt_tokens for r in face.node.requests] == [(2, 5, 6), (5,), (6, 7)]


async def test_echo_puts_the_prompt_before_every_choice():
    async with running(FakeNode(" there")) as face:
        _, whole = await face.complete(prompt="Hi", echo=True, n=2)
        events = await face.stream_complete(prompt="Hi", echo=True)
        _, from_ids = await face.complete(prompt=token_ids("Hi"), echo=True)
    assert [c["text"] for c in whole["choices"]] == ["Hi there"] * 2
    assert "".join(c["text"] for e in events for c in e["choices"]) == "Hi there"
    assert from_ids["choices"][0]["text"] == "Hi there"


async def test_usage_comes_last_in_a_stream_that_asks_for_it():
    async with running() as face:
        events = await face.stream_chat(stream_options={"include_usage": True})
        plain = await face.stream_chat()
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] > 0
    assert events[-1]["usage"]["prfaas"]["route"] == "remote"
    assert all("usage" not in event for event in plain)


@pytest.mark.parametrize("num_top", [0, 1, 2, 4])
@pytest.mark.parametrize("text", ["Hello, world", "a日😀b"])
async def test_logprobs_are_finite_and_spell_the_content(num_top, text):
    tokens = byte_ids(text)
    async with running(FakeNode(lambda request: [tokens])) as face:
        _, whole = await face.chat(logprobs=True, top_logprobs=num_top)
        events = await face.stream_chat(logprobs=True, top_logprobs=num_top)
    entries = whole["choices"][0]["logprobs"]["content"]
    streamed = [
        entry
        for event in events
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert entries == streamed
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
    for entry in entries:
        assert len(entry["top_logprobs"]) == num_top
        assert all(-9999 <= top["logprob"] <= 0 for top in entry["top_logprobs"])


async def test_logprobs_end_where_the_stop_string_begins():
    async with running(FakeNode(lambda request: [byte_ids("ab STOP cd")])) as face:
        _, whole = await face.chat(logprobs=True, stop="STOP")
        events = await face.stream_chat(logprobs=True, stop="STOP")
    entries = whole["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == b"ab "
    streamed = [e for v in events for c in v["choices"] for e in c["logprobs"]["content"]]
    assert streamed == entries


async def test_completion_logprobs_are_parallel_lists_with_offsets():
    async with running(FakeNode(lambda request: [byte_ids("abc")])) as face:
        _, whole = await face.complete(logprobs=2)
    logprobs = whole["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == [-0.1] * 3
    assert [set(top) for top in logprobs["top_logprobs"]] == [{t, "<eos>"} for t in "abc"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("prompt is odd", param="prompt"), 400, "invalid_request_error"),
        (Overloaded("queue is full", retry_after_s=2.5), 503, "overloaded_error"),
        (EngineError("the engine stopped"), 500, "server_error"),
        (RuntimeError("secret detail"), 500, "server_error"),
    ],
)
async def test_what_fails_before_the_first_token_is_an_http_status(is_stream, error, status, kind):
    node = FakeNode()
    node.fail_before = error
    async with running(node) as face:
        answered, body = await face.chat(stream=is_stream)
    assert answered == status
    assert body["error"]["type"] == kind
    assert "secret" not in json.dumps(body)
    assert node.num_running == 0


async def test_what_fails_after_the_first_token_is_an_error_event():
    node = FakeNode()
    node.fail_at = (2, EngineError("the engine stopped"))
    async with running(node) as face:
        events = await face.stream_chat()
        assert 'reason="engine_error"} 1.0' in face.metrics.render().decode()
    assert events[-1]["error"]["code"] == "engine_error"
    assert events[-1]["error"]["message"] == "the engine stopped"
    assert all("choices" in event for event in events[:-1])


async def test_a_fault_of_our_own_in_mid_stream_is_told_without_details():
    node = FakeNode()
    node.fail_at = (2, RuntimeError("secret detail"))
    async with running(node) as face:
        events = await face.stream_chat()
    assert events[-1]["error"]["message"] == "internal error"


async def test_a_client_that_resets_its_stream_ends_the_work_and_hurts_nobody():
    node = FakeNode(lambda request: [byte_ids("abcdefgh" * 20)])
    node.hold_at = 2
    async with running(node) as face:
        loop = asyncio.get_running_loop()
        client = blocking_client(face.port)
        await loop.sock_sendall(client, raw_chat(face.port, stream=True, max_tokens=2000))
        received = b""
        while received.count(b"data: ") < 2:
            received += await loop.sock_recv(client, 65536)
        async with asyncio.TaskGroup() as tasks:
            other = tasks.create_task(face.chat())
            await until(lambda: not (node.num_running < 2))
            reset(client)
            await until(lambda: not (node.num_aborted < 1))
            node.release.set()
        assert other.result()[0] == 200
        await settled(face)
        assert face.lifecycle.num_inside == 0
        assert (await face.chat())[0] == 200


async def test_a_client_that_leaves_while_a_whole_answer_is_made_ends_the_work():
    node = FakeNode()
    node.hold_at = 1
    async with running(node) as face:
        client = blocking_client(face.port)
        await asyncio.get_running_loop().sock_sendall(client, raw_chat(face.port, max_tokens=2000))
        await node.is_holding.wait()
        reset(client)
        await settled(face)
        assert node.num_aborted == 1
        assert 'failures_total{reason="cancelled"} 1.0' in face.metrics.render().decode()


async def test_a_client_that_leaves_before_the_first_token_ends_the_work():
    node = FakeNode()
    node.hold_at = 0
    async with running(node) as face:
        for is_stream in (False, True):
            node.is_holding.clear()
            client = blocking_client(face.port)
            await asyncio.get_running_loop().sock_sendall(
                client, raw_chat(face.port, stream=is_stream)
            )
            await node.is_holding.wait()
            client.close()
            await settled(face)
        assert node.num_aborted == 2


async def test_a_stream_is_silent_before_its_first_token_unless_asked_for_comments():
    node = FakeNode()
    node.hold_at = 0
    async with (
        running(node, heartbeat_s=0.01) as face,
        face.session.post(
            face.url + "/v1/chat/completions", json={**CHAT, "stream": True}
        ) as response,
    ):
        assert response.status == 200  # the head came with the first comment
        assert await response.content.readline() == b": waiting\n"
        assert await response.content.readline() == b"\n"
        node.release.set()
        text = (await response.read()).decode()
    assert chat_text(parse_events(text)) == "Hello, world!"


async def test_stories_can_be_read_back():
    async with running() as face:
        _, answer = await face.chat()
        request_id = face.node.requests[0].request_id
        status, story = await face.get(f"/debug/requests/{request_id}")
        by_answer = await face.get(f"/debug/requests/{answer['id']}")
        _, listed = await face.get("/debug/requests")
        missing = await face.get("/debug/requests/nope")
    assert status == 200
    assert story["request_id"] == request_id
    assert story["route"] == "remote"
    assert story["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert story["finish_reasons"] == {"0": "stop"}
    assert by_answer == (200, story)
    assert listed["data"] == [story]
    assert missing[0] == 404


Drawn = tuple[int, int, str | bytes, FinishReason | None]
"""(prompt, choice, one byte, finish reason)."""


class BatchNode(FakeNode):
    """Draws the first batch as soon as all its prompts are there, and the second when it is told to."""

    def __init__(self, *batches: Sequence[Drawn]) -> None:
        super().__init__()
        self.batches = list(batches)
        self.generations: list[RunningGeneration] = []

    @asynccontextmanager
    async def generate(  # type: ignore[override]
        self, request: Request, **_options: Any
    ) -> AsyncIterator[RunningGeneration]:
        self.generations.append(RunningGeneration(request, clock=lambda: 0.0))
        if len(self.generations) == 1 + max(batch[0][0] for batch in self.batches):
            self.draw()
        yield self.generations[-1]

    def draw(self) -> None:
        for prompt, choice, text, reason in self.batches.pop(0):
            generation = self.generations[prompt]
            event = TokenEvent(
                request_id=generation.request.request_id,
                choice_index=choice,
                token_id=byte_ids(text)[0],
                finish_reason=reason,
            )
            generation.put(event)


@pytest.mark.parametrize("heartbeat_s", [None, 0.01])
@pytest.mark.parametrize(
    ("batches", "fields", "first", "rest"),
    [
        pytest.param(
            [[(0, 0, "H", None), (0, 0, b"\xc3", None)], [(0, 0, b"\xa9", "length")]],
            {},
            {0: "H"},
            {0: "é"},
            id="behind it half a character",
        ),
        pytest.param(
            [[(0, 0, "H", None), (0, 0, "<", None)], [(0, 0, "x", "length")]],
            {"stop": ["<e"]},
            {0: "H"},
            {0: "<x"},
            id="behind it the beginning of a stop string",
        ),
        pytest.param(
            [[(0, 0, "A", "length")], [(1, 0, "B", "length")]],
            {"prompt": ["Hi", "Ho"]},
            {0: "A"},
            {1: "B"},
            id="behind it a prompt's end",
        ),
        pytest.param(
            [
                [(0, 0, "A", None), (0, 0, ".", None), (0, 0, "x", None), (0, 0, "y", None)],
                [(0, 1, "B", "length")],
            ],
            {"n": 2, "stop": ["."]},
            {0: "A"},
            {1: "B"},
            id="behind it what follows a stop string",
        ),
    ],
)
async def test_text_is_not_held_back_by_what_adds_none(batches, fields, first, rest, heartbeat_s):
    node = BatchNode(*batches)
    async with (
        running(node, heartbeat_s=heartbeat_s) as face,
        face.session.post(
            face.url + "/v1/completions", json={**TEXT, **fields, "stream": True}
        ) as response,
    ):
        data = b""
        while _texts(data) != first or (heartbeat_s is not None and b": waiting" not in data):
            data += await response.content.readany()  # waits for ever if it does not come
        node.draw()
        data = await response.read()
    assert _texts(data) == rest


def _texts(data: bytes) -> dict[int, str]:
    """The text of each choice of the events that came whole and have some."""
    texts: dict[int, str] = {}
    for line in data.decode().split("\n\n")[:-1]:
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                if choice["text"]:
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


async def test_an_answer_whose_last_text_is_not_taken_is_not_finished(monkeypatch):
    async def stalled(self: EventStream) -> None:
        if self.is_begun:
            raise ClientStalled("the client took nothing")

    async def reached(self: EventStream) -> None:
        raise AssertionError("text was left for the end")

    monkeypatch.setattr(EventStream, "send", stalled)
    monkeypatch.setattr(EventStream, "end", reached)
    node = BatchNode([(0, 0, "A", "length")])
    async with running(node) as face:
        async with face.session.post(face.url + "/v1/completions", json={**TEXT, "stream": True}):
            pass
        text = face.metrics.render().decode()
    assert 'prfaas_request_failures_total{reason="client_left"} 1.0' in text
