"""How long a sequence may get, and where its snapshots may lie; torch-free."""

from typing import TYPE_CHECKING

from prfaas.engine.batcher import Batcher
from prfaas.engine.options import EngineOptions
from prfaas.errors import ConfigError
from prfaas.log import get_logger

if TYPE_CHECKING:
    from prfaas.engine.model import Model


def max_context_tokens(model: "Model", batcher: Batcher, options: EngineOptions) -> int:
    """Return what model, options and memory allow of prompt plus completion.

    Raises:
        ConfigError: less than 2.
    """
    limit = model.config.max_context_tokens
    limit = min(options.max_context_tokens or limit, limit)
    # The last token is drawn only: its KV is never needed.
    most = batcher.max_kv_tokens(limit - 1) + 1
    if most < 2:
        raise ConfigError(
            f"engine.kv_ram_bytes = {options.kv_ram_bytes} does not hold the KV of one token: "
            f"{model.kv_capacity_bytes(1)} bytes"
        )
    if most < limit:
        get_logger().warning(
            "context.limited",
            max_context_tokens=most,
            wanted_tokens=limit,
            kv_ram_bytes=options.kv_ram_bytes,
        )
    return most


def check_snapshot_tokens(snapshot_tokens: int, block_tokens: int) -> None:
    """Raise ConfigError for snapshots off the grid of blocks."""
    if snapshot_tokens < 0 or snapshot_tokens % block_tokens:
        raise ConfigError(
            f"cache.snapshot_tokens = {snapshot_tokens} is not a multiple of the block: "
            f"{block_tokens} tokens"
        )
