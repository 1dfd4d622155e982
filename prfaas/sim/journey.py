"""One simulated request on its way, and what is kept of it once it is done."""

from collections import Counter
from dataclasses import dataclass, field, replace

from prfaas.config.traces import TraceRequest
from prfaas.scheduler.forecast import Prompt
from prfaas.scheduler.policies import PolicyReason


@dataclass(slots=True, eq=False, kw_only=True)
class Journey:
    """A request between its arrival and its last token."""

    number: int
    """In the order of arrival."""
    request: TraceRequest
    arrived_s: float
    tokens_left: int
    """To decode, the first one included."""
    num_tokens: int
    """To prefill: the prompt, and after a loss the answer's tokens so far."""
    prompt: Prompt
    ttft_s: float | None = None
    kept_tokens: int = 0
    """Of the prompt's local hit, those that a transfer brought before it was given up."""
    is_remote: bool = False
    """Where its first prefill went."""
    predicted_ttft_s: float = 0.0

    def keep(self, fraction: float) -> None:
        """Let so much of what lacked locally be a hit like any other: a transfer brought it."""
        held = self.prompt.local_hit_tokens
        lacking = self.prompt.num_tokens - held
        tokens = min(int(fraction * lacking), lacking - 1)
        if tokens > 0:
            self.kept_tokens += tokens
            self.prompt = replace(self.prompt, local_hit_tokens=held + tokens)


@dataclass(slots=True, kw_only=True)
class Tally:
    """What happened in a run so far, in the order of arrival where it is a list."""

    num_arrived: int = 0
    num_done: int = 0
    done_s: float = 0.0
    """When the last one was done."""
    ttfts_s: list[float] = field(default_factory=list)
    """In the order of first tokens."""
    errors_s: list[float] = field(default_factory=list)
    """Predicted less actual TTFT of each of these."""
    backlogs: list[int] = field(default_factory=list)
    """Requests in the system as each one arrived, itself among them."""
    num_remote: int = 0
    num_fallbacks: int = 0
    """Remote prefills that were given up for a stalled or slow link."""
    num_remote_sent: int = 0
    """Remote prefills, those that were begun again among them."""
    num_lost: int = 0
    """Prefills and sequences that went with their instance, and were done again."""
    num_movements: int = 0
    """Prefixes that were sent ahead of a prefill."""
    num_moved: int = 0
    """Of these, those that arrived."""
    num_moves_given_up: int = 0
    moved_bytes: float = 0.0
    """Of those that arrived, in both directions."""
    hit_tokens: int = 0
    prompt_tokens: int = 0
    reasons: Counter[PolicyReason] = field(default_factory=Counter)

    @property
    def num_in_flight(self) -> int:
        """Return the requests that have arrived and are not done."""
        return self.num_arrived - self.num_done
