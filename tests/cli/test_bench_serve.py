"""`prfaas bench serve` loads a running node, and ends early with a report of what there was."""

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from prfaas.cli.main import main
from tests.cli.node_processes import HANG_GUARD_S, free_port, running_node
from tests.processes import started

CONFIGS = Path(__file__).parents[2] / "configs"
WORKLOAD = """
kind = "lognormal"
mu = 6.0
sigma = 0.5
min_tokens = 64
max_tokens = 2000
output_tokens = 4
"""


def bench_serve(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, ["bench", "serve", *arguments])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    path = tmp_path_factory.mktemp("workload") / "workload.toml"
    path.write_text(WORKLOAD)
    return str(path)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Six requests, of which each two begin alike."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    lines = [
        {
            "timestamp": 50 * number,
            "input_length": 1100,
            "output_length": 3,
            "hash_ids": [number % 3, 10 + number % 3, 100 + number],
        }
        for number in range(6)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    flags = ("--engine", "replay", "--speed", "200", "--bytes-scale", "0.002")
    profile = str(CONFIGS / "profiles" / "h20-internal-1t.toml")
    with running_node(tmp_path_factory.mktemp("node"), *flags, "--profile", profile) as node:
        node.wait_ready()
        yield f"http://127.0.0.1:{node.port}"


@pytest.mark.slow
def test_a_workload_is_answered_and_reported_for_people(node, workload):
    arguments = ("--workload", workload, "--rate", "200", "--requests", "20")
    status, out, err = bench_serve(node, *arguments)
    assert status == 0, err
    assert "20 of 20 requests answered" in out
    assert "routes: local 20" in out


@pytest.mark.slow
def test_a_trace_hits_the_prefix_cache_where_its_blocks_are_alike(node, trace):
    arguments = ("--trace", trace, "--rate", "100", "--json")
    reports = []
    for flags in ((), (), ("--same-prompts",), ("--same-prompts",)):
        status, out, err = bench_serve(node, *arguments, *flags)
        assert status == 0, err
        reports.append(json.loads(out))
    reused = [report["prompt_tokens"]["reused"] for report in reports]
    assert max(reused[:3]) <= 3 * 1024  # what the second of a pair finds, once the first is done
    assert reused[3] == 6 * 1088  # whole blocks of what an earlier run left
    assert reports[0]["rate_rps"] == pytest.approx(100)
    assert reports[0]["throughput"]["completion_tokens_per_s"] > 0


@pytest.mark.slow
def test_ctrl_c_ends_it_with_a_report(node, workload):
    flags = ["--workload", workload, "--rate", "20", "--requests", "5000", "--json"]
    command = [sys.executable, "-m", "prfaas", "bench", "serve", node, *flags]
    before = answered(node)
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while len(answered(node) - before) < 5:  # the first of them must have been read
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert report["stopped_by"] == "SIGINT"
    assert 1 <= report["requests"]["done"] <= report["requests"]["sent"] < 5000


def answered(url: str) -> set[str]:
    """Return the ids of the latest requests that the node has answered."""
    with urllib.request.urlopen(f"{url}/debug/requests", timeout=HANG_GUARD_S) as answer:
        stories = json.load(answer)["data"]
    return {story["request_id"] for story in stories if story["finish_reasons"]}


def test_no_server_is_one_line_and_a_status(workload):
    arguments = ("--workload", workload, "--rate", "1")
    url = f"http://127.0.0.1:{free_port()}"
    status, out, err = bench_serve(url, *arguments)
    assert (status, out) == (1, "")
    assert err == f"prfaas: cannot reach {url}: [Errno 111] Connection refused\n"


class NamesAndNoMore(BaseHTTPRequestHandler):
    """Says that it has the model `m`, and closes every other connection unanswered."""

    def do_GET(self) -> None:
        body = b'{"object": "list", "data": [{"id": "m"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that answers no request."""
    with ThreadingHTTPServer(("127.0.0.1", 0), NamesAndNoMore) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("model", [(), ("--model", "m")])
def test_a_server_that_answers_nothing_is_a_report_and_a_status(silent, workload, model):
    arguments = ("--workload", workload, "--rate", "1000", "--requests", "3", "--json", *model)
    status, out, err = bench_serve(silent, *arguments)
    assert status == 1
    assert sum(json.loads(out)["errors"].values()) == 3
    assert err.endswith("answered no request\n")


def test_a_model_that_the_server_does_not_have_is_refused_before_anything_is_sent(silent, workload):
    arguments = ("--workload", workload, "--rate", "1", "--model", "other")
    status, out, err = bench_serve(silent, *arguments)
    assert (status, out) == (1, "")
    assert err == f"prfaas: --model: {silent} has no 'other', but m\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("localhost:8000", "--rate", "1"), "no http:// or https:// address"),
        (("http://h", "--rate", "1"), "give one of --workload and --trace"),
        (("http://h", "--workload", "w", "--trace", "t"), "give one of"),
        (("http://h", "--workload", "w"), "--workload: has no times of its own; add --rate"),
        (("http://h", "--workload", "nowhere.toml", "--rate", "1"), "nowhere.toml"),
        (("http://h", "--trace", "nowhere.jsonl"), "nowhere.jsonl"),
        (("http://h", "--trace", "t", "--rate", "nan"), "--rate"),
        (("http://h", "--trace", "t", "--requests", "0"), "--requests"),
        (("http://h", "--trace", "t", "--ttft-slo", "0"), "--ttft-slo"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments, said):
    status, _, err = bench_serve(*arguments)
    assert status == 2
    assert said in err


def test_a_trace_without_times_has_no_rate(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 5, "input_length": 9, "output_length": 1}\n' * 3)
    status, _, err = bench_serve("http://h", "--trace", str(path), "--rate", "2")
    assert status == 2
    assert "all of the first 3 requests come at once" in err
