"""Which prompts are worth a remote prefill over a link. Pure.

A remote prefill takes one round trip, then computing and sending side by side, then what can only be
sent at the end: states and windows. A local one takes its tokens. The threshold is the
shortest prompt that is sooner remote; in the paper's terms, the t that the link and the two prefill
rates of a single request suggest, without any load.
"""

import math
import re
from dataclasses import dataclass

MAX_TOKENS = 1 << 20
"""Where the search for a threshold ends."""

_GROUP = re.compile(
    r"(?:(?P<kind>window|state) (?P<size>\d+) )?page (?P<page>\d+) layers (?P<layers>[\d,]+)$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSize:
    """How many bytes of KV a prompt has: S_kv(l)."""

    bytes_per_token: int
    """Of full attention."""
    windows: tuple[tuple[int, int], ...] = ()
    """(window tokens, bytes a token of the window) of each group with one."""
    state_bytes: int = 0
    """Whatever the length."""

    def of(self, num_tokens: int) -> int:
        """Return the bytes that a remote prefill of so many tokens brings."""
        return self.bytes_per_token * num_tokens + self.tail_bytes(num_tokens)

    def tail_bytes(self, num_tokens: int) -> int:
        """Return those of them that are final only at the prompt's end: states and windows."""
        windows = sum(min(num_tokens, window) * size for window, size in self.windows)
        return self.state_bytes + windows


def kv_size(layout: str, block_tokens: int) -> KvSize:
    """Return the S_kv of a layout in its canonical spelling, as a handshake tells it.

    Raises ValueError for a text that is no layout.
    """
    bytes_per_token = state_bytes = 0
    windows: list[tuple[int, int]] = []
    for group in layout.partition(": ")[2].split("; "):
        found = _GROUP.search(group)
        if found is None:
            raise ValueError(f"{layout!r} is not the layout of a cache")
        num_layers = found["layers"].count(",") + 1
        token_bytes = num_layers * int(found["page"]) // block_tokens
        match found["kind"]:
            case "window":
                windows.append((int(found["size"]), token_bytes))
            case "state":
                state_bytes += num_layers * int(found["size"])
            case _:
                bytes_per_token += token_bytes
    return KvSize(bytes_per_token=bytes_per_token, windows=tuple(windows), state_bytes=state_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """What a remote prefill runs at."""

    link_bytes_per_s: float
    rtt_s: float
    peer_tokens_per_s: float
    """Prefill rate of the peer; infinite counts the link alone."""

    def remote_s(self, kv: KvSize, num_tokens: int) -> float:
        """Return the seconds until the KV of a prompt is here."""
        tail_bytes = kv.tail_bytes(num_tokens)
        stream_s = (kv.of(num_tokens) - tail_bytes) / self.link_bytes_per_s
        compute_s = num_tokens / self.peer_tokens_per_s
        return self.rtt_s + max(compute_s, stream_s) + tail_bytes / self.link_bytes_per_s


def threshold_tokens(
    kv: KvSize, rates: LinkRates, local_tokens_per_s: float, *, block_tokens: int
) -> int | None:
    """Return the least whole number of blocks from which on a remote prefill is the sooner one.

    None if there is none up to MAX_TOKENS.
    """

    def is_sooner(num_blocks: int) -> bool:
        num_tokens = num_blocks * block_tokens
        return rates.remote_s(kv, num_tokens) < num_tokens / local_tokens_per_s

    last = MAX_TOKENS // block_tokens
    if not is_sooner(last):
        return None
    # Local time grows in a straight line from zero. Remote time begins above it, and its slope only
    # falls once the windows are full: the lines cross once, so the crossing can be halved down to.
    low, high = 0, last
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_sooner(middle) else (middle, high)
    return high * block_tokens


def break_even_tokens_per_s(kv: KvSize, rates: LinkRates, num_tokens: int) -> float:
    """Return the local prefill rate at which a prompt takes as long here as there."""
    remote_s = rates.remote_s(kv, num_tokens)
    return math.inf if remote_s <= 0 else num_tokens / remote_s
