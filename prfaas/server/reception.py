"""One try to have a prompt prefilled by a peer, and what becomes of the frames that it brings."""

import secrets
from dataclasses import dataclass, field

from prfaas.cache.block_table import BlockTable
from prfaas.clock import Clock
from prfaas.errors import ProtocolError
from prfaas.scheduler.monitor import TransferRates
from prfaas.scheduler.router import FIRST_BACKOFF_S, Outcome
from prfaas.server.generation import RunningGeneration
from prfaas.server.peer import Peer
from prfaas.server.pull import Pull
from prfaas.transport.messages import (
    PrefillTimes,
    TransferAccepted,
    TransferTotals,
    parse_first_tokens,
)
from prfaas.transport.wire import Frame, FrameHeader, FrameType, decode_progress
from prfaas.types import Request


@dataclass(slots=True, kw_only=True)
class RemoteAttempt:
    """What one try was for and what became of it; `failure` is None as long as nothing failed."""

    peer: Peer
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
    accepted_s: float = 0.0
    """When the peer's word of that came."""
    times: PrefillTimes | None = None
    """As the peer says."""
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


class Reception:
    """Takes one transfer's frames: pages into the table, the rest into attempt and generation.

    Raises ProtocolError for what was not asked for, comes twice or is missing in the end.
    """

    def __init__(
        self,
        pull: Pull,
        attempt: RemoteAttempt,
        generation: RunningGeneration,
        vocab_size: int,
        clock: Clock,
    ) -> None:
        self.is_done = False
        self.has_news = False
        """Something came since whoever reads this set it back."""
        self.tokens_done = 0
        self.tokens_ahead = 0
        self._has_first_tokens = False
        self._num_bytes_before = generation.record.bytes_received
        self._pull = pull
        self._attempt = attempt
        self._generation = generation
        self._vocab_size = vocab_size
        self._clock = clock

    @property
    def lacks_logits(self) -> bool:
        """Logits were asked for and have not come."""
        return self._attempt.want_logits and self._generation.first_logits is None

    def accepted(self, accepted: TransferAccepted) -> None:
        """See FrameConsumer."""
        self._attempt.is_accepted, self._attempt.accepted_s = True, self._clock()
        self._attempt.peer_hit_tokens = self.tokens_done = accepted.hit_tokens

    def resolve(self, header: FrameHeader) -> memoryview | None:
        """See FrameConsumer."""
        return self._pull.resolve(header)

    def take(self, frame: Frame) -> None:
        """See FrameConsumer."""
        self.has_news = True
        match frame.header.type:
            case FrameType.PAGE:
                self._pull.verified(frame)
                self._attempt.num_page_bytes = self._pull.num_page_bytes
                self._attempt.num_kv_bytes = self._pull.num_kv_bytes
                self._generation.record.bytes_received = (
                    self._num_bytes_before + self._pull.num_page_bytes
                )
            case FrameType.FIRST_TOKENS:
                self._take_first_tokens(frame.payload)
            case FrameType.LOGITS:
                if len(frame.payload) != 4 * self._vocab_size:
                    raise ProtocolError(f"logits of {len(frame.payload)} bytes")
                self._generation.first_logits = frame.payload
            case FrameType.PROGRESS:
                tokens_done, self.tokens_ahead = decode_progress(frame.payload)
                self.tokens_done = max(self.tokens_done, tokens_done)
            case _:
                raise ProtocolError(f"{frame.header.type.name} frame from the sender")

    def _take_first_tokens(self, payload: bytes) -> None:
        generation = self._generation
        if self._has_first_tokens:
            raise ProtocolError("first tokens came twice")
        self._has_first_tokens = True
        first = parse_first_tokens(payload, generation.request)
        for event in first.events:
            if event.token_id >= self._vocab_size:
                raise ProtocolError(f"token id {event.token_id}, vocabulary of {self._vocab_size}")
        attempt, record = self._attempt, generation.record
        attempt.times = first.times
        record.tokens_reused = attempt.base_tokens
        record.tokens_remote = record.prompt_tokens - attempt.base_tokens
        record.exact = record.exact and attempt.is_exact
        # Drawn behind the whole prompt: a PROGRESS that says so may never be sent.
        self.tokens_done, self.tokens_ahead = record.prompt_tokens, 0
        drawn_before = generation.drawn_tokens
        for event in first.events:
            if not drawn_before[
                event.choice_index
            ]:  # else it goes on behind what another node drew
                generation.put(event)

    def ended(self, totals: TransferTotals) -> None:
        """See FrameConsumer."""
        if not self._has_first_tokens:
            raise ProtocolError("the transfer ended without first tokens")
        if self.lacks_logits:
            raise ProtocolError("the transfer ended without logits")
        self._pull.finish()
        self.is_done = True
