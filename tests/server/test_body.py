import asyncio
import gzip
import io
import json
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import BadRequest
from prfaas.server import body
from prfaas.server.body import parse_object
from tests.server.http_face import CHAT, running, strict_json

BAD_BODIES = {
    "cut": b"{x",
    "empty": b"",
    "string": b'"str"',
    "array": b"[]",
    "null": b"null",
    "number": b"3",
    "byte order mark": b"\xef\xbb\xbf" + json.dumps(CHAT).encode(),
    "utf-16": b"\xff\xfe{\x00}\x00",
    "deep": b"[" * 200_000,
    "deep inside": b'{"messages":' + b"[" * 200_000,
    "long integer": b'{"model":"tiny","seed":' + b"9" * 5000 + b"}",
    "nan": b'{"model":"tiny","temperature":NaN}',
    "infinity": b'{"model":"tiny","temperature":-Infinity}',
    "surrogate": b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}',
    "surrogate key": b'{"\\udfff":1}',
    "two values": b"{} {}",
}


@pytest.mark.parametrize("kind", BAD_BODIES)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_bad_body_is_a_400_in_openais_shape(kind, path):
    async with (
        running() as face,
        face.session.post(
            face.url + path,
            data=BAD_BODIES[kind],
            headers={"Content-Type": "application/json"},
        ) as response,
    ):
        body = strict_json(await response.read())
        assert response.status == 400
        assert response.content_type == "application/json"
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    assert "Traceback" not in body["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json; charset=nope"}, 415),
        ({"Content-Type": "application/json; charset=utf-16"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, 415),
        ({"Content-Type": "application/json; charset=UTF-8"}, 200),
        ({"Content-Type": "application/json", "Content-Encoding": "identity"}, 200),
        ({}, 200),
    ],
)
async def test_only_json_in_utf8_is_read(headers, status):
    data = json.dumps(CHAT).encode()
    async with (
        running() as face,
        face.session.post(
            face.url + "/v1/chat/completions",
            data=data,
            headers=headers,
            skip_auto_headers=["Content-Type"],
        ) as response,
    ):
        body = strict_json(await response.read())
        assert response.status == status, body
    assert ("error" in body) == (status != 200)


async def test_a_gzip_bomb_is_refused_unopened():
    bomb = gzip.compress(b"\0" * (64 << 20))
    assert len(bomb) < 1 << 20
    async with (
        running() as face,
        face.session.post(
            face.url + "/v1/chat/completions",
            data=bomb,
            headers={"Content-Type": "application/json", "Content-Encoding": "gzip"},
        ) as response,
    ):
        assert response.status == 415


def chat_of_bytes(num_bytes: int) -> bytes:
    """A chat body of exactly so many bytes; the padding is no part of the prompt."""
    bare = json.dumps({**CHAT, "user": ""}).encode()
    return json.dumps({**CHAT, "user": "u" * (num_bytes - len(bare))}).encode()


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(("excess", "status"), [(-1, 200), (0, 200), (1, 413), (100_000, 413)])
async def test_a_body_is_taken_up_to_the_limit(is_chunked, excess, status):
    limit = 1_200_000
    data = chat_of_bytes(limit + excess)
    assert len(data) == limit + excess

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 65536):
            yield data[start : start + 65536]

    async with running(max_body_bytes=limit) as face:
        async with face.session.post(
            face.url + "/v1/chat/completions",
            data=chunks() if is_chunked else io.BytesIO(data),
            headers={"Content-Type": "application/json"},
        ) as response:
            body = strict_json(await response.read())
            assert response.status == status, body
        assert (await face.chat())[0] == 200
    if status == 413:
        assert body["error"]["code"] == "request_too_large"
        assert str(limit) in body["error"]["message"]


async def test_many_tiny_chunks_are_a_body_like_another():
    data = json.dumps({**CHAT, "user": "u" * 20_000}).encode()

    async with running() as face:
        reader, writer = await asyncio.open_connection("127.0.0.1", face.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        writer.write(b"".join(b"1\r\n%c\r\n" % byte for byte in data) + b"0\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 200")


async def test_a_body_that_never_ends_is_a_408():
    async with running(read_timeout_s=0.05) as face:
        reader, writer = await asyncio.open_connection("127.0.0.1", face.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
    assert head.startswith(b"HTTP/1.1 408")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=8,
)  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text(), json_values))
def test_every_object_of_strict_json_is_read_as_it_is(value):
    assert parse_object(json.dumps(value).encode()) == value
    assert parse_object(json.dumps(value, ensure_ascii=False).encode()) == value


JSON_LIKE = st.lists(
    st.sampled_from('{}[]:,"\\ \n\t\x01é-+.eE0179') | st.sampled_from(
        ["true", "null", "NaN", "-Infinity", "\\ud800", "\\udc00", "1e999", "18446744073709551616", '{"a":']
    )
).map("".join)  # fmt: skip


@settings(deadline=None)
@given(JSON_LIKE | json_values.map(json.dumps))
def test_the_fast_parser_takes_what_pythons_does_and_python_says_what_is_wrong(text):
    def outcome(parse: Callable[[bytes], object]) -> tuple[object, str]:
        try:
            return parse(f'{{"x":{text}}}'.encode()), ""
        except BadRequest as error:
            return None, str(error)

    fast, slow = outcome(parse_object), outcome(body._parse_slowly)
    if isinstance(slow[0], dict) or slow[1]:
        assert repr(fast) == repr(slow)


@settings(deadline=None, max_examples=50)
@given(st.binary())
def test_any_bytes_give_an_object_or_a_complaint(data):
    try:
        status = 200 if str(parse_object(data)).startswith("{") else 0
    except BadRequest as error:
        status = error.status
    assert status in (200, 400)
