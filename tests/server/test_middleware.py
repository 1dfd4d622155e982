import asyncio
import json
from itertools import product

import pytest
import structlog

from tests.server.fake_node import FakeNode
from tests.server.http_face import CHAT, running, strict_json
from tests.server.openai_schema import check

KEY = "s3cret-kéy"
ORIGIN = {"Origin": "https://chat.example"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/nope", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("PURGE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1//models", 404),
        ("GET", "/%00%0d%0a%1b[31m", 404),
    ],
)
async def test_errors_of_the_router_have_openais_shape(method, path, status):
    async with (
        running() as face,
        face.session.request(method, face.url + path) as response,
    ):
        body = strict_json(await response.read())
        assert response.status == status
        assert response.content_type == "application/json"
        assert len(response.headers["X-Request-Id"]) == 24
        assert response.headers["Server"] == "prfaas"
    check("ErrorResponse", body)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"].isprintable()
    if status == 405:
        assert "Allow" in response.headers


async def test_every_answer_has_its_own_id():
    async with running() as face:
        ids = set()
        for _ in range(3):
            async with face.session.get(face.url + "/health") as response:
                ids.add(response.headers["X-Request-Id"])
    assert len(ids) == 3


def spellings(path: str) -> list[str]:
    """Ways to say a path that a careless check would not know."""
    return [
        path,
        path.upper(),
        path + "/",
        "/" + path,
        path.replace("/", "//"),
        "/health/.." + path,
        "/health%2f.." + path,
        path.replace("/v1/", "/v1%2f"),
        path + "?key=" + "s3cret",
    ]


async def test_every_route_but_the_probes_asks_for_the_key():
    async with running(api_key=KEY) as face:
        for method, path in product(["GET", "POST", "OPTIONS"], ROUTES):
            for spelled in spellings(path):
                async with face.session.request(method, face.url + spelled) as response:
                    assert response.status == 401, (method, spelled)
                    body = strict_json(await response.read())
                check("ErrorResponse", body)
                assert body["error"]["code"] == "invalid_api_key"
        assert (await face.get("/health"))[0] == 200
        assert (await face.get("/ready"))[0] == 200
        assert face.node.requests == []


ROUTES = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/models/tiny",
    "/debug/requests",
    "/debug/requests/x",
    "/metrics",
    "/nope",
]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": f"Bearer {KEY}"}, 200),
        ({"Authorization": f"bearer {KEY}"}, 200),
        ({"Authorization": f"Bearer  {KEY}"}, 200),
        ({"X-Api-Key": KEY}, 200),
        ({"Authorization": f"Basic {KEY}"}, 401),
        ({"Authorization": KEY}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": f"Bearer {KEY}x"}, 401),
        ({"Authorization": "Bearer ключ"}, 401),
        ({"X-Api-Key": ""}, 401),
        ({}, 401),
    ],
)
async def test_a_key_is_taken_as_bearer_or_x_api_key(headers, status):
    async with running(api_key=KEY, cors_allow_origin="*") as face:
        answered, body = await face.post(
            "/v1/chat/completions", CHAT, headers={**headers, **ORIGIN}
        )
        assert answered == status
        async with face.session.get(f"{face.url}/v1/models?api_key={KEY}") as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
    if status == 401:
        check("ErrorResponse", body)


async def test_a_key_of_bytes_that_are_no_text_is_just_wrong():
    async with running(api_key=KEY) as face:
        reader, writer = await asyncio.open_connection("127.0.0.1", face.port)
        writer.write(
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Authorization: Bearer \xff\xfe\r\n\r\n"
        )
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 401")


async def test_the_key_is_in_no_answer_log_or_metric():
    with structlog.testing.capture_logs() as logs:
        async with running(api_key=KEY) as face:
            headers = {"Authorization": f"Bearer {KEY}"}
            answers = [
                await face.post("/v1/chat/completions", CHAT, headers=headers),
                await face.post("/v1/chat/completions", {"model": KEY + "x"}),
                await face.get("/debug/requests", headers=headers),
            ]
            async with face.session.get(face.url + "/metrics", headers=headers) as response:
                metrics = await response.text()
    assert KEY not in json.dumps([answers, logs, metrics], ensure_ascii=False, default=str)


async def test_a_preflight_needs_no_key_and_allows_what_it_asked_for():
    preflight = {
        **ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-stainless-lang",
    }
    async with (
        running(api_key=KEY, cors_allow_origin="*") as face,
        face.session.options(face.url + "/v1/chat/completions", headers=preflight) as response,
    ):
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == "*"
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
        allowed = response.headers["Access-Control-Allow-Headers"]
    assert "authorization" in allowed
    assert "x-stainless-lang" in allowed


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", CHAT, 401),
        ("/v1/nope", {}, 401),
    ],
)
async def test_errors_carry_cors_headers_too(path, body, status):
    async with (
        running(api_key=KEY, cors_allow_origin="https://chat.example") as face,
        face.session.post(face.url + path, json=body, headers=ORIGIN) as response,
    ):
        assert response.status == status
        assert response.headers["Access-Control-Allow-Origin"] == "https://chat.example"
        assert response.headers["Vary"] == "Origin"


async def test_streams_carry_cors_headers_and_name_ours():
    async with (
        running(cors_allow_origin="*") as face,
        face.session.post(
            face.url + "/v1/chat/completions", json={**CHAT, "stream": True}, headers=ORIGIN
        ) as response,
    ):
        await response.read()
        assert response.headers["Access-Control-Allow-Origin"] == "*"
        assert "X-Prfaas-Route" in response.headers["Access-Control-Expose-Headers"]


async def test_without_cors_configured_no_origin_is_allowed():
    async with running() as face:
        async with face.session.get(face.url + "/v1/models", headers=ORIGIN) as response:
            assert "Access-Control-Allow-Origin" not in response.headers
        preflight = {**ORIGIN, "Access-Control-Request-Method": "POST"}
        async with face.session.options(face.url + "/v1/models", headers=preflight) as response:
            assert response.status == 405


async def test_series_do_not_grow_with_what_clients_send():
    async with running() as face:
        await face.chat()
        await face.get("/v1/models/warm-up")
        await face.get("/warm-up")
        async with face.session.request("PURGE", face.url + "/v1/models") as response:
            await response.read()
        before = face.metrics.render().decode().count("\n")
        for number in range(60):
            await face.get(f"/v1/models/unknown-{number}")
            await face.get(f"/path-{number}/{number}")
            async with face.session.request("PURGE", face.url + "/v1/models") as response:
                await response.read()
        after = face.metrics.render().decode().count("\n")
    assert after == before


async def test_probes_and_unknown_paths_write_no_log():
    with structlog.testing.capture_logs() as logs:
        async with running(FakeNode()) as face:
            for number in range(50):
                await face.get("/health")
                await face.get("/ready")
                await face.get(f"/probe-{number}")
    assert logs == []


async def test_a_log_line_of_a_request_bears_its_id_and_no_text():
    with structlog.testing.capture_logs(
        processors=[structlog.contextvars.merge_contextvars]
    ) as logs:
        async with running() as face:
            await face.chat(messages=[{"role": "user", "content": "my private words"}])
    (line,) = logs
    assert line["event"] == "request.finished"
    assert line["request_id"] == face.node.requests[0].request_id
    assert "private" not in json.dumps(line)
    assert "Hello" not in json.dumps(line)
