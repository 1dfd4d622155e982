"""One try to have a prompt prefilled by a peer: ask, receive, verify, and say how it went."""

import secrets
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from prfaas.cache.spec import CacheLayout
from prfaas.clock import Clock
from prfaas.errors import Overloaded, TransferError, TransferTimeout
from prfaas.log import get_logger
from prfaas.scheduler.monitor import TransferMonitor
from prfaas.server.generation import RunningGeneration
from prfaas.server.places import bytes_of_places, places_of_snapshots, snapshot_interval
from prfaas.server.prefix_costs import is_worth_waiting, least_work_s
from prfaas.server.pull import Pull, kv_numbers
from prfaas.server.reception import Reception, RemoteAttempt
from prfaas.server.transfer_metrics import TransferMetrics
from prfaas.server.transfer_outcome import PEER_IS_WELL, LacksPrefix, TooSlow, outcome_of
from prfaas.transport.handshake import Identity
from prfaas.transport.messages import CAPABILITY_BYTES, TransferRequest
from prfaas.transport.options import TransportOptions
from prfaas.transport.pulling import Pulling


class RemotePrefiller:
    """Runs attempts, each at its own peer."""

    def __init__(
        self,
        *,
        identity: Identity,
        layout: CacheLayout,
        vocab_size: int,
        options: TransportOptions,
        metrics: TransferMetrics,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._identity = identity
        self._layout = layout
        self._vocab_size = vocab_size
        self._options = options
        self._metrics = metrics
        self._clock = clock
        self._snapshot_tokens = snapshot_interval(options.transfer_snapshot_tokens, layout)
        self._spawn = spawn
        """Starts a background task of the node: to cancel at the peer when we must not wait."""

    async def run(self, attempt: RemoteAttempt, generation: RunningGeneration) -> None:
        """Receive the prompt's KV into the attempt's table, and put the first tokens.

        The table must have everything reserved. Afterwards it is exact at the prompt's end
        ("completed"), or the first tokens were the whole answer and the transfer was cancelled, or
        the outcome says what failed. Leaving early in any way cancels it at the peer.
        """
        try:
            await self._run(attempt, generation)
        except (TransferError, Overloaded) as error:
            if isinstance(error, Overloaded):
                attempt.retry_after_s = error.retry_after_s
            attempt.outcome = outcome_of(error, is_accepted=attempt.is_accepted)
            attempt.detail = str(error)
            if attempt.outcome not in PEER_IS_WELL:
                attempt.peer.doubt()
        finally:
            self._metrics.transfer_finished("received", attempt.outcome)
            get_logger().info(
                "transfer.received",
                request_id=attempt.request.request_id,
                transfer_id=attempt.transfer_id,
                outcome=attempt.outcome,
                detail=attempt.detail,
                num_bytes=attempt.num_page_bytes,
            )

    async def _run(self, attempt: RemoteAttempt, generation: RunningGeneration) -> None:
        started_s = self._clock()
        num_tokens, have_tokens = len(attempt.request.prompt_tokens), attempt.table.hit_tokens
        every = self._snapshot_tokens
        snapshots = places_of_snapshots(self._layout, num_tokens, have_tokens, every)
        asked = TransferRequest(
            transfer_id=attempt.transfer_id,
            identity=self._identity,
            accept_approximate=attempt.accept_approximate,
            request=attempt.request,
            have_tokens=have_tokens,
            want_logits=attempt.want_logits,
            codec=self._options.kv_codec,
            capability=secrets.token_hex(CAPABILITY_BYTES),
            credit_bytes=self._layout.bytes_needed(num_tokens, have_tokens)
            + bytes_of_places(self._layout, snapshots),
            snapshot_tokens=every if snapshots else 0,
            deadline_s=attempt.local_estimate_s,
        )
        pull = Pull(
            layout=self._layout,
            table=attempt.table,
            num_tokens=num_tokens,
            have_tokens=have_tokens,
            snapshot_tokens=asked.snapshot_tokens,
        )
        reception = Reception(pull, attempt, generation, self._vocab_size, self._clock)
        numbers = kv_numbers(self._layout, self._identity)
        try:
            async with attempt.peer.client.pull(asked, reception, numbers=numbers) as pulling:
                self._compare_prefixes(attempt)
                await self._receive(pulling, reception, attempt, generation, started_s)
                if pulling.is_finished and not pulling.acknowledge():
                    self._spawn(attempt.peer.acknowledge(asked))
        finally:
            if not reception.is_done:
                self._spawn(attempt.peer.cancel(attempt.transfer_id))

    def _compare_prefixes(self, attempt: RemoteAttempt) -> None:
        """Raise LacksPrefix if a peer that must compute what is here needs longer than we for the rest."""
        have_tokens = attempt.table.hit_tokens
        if attempt.peer_hit_tokens >= have_tokens:
            return
        work_s = least_work_s(
            attempt.peer.view,
            self._layout,
            num_tokens=len(attempt.request.prompt_tokens),
            have_tokens=have_tokens,
            peer_hit_tokens=attempt.peer_hit_tokens,
            snapshot_tokens=self._snapshot_tokens,
        )
        if not is_worth_waiting(work_s, attempt.local_estimate_s):
            raise LacksPrefix(
                f"it has {attempt.peer_hit_tokens} of our {have_tokens} tokens and needs {work_s:.1f} s, "
                f"we {attempt.local_estimate_s:.1f} s"
            )

    async def _receive(
        self,
        pulling: Pulling,
        reception: Reception,
        attempt: RemoteAttempt,
        generation: RunningGeneration,
        started_s: float,
    ) -> None:
        monitor = self._monitor(attempt, started_s)
        num_counted = num_kv_counted = 0
        try:
            while not pulling.is_finished:
                await pulling.step()
                attempt.peer.num_kv_bytes += attempt.num_kv_bytes - num_kv_counted
                num_kv_counted = attempt.num_kv_bytes
                self._metrics.transfer_bytes("received", attempt.num_page_bytes - num_counted)
                num_counted = attempt.num_page_bytes
                if generation.is_answered and not reception.lacks_logits:
                    return
                self._judge(monitor, reception, attempt)
        finally:
            self._metrics.transfer_bytes("received", attempt.num_page_bytes - num_counted)
        attempt.outcome = "completed"
        if attempt.rates is not None and attempt.num_kv_bytes:
            wire_fraction = attempt.num_page_bytes / attempt.num_kv_bytes
            attempt.rates = replace(attempt.rates, wire_fraction=wire_fraction)

    def _monitor(self, attempt: RemoteAttempt, started_s: float) -> TransferMonitor:
        num_tokens, have_tokens = len(attempt.request.prompt_tokens), attempt.table.hit_tokens
        layout = self._layout
        return TransferMonitor(
            started_s=started_s,
            num_tokens=num_tokens,
            tokens_done=attempt.peer_hit_tokens,
            num_kv_bytes=layout.bytes_needed(num_tokens, have_tokens),
            num_streamed_bytes=layout.streamed_bytes(num_tokens, have_tokens),
            local_estimate_s=attempt.local_estimate_s,
            stall_timeout_s=self._options.stall_timeout_s,
        )

    def _judge(
        self, monitor: TransferMonitor, reception: Reception, attempt: RemoteAttempt
    ) -> None:
        if not reception.has_news:
            return
        reception.has_news = False
        now_s = self._clock()
        monitor.progressed(
            now_s=now_s,
            num_bytes=attempt.num_kv_bytes,
            tokens_done=reception.tokens_done,
            tokens_ahead=reception.tokens_ahead,
            num_link_bytes=attempt.peer.num_kv_bytes,
        )
        if (times := attempt.times) is not None:
            monitor.computed(  # nothing was later than its word of it
                began_s=min(now_s, attempt.accepted_s + times.begun_s),
                ended_s=min(now_s, attempt.accepted_s + times.computed_s),
                num_tokens=times.num_engine_tokens if times.num_tokens else 0,
            )
        attempt.rates = monitor.rates(now_s)
        match monitor.verdict(now_s):
            case "stuck":
                raise TransferTimeout(f"{attempt.num_page_bytes} bytes so far, nothing moves")
            case "slower_than_local":
                raise TooSlow(f"{monitor.time_left_s(now_s):.1f} s left, a local prefill is faster")
            case "wait":
                return
