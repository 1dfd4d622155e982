"""Two nodes as people start them: a short prompt stays, a long one is prefilled by the peer."""

import signal
import socket
import subprocess
from typing import Any

import pytest

from tests.cli.node_processes import (
    NodeProcess,
    environment,
    free_port,
    running_node,
    serve_command,
)
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

THRESHOLD = 100
SHORT = "What is the capital of France?"
LONG = "The quick brown fox jumps over the lazy dog while the other foxes sleep. " * 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A directory with a tiny Gemma in it."""
    path = tmp_path_factory.mktemp("nodes")
    write_tiny_model(path / "tiny", "gemma3")
    return path


@pytest.fixture(scope="module")
def prefill(directory):
    with running_node(directory, "--role", "prefill", "--model", str(directory / "tiny")) as node:
        node.wait_ready()
        yield node


@pytest.fixture(scope="module")
def pd(directory, prefill):
    flags = ("--peer", f"127.0.0.1:{prefill.port}", "--threshold-tokens", str(THRESHOLD))
    with running_node(directory, "--model", str(directory / "tiny"), *flags) as node:
        node.wait_ready()
        yield node


def ask(node: NodeProcess, prompt: str) -> tuple[str, dict[str, Any]]:
    """Return the greedy answer and its story."""
    status, answer = node.post(
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 8,
            "temperature": 0,
        },
    )
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"], answer["usage"]["prfaas"]


def test_a_short_prompt_is_prefilled_where_it_arrives(pd):
    _, story = ask(pd, SHORT)
    assert story["route"] == "local"
    assert story["tokens_remote"] == story["bytes_received"] == 0


def test_a_long_prompt_is_prefilled_by_the_peer_with_the_same_answer(pd, directory):
    answer, story = ask(pd, LONG)
    assert story["route"] == "remote", pd.log.read_text()
    assert story["tokens_remote"] > THRESHOLD
    assert story["bytes_received"] > 0
    assert story["tokens_local"] == 0
    with running_node(directory, "--model", str(directory / "tiny")) as alone:
        alone.wait_ready()
        expected, local_story = ask(alone, LONG)
        assert local_story["route"] == "local"
    assert answer == expected


def test_the_banner_says_what_runs(pd, prefill):
    text = " ".join(pd.log.read_text().split())
    assert "role pd, is ready" in text
    assert f"address http://127.0.0.1:{pd.port}" in text
    assert "POST /v1/chat/completions" in text
    assert "no chat template in checkpoint: plain transcript" in text
    assert f"peer 127.0.0.1:{prefill.port} for more than {THRESHOLD} uncached" in text
    assert "role prefill, is ready" in prefill.log.read_text()


def test_a_dead_peer_costs_no_answer(directory):
    flags = ("--peer", f"127.0.0.1:{free_port()}", "--threshold-tokens", str(THRESHOLD))
    with running_node(directory, "--model", str(directory / "tiny"), *flags) as node:
        node.wait_ready()
        _, story = ask(node, LONG)
        assert story["route"] == "local"
        assert story["tokens_local"] > THRESHOLD
        assert story["reason"]


@pytest.mark.parametrize(("role", "number"), [("pd", signal.SIGTERM), ("prefill", signal.SIGINT)])
def test_a_signal_ends_a_node_with_status_0(role, number, directory):
    with running_node(directory, "--role", role, "--model", str(directory / "tiny")) as node:
        node.wait_ready()
        assert node.stop(number) == 0
        assert "Traceback" not in node.log.read_text()


@pytest.mark.parametrize("role", ["pd", "prefill"])
def test_a_used_port_is_one_line_before_anything_is_loaded(role, directory):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ("--role", role, "--port", str(port), "--model", "/no/such/model")
        failed = run_to_its_end(directory, *flags)
    assert failed.returncode == 2
    assert failed.stderr.splitlines()[-1].startswith(f"prfaas: cannot listen on 127.0.0.1:{port}")
    assert "model" not in failed.stderr


@pytest.mark.parametrize("model", ["/no/such/model", "no-such-model"])
def test_a_missing_model_is_one_line(model, directory):
    failed = run_to_its_end(directory, "--port", str(free_port()), "--model", model)
    assert failed.returncode == 2
    assert model in failed.stderr.splitlines()[-1]
    assert "Traceback" not in failed.stderr


def run_to_its_end(directory, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        serve_command(*flags),
        env=environment(directory / "models"),
        capture_output=True,
        text=True,
        check=False,
    )
