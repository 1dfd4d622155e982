"""Keys of blocks: equal keys mean equal bytes of KV and states.

Each key is the SHA-256 of the key before it and the block's token ids, so a key names the whole
prefix up to its block. The first link is a root that names everything else the bytes depend on.
"""

import json
import sys
from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256

from prfaas.cache.spec import CacheLayout, GroupSpec, StateSpec, WindowSpec

_DOMAIN = b"prfaas block key 1"


def root_key(
    *,
    model_fingerprint: str,
    numerics_fingerprint: str,
    kv_dtype: str,
    layout: CacheLayout,
    salt: bytes,
) -> bytes:
    """Return the 32 bytes that every chain of this model, numerics, layout and tenant starts from."""
    layout_json = json.dumps(
        {
            "version": layout.layout_version,
            "block_tokens": layout.block_tokens,
            "groups": [_group_json(spec) for spec in layout.groups],
        },
        sort_keys=True,
    )
    digest = sha256(_DOMAIN)
    for text in (model_fingerprint, numerics_fingerprint, kv_dtype, layout_json):
        _update_with_length(digest.update, text.encode())
    _update_with_length(digest.update, salt)
    return digest.digest()


def _group_json(spec: GroupSpec) -> dict[str, object]:
    group: dict[str, object] = {
        "layers": spec.layers,
        "page_bytes": spec.page_bytes,
        "window_tokens": spec.window_tokens if isinstance(spec, WindowSpec) else None,
    }
    if isinstance(spec, StateSpec):
        group["state_bytes"] = spec.state_bytes
    return group


def block_keys(root: bytes, tokens: Sequence[int], block_tokens: int) -> tuple[bytes, ...]:
    """Return one 32-byte key for each whole block of `tokens`; a cut last block has none.

    `root` may be an earlier block's key: the chain goes on from there. Raises OverflowError for an
    id outside 0..2**32-1.
    """
    num_blocks = len(tokens) // block_tokens
    ids = array("I", tokens[: num_blocks * block_tokens])
    assert ids.itemsize == 4, "token ids are hashed as 32-bit words"
    if sys.byteorder == "big":
        ids.byteswap()
    block_bytes = 4 * block_tokens
    data = ids.tobytes()
    keys = []
    key = root
    for start in range(0, num_blocks * block_bytes, block_bytes):
        key = sha256(key + data[start : start + block_bytes]).digest()
        keys.append(key)
    return tuple(keys)


def _update_with_length(update: Callable[[bytes], None], data: bytes) -> None:
    """Feed `data` behind its length, so that no two lists of fields feed the same bytes."""
    update(len(data).to_bytes(8, "little"))
    update(data)
