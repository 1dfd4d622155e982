"""`prfaas serve` before there is a node: settings merged, printed, or refused in one line."""

import os
import signal
import tomllib

import pytest
from click.testing import CliRunner

from prfaas.cli.main import main
from prfaas.cli.serve import exit_on_signals, limit_threads
from prfaas.config.settings import SETTINGS


@pytest.fixture(autouse=True)
def without_variables(monkeypatch):
    """Keep the settings of whoever runs the tests out of them."""
    for setting in SETTINGS:
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.delenv("PRFAAS_CONFIG", raising=False)


def serve(*arguments: str):
    return CliRunner().invoke(main, ["serve", *arguments])


def test_print_config_shows_flags_over_variables_over_the_file(tmp_path, monkeypatch):
    path = tmp_path / "node.toml"
    path.write_text(
        "[engine]\nthreads = 3\nchunk_tokens = 128\n[scheduler]\nthreshold_tokens = 7\n"
        "[transport]\npeer = '127.0.0.1:9'"
    )
    monkeypatch.setenv("PRFAAS_CHUNK_TOKENS", "192")
    monkeypatch.setenv("PRFAAS_API_KEY", "sesame")
    result = serve("--config", str(path), "--threads", "2", "--allow-plaintext", "--print-config")
    assert result.exit_code == 0
    shown = tomllib.loads(result.stdout)
    assert shown["engine"]["threads"] == 2
    assert shown["engine"]["chunk_tokens"] == 192
    assert shown["scheduler"]["threshold_tokens"] == 7
    assert shown["transport"]["allow_plaintext"] is True
    assert shown["http"]["api_key"] == "********"


def test_a_switch_can_be_turned_off_against_the_file(tmp_path):
    path = tmp_path / "node.toml"
    path.write_text("[transport]\nallow_plaintext = true")
    result = serve("--config", str(path), "--no-allow-plaintext", "--print-config")
    assert tomllib.loads(result.stdout)["transport"]["allow_plaintext"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--role", "decode"], "--role: expected one of prefill, pd, scheduler, not 'decode'"),
        (["--port", "70000"], "--port: 70000 is above the maximum of 65535"),
        (["--port", "0"], "--port: 0 is below the minimum of 1"),
        (["--role", "prefill", "--peer", "127.0.0.1:1"], "--peer has no effect with role prefill"),
        (["--peer", "nowhere"], "--peer: expected host:port, not 'nowhere'"),
        (["--threads", "none"], "--threads: expected a whole number, not 'none'"),
        (["--config", "/nonexistent.toml"], "cannot read /nonexistent.toml"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_status_2(arguments, message):
    result = serve(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("prfaas: ")
    assert message in line


def test_an_unknown_variable_is_refused(monkeypatch):
    monkeypatch.setenv("PRFAAS_TRESHOLD_TOKENS", "1")
    result = serve("--print-config")
    assert result.exit_code == 2
    assert "did you mean PRFAAS_THRESHOLD_TOKENS" in result.stderr


def test_every_setting_that_is_no_secret_has_a_flag_and_help():
    text = serve("--help").stdout
    for setting in SETTINGS:
        assert (f"{setting.flag} " in text or f"{setting.flag}\n" in text) == (
            not setting.is_secret
        ), setting.key


@pytest.mark.parametrize(("threads", "expected"), [(3, "3"), (None, "7")])
def test_threads_reach_the_thread_pools_of_the_process(threads, expected, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    limit_threads(threads)
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_loop_runs_is_a_clean_exit(number):
    before = {known: signal.getsignal(known) for known in (signal.SIGTERM, signal.SIGINT)}
    try:
        exit_on_signals()
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(number)
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)
    assert ended.value.code == 0
