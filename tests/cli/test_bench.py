"""`prfaas bench link` measures a running node, and says what is wrong where there is none."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from prfaas.cli.main import main
from tests.cli.node_processes import free_port, running_node

PROFILE = Path(__file__).parents[2] / "configs" / "profiles" / "h200-internal-1t.toml"
QUICK = ("--seconds", "0.05", "--streams", "2")


def bench_link(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, ["bench", "link", *arguments])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.slow
def test_a_running_node_is_measured_for_programs_and_for_people(tmp_path):
    flags = ("--engine", "replay", "--profile", str(PROFILE), "--bytes-scale", "0.002")
    with running_node(tmp_path, "--role", "prefill", *flags) as node:
        node.wait_ready()
        address = f"127.0.0.1:{node.port}"
        status, out, err = bench_link(address, *QUICK, "--json", "--local-tokens-per-s", "500")
        assert status == 0, err
        report = json.loads(out)
        assert [rate["streams"] for rate in report["streams"]] == [1, 2]
        assert all(rate["goodput_bytes_per_s"] > 0 for rate in report["streams"])
        assert {each["codec"] for each in report["codecs"]} == {
            "raw",
            "zstd",
            "fp16",
            "int8",
            "fp8",
        }
        assert report["routing"]["threshold_tokens"] >= 64
        status, out, err = bench_link(address, *QUICK, "--no-codecs")
        assert status == 0, err
        assert "streams      goodput" in out
        assert "codec" not in out
        assert node.stop() == 0


def test_no_node_is_one_line_and_a_status():
    status, out, err = bench_link(f"127.0.0.1:{free_port()}", *QUICK, "--json")
    assert (status, out) == (1, "")
    assert err.startswith("prfaas: peer 127.0.0.1:")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "nowhere"),
        (("127.0.0.1:9", "--tls-key", "key.pem"), "--tls-key"),
        (("127.0.0.1:9", "--seconds", "100"), "--seconds"),
        (("127.0.0.1:9", "--seconds", "nan"), "--seconds"),
        (("127.0.0.1:9", "--local-tokens-per-s", "nan"), "--local-tokens-per-s"),
        (("127.0.0.1:9", "--local-tokens-per-s", "inf"), "--local-tokens-per-s"),
        (("192.0.2.1:9",), "--allow-plaintext"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments, said):
    status, _, err = bench_link(*arguments)
    assert status == 2
    assert said in err
