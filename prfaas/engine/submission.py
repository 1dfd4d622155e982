"""What goes into the engine and what comes out of it; torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from prfaas.types import RequestEnded, TokenEvent

if TYPE_CHECKING:
    from prfaas.cache.block_table import BlockTable
    from prfaas.types import Request


class PageSink(Protocol):
    """Who wants a prompt's pages as they are made.

    Both methods run on the engine's thread in the middle of a step: they must not block, and what
    they raise fails this request alone.
    """

    def page_ready(self, group: int, index: int, block: int, num_tokens: int, page: int) -> None:
        """Take one written page: number `index` of a block, exact up to `num_tokens` tokens of it.

        Comes for every page that is needed to continue after the prompt and is not part of the
        prefix hit that the submission came with, layer by layer while the forward pass runs, and
        for every page of the submission's snapshots that there was room for. A prompt that was
        preempted may tell of a page again. The pages stay until the table is released, those of
        snapshots alone until `BlockTable.drop_snapshots`.
        """

    def progress(self, num_tokens: int) -> None:
        """Hear that the first `num_tokens` prompt tokens are computed.

        Comes after each step of the prompt, and once before the first with what the cache has of it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request together with the pages that its prefix hit or its transfer found.

    An accepted submission hands one hold on `table` over to the engine, which releases it before
    the RequestEnded event.
    """

    request: Request
    table: BlockTable
    forced_tokens: tuple[tuple[int, ...], ...] = ()
    """Per choice, tokens that a peer or an earlier attempt drew: part of the answer, no event."""
    sink: PageSink | None = None
    prefill_only: bool = False
    """End after the first token of each choice."""
    snapshot_tokens: int = 0
    """Windows and states are also kept at the multiples of this many prompt tokens, a whole number
    of blocks, and the sink hears of them; 0: nowhere."""
    return_logits: bool = False
    """Also send the logits that the first tokens are drawn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLogits:
    """The logits after the prompt's last token."""

    request_id: str
    logits: bytes
    """One little-endian float32 for each vocabulary entry."""


EngineEvent = TokenEvent | RequestEnded | FirstLogits


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy the engine is, between two steps."""

    num_running: int
    """Sequences that hold a working copy of their KV."""
    num_waiting: int
    """Sequences without one: new, or preempted."""
    num_waiting_tokens: int
    """Known tokens not yet computed, of all sequences: the work ahead of a new prompt."""
    kv_used_bytes: int
    prefill_tokens_per_s: float
    """Moving average over the last few thousand tokens, as a new prompt should expect it: what
    waited for its share of the steps counts as slow. 0 before the first prefill."""
    step_count: int
    num_decoding: int = 0
    """Of the running sequences, those that have one token to compute."""
    decode_step_s: float | None = None
    """Moving average of the steps that only decode; None before the first."""
    prefill_chunk_s: float | None = None
    """What a step with a whole chunk of prefill beside decodes takes; None before the first prefill."""
