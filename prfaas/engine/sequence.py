"""What the engine knows of a running request: its sequences, their tokens and their KV."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prfaas.cache.block_table import BlockTable
from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import CacheLayout, replay_boundary
from prfaas.engine.pages import Publishing, announce_hit
from prfaas.engine.sampler import TokenHistory, uses_history
from prfaas.engine.submission import Submission
from prfaas.errors import BadRequest
from prfaas.types import FinishReason, Request

if TYPE_CHECKING:
    from prfaas.engine.batcher import Batcher
    from prfaas.engine.sequence_kv import SequenceKv


def check_submission(
    submission: Submission, *, vocab_size: int, max_context_tokens: int, block_tokens: int
) -> None:
    """Raise BadRequest for what the client or the peer must change."""
    request, sampling = submission.request, submission.request.sampling
    num_prompt = len(request.prompt_tokens)
    if not num_prompt:
        raise BadRequest("the prompt is empty", param="prompt")
    if num_prompt >= max_context_tokens:
        raise BadRequest(
            f"the prompt has {num_prompt} tokens; the context takes {max_context_tokens}, "
            "with at least one to answer",
            code="context_length_exceeded",
        )
    if not (min(request.prompt_tokens) >= 0 and max(request.prompt_tokens) < vocab_size):
        raise BadRequest(f"a prompt token is outside 0..{vocab_size - 1}", param="prompt")
    if any(not 0 <= token < vocab_size for token, _ in sampling.logit_bias):
        raise BadRequest(f"a token is outside 0..{vocab_size - 1}", param="logit_bias")
    if sampling.max_tokens < 1:
        raise BadRequest(f"max_tokens = {sampling.max_tokens} is less than 1", param="max_tokens")
    if request.num_choices < 1:
        raise BadRequest(f"n = {request.num_choices} is less than 1", param="n")
    if submission.snapshot_tokens < 0 or submission.snapshot_tokens % block_tokens:
        raise BadRequest(
            f"snapshot_tokens = {submission.snapshot_tokens} is not a whole number of blocks of "
            f"{block_tokens} tokens"
        )
    assert len(submission.forced_tokens) in {0, request.num_choices}
    assert not (submission.prefill_only and any(submission.forced_tokens))
    assert submission.prefill_only or submission.sink is None
    assert submission.table.num_tokens <= num_prompt


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceState:
    """One line of tokens: a choice, or before its end the prompt that all choices share."""

    key: int
    """The batcher's name for it."""
    owner: "RequestState"
    tokens: list[int]
    """Prompt, then what was drawn; all but the last have their KV once it decodes."""
    table: BlockTable
    """This sequence has one hold on it."""
    stored_tokens: int
    """While it has no working copy: tokens whose KV the pages hold."""
    resume_tokens: int
    """While it has no working copy: tokens to go on from, at most those stored."""
    choice_index: int | None = None
    """None is the prompt."""
    history: TokenHistory | None = None
    """Kept only for requests with penalties."""
    kv: "SequenceKv | None" = None
    is_new: bool = True
    """It never had a working copy."""
    told_tokens: int = 0
    """The hit that the submission came with."""
    last_key: bytes | None = None
    """The key of the last block that `extend_keys` gave to the table."""

    @property
    def is_choice(self) -> bool:
        """False while it is the prompt of all choices."""
        return self.choice_index is not None

    def append(self, token: int) -> None:
        """Add a token that was drawn."""
        self.tokens.append(token)
        if self.history is not None:
            self.history.append(token)

    def tell_of_hit(self, layout: CacheLayout) -> None:
        """Tell the sink what the cache has beyond the submission's hit; once, as it gets its first tokens."""
        if self.is_new:
            self.is_new = False
            announce_hit(self.table, layout, self.owner.publishing, known_tokens=self.told_tokens)
            if self.owner.submission.sink is not None:
                self.owner.submission.sink.progress(self.resume_tokens)

    def extend_keys(self, cache: PrefixCache, num_tokens: int) -> None:
        """Give the table the keys of all whole blocks within the first `num_tokens` tokens."""
        block_tokens = cache.layout.block_tokens
        known, wanted = self.table.num_keys, num_tokens // block_tokens
        if wanted <= known:
            return
        salt = self.owner.request.cache_salt
        if self.last_key is None:
            keys = cache.block_keys(self.tokens[: wanted * block_tokens], salt)[known:]
        else:
            new_tokens = self.tokens[known * block_tokens : wanted * block_tokens]
            keys = cache.block_keys(new_tokens, salt, after=self.last_key)
        self.last_key = keys[-1]
        self.table.extend_keys(keys)


def new_request(
    submission: Submission,
    *,
    max_context_tokens: int,
    kept_every_tokens: int = 0,
) -> "RequestState":
    """Return the state of a submission that was checked; choices that have ended are not open."""
    request = submission.request
    num_prompt = len(request.prompt_tokens)
    max_total = min(num_prompt + request.sampling.max_tokens, max_context_tokens)
    state = RequestState(
        submission=submission,
        max_total_tokens=max_total,
        kept_every_tokens=kept_every_tokens,
        open_choices=[],
    )
    for choice in range(request.num_choices):
        forced = state.forced(choice)
        if not forced or state.finish_reason(forced[-1], num_prompt + len(forced)) is None:
            state.open_choices.append(choice)
    return state


