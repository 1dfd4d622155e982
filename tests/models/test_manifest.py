import json
from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas.models.manifest import FILE_NAME, Manifest, read_manifest, write_manifest


def test_what_is_written_is_read(tmp_path: Path) -> None:
    manifest = Manifest(model_fingerprint="ab" * 32, source={"kind": "hub", "repo": "a/b"})
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest


def test_no_manifest_and_one_of_another_format_are_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    assert read_manifest(tmp_path / "absent") is None
    write_manifest(tmp_path, Manifest(model_fingerprint="a", source={}))
    fields = json.loads((tmp_path / FILE_NAME).read_text())
    (tmp_path / FILE_NAME).write_text(json.dumps(fields | {"format_version": 0}))
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format_version": 1}', "\x00"])
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(ConfigError, match=r"prfaas\.json is damaged"):
        read_manifest(tmp_path)
