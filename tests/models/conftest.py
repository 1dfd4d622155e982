from pathlib import Path

import pytest

from prfaas.models.directory import ENVIRONMENT_VARIABLE


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty models directory of this test's own."""
    path = tmp_path / "models"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(path))
    return path
