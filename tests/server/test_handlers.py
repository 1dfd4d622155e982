import asyncio
import threading
from typing import Any

import openai
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prfaas.cache.tenants import salt_of
from prfaas.text.chat_template import ChatTemplate
from prfaas.transport.answers import read_body
from tests.server.fake_node import TINY_TEMPLATE, FakeNode, byte_ids
from tests.server.http_face import CHAT, TEXT, HttpFace, finish_reasons, running, strict_json
from tests.server.openai_schema import SCHEMAS, check, check_stream


def check_error(body: Any) -> None:
    """Our errors have all four keys, as the document asks."""
    check("ErrorResponse", body)
    assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2},
        {"logprobs": True, "top_logprobs": 4},
        {"stop": "zzz", "seed": 1, "temperature": 0},
        {"max_completion_tokens": 2},
    ],
)
async def test_chat_answers_are_valid_by_openais_schema(fields):
    async with running() as face:
        status, body = await face.chat(**fields)
        events = await face.stream_chat(**fields)
        with_usage = await face.stream_chat(**fields, stream_options={"include_usage": True})
    assert status == 200
    check("CreateChatCompletionResponse", body)
    check_stream("chat", events)
    check_stream("chat", with_usage)


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": 3}, {"echo": True}])
async def test_completion_answers_are_valid_by_openais_schema(fields):
    async with running() as face:
        status, body = await face.complete(**fields)
        events = await face.stream_complete(**fields)
    assert status == 200
    check("CreateCompletionResponse", body)
    check_stream("completions", events)


async def test_models_are_valid_by_openais_schema():
    async with running() as face:
        listed = await face.get("/v1/models")
        one = await face.get("/v1/models/tiny")
        missing = await face.get("/v1/models/other")
        nested = await face.get("/v1/models/org/other")
    assert listed[0] == one[0] == 200
    check("ListModelsResponse", listed[1])
    check("Model", one[1])
    assert listed[1]["data"] == [one[1]]
    for status, body in (missing, nested):
        assert status == 404
        check_error(body)
        assert body["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("model", "status", "code"),
    [
        ("unknown", 404, "model_not_found"),
        ("TINY", 404, "model_not_found"),
        ("../tiny", 404, "model_not_found"),
        ("tiny\x00\n\x1b[31m", 404, "model_not_found"),
        (None, 400, None),
        ("", 400, None),
        (5, 400, None),
        (["tiny"], 400, None),
        ("m" * 100_000, 400, None),
    ],
)
async def test_the_model_must_be_the_served_one(is_stream, model, status, code):
    async with running() as face:
        for answered, body in (
            await face.chat(model=model, stream=is_stream),
            await face.complete(model=model, stream=is_stream),
        ):
            assert answered == status
            check_error(body)
            assert body["error"]["code"] == code
            assert body["error"]["param"] == "model"
            assert len(body["error"]["message"]) < 300
            assert body["error"]["message"].isprintable()
        assert face.node.requests == []


async def test_the_official_client_reads_answers_and_raises_its_errors():
    async with running(FakeNode("Hello 😀")) as face:
        client = openai.AsyncOpenAI(base_url=f"{face.url}/v1", api_key="any", max_retries=0)
        answer = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], logprobs=True
        )
        assert answer.choices[0].message.content == "Hello 😀"
        text = ""
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        assert text == "Hello 😀"
        completion = await client.completions.create(model="tiny", prompt="Hi")
        assert completion.choices[0].text == "Hello 😀"
        assert [model.id async for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(
                model="other", messages=[{"role": "user", "content": "Hi"}]
            )
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Hi"}], temperature=9
            )
        assert bad.value.param == "temperature"
        await client.close()


async def test_the_official_client_raises_an_error_event():
    def read_stream(url: str) -> None:
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True
            )
            with stream, pytest.raises(openai.APIError, match="internal error"):
                list(stream)

    node = FakeNode()
    node.fail_at = (1, RuntimeError("boom"))
    async with running(node) as face:
        await asyncio.to_thread(read_stream, f"{face.url}/v1")


@pytest.mark.parametrize("field", ["max_completion_tokens", "max_tokens"])
@pytest.mark.parametrize("value", [0, -1, "5", 1e9, 2.5, True, [3]])
async def test_a_bad_token_limit_is_named(field, value):
    async with running() as face:
        status, body = await face.chat(**{field: value})
    assert status == 400
    check_error(body)
    assert body["error"]["param"] == field


