"""`--engine replay` as a person starts it: two nodes without a model, verify and a chat."""

from pathlib import Path

import pytest

from tests.cli.node_processes import run_to_its_end, running_node

pytestmark = pytest.mark.slow
PROFILES = Path(__file__).parents[2] / "configs" / "profiles"


def replaying(profile: str) -> tuple[str, ...]:
    path = PROFILES / f"{profile}.toml"
    return (
        "--engine",
        "replay",
        "--profile",
        str(path),
        "--speed",
        "200",
        "--bytes-scale",
        "0.002",
    )


def test_two_replayed_nodes_serve_chat_and_verify_equal(tmp_path):
    prefill_flags = ("--role", "prefill", *replaying("h200-internal-1t"))
    local = replaying("h20-internal-1t")
    with running_node(tmp_path, *prefill_flags) as prefill:
        prefill.wait_ready()
        peer = ("--peer", f"127.0.0.1:{prefill.port}")
        verdict = run_to_its_end(tmp_path, "verify", *local, *peer)
        assert verdict.returncode == 0, verdict.stderr
        assert "answers are equal" in verdict.stdout
        with running_node(tmp_path, *local, *peer, "--threshold-tokens", "100") as pd:
            pd.wait_ready()
            models = pd.get("/v1/models")[1]["data"]
            assert [model["id"] for model in models] == ["h20-internal-1t"]
            body = {
                "model": "h20-internal-1t",
                "messages": [{"role": "user", "content": "Tell me of the harbour. " * 20}],
                "max_tokens": 24,
                "seed": 1,
            }
            pd.wait(lambda: pd.metric(f'prfaas_peer_usable{{peer="{peer[1]}"}}') == 1)
            answers = [pd.post("/v1/chat/completions", body)[1] for _ in range(2)]
            texts = [answer["choices"][0]["message"]["content"] for answer in answers]
            assert texts[0] == texts[1]
            assert set(texts[0]) <= set("abcdefghijklmnopqrstuvwxyz ")
            assert [answer["usage"]["prfaas"]["route"] for answer in answers] == ["remote", "local"]
            assert pd.stop() == 0
        assert prefill.stop() == 0
        assert "replayed at 200 x speed" in pd.log.read_text()
