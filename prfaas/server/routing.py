"""Asks the router about one prompt: what this node knows of it and of its own engine, and its clock."""

from collections.abc import Mapping

from prfaas.cache.spec import CacheLayout, WindowSpec
from prfaas.clock import Clock
from prfaas.engine.rate import MEMORY_TOKENS
from prfaas.scheduler.correction import RateCorrection
from prfaas.scheduler.monitor import TransferRates
from prfaas.scheduler.profile import Prior
from prfaas.scheduler.router import FIRST_BACKOFF_S, Outcome, Route, Router, RouteRequest
from prfaas.scheduler.view import LocalView
from prfaas.server.adapting import Adapting
from prfaas.server.engine_thread import EngineThread
from prfaas.server.explaining import Alternative, RouteExplanation
from prfaas.server.places import bytes_of_places, places_of_snapshots
from prfaas.types import Request, RouteName


class PromptRouter:
    """The router as one node asks it."""

    def __init__(
        self,
        *,
        router: Router,
        engine: EngineThread,
        layout: CacheLayout,
        clock: Clock,
        prior: Prior | None = None,
        snapshot_tokens: int = 0,
        adapting: Adapting | None = None,
    ) -> None:
        """Begin without anything observed.

        Args:
            router: the peers.
            engine: this node's.
            layout: of its KV.
            clock: of router and engine.
            prior: what its profile says of the engine.
            snapshot_tokens: between two snapshots of a transfer; 0 is none.
            adapting: what hears of every request.
        """
        self._router = router
        self._engine = engine
        self._layout = layout
        self._clock = clock
        self._correction = RateCorrection(prior, memory_tokens=MEMORY_TOKENS)
        self._snapshot_tokens = snapshot_tokens
        self._snapshot_bytes = _snapshot_bytes(layout)
        self._adapting = adapting

    def route(
        self,
        request: Request,
        hit_tokens: int,
        peer_hits: Mapping[str, int] | None = None,
        force: RouteName | None = None,
        *,
        only: str | None = None,
    ) -> Route:
        """Return where the prompt is prefilled; a remote route is in flight until `ended`.

        `hit_tokens` of it are here, `peer_hits` at peers by their names; those left out have none. `only`
        names the one peer that may take it.
        """
        uncached_tokens = len(request.prompt_tokens) - hit_tokens
        route = self._router.route(
            request.request_id,
            self._asked(len(request.prompt_tokens), hit_tokens, peer_hits or {}),
            local=self.local_view(uncached_tokens),
            now_s=self._clock(),
            force=force,
            among=None if only is None else (self._router.peer(only),),
        )
        if route.name == "local":
            self._correction.computed(uncached_tokens)
            if self._adapting is not None:
                self._adapting.computed(uncached_tokens)
        return route

    def explain(
        self, request: Request, hit_tokens: int, force: RouteName | None = None
    ) -> RouteExplanation:
        """Return the route that the prompt would have now, and what there is to choose from."""
        num_tokens, now_s = len(request.prompt_tokens), self._clock()
        asked = self._asked(num_tokens, hit_tokens, {})
        local = self.local_view(asked.uncached_tokens)
        route = self._router.decide(asked, local=local, now_s=now_s, force=force)
        here = Alternative(
            peer=None,
            refusal=None,
            num_tokens=asked.uncached_tokens,
            queue_tokens=local.num_waiting_tokens,
            num_kv_bytes=0,
            predicted_ttft_s=local.ttft_s(num_tokens=asked.uncached_tokens),
        )
        return RouteExplanation(
            route=route,
            num_tokens=num_tokens,
            hit_tokens=hit_tokens,
            policy=self._router.options.policy_in_force,
            threshold_tokens=self._router.threshold_tokens,
            alternatives=(here, *(self._there(name, asked, now_s) for name in self._router.peers)),
        )

    def _there(self, name: str, asked: RouteRequest, now_s: float) -> Alternative:
        peer = self._router.peer(name)
        return Alternative(
            peer=name,
            refusal=peer.refusal(now_s),
            num_tokens=asked.peer_tokens(name),
            queue_tokens=max(peer.num_queue_tokens, peer.num_inflight_tokens),
            num_kv_bytes=asked.num_kv_bytes,
            predicted_ttft_s=peer.ttft_s(
                num_tokens=asked.peer_tokens(name),
                num_kv_bytes=asked.num_kv_bytes,
                num_tail_bytes=asked.num_tail_bytes,
            ),
        )

    def _asked(
        self, num_tokens: int, hit_tokens: int, peer_hits: Mapping[str, int]
    ) -> RouteRequest:
        num_bytes = self._layout.bytes_needed(num_tokens, hit_tokens)
        tail_bytes = num_bytes - self._layout.streamed_bytes(num_tokens, hit_tokens)
        if self._snapshot_tokens:
            every, block_tokens = self._snapshot_tokens, self._layout.block_tokens
            last_tokens = (num_tokens - 1) // block_tokens * block_tokens  # comes anyway
            num_snapshots = max(0, (last_tokens - 1) // every - hit_tokens // every)
            num_bytes += num_snapshots * self._snapshot_bytes
        return RouteRequest(
            num_tokens=num_tokens,
            hit_tokens=hit_tokens,
            num_kv_bytes=num_bytes,
            num_tail_bytes=tail_bytes,
            peer_hit_tokens=peer_hits,
        )

    def ended(
        self,
        request_id: str,
        outcome: Outcome,
        *,
        rates: TransferRates | None = None,
        retry_after_s: float = FIRST_BACKOFF_S,
    ) -> None:
        """Take a remote route out of flight, exactly once for each; see `Router.ended`."""
        self._router.ended(
            request_id, outcome, now_s=self._clock(), rates=rates, retry_after_s=retry_after_s
        )

    def local_view(self, num_tokens: int) -> LocalView:
        """Return the view for a prompt that leaves `num_tokens` to compute."""
        load = self._engine.load()
        return LocalView(
            num_waiting_tokens=load.num_waiting_tokens,
            num_waiting=load.num_waiting,
            prefill_tokens_per_s=self._correction.tokens_per_s(
                num_tokens, load.prefill_tokens_per_s
            ),
            waiting_tokens_per_s=self._correction.tokens_per_s(
                load.num_waiting_tokens // load.num_waiting, load.prefill_tokens_per_s
            )
            if load.num_waiting
            else None,
        )

    def saw(self, uncached_tokens: int, output_tokens: int) -> None:
        """Take note of a request that is done, for the long time scale."""
        if self._adapting is not None:
            self._adapting.saw(uncached_tokens, output_tokens)


def _snapshot_bytes(layout: CacheLayout) -> int:
    """Return the bytes of one snapshot on the way, far enough from both ends of a prompt."""
    windows = [spec.window_tokens for spec in layout.groups if isinstance(spec, WindowSpec)]
    far_tokens = (max(windows, default=0) // layout.block_tokens + 2) * layout.block_tokens
    places = places_of_snapshots(layout, 3 * far_tokens, 0, 2 * far_tokens)
    return bytes_of_places(layout, places)
