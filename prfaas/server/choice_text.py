"""One choice's token events made into the pieces of its answer; pure."""

from collections import deque
from collections.abc import Collection, Sequence

from prfaas.server.openai.answers import Piece, TokenEntry
from prfaas.text.detokenizer import Detokenizer
from prfaas.text.stops import StopMatcher
from prfaas.text.tokenizer import Tokenizer
from prfaas.types import FinishReason, TokenEvent


class ChoiceText:
    """Detokenises, looks for stop strings, and keeps logprobs in step with the text.

    The pieces' texts joined are the answer, whatever the stream of events was cut into. A token's
    entry comes with the piece that holds the beginning of its text; tokens whose text lies wholly
    behind a stop string have none. A token that ends the answer by its id adds neither.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str],
        stop_token_ids: Collection[int],
        first_offset: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._offset = first_offset
        """Where the next character to come out of the detokenizer stands."""
        self._sent = first_offset
        """Characters let through so far."""
        self._pending: deque[TokenEntry] = deque()
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        """Set once the choice has ended; no event may be pushed after that."""

    def push(self, event: TokenEvent) -> Piece:
        """Return what `event` adds; its finish_reason is set on the choice's last piece."""
        assert self.finish_reason is None, "an event after the choice's end"
        self.num_tokens += 1
        is_stop_token = event.finish_reason == "stop" and event.token_id in self._stop_token_ids
        text = ""
        if not is_stop_token:
            text = self._detokenizer.push(event.token_id)
            self._keep_entry(event)
        if event.finish_reason is not None:
            text += self._detokenizer.finish()
        self._offset += len(text)
        text, is_stopped = self._matcher.push(text)
        if event.finish_reason is not None and not is_stopped:
            text += self._matcher.finish()
        self._sent += len(text)
        self.finish_reason = "stop" if is_stopped else event.finish_reason
        return Piece(text=text, entries=self._entries(is_stopped), finish_reason=self.finish_reason)

    def _keep_entry(self, event: TokenEvent) -> None:
        if event.logprobs is None:
            return
        entry = TokenEntry(
            name=self._tokenizer.token_bytes(event.token_id),
            text_bytes=self._tokenizer.text_bytes(event.token_id),
            logprobs=event.logprobs,
            top_names=tuple(
                self._tokenizer.token_bytes(token_id) for token_id, _ in event.logprobs.top
            ),
            text_offset=self._offset,
        )
        self._pending.append(entry)

    def _entries(self, is_stopped: bool) -> tuple[TokenEntry, ...]:
        entries = []
        is_ended_whole = self.finish_reason is not None and not is_stopped
        while self._pending and (is_ended_whole or self._pending[0].text_offset < self._sent):
            entries.append(self._pending.popleft())
        return tuple(entries)
