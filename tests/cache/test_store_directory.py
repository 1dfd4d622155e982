"""A cache directory is the user's own, used by one process, and named if it is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas.cache.store_directory import (
    CacheDirectory,
    generation_name,
    locked_directory,
)
from prfaas.errors import ConfigError
from tests.processes import started

pytestmark = pytest.mark.usefixtures("no_leaks")

HOLDER = """
import sys
from pathlib import Path
from prfaas.cache.store_directory import CacheDirectory
directory = CacheDirectory(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_it_is_made_for_this_user_alone(tmp_path):
    with locked_directory(tmp_path / "a" / "cache") as directory:
        assert directory.path.stat().st_mode & 0o777 == 0o700
        assert directory.generations() == []


def test_another_process_is_refused_with_the_pid_of_the_holder_until_that_ends(tmp_path):
    path = tmp_path / "cache"
    with started(
        [sys.executable, "-c", HOLDER, str(path)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"in use by process {holder.pid};"):
            CacheDirectory(path)
        holder.kill()
    with locked_directory(path):
        pass


def test_the_same_process_is_refused_too(tmp_path):
    with (
        locked_directory(tmp_path / "cache"),
        pytest.raises(ConfigError, match=f"process {os.getpid()}"),
    ):
        CacheDirectory(tmp_path / "cache")


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
def test_a_directory_open_to_others_is_refused(tmp_path, mode):
    path = tmp_path / "cache"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}.*chmod 700"):
        CacheDirectory(path)
    assert list(path.iterdir()) == []


def test_a_foreign_directory_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        CacheDirectory(path)


def test_a_link_and_a_file_are_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(ConfigError, match="link or no directory"):
            CacheDirectory(tmp_path / name)


def test_a_lock_that_is_a_link_is_refused_and_its_target_left_alone(tmp_path):
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    target = tmp_path / "target"
    target.write_text("precious")
    (path / "lock").symlink_to(target)
    with pytest.raises(ConfigError, match="cannot write in"):
        CacheDirectory(path)
    assert target.read_text() == "precious"


def test_a_generation_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    with locked_directory(tmp_path / "cache") as directory:
        (directory.path / generation_name("model")).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match="link"):
            directory.make_generation("model")
        assert directory.generations() == [], "nor is it listed, or deleted"


def test_what_is_not_there_is_not_made_unless_asked(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        CacheDirectory(tmp_path / "cache", create=False)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("identity", ["../../evil", "a/b", "", "x" * 10_000, "nul\0", "ünï"])
def test_no_identity_leads_out_of_the_directory(tmp_path, identity):
    with locked_directory(tmp_path / "cache") as directory:
        path = directory.make_generation(identity)
        assert path.parent == directory.path
        (generation,) = directory.generations()
        assert generation.identity == identity
        assert generation.path == path


def test_identities_do_not_share_a_generation():
    assert len({generation_name(f"model {n}") for n in range(100)}) == 100


def test_an_identity_that_cannot_be_read_is_written_anew(tmp_path):
    with locked_directory(tmp_path / "cache") as directory:
        path = directory.make_generation("model")
        (path / "identity.json").write_text("[")
        assert directory.generations()[0].identity is None
        directory.make_generation("model")
        assert directory.generations()[0].identity == "model"
