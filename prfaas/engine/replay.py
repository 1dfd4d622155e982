"""An engine that keeps a profile's time and makes real pages, but computes nothing; torch-free.

It is the runner with another model: the same batcher, the same pages and cache, the same draws. Only
what a forward takes is different: it waits, layer by layer, as long as the profile says, in slices
between which requests come and leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from prfaas.cache.spec import held_blocks
from prfaas.engine.forward import Drawable, Forward
from prfaas.engine.pages import BlockCopy
from prfaas.engine.runner import Runner
from prfaas.engine.working_copies import WorkingCopies

if TYPE_CHECKING:
    from collections.abc import Callable

    from prfaas.cache.prefix import PrefixCache
    from prfaas.clock import Clock
    from prfaas.engine.model import Model
    from prfaas.engine.options import EngineOptions
    from prfaas.engine.replay_kv import ReplayedKv, ReplayModel
    from prfaas.engine.replay_timing import ReplayTiming
    from prfaas.engine.sequence import SequenceState
    from prfaas.engine.submission import EngineEvent

SLICE_S = 0.01
"""The longest that a step waits: an abort is heard after it."""
CATCH_UP_S = 0.005
"""Waking up this late is made good in the next pass; being too slow for the profile is not."""


class ReplayEngine(Runner):
    """Takes submissions and gives events, in the time that a profile says.

    Args:
        model: makes pages and logits.
        cache: of the model's layout.
        options: the limits.
        timing: what prefill and decode take.
        clock: seconds.
        sleep: waits for so many seconds.
        snapshot_tokens: as in Runner.
    """

    def __init__(
        self,
        *,
        model: ReplayModel,
        cache: PrefixCache,
        options: EngineOptions,
        timing: ReplayTiming,
        clock: Clock,
        sleep: Callable[[float], None],
        snapshot_tokens: int = 0,
    ) -> None:
        # It has of a model's face what the runner asks for; the forward is ours.
        super().__init__(
            model=cast("Model", model),
            cache=cache,
            options=options,
            clock=clock,
            snapshot_tokens=snapshot_tokens,
        )
        self._replayed = model
        self._timing = timing
        self._sleep = sleep
        self._pass: _Pass | None = None
        self._free_s: float | None = None
        """When the last pass should have ended, if the engine has been busy ever since."""

    def step(self) -> list[EngineEvent]:
        """Go on for at most SLICE_S with what is being computed; return what happened, in order."""
        if not self._requests:
            return self._take_events()
        if self._pass is None or not self._pass.forward.is_wanted:
            self._pass = self._begin()
        if self._pass is not None and self._wait(self._pass):
            done, self._pass = self._pass, None
            self._free_s = done.due_s(self._replayed.num_layers)
            self._run(done.forward)
            self._times.add(
                done.duration_s,
                num_prefill_tokens=done.num_prefill_tokens,
                is_prefill_held_back=done.is_prefill_held_back,
            )
        if not self._requests:
            self._pass = self._free_s = None
        return self._take_events()

    def _new_copies(self, model: Model) -> WorkingCopies:
        return ReplayCopies(model, self._cache)

    def _begin(self) -> _Pass | None:
        """Return the next pass, or None if there is nothing to compute."""
        began_s = self._clock()
        if self._free_s is not None:
            began_s = max(self._free_s, began_s - CATCH_UP_S)
        self._step_count += 1
        plan = self._plan()
        forward = ReplayForward(self._cache, self._replayed)
        duration_s, num_decodes, num_prefill_tokens = 0.0, 0, 0
        for grant in (*plan.decodes, *plan.prefills):
            if grant.key not in self._sequences:  # its request has just failed
                continue
            sequence = self._sequences[grant.key]
            forward.add(sequence, grant.num_tokens)
            if grant in plan.decodes and sequence.is_choice:
                num_decodes += 1
                continue
            first = _kv(sequence).num_loaded
            start, end = grant.start - first, grant.start + grant.num_tokens - first
            duration_s += self._timing.chunk_s(start, end, len(sequence.tokens) - first)
            num_prefill_tokens += grant.num_tokens
        duration_s += self._timing.step_s(num_decodes)
        if not forward.sequences:
            return None
        return _Pass(
            forward=forward,
            began_s=began_s,
            duration_s=duration_s,
            num_prefill_tokens=num_prefill_tokens,
            is_prefill_held_back=plan.is_prefill_held_back,
            num_layers=self._replayed.num_layers,
        )

    def _wait(self, running: _Pass) -> bool:
        """Finish the layers that are due; return whether all are."""
        until_s = self._clock() + SLICE_S
        while running.num_layers_done < running.num_layers:
            now_s, due_s = self._clock(), running.due_s(running.num_layers_done + 1)
            if now_s < due_s:
                if now_s >= until_s:
                    return False
                self._sleep(min(due_s, until_s) - now_s)
                continue
            running.forward.write_layer(running.num_layers_done)
            running.num_layers_done += 1
            self._count_layer()
        return True


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One forward that is under way."""

    forward: ReplayForward
    began_s: float
    duration_s: float
    num_prefill_tokens: int
    is_prefill_held_back: bool
    num_layers: int
    num_layers_done: int = 0

    def due_s(self, num_layers: int) -> float:
        """Return when the first `num_layers` layers should be done."""
        return self.began_s + self.duration_s * num_layers / self.num_layers


