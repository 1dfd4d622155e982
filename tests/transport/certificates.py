"""Makes certificates."""

from pathlib import Path

import trustme


class Certificates:
    """An authority in a directory, and what it signs."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._authority = trustme.CA(organization_name=name)
        self.authority = str(directory / f"{name}.pem")
        self._authority.cert_pem.write_to_path(self.authority)

    def issue(self, name: str, subject: str = "127.0.0.1") -> tuple[str, str]:
        """Return the files of a certificate for `subject`, an address or a name, and of its key."""
        issued = self._authority.issue_cert(subject, common_name=name)
        cert, key = (str(self._directory / f"{name}.{end}") for end in ("pem", "key"))
        issued.cert_chain_pems[0].write_to_path(cert)
        issued.private_key_pem.write_to_path(key)
        return cert, key
