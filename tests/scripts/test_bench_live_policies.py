"""scripts/bench/live_policies.py: the same plan for nodes and simulation, a link that holds its rate, and a run to its end."""

import json
import socket
import sys
import threading
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.cli.main import main
from prfaas.config.plan_file import read_plan_file
from prfaas.config.profiles import read_profile
from scripts.bench import live_policies
from scripts.bench.link_peers import End
from scripts.bench.live_plan import SCENARIOS, SOURCES, Case, write_case, write_profiles
from scripts.bench.shaped_relay import BURST_S, Rate

KV = {2_000: 400_000, 64_000: 1_400_000}


KEPT = {"local": 1.0, "remote": 1.0}


def case(directory: Path, scenario: str = "halved", factors: dict[str, float] = KEPT) -> Case:
    return write_case(
        directory,
        SCENARIOS[scenario],
        speed=2.0,
        slower=factors,
        kv=KV,
        load=0.7,
        num_requests=50,
        output_tokens=2,
        stall_timeout_s=5.0,
        seed=3,
    )


# ---------------------------------------------------------------- the plan


def test_profiles_are_those_of_the_case_study_but_faster(tmp_path):
    paths = write_profiles(tmp_path, 4.0)
    for side, name in SOURCES.items():
        ours = read_profile(paths[side])
        theirs = read_profile(live_policies.RELAY.parents[2] / f"configs/profiles/{name}.toml")
        for tokens in (500, 27_000, 100_000):
            assert ours.prefill_s(tokens) == pytest.approx(theirs.prefill_s(tokens) / 4)
            assert ours.kv_bytes(tokens) == theirs.kv_bytes(tokens)
    decode = read_profile(paths["local"]).decode
    assert decode is not None
    assert decode.step_s(20) == pytest.approx(0.025 / 4)


def test_the_link_is_filled_as_far_as_the_paper_allows(tmp_path):
    found = case(tmp_path)
    rates = found.file.plans["prfaas"].rates
    egress = found.rate_rps * rates.egress_bytes_per_s / rates.lambda_max_rps
    assert egress / found.link_bytes_per_s == pytest.approx(0.7, rel=0.02)
    assert found.rate_rps == pytest.approx(0.7 * rates.lambda_max_rps)


def test_the_plan_has_the_bytes_that_moved_and_the_link_as_it_changes(tmp_path):
    found = case(tmp_path)
    file = read_plan_file(found.path)
    assert file.model.prfaas is not None
    assert file.model.prfaas.kv_bytes(2_000) == 400_000
    last_s, link = found.requests[-1].arrival_s, file.simulation.link
    assert [each.at_s for each in link] == pytest.approx([last_s / 3, 2 * last_s / 3])
    assert [each.bandwidth_fraction for each in link] == [0.5, 1.0]
    assert case(tmp_path, "steady").file.simulation.link == ()


def test_the_command_simulates_what_the_script_does(tmp_path):
    found = case(tmp_path)
    command = ["simulate", str(found.path), "--rate", repr(found.rate_rps), "--requests", "50"]
    command += ["--seed", "3", "--policy", "predictive", "--json"]
    done = CliRunner().invoke(main, command)
    theirs = json.loads(done.stdout)["policies"]["prfaas"]["predictive"]
    ours = found.simulated("predictive")
    assert theirs["ttft_p90_s"] == pytest.approx(ours.ttft_p90_s)
    assert theirs["egress_bytes_per_s"] == pytest.approx(ours.egress_bytes_per_s)


# ---------------------------------------------------------------- what is made of what was seen


def test_t_is_looked_at_when_it_has_settled(tmp_path):
    found = case(tmp_path)
    last_s = found.requests[-1].arrival_s
    seen = [
        {"at_s": share * last_s, "threshold_tokens": tokens}
        for share, tokens in ((0.1, 1), (0.3, 100), (0.35, 2), (0.6, 400), (0.7, 3), (0.9, 200))
    ]
    t = live_policies.thresholds(seen, found)
    assert t == {"before": 100, "halved": 400, "recovered": 200}


def test_aims_are_judged_against_the_simulation_and_between_policies():
    def row(goodput: float, simulated: float) -> dict[str, object]:
        figures = dict.fromkeys(live_policies.COMPARED, 1.0)
        return {
            "live": figures | {"goodput_rps": goodput},
            "simulated": figures | {"goodput_rps": simulated},
        }

    found = list(live_policies.aims({"predictive": row(1.2, 1.0), "static": row(1.0, 0.95)}))
    missed = [aim["aim"] for aim in found if not aim["is_met"]]
    assert missed == ["predictive: live goodput_rps within 10% of the simulated"]
    worse = list(live_policies.aims({"predictive": row(0.9, 0.9), "static": row(1.0, 1.0)}))
    assert not worse[-1]["is_met"]


