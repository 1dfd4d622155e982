import multiprocessing
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas.models.directory import entry_name, models_dir, prepare_root, publish
from prfaas.models.progress import silent


def has_mark(path: Path) -> bool:
    return (path / "mark").exists()


def put(text: str) -> Callable[[Path], None]:
    def build(directory: Path) -> None:
        (directory / "mark").write_text(text)

    return build


def publish_mark(text: str, entry: str = "model") -> Path:
    return publish(entry, put(text), is_ready=has_mark, progress=silent)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("gemma-3-270m", "gemma-3-270m"),
        ("Qwen/Qwen3-0.6B", "Qwen--Qwen3-0.6B"),
        ("a", "a"),
        ("x" * 128, "x" * 128),
    ],
)
def test_names_become_one_directory(name: str, entry: str) -> None:
    assert entry_name(name) == entry


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../evil", "a/../b", "/etc", "a/b/c", "a//b", "a/", "/a", ".hidden"),
        *("a/.b", "a\0b", "a b", "a\nb", "é", "x" * 129, "a..b", "-x", "~", "a\\b"),
    ],
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="model name"):
        entry_name(name)


def test_the_directory_is_the_variables_then_the_data_homes_then_the_homes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("PRFAAS_MODELS_DIR", "/models")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert models_dir() == Path("/models")
    monkeypatch.delenv("PRFAAS_MODELS_DIR")
    assert models_dir() == Path("/data/prfaas/models")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert models_dir() == Path("/home/someone/.local/share/prfaas/models")


def test_the_directory_is_private(root: Path) -> None:
    assert prepare_root() == root
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_a_directory_that_anyone_can_write_to_is_refused(root: Path) -> None:
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(ConfigError, match="anyone can write"):
        publish_mark("x")
    assert list(root.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a directory away needs root")
def test_a_directory_of_another_user_is_refused(root: Path) -> None:
    root.mkdir()
    os.chown(root, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        prepare_root()


def test_a_directory_that_cannot_be_made_is_named(root: Path) -> None:
    root.write_text("a file")
    with pytest.raises(ConfigError, match=str(root)):
        publish_mark("x")


def test_what_is_ready_is_not_built_again(root: Path) -> None:
    assert publish_mark("first") == publish_mark("second") == root / "model"
    assert (root / "model" / "mark").read_text() == "first"


def test_an_interrupted_build_leaves_nothing(root: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "half").write_text("x")
        assert not (root / "model").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish("model", build, is_ready=has_mark, progress=silent)
    assert [path.name for path in root.iterdir()] == [".locks"]
    publish_mark("again")
    assert (root / "model" / "mark").read_text() == "again"


def test_the_rest_of_a_killed_build_is_removed_by_the_next(root: Path) -> None:
    for name in (".partial-model~killed", ".partial-model.2~other", ".partial-mode~other"):
        (root / name).mkdir(parents=True)
    publish_mark("x")
    left = {path.name for path in root.glob(".partial*")}
    assert left == {".partial-mode~other", ".partial-model.2~other"}


def test_an_outdated_entry_is_replaced(root: Path) -> None:
    (root / "model").mkdir(parents=True)
    (root / "model" / "old").write_text("x")
    publish_mark("new")
    assert [path.name for path in (root / "model").iterdir()] == ["mark"]


def test_a_link_in_the_place_of_an_entry_is_not_followed(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    root.mkdir(mode=0o700)
    (root / "model").symlink_to(outside)
    with pytest.raises(ConfigError, match="in the way"):
        publish_mark("x")
    assert list(outside.iterdir()) == []


def test_a_full_disk_is_a_config_error(root: Path) -> None:
    def build(_directory: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="No space left"):
        publish("model", build, is_ready=has_mark, progress=silent)


def build_slowly(log: Path) -> None:
    def build(directory: Path) -> None:
        with log.open("a") as file:
            file.write("built\n")
        time.sleep(0.3)
        put("x")(directory)

    publish("model", build, is_ready=has_mark, progress=silent)


@pytest.mark.slow
def test_of_several_processes_one_builds(root: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=build_slowly, args=(log,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert log.read_text() == "built\n"
    assert has_mark(root / "model")


def test_waiting_for_another_process_is_shown_and_can_be_stopped(root: Path) -> None:
    seen: list[str] = []

    def stop(stage: str, _done: int, _total: int) -> None:
        seen.append(stage)
        raise KeyboardInterrupt

    def build(_directory: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            publish("model", put("inner"), is_ready=has_mark, progress=stop)
        put("outer")(_directory)

    publish("model", build, is_ready=has_mark, progress=silent)
    assert seen == ["Waiting for another process"]
    assert (root / "model" / "mark").read_text() == "outer"
