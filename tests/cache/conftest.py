"""What tests of the disk tier share."""

from pathlib import Path

import pytest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A place for a cache; nothing is there yet."""
    return tmp_path / "cache"
