"""The directory that holds models, and how an entry comes into it: whole or not at all."""

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.models.progress import Progress

ENVIRONMENT_VARIABLE = "PRFAAS_MODELS_DIR"
MAX_NAME_CHARACTERS = 128

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_POLL_S = 0.1


def models_dir() -> Path:
    """Return the directory of models: $PRFAAS_MODELS_DIR, else `prfaas/models` in the user's data dir."""
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME")
    base = Path(data) if data and Path(data).is_absolute() else Path.home() / ".local" / "share"
    return base / "prfaas" / "models"


def entry_name(name: str) -> str:
    """Return the directory name of a model's name; `owner/repo` becomes `owner--repo`.

    Raises:
        ConfigError: the name is no model's name, so that no path outside the directory can come of it.
    """
    parts = name.split("/")
    if len(name) > MAX_NAME_CHARACTERS:
        raise ConfigError(
            f"a model name of {len(name)} characters is over the limit of {MAX_NAME_CHARACTERS}"
        )
    if len(parts) > 2 or not all(_NAME.fullmatch(part) and ".." not in part for part in parts):
        raise ConfigError(
            f"{name!r} is not a model name: letters, digits, '.', '_' and '-', "
            "with one '/' in a Hugging Face repo"
        )
    return "--".join(parts)


def prepare_root() -> Path:
    """Return the models directory, made with mode 0700 if absent.

    Raises:
        ConfigError: it cannot be made, anyone can write to it, or it belongs to another user.
    """
    root = models_dir()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.stat()
    except OSError as error:
        raise ConfigError(f"cannot make the models directory {root}: {error}") from error
    if found.st_mode & stat.S_IWOTH:
        raise ConfigError(f"anyone can write to the models directory {root}: chmod 700 it")
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"the models directory {root} belongs to user {found.st_uid}")
    return root


def publish(
    entry: str,
    build: Callable[[Path], None],
    *,
    is_ready: Callable[[Path], bool],
    progress: Progress,
) -> Path:
    """Return the directory of `entry`, built first unless it is ready.

    `build` fills an empty directory, which takes its place by one rename when complete: no one sees it
    half-done, whatever interrupts. Of several processes one builds and the others wait for it.

    Raises:
        ConfigError: the disk refuses; and what `build` raises.
    """
    target = models_dir() / entry
    if is_ready(target):
        return target
    root = prepare_root()
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    label = entry.replace("/", "-")
    with _locked(root / ".locks" / f"{label}.lock", progress):
        if is_ready(target):
            return target
        for stale in root.glob(f".partial-{label}~*"):
            shutil.rmtree(stale, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f".partial-{label}~", dir=root))
        try:
            built = partial / "built"
            built.mkdir()
            build(built)
            _replace(built, target, partial / "replaced")
        except OSError as error:
            raise ConfigError(f"cannot write the model to {root}: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _replace(built: Path, target: Path, aside: Path) -> None:
    """Move a built directory into place; the one that was there goes to `aside`."""
    for path in (*built.iterdir(), built):
        if not path.is_symlink():
            _sync(path)
    if target.is_symlink() or target.is_file():
        raise ConfigError(f"{target} is in the way; it should be a directory")
    if target.exists():
        target.rename(aside)
    built.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock, which the system frees if this process dies."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with path.open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("Waiting for another process", 0, 0)
                time.sleep(_POLL_S)
        yield
