"""Loads a model with its weights; imports torch."""

from pathlib import Path

import torch

from prfaas.cache.prefix import PrefixCache
from prfaas.clock import monotonic_s
from prfaas.config.options import NodeConfig
from prfaas.engine.device import device_names
from prfaas.engine.loader import load_model
from prfaas.engine.runner import Runner
from prfaas.log import get_logger
from prfaas.models.store import resolve
from prfaas.server.node import Progress
from prfaas.server.parts import ModelParts, NodeParts, make_parts
from prfaas.text.chat_template import ChatTemplate
from prfaas.text.tokenizer import Tokenizer


def load_model_parts(config: NodeConfig, progress: Progress) -> NodeParts:
    """Load the model that `config` names. Blocking; raises ConfigError.

    `progress` may raise to stop the load; it is called between the slow steps and inside a fetch or
    a conversion.
    """
    if config.engine.threads is not None:
        torch.set_num_threads(config.engine.threads)
    progress("resolve model", 0, 1)
    model_dir = resolve(config.model.model, progress)
    progress("load tokenizer", 0, 1)
    tokenizer = Tokenizer.load(model_dir)
    override = config.model.chat_template
    chat_template = ChatTemplate.load(model_dir, None if override is None else Path(override))
    progress("load weights", 0, 1)
    engine = config.engine
    model = load_model(model_dir, dtype=engine.weight_dtype, device=engine.device)
    get_logger().info(
        "numerics.tested",
        fingerprint=model.numerics_fingerprint,
        machine=" ".join(device_names(model.device)),
    )
    progress("allocate cache", 0, 1)
    parts = ModelParts(
        layout=model.layout(config.cache.block_tokens),
        model_fingerprint=model.model_fingerprint,
        numerics_fingerprint=model.numerics_fingerprint,
        kv_dtype=model.kv_dtype,
        is_exact=model.is_exact,
        vocab_size=model.config.vocab_size,
        tokenizer=tokenizer,
        chat_template=chat_template,
    )

    def make_runner(cache: PrefixCache) -> Runner:
        return Runner(
            model=model,
            cache=cache,
            options=engine,
            clock=monotonic_s,
            snapshot_tokens=config.cache.snapshot_tokens,
        )

    return make_parts(parts, config, make_runner, progress)