@pytest.mark.parametrize(
    ("halved", "is_met"), [((10, 30, 12), True), ((10, 20, 10), False), ((10, 30, 31), False)]
)
def test_t_is_compared_with_what_the_same_requests_made_it_over_a_link_that_stayed(halved, is_met):
    names = ("before", "halved", "recovered")
    steady = dict(zip(names, (10.0, 20.0, 10.0), strict=True))
    moved = live_policies.movement(steady, dict(zip(names, halved, strict=True)))
    assert moved is not None
    assert moved["is_met"] == is_met
    assert live_policies.movement(steady, dict.fromkeys(names)) is None


def test_a_machine_that_does_not_keep_the_time_is_named_and_planned_for(tmp_path):
    rows = [{"ttft_s": n / 1e4, "profile_s": n / 1e4} for n in (1, 16_000, 64_000)]
    assert live_policies.slower(rows) == 1.0
    for row in rows:
        row["ttft_s"] *= 1.6
    factors = {"local": 1.0, "remote": live_policies.slower(rows)}
    assert "remote prompts alone took 1.60 times" in (live_policies.too_slow(factors) or "")
    assert live_policies.too_slow({"local": 1.2, "remote": 1.4}) is None
    kept = case(tmp_path)
    slower = case(tmp_path, factors=factors)
    for found, factor in ((kept, 1.0), (slower, 1.6)):
        assert found.file.model.prfaas is not None
        assert found.file.model.prfaas.prefill_s(8192) == pytest.approx(0.72 / 2 * factor)


# ---------------------------------------------------------------- the relay


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 16_384), st.floats(0, 0.5)), min_size=1, max_size=50),
    st.floats(1e4, 1e7),
)
def test_no_more_passes_than_the_rate_allows(pieces, rate_bytes_per_s):
    rate, now_s, passed = Rate(rate_bytes_per_s), 0.0, []
    for num_bytes, pause_s in pieces:
        now_s += pause_s
        now_s += rate.wait_s(num_bytes, now_s)
        passed.append((now_s, num_bytes))
    for first in range(len(passed)):
        sent = sum(num_bytes for _, num_bytes in passed[first:])
        took_s = passed[-1][0] - passed[first][0] + BURST_S
        assert sent <= (took_s * rate_bytes_per_s + passed[first][1]) * (1 + 1e-6) + 1
    assert all(early <= late for (early, _), (late, _) in pairwise(passed))


def test_the_relay_carries_both_ways_and_counts_what_comes_down(tmp_path):
    answer = bytes(range(256)) * 1024

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(4, socket.MSG_WAITALL) == b"send"
            connection.sendall(answer)

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        target = str(listener.getsockname()[1])
        command = [sys.executable, str(live_policies.RELAY), "--target", target]
        end = End(command, tmp_path / "relay.log")
        link = live_policies.Link(end=end, port=int(end.read()["port"]))
        try:
            link.set(4e6)
            with socket.create_connection(("127.0.0.1", link.port)) as client:
                client.sendall(b"send")
                received = b"".join(iter(lambda: client.recv(1 << 16), b""))
            assert received == answer
            assert link.num_bytes() == len(answer)
        finally:
            end.close()
            thread.join()


# ---------------------------------------------------------------- all of it


@pytest.mark.slow
def test_a_small_run_has_live_figures_beside_simulated_ones(capsys, tmp_path, monkeypatch):
    rows = [{"num_tokens": n, "num_bytes": KV[n], "ttft_s": 1.0, "profile_s": 1.0} for n in KV]
    monkeypatch.setattr(live_policies, "single_prompts", lambda *_: rows)  # two more nodes
    arguments = ["--json", "--speed", "40", "--bytes-scale", "0.0005", "--requests", "6"]
    arguments += ["--scenario", "halved", "--policy", "predictive", "--files", str(tmp_path)]
    live_policies.main([*arguments, "--period-s", "1"])
    report = json.loads(capsys.readouterr().out)
    found = report["scenarios"]["halved"]["policies"]["predictive"]
    assert found["live"]["requests"]["done"] == 6
    assert found["live"]["ttft_p90_s"] > 0
    assert found["simulated"]["ttft_p90_s"] > 0
    assert found["seen"][0]["at_s"] < found["seen"][-1]["at_s"]
    assert len(report["scenarios"]["halved"]["aims"]) >= 4
    assert (tmp_path / "plan-halved.toml").is_file()
