"""The wheel holds the package and nothing else, and asks for what the package imports."""

import configparser
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel as pip builds it for anybody; yield it opened."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*command, str(directory), str(ROOT)], check=True)
    (path,) = directory.glob("prfaas-*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    (member,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return wheel.read(member).decode()


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_beside_the_package(wheel):
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "prfaas").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == sources


@pytest.mark.slow
def test_the_wheel_asks_for_the_dependencies_of_the_project_file(wheel):
    fields = Parser().parsestr(metadata(wheel, "METADATA"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {need.replace(" ", "") for need in project["dependencies"]}
    required = [need.replace(" ", "") for need in fields.get_all("Requires-Dist", [])]
    assert {normal(need) for need in required if ";" not in need} == {normal(n) for n in wanted}
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Requires-Python"] == project["requires-python"]


def normal(requirement: str) -> tuple[str, ...]:
    """Return name and version clauses in an order of their own."""
    name = requirement.split("<")[0].split(">")[0]
    return name, *sorted(requirement.removeprefix(name).split(","))


@pytest.mark.slow
def test_the_command_is_installed(wheel):
    entries = configparser.ConfigParser()
    entries.read_string(metadata(wheel, "entry_points.txt"))
    assert dict(entries["console_scripts"]) == {"prfaas": "prfaas.cli.main:main"}
