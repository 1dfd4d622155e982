"""Which node decodes a request: by its load, and by what its cache saves of the prompt.

Pure: values and node standings in, a choice out. A prefix hit is worth the prefill that it saves, in seconds,
and a busy node costs the seconds that one waits there; so the node with a hot prefix gets what it can
serve, and what is beyond that goes to the next one (PrfaaS §3.4.3: by request, network and cache).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple, get_args

from prfaas.scheduler.router import Reason
from prfaas.scheduler.standing import Refusal, Standing
from prfaas.types import RouteName

KvBytes = Callable[[int, int], int]
"""(tokens of a prompt, leading tokens that are held) -> bytes of KV that lack."""

PlacementReason = Reason | Literal["at_decoder", "pd_prefill", "pd_prefill_earlier"]
"""Why the prefill is where it is. Besides a route's: at_decoder: a node that only decodes computes the little that
lacks. pd_prefill: the node only decodes. pd_prefill_earlier: it could prefill, another one of its cluster sooner."""
DecodeReason = Literal["only", "prefix", "spilled", "least_loaded"]
"""only: there was no choice. prefix: it has the longest hit of all. spilled: one with a longer hit is too busy.
least_loaded: no hit made a difference."""
NoNodeReason = Literal["no_node", "converting", "numerics", "excluded", Refusal]
"""converting: it takes another mode. numerics: no node has the fingerprint in which the answer began. excluded: all were tried."""

PLACEMENT_REASONS: frozenset[str] = frozenset(
    (*get_args(Reason), "at_decoder", "pd_prefill", "pd_prefill_earlier")
)
DECODE_REASONS: frozenset[str] = frozenset(get_args(DecodeReason))
REFUSALS: tuple[NoNodeReason, ...] = (
    "refusing",
    "converting",
    "suspected",
    "not_ready",
    "draining",
    "dead",
    "excluded",
    "numerics",
    "no_node",
)
"""From the node that is nearest to being of use to the one that is furthest."""
NO_NODE_REASONS: frozenset[str] = frozenset(REFUSALS)

FIRST_TOKEN_S = 1e-3
FIRST_STEP_S = 0.03
"""What a token's prefill and a decode step are taken to be as long as no node has shown any."""
CROWD_CONCERN = 0.1
"""Of an answer's time, that a full batch costs beside an empty one: its steps take longer."""
FULL_FRACTION = 0.98
"""Of the pages: with more in use, one waits for others to end."""
ALIKE_FRACTION, ALIKE_S = 0.02, 1e-3
"""Costs that differ by less are alike: predictions are not that good."""
MAX_TOKENS_AT_DECODER = 128
"""So few lacking tokens a node that only decodes computes itself: a transfer takes longer."""
MIN_FETCH_GAIN_S = 0.01
FETCH_CONCERN = 1.0
"""Of the time of a fetched prefix, that it costs others."""
MIN_RETRY_S = 1.0
"""By then a heartbeat may have changed everything."""


def no_bytes(num_tokens: int, held_tokens: int) -> int:
    """Return 0: the KV of a model whose layout is unknown."""
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be placed: a prompt, or the rest of an answer with what was sent of it."""

    num_tokens: int
    hits: Mapping[str, int] = field(default_factory=dict)
    """Node -> leading tokens that its cache has, as far as is known."""
    kv_bytes: KvBytes = no_bytes
    tail_bytes: KvBytes = no_bytes
    """The part of these that only the last token makes: windows and states."""
    force: RouteName | None = None
    numerics: str | None = None
    """The fingerprint that the answer began in; None for one that has not begun."""
    excluded: frozenset[str] = frozenset()
    """Nodes that were tried."""

    def __post_init__(self) -> None:
        """Raise ValueError for an empty prompt."""
        if self.num_tokens < 1:
            raise ValueError(f"a prompt of {self.num_tokens} tokens")

    def hit_of(self, node: str) -> int:
        """Return the leading tokens that a node has; one at least is left to compute."""
        hit = self.hits.get(node, 0)
        return min(max(hit, 0), self.num_tokens - 1) if hit else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a request is decoded, where its prompt is prefilled, and why."""

    decode_at: str
    decode_reason: DecodeReason
    reason: PlacementReason
    prefill_at: str | None = None
    """None is the node that decodes."""
    prefix_from: str | None = None
    """A node whose cached prefix is fetched first."""
    prefix_tokens: int = 0
    predicted_ttft_s: float | None = None
    """None while the rates are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoNode:
    """No node can take the request now."""

    reason: NoNodeReason
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What stands in for what a node has not shown yet: the mean of those that have."""

    token_s: float = FIRST_TOKEN_S
    step_s: float = FIRST_STEP_S
    output_tokens: float = 1.0
    """Of an answer."""


