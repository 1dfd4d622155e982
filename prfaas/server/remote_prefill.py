"""One try to have a prompt prefilled by the peer: ask, receive, verify, and say how it went."""

import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from prfaas.cache.block_table import BlockTable
from prfaas.cache.spec import CacheLayout
from prfaas.clock import Clock
from prfaas.errors import (
    IncompatiblePeer,
    Overloaded,
    PromptRefused,
    ProtocolError,
    TransferError,
    TransferTimeout,
)
from prfaas.log import get_logger
from prfaas.scheduler.monitor import TransferMonitor, TransferRates
from prfaas.scheduler.router import FIRST_BACKOFF_S, Outcome
from prfaas.server.generation import RunningGeneration
from prfaas.server.peer import Peer
from prfaas.server.pull import Pull, kv_numbers
from prfaas.server.transfer_metrics import TransferMetrics
from prfaas.transport.handshake import Identity
from prfaas.transport.messages import TransferRequest, parse_first_tokens, parse_totals
from prfaas.transport.options import TransportOptions
from prfaas.transport.stream import FrameStream
from prfaas.transport.wire import Frame, FrameType, decode_progress
from prfaas.types import Request


@dataclass(slots=True, kw_only=True)
class RemoteAttempt:
    """What one try was for and what became of it; `failure` is None as long as nothing failed."""

    request: Request
    """As it is sent: a peer keeps its pages under its own numerics."""
    table: BlockTable
    salt: bytes
    """Of the table's keys: the request's, or one that names an approximate peer's numerics, a lossy codec
    or both."""
    is_exact: bool
    """What arrives has this node's own bits."""
    accept_approximate: bool
    """The peer's numerics may be others than ours: the salt names them."""
    want_logits: bool
    local_estimate_s: float | None
    """Seconds that a local prefill would take; None is unknown."""
    is_accepted: bool = False
    peer_hit_tokens: int = 0
    num_page_bytes: int = 0
    """As they crossed the link."""
    num_kv_bytes: int = 0
    """What they decode to."""
    outcome: Outcome = "cancelled"
    detail: str = ""
    """What the outcome alone does not say."""
    retry_after_s: float = FIRST_BACKOFF_S
    """An overloaded peer's wish."""
    rates: TransferRates | None = None
    transfer_id: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def has_failed(self) -> bool:
        """The prompt must be prefilled here."""
        return self.outcome not in ("completed", "cancelled")

    @property
    def base_tokens(self) -> int:
        """Prompt tokens that neither side had to compute."""
        return max(self.table.hit_tokens, self.peer_hit_tokens)


class RemotePrefiller:
    """Runs attempts at one peer."""

    def __init__(
        self,
        *,
        peer: Peer,
        identity: Identity,
        layout: CacheLayout,
        vocab_size: int,
        options: TransportOptions,
        metrics: TransferMetrics,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._peer = peer
        self._identity = identity
        self._layout = layout
        self._vocab_size = vocab_size
        self._options = options
        self._metrics = metrics
        self._clock = clock
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
        except Overloaded as error:
            attempt.retry_after_s = error.retry_after_s
            self._fail(attempt, "peer_overloaded", error)
        except PromptRefused as error:
            self._fail(attempt, "prompt_refused", error)
        except IncompatiblePeer as error:
            self._fail(attempt, "peer_incompatible", error)
        except _TooSlow as error:
            self._fail(attempt, "slower_than_local", error)
        except TransferTimeout as error:
            self._fail(attempt, "peer_stuck", error)
        except TransferError as error:
            self._fail(attempt, "transfer_failed" if attempt.is_accepted else "peer_down", error)
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

    def _fail(
        self, attempt: RemoteAttempt, outcome: Outcome, error: TransferError | Overloaded
    ) -> None:
        attempt.outcome, attempt.detail = outcome, str(error)
        if outcome not in ("peer_overloaded", "prompt_refused", "slower_than_local"):
            self._peer.doubt()

    async def _run(self, attempt: RemoteAttempt, generation: RunningGeneration) -> None:
        is_streaming = False
        started_s = self._clock()
        try:
            accepted = await self._peer.client.open(
                TransferRequest(
                    transfer_id=attempt.transfer_id,
                    identity=self._identity,
                    accept_approximate=attempt.accept_approximate,
                    request=attempt.request,
                    have_tokens=attempt.table.hit_tokens,
                    want_logits=attempt.want_logits,
                    codec=self._options.kv_codec,
                )
            )
            attempt.is_accepted = True
            attempt.peer_hit_tokens = accepted.hit_tokens
            pull = Pull(
                layout=self._layout,
                table=attempt.table,
                num_tokens=len(attempt.request.prompt_tokens),
                have_tokens=attempt.table.hit_tokens,
            )
            async with self._peer.client.stream(
                attempt.transfer_id,
                accepted.capability,
                pull.resolve,
                codec=self._options.kv_codec,
                numbers=kv_numbers(self._layout, self._identity),
            ) as stream:
                is_streaming = True
                await self._receive(stream, pull, attempt, generation, started_s)
        finally:
            if not is_streaming:
                self._spawn(self._cancel_at_peer(attempt.transfer_id))

    async def _cancel_at_peer(self, transfer_id: str) -> None:
        try:
            await self._peer.client.cancel(transfer_id)
        except TransferError as error:
            # Its lease ends the transfer there.
            get_logger().debug("transfer.cancel_lost", transfer_id=transfer_id, error=str(error))

    async def _receive(
        self,
        stream: FrameStream,
        pull: Pull,
        attempt: RemoteAttempt,
        generation: RunningGeneration,
        started_s: float,
    ) -> None:
        reception = _Reception(pull, attempt, generation, self._vocab_size)
        monitor = self._monitor(attempt, started_s)
        while not reception.is_done:
            frame = await stream.next_frame(self._options.stall_timeout_s)
            if frame is None:
                raise TransferError("the peer closed the stream before its end")
            reception.take(frame)
            if frame.header.type is FrameType.PAGE:
                self._metrics.transfer_bytes("received", frame.header.length)
            if generation.is_answered and not reception.lacks_logits:
                return
            self._judge(monitor, reception, attempt)
        attempt.outcome = "completed"
        try:
            await stream.acknowledge(self._options.stall_timeout_s)
        except TransferError as error:
            # All is here and verified; the sender's lease lets its pages go.
            get_logger().debug(
                "transfer.ack_lost", transfer_id=attempt.transfer_id, error=str(error)
            )

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
        self, monitor: TransferMonitor, reception: "_Reception", attempt: RemoteAttempt
    ) -> None:
        now_s = self._clock()
        monitor.progressed(
            now_s=now_s,
            num_bytes=attempt.num_kv_bytes,
            tokens_done=reception.tokens_done,
            tokens_ahead=reception.tokens_ahead,
        )
        attempt.rates = monitor.rates(now_s)
        match monitor.verdict(now_s):
            case "stuck":
                raise TransferTimeout(f"{attempt.num_page_bytes} bytes so far, nothing moves")
            case "slower_than_local":
                raise _TooSlow(
                    f"{monitor.time_left_s(now_s):.1f} s left, a local prefill is faster"
                )
            case "wait":
                return


