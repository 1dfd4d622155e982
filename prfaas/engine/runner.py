"""Runs submissions on the model: asks the batcher, runs one ragged forward, draws, tells.

One thread calls everything except `num_layers_run`. A request's life:

1. `submit` checks it and queues its prompt as one sequence.
2. Admission makes a working copy and imports what the pages hold.
3. Forwards compute the prompt. Blocks are copied into pages as each layer finishes.
4. After the prompt, the first token of every choice is drawn and the sequence splits into one for
   each choice that goes on.
5. Choices decode until a stop token or their length; RequestEnded follows the last.
6. Of a model with states the one at the last block boundary of an answer is cached as it ends.

A preempted sequence goes back to 2 with its KV in pages, or to be computed again.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from prfaas.cache.prefix import PrefixCache
from prfaas.clock import Clock
from prfaas.engine.batcher import Batcher
from prfaas.engine.capacity import check_snapshot_tokens, max_context_tokens
from prfaas.engine.choices import draw_first_tokens, draw_token, first_logits
from prfaas.engine.forward import Drawable, Forward
from prfaas.engine.options import EngineOptions
from prfaas.engine.rate import StepTimes
from prfaas.engine.sampler import Float32s, Sampler
from prfaas.engine.sequence import (
    RequestState,
    SequenceState,
    check_states,
    check_submission,
    new_choice,
    new_prompt,
    new_request,
)
from prfaas.engine.sharing import share_prefixes
from prfaas.engine.step_plan import StepPlan
from prfaas.engine.submission import EngineEvent, EngineLoad, Submission
from prfaas.engine.working_copies import WorkingCopies
from prfaas.errors import BadRequest
from prfaas.log import get_logger
from prfaas.types import RequestEnded

if TYPE_CHECKING:
    from prfaas.engine.model import Model


class Runner:
    """The engine: takes submissions, gives events.

    Args:
        model: one runner uses it at a time.
        cache: where hits come from and finished blocks go; of the model's layout.
        options: the limits.
        clock: seconds, for what steps take only.
        snapshot_tokens: windows and states are kept at its multiples in every prompt; 0: nowhere.

    Raises:
        ConfigError: options that do not fit the model or each other.
    """

    def __init__(
        self,
        *,
        model: "Model",
        cache: PrefixCache,
        options: EngineOptions,
        clock: Clock,
        snapshot_tokens: int = 0,
    ) -> None:
        self.num_layers_run = 0
        """Goes up with every layer of every forward; other threads read it as a heartbeat."""
        self._model = model
        self._cache = cache
        self._layout = cache.layout
        check_snapshot_tokens(snapshot_tokens, self._layout.block_tokens)
        self._snapshot_tokens = snapshot_tokens
        self._copies = self._new_copies(model)
        self._clock = clock
        self._sampler = Sampler(model.config.vocab_size)
        self._batcher = Batcher(
            options=options,
            block_tokens=cache.layout.block_tokens,
            kv_bytes=model.kv_capacity_bytes,
        )
        self.max_context_tokens = max_context_tokens(model, self._batcher, options)
        """Prompt plus completion; what is longer could never run here."""
        self._keys = itertools.count()
        self._requests: dict[str, RequestState] = {}
        self._sequences: dict[int, SequenceState] = {}
        self._events: list[EngineEvent] = []
        self._step_count = 0
        self._times = StepTimes(options.most_mixed_tokens)

    def _new_copies(self, model: "Model") -> WorkingCopies:
        return WorkingCopies(model, self._cache)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something or return events."""
        return bool(self._requests or self._events)

    def submit(self, submission: Submission) -> None:
        """Queue a request; from now on one hold on its table is the engine's.

        Raises BadRequest or Overloaded, and then takes no hold.
        """
        request = submission.request
        num_prompt = len(request.prompt_tokens)
        if request.request_id in self._requests:
            raise BadRequest(f"request {request.request_id} is already running")
        check_submission(
            submission,
            vocab_size=self._model.config.vocab_size,
            max_context_tokens=self.max_context_tokens,
            block_tokens=self._layout.block_tokens,
        )
        state = new_request(
            submission,
            max_context_tokens=self.max_context_tokens,
            kept_every_tokens=self._snapshot_tokens,
        )
        if not state.open_choices:
            submission.table.release()
            self._events.append(RequestEnded(request_id=request.request_id))
            return
        sequence = new_prompt(next(self._keys), state, self._layout)
        self._batcher.add(
            sequence.key,
            num_tokens=num_prompt,
            num_computed=sequence.resume_tokens,
            max_kv_tokens=num_prompt if submission.prefill_only else state.max_total_tokens - 1,
            has_begun=any(submission.forced_tokens),
        )
        self._requests[request.request_id] = state
        state.publishing.keep_snapshots(submission.table)
        self._enter(sequence)

    def abort(self, request_id: str) -> None:
        """End a request; its RequestEnded comes with the next step. Unknown ids are ignored."""
        state = self._requests.get(request_id)
        if state is not None:
            self._end(state)

    def stop_choice(self, request_id: str, choice_index: int) -> None:
        """End one choice without an event for it. Unknown ones are ignored.

        The request ends with its last choice.
        """
        state = self._requests.get(request_id)
        if state is None or choice_index not in state.open_choices:
            return
        self._close_choice(state, choice_index)

    def set_prefill_share(self, share: float) -> None:
        """Let this share of the steps in which sequences decode carry prefill; raises ValueError."""
        self._batcher.set_prefill_share(share)

    def load(self) -> EngineLoad:
        """Return how busy the engine is."""
        return EngineLoad(
            num_running=self._batcher.num_running,
            num_waiting=self._batcher.num_waiting,
            num_waiting_tokens=self._batcher.num_remaining_tokens,
            kv_used_bytes=self._batcher.used_bytes,
            prefill_tokens_per_s=self._times.prefill_tokens_per_s,
            step_count=self._step_count,
            num_decoding=self._batcher.num_decoding,
            decode_step_s=self._times.decode_step_s,
            prefill_chunk_s=self._times.prefill_chunk_s,
        )

    def check(self) -> None:
        """Re-derive what the engine holds; AssertionError names what is wrong."""
        self._batcher.check()
        check_states(self._requests, self._sequences, self._batcher)

    def step(self) -> list[EngineEvent]:
        """Do one step's work and return what happened, in order.

        A request that fails ends with its error and disturbs no other, except that a forward which
        fails as a whole ends all requests in it.
        """
        began_s = self._clock()
        self._step_count += 1
        if not self._requests:
            return self._take_events()
        plan = self._plan()
        forward = Forward(self._cache)
        for grant in (*plan.decodes, *plan.prefills):
            if grant.key in self._sequences:  # its request has not just failed
                forward.add(self._sequences[grant.key], grant.num_tokens)
        if forward.sequences:
            self._run(forward)
            self._times.add(
                self._clock() - began_s,
                num_prefill_tokens=sum(grant.num_tokens for grant in plan.prefills),
                is_prefill_held_back=plan.is_prefill_held_back,
            )
        return self._take_events()

    def _take_events(self) -> list[EngineEvent]:
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------ submissions

    def _enter(self, sequence: SequenceState) -> None:
        self._sequences[sequence.key] = sequence
        sequence.owner.sequences[sequence.key] = sequence

    # ------------------------------------------------------------ working copies

    def _plan(self) -> StepPlan:
        """Return what to compute next; the working copies for it are there."""
        leaders = share_prefixes(self._sequences.values(), self._batcher, self._layout)
        plan = self._batcher.plan(leaders)
        for key in plan.preempted:
            self._guard(key, self._move_out)
        for reservation in plan.admitted:
            self._guard(reservation.key, partial(self._admit, reservation.capacity_tokens))
        for reservation in plan.grown:
            self._guard(reservation.key, partial(self._grow, reservation.capacity_tokens))
        return plan

    def _admit(self, capacity_tokens: int, sequence: SequenceState) -> None:
        self._copies.make(sequence, capacity_tokens)
        sequence.tell_of_hit(self._layout)
        if sequence.resume_tokens == len(sequence.tokens):  # all of it came from a peer
            self._split(sequence, None)

    def _grow(self, capacity_tokens: int, sequence: SequenceState) -> None:
        assert sequence.kv is not None
        sequence.kv.reserve(capacity_tokens)

    def _move_out(self, sequence: SequenceState) -> None:
        self._batcher.stored(sequence.key, self._copies.end(sequence))

    # ------------------------------------------------------------ the forward

    def _run(self, forward: Forward) -> None:
        """Compute, then let each request go on from its logits."""
        try:
            rows = forward.run(self._model, self._count_layer)
        except Exception as error:  # noqa: BLE001  # nobody in this forward has a result
            for sequence in forward.sequences:
                self._fail(sequence.owner, error)
            return
        for sequence, row_V in zip(forward.sequences, rows, strict=True):
            if sequence.owner.failure is not None:
                self._fail(sequence.owner, sequence.owner.failure)
            else:
                self._guard(sequence.key, partial(self._advance, row_V))

    def _count_layer(self) -> None:
        self.num_layers_run += 1

    def _advance(self, row_V: Drawable, sequence: SequenceState) -> None:
        """Take note of what was computed; at the end of what is known, draw."""
        kv, state = sequence.kv, sequence.owner
        assert kv is not None
        end = kv.num_tokens
        self._batcher.computed(sequence.key, end)
        state.num_prompt_done = max(state.num_prompt_done, min(end, state.num_prompt_tokens))
        if state.submission.sink is not None:
            state.submission.sink.progress(end)
        sequence.table.slide(end)
        if end < len(sequence.tokens):
            return
        if sequence.choice_index is None:
            assert not isinstance(row_V, int)
            self._split(sequence, row_V)
        else:
            assert row_V is not None
            self._go_on(sequence, sequence.choice_index, row_V)

    # ------------------------------------------------------------ tokens

    def _go_on(self, sequence: SequenceState, choice: int, row_V: Float32s | int) -> None:
        """Draw a decoding choice's next token."""
        position, history = len(sequence.tokens), sequence.history
        event = draw_token(
            self._sampler, sequence.owner, choice, row_V, position=position, history=history
        )
        self._events.append(event)
        if event.finish_reason is not None:
            self._close_choice(sequence.owner, choice)
            return
        sequence.append(event.token_id)
        self._batcher.known(sequence.key, len(sequence.tokens))

    def _split(self, prompt: SequenceState, row_V: Float32s | None) -> None:
        """Give each choice its first token and its own sequence; the first takes the prompt's."""
        state = prompt.owner
        events, lines = draw_first_tokens(self._sampler, state, row_V)
        self._events += events
        if state.submission.return_logits:
            assert row_V is not None
            self._events.append(first_logits(state, row_V))
        if state.submission.prefill_only or not lines:
            self._end(state)
            return
        state.open_choices = [choice for choice, _ in lines]
        for choice, completion in lines[1:]:
            self._fork(prompt, choice, completion)
        prompt.choice_index, completion = lines[0]
        prompt.tokens.extend(completion)
        prompt.history = state.new_history(completion)
        self._batcher.known(prompt.key, len(prompt.tokens))

    def _fork(self, prompt: SequenceState, choice: int, completion: tuple[int, ...]) -> None:
        """Start a choice from a copy of the prompt's KV, or let it wait and go on from its pages."""
        sequence = new_choice(next(self._keys), prompt, choice, completion, self._cache)
        capacity_tokens = self._batcher.fork(
            prompt.key,
            sequence.key,
            num_tokens=len(sequence.tokens),
            num_saved=sequence.resume_tokens,
        )
        self._enter(sequence)
        if capacity_tokens is not None:
            self._copies.fork(prompt, sequence, capacity_tokens)

    # ------------------------------------------------------------ ends

    def _close_choice(self, state: RequestState, choice: int) -> None:
        """End a choice; the next turn of a chat starts where it ended, unless there are several."""
        state.open_choices.remove(choice)
        if state.request.num_choices == 1:
            for sequence in state.sequences.values():
                self._copies.keep_end(sequence)
        if not state.open_choices:
            self._end(state)
            return
        for sequence in tuple(state.sequences.values()):
            if sequence.choice_index == choice:
                self._drop(sequence)

    def _guard(self, key: int, work: Callable[[SequenceState], None]) -> None:
        """Do a sequence's work, unless its request has ended; if that fails, the request ends."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        try:
            work(sequence)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is this request's alone
            self._fail(sequence.owner, error)

    def _fail(self, state: RequestState, error: Exception) -> None:
        text, request_id = f"{type(error).__name__}: {error}", state.request.request_id
        if request_id in self._requests:
            get_logger().error("request.failed", request_id=request_id, error=text, exc_info=error)
        self._end(state, text)

    def _end(self, state: RequestState, error: str | None = None) -> None:
        """Let everything go, then tell; a request that has ended is left alone."""
        if self._requests.pop(state.request.request_id, None) is None:
            return
        for sequence in tuple(state.sequences.values()):
            self._drop(sequence)
        self._events.append(
            RequestEnded(
                request_id=state.request.request_id,
                num_tokens_computed=state.num_prompt_done - state.num_prompt_ready,
                error=error,
            )
        )

    def _drop(self, sequence: SequenceState) -> None:
        del self._sequences[sequence.key], sequence.owner.sequences[sequence.key]
        self._batcher.remove(sequence.key)
        sequence.kv = None
        sequence.table.release()
