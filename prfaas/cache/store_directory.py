"""The cache directory: whose it is, who uses it, and what lies in it.

lock                         held by the process that uses the directory; has its pid
v1-<digest>/                 one generation: the records of one model, numerics and layout
damaged-<time>-v1-<digest>/  a generation that could not be read, kept for whoever wonders why
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EEXIST, ELOOP, ENOTDIR
from pathlib import Path

from prfaas.cache.segments import segment_files
from prfaas.errors import ConfigError

FORMAT = 1
"""Changes whenever an older program would misread what this one writes."""
INDEX_NAME = "index.mdb"
ZEROING_NAME = "zeroing"
"""While this file is in a generation, what it gives back to the file system is overwritten."""

_IDENTITY_NAME = "identity.json"
_GENERATION = re.compile(r"(?:damaged-[0-9T.Z-]+-)?v\d+-[0-9a-f]{32}", re.ASCII)
_DAMAGED = "damaged-"
_LOCK_NAME = "lock"
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What the directory holds of one model, numerics and layout."""

    path: Path
    identity: str | None
    """None if it cannot be read, as that of a damaged one."""
    num_bytes: int
    used_s: float
    """When a segment of it was last used, since the epoch; 0 if it has none."""

    @property
    def is_damaged(self) -> bool:
        """Whether it was moved aside."""
        return self.path.name.startswith(_DAMAGED)


@contextmanager
def locked_directory(path: Path, *, create: bool = True) -> Iterator["CacheDirectory"]:
    """Yield the directory, held until the block ends."""
    directory = CacheDirectory(path, create=create)
    try:
        yield directory
    finally:
        directory.close()


class CacheDirectory:
    """A cache directory that this process alone uses, until it is closed or the process ends.

    Raises:
        ConfigError: it is in use, is a link, belongs to someone else, is open to others, cannot be
            written, or (without `create`) is not there.
    """

    def __init__(self, path: Path, *, create: bool = True, zeroes: bool = False) -> None:
        self.path = path.absolute()
        self._zeroes = zeroes
        """Whether every generation is overwritten before it is deleted."""
        try:
            if create:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self.path, _DIR_FLAGS)
        except OSError as error:
            raise ConfigError(f"the cache directory {path} {_reason(error)}") from error
        try:
            _check_owner(self.path, os.fstat(self._fd))
            self._lock_fd = self._lock()
        except BaseException:
            os.close(self._fd)
            raise

    def _lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            lock_fd = os.open(_LOCK_NAME, flags, 0o600, dir_fd=self._fd)
        except OSError as error:
            raise ConfigError(
                f"cannot write in the cache directory {self.path}: {error.strerror}"
            ) from error
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock_fd, 0)
            os.pwrite(lock_fd, b"%d\n" % os.getpid(), 0)
        except BlockingIOError as error:
            holder = os.pread(lock_fd, 32, 0).decode(errors="replace").strip()
            os.close(lock_fd)
            raise ConfigError(
                f"the cache directory {self.path} is in use by process {holder or 'unknown'}; "
                "one node at a time can use it: stop that one, or name another directory"
            ) from error
        except OSError as error:
            os.close(lock_fd)
            raise ConfigError(
                f"cannot lock the cache directory {self.path}: {error.strerror}"
            ) from error
        return lock_fd

    def generations(self) -> list[Generation]:
        """Return what lies here, the longest unused first."""
        found = [
            _describe(entry)
            for entry in self.path.iterdir()
            if _GENERATION.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink()
        ]
        return sorted(found, key=lambda generation: (generation.used_s, generation.path.name))

    def make_generation(self, identity: str) -> Path:
        """Return the directory of an identity, made if absent; ConfigError if it is not ours."""
        path = self.path / generation_name(identity)
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(path, _DIR_FLAGS)
            try:
                _check_owner(path, os.fstat(fd))
            finally:
                os.close(fd)
            described = path / _IDENTITY_NAME
            if _read_identity(path) != identity:
                described.unlink(missing_ok=True)
                described.write_text(json.dumps({"format": FORMAT, "identity": identity}))
        except OSError as error:
            raise ConfigError(f"the cache directory {path} {_reason(error)}") from error
        return path

    def set_aside(self, path: Path, now_s: float) -> Path:
        """Rename a generation that cannot be read; return where it is now.

        Only the last one is kept. Raises OSError.
        """
        for earlier in self.generations():
            if earlier.is_damaged and earlier.path.name.endswith(path.name):
                self.remove(earlier)
        aside = path.with_name(f"{_DAMAGED}{now_s:.3f}-{path.name}")
        path.rename(aside)
        os.utime(aside, (now_s, now_s))
        return aside

    def remove(self, generation: Generation, *, zero: bool = False) -> None:
        """Delete a generation, its bytes overwritten first on request; raises OSError.

        A request that was interrupted is one for whoever deletes the generation later.
        """
        path = generation.path
        marker = path / ZEROING_NAME
        if zero or self._zeroes:
            marker.touch(mode=0o600)
        if marker.exists():
            with segment_files(path, zeroes=True) as files:
                for number in files.sizes():
                    files.remove(number)
        shutil.rmtree(path)

    def close(self) -> None:
        """Let others use the directory."""
        os.close(self._lock_fd)
        os.close(self._fd)


def generation_name(identity: str) -> str:
    """Return the name of an identity's directory, which says nothing else and never varies."""
    return f"v{FORMAT}-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"


def _describe(path: Path) -> Generation:
    with segment_files(path) as files:
        used_s = max((files.used_s(number) for number in files.sizes()), default=0.0)
    return Generation(
        path=path,
        identity=_read_identity(path),
        num_bytes=sum(file.lstat().st_size for file in path.iterdir()),
        used_s=used_s,
    )


def _read_identity(path: Path) -> str | None:
    try:
        fields = json.loads((path / _IDENTITY_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    identity = fields.get("identity") if isinstance(fields, dict) else None
    return identity if isinstance(identity, str) else None


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"the cache directory {path} belongs to user {status.st_uid}, not to {os.geteuid()}"
        )
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"the cache directory {path} is open to other users (mode"
            f" {stat.S_IMODE(status.st_mode):04o}): it holds what was said; chmod 700 it"
        )


def _reason(error: OSError) -> str:
    if error.errno in {ELOOP, ENOTDIR, EEXIST}:
        return "is a link or no directory: name the directory itself"
    return f"cannot be used: {error.strerror}"
