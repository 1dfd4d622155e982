"""Loads what both serving roles are made of: model, tokenizer, template, cache, engine."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from prfaas.cache.hashing import root_key
from prfaas.cache.options import MAX_QUEUED_BYTES, CacheOptions, StoreOptions
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import CacheLayout, StateSpec, WindowSpec
from prfaas.cache.store import Store
from prfaas.clock import Clock, monotonic_s
from prfaas.config.options import NodeConfig
from prfaas.engine.loader import load_model
from prfaas.engine.runner import Runner
from prfaas.models.store import resolve
from prfaas.server.node import Progress
from prfaas.text.chat_template import ChatTemplate
from prfaas.text.tokenizer import Tokenizer
from prfaas.transport.handshake import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """A loaded model and everything around it, ready to be put into a role."""

    identity: Identity
    cache: PrefixCache
    runner: Runner
    is_exact: bool
    """The same tokens give the same bits, whatever is computed beside them."""
    vocab_size: int
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    clock: Clock


def load_parts(config: NodeConfig, progress: Progress) -> NodeParts:
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
    model = load_model(
        model_dir, dtype=engine.weight_dtype, numerics=engine.numerics, device=engine.device
    )
    progress("allocate cache", 0, 1)
    layout = model.layout(config.cache.block_tokens)
    model_fingerprint, numerics = model.model_fingerprint, model.numerics_fingerprint

    def root(salt: bytes) -> bytes:
        return root_key(
            model_fingerprint=model_fingerprint,
            numerics_fingerprint=numerics,
            kv_dtype=model.kv_dtype,
            layout=layout,
            salt=salt,
        )

    identity = Identity(
        model_fingerprint=model_fingerprint,
        tokenizer_fingerprint=tokenizer.fingerprint,
        template_fingerprint=chat_template.fingerprint,
        kv_dtype=model.kv_dtype,
        block_tokens=layout.block_tokens,
        layout=layout_text(layout),
        numerics_fingerprint=numerics,
    )
    with ExitStack() as undo:
        store = open_store(config.cache, identity, progress)
        if store is not None:
            undo.callback(store.close, drain=False)
        cache = PrefixCache(layout=layout, ram_bytes=config.cache.ram_bytes, root=root, store=store)
        runner = Runner(model=model, cache=cache, options=config.engine, clock=monotonic_s)
        undo.pop_all()
    return NodeParts(
        identity=identity,
        cache=cache,
        runner=runner,
        is_exact=model.is_exact,
        vocab_size=model.config.vocab_size,
        tokenizer=tokenizer,
        chat_template=chat_template,
        clock=monotonic_s,
    )


def open_store(options: CacheOptions, identity: Identity, progress: Progress) -> Store | None:
    """Return the disk tier in the directory that the options name, if they do.

    Raises:
        ConfigError: the directory cannot be used.
    """
    if options.dir is None:
        return None
    progress("open cache directory", 0, 1)
    names = ("model_fingerprint", "numerics_fingerprint", "kv_dtype", "layout")
    return Store.open(
        Path(options.dir).expanduser(),
        identity="; ".join(f"{name} {getattr(identity, name)}" for name in names),
        options=StoreOptions(
            quota_bytes=options.disk_bytes,
            ttl_s=options.ttl_s,
            tenant_quota_bytes=options.tenant_disk_bytes,
            max_queued_bytes=min(MAX_QUEUED_BYTES, options.ram_bytes // 4),
        ),
    )


def layout_text(layout: CacheLayout) -> str:
    """Return the layout in one line that a person can compare."""
    groups = []
    for spec in layout.groups:
        size = f"page {spec.page_bytes}"
        if isinstance(spec, WindowSpec):
            size = f"window {spec.window_tokens} {size}"
        if isinstance(spec, StateSpec):
            size = f"state {spec.state_bytes} {size}"
        layers = ",".join(map(str, spec.layers))
        groups.append(f"{spec.name} {size} layers {layers}")
    return f"v{layout.layout_version}: {'; '.join(groups)}"
