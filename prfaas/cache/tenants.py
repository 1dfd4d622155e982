"""Who may share which blocks: the salt at the root of a request's keys.

A salt begins with the tenant's name, which follows from its API key alone, so that what a tenant keeps
can be bounded whatever salts its clients choose. A client's own salt only narrows: it is hashed in
behind the tenant's.
"""

import hashlib

TENANT_BYTES = 16
"""Of a tenant's name, the head of its salts."""

_DOMAIN = b"prfaas tenant 1\0"


def salt_of(api_key: bytes | None, client_salt: bytes) -> bytes:
    """Return the salt of a client's request; without a key and a salt of its own it is empty.

    The key cannot be found from it, other than by trying keys.
    """
    if api_key is None and not client_salt:
        return b""
    tenant = hashlib.sha256(_DOMAIN + (b"" if api_key is None else b"key\0" + api_key)).digest()
    return narrowed(tenant, client_salt) if client_salt else tenant


def narrowed(salt: bytes, name: bytes) -> bytes:
    """Return a salt of the same tenant that no other name and no other salt has."""
    digest = hashlib.sha256(_DOMAIN + len(salt).to_bytes(8, "little") + salt + name).digest()
    return tenant_of(salt) + digest


def tenant_of(salt: bytes) -> bytes:
    """Return the name of the tenant whose salt it is; the empty salt is nobody's."""
    return salt[:TENANT_BYTES]
