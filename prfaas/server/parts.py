"""What both serving roles are made of: identity, tokenizer, template, cache, engine."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from prfaas.cache.hashing import root_key
from prfaas.cache.options import MAX_QUEUED_BYTES, CacheOptions, StoreOptions
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import CacheLayout, StateSpec, WindowSpec
from prfaas.cache.store import Store
from prfaas.clock import Clock, monotonic_s
from prfaas.config.options import NodeConfig
from prfaas.engine.runner import Runner
from prfaas.server.member import new_epoch
from prfaas.server.node import Progress
from prfaas.text.chat_template import ChatTemplate
from prfaas.text.tokenizer import Tokenizer
from prfaas.transport.handshake import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """An engine and everything around it, ready to be put into a role."""

    identity: Identity
    cache: PrefixCache
    runner: Runner
    is_exact: bool
    """The same tokens give the same bits, whatever is computed beside them."""
    vocab_size: int
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    clock: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """What is known of a model before its cache is made."""

    layout: CacheLayout
    model_fingerprint: str
    numerics_fingerprint: str
    kv_dtype: str
    is_exact: bool
    vocab_size: int
    tokenizer: Tokenizer
    chat_template: ChatTemplate

    @property
    def identity(self) -> Identity:
        """What a peer must share."""
        return Identity(
            model_fingerprint=self.model_fingerprint,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            template_fingerprint=self.chat_template.fingerprint,
            kv_dtype=self.kv_dtype,
            block_tokens=self.layout.block_tokens,
            layout=layout_text(self.layout),
            numerics_fingerprint=self.numerics_fingerprint,
        )

    def root(self, salt: bytes) -> bytes:
        """Return the key that the chains of a salt's blocks hang on."""
        return root_key(
            model_fingerprint=self.model_fingerprint,
            numerics_fingerprint=self.numerics_fingerprint,
            kv_dtype=self.kv_dtype,
            layout=self.layout,
            salt=salt,
        )


def make_parts(
    model: ModelParts,
    config: NodeConfig,
    make_engine: Callable[[PrefixCache], Runner],
    progress: Progress,
) -> NodeParts:
    """Return the parts of a node with this model: its cache, and the engine that is made on it.

    The cache of a member of a fleet tracks what it has, for a scheduler to be told.

    Raises:
        ConfigError: the cache directory cannot be used, or what `make_engine` refuses.
    """
    with ExitStack() as undo:
        store = open_store(config.cache, model.identity, progress)
        if store is not None:
            undo.callback(store.close, drain=False)
        cache = PrefixCache(
            layout=model.layout,
            ram_bytes=config.cache.ram_bytes,
            root=model.root,
            store=store,
            epoch=None if config.fleet.scheduler is None else new_epoch(),
        )
        runner = make_engine(cache)
        undo.pop_all()
    return NodeParts(
        identity=model.identity,
        cache=cache,
        runner=runner,
        is_exact=model.is_exact,
        vocab_size=model.vocab_size,
        tokenizer=model.tokenizer,
        chat_template=model.chat_template,
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
            zero_freed=options.zero_freed,
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
