"""Finds or makes the KV of a prompt before the engine continues from it: hit, peer, or both.

After `fill`, the hold's table is all the engine needs: a remote prefill is a prefix hit that arrived
late, and so is a prefix that another node had. A transfer that fails leaves what was published of it, and
a fresh lookup finds that.
"""

import asyncio

from prfaas.scheduler.router import FIRST_BACKOFF_S, Outcome, Route
from prfaas.server.directions import Directions
from prfaas.server.explaining import RouteExplanation
from prfaas.server.generation import RunningGeneration
from prfaas.server.peer import Peer
from prfaas.server.peers import Peers
from prfaas.server.prefix_fetch import PrefixFetch, PrefixFetcher
from prfaas.server.prefixes import Prefix, PrefixLookup, TableHold, received_from
from prfaas.server.reception import RemoteAttempt
from prfaas.server.remote_prefill import RemotePrefiller
from prfaas.server.routing import PromptRouter
from prfaas.transport.options import TransportOptions
from prfaas.types import Request, RouteName


class PromptFiller:
    """Fills prompts; with no peer, every prompt is the engine's.

    `address` is what others call this node: whoever is directed there stays here.
    """

    def __init__(
        self,
        *,
        lookup: PrefixLookup,
        router: PromptRouter,
        peers: Peers,
        prefiller: RemotePrefiller,
        fetcher: PrefixFetcher,
        options: TransportOptions,
        address: str | None = None,
    ) -> None:
        self._lookup = lookup
        self._router = router
        self._peers = peers
        self._prefiller = prefiller
        self._fetcher = fetcher
        self._options = options
        self._address = address

    async def fill(
        self,
        generation: RunningGeneration,
        hold: TableHold,
        *,
        force_route: RouteName | None,
        want_logits: bool,
        directions: Directions | None = None,
    ) -> bytes:
        """Hold a table from which the engine can continue, or have the request answered already.

        The record says which way it went, and why.

        Returns:
            The salt of the table's keys: what the engine adds belongs under it, too. KV that builds
            on KV that is not exact is not either, whoever computed it.
        """
        request, record = generation.request, generation.record
        prefix = await self._look_up(request)
        hold.take(prefix.table)
        generation.hit_tokens = prefix.table.hit_tokens
        if directions is None:
            route = self._router.route(request, prefix.table.hit_tokens, force=force_route)
            record.reason, record.predicted_ttft_s = route.reason, route.predicted_ttft_s
        else:
            prefix = await self._fetch(generation, hold, prefix, directions)
            route = await self._obey(generation, prefix, directions)
        record.route, record.peer = route.name, route.peer
        if route.peer is None:
            self._count_hit(generation, prefix, num_remote=0)
            return prefix.origin.salt
        peer = self._peers.get(route.peer)
        assert peer is not None, "routed to a peer that is not known"
        is_forced = force_route is not None
        with peer.transferring():
            return await self._fill_remotely(generation, hold, prefix, peer, want_logits, is_forced)

    async def explain(self, request: Request, force_route: RouteName | None) -> RouteExplanation:
        """Return the route that the request would have now; nothing comes of it."""
        hit_tokens = await self._lookup.peek(request, self._peers.all)
        return self._router.explain(request, hit_tokens, force_route)

    async def _obey(
        self, generation: RunningGeneration, prefix: Prefix, directions: Directions
    ) -> Route:
        """Return where a directed prompt is prefilled: here if it cannot be where it should."""
        request, record = generation.request, generation.record
        hit_tokens, at = prefix.table.hit_tokens, directions.prefill_at
        record.reason, record.predicted_ttft_s = directions.reason, directions.predicted_ttft_s
        if at is None or at == self._address:
            return self._router.route(request, hit_tokens, force="local")
        peer = await self._reached(at)
        if peer is None:
            record.reason = "peer_down"
            route = self._router.route(request, hit_tokens, force="local")
        else:
            route = self._router.route(request, hit_tokens, force="remote", only=peer.name)
            if route.peer is None:
                record.reason = route.reason
        if route.peer is None:
            record.predicted_ttft_s = route.predicted_ttft_s
        return route

    async def _reached(self, name: str) -> Peer | None:
        """Return the peer of a name once it is known whether it answers; None for one that is none."""
        try:
            peer = self._peers.ensure(name)
        except ValueError:
            return None
        with peer.in_use():
            try:
                async with asyncio.timeout(self._options.connect_timeout_s):
                    await peer.settled()
            except TimeoutError:
                return None
        return peer

    async def _fetch(
        self,
        generation: RunningGeneration,
        hold: TableHold,
        prefix: Prefix,
        directions: Directions,
    ) -> Prefix:
        """Hold and return the prefix once a longer one was fetched, or could not be.

        What others are fetching is waited for; if that fails, it is not tried again at the same peer.
        """
        request, name = generation.request, directions.prefix_from
        if name is None or name == self._address:
            return prefix
        while prefix.table.hit_tokens < directions.prefix_tokens:
            peer = await self._reached(name)
            if peer is None or not peer.is_there:
                break
            with peer.transferring(), TableHold() as fetching:
                origin = received_from(peer, request, self._options.kv_codec)
                here = await self._lookup.under(request, origin)
                fetching.take(here.table)
                has_come = here.table.hit_tokens >= directions.prefix_tokens
                other = None if has_come else self._fetcher.bringing(here.table)
                if other is None and not has_come:
                    num_more = directions.prefix_tokens - prefix.table.hit_tokens
                    return await self._fetch_behind(here, peer, generation, hold, num_more)
            if other is not None:
                await other.ended.wait()
            prefix = await self._look_up(request)
            hold.take(prefix.table)
            if other is None or (other.peer is peer and other.has_failed):
                break
        return prefix

    async def _fetch_behind(
        self,
        here: Prefix,
        peer: Peer,
        generation: RunningGeneration,
        hold: TableHold,
        num_more: int,
    ) -> Prefix:
        """Fetch some `num_more` tokens behind what is here; hold and return the prefix that there is then."""
        request = generation.request
        fetch = PrefixFetch(
            peer=peer,
            request=request,
            table=here.table,
            accept_approximate=here.origin.accept_approximate,
            local_estimate_s=self._router.local_view(num_more).ttft_s(num_tokens=num_more),
        )
        try:
            await self._fetcher.run(fetch)
        finally:
            generation.record.bytes_received += fetch.num_page_bytes
        # Before what arrived is let go, so that it stays pinned.
        longer = await self._look_up(request)
        hold.take(longer.table)
        return longer

    def _count_hit(self, generation: RunningGeneration, prefix: Prefix, *, num_remote: int) -> None:
        record = generation.record
        hit_tokens = prefix.table.hit_tokens
        record.tokens_remote = num_remote
        record.tokens_reused = hit_tokens - num_remote
        record.tokens_local = record.prompt_tokens - hit_tokens
        record.exact = record.exact and prefix.origin.is_exact

    async def _look_up(self, request: Request) -> Prefix:
        return await self._lookup.longest(request, self._peers.all)

    async def _fill_remotely(
        self,
        generation: RunningGeneration,
        hold: TableHold,
        prefix: Prefix,
        peer: Peer,
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
            attempt = await self._reserve(request, hold, prefix, peer, want_logits)
            if attempt is not None and is_forced:
                attempt.local_estimate_s = None  # slow is no reason to give up what was asked for
            if attempt is None:
                outcome = "pool_full"
            else:
                await self._prefiller.run(attempt, generation)
                outcome = attempt.outcome
        finally:
            generation.route_outcome = outcome
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
        self,
        request: Request,
        hold: TableHold,
        prefix: Prefix,
        peer: Peer,
        want_logits: bool,
    ) -> RemoteAttempt | None:
        """Reserve pages for all of the prompt; None if the pool has no room for them."""
        received = received_from(peer, request, self._options.kv_codec)
        if prefix.origin != received:  # or what comes would build on KV of other bits
            prefix = await self._lookup.under(request, received)
            hold.take(prefix.table)
        num_tokens = len(request.prompt_tokens)
        if not prefix.table.try_reserve(num_tokens):
            return None
        uncached_tokens = num_tokens - prefix.table.hit_tokens
        return RemoteAttempt(
            peer=peer,
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
