"""What two nodes must share before KV moves between them, compared before any work."""

from dataclasses import dataclass, fields

from prfaas.errors import IncompatiblePeer, ProtocolError

PROTOCOL_VERSION = 6
MAX_VALUE_CHARS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A node as its peers see it: equal identities make equal KV bytes from equal tokens.

    Unless their numerics say that rows depend on the batch: then the bytes are alike, not equal.
    """

    model_fingerprint: str
    """sha256 over the weight bytes."""
    tokenizer_fingerprint: str
    template_fingerprint: str
    kv_dtype: str
    block_tokens: int
    layout: str
    """Layer groups and page layout, in a canonical spelling."""
    numerics_fingerprint: str
    """Everything that changes bits but not meaning: ISA, libraries, packing, kernels."""
    protocol_version: int = PROTOCOL_VERSION

    def to_json(self) -> dict[str, str | int]:
        """Return the identity as a JSON object."""
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(field.name for field in fields(Identity))


def parse_identity(value: object) -> Identity:
    """Return the identity that a peer sent as JSON, or raise ProtocolError naming the field."""
    if not isinstance(value, dict):
        raise ProtocolError("identity is not a JSON object")
    parsed: dict[str, str | int] = {}
    for field in fields(Identity):
        kind = int if field.type in ("int", int) else str
        item = value.get(field.name)
        if type(item) is not kind:
            raise ProtocolError(f"identity field {field.name} is missing or not of type {kind}")
        if isinstance(item, str) and len(item) > MAX_VALUE_CHARS:
            raise ProtocolError(f"identity field {field.name} has {len(item)} characters")
        parsed[field.name] = item
    return Identity(**parsed)  # type: ignore[arg-type]  # checked above, field by field


def check_compatible(ours: Identity, theirs: Identity, *, accept_approximate: bool) -> bool:
    """Return whether KV of `theirs` is as if computed by `ours`; False is "approximate".

    Raises IncompatiblePeer with both values of every field that differs. Numerics may differ only
    with `accept_approximate`.
    """
    if ours == theirs:
        return True
    names = [name for name in _NAMES if name != "protocol_version"]
    differing = [name for name in names if getattr(ours, name) != getattr(theirs, name)]
    if ours.protocol_version != theirs.protocol_version:
        differing.insert(0, "protocol_version")
    if differing == ["numerics_fingerprint"] and accept_approximate:
        return False
    if differing:
        raise IncompatiblePeer(
            "; ".join(
                f"{name} differs: {getattr(ours, name)!r} here, {getattr(theirs, name)!r} there"
                for name in differing
            )
        )
    return True
