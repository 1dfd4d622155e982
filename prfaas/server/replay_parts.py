"""Makes a node that replays a profile: no model directory, no weights, no torch."""

import hashlib
import time
from pathlib import Path

from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import CacheLayout
from prfaas.clock import monotonic_s
from prfaas.config.options import NodeConfig
from prfaas.config.profiles import read_kv_layout, read_kv_model, read_profile
from prfaas.engine.kv_groups import kv_groups
from prfaas.engine.replay import ReplayEngine
from prfaas.engine.replay_kv import ReplayConfig, ReplayModel
from prfaas.engine.replay_layout import plain_layout, replay_layout
from prfaas.engine.replay_timing import ReplayTiming
from prfaas.errors import ConfigError
from prfaas.scheduler.curves import LinearCurve
from prfaas.server.node import Progress
from prfaas.server.parts import ModelParts, NodeParts, layout_text, make_parts
from prfaas.text.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from prfaas.text.chat_template import ChatTemplate

MAX_CONTEXT_TOKENS = 1 << 20
"""Of a profile that says nothing about its model."""
NUMERICS = "replay 1"


def load_replay_parts(config: NodeConfig, progress: Progress) -> NodeParts:
    """Make the node that replays `config.engine.profile`. Blocking; raises ConfigError."""
    options = config.replay
    if config.engine.profile is None:
        raise ConfigError("engine.profile is not set")
    path = Path(config.engine.profile).expanduser()
    progress("read profile", 0, 1)
    profile = read_profile(path)
    if profile.decode is None and config.role == "pd":
        raise ConfigError(f"{path}: without [decode] it can replay the role prefill only")
    model = read_kv_model(path)
    block_tokens = config.cache.block_tokens
    if model is None:
        measured = read_kv_layout(path, block_tokens)
        layout = (
            _layout_of(profile.kv_bytes, options.bytes_scale, block_tokens)
            if measured is None
            else replay_layout(measured, options.bytes_scale)
        )
        kv_dtype, max_context_tokens = "bfloat16", MAX_CONTEXT_TOKENS
    else:
        spec, kv_dtype = model
        layout = kv_groups(spec.layers, block_tokens, kv_dtype)
        layout = replay_layout(layout, options.bytes_scale)
        max_context_tokens = spec.max_context_tokens
    name = layout_text(layout).encode()
    progress("allocate cache", 0, 1)
    parts = ModelParts(
        layout=layout,
        model_fingerprint=f"replay {hashlib.sha256(name).hexdigest()}",
        numerics_fingerprint=NUMERICS,
        kv_dtype=kv_dtype,
        is_exact=True,
        vocab_size=VOCAB_SIZE,
        tokenizer=byte_tokenizer(),
        chat_template=ChatTemplate(None),
    )

    def make_engine(cache: PrefixCache) -> ReplayEngine:
        return ReplayEngine(
            model=ReplayModel(
                layout,
                ReplayConfig(vocab_size=VOCAB_SIZE, max_context_tokens=max_context_tokens),
                seed=name,
            ),
            cache=cache,
            options=config.engine,
            timing=ReplayTiming(
                prefill_s=profile.prefill_s,
                decode_s=None if profile.decode is None else profile.decode.step_s,
                speed=options.speed,
            ),
            clock=monotonic_s,
            sleep=time.sleep,
            snapshot_tokens=config.cache.snapshot_tokens,
        )

    return make_parts(parts, config, make_engine, progress)


def _layout_of(kv_bytes: LinearCurve, bytes_scale: float, block_tokens: int) -> CacheLayout:
    """Return the layout of an S_kv of which points are known: the straight line that it ends in."""
    last = kv_bytes.tokens[-1]
    slope = (kv_bytes(2 * last) - kv_bytes(last)) / last
    constant = max(0.0, kv_bytes(last) - slope * last)
    return plain_layout(
        bytes_per_token=(kv_bytes(last) - constant) / last * bytes_scale,
        state_bytes=constant * bytes_scale,
        block_tokens=block_tokens,
    )
