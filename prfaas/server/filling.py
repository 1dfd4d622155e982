"""Finds or makes the KV of a prompt before the engine continues from it: hit, peer, or both.

After `fill`, the hold's table is all the engine needs: a remote prefill is a prefix hit that arrived
late. A transfer that fails leaves what was published of it, and a fresh lookup finds that.
"""

from dataclasses import dataclass

from prfaas.cache.block_table import BlockTable
from prfaas.cache.tenants import narrowed
from prfaas.scheduler.router import FIRST_BACKOFF_S, Outcome
from prfaas.server.generation import RunningGeneration
from prfaas.server.peer import Peer
from prfaas.server.prefix_finder import PrefixFinder
from prfaas.server.reception import RemoteAttempt
from prfaas.server.remote_prefill import RemotePrefiller
from prfaas.server.routing import PromptRouter
from prfaas.transport.coding import may_lose
from prfaas.transport.messages import CodecName
from prfaas.types import Request, RouteName


class TableHold:
    """One hold on a table, let go at the end of the `with` unless it was handed over."""

    def __init__(self) -> None:
        self._table: BlockTable | None = None

    def __enter__(self) -> "TableHold":
        return self

    def __exit__(self, *_: object) -> None:
        if self._table is not None:
            self._table.release()

    @property
    def table(self) -> BlockTable:
        """The table that is held."""
        assert self._table is not None, "nothing is held"
        return self._table

    def take(self, table: BlockTable) -> None:
        """Hold `table` and let go of the one before."""
        previous, self._table = self._table, table
        if previous is not None:
            previous.release()

    def hand_over(self) -> BlockTable:
        """Return the table; its hold is the caller's."""
        table, self._table = self.table, None
        return table


def approximate_salt(salt: bytes, numerics_fingerprint: str) -> bytes:
    """Return the salt under which KV of other numerics is kept: no exact key ever matches it."""
    return narrowed(salt, b"approximate\0" + numerics_fingerprint.encode())


