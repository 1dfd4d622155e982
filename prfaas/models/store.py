"""From what an operator writes for a model to a directory that can be loaded."""

import hashlib
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.models.catalog import CATALOG
from prfaas.models.checkpoint import checkpoint_files, identify_checkpoint
from prfaas.models.convert import convert_gguf
from prfaas.models.directory import entry_name, models_dir, publish
from prfaas.models.manifest import read_manifest
from prfaas.models.progress import Progress, silent

SOURCE_NAME = "source.gguf"
"""The file a fetched model was converted from, kept so that a later format needs no download."""

_MAX_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledModel:
    """A fetched model."""

    name: str
    path: Path
    num_bytes: int
    source: Mapping[str, object]


def resolve(name_or_path: str, progress: Progress = silent) -> Path:
    """Return a directory that can be loaded.

    It holds config.json, *.safetensors, tokenizer.json and prfaas.json, and with most models
    tokenizer_config.json, generation_config.json and chat_template.jinja.

    A fetched model's name comes first, then a GGUF file (converted once, under the models directory), then
    a Hugging Face directory (left alone: what is returned links to its files and adds prfaas.json).

    Raises:
        ConfigError: there is no such model, or it cannot be used; the message says what to do.
    """
    shown = repr(name_or_path[:_MAX_SHOWN_CHARACTERS])
    if not name_or_path or "\0" in name_or_path:
        raise ConfigError(f"{shown} is not the name of a model, nor a path")
    path = Path(name_or_path).expanduser()
    try:
        if (fetched := _fetched(name_or_path, progress)) is not None:
            return fetched
        if path.is_file():
            return _converted(path.resolve(), progress)
        if path.is_dir():
            return _linked(path.resolve(), progress)
    except OSError as error:
        raise ConfigError(f"cannot use {shown} as a model: {error.strerror}") from error
    if name_or_path in CATALOG:
        raise ConfigError(
            f"the model {shown} is not here yet: run `prfaas model fetch {name_or_path}`"
        )
    known = sorted({model.name for model in installed()} | set(CATALOG))
    raise ConfigError(
        f"{shown} is neither a fetched model nor a GGUF file nor a Hugging Face directory; "
        f"known names: {', '.join(known)}; `prfaas model fetch OWNER/REPO` gets another"
    )


def installed() -> list[InstalledModel]:
    """Return the fetched models, by name."""
    found = []
    for path in sorted(models_dir().glob("[!.]*")):
        manifest = read_manifest(path)
        if manifest is not None:
            found.append(
                InstalledModel(
                    name=path.name.replace("--", "/"),
                    path=path,
                    num_bytes=sum(file.stat().st_size for file in path.iterdir()),
                    source=manifest.source,
                )
            )
    return found


def remove(name: str) -> None:
    """Delete a fetched model.

    Raises:
        ConfigError: there is none of this name.
    """
    path = models_dir() / entry_name(name)
    if not path.is_dir() or path.is_symlink():
        raise ConfigError(f"there is no fetched model {name!r}")
    shutil.rmtree(path)


def is_ready(directory: Path) -> bool:
    """Whether a directory is complete and of this format: prfaas.json is written last."""
    return read_manifest(directory) is not None


def rebuild(entry: str, directory: Path, progress: Progress) -> None:
    """Fill `directory` from the GGUF file that a fetched model keeps."""
    kept = models_dir() / entry / SOURCE_NAME
    source = directory / SOURCE_NAME
    source.hardlink_to(kept)
    convert_gguf(source, directory, progress)


def _fetched(name: str, progress: Progress) -> Path | None:
    try:
        entry = entry_name(name)
    except ConfigError:
        return None
    target = models_dir() / entry
    if is_ready(target):
        return target
    if not (target / SOURCE_NAME).is_file():
        return None
    return publish(
        entry,
        lambda directory: rebuild(entry, directory, progress),
        is_ready=is_ready,
        progress=progress,
    )


def _converted(path: Path, progress: Progress) -> Path:
    found = path.stat()
    source: dict[str, object] = {
        "kind": "gguf",
        "path": str(path),
        "num_bytes": found.st_size,
        "mtime_ns": found.st_mtime_ns,
    }

    def build(directory: Path) -> None:
        convert_gguf(path, directory, progress, source=source)

    return publish(
        f".converted/{_entry_of(path)}",
        build,
        is_ready=lambda target: _comes_from(target, source),
        progress=progress,
    )


def _linked(path: Path, progress: Progress) -> Path:
    if path.parent == models_dir() and is_ready(path):
        return path
    files = checkpoint_files(path)
    stats = {file.name: file.stat() for file in files}
    source: dict[str, object] = {
        "kind": "directory",
        "path": str(path),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
    }

    def build(directory: Path) -> None:
        for file in files:
            (directory / file.name).symlink_to(file)
        identify_checkpoint(directory, source, progress)

    return publish(
        f".linked/{_entry_of(path)}",
        build,
        is_ready=lambda target: _comes_from(target, source),
        progress=progress,
    )


def _comes_from(directory: Path, source: Mapping[str, object]) -> bool:
    manifest = read_manifest(directory)
    return manifest is not None and manifest.source == source


def _entry_of(path: Path) -> str:
    """Return a readable name for a path that no other path shares."""
    digest = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', path.stem)[:64]}-{digest[:16]}"
