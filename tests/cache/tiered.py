"""A cache over a store, small enough to see through, and what an engine would do with it."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prfaas.cache.block_table import BlockTable
from prfaas.cache.hashing import root_key
from prfaas.cache.pool import PageKey
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import CacheLayout, FullSpec, StateSpec, WindowSpec
from prfaas.cache.store import StoreStats
from prfaas.cache.tiers import PageStore

BLOCK_TOKENS = 2
PAGE_BYTES = 8
LAYOUT = CacheLayout(
    block_tokens=BLOCK_TOKENS,
    groups=(
        FullSpec(name="full", layers=(1,), page_bytes=PAGE_BYTES),
        WindowSpec(name="window", layers=(0, 2), page_bytes=PAGE_BYTES, window_tokens=4),
        StateSpec(name="state", layers=(1, 3), page_bytes=PAGE_BYTES, state_bytes=12),
    ),
)


class DictStore(PageStore):
    """A store in a dictionary that writes when told to, and notes every key it is asked about."""

    def __init__(self) -> None:
        self.records: dict[PageKey, bytes] = {}
        self.tenants: dict[PageKey, bytes] = {}
        self.asked: set[PageKey] = set()
        self.lost: set[PageKey] = set()
        """Known, but cannot be read."""
        self.removed: list[PageKey] = []
        self._waiting: list[tuple[PageKey, Sequence[memoryview], Callable[[bool], None]]] = []

    def put(
        self,
        key: PageKey,
        parts: Sequence[memoryview],
        *,
        tenant: bytes = b"",
        done: Callable[[bool], None] | None = None,
    ) -> bool:
        self.asked.add(key)
        assert done is not None
        if key in self.records or any(key == waiting for waiting, _, _ in self._waiting):
            return False
        self.tenants[key] = tenant
        self._waiting.append((key, parts, done))
        return True

    def write(self) -> None:
        """Store what waits."""
        for key, parts, done in self._waiting:
            self.records[key] = b"".join(parts)
            done(True)
        self._waiting.clear()

    def known(self, key: PageKey) -> bool:
        self.asked.add(key)
        return key in self.records

    def num_known(self, group: int, keys: Sequence[bytes]) -> int:
        return next((n for n, key in enumerate(keys) if not self.known((group, key))), len(keys))

    def get_many(self, wanted: Sequence[tuple[PageKey, Sequence[memoryview]]]) -> list[bool]:
        return [self._get(key, parts) for key, parts in wanted]

    def _get(self, key: PageKey, parts: Sequence[memoryview]) -> bool:
        self.asked.add(key)
        record = self.records.get(key)
        if record is None or key in self.lost:
            self.remove([key])
            for part in parts:
                part[:] = bytes(part.nbytes)
            return False
        for part in parts:
            part[:], record = record[: part.nbytes], record[part.nbytes :]
        return True

    def remove(self, keys: Iterable[PageKey]) -> None:
        """Lose records."""
        for key in list(keys):
            if self.records.pop(key, None) is not None:
                self.removed.append(key)

    def take_removed(self) -> list[PageKey]:
        removed, self.removed = self.removed, []
        return removed

    def touch(self, keys: Iterable[PageKey]) -> None:
        self.asked.update(keys)

    def stats(self) -> StoreStats:
        raise NotImplementedError

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        self.write()


def cache_over(
    store: PageStore | None,
    num_pages: int = 400,
    *,
    layout: CacheLayout = LAYOUT,
    epoch: int | None = None,
) -> PrefixCache:
    def root(salt: bytes) -> bytes:
        return root_key(
            model_fingerprint="m",
            numerics_fingerprint="n",
            kv_dtype="float32",
            layout=layout,
            salt=salt,
        )

    ram_bytes = num_pages * layout.page_bytes
    return PrefixCache(layout=layout, ram_bytes=ram_bytes, root=root, store=store, epoch=epoch)


def content(key: bytes, group: int, index: int) -> bytes:
    """What the page of a block holds: any function of the key will do."""
    return key[: PAGE_BYTES - 2] + bytes([group, index])


def size_of(group: int, index: int) -> int:
    """A state's last slice is shorter than a page."""
    return 4 if group == 2 and index % 2 else PAGE_BYTES


def find(cache: PrefixCache, keys: Sequence[bytes], num_tokens: int, salt: bytes) -> BlockTable:
    """Look up as a server does, and read what must be read; its pages must hold their bytes."""
    promotion = None
    while True:
        found = cache.find(keys, num_tokens, salt=salt, after=promotion)
        if promotion is not None:
            promotion.release()
        if isinstance(found, BlockTable):
            assert_whole(found, keys)
            return found
        promotion = found
        promotion.read()


def assert_whole(table: BlockTable, keys: Sequence[bytes]) -> None:
    """Every page that is committed holds the bytes that its key stands for."""
    for group, block, pages in committed(table, len(keys)):
        for index, page in enumerate(pages):
            size = size_of(group, index)
            assert table.view(page)[:size] == content(keys[block], group, index)[:size]


def committed(table: BlockTable, num_blocks: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    for group in range(len(LAYOUT.groups)):
        for block in range(num_blocks):
            pages = table.pages(group, block)
            if pages is not None and table.is_committed(group, block):
                yield group, block, pages


def compute(table: BlockTable, keys: Sequence[bytes], states: Iterable[int] | None = None) -> None:
    """Fill and publish all blocks behind the hit, of states those at `states` (None: all)."""
    for block in range(table.hit_tokens // BLOCK_TOKENS, len(keys)):
        for group in range(len(LAYOUT.groups)):
            if group == 2 and states is not None and block not in states:
                continue
            pages = table.try_allocate(group, block)
            if pages is None:
                continue
            if not table.is_committed(group, block):
                for index, page in enumerate(pages):
                    table.view(page)[:] = content(keys[block], group, index)
            table.commit(group, block)


def serve(
    cache: PrefixCache,
    tokens: Sequence[int],
    salt: bytes = b"",
    states: Iterable[int] | None = None,
) -> int:
    """Answer a prompt; return the tokens of its hit."""
    keys = cache.block_keys(tokens, salt)
    table = find(cache, keys, len(tokens), salt)
    compute(table, keys, states)
    table.release()
    cache.check()
    return table.hit_tokens
