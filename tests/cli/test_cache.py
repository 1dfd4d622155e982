"""`prfaas cache` shows, checks and clears what a stopped node left on disk."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prfaas.cli.main import main
from tests.cache.stores import IDENTITY, fill, generation_of, opened, segments_of, whole


@pytest.fixture
def directory(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    monkeypatch.setenv("PRFAAS_CACHE_DIR", str(path))
    return path


@pytest.fixture
def filled(directory):
    """A cache of six records of two tenants."""
    with opened(directory) as store:
        fill(store, range(4), tenant=b"\xaa" * 16)
        fill(store, range(4, 6), tenant=b"\xbb")
    return directory


def cache(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["cache", *arguments])


def flip_first_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("command", ["stats", "ls", "verify", "clear"])
def test_a_directory_that_is_not_there_is_said_so_and_not_made(directory, command):
    result = cache(command)
    assert result.exit_code == 2
    assert str(directory) in result.stderr
    assert not directory.exists()


@pytest.mark.parametrize("command", ["stats", "ls", "verify", "clear"])
def test_without_a_directory_it_says_how_to_name_one_and_looks_nowhere(
    tmp_path, monkeypatch, command
):
    with opened(tmp_path / "prfaas") as store:
        fill(store, range(3))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PRFAAS_CACHE_DIR", raising=False)
    result = cache(command)
    assert result.exit_code == 2
    assert "--cache-dir" in result.stderr
    assert "PRFAAS_CACHE_DIR" in result.stderr
    assert segments_of(tmp_path / "prfaas")


@pytest.mark.parametrize("command", ["stats", "ls", "verify", "clear"])
def test_a_directory_in_use_is_left_alone_and_its_user_named(filled, command):
    with opened(filled) as store:
        result = cache(command)
        assert result.exit_code == 2
        assert f"process {os.getpid()}" in result.stderr
        assert whole(store, range(6)) == list(range(6))


def test_stats_tell_records_bytes_and_tenants(filled):
    facts = json.loads(cache("stats", "--json").stdout)
    (generation,) = facts["generations"]
    assert facts["directory"] == str(filled)
    assert generation["identity"] == IDENTITY
    assert generation["num_records"] == 6
    assert generation["live_bytes"] == 60_000
    assert generation["tenant_bytes"] == {"aa" * 16: 40_000, "bb": 20_000}
    shown = cache("stats").stdout
    assert "records      6 of 0.1 MiB" in shown
    assert IDENTITY in shown


def test_an_empty_directory_holds_nothing(directory):
    directory.mkdir(mode=0o700)
    assert "nothing is stored" in cache("stats").stdout
    assert cache("verify").exit_code == 0


def test_ls_lists_every_record_or_as_many_as_asked(filled):
    listed = json.loads(cache("ls", "--json").stdout)
    assert listed["num_records"] == len(listed["records"]) == 6
    assert {row["length_bytes"] for row in listed["records"]} == {10_000}
    assert [int(row["key"], 16) for row in listed["records"]] == list(range(6))
    result = cache("ls", "--limit", "2")
    assert len(result.stdout.splitlines()) == 2
    assert "6 records, 4 not shown" in result.stderr


def test_verify_passes_what_is_whole(filled):
    result = cache("verify")
    assert result.exit_code == 0
    assert "6 records of 0.1 MiB: 0 damaged" in result.stdout


def test_verify_removes_what_is_damaged_and_fails(filled):
    flip_first_byte(segments_of(filled)[0])
    result = cache("verify", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["num_damaged"] == 1
    assert cache("verify").exit_code == 0, "it is gone"
    with opened(filled) as store:
        assert whole(store, range(6)) == [1, 2, 3, 4, 5]


def test_a_generation_that_cannot_be_read_is_named_and_cleared(filled):
    (generation_of(filled) / "index.mdb").write_bytes(b"noise" * 4000)
    assert cache("stats").exit_code == 0
    result = cache("verify")
    assert result.exit_code == 1
    assert "cannot be read" in result.stdout
    assert "unreadable" in cache("stats").stdout
    assert cache("clear").exit_code == 0
    assert [path.name for path in filled.iterdir()] == ["lock"]


@pytest.mark.parametrize("arguments", [[], ["--zero"]])
def test_clear_deletes_everything_of_ours_and_nothing_else(filled, arguments):
    (filled / "notes.txt").write_text("mine")
    result = cache("clear", *arguments, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["num_generations"] == 1
    assert sorted(path.name for path in filled.iterdir()) == ["lock", "notes.txt"]


def test_zero_overwrites_before_it_deletes(filled):
    (segment, other) = segments_of(filled)
    kept = filled.parent / "kept"
    kept.hardlink_to(segment)
    assert cache("clear", "--zero").exit_code == 0
    assert not any(kept.read_bytes())
    assert kept.stat().st_size == 40_000
    assert not other.exists()


def test_looking_changes_neither_age_nor_order(filled):
    before = {path.name: path.stat().st_mtime for path in segments_of(filled)}
    for command in ("stats", "ls", "verify"):
        assert cache(command).exit_code == 0
    assert {path.name: path.stat().st_mtime for path in segments_of(filled)} == before
