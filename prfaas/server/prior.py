"""What a node's profile lets it predict before it has observed anything."""

from pathlib import Path

from prfaas.cache.spec import CacheLayout
from prfaas.config.kv_layout import layout_kv_bytes
from prfaas.config.options import NodeConfig
from prfaas.config.profiles import read_profile
from prfaas.engine.rate import MEMORY_TOKENS
from prfaas.errors import ConfigError
from prfaas.scheduler.curves import PolynomialCurve
from prfaas.scheduler.profile import Prior


def read_prior(config: NodeConfig, layout: CacheLayout) -> Prior | None:
    """Return what `engine.profile` says of a node with this layout; None if it is not set.

    Raises:
        ConfigError: the file cannot be read, or is the profile of a model with other KV.
    """
    if config.engine.profile is None:
        return None
    path = Path(config.engine.profile).expanduser()
    profile = read_profile(path)
    if config.engine.kind != "replay":
        expected, own = profile.kv_bytes(MEMORY_TOKENS), layout_kv_bytes(layout, MEMORY_TOKENS)
        if round(expected) != own:
            raise ConfigError(
                f"{path}: profile {profile.name} keeps {expected:,.0f} bytes for {MEMORY_TOKENS} tokens, "
                f"this model {own:,}: it is of another model or dtype"
            )
    return Prior(
        prefill_s=profile.prefill_s,
        speed=config.replay.speed,
        link=profile.link,
        decode=profile.decode,
    )


def expected_tokens_per_s(prior: Prior | None) -> float:
    """Return the rate that a node tells its peers before its first prefill; 0 is unknown.

    It is that of the longest prompt whose time is known, up to those that the moving average reaches back.
    """
    if prior is None:
        return 0.0
    curve = prior.prefill_s
    longest = MEMORY_TOKENS if isinstance(curve, PolynomialCurve) else int(curve.tokens[-1])
    return prior.prefill_tokens_per_s(max(1, min(longest, MEMORY_TOKENS))) or 0.0
