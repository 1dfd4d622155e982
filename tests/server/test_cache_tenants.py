"""Tenants over HTTP: one's prompt is never another's hit, in RAM, on disk or at the peer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prfaas.config.options import HttpOptions
from tests.server.cached_nodes import BLOCK, model_of
from tests.server.http_face import HttpFace, until
from tests.server.real_face import holds_nothing, node_running
from tests.server.real_nodes import config

__all__ = ["model_of"]
pytestmark = pytest.mark.slow

OPERATOR = "the operator's"
PROMPT = [4 + i * 37 % 500 for i in range(3 * BLOCK + 5)]
HIT = 3 * BLOCK
ASKED = [("alpha", None), ("beta", None), ("alpha", "s"), ("beta", "s"), ("alpha", "t")]
"""Each a tenant's key and a salt of its client's own: five that share nothing."""


async def ask(face: HttpFace, key: str, salt: str | None = None) -> tuple[Any, int, str]:
    """Return the answer's choice, the cached tokens and the route."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "seed": 5, "logprobs": 2}
    status, answer = await face.post(
        "/v1/completions",
        body if salt is None else body | {"cache_salt": salt},
        headers={"Authorization": f"Bearer {key}"},
    )
    assert status == 200, answer
    usage = answer["usage"]
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0], cached_tokens, usage["prfaas"]["route"]


async def misses_of_other_tenants(face: HttpFace) -> float:
    headers = {"Authorization": f"Bearer {OPERATOR}"}
    async with face.session.get(f"{face.url}/metrics", headers=headers) as response:
        samples = dict(line.rpartition(" ")[::2] for line in (await response.text()).splitlines())
    return float(samples['prfaas_cache_misses_total{reason="other_tenant"}'])


def config_with(
    model: Path, directory: Path, key_file: Path | None, peer: str | None = None
) -> Any:
    settings = config(model, peer, dtype="float32", block_tokens=BLOCK, max_context_tokens=400)
    settings = replace(
        settings,
        model=replace(settings.model, served_model_name="m" if key_file else None),
        cache=replace(settings.cache, dir=str(directory)),
        scheduler=replace(settings.scheduler, threshold_tokens=100),
    )
    if key_file is None:
        return replace(settings, role="prefill", http=HttpOptions(port=0))
    http = HttpOptions(port=0, api_key=OPERATOR, api_key_file=str(key_file))
    return replace(settings, role="pd", http=http)


async def test_a_prompt_under_another_key_or_salt_never_hits_in_ram_on_disk_or_at_the_peer(
    model_of, tmp_path
):
    model, keys = model_of("kimi_linear"), tmp_path / "keys"
    keys.write_text("alpha\nbeta\ngamma\n")
    keys.chmod(0o600)
    async with (
        node_running(config_with(model, tmp_path / "prefill.kv", None)) as prefill,
        node_running(
            config_with(model, tmp_path / "pd.kv", keys, f"127.0.0.1:{prefill.port}")
        ) as pd,
    ):
        await until(lambda: any(pd.node.load().peers_usable.values()))
        expected, *first = await ask(pd, *ASKED[0])
        assert first == [0, "remote"]
        assert await ask(pd, *ASKED[0]) == (expected, HIT, "local")
        for number, who in enumerate(ASKED[1:]):
            assert await misses_of_other_tenants(pd) == number
            assert await ask(pd, *who) == (expected, 0, "remote")
            assert await ask(pd, *who) == (expected, HIT, "local")
        load = prefill.node.load()
        assert load.lookups is not None
        assert load.lookups.num_query_tokens >= len(ASKED) * len(PROMPT)
        assert load.lookups.num_hit_tokens == 0
        await until(lambda: holds_nothing(pd) and holds_nothing(prefill))
    async with node_running(config_with(model, tmp_path / "pd.kv", keys)) as pd:
        for who in ASKED:
            assert await ask(pd, *who) == (expected, HIT, "local")
        assert await ask(pd, "gamma") == (expected, 0, "local")
        assert await ask(pd, "gamma", "s") == (expected, 0, "local")
        assert await ask(pd, "beta", "t") == (expected, 0, "local")
        lookups = pd.node.load().lookups
        assert lookups is not None
        assert (lookups.num_ram_tokens, lookups.num_disk_tokens) == (0, len(ASKED) * HIT)
        await until(lambda: holds_nothing(pd))
