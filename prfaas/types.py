"""What rooms say to each other: requests in, token events out, and the record of how it went."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]
RouteName = Literal["local", "remote"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are drawn; travels with the request to a prefill peer.

    The noise is a function of (seed, choice index, absolute position, token id), so the same
    parameters draw the same token on every node of one numerics fingerprint.
    """

    max_tokens: int
    seed: int
    """0 <= seed < 2**64; the server gives one to a request that has none."""
    temperature: float = 1.0
    """0 is greedy: the largest logit, ties by the smallest id."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    """None: no logprobs. 0: the drawn token's only. n: also the n most likely tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Drawing one of these ends the answer with "stop"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to continue it, `num_choices` times."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    num_choices: int = 1
    cache_salt: bytes = b""
    """Requests of different salts share no cached block."""
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, of the model's own distribution.

    They are taken from the raw logits, before temperature, penalties and bias.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One drawn token of one choice."""

    request_id: str
    choice_index: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    """Set on the last token of the choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnded:
    """The engine holds nothing more of this request; sent exactly once for each.

    `error` is None when every choice finished or the request was aborted.
    """

    request_id: str
    num_tokens_computed: int = 0
    """Prompt tokens that this engine ran through the model."""
    error: str | None = None


TryOutcome = Literal["running", "completed", "cancelled", "refused", "failed"]
"""cancelled: nobody wanted it any more, or it was a bad request. refused: the node had no room."""


@dataclass(slots=True, kw_only=True)
class Try:
    """One node that a scheduler gave a request to, and what came of it."""

    node: str
    node_reason: str
    """Why that one."""
    reason: str
    """Why it was to be prefilled where it was."""
    prefill_at: str | None
    """None is the node itself."""
    prefix_from: str | None
    waited_s: float
    """Until there was a node for it."""
    num_tokens: int = 0
    """That came from there."""
    outcome: TryOutcome = "running"
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """The story of one request: what every answer can say about itself.

    tokens_reused + tokens_local + tokens_remote = prompt_tokens once the prefill is done.
    """

    request_id: str
    prompt_tokens: int
    route: RouteName = "local"
    reason: str = ""
    """Why this route; after a failed transfer, what failed."""
    tokens_reused: int = 0
    """Prompt tokens neither side had to compute."""
    tokens_local: int = 0
    """Prompt tokens computed here."""
    tokens_remote: int = 0
    """Prompt tokens computed by the peer, and used."""
    bytes_received: int = 0
    exact: bool = True
    peer: str | None = None
    node: str | None = None
    """Who decodes it, if that is another node."""
    node_reason: str | None = None
    """Why that one."""
    retries: int = 0
    """Nodes that it was given to before."""
    tries: list[Try] = field(default_factory=list)
    """At a scheduler: the nodes that it was given to, one after the other."""
    predicted_ttft_s: float | None = None
    ttft_s: float | None = None
    completion_tokens: int = 0
    finish_reasons: dict[int, str] = field(default_factory=dict)