class _TooSlow(TransferError):
    """A local prefill is predicted to end before the transfer does."""


class _Reception:
    """Takes one transfer's frames in order; raises ProtocolError for those out of order."""

    def __init__(
        self, pull: Pull, attempt: RemoteAttempt, generation: RunningGeneration, vocab_size: int
    ) -> None:
        self.is_done = False
        self.tokens_done = attempt.peer_hit_tokens
        self.tokens_ahead = 0
        self._pull = pull
        self._attempt = attempt
        self._generation = generation
        self._vocab_size = vocab_size

    @property
    def lacks_logits(self) -> bool:
        """Logits were asked for and have not come."""
        return self._attempt.want_logits and self._generation.first_logits is None

    def take(self, frame: Frame) -> None:
        """Apply one frame."""
        match frame.header.type:
            case FrameType.PAGE:
                self._pull.verified(frame)
                self._attempt.num_page_bytes = self._pull.num_page_bytes
                self._attempt.num_kv_bytes = self._pull.num_kv_bytes
                self._generation.record.bytes_received = self._pull.num_page_bytes
            case FrameType.FIRST_TOKENS:
                self._take_first_tokens(frame.payload)
            case FrameType.LOGITS:
                if len(frame.payload) != 4 * self._vocab_size:
                    raise ProtocolError(f"logits of {len(frame.payload)} bytes")
                self._generation.first_logits = frame.payload
            case FrameType.PROGRESS:
                self.tokens_done, self.tokens_ahead = decode_progress(frame.payload)
            case FrameType.END:
                self._take_end(frame.payload)
            case FrameType.ERROR:
                message = frame.payload.decode("utf-8", "replace")[:512]
                raise TransferError(f"the peer failed: {message}")
            case FrameType.ACK:
                raise ProtocolError("ACK from the sender")

    def _take_first_tokens(self, payload: bytes) -> None:
        generation = self._generation
        if generation.has_drawn:
            raise ProtocolError("first tokens came twice")
        events = parse_first_tokens(payload, generation.request)
        for event in events:
            if event.token_id >= self._vocab_size:
                raise ProtocolError(f"token id {event.token_id}, vocabulary of {self._vocab_size}")
        attempt, record = self._attempt, generation.record
        record.tokens_reused = attempt.base_tokens
        record.tokens_remote = record.prompt_tokens - attempt.base_tokens
        record.exact = record.exact and attempt.is_exact
        for event in events:
            generation.put(event)

    def _take_end(self, payload: bytes) -> None:
        if not self._generation.has_drawn:
            raise ProtocolError("the transfer ended without first tokens")
        if self.lacks_logits:
            raise ProtocolError("the transfer ended without logits")
        self._pull.finish(parse_totals(payload))
        self.is_done = True
