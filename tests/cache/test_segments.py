"""Segment files give the bytes that were written, or say that they cannot."""

import os
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache import segments
from prfaas.cache.segments import record_checksum, segment_files, write_at

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def files(tmp_path):
    with segment_files(tmp_path) as found:
        yield found


def views(parts: Iterable[bytes]) -> list[memoryview]:
    return [memoryview(bytearray(part)) for part in parts]


@given(
    parts=st.lists(st.binary(max_size=50), max_size=12),
    offset=st.integers(0, 100),
    max_buffers=st.integers(1, 4),
    max_call_bytes=st.integers(1, 64),
)
def test_what_is_written_in_any_pieces_is_read_in_any_pieces(
    tmp_path_factory, parts, offset, max_buffers, max_call_bytes
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "_MAX_BUFFERS", max_buffers)
        patch.setattr(segments, "_MAX_CALL_BYTES", max_call_bytes)
        path = tmp_path_factory.mktemp("segments") / "file"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        try:
            write_at(descriptor, views(parts), offset)
            whole = b"".join(parts)
            assert path.read_bytes()[offset:] == whole
            read = views(bytes(len(part)) for part in reversed(parts))
            assert segments.read_at(descriptor, read, offset)
            assert b"".join(read) == whole
            if whole:
                assert not segments.read_at(descriptor, [*read, memoryview(bytearray(1))], offset)
        finally:
            os.close(descriptor)


@given(name=st.binary(max_size=4), parts=st.lists(st.binary(max_size=8), max_size=4))
def test_a_checksum_is_of_the_key_and_the_bytes_however_they_are_cut(name, parts):
    whole = b"".join(parts)
    checksum = record_checksum(name, views(parts))
    assert checksum == record_checksum(name, views([whole]))
    assert checksum != record_checksum(name + b"x", views([whole]))
    assert checksum != record_checksum(name, views([whole + b"x"]))


def test_a_segment_is_made_once(files):
    os.close(files.create(7))
    with pytest.raises(FileExistsError):
        files.create(7)
    assert files.sizes() == {7: 0}


def test_a_new_segment_is_for_this_user_alone(files, tmp_path):
    os.close(files.create(7))
    assert (tmp_path / "00000007.seg").stat().st_mode & 0o777 == 0o600


def test_only_plain_files_of_our_names_are_segments(files, tmp_path):
    os.close(files.create(1))
    (tmp_path / "1.seg").write_text("short")
    (tmp_path / "0000000x.seg").write_text("no number")
    (tmp_path / "00000002.seg").symlink_to(tmp_path / "1.seg")
    os.mkfifo(tmp_path / "00000003.seg")
    (tmp_path / "00000004.seg").mkdir()
    assert files.sizes() == {1: 0}


def test_a_foreign_file_is_neither_listed_nor_read(files, monkeypatch):
    os.close(files.create(1))
    foreign = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: foreign)
    assert files.sizes() == {}
    with pytest.raises(OSError, match="not a plain file"), files.opened(1):
        pass


def test_a_link_is_not_followed_for_reading_cutting_or_overwriting(files, tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "00000001.seg").symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"), files.opened(1):
        pass
    with pytest.raises(OSError, match="symbolic link"):
        files.truncate(1, 0)
    files.zeroes = True
    files.remove(1)
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_text() == "precious"


def test_removing_is_harmless_again(files):
    os.close(files.create(1))
    files.remove(1)
    files.zeroes = True
    files.remove(1)
    assert files.sizes() == {}


def test_cutting_and_using_leave_the_time_of_writing(files, tmp_path):
    path = tmp_path / "00000001.seg"
    path.write_bytes(bytes(100))
    path.chmod(0o600)
    os.utime(path, (1000, 2000))
    files.truncate(1, 10)
    assert (files.used_s(1), files.written_s(1)) == (2000, 2000)
    files.set_used_s(1, 3000)
    assert (files.used_s(1), files.written_s(1)) == (3000, 2000)