async def test_max_completion_tokens_wins_and_null_is_unset():
    async with running(FakeNode("a b c d e f g h i j")) as face:
        _, three = await face.chat(max_completion_tokens=3)
        _, both = await face.chat(max_completion_tokens=3, max_tokens=50)
        _, old = await face.chat(max_completion_tokens=None, max_tokens=4)
        _, unset = await face.chat(max_completion_tokens=None)
        events = await face.stream_chat(max_completion_tokens=3)
        room = face.node.max_context_tokens - len(face.node.requests[3].prompt_tokens)
    assert [b["usage"]["completion_tokens"] for b in (three, both, old)] == [3, 3, 4]
    assert three["choices"][0]["finish_reason"] == "length"
    assert finish_reasons(events) == {0: ["length"]}
    assert unset["choices"][0]["finish_reason"] == "stop"
    assert face.node.requests[3].sampling.max_tokens == room


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_prompt_longer_than_the_context_is_refused_before_any_event(is_stream):
    node = FakeNode("x")
    async with running(node) as face:
        _, probe = await face.chat()
        overhead = probe["usage"]["prompt_tokens"]
        for num_tokens, expected in [(2047, 200), (2048, 400), (2049, 400)]:
            node.max_context_tokens = 2048
            prompt = [5] * num_tokens
            status, body = await face.post(
                "/v1/completions",
                {"model": "tiny", "prompt": prompt, "max_tokens": 1},
            )
            assert status == expected
            if status == 400:
                check_error(body)
                assert body["error"]["code"] == "context_length_exceeded"
                assert str(num_tokens) in body["error"]["message"]
                assert "2048" in body["error"]["message"]
        node.max_context_tokens = overhead + 10
        assert (await face.chat(max_tokens=10))[0] == 200
        status, body = await face.chat(max_tokens=11, stream=is_stream)
        assert status == 400
        assert body["error"]["code"] == "context_length_exceeded"
        assert body["error"]["param"] == "max_tokens"
        node.max_context_tokens = overhead
        status, body = await face.chat(stream=is_stream)
        assert (status, body["error"]["param"]) == (400, "messages")


async def test_a_missing_seed_is_drawn_and_a_given_one_travels():
    async with running() as face:
        await face.chat()
        await face.chat()
        await face.chat(seed=-1)
        await face.chat(seed=2**64 - 1)
        seeds = [request.sampling.seed for request in face.node.requests]
    assert seeds[0] != seeds[1]
    assert seeds[2] == seeds[3] == 2**64 - 1


async def test_eos_ends_an_answer_unless_it_is_ignored():
    async with running(FakeNode("ab")) as face:
        await face.chat()
        await face.chat(ignore_eos=True, stop_token_ids=[9], max_tokens=5)
        sampling = [request.sampling for request in face.node.requests]
    assert sampling[0].stop_token_ids == (1,)
    assert sampling[1].stop_token_ids == (9,)


async def test_salts_and_arrivals_reach_the_node():
    async with running() as face:
        await face.chat(cache_salt="tenant")
        await face.chat()
    assert [request.cache_salt for request in face.node.requests] == [salt_of(None, b"tenant"), b""]
    first, second = face.node.requests
    assert 0 < first.arrival_s <= second.arrival_s
    assert first.request_id != second.request_id


async def test_template_stop_strings_end_chats_and_not_completions():
    node = FakeNode(lambda request: [byte_ids("yes\nQuestion: no")])
    node.chat_template.stop_strings = ("\nQuestion:",)  # type: ignore[assignment]
    async with running(node) as face:
        _, chat = await face.chat()
        _, text = await face.complete()
    assert chat["choices"][0]["message"]["content"] == "yes"
    assert text["choices"][0]["text"] == "yes\nQuestion: no"


@pytest.mark.parametrize("content", [None, "absent", "", []])
async def test_an_assistant_turn_of_tool_calls_is_rendered(content):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    turn = {"role": "assistant", "content": content, "tool_calls": [call]}
    if content == "absent":
        del turn["content"]
    tail = [{"role": "tool", "tool_call_id": "c", "content": "42"}]
    async with running() as face:
        status, body = await face.chat(messages=[*CHAT["messages"], turn, *tail])
        bare = {**turn, "tool_calls": []}
        _, without = await face.chat(messages=[*CHAT["messages"], bare, *tail])
    assert status == 200, body
    assert body["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"]


async def test_an_image_on_a_text_model_is_refused_and_nothing_is_fetched():
    accepted = asyncio.Event()

    async def accept(_reader, writer):
        accepted.set()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with running(max_body_bytes=8 << 20) as face:
        for url in (
            f"http://127.0.0.1:{port}/",
            "file:///etc/passwd",
            "http://169.254.169.254/latest",
            "data:image/png;base64," + "A" * 5_000_000,
        ):
            part = {"type": "image_url", "image_url": {"url": url}}
            status, body = await face.chat(messages=[{"role": "user", "content": [part]}])
            assert status == 400
            check_error(body)
            assert body["error"]["param"] == "messages[0].content[0].type"
    server.close()
    await server.wait_closed()
    assert not accepted.is_set()


