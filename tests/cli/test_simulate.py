"""`prfaas simulate` runs a plan, and prints the same for the same seed."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from prfaas.cli.main import main
from prfaas.cli.simulate_lines import simulation_lines
from tests.config.plan_files import PLAN, UNSET, changed, write_plan

CASE_STUDY = str(Path(__file__).parents[2] / "configs" / "case_study.toml")
FIGURES = {
    "throughput_rps",
    "ttft_mean_s",
    "ttft_p90_s",
    "offload_fraction",
    "egress_bytes_per_s",
}


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments])


def facts(*arguments: str) -> dict[str, Any]:
    result = simulate(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.slow
def test_at_a_low_rate_first_tokens_are_the_papers_service_times():
    found = facts(CASE_STUDY, "--rate", "0.15", "--requests", "1500")
    assert set(found["deployments"]) == {"prfaas", "homogeneous", "naive"}
    assert all(set(each) == FIGURES for each in found["deployments"].values())
    paper = {"prfaas": (2.22, 3.51), "homogeneous": (4.44, 9.73), "naive": (1.74, 3.51)}
    for name, (mean_s, p90_s) in paper.items():
        assert found["deployments"][name]["ttft_mean_s"] == pytest.approx(mean_s, rel=0.06)
        assert found["deployments"][name]["ttft_p90_s"] == pytest.approx(p90_s, rel=0.06)
    assert found["deployments"]["prfaas"]["offload_fraction"] == pytest.approx(0.5, abs=0.03)


@pytest.mark.slow
def test_the_same_seed_prints_the_same_and_another_does_not():
    arguments = (CASE_STUDY, "--rate", "2", "--requests", "200", "--policy", "predictive", "--json")
    first, again = simulate(*arguments), simulate(*arguments)
    assert first.stdout == again.stdout
    assert simulate(*arguments, "--seed", "1").stdout != first.stdout


def test_policies_stand_side_by_side():
    result = simulate(
        CASE_STUDY,
        "--rate",
        "2",
        "--requests",
        "300",
        "--policy",
        "local",
        "--policy",
        "predictive",
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.split("policies of prfaas\n")[1].splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["local", "predictive"]
    found = facts(CASE_STUDY, "--rate", "2", "--requests", "300", "--policy", "predictive")
    (run,) = found["policies"]["prfaas"].values()
    assert run["policy"] == "predictive"
    assert sum(run["reasons"].values()) == 300


def small(tmp_path: Path, **simulation: object) -> str:
    plan = changed(changed(PLAN, "simulation", simulation), "published.deployments", UNSET)
    return str(write_plan(tmp_path, plan))


@pytest.mark.slow
def test_without_a_rate_the_capacity_is_searched_and_drawn(tmp_path):
    plot = tmp_path / "f.svg"
    options = ("--requests", "400", "--policy", "static", "--policy", "threshold")
    found = facts(small(tmp_path), *options, "--plot", str(plot))
    ElementTree.parse(plot)
    assert len(found["capacities_rps"]["a"]) == 3
    loads = [load["fraction_of_capacity"] for load in found["loads"]["a"]]
    assert loads == [0.05, 0.5, 0.8, 0.9, 1.0]
    rates = [found["deployments"][name]["throughput_rps"] for name in "ab"]
    gain = rates[0] / rates[1] - 1
    assert found["gains"]["b"]["throughput_rps"]["gain"] == pytest.approx(gain)
    assert [*found["policies"]["a"]] == ["static", "threshold"]
    lines = [*simulation_lines(found)]
    assert "throughput is the highest rate without a" in lines[0]
    assert sum(line.startswith("a at ") for line in lines) == 5


def test_prefixes_that_moved_are_in_the_report_the_json_and_the_recording(tmp_path):
    trace, recorded = tmp_path / "t.jsonl", tmp_path / "r.json"
    lines = [
        {
            "timestamp": 3000 * i,
            "input_length": 512 * (i + 2),
            "output_length": 5,
            "hash_ids": [*range(i + 2)],
        }
        for i in range(40)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    plan, place = Path(CASE_STUDY).read_text(), Path(CASE_STUDY).parent
    for name in ("workloads", "profiles"):
        plan = plan.replace(f'"{name}/', f'"{place}/{name}/')
    path = tmp_path / "plan.toml"
    path.write_text(plan + "\n[simulation]\nlocal_cache_tokens = 1000000\nmoves_cache = true\n")
    given = (str(path), "--trace", str(trace), "--policy", "predictive")
    (load,) = facts(*given)["policies"]["prfaas"].values()
    assert load["num_moved"] == load["reasons"]["moves_cache"] > 0
    assert load["moved_bytes"] > 0
    shown = simulate(*given, "--chrome-trace", str(recorded)).stdout
    assert f"{load['num_moved']} prefixes moved" in shown
    events = json.loads(recorded.read_text())["traceEvents"]
    assert [event["name"] for event in events].count("movement") == load["num_moved"]


def test_a_trace_is_replayed_at_its_own_times_with_caches(tmp_path):
    trace = tmp_path / "t.jsonl"
    lines = [
        {
            "timestamp": 4000 * i,
            "input_length": 5000,
            "output_length": 5,
            "hash_ids": [*range(9), 50 + i],
        }
        for i in range(20)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    path = small(tmp_path, local_cache_tokens=100_000, prfaas_cache_tokens=100_000)
    found = facts(path, "--trace", str(trace))
    assert found["num_requests"] == 20
    (load,) = found["loads"]["b"]
    assert load["rate_rps"] == pytest.approx(20 / 76)
    assert load["hit_fraction"] == pytest.approx(19 * 9 * 512 / (20 * 5000))
    assert len(facts(path, "--trace", str(trace), "--requests", "3")["loads"]["a"]) == 1
    quick = facts(path, "--trace", str(trace), "--rate-factor", "2")
    assert quick["loads"]["b"][0]["rate_rps"] == pytest.approx(20 / 38)
    csv = tmp_path / "t.csv"
    csv.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    assert facts(path, "--trace", str(csv))["num_requests"] == 2


@pytest.mark.parametrize(
    ("option", "values", "says"),
    [
        ("--rate", ("0", "-1", "1.1e9", "inf", "-inf"), "is not in the range 0<x<=1000000000.0"),
        ("--rate", ("nan",), "--rate: nan is no number"),
        ("--rate", ("", "two"), "is not a valid float"),
        ("--rate-factor", ("0", "-1", "1e300"), "is not in the range 0<x<=1000000000.0"),
        ("--rate-factor", ("nan",), "--rate-factor: nan is no number"),
        ("--seed", ("-1", str(2**63 + 1)), "is not in the range 0<=x<="),
        ("--seed", ("nan", "1.5"), "is not a valid integer range"),
        ("--requests", ("0", "-1", "100000001"), "is not in the range 1<=x<=100000000"),
        ("--requests", ("nan",), "is not a valid integer range"),
        ("--chrome-trace-requests", ("0", "-1", "1000001"), "is not in the range 1<=x<=1000000"),
    ],
)
def test_an_option_beyond_its_limits_is_refused(option, values, says):
    for value in values:
        result = simulate(CASE_STUDY, option, value)
        assert result.exit_code == 2
        assert says in result.output


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--rate", "1e9"),
        ("--rate", "1e-9"),
        ("--seed", "0"),
        ("--seed", str(2**63)),
        ("--requests", "1"),
        ("--requests", "2"),
    ],
)
def test_an_option_within_its_limits_is_taken(tmp_path, option, value):
    given = {"--rate": "1", "--requests": "2", "--seed": "0", option: value}
    found = facts(small(tmp_path), *(each for pair in given.items() for each in pair))
    assert (found["num_requests"], found["seed"]) == (
        int(given["--requests"]),
        int(given["--seed"]),
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nowhere.toml",), "cannot read nowhere.toml"),
        ((CASE_STUDY, "--rate", "1", "--trace", "t.csv"), "a trace has its own times"),
        ((CASE_STUDY, "--rate-factor", "2"), "only a trace has a rate to change"),
        ((CASE_STUDY, "--chrome-trace", "t.json"), "records single runs; add --rate or --trace"),
        ((CASE_STUDY, "--rate", "1", "--chrome-trace", "no/t.json"), "there is no directory no"),
        ((CASE_STUDY, "--plot", "f.gif"), "ends in none of .svg, .png"),
        ((CASE_STUDY, "--trace", "nowhere.jsonl"), "cannot read nowhere.jsonl"),
        ((CASE_STUDY, "--requests", "50"), "prfaas: 50 requests do not fill this deployment"),
        ((CASE_STUDY, "--rate", "0"), "0.0 is not in the range 0<x<="),
        ((CASE_STUDY, "--rate", "nan"), "--rate: nan is no number"),
        ((CASE_STUDY, "--policy", "best"), "'best' is not one of 'local'"),
    ],
)
def test_what_cannot_be_simulated_is_said_and_status_2(arguments, says):
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output


def test_single_runs_are_drawn_and_recorded(tmp_path):
    plot, events = tmp_path / "f.svg", tmp_path / "t.json"
    files = ("--plot", str(plot), "--chrome-trace", str(events), "--chrome-trace-requests", "7")
    arguments = (small(tmp_path), "--rate", "1", "--requests", "60", "--policy", "predictive")
    result = simulate(*arguments, *files)
    assert result.exit_code == 0, result.output
    assert "https://ui.perfetto.dev" in result.stdout
    drawn = ElementTree.parse(plot)
    texts = {element.text for element in drawn.iter() if element.tag.endswith("text")}
    assert {"a static", "b local", "a predictive", "Requests in the system"} <= texts
    seen = {
        event["args"]["request"]
        for event in json.loads(events.read_text())["traceEvents"]
        if event["ph"] == "X"
    }
    assert seen == set(range(7))
    curves = {"ttft_curve_s", "backlog_curve"}
    assert not curves & facts(*arguments)["loads"]["a"][0].keys()


def test_policies_need_two_clusters_to_choose_from(tmp_path):
    plan = changed(changed(PLAN, "deployments.a", UNSET), "published", UNSET)
    path = write_plan(tmp_path, changed(plan, "compare", UNSET))
    result = simulate(str(path), "--policy", "local")
    assert result.exit_code == 2
    assert "has no deployment of the kind prfaas" in result.stderr
