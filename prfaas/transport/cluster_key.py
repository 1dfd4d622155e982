"""The secret that the nodes of one cluster share. It signs; it is never sent, shown or logged."""

import hashlib
import hmac
import os
import stat
from pathlib import Path

from prfaas.errors import ConfigError

MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 4096


class ClusterKey:
    """Makes MACs with a secret that nothing else can read out of it by accident."""

    __slots__ = ("_empty",)

    def __init__(self, secret: bytes) -> None:
        self._empty = hmac.new(secret, digestmod=hashlib.sha256)

    def __repr__(self) -> str:
        return "ClusterKey(********)"

    def mac(self, *parts: bytes) -> bytes:
        """Return HMAC-SHA256 over `parts`, each with its length, so that no two lists are alike."""
        digest = self.hasher()
        for part in parts:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()

    def hasher(self) -> hmac.HMAC:
        """Return HMAC-SHA256 that has taken in nothing."""
        return self._empty.copy()  # twice as fast as a new one

    def derive(self, *parts: bytes) -> "ClusterKey":
        """Return a key for one purpose, from which this one cannot be found."""
        return ClusterKey(self.mac(*parts))


def read_cluster_key(path: Path) -> ClusterKey:
    """Return the key in a file that only its owner can read; white space around it is no part of it.

    Raises:
        ConfigError: the file cannot be read, others than its owner may, or the key is too short.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"cluster key {path} is no regular file")
            if stat.S_IMODE(status.st_mode) & 0o077:
                raise ConfigError(
                    f"cluster key {path} has mode {stat.S_IMODE(status.st_mode):04o}: others than "
                    "its owner can read it; chmod 600 it"
                )
            if status.st_uid not in (0, os.geteuid()):
                raise ConfigError(f"cluster key {path} belongs to user {status.st_uid}, not to us")
            secret = file.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"cannot read cluster key {path}: {error.strerror}") from error
    if not MIN_KEY_BYTES <= len(secret) <= MAX_KEY_BYTES:
        raise ConfigError(
            f"cluster key {path} has {len(secret)} bytes, must have {MIN_KEY_BYTES} to "
            f"{MAX_KEY_BYTES}; `openssl rand -hex 32` makes one"
        )
    return ClusterKey(secret)
