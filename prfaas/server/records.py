"""The stories of the latest requests, for /debug/requests."""

from collections import OrderedDict

from prfaas.types import RequestRecord

MAX_RECORDS = 1024


class RecordRing:
    """The latest `max_records` records by request id; the oldest falls out."""

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._max_records = max_records
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()

    def add(self, record: RequestRecord) -> None:
        """Keep `record` as the latest; it may still change."""
        self._records[record.request_id] = record
        self._records.move_to_end(record.request_id)
        while len(self._records) > self._max_records:
            self._records.popitem(last=False)

    def get(self, request_id: str) -> RequestRecord | None:
        """Return one record, None if it is unknown or fell out."""
        return self._records.get(request_id)

    def latest(self, num_records: int) -> list[RequestRecord]:
        """Return up to `num_records`, the latest first."""
        return list(reversed(self._records.values()))[:num_records]