class ReplayForward(Forward):
    """A forward whose layers are written one by one; requests may leave in between."""

    def __init__(self, cache: PrefixCache, model: ReplayModel) -> None:
        super().__init__(cache)
        self._replayed = model
        self._owners: dict[int, SequenceState] = {}
        """By the identity of the working copy."""

    @property
    def is_wanted(self) -> bool:
        """Some sequence of it is still there."""
        return any(sequence.kv is not None for sequence in self._sequences)

    def add(self, sequence: SequenceState, num_tokens: int) -> None:
        """Add a running sequence's next tokens and find pages for the blocks they complete."""
        super().add(sequence, num_tokens)
        self._owners[id(sequence.kv)] = sequence

    def write_layer(self, layer: int) -> None:
        """Fill the pages that this layer completes, but for sequences that have left."""
        self._forget_the_gone()
        self._write_layer(layer)

    def run(self, model: Model, on_layer: Callable[[], None]) -> list[Drawable]:
        """Publish whole blocks; return each sequence's logits, None if not wanted.

        All layers have been written, and counted.
        """
        self._forget_the_gone()
        for writes in self._writes.values():
            for state, write in writes:
                if state.failure is None:
                    write.commit()
        rows: list[Drawable] = []
        for sequence, segment in zip(self._sequences, self._segments, strict=True):
            row_V = None
            if sequence.kv is segment.kv:
                kv = _kv(sequence)
                kv.num_tokens += len(segment.tokens)
                row_V = self._replayed.logits(kv, kv.num_tokens) if segment.num_logits else None
            rows.append(row_V)
        return rows

    def _forget_the_gone(self) -> None:
        """Drop the writes of sequences that have left: their pages may be others' by now."""
        for group, writes in self._writes.items():
            self._writes[group] = [
                (state, write)
                for state, write in writes
                if self._owners[id(write.copy.kv)].kv is write.copy.kv
            ]


class ReplayCopies(WorkingCopies):
    """Working copies without bytes: what comes as pages is compared with what should have come."""

    def load(self, sequence: SequenceState) -> None:
        """Look at every byte of every page that the sequence goes on from."""
        kv, layout = _kv(sequence), self._cache.layout
        kv.tell(sequence.tokens)
        for group, spec in enumerate(layout.groups):
            for block in held_blocks(spec, sequence.resume_tokens, layout.block_tokens):
                pages = sequence.table.pages(group, block)
                assert pages is not None, f"{spec.name} block {block} is not here"
                assert sequence.kv is not None
                in_block = sequence.stored_tokens - block * layout.block_tokens
                BlockCopy(
                    kv=sequence.kv,
                    table=sequence.table,
                    layout=layout,
                    group=group,
                    block=block,
                    num_tokens=min(layout.block_tokens, in_block),
                    pages=pages,
                ).read_all()
        kv.num_tokens = kv.num_loaded = sequence.resume_tokens

    def fork(self, prompt: SequenceState, choice: SequenceState, capacity_tokens: int) -> None:
        """Give `choice`, which has computed as much as `prompt`, a copy of its working copy."""
        super().fork(prompt, choice, capacity_tokens)
        _kv(choice).tell(choice.tokens)


def _kv(sequence: SequenceState) -> ReplayedKv:
    """Return a running sequence's working copy: a replayed model made it."""
    return cast("ReplayedKv", sequence.kv)