def assumed(standings: Iterable[Standing], output_tokens: float) -> Assumed:
    """Return the means of what is known of these nodes."""
    token_s = [node.token_s for node in standings if node.token_s is not None]
    step_s = [node.step_s for node in standings if node.step_s is not None]
    return Assumed(
        token_s=sum(token_s) / len(token_s) if token_s else FIRST_TOKEN_S,
        step_s=sum(step_s) / len(step_s) if step_s else FIRST_STEP_S,
        output_tokens=max(1.0, output_tokens),
    )


class Source(NamedTuple):
    """The longest prefix that a node of a cluster has."""

    node: str
    num_tokens: int


class Elsewhere:
    """What the rest of a cluster offers to one prompt: prefix and prefill, for a node with a given hit.

    The seconds depend on the node by its hit alone, and hits are few: each is worked out once.
    """

    def __init__(
        self,
        wanted: Wanted,
        *,
        source: Source | None,
        near_byte_s: float,
        prefill_s: Callable[[int], float],
    ) -> None:
        """Begin with nothing worked out.

        Args:
            wanted: the prompt.
            source: the longest prefix in the cluster.
            near_byte_s: of a byte between two nodes of the cluster.
            prefill_s: hit of the decoder -> seconds to the first token of a prefill at another node; inf: none.
        """
        self.source = source
        self._wanted = wanted
        self._near_byte_s = near_byte_s
        self._prefill_s = prefill_s
        self._prefill_s_of: dict[int, float] = {}
        self._fetch_s_of: dict[int, float] = {}

    def prefill_s(self, hit_tokens: int) -> float:
        """Return the seconds to the first token of a prefill elsewhere."""
        seconds = self._prefill_s_of.get(hit_tokens)
        if seconds is None:
            seconds = self._prefill_s_of[hit_tokens] = self._prefill_s(hit_tokens)
        return seconds

    def fetch_s(self, hit_tokens: int) -> float:
        """Return the seconds to fetch the longest prefix of the cluster; inf if it is no longer."""
        if self.source is None or self.source.num_tokens <= hit_tokens:
            return inf
        seconds = self._fetch_s_of.get(hit_tokens)
        if seconds is None:
            num_bytes = self._wanted.kv_bytes(self.source.num_tokens, hit_tokens)
            seconds = self._fetch_s_of[hit_tokens] = num_bytes * self._near_byte_s
        return seconds


def local_s(wanted: Wanted, node: Standing, token_s: float, rest: Elsewhere) -> tuple[float, bool]:
    """Return the seconds to the first token of a prefill at a node, and whether it fetches a prefix first.

    It does where that saves more than it takes; the queue goes on meanwhile.
    """
    hit_tokens = wanted.hit_of(node.name) if wanted.hits else 0
    queue_s = node.load.queue_tokens * token_s
    alone_s = queue_s + (wanted.num_tokens - hit_tokens) * token_s
    if rest.source is None or rest.source.num_tokens <= hit_tokens:
        return alone_s, False
    fetch_s = rest.fetch_s(hit_tokens)
    if (rest.source.num_tokens - hit_tokens) * token_s <= fetch_s + MIN_FETCH_GAIN_S:
        return alone_s, False
    rest_s = (wanted.num_tokens - rest.source.num_tokens) * token_s
    return max(queue_s, fetch_s) + rest_s, True


def crowd_s(node: Standing, guess: Assumed) -> float:
    """Return what the sequences at a node cost one more: longer steps, and the wait for a place."""
    answer_s = (node.step_s or guess.step_s) * guess.output_tokens
    share = node.load.num_active / node.max_running
    seconds = CROWD_CONCERN * answer_s * max(share, node.pages_used)
    if node.pages_used > FULL_FRACTION:
        seconds += answer_s / max(1, node.load.num_active)
    return seconds + slot_wait_s(node, guess)


def slot_wait_s(node: Standing, guess: Assumed) -> float:
    """Return the seconds until one more sequence has a place in a node's batch: they end one after the other."""
    num_ahead = node.load.num_active - node.max_running + 1
    if num_ahead <= 0:
        return 0.0
    answer_s = (node.step_s or guess.step_s) * guess.output_tokens
    return num_ahead * answer_s / node.max_running


