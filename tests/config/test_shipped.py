"""The files that ship beside the package load, and the image copies what exists."""

import json
import re
from pathlib import Path

import pytest

from prfaas.config.load import load_config

ROOT = Path(__file__).parents[2]
CONFIGS = [ROOT / "configs" / f"{role}.toml" for role in ("pd", "prefill", "scheduler")]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_file_is_a_valid_node_of_its_name(path):
    assert load_config(flags={}, environ={}, config_path=path).role == path.stem


def test_every_role_has_a_file_and_find_each_other():
    pair = {path.stem: load_config(flags={}, environ={}, config_path=path) for path in CONFIGS}
    assert set(pair) == {"pd", "prefill", "scheduler"}
    assert pair["pd"].transport.peer == f"prefill:{pair['prefill'].http.port}"
    assert pair["pd"].model == pair["prefill"].model == pair["scheduler"].model


def test_the_image_copies_only_what_exists_and_is_not_ignored():
    copied = re.findall(
        r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE
    )
    sources = {source for line in copied for source in line.split()}
    kept = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sources == set(kept)
    assert all((ROOT / source).exists() for source in sources)


def test_the_image_runs_as_a_user_of_its_own_with_a_file_that_ships():
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^USER prfaas$", dockerfile, re.MULTILINE)
    named = re.findall(r"PRFAAS_CONFIG=/etc/prfaas/(\w+)\.toml", dockerfile)
    assert set(named) == {"pd", "prefill"}


def test_the_images_health_check_is_a_command_that_python_can_run():
    dockerfile = (ROOT / "Dockerfile").read_text()
    (line,) = re.findall(r"^HEALTHCHECK.*\\\n\s+CMD (\[.*\])$", dockerfile, re.MULTILINE)
    program, flag, source = json.loads(line)
    assert (program, flag) == ("python", "-c")
    compile(source, "healthcheck", "exec")
    assert "/health" in source