async def test_a_long_prompt_is_tokenised_off_the_loop():
    node = FakeNode("x")
    node.max_context_tokens = 10_000_000
    stuck = asyncio.Event()
    loop = asyncio.get_running_loop()
    release = threading.Event()
    encode = node.tokenizer.encode

    class SlowTokenizer:
        def __getattr__(self, name):
            return getattr(FakeNode().tokenizer, name)

        def encode(self, text, *, add_bos):
            loop.call_soon_threadsafe(stuck.set)
            release.wait()
            return encode(text, add_bos=add_bos)

    node.tokenizer = SlowTokenizer()  # type: ignore[assignment]
    async with running(node, max_body_bytes=4 << 20) as face, asyncio.TaskGroup() as tasks:
        message = {"role": "user", "content": "word " * 50_000}
        chat = tasks.create_task(face.chat(messages=[message]))
        await stuck.wait()
        assert (await face.get("/health"))[0] == 200  # answered while the tokenizer works
        assert not chat.done()
        release.set()
        assert (await chat)[0] == 200


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "template", "is_inline"),
    [
        ({}, TINY_TEMPLATE, True),
        ({"messages": [{"role": "user", "content": "x" * 1000}]}, TINY_TEMPLATE, True),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, TINY_TEMPLATE, False),
        ({}, "{{ 'Hi ' * 700 }}", False),
        ({"tools": [TOOL]}, TINY_TEMPLATE, False),
        ({"tools": [TOOL], "tool_choice": "none"}, TINY_TEMPLATE, True),
        (
            {"messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": [CALL]}]},
            TINY_TEMPLATE,
            False,
        ),
    ],
)
async def test_what_may_take_long_to_tokenise_is_left_to_a_thread(fields, template, is_inline):
    node = FakeNode()
    node.max_context_tokens = 1 << 20
    node.chat_template = ChatTemplate(template)
    encode = node.tokenizer.encode
    threads: list[threading.Thread] = []

    class NotedTokenizer:
        def __getattr__(self, name):
            return getattr(FakeNode().tokenizer, name)

        def encode(self, text, *, add_bos):
            threads.append(threading.current_thread())
            return encode(text, add_bos=add_bos)

    node.tokenizer = NotedTokenizer()  # type: ignore[assignment]
    async with running(node) as face:
        status, _ = await face.chat(**fields)
    assert status == 200
    assert [thread is threading.current_thread() for thread in threads] == [is_inline]


JSON_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8) | st.sampled_from(["user", "text", "none", "auto", "function"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
CHAT_FIELDS = sorted(
    {name for part in SCHEMAS["CreateChatCompletionRequest"]["allOf"] for name in part.get("properties", {})}
    | set(SCHEMAS["ModelResponseProperties"]["properties"])
    | {"top_k", "min_p", "repetition_penalty", "cache_salt", "ignore_eos", "stop_token_ids"}
)  # fmt: skip
TEXT_FIELDS = sorted(SCHEMAS["CreateCompletionRequest"]["properties"])


async def hammer(face: HttpFace, path: str, body: dict[str, object]) -> None:
    async with face.session.post(face.url + path, json=body) as response:
        data = await response.read()
        assert response.status in (200, 400, 404), (response.status, data, body)
        if response.status != 200:
            check_error(strict_json(data))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_any_value_in_any_field_gives_an_answer_or_a_named_complaint(path):
    is_chat = path == "/v1/chat/completions"
    names = CHAT_FIELDS if is_chat else TEXT_FIELDS
    base = {**(CHAT if is_chat else TEXT), "max_tokens": 3}
    bodies = st.dictionaries(st.sampled_from(names), JSON_VALUE, min_size=1, max_size=3)
    collected: list[dict[str, object]] = []

    @settings(
        max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(bodies)
    def collect(fields):
        collected.append({**base, **fields})

    collect()

    async def send_all() -> None:
        async with running(FakeNode("ok")) as face:
            for body in collected:
                await hammer(face, path, body)

    asyncio.run(send_all())


def valid_examples(names: list[str]) -> list[tuple[str, Any]]:
    """One valid value for each field that the document gives an example or a default of."""
    values: dict[str, list[Any]] = {
        "temperature": [0, 1, 2, 0.5],
        "top_p": [0, 0.1, 1],
        "n": [1, 2],
        "seed": [0, -(2**63), 2**63 - 1],
        "stop": ["x", ["x", "y"], None],
        "presence_penalty": [-2, 2],
        "frequency_penalty": [-2, 2],
        "logit_bias": [{}, {"5": 100}, {"6": -100}],
        "user": ["someone"],
        "max_tokens": [1, 16],
        "stream": [False, True, None],
    }
    return [(name, value) for name in names if name in values for value in values[name]]


@pytest.mark.parametrize(("name", "value"), valid_examples(TEXT_FIELDS))
async def test_valid_values_of_both_endpoints_are_accepted(name, value):
    async with running() as face:
        for path, base in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            async with face.session.post(face.url + path, json={**base, name: value}) as response:
                assert response.status == 200, await response.text()


async def test_what_nodes_say_to_each_other_has_a_limit_of_its_own():
    """Else a small one of the API would keep a node with a large cache out of its fleet, for ever."""

    class Listening(FakeNode):
        def routes(self) -> list[web.RouteDef]:
            return [web.post("/fleet/v1/heartbeat", self.heard)]

        async def heard(self, request: web.Request) -> web.Response:
            return web.json_response(len(await read_body(request)))

    async with running(Listening(), max_body_bytes=1024) as face:
        assert await face.post("/fleet/v1/heartbeat", "x" * 100_000) == (200, 100_002)
        status, _ = await face.complete(prompt="x" * 2000)
        assert status == 413
