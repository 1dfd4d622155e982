"""The script writes models that load, and says what is wrong in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from prfaas.engine.loader import load_model
from tests.tiny_configs import FAMILIES

SCRIPT = Path(__file__).parents[2] / "scripts" / "tiny_model.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_it_writes_a_model_that_loads(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "lfm2"
    done = run("lfm2", str(directory), "--seed", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{directory}: lfm2, ")
    assert load_model(directory).config.model_type == "lfm2"


def test_it_lists_the_families() -> None:
    assert tuple(run("--list").stdout.split()) == FAMILIES


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "FAMILY and DIR"),
        (("lfm2",), "FAMILY and DIR"),
        (("gpt-2", "{dir}/new"), "no family 'gpt-2'; there are: bamba, "),
        (("lfm2", "{dir}"), "is not empty"),
        (("lfm2", "{dir}/file"), "Not a directory"),
        (("lfm2", "{dir}/new", "--seed", "-1"), "--seed -1 is negative"),
    ],
)
def test_what_it_cannot_do_is_said_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], named: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    done = run(*(argument.replace("{dir}", str(tmp_path)) for argument in arguments))
    assert done.returncode == 2
    assert named in done.stderr.splitlines()[-1]
    assert not (tmp_path / "new").exists()
