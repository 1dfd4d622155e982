"""The API keys of a node: one operator's, and one for each tenant."""

import hmac
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from prfaas.config.options import HttpOptions
from prfaas.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 1 << 12
"""A key is compared with all: this keeps it to some milliseconds."""


@dataclass(frozen=True, slots=True, repr=False)
class ApiKeys:
    """The keys that open a node. Its text never shows them."""

    operator: bytes | None
    """Opens everything."""
    tenants: tuple[bytes, ...] = ()
    """Each opens the API, and is a tenant of the prefix cache."""

    def match(self, shown: bytes) -> bytes | None:
        """Return the key that `shown` is, or None; takes as long whichever it is."""
        found = None
        for key in (*self.tenants, *(() if self.operator is None else (self.operator,))):
            if hmac.compare_digest(shown, key):
                found = key
        return found

    def is_operator(self, key: bytes) -> bool:
        """Return whether a key that matched is the operator's."""
        return self.operator is not None and hmac.compare_digest(key, self.operator)


def api_keys(options: HttpOptions) -> ApiKeys | None:
    """Return the keys that the options and the key file name; None if everyone may come in.

    Raises:
        ConfigError: the file cannot be read, is open to others, or is not one key a line.
    """
    operator = None if options.api_key is None else options.api_key.encode()
    if options.api_key_file is None:
        return None if operator is None else ApiKeys(operator)
    return ApiKeys(operator, _read_keys(Path(options.api_key_file).expanduser()))


def _read_keys(path: Path) -> tuple[bytes, ...]:
    lines = _read_private(path).split(b"\n")
    keys = [line.strip() for line in lines if line.strip()]
    for number, line in enumerate(lines, start=1):
        text = line.strip().decode(errors="replace")
        if not text.isprintable() or any(char.isspace() or char == "\ufffd" for char in text):
            raise ConfigError(f"{path}, line {number}: a key is printable text without spaces")
    if not keys or len(keys) > MAX_KEYS:
        raise ConfigError(f"{path} has {len(keys)} keys; 1 to {MAX_KEYS}, one a line, are taken")
    if len(set(keys)) < len(keys):
        raise ConfigError(f"{path} has a key twice")
    return tuple(keys)


def _read_private(path: Path) -> bytes:
    """Return the file's bytes, if it is ours and nobody else can read or write it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from error
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise ConfigError(f"the key file {path} is no file")
        if info.st_uid not in (os.geteuid(), 0):
            raise ConfigError(f"the key file {path} belongs to another user, {info.st_uid}")
        if info.st_mode & 0o077:
            mode = stat.S_IMODE(info.st_mode)
            raise ConfigError(
                f"the key file {path} has mode {mode:04o}, so that others can use it: chmod 600 it"
            )
        data = os.pread(descriptor, MAX_FILE_BYTES + 1, 0)
    finally:
        os.close(descriptor)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"the key file {path} is larger than {MAX_FILE_BYTES:,} bytes")
    return data
