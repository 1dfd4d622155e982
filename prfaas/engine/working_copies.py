"""Working copies of running sequences: filled from pages, and put back into pages."""

from typing import TYPE_CHECKING

from prfaas.cache.prefix import PrefixCache
from prfaas.engine.pages import drop_private_pages, save_end, save_pages
from prfaas.engine.sequence import SequenceState
from prfaas.log import get_logger

if TYPE_CHECKING:
    from prfaas.engine.model import Model


class WorkingCopies:
    """Makes and ends the working copies of one engine's sequences.

    Args:
        model: whose KV it is.
        cache: of the model's layout.
    """

    def __init__(self, model: "Model", cache: PrefixCache) -> None:
        self._model = model
        self._cache = cache

    def make(self, sequence: SequenceState, capacity_tokens: int) -> None:
        """Give a sequence without one a working copy of its first `resume_tokens` tokens."""
        layout = self._cache.layout
        sequence.kv = self._model.new_kv(
            capacity_tokens=capacity_tokens, block_tokens=layout.block_tokens
        )
        self.load(sequence)
        if sequence.owner.submission.sink is None:
            drop_private_pages(sequence.table, layout)

    def load(self, sequence: SequenceState) -> None:
        """Fill a new working copy from the sequence's pages."""
        from prfaas.engine.page_loading import load_pages  # loads torch

        assert sequence.kv is not None
        load_pages(
            sequence.kv,
            sequence.table,
            self._cache.layout,
            stored_tokens=sequence.stored_tokens,
            num_tokens=sequence.resume_tokens,
        )

    def fork(self, prompt: SequenceState, choice: SequenceState, capacity_tokens: int) -> None:
        """Give `choice`, which has computed as much as `prompt`, a copy of its working copy."""
        assert prompt.kv is not None
        choice.kv = prompt.kv.fork()
        choice.kv.reserve(capacity_tokens)

    def end(self, sequence: SequenceState) -> int:
        """Let a working copy go, into pages if there are enough; return the tokens to resume from.

        Else the sequence keeps only what a lookup finds, and the rest is computed again.
        """
        kv, sequence.kv = sequence.kv, None
        assert kv is not None
        saved = kv.num_tokens
        if not save_pages(kv, sequence.table, self._cache.layout):
            saved = self._look_up(sequence)
        sequence.stored_tokens = sequence.resume_tokens = saved
        return saved

    def keep_end(self, sequence: SequenceState) -> None:
        """Cache what it takes to go on at the last block boundary of what a sequence computed.

        Nobody waits for it: what goes wrong costs the next turn time, and this answer nothing.
        """
        if sequence.kv is None:
            return
        try:
            save_end(sequence.kv, sequence.table, self._cache.layout)
        except Exception as error:  # noqa: BLE001
            get_logger().warning("answer.end_not_cached", error=f"{type(error).__name__}: {error}")

    def _look_up(self, sequence: SequenceState) -> int:
        """Keep only the pages that a lookup finds; return the tokens they hold."""
        if sequence.owner.submission.sink is not None:
            return 0  # the sink reads this very table
        keys = self._cache.block_keys(sequence.tokens, sequence.owner.request.cache_salt)
        table = self._cache.lookup(
            keys, len(sequence.tokens), salt=sequence.owner.request.cache_salt
        )
        sequence.table.release()
        sequence.table, sequence.last_key = table, None
        return table.hit_tokens
