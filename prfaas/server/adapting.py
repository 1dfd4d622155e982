"""Looks at the engine and the peers now and then, and sets the router's t and the engine's share."""

import asyncio

from prfaas.cache.spec import CacheLayout
from prfaas.clock import Clock
from prfaas.config.kv_layout import layout_kv_curve
from prfaas.engine.options import EngineOptions
from prfaas.engine.rate import MEMORY_TOKENS
from prfaas.log import get_logger
from prfaas.scheduler.adaptation import Adaptation, Adapted, Observed
from prfaas.scheduler.correction import RateCorrection
from prfaas.scheduler.profile import Prior
from prfaas.scheduler.router import Router
from prfaas.scheduler.view import PeerView, known_rate
from prfaas.server.engine_thread import EngineThread


class Adapting:
    """The long time scale of one node: `run` is its task."""

    def __init__(
        self,
        *,
        router: Router,
        engine: EngineThread,
        engine_options: EngineOptions,
        layout: CacheLayout,
        clock: Clock,
        prior: Prior | None = None,
    ) -> None:
        self._router = router
        self._engine = engine
        self._mixed_chunk_tokens = engine_options.most_mixed_tokens
        self._clock = clock
        self._period_s = router.options.rebalance_period_s
        self._adaptation = Adaptation(
            router.options,
            kv_bytes=layout_kv_curve(layout),
            max_batch=engine_options.max_batch_sequences,
            prior=prior,
        )
        self._correction = RateCorrection(prior, memory_tokens=MEMORY_TOKENS)
        self.prefill_share = 1.0
        """Of the engine's steps, as set last."""

    def saw(self, uncached_tokens: int, output_tokens: int) -> None:
        """Take note of a request; 0 uncached tokens: its prompt was computed by order elsewhere."""
        self._adaptation.saw(uncached_tokens, output_tokens)

    def computed(self, uncached_tokens: int) -> None:
        """Take note of a prompt that is prefilled here: the engine's rate is that of such prompts."""
        self._correction.computed(uncached_tokens)

    async def run(self) -> None:
        """Look every `rebalance_period_s` until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            self.look()

    def look(self) -> Adapted:
        """Look once, and set what is to be done."""
        adapted = self._adaptation.look(self._clock(), self._observed())
        tokens = adapted.threshold_tokens
        if tokens is not None and tokens != self._router.threshold_tokens:
            get_logger().info(
                "threshold.moved", old_tokens=self._router.threshold_tokens, new_tokens=tokens
            )
            self._router.set_threshold(tokens)
        if adapted.prefill_share != self.prefill_share:
            self.prefill_share = adapted.prefill_share
            self._engine.set_prefill_share(adapted.prefill_share)
        return adapted

    def _observed(self) -> Observed:
        now_s, load = self._clock(), self._engine.load()
        usable = [
            self._router.peer(name)
            for name in self._router.peers
            if self._router.is_usable(name, now_s)
        ]
        mean_tokens = self._adaptation.mean_tokens
        token_s = [1 / rate for rate in (_rate_of(peer, mean_tokens) for peer in usable) if rate]
        byte_s = [peer.byte_s for peer in usable]
        chunk_s = load.prefill_chunk_s
        rate = None if chunk_s is None else self._mixed_chunk_tokens / chunk_s
        if rate is not None and mean_tokens is not None:
            rate = self._correction.tokens_per_s(mean_tokens, rate)
        return Observed(
            prefill_tokens_per_s=rate,
            prefill_chunk_s=chunk_s,
            decode_step_s=load.decode_step_s,
            num_decoding=load.num_decoding,
            num_peers=len(usable),
            peer_tokens_per_s=len(token_s) / sum(token_s) if token_s else None,
            link_bytes_per_s=sum(1 / each for each in byte_s) if byte_s and all(byte_s) else None,
        )


def _rate_of(peer: PeerView, num_tokens: int | None) -> float | None:
    """Return the rate of a peer's prefill of so many tokens; None while it is unknown."""
    if num_tokens is None or peer.pace is None:
        return peer.tokens_per_s
    seconds = peer.pace.seconds(num_tokens)
    return known_rate(num_tokens / seconds) if seconds > 0 else None
