"""The cluster key's file, and that the key stays in it."""

from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas.transport.cluster_key import MAX_KEY_BYTES, ClusterKey, read_cluster_key

SECRET = "a-secret-of-twenty-bytes"


def write(path: Path, text: str = SECRET, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_white_space_around_a_key_is_no_part_of_it(tmp_path):
    key = read_cluster_key(write(tmp_path / "key", f"  {SECRET}\n"))
    assert key.mac(b"x") == ClusterKey(SECRET.encode()).mac(b"x")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o777])
def test_a_key_that_others_may_touch_is_refused(tmp_path, mode):
    with pytest.raises(ConfigError, match=f"mode {mode:04o}"):
        read_cluster_key(write(tmp_path / "key", mode=mode))


@pytest.mark.parametrize("text", ["", "\n" * 40, "fifteen-bytes..", "x" * (MAX_KEY_BYTES + 1)])
def test_a_key_that_is_too_short_or_long_is_refused_without_showing_it(tmp_path, text):
    with pytest.raises(ConfigError, match=r"must have 16 to") as caught:
        read_cluster_key(write(tmp_path / "key", text))
    assert not text.strip() or text.strip() not in str(caught.value)


def test_a_key_that_is_no_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_cluster_key(tmp_path / "absent")
    with pytest.raises(ConfigError, match="cannot read"):
        read_cluster_key(tmp_path)
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="no regular file"):
        read_cluster_key(tmp_path / "zero")


def test_a_key_is_not_shown():
    key = ClusterKey(SECRET.encode())
    assert SECRET not in f"{key} {key!r} {[key]}"
    assert not hasattr(key, "__dict__")


def test_lists_of_parts_that_join_to_the_same_bytes_have_other_macs():
    key = ClusterKey(SECRET.encode())
    macs = {key.mac(b"ab", b"c"), key.mac(b"a", b"bc"), key.mac(b"abc"), key.mac(b"abc", b"")}
    assert len(macs) == 4