def lossy_salt(salt: bytes, codec: CodecName) -> bytes:
    """Return the salt under which KV is kept that a lossy codec may have changed.

    All that is received with the setting is kept there, page by page lossy or not: which pages a
    codec left alone is nothing that anybody could rely on later.
    """
    return narrowed(salt, b"codec\0" + codec.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """Where KV comes from, as far as its bits depend on it."""

    salt: bytes
    """Of its keys."""
    is_exact: bool
    """It has this node's own bits."""
    accept_approximate: bool
    """The salt names the peer's numerics, which may be others than ours."""


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A prefix hit, and where its KV comes from."""

    table: BlockTable
    origin: _Origin


class PromptFiller:
    """Fills prompts; with no peer, every prompt is the engine's."""

    def __init__(
        self,
        *,
        finder: PrefixFinder,
        router: PromptRouter,
        peer: Peer | None,
        prefiller: RemotePrefiller | None,
        codec: CodecName = "raw",
    ) -> None:
        self._finder = finder
        self._router = router
        self._peer = peer
        self._prefiller = prefiller
        self._codec = codec

    async def fill(
        self,
        generation: RunningGeneration,
        hold: TableHold,
        *,
        force_route: RouteName | None,
        want_logits: bool,
    ) -> bytes:
        """Hold a table from which the engine can continue, or have the request answered already.

        The record says which way it went, and why.

        Returns:
            The salt of the table's keys: what the engine adds belongs under it, too. KV that builds
            on KV that is not exact is not either, whoever computed it.
        """
        prefix = await self._look_up(generation.request)
        hold.take(prefix.table)
        record = generation.record
        route = self._router.route(generation.request, prefix.table.hit_tokens, force=force_route)
        record.route, record.reason, record.peer = route.name, route.reason, route.peer
        record.predicted_ttft_s = route.predicted_ttft_s
        if route.name == "local":
            self._count_hit(generation, prefix, num_remote=0)
            return prefix.origin.salt
        is_forced = force_route is not None
        return await self._fill_remotely(generation, hold, prefix, want_logits, is_forced)

    def _count_hit(
        self, generation: RunningGeneration, prefix: _Prefix, *, num_remote: int
    ) -> None:
        record = generation.record
        hit_tokens = prefix.table.hit_tokens
        record.tokens_remote = num_remote
        record.tokens_reused = hit_tokens - num_remote
        record.tokens_local = record.prompt_tokens - hit_tokens
        record.exact = record.exact and prefix.origin.is_exact

    async def _look_up(self, request: Request) -> _Prefix:
        """Return the longer of the hits in this node's own KV and in what came from the peer."""
        own = await self._look_up_own(request)
        received = self._received(request)
        if received is None or received.is_exact:
            return own
        with TableHold() as hold:
            hold.take(own.table)
            other = await self._look_up_from(request, received)
            if other.table.hit_tokens > own.table.hit_tokens:
                return other
            other.table.release()
            hold.hand_over()
            return own

    async def _look_up_own(self, request: Request) -> _Prefix:
        own = _Origin(salt=request.cache_salt, is_exact=True, accept_approximate=False)
        return await self._look_up_from(request, own)

    async def _look_up_from(self, request: Request, origin: _Origin) -> _Prefix:
        return _Prefix(await self._finder.find(request.prompt_tokens, origin.salt), origin)

    def _received(self, request: Request) -> _Origin | None:
        """Return the origin of what the peer sends, None without a peer."""
        peer = self._peer
        if peer is None:
            return None
        salt, is_lossy = request.cache_salt, may_lose(self._codec)
        if not peer.is_exact:
            salt = approximate_salt(salt, peer.numerics_fingerprint)
        if is_lossy:
            salt = lossy_salt(salt, self._codec)
        return _Origin(
            salt=salt,
            is_exact=peer.is_exact and not is_lossy,
            accept_approximate=not peer.is_exact,
        )

    async def _fill_remotely(
        self,
        generation: RunningGeneration,
        hold: TableHold,
        prefix: _Prefix,
        want_logits: bool,
        is_forced: bool,
    ) -> bytes:
        """Pull the prompt's KV from the peer; if that fails, hold what a fresh lookup finds.

        Returns the salt of the held table's keys.
        """
        request = generation.request
        attempt: RemoteAttempt | None = None
        outcome: Outcome = "cancelled"
        try:
            attempt = await self._reserve(request, hold, prefix, want_logits)
            if attempt is not None and is_forced:
                attempt.local_estimate_s = None  # slow is no reason to give up what was asked for
            if attempt is None:
                outcome = "pool_full"
            else:
                assert self._prefiller is not None, "routed to a peer without one"
                await self._prefiller.run(attempt, generation)
                outcome = attempt.outcome
        finally:
            self._router.ended(
                request.request_id,
                outcome,
                rates=None if attempt is None else attempt.rates,
                retry_after_s=FIRST_BACKOFF_S if attempt is None else attempt.retry_after_s,
            )
        if attempt is not None and outcome in ("completed", "cancelled"):
            return attempt.salt
        return await self._fall_back(generation, hold, attempt, outcome)

    async def _reserve(
        self, request: Request, hold: TableHold, prefix: _Prefix, want_logits: bool
    ) -> RemoteAttempt | None:
        """Reserve pages for all of the prompt; None if the pool has no room for them."""
        received = self._received(request)
        assert received is not None, "routed to a peer without one"
        if prefix.origin.is_exact and not received.is_exact:
            prefix = await self._look_up_from(request, received)
            hold.take(prefix.table)
        num_tokens = len(request.prompt_tokens)
        if not prefix.table.try_reserve(num_tokens):
            return None
        uncached_tokens = num_tokens - prefix.table.hit_tokens
        return RemoteAttempt(
            request=request,
            table=prefix.table,
            salt=prefix.origin.salt,
            is_exact=prefix.origin.is_exact,
            accept_approximate=prefix.origin.accept_approximate,
            want_logits=want_logits,
            local_estimate_s=self._router.local_view(uncached_tokens).ttft_s(
                num_tokens=uncached_tokens
            ),
        )

    async def _fall_back(
        self,
        generation: RunningGeneration,
        hold: TableHold,
        attempt: RemoteAttempt | None,
        outcome: Outcome,
    ) -> bytes:
        """Hold what a fresh lookup finds and return the salt of its keys."""
        record = generation.record
        record.route, record.reason = "local", outcome
        if attempt is not None and attempt.detail:
            record.reason = f"{outcome}: {attempt.detail}"
        # The lookup comes before the old table is let go, so that what arrived stays pinned.
        salvaged = await self._look_up(generation.request)
        hold.take(salvaged.table)
        base_tokens = salvaged.table.hit_tokens if attempt is None else attempt.base_tokens
        num_remote = max(0, salvaged.table.hit_tokens - base_tokens)
        self._count_hit(generation, salvaged, num_remote=num_remote)
        return salvaged.origin.salt
