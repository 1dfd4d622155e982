"""Ends of turns: prefill's own pages of what was answered, made while nobody waits for the engine.

What decode makes of a linear mixer's state has other bits than prefill, so it is not shared, and the
next turn of a chat would compute the answer again. Here an answer is run through the prefill path
once it has ended, from the last state that prefill left in its prompt, up to its last whole block: the
next turn starts there. Whatever a request needs comes first: a snapshot in the making is left, with
what is done of it in the cache, and taken up again from there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prfaas.engine.forward import Forward
from prfaas.engine.sequence import RequestState, SequenceState
from prfaas.engine.submission import Submission, TurnCounts
from prfaas.log import get_logger
from prfaas.types import Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prfaas.cache.prefix import PrefixCache
    from prfaas.engine.model import Model
    from prfaas.engine.working_copies import WorkingCopies

MAX_TURNS = 64
MAX_TURN_TOKENS = 1 << 19
"""Of all that wait; more than one prompt may have is no use, since the oldest goes."""
STEP_TOKENS = 128
"""A request that comes waits for this much at most."""
_NOTHING_DRAWN = SamplingParams(max_tokens=1, seed=0)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A prompt and its answer, cut to whole blocks, whose end is to be cached."""

    tokens: tuple[int, ...]
    salt: bytes

    def is_begun_by(self, prompt: Sequence[int], salt: bytes) -> bool:
        """Return whether `prompt` goes on from here."""
        num_tokens = len(self.tokens)
        return (
            salt == self.salt
            and len(prompt) >= num_tokens
            and prompt[num_tokens - 1] == self.tokens[-1]
            and tuple(prompt[:num_tokens]) == self.tokens
        )


class TurnSnapshots:
    """The turns of one engine that wait for a snapshot of their end. For the engine's thread.

    Args:
        model: whose forwards it runs, while nobody else does.
        cache: where prompts left their states, and turns leave theirs.
        copies: makes working copies; the engine has none while a turn has one.
        count_layer: called after each layer.
    """

    def __init__(
        self,
        *,
        model: Model,
        cache: PrefixCache,
        copies: WorkingCopies,
        count_layer: Callable[[], None],
    ) -> None:
        self.counts = TurnCounts()
        self._model = model
        self._cache = cache
        self._copies = copies
        self._count_layer = count_layer
        self._waiting: deque[_Turn] = deque()
        self._running: SequenceState | None = None
        """Of the first that waits."""
        self._is_draining = False

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something."""
        return bool(self._waiting)

    def add(self, tokens: Sequence[int], salt: bytes, *, prompt_tokens: int) -> None:
        """Queue a prompt of `prompt_tokens` with its answer; the oldest go where there are too many."""
        block_tokens = self._cache.layout.block_tokens
        num_tokens = len(tokens) // block_tokens * block_tokens
        if self._is_draining or num_tokens < prompt_tokens:
            return  # where the prompt is resumed there is a state already
        self._waiting.append(_Turn(tuple(tokens[:num_tokens]), salt))
        while (
            len(self._waiting) > MAX_TURNS
            or sum(len(turn.tokens) for turn in self._waiting) > MAX_TURN_TOKENS
        ):
            self._leave()
            self._waiting.popleft()
            self._count(num_dropped=1)

    def overtake(self, prompt: Sequence[int], salt: bytes) -> None:
        """Make room for a prompt that came; it makes a snapshot of its own end itself."""
        self._leave()
        left = [turn for turn in self._waiting if not turn.is_begun_by(prompt, salt)]
        self._count(num_overtaken=len(self._waiting) - len(left))
        self._waiting = deque(left)

    def drain(self) -> None:
        """Drop all that waits, and whatever comes."""
        self._leave()
        self._is_draining = True
        self._count(num_dropped=len(self._waiting))
        self._waiting.clear()

    def step(self) -> None:
        """Compute the next few tokens of the first that waits; at its end it is cached."""
        try:
            if self._running is None:
                self._running = self._begin(self._waiting[0])
            is_done = self._running is None or self._compute(self._running)
        except Exception as error:  # noqa: BLE001  # nobody waits for it: the next turn computes it
            get_logger().warning("turn.failed", error=f"{type(error).__name__}: {error}")
            self._end()
            self._count(num_dropped=1)
            return
        if is_done:
            self._end()
            self._count(num_made=1)

    def _begin(self, turn: _Turn) -> SequenceState | None:
        """Return a sequence that goes on from the last state of `turn`; None: it is at the end."""
        num_tokens = len(turn.tokens)
        request = Request(
            request_id="turn",
            prompt_tokens=(*turn.tokens, 0),  # the boundary before a next token, whichever it is
            sampling=_NOTHING_DRAWN,
            cache_salt=turn.salt,
        )
        keys = self._cache.block_keys(turn.tokens, turn.salt)
        table = self._cache.lookup(keys, num_tokens + 1, salt=turn.salt, is_counted=False)
        if table.hit_tokens == num_tokens:
            table.release()
            return None
        sequence = SequenceState(
            key=-1,
            owner=RequestState(
                submission=Submission(request=request, table=table),
                max_total_tokens=num_tokens,
                published_tokens=num_tokens,
                open_choices=[],
            ),
            tokens=list(turn.tokens),
            table=table,
            stored_tokens=table.hit_tokens,
            resume_tokens=table.hit_tokens,
        )
        try:
            self._copies.make(sequence, num_tokens)
        except Exception:
            table.release()
            raise
        return sequence

    def _compute(self, sequence: SequenceState) -> bool:
        """Run the next tokens; return whether they were the last."""
        kv, state = sequence.kv, sequence.owner
        assert kv is not None
        block_tokens = self._cache.layout.block_tokens
        step_tokens = max(block_tokens, STEP_TOKENS // block_tokens * block_tokens)
        forward = Forward(self._cache)
        forward.add(sequence, min(step_tokens, len(sequence.tokens) - kv.num_tokens))
        forward.run(self._model, self._count_layer)
        if state.failure is not None:
            raise state.failure
        sequence.table.slide(kv.num_tokens)
        return kv.num_tokens == len(sequence.tokens)

    def _leave(self) -> None:
        """Put what is done of the running one into the cache, and let it go."""
        sequence, self._running = self._running, None
        if sequence is not None:
            self._copies.end(sequence)
            sequence.table.release()

    def _end(self) -> None:
        sequence, self._running = self._running, None
        self._waiting.popleft()
        if sequence is not None:
            sequence.table.release()

    def _count(self, *, num_made: int = 0, num_overtaken: int = 0, num_dropped: int = 0) -> None:
        counts = self.counts
        self.counts = replace(
            counts,
            num_made=counts.num_made + num_made,
            num_overtaken=counts.num_overtaken + num_overtaken,
            num_dropped=counts.num_dropped + num_dropped,
        )

    def check(self) -> None:
        """Assert that only the first that waits is in the making; AssertionError if not."""
        assert len(self._waiting) <= MAX_TURNS
        if self._running is not None:
            assert tuple(self._running.tokens) == self._waiting[0].tokens
            assert self._running.kv is not None
