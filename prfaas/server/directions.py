"""What a scheduler decided about a request, for the node that answers it to obey."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Directions:
    """Where the prompt of one request is prefilled, and whether a prefix is fetched first.

    They stand in for the node's own router. What cannot be obeyed, because a node is gone or full or is
    none to exchange KV with, is done here: directions never fail a request.
    """

    prefill_at: str | None = None
    """The node that prefills it, as "host:port"; None is the one that is directed."""
    reason: str
    """Why there; it becomes the record's."""
    predicted_ttft_s: float | None = None
    prefix_from: str | None = None
    """A node whose cache has more of the prompt than ours: fetched before anything is computed here."""
    prefix_tokens: int = 0
    """Leading tokens that it is believed to have."""

    def __post_init__(self) -> None:
        """Raise ValueError for a count of tokens that no prefix has."""
        if self.prefix_tokens < 0:
            raise ValueError(f"a prefix of {self.prefix_tokens} tokens")
