"""docs/planning.md shows what the commands print."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from prfaas.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arguments", ["configs/case_study.toml", "feasibility"])
def test_the_output_shown_is_the_commands(arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    shown = page.split(f"$ prfaas plan {arguments}\n```\n\n```text\n")[1].split("\n```")[0]
    printed = CliRunner().invoke(main, ["plan", arguments]).stdout
    assert shown == printed.rstrip("\n")
