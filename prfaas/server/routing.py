"""Asks the router about one prompt: what this node knows of it and of its own engine, and its clock."""

from collections.abc import Mapping

from prfaas.cache.spec import CacheLayout
from prfaas.clock import Clock
from prfaas.scheduler.monitor import TransferRates
from prfaas.scheduler.profile import Prior
from prfaas.scheduler.router import FIRST_BACKOFF_S, Outcome, Route, Router, RouteRequest
from prfaas.scheduler.view import LocalView
from prfaas.server.engine_thread import EngineThread
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
    ) -> None:
        self._router = router
        self._engine = engine
        self._layout = layout
        self._clock = clock
        self._prior = prior

    def route(
        self,
        request: Request,
        hit_tokens: int,
        peer_hits: Mapping[str, int] | None = None,
        force: RouteName | None = None,
    ) -> Route:
        """Return where the prompt is prefilled; a remote route is in flight until `ended`.

        `hit_tokens` of it are here, `peer_hits` at peers by their names; those left out have none.
        """
        num_tokens = len(request.prompt_tokens)
        return self._router.route(
            request.request_id,
            RouteRequest(
                num_tokens=num_tokens,
                hit_tokens=hit_tokens,
                num_kv_bytes=self._layout.bytes_needed(num_tokens, hit_tokens),
                peer_hit_tokens=peer_hits or {},
            ),
            local=self.local_view(num_tokens - hit_tokens),
            now_s=self._clock(),
            force=force,
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
        rate: float | None = load.prefill_tokens_per_s
        if not rate and self._prior is not None:
            rate = self._prior.prefill_tokens_per_s(num_tokens)
        return LocalView(num_waiting_tokens=load.num_waiting_tokens, prefill_tokens_per_s=rate)
