"""Counts and keeps the stories of requests while they are answered, whoever they are answered to."""

from collections.abc import Sequence

from prfaas.clock import Clock
from prfaas.log import get_logger
from prfaas.server.metrics import Metrics
from prfaas.server.records import RecordRing
from prfaas.types import RequestRecord

log = get_logger()


class StoryCounts:
    """Counts one answer: each token, and the end exactly once."""

    def __init__(
        self, metrics: Metrics, records: RecordRing, clock: Clock, *, arrival_s: float
    ) -> None:
        self._metrics = metrics
        self._records = records
        self._clock = clock
        self._arrival_s = arrival_s
        self._last_s: dict[int, float] = {}
        self._has_ended = False

    def token(self, index: int, records: Sequence[RequestRecord]) -> None:
        """Count a token of one choice; the stories are kept from each choice's first one on."""
        now_s = self._clock()
        if index in self._last_s:
            self._metrics.record_token_gap(now_s - self._last_s[index])
        else:
            if not self._last_s:
                self._metrics.record_begun()
            for record in records:
                self._records.add(record)
        self._last_s[index] = now_s

    def finished(self, records: Sequence[RequestRecord]) -> None:
        """Count an answer that is whole."""
        self._end()
        e2e_s = self._clock() - self._arrival_s
        for record in records:
            self._metrics.record_finished(record, e2e_s=e2e_s)
            log.info(
                "request.finished",
                engine_request_id=record.request_id,
                route=record.route,
                reason=record.reason,
                prompt_tokens=record.prompt_tokens,
                tokens_reused=record.tokens_reused,
                tokens_remote=record.tokens_remote,
                bytes_received=record.bytes_received,
                completion_tokens=record.completion_tokens,
                ttft_s=record.ttft_s,
                e2e_s=e2e_s,
            )

    def failed(self, records: Sequence[RequestRecord], reason: str) -> None:
        """Count an answer that ends before it is whole; a later word about it changes nothing."""
        if self._has_ended:
            return
        self._end()
        if not records:
            self._metrics.record_failed(None, reason=reason)
        for record in records:
            self._metrics.record_failed(record, reason=reason)
            self._records.add(record)
        log.info("request.unfinished", reason=reason)

    def _end(self) -> None:
        self._has_ended = True
        if self._last_s:
            self._metrics.record_ended()
