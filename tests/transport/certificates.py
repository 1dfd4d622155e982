"""Makes certificates with the openssl program."""

import subprocess
from pathlib import Path


class Certificates:
    """An authority in a directory, and what it signs."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._name = name
        self.authority = str(directory / f"{name}.pem")
        self._run(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", self._path(f"{name}.key"), "-out", self.authority),
            *("-days", "2", "-subj", f"/CN={name}"),
        )

    def issue(self, name: str, subject: str = "IP:127.0.0.1") -> tuple[str, str]:
        """Return the files of a certificate for `subject` and of its key."""
        cert, key, asked = (self._path(f"{name}.{end}") for end in ("pem", "key", "csr"))
        self._run(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", key, "-out", asked, "-subj", f"/CN={name}"),
        )
        extensions = self._directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName={subject}\n")
        self._run(
            *("x509", "-req", "-in", asked, "-CA", self.authority, "-days", "2", "-out", cert),
            *("-CAkey", self._path(f"{self._name}.key"), "-CAcreateserial"),
            *("-extfile", str(extensions)),
        )
        return cert, key

    def _path(self, name: str) -> str:
        return str(self._directory / name)

    def _run(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)
