"""One ragged forward over the next tokens of several sequences, and the pages it fills."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from prfaas.cache.prefix import PrefixCache
from prfaas.cache.spec import CacheLayout
from prfaas.engine.choices import wants_largest
from prfaas.engine.pages import BlockWrite, plan_snapshots, plan_writes
from prfaas.engine.sampler import Float32s
from prfaas.engine.segment import Segment
from prfaas.engine.sequence import RequestState, SequenceState

if TYPE_CHECKING:
    from prfaas.engine.model import Model

Drawable = Float32s | int | None
"""A row of logits, [V]; the id of its largest where nothing else is wanted; None if nothing is."""


class Forward:
    """A forward in the making, then under way; used once."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._sequences: list[SequenceState] = []
        self._segments: list[Segment] = []
        self._writes: dict[int, list[tuple[RequestState, BlockWrite]]] = {}
        """By group."""

    @property
    def sequences(self) -> tuple[SequenceState, ...]:
        """Those added."""
        return tuple(self._sequences)

    def add(self, sequence: SequenceState, num_tokens: int) -> None:
        """Add a running sequence's next tokens and find pages for the blocks they complete."""
        kv, state = sequence.kv, sequence.owner
        assert kv is not None
        start, end = kv.num_tokens, kv.num_tokens + num_tokens
        is_last = end == len(sequence.tokens)
        wants_logits = is_last and (sequence.is_choice or state.needs_first_logits)
        sequence.extend_keys(self._cache, end)
        layout, publishing = self._cache.layout, state.publishing
        snapshots = plan_snapshots(sequence.table, layout, publishing, start=start, end=end)
        writes = plan_writes(kv, sequence.table, layout, publishing, end=end, snapshots=snapshots)
        for write in writes:
            self._writes.setdefault(write.copy.group, []).append((state, write))
        self._sequences.append(sequence)
        self._segments.append(
            Segment(
                kv=kv,
                tokens=sequence.tokens[start:end],
                num_logits=int(wants_logits),
                snapshots=_with_last_boundary(snapshots, layout, start, end),
            )
        )

    def run(self, model: "Model", on_layer: Callable[[], None]) -> list[Drawable]:
        """Compute; return what each sequence's next token is drawn from.

        `on_layer` is called once a layer. Whole blocks are published. A request whose pages could
        not be written has its `failure` set. Raises what the model raises; then nothing was
        computed.
        """

        def write_layer(layer: int) -> None:
            on_layer()
            self._write_layer(layer)

        drawables = iter(self._compute(model, write_layer))
        for writes in self._writes.values():
            for state, write in writes:
                if state.failure is None:
                    write.commit()
        return [next(drawables) if segment.num_logits else None for segment in self._segments]

    def _compute(self, model: "Model", on_layer: Callable[[int], None]) -> Sequence[Float32s | int]:
        """Return what each sequence that wants logits draws from."""
        wanting = [
            sequence
            for sequence, segment in zip(self._sequences, self._segments, strict=True)
            if segment.num_logits
        ]
        # The logits of one row cost about what those of all cost.
        if not wanting or not all(map(wants_largest, wanting)):
            return list(model.forward(self._segments, on_layer=on_layer).numpy())
        found = model.largest(self._segments, on_layer=on_layer)
        return found if isinstance(found, list) else list(found.numpy())

    def _write_layer(self, layer: int) -> None:
        """Copy the blocks that are now complete in this layer; a failure is its request's alone."""
        for group, layer_index in self._cache.layout.groups_of_layer(layer):
            for state, write in self._writes.get(group, ()):
                if state.failure is None:
                    try:
                        write.write(layer, layer_index)
                    except Exception as error:  # noqa: BLE001  # a sink's, most likely
                        state.failure = error


def _with_last_boundary(
    snapshots: tuple[int, ...], layout: CacheLayout, start: int, end: int
) -> tuple[int, ...]:
    """Return the positions with the last block boundary, whose state the working copy keeps."""
    boundary = end // layout.block_tokens * layout.block_tokens
    if not layout.has_states or boundary <= start:
        return snapshots
    return tuple(sorted({*snapshots, boundary}))
