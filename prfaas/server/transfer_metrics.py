"""What both roles ask of whoever counts their transfers."""

from typing import Literal, Protocol

Direction = Literal["received", "sent"]


class TransferMetrics(Protocol):
    """`metrics.Metrics` is one."""

    def transfer_bytes(self, direction: Direction, num_bytes: int) -> None:
        """Count KV bytes as they move; received ones once verified."""
        ...

    def transfer_finished(self, direction: Direction, outcome: str) -> None:
        """Count a transfer that ended: "completed", or what ended it."""
        ...
