"""An index that was damaged, cut or lost costs records, never their truth, and never the process."""

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from prfaas.cache.store_index import Index, encode_key
from prfaas.errors import ConfigError
from tests.cache.stores import (
    bytes_of,
    fill,
    flip,
    index_of,
    key_of,
    open_store,
    opened,
    put,
    whole,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


def damage_index(path: Path, how: str) -> None:
    size = path.stat().st_size
    match how:
        case "half":
            os.truncate(path, size // 2)
        case "one page":
            os.truncate(path, 4096)
        case "empty":
            os.truncate(path, 0)
        case "random":
            path.write_bytes(bytes_of("noise", size))
        case "text":
            path.write_text("this is no index\n" * 100)
        case "link":
            kept = path.parent.parent.parent / "kept"
            path.rename(kept)
            path.symlink_to(kept)
        case _:
            assert how == "pipe"
            path.unlink()
            os.mkfifo(path)


@pytest.mark.parametrize("how", ["half", "one page", "empty", "random", "text", "link", "pipe"])
def test_an_index_that_cannot_be_read_is_moved_aside_and_the_store_starts_empty(directory, how):
    with opened(directory) as store:
        for start in range(0, 3000, 500):
            fill(store, range(start, start + 500), 100)
    damage_index(index_of(directory), how)
    with structlog.testing.capture_logs() as logs, opened(directory) as store:
        assert whole(store, range(3000), 100) == []
        fill(store, range(5))
        assert whole(store, range(5)) == list(range(5))
    (said,) = [entry for entry in logs if entry["event"] == "store.set_aside"]
    assert Path(said["path"]).is_dir()
    assert said["reason"]
    with opened(directory) as store:
        assert whole(store, range(5)) == list(range(5))


def test_only_the_last_damaged_generation_is_kept(directory):
    for _ in range(3):
        with opened(directory) as store:
            fill(store, range(5))
        damage_index(index_of(directory), "random")
    with opened(directory):
        assert len(list(directory.glob("damaged-*"))) == 1


@pytest.mark.slow
def test_flipped_bytes_of_the_index_never_give_wrong_bytes_or_a_crash(directory, tmp_path):
    """Each damaged copy is opened and written in a process of its own, which must not die."""
    with opened(directory) as store:
        for start in range(0, 400, 20):  # many commits leave a list of free pages
            fill(store, range(start, start + 20), 64)
        store.clear()
        for start in range(0, 200, 20):
            fill(store, range(start, start + 20), 64)
    generator = random.Random(5)
    size = index_of(directory).stat().st_size
    copies = []
    for number in range(24):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(directory, copy)
        copy.chmod(0o700)
        for _ in range(generator.choice([1, 3, 40])):
            flip(index_of(copy), generator.randrange(size))
        copies.append(str(copy))
    code = """
import sys
from pathlib import Path
from tests.cache.stores import opened, fill, whole, put, key_of, bytes_of
for name in sys.argv[1:]:
    print(name, flush=True)
    with opened(Path(name)) as store:
        found = whole(store, range(400), 64)
        print("found", len(found), flush=True)
        for number in range(400):
            put(store, key_of(number), bytes_of(number, 64))
        store.flush()
        assert whole(store, range(400), 64) == list(range(400))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *copies],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert any(line == "found 200" for line in done.stdout.splitlines()), "none was readable"


def test_a_reader_that_was_killed_from_outside_says_nothing_of_the_index(directory, monkeypatch):
    with opened(directory) as store:
        fill(store, range(5))
    killed = subprocess.CompletedProcess([], -signal.SIGKILL, stderr=b"")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *_, **__: killed)
        with pytest.raises(ConfigError, match="signal 9"):
            open_store(directory)
    with opened(directory) as store:
        assert whole(store, range(5)) == list(range(5))


def test_an_index_cut_under_a_running_store_ends_in_misses(directory):
    with opened(directory) as store:
        for start in range(0, 3000, 500):
            fill(store, range(start, start + 500), 100)
    store = open_store(directory)
    os.truncate(index_of(directory), 4096)
    with structlog.testing.capture_logs() as logs:
        assert whole(store, range(3000), 100) == []
        assert put(store, key_of(5000), b"later")
        store.flush()
    assert [entry["event"] for entry in logs] == ["store.failed", "store.write_failed"]
    records = store.stats().records
    assert records.is_broken
    assert (records.num_records, records.live_bytes) == (0, 0)
    assert records.segment_bytes > 0
    store.close()


def test_a_directory_deleted_under_a_running_store_ends_in_misses(directory):
    store = open_store(directory)
    fill(store, range(5))
    shutil.rmtree(directory)
    outcomes: list[bool] = []
    assert whole(store, range(5)) == []
    put(store, key_of(9), b"later", done=outcomes.append)
    store.flush()
    assert outcomes in ([False], [])
    store.close()


def test_an_entry_of_the_index_that_was_changed_is_a_miss(directory, monkeypatch):
    with opened(directory) as store:
        fill(store, range(5))
        real = Index.get_many
        lost = encode_key(key_of(3))
        monkeypatch.setattr(
            Index,
            "get_many",
            lambda index, names: [
                None if name == lost else record
                for name, record in zip(names, real(index, names), strict=True)
            ],
        )
        assert whole(store, range(5)) == [0, 1, 2, 4]
        monkeypatch.undo()
        fill(store, range(3, 4))
        assert whole(store, range(5)) == [0, 1, 2, 3, 4]
