"""Two nodes as people start them: a short prompt stays, a long one is prefilled by the peer."""

import json
import signal
import socket
from typing import Any

import pytest

from tests.cli.node_processes import NodeProcess, free_port, run_to_its_end, running_node
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
        failed = run_to_its_end(directory, "serve", *flags)
    assert failed.returncode == 2
    assert failed.stderr.splitlines()[-1].startswith(f"prfaas: cannot listen on 127.0.0.1:{port}")
    assert "model" not in failed.stderr


def test_a_missing_model_is_one_line(directory):
    flags = ("--port", str(free_port()), "--model", "no-such-model")
    failed = run_to_its_end(directory, "serve", *flags)
    assert failed.returncode == 2
    assert "no-such-model" in failed.stderr.splitlines()[-1]
    assert "Traceback" not in failed.stderr


def test_verify_finds_the_peers_prefill_equal_bit_by_bit(prefill, directory):
    flags = ["--peer", f"127.0.0.1:{prefill.port}", "--model", str(directory / "tiny"), "--json"]
    flags += ["--max-context-tokens", "400"]  # the longer prompts take most of a minute
    done = run_to_its_end(directory, "verify", *flags)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["tokens_equal"] is report["bits_equal"] is True
    assert {case["route"] for case in report["cases"]} == {"remote"}
    assert max(case["prompt_tokens"] for case in report["cases"]) > 300
    assert len(done.stderr.splitlines()) >= len(report["cases"])


def test_verify_refuses_another_model_and_names_what_differs(prefill, directory):
    other = write_tiny_model(directory / "other", "gemma3", seed=1)
    flags = ("--peer", f"127.0.0.1:{prefill.port}", "--model", str(other))
    failed = run_to_its_end(directory, "verify", *flags)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "model" in failed.stderr.splitlines()[-1]
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize(("flags", "status"), [((), 2), (("--peer", "127.0.0.1:1"), 1)])
def test_verify_without_a_peer_is_one_line(flags, status, directory):
    failed = run_to_its_end(directory, "verify", "--model", str(directory / "tiny"), *flags)
    assert failed.returncode == status
    assert "peer" in failed.stderr.splitlines()[-1]
    assert "Traceback" not in failed.stderr
