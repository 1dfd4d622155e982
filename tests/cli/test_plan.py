"""`prfaas plan` says what it plans, to a person and to a program."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from prfaas.cli.main import main
from tests.config.plan_files import PLAN, UNSET, changed, write_plan

CONFIGS = Path(__file__).parents[2] / "configs"
CASE_STUDY = str(CONFIGS / "case_study.toml")


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def test_the_case_study_is_shown_beside_the_paper():
    result = plan(CASE_STUDY)
    assert result.exit_code == 0
    rows = {line[:22].strip(): line[22:].split() for line in result.stdout.splitlines()}
    assert rows["t (tokens)"] == ["19,524", "~", "+0.6%", "-", "-"]
    assert rows["N_p"][:3] == ["3", "~", "+0.0%"]
    assert rows["of 100 Gbps"] == ["12.3%", "0.0%", "12.8%"]
    assert rows["limited by"] == ["prfaas", "prefill", "prfaas"]
    assert (
        "prfaas against homogeneous: Lambda_max +55.0% (paper +54%), P90 TTFT -64" in result.stdout
    )
    assert "at equal cost (128, 12 : 4)*: Lambda_max +16.2% (paper +15%)" in result.stdout
    assert "* rests on inputs fitted to published rates" in result.stdout


@pytest.mark.parametrize("order", [("--json",), ()])
def test_json_is_one_object_wherever_the_flag_stands(order):
    arguments = (*order, CASE_STUDY) if order else (CASE_STUDY, "--json")
    facts = json.loads(plan(*arguments).stdout)
    assert facts["deployments"]["prfaas"]["num_decode"] == 5
    assert abs(facts["error_vs_paper"]["prfaas"]["lambda_max_rps"]) < 0.015


def test_a_plot_is_written_and_told(tmp_path):
    path = tmp_path / "f.svg"
    result = plan(CASE_STUDY, "--plot", str(path))
    assert f"drawn in {path}" in result.stdout
    ElementTree.parse(path)
    json.loads(plan(CASE_STUDY, "--json", "--plot", str(path)).stdout)


def test_a_plan_without_link_or_published_figures_is_shown(tmp_path):
    bare = PLAN
    for key in ("link", "profiles.prfaas", "deployments.a", "compare", "published"):
        bare = changed(bare, key, UNSET)
    result = plan(str(write_plan(tmp_path, bare)))
    assert result.exit_code == 0, result.output
    assert "paper" not in result.stdout
    refused = plan(str(tmp_path / "plan.toml"), "--plot", str(tmp_path / "f.svg"))
    assert refused.exit_code == 2
    assert "has no deployment with a threshold" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nowhere.toml",), "prfaas: cannot read nowhere.toml: No such file or directory"),
        ((CASE_STUDY, "--plot", "f.gif"), "ends in none of .svg, .png"),
        (("feasibility", "nowhere.toml"), "cannot read nowhere.toml"),
        (("feasibility", CASE_STUDY), "is not set"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_status_2(arguments, says):
    result = plan(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output


def test_help_shows_both_forms():
    for arguments in ((), ("--help",), ("-h",)):
        shown = plan(*arguments).output
        assert "prfaas plan CONFIG [--json] [--plot FILE.svg|png]" in shown
        assert "prfaas plan feasibility [FILE] [--json]" in shown


def test_feasibility_says_what_is_implied_and_what_fits(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the shipped file is found from anywhere
    shown = plan("feasibility").stdout
    assert "512 GPUs of MiniMax-M2.5 229B at 32,768 tokens send 3.84 Tbps; paper 3.80 Tbps" in shown
    assert "512 GPUs of Ring-2.5-1T at 32,768 tokens send 166 Gbps; paper 170 Gbps (-2.5%)" in shown
    (line,) = (line for line in shown.splitlines() if line.startswith("10 Gbps"))
    assert line.split()[-3:] == ["none", "none", "16"]
    rows = [line for line in shown.splitlines() if line.startswith("Kimi Linear")]
    assert len(rows) == 4
    assert all("implied, PrfaaS Table 3" in row for row in rows)
    facts = json.loads(plan("feasibility", "--json").stdout)
    assert len(facts["models"]) == 7