class Choice(NamedTuple):
    """A node for a request, and why."""

    node: Standing
    reason: DecodeReason


def choose(
    wanted: Wanted,
    standings: Iterable[Standing],
    rests: Mapping[str, Elsewhere],
    guess: Assumed,
    now_s: float,
) -> Choice | NoNode:
    """Return the decoder of the least cost; of those alike the one with more of the prefix, then of fewer requests.

    Of equal ones the one that was not chosen for longest, then by name. A node whose heartbeat is late, or
    that has to show first that it works, is chosen only if there is no other.
    """
    first: list[tuple[float, Standing]] = []
    second: list[Standing] = []
    for node in standings:
        if now_s > node.clear_until_s or not node.can_decode or wanted.excluded or wanted.numerics:
            if decode_refusal(wanted, node, now_s) is not None:
                continue
            if node.is_second_choice(now_s):
                second.append(node)
                continue
        first.append((cost_s(wanted, node, rests[node.heartbeat.cluster], guess), node))
    if not first:
        if not second:
            return no_node(wanted, standings, now_s)
        first = [
            (cost_s(wanted, node, rests[node.heartbeat.cluster], guess), node) for node in second
        ]
    least_s = min(cost for cost, _ in first)
    limit_s = least_s + max(ALIKE_FRACTION * least_s, ALIKE_S)
    alike = [node for cost, node in first if cost <= limit_s]
    hit_of = wanted.hit_of
    best = min(
        alike,
        key=lambda node: (
            -hit_of(node.name),
            node.load.num_active / node.max_running,
            node.last_chosen,
            node.name,
        ),
    )
    return Choice(best, _reason(wanted, best, [node for _, node in first]))


def cost_s(wanted: Wanted, node: Standing, rest: Elsewhere, guess: Assumed) -> float:
    """Return the seconds to the first token if a node decodes, wherever the prefill is, and what the crowd costs."""
    token_s = node.token_s if node.token_s is not None else guess.token_s
    hit_tokens = wanted.hit_of(node.name) if wanted.hits else 0
    there_s = rest.prefill_s(hit_tokens)
    crowded_s = crowd_s(node, guess)
    is_little = wanted.num_tokens - hit_tokens <= MAX_TOKENS_AT_DECODER
    if node.only_decodes and there_s < inf and not is_little:
        return there_s + crowded_s
    here_s, fetches = local_s(wanted, node, token_s, rest)
    if fetches:  # it takes pages and a link, too, that others want
        here_s += FETCH_CONCERN * rest.fetch_s(hit_tokens)
    return min(here_s, there_s) + crowded_s


def decode_refusal(wanted: Wanted, node: Standing, now_s: float) -> NoNodeReason | None:
    """Return why a node cannot decode the request now, or None."""
    if node.heartbeat.role != "pd":
        return "no_node"
    if wanted.numerics is not None and node.numerics != wanted.numerics:
        return "numerics"
    if node.name in wanted.excluded:
        return "excluded"
    refusal = node.refusal(now_s)
    if refusal is None and not node.can_decode:
        return "converting" if node.wanted_mode is not None else "no_node"
    return refusal


def prefill_refusal(wanted: Wanted, node: Standing, now_s: float) -> NoNodeReason | None:
    """Return why KV of a node cannot go into the answer, or it cannot be asked for any now; None if it can."""
    if wanted.numerics is not None and node.numerics != wanted.numerics:
        return "numerics"
    return "excluded" if node.name in wanted.excluded else node.refusal(now_s)


def no_node(wanted: Wanted, standings: Iterable[Standing], now_s: float) -> NoNode:
    """Return why no node decodes: the reason of the one nearest to being of use, and how long that may last."""
    reasons: list[tuple[NoNodeReason, Standing]] = [
        (decode_refusal(wanted, node, now_s) or "no_node", node) for node in standings
    ]
    met = {reason for reason, _ in reasons}
    reason: NoNodeReason = next((each for each in REFUSALS if each in met), "no_node")
    waits = [node.retry_after_s(now_s) for each, node in reasons if each == reason]
    return NoNode(reason=reason, retry_after_s=max(MIN_RETRY_S, min(waits, default=0.0)))


def _reason(wanted: Wanted, best: Standing, choices: list[Standing]) -> DecodeReason:
    if len(choices) == 1:
        return "only"
    if not wanted.hits:
        return "least_loaded"
    longest = max(wanted.hit_of(node.name) for node in choices)
    if not longest:
        return "least_loaded"
    return "prefix" if wanted.hit_of(best.name) == longest else "spilled"
