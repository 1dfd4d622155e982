"""Keys are read from a private file only; a tenant opens the API and nothing else."""

import os

import pytest

from prfaas.cache.tenants import salt_of, tenant_of
from prfaas.config.options import HttpOptions
from prfaas.errors import ConfigError
from prfaas.server.api_keys import ApiKeys, api_keys
from tests.server.http_face import CHAT, running
from tests.server.openai_schema import check


def key_file(tmp_path, text: str | bytes, mode: int = 0o600) -> str:
    path = tmp_path / "keys"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return str(path)


def test_one_key_a_line_is_read_and_blank_lines_are_none(tmp_path):
    path = key_file(tmp_path, "alpha\n\n  béta \r\n")
    keys = api_keys(HttpOptions(api_key_file=path))
    assert keys == ApiKeys(None, (b"alpha", "béta".encode()))
    assert keys.match(b"alpha") == b"alpha"
    assert keys.match("béta".encode()) == "béta".encode()
    assert [keys.match(wrong) for wrong in (b"", b"alph", b"alphab", b"\xff")] == [None] * 4
    assert "alpha" not in repr(keys)


def test_without_a_key_everyone_may_come_in():
    assert api_keys(HttpOptions()) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has 0 keys"),
        ("\n \n", "has 0 keys"),
        ("one\ntwo words\n", "line 2: a key is printable text without spaces"),
        (b"one\n\xff\xfe\n", "line 2"),
        ("one\n\x07\n", "line 2"),
        ("one\none\n", "has a key twice"),
        ("".join(f"k{n}\n" for n in range(5000)), "has 5000 keys"),
        ("x" * (1 << 21), "larger than"),
    ],
)
def test_a_file_that_is_not_one_key_a_line_is_refused_without_showing_it(text, said, tmp_path):
    with pytest.raises(ConfigError, match=said) as refusal:
        api_keys(HttpOptions(api_key_file=key_file(tmp_path, text)))
    assert "two words" not in str(refusal.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o622])
def test_a_file_that_others_can_use_is_refused(mode, tmp_path):
    with pytest.raises(ConfigError, match=f"mode {mode:04o}, .* chmod 600"):
        api_keys(HttpOptions(api_key_file=key_file(tmp_path, "k\n", mode)))


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, said in (("pipe", "is no file"), ("absent", "No such file"), (".", "is no file")):
        with pytest.raises(ConfigError, match=said):
            api_keys(HttpOptions(api_key_file=str(tmp_path / name)))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_each_tenant_has_a_salt_of_its_own_that_a_clients_salt_narrows(tmp_path):
    path = key_file(tmp_path, "alpha\nbeta\n")
    async with running(api_key_file=path) as face:
        for key in ("alpha", "beta"):
            for salt in ({}, {"cache_salt": "s"}):
                status, _ = await face.post(
                    "/v1/chat/completions", {**CHAT, **salt}, headers=bearer(key)
                )
                assert status == 200
        salts = [request.cache_salt for request in face.node.requests]
    assert salts == [salt_of(key, salt) for key in (b"alpha", b"beta") for salt in (b"", b"s")]
    assert len(set(salts)) == 4
    assert len({tenant_of(salt) for salt in salts}) == 2


@pytest.mark.parametrize("key", ["", "gamma", "alpha ", "alphabeta", "álpha"])
async def test_any_other_key_is_401_in_openais_shape(key, tmp_path):
    async with running(api_key_file=key_file(tmp_path, "alpha\nbeta\n")) as face:
        headers = bearer(key) if key != "alpha " else {"X-Api-Key": "alpha x"}
        status, body = await face.post("/v1/chat/completions", CHAT, headers=headers)
        assert status == 401
        check("ErrorResponse", body)
        assert body["error"]["code"] == "invalid_api_key"
        assert face.node.requests == []


@pytest.mark.parametrize(
    "path", ["/metrics", "/debug/requests", "/debug/requests/x", "/nope", "//v1/models", "/V1/x"]
)
async def test_what_tells_of_all_tenants_takes_the_operators_key(path, tmp_path):
    keys = key_file(tmp_path, "alpha\n")
    async with running(api_key_file=keys, api_key="operator") as face:
        status, body = await face.get(path, headers=bearer("alpha"))
        assert status == 403
        check("ErrorResponse", body)
        assert body["error"]["code"] == "insufficient_permissions"
        async with face.session.get(face.url + path, headers=bearer("operator")) as response:
            assert response.status in (200, 404)
        for key in ("alpha", "operator"):
            assert (await face.get("/v1/models", headers=bearer(key)))[0] == 200