def new_prompt(key: int, state: "RequestState", layout: CacheLayout) -> SequenceState:
    """Return the prompt of all choices, to go on from what the submission's table holds."""
    table = state.submission.table
    num_computed = min(table.num_tokens, state.num_reusable(layout))
    state.num_prompt_ready = state.num_prompt_done = num_computed
    return SequenceState(
        key=key,
        owner=state,
        tokens=list(state.request.prompt_tokens),
        table=table,
        stored_tokens=table.num_tokens,
        resume_tokens=num_computed,
        told_tokens=table.hit_tokens,
    )


def new_choice(
    key: int,
    prompt: SequenceState,
    choice: int,
    completion: tuple[int, ...],
    cache: PrefixCache,
) -> SequenceState:
    """Return a choice whose first tokens are `completion`, to go on from the prompt's cached pages."""
    salt = prompt.owner.request.cache_salt
    keys = cache.block_keys(prompt.tokens, salt)
    table = cache.lookup(keys, len(prompt.tokens) + 1, salt=salt)
    return SequenceState(
        key=key,
        owner=prompt.owner,
        tokens=[*prompt.tokens, *completion],
        table=table,
        stored_tokens=table.hit_tokens,
        resume_tokens=table.hit_tokens,
        choice_index=choice,
        history=prompt.owner.new_history(completion),
    )


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """One submission between `submit` and its RequestEnded."""

    submission: Submission
    max_total_tokens: int
    """Prompt plus completion, by max_tokens and the context limit."""
    open_choices: list[int]
    """Choices that have not finished, in order."""
    kept_every_tokens: int = 0
    """Distance of the snapshots that every prompt leaves; 0: none."""
    num_prompt_ready: int = 0
    """Prompt tokens that came as pages and are not computed again."""
    num_prompt_done: int = 0
    """Prompt tokens whose KV there is or has been."""
    sequences: dict[int, SequenceState] = field(default_factory=dict)
    """By key: the prompt alone, later one for each open choice."""
    failure: Exception | None = None
    """What went wrong in the running step; ends the request after it."""

    @property
    def request(self) -> Request:
        """What was asked."""
        return self.submission.request

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.submission.request.prompt_tokens)

    @property
    def publishing(self) -> Publishing:
        """What becomes of its pages."""
        return Publishing(
            prompt_tokens=self.num_prompt_tokens,
            kept_every_tokens=self.kept_every_tokens,
            sent_every_tokens=self.submission.snapshot_tokens,
            sink=self.submission.sink,
        )

    @property
    def needs_first_logits(self) -> bool:
        """Whether anything is drawn from, or wants, the logits after the prompt."""
        drawn_by_others = all(self.forced(choice) for choice in self.open_choices)
        return self.submission.return_logits or not drawn_by_others

    def forced(self, choice_index: int) -> tuple[int, ...]:
        """Return the tokens of a choice that were drawn elsewhere."""
        forced = self.submission.forced_tokens
        return forced[choice_index] if forced else ()

    def finish_reason(self, last_token: int, num_tokens: int) -> FinishReason | None:
        """Return why a choice ends with `last_token` as its token number `num_tokens`, if so."""
        if last_token in self.request.sampling.stop_token_ids:
            return "stop"
        return "length" if num_tokens >= self.max_total_tokens else None

    def num_reusable(self, layout: CacheLayout) -> int:
        """Return how many prompt tokens need not be computed, whatever the table holds.

        If the logits after the prompt are wanted, its last token is among those that do; a model
        with states goes back to where one was kept before it.
        """
        num_prompt = self.num_prompt_tokens
        if not self.needs_first_logits:
            return num_prompt
        if layout.has_states:
            return replay_boundary(num_prompt, layout.block_tokens)
        return num_prompt - 1

    def new_history(self, completion: tuple[int, ...]) -> TokenHistory | None:
        """Return the history of a choice, or None if its parameters need none."""
        if not uses_history(self.request.sampling):
            return None
        history = TokenHistory(self.request.prompt_tokens)
        for token in completion:
            history.append(token)
        return history


def check_states(
    requests: Mapping[str, RequestState], sequences: Mapping[int, SequenceState], batcher: "Batcher"
) -> None:
    """Assert that requests, their sequences and the batcher agree."""
    owned = {key: s for r in requests.values() for key, s in r.sequences.items()}
    assert owned == sequences
    running = sum(sequence.kv is not None for sequence in owned.values())
    assert running == batcher.num_running
    assert len(owned) - running == batcher.num_waiting
    for request_id, state in requests.items():
        assert state.request.request_id == request_id
        assert state.open_choices, "a request without open choices has not ended"
        choices = [sequence.choice_index for sequence in state.sequences.values()]
        assert choices == [None] or sorted(c for c in choices if c is not None) == (
            state.open_choices
        )
